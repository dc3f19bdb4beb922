"""webdataset and torchvision in a DataLoader, with a hand-written echo between decode and augmentation.

`DECODE` in the environment says whether images are Pillow's or uint8 tensors while they are augmented.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import webdataset as wds
from serve import BATCH, LIVE, MEAN, SIZE, STD, THREADS, echoed, serve
from torch.utils.data import DataLoader
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

PILLOW = os.environ["DECODE"] == "pillow"


def to_tensor(key: str, data: bytes) -> torch.Tensor | None:
    if not key.endswith("jpg"):
        return None
    return decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)


def batches(shards: list[str], factor: int) -> Iterator[Any]:
    torch.set_num_threads(1)
    augment = v2.Compose(
        [
            v2.RandomResizedCrop(SIZE, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor() if PILLOW else v2.Identity(),
            v2.ToDtype(torch.float32),
            v2.Normalize(MEAN, STD),
        ]
    )
    data = (
        wds.WebDataset(shards, resampled=True)
        .decode("pilrgb" if PILLOW else to_tensor)
        .to_tuple("jpg")
        .map(lambda sample: sample[0])
        .compose(partial(echoed, factor=factor, live=LIVE // THREADS))
        .map(augment)
        .batched(BATCH, collation_fn=torch.stack)
    )
    return iter(DataLoader(data, batch_size=None, num_workers=THREADS))


if __name__ == "__main__":
    serve(batches)
