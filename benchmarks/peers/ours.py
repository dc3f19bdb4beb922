"""dali_echo. `VARIANT` in the environment says which pipeline: see docs/recipes.md."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import nvidia.dali.fn as fn
import torch
from nvidia.dali import types
from serve import BATCH, LIVE, MEAN, SIZE, STD, THREADS, serve
from torch.nn.functional import interpolate

from dali_echo import echo, pipeline_def, read_only, shards
from dali_echo.pytorch import EchoIterator

VARIANT = os.environ["VARIANT"]
pool = ThreadPoolExecutor(THREADS)


def view(photo: np.ndarray, anchor: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """The window of a uint8 (height, width, 3) photo as uint8 (3, SIZE, SIZE)."""
    (y, x), (height, width) = anchor, shape
    window = torch.from_numpy(photo[y : y + height, x : x + width].copy()).permute(2, 0, 1)
    return interpolate(window[None], size=(SIZE, SIZE), mode="bilinear", antialias=True)[0].numpy()


@read_only
def views(*batch: list[np.ndarray]) -> list[np.ndarray]:
    return list(pool.map(view, *batch))


def normalized(image: Any) -> Any:
    return fn.crop_mirror_normalize(
        image, dtype=types.FLOAT, output_layout="CHW", mean=MEAN, std=STD, mirror=fn.random.coin_flip()
    )


@pipeline_def(batch_size=BATCH, num_threads=THREADS, device_id=None, seed=1)
def training(urls: list[str], factor: int) -> Any:
    (jpeg,) = shards.read(urls, ext=["jpg"], name="train")
    image = fn.decoders.image(jpeg, output_type=types.RGB, use_fast_idct=VARIANT != "dali")
    image = echo(image, factor=factor, shuffle_buffer=LIVE)
    if VARIANT == "dali":
        return normalized(fn.random_resized_crop(image, size=[SIZE, SIZE]))
    anchor, shape = fn.random_crop_generator(image.shape()[:2])
    image = fn.python_function(
        image, anchor, shape, function=views, batch_processing=True, output_layouts="CHW"
    )
    if VARIANT == "uint8":
        return fn.flip(image, horizontal=fn.random.coin_flip())
    return normalized(image)


def batches(urls: list[str], factor: int) -> Iterator[torch.Tensor]:
    torch.set_num_threads(1)
    iterator = EchoIterator(training(urls, factor), ["image"], reader_name="train")
    while True:
        for batch in iterator:
            yield batch["image"]


if __name__ == "__main__":
    serve(batches)
