"""Which images DALI's CPU decoder refuses."""

from __future__ import annotations

import io
import warnings

import numpy as np
from nvidia.dali import Pipeline, fn
from nvidia.dali.types import DALIDataType
from PIL import Image, UnidentifiedImageError

_EXTENSIONS = frozenset(
    {"avif", "bmp", "gif", "heic", "jp2", "jpeg", "jpg", "pgm", "png", "pnm", "ppm", "tif", "tiff", "webp"}
)


def is_image(extension: str) -> bool:
    """Whether a component of this (lower-case) extension is an image."""
    return extension.rpartition(".")[2] in _EXTENSIONS


class Decoder:
    """Decodes images by the same operator that a pipeline uses on the CPU."""

    def __init__(self) -> None:
        self._pipeline: Pipeline | None = None

    def complaint(self, image: bytes) -> str | None:
        """Say why an encoded image does not decode to RGB; None if it does.

        An image of more pixels than Pillow's limit on decompression bombs is not tried.
        """
        if not image:
            return "it has no bytes"
        try:
            _open(image)
        except Image.DecompressionBombError as error:
            return str(error)
        except Exception:
            pass  # DALI decides
        return None if self._decodes(image) else f"DALI does not decode it; {_by_pillow(image)}"

    def _decodes(self, image: bytes) -> bool:
        # One at a time: an image that fails in a larger batch can crash the interpreter (DALI 2.4).
        if self._pipeline is None:
            self._pipeline = _pipeline()
        try:
            self._pipeline.feed_input("images", [np.frombuffer(image, np.uint8)])
            self._pipeline.run()
        except RuntimeError:
            self._pipeline = None  # an error ends a pipeline
            return False
        return True


def _pipeline() -> Pipeline:
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        encoded = fn.external_source(name="images", dtype=DALIDataType.UINT8, ndim=1)
        pipeline.set_outputs(fn.decoders.image(encoded))
    pipeline.build()
    return pipeline


def _by_pillow(image: bytes) -> str:
    """What a second decoder says, since DALI's errors give no reason."""
    try:
        opened = _open(image)
        opened.load()
    except UnidentifiedImageError:
        return f"it begins with {image[:16]!r}, which is no image that Pillow knows either"
    except Exception as error:
        return f"Pillow says: {error}"
    return f"Pillow reads it, as {opened.format} of mode {opened.mode}: write it again as JPEG or PNG"


def _open(image: bytes) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Image.open(io.BytesIO(image))
