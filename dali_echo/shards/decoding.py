"""Which images DALI's decoders refuse."""

from __future__ import annotations

import io
import os
import sys
import warnings

import numpy as np
from nvidia.dali import Pipeline, fn
from nvidia.dali.types import DALIDataType
from PIL import Image, UnidentifiedImageError

_EXTENSIONS = frozenset(
    {"avif", "bmp", "gif", "heic", "jp2", "jpeg", "jpg", "pgm", "png", "pnm", "ppm", "tif", "tiff", "webp"}
)


SIZE = 8  # bytes of the number before each image that `serve` is asked about
DECODES, FAILS = b"\1", b"\0"


def is_image(extension: str) -> bool:
    """Whether a component of this (lower-case) extension is an image."""
    return extension.rpartition(".")[2] in _EXTENSIONS


class Decoder:
    """Decodes images by the same operator that a pipeline uses.

    Args:
        device_id: of the GPU, for the decoder that works there.
    """

    def __init__(self, device_id: int | None = None) -> None:
        self._device_id = device_id
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
        return None if self.decodes(image) else f"DALI does not decode it; {by_pillow(image)}"

    def decodes(self, image: bytes) -> bool:
        """Whether an encoded image decodes to RGB."""
        # One at a time: an image that fails in a larger batch can crash the interpreter (DALI 2.4).
        if self._pipeline is None:
            self._pipeline = _pipeline(self._device_id)
        try:
            self._pipeline.feed_input("images", [np.frombuffer(image, np.uint8)])
            self._pipeline.run()
        except RuntimeError:
            self._pipeline = None  # an error ends a pipeline
            return False
        return True


def _pipeline(device_id: int | None) -> Pipeline:
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=device_id, prefetch_queue_depth=1)
    with pipeline:
        encoded = fn.external_source(name="images", dtype=DALIDataType.UINT8, ndim=1)
        device = "cpu" if device_id is None else "mixed"
        pipeline.set_outputs(fn.decoders.image(encoded, device=device))
    pipeline.build()
    return pipeline


def by_pillow(image: bytes) -> str:
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


def serve(device_id: int | None) -> None:
    """Answer whether images decode, from standard input to output, until there are no more."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print
    decoder = Decoder(device_id)
    while size := sys.stdin.buffer.read(SIZE):
        image = sys.stdin.buffer.read(int.from_bytes(size, "big"))
        answers.write(DECODES if decoder.decodes(image) else FAILS)
