"""Which images DALI's CPU decoder refuses."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
from nvidia.dali import Pipeline, fn
from nvidia.dali.types import DALIDataType
from PIL import Image, UnidentifiedImageError

_EXTENSIONS = frozenset(
    {"avif", "bmp", "gif", "heic", "jp2", "jpeg", "jpg", "pgm", "png", "pnm", "ppm", "tif", "tiff", "webp"}
)
_BATCH_PIXELS = 1 << 26
_BATCH_IMAGES = 64
_THREADS = 4


def is_image(extension: str) -> bool:
    """Whether a component of this (lower-case) extension is an image."""
    return extension.rpartition(".")[2] in _EXTENSIONS


class Decoder:
    """Decodes images in batches, by the same operator that a pipeline uses on the CPU."""

    def __init__(self) -> None:
        self._pipeline: Pipeline | None = None

    def complaints(self, images: Sequence[bytes]) -> list[str | None]:
        """Say for each encoded image why it does not decode to RGB; None where it does.

        An image of more pixels than Pillow's limit on decompression bombs is not tried.
        """
        sizes, found = map(list, zip(*map(_examine, images), strict=True)) if images else ([], [])
        for batch in _batches([i for i, complaint in enumerate(found) if complaint is None], sizes):
            if self._decodes([images[i] for i in batch]):
                continue
            # An error ends the pipeline without saying which image it was.
            for i in batch:
                if not self._decodes([images[i]]):
                    found[i] = f"DALI does not decode it; {_by_pillow(images[i])}"
        return found

    def _decodes(self, batch: list[bytes]) -> bool:
        if self._pipeline is None:
            self._pipeline = _pipeline()
        try:
            self._pipeline.feed_input("images", [np.frombuffer(image, np.uint8) for image in batch])
            self._pipeline.run()
        except RuntimeError:
            self._pipeline = None
            return False
        return True


def _pipeline() -> Pipeline:
    pipeline = Pipeline(_BATCH_IMAGES, _THREADS, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        encoded = fn.external_source(name="images", dtype=DALIDataType.UINT8, ndim=1)
        pipeline.set_outputs(fn.decoders.image(encoded))
    pipeline.build()
    return pipeline


def _batches(indices: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """Cut into batches that are limited in images and, as decoded images take memory, in pixels."""
    batch: list[int] = []
    for i in indices:
        full = len(batch) == _BATCH_IMAGES or sum(sizes[j] for j in batch) + sizes[i] > _BATCH_PIXELS
        if batch and full:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _examine(image: bytes) -> tuple[int, str | None]:
    """The pixels that the header claims, 0 if that is unknown, and why it must not be decoded."""
    if not image:
        return 0, "it has no bytes"
    try:
        width, height = _open(image).size
    except Image.DecompressionBombError as error:
        return 0, str(error)
    except Exception:
        return 0, None  # DALI decides
    return width * height, None


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
