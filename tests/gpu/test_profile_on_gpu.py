"""The profile of a pipeline that decodes and augments on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import nvidia.dali.fn as fn
import pytest
import torch
from nvidia.dali import types

from dali_echo import pipeline_def
from dali_echo.profile import profile
from tests.streams import BATCH, read

pytestmark = pytest.mark.gpu


@pipeline_def(batch_size=BATCH, num_threads=2, device_id=0, seed=11)
def mixed(shards: Sequence[str]) -> Any:
    jpeg, label = read(shards)
    image = fn.decoders.image(jpeg, device="mixed", output_type=types.RGB)
    return fn.random_resized_crop(image, size=[64, 64], device="gpu"), fn.pad(label, shape=[3]).gpu()


def test_every_stage_is_measured(shards: Sequence[str]) -> None:
    devices = []

    def step(batch: dict[str, torch.Tensor]) -> None:
        devices.append({tensor.device for tensor in batch.values()})
        batch["image"].float().sum()

    found = profile(lambda: mixed(shards), step, ["image", "label"], seconds=0)
    assert [stage.name for stage in found.stages] == ["read", "decode", "augment", "transfer", "step"]
    assert all(stage.s_per_sample > 0 for stage in found.stages)
    assert [mark.after for mark in found.marks] == ["read", "decode", "augment", "batch"]
    assert devices[-1] == {torch.device("cuda", 0)}


def test_an_accelerator_that_computes_leaves_nothing_to_gain(shards: Sequence[str]) -> None:
    weights = torch.randn(2048, 2048, device="cuda:0")

    def step(batch: dict[str, torch.Tensor]) -> None:
        product = weights
        for _ in range(400):  # asynchronous: only a profile that waits for the GPU sees it
            product = torch.tanh(product @ weights)

    found = profile(lambda: mixed(shards), step, ["image", "label"], seconds=0)
    assert found.bottleneck == "step"
    assert found.best is None
    assert "the accelerator is the bottleneck (R = 0." in found.advice[0]
