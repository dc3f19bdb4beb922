"""Images that say which sample they are, pipelines over shards of them, and what these emit."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import nvidia.dali.fn as fn
from nvidia.dali import types
from nvidia.dali.pipeline import Pipeline
from PIL import Image

from dali_echo import echo, pipeline_def

BATCH = 32
SAMPLES = 250


def encode(number: int) -> bytes:
    """A JPEG of one colour that holds `number`, below 512, in three base-8 digits."""
    digits = number % 8, number // 8 % 8, number // 64
    image = Image.new("RGB", (12, 10), tuple(digit * 32 + 16 for digit in digits))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95, subsampling=0)
    return file.getvalue()


def decode(image: np.ndarray) -> int:
    """The number of a decoded image of shape (H, W, 3)."""
    red, green, blue = (int(c) // 32 for c in np.asarray(image)[5, 5])
    return red + 8 * green + 64 * blue


def read(shards: Sequence[str], **reader: Any) -> list[Any]:
    """Encoded image and label, as DALI's own reader gives them."""
    return fn.readers.webdataset(paths=list(shards), ext=["jpg", "cls"], name="train", **reader)


@pipeline_def(batch_size=BATCH, num_threads=2, device_id=None, seed=11, prefetch_queue_depth=2)
def echoed(
    shards: Sequence[str], reader: dict[str, Any] | None = None, mark: dict[str, Any] | None = None
) -> Any:
    """Images, labels, and a random number from each side of the mark."""
    jpeg, label = read(shards, **(reader or {}))
    before = fn.random.uniform(range=[0.0, 1.0])
    image = fn.decoders.image(jpeg, device="cpu", output_type=types.RGB)
    image, label, before = echo(image, label, before, **(mark or {}))
    return image, label, before, fn.random.uniform(range=[0.0, 1.0])


def rows(batch: Sequence[Any]) -> list[tuple[int, int, float, float]]:
    """Of one batch: the numbers that image and label hold, and the random numbers."""
    images, labels, before, after = batch
    return [
        (
            decode(np.asarray(images[i])),
            int(bytes(np.asarray(labels[i]))),
            float(np.asarray(before[i])),
            float(np.asarray(after[i])),
        )
        for i in range(len(images))
    ]


def run(pipeline: Pipeline, batches: int) -> list[list[tuple[int, int, float, float]]]:
    """The rows of the first batches."""
    return [rows(pipeline.run()) for _ in range(batches)]


def uses(batches: Iterable[Sequence[tuple[int, int, float, float]]]) -> Counter[tuple[int, float]]:
    """How often each reading of a sample was used. The random number from before tells readings apart."""
    return Counter((image, before) for batch in batches for image, _, before, _ in batch)
