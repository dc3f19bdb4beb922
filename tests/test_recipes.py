"""The recipe of docs/recipes.md runs, and cuts what DALI's own operator cuts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import nvidia.dali.fn as fn
import pytest
import torch
from PIL import Image

from dali_echo import pipeline_def, read_only, shards
from dali_echo.pytorch import EchoIterator

RECIPE = (Path(__file__).parents[1] / "docs/recipes.md").read_text()


@pytest.fixture
def recipe() -> Iterator[dict[str, Any]]:
    threads = torch.get_num_threads()
    block = re.search(r"^```python\n(.*?)^```$", RECIPE, re.MULTILINE | re.DOTALL)
    assert block
    names: dict[str, Any] = {}
    exec(compile(block[1], "recipes.md", "exec"), names)
    yield names
    names["pool"].shutdown()
    torch.set_num_threads(threads)


@pytest.fixture
def photos(tmp_path: Path) -> str:
    """A shard of 64 smooth photos of 300 × 200 pixels, each another one."""
    y, x = np.mgrid[:200, :300] / 300
    samples = []
    for number in range(64):
        waves = [np.sin(6 * (x * np.cos(a) + y * np.sin(a)) + number) for a in (0.0, 1.0, 2.0)]
        pixels = (127 + 120 * np.stack(waves, axis=-1)).astype(np.uint8)
        file = tmp_path / f"{number}.jpg"
        Image.fromarray(pixels).save(file, quality=95)
        samples.append({"__key__": str(number), "jpg": file.read_bytes(), "cls": number})
    return str(shards.write(samples, f"{tmp_path}/photos-%04d.tar")[0])


def test_it_runs(recipe: dict[str, Any], photos: str) -> None:
    batches = list(EchoIterator(recipe["training"](photos), ["image", "label"], reader_name="train"))
    assert len(batches) == 4  # an epoch is factor × the samples
    for batch in batches:
        assert batch["image"].dtype == torch.uint8
        assert batch["image"].shape == (64, 3, 224, 224)
        assert batch["label"].shape == (64,)


def test_its_windows_are_those_of_random_resized_crop(recipe: dict[str, Any], photos: str) -> None:
    @pipeline_def(batch_size=64, num_threads=2, device_id=None, seed=1)
    def both() -> Any:
        jpeg = shards.read(photos, ext="jpg", name="train")
        photo = fn.decoders.image(jpeg)
        anchor, shape = fn.random_crop_generator(photo.shape()[:2], seed=5)
        ours = fn.python_function(
            photo,
            anchor,
            shape,
            function=read_only(recipe["views"]),
            batch_processing=True,
            output_layouts="CHW",
        )
        return ours, fn.random_resized_crop(photo, size=[224, 224], seed=5)

    ours, theirs = both().run()
    for i in range(64):
        difference = np.float32(ours[i]) - np.float32(theirs[i]).transpose(2, 0, 1)
        assert np.sqrt((difference**2).mean()) < 2, i  # of 255; other windows differ by tens
