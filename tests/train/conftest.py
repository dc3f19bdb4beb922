"""Tiny data sets: which of four bands of an image is bright is its class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.classification import EchoStage
from train.data import ShardSet, write_shards
from train.data.shard_set import Split
from train.workloads import WORKLOADS, Network, Schedule, Settings

TRAIN, TEST = 320, 60


def banded(count: int, size: int, colours: int | None = None, seed: int = 0) -> Split:
    """Noisy images, grey or with a channel for each colour, and their classes, 0 to 3."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, count)
    shape = (count, size, size) if colours is None else (count, size, size, colours)
    images = rng.integers(0, 100, shape, dtype=np.uint8)
    band = size // 4
    for image, label in zip(images, labels, strict=True):
        image[label * band : (label + 1) * band] += 120
    return images, labels


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dali_echo"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """Shards of grey images of 28 × 28 pixels, in the place of Fashion-MNIST."""
    splits = {"train": banded(TRAIN, 28), "test": banded(TEST, 28, seed=1)}
    return write_shards(tmp_path_factory.mktemp("tiny") / "shards", splits)


@pytest.fixture(scope="session")
def settings() -> Callable[..., Settings]:
    """Settings that suit `tiny`, with changes by name."""

    def make(**changes: Any) -> Settings:
        return Settings(
            **{
                "workload": WORKLOADS["fashion-mnist"],
                "echo_stage": EchoStage.NONE,
                "echo_factor": 1,
                "shuffle_buffer": None,
                "batch_size": 16,
                "epochs": 1,
                "max_steps": None,
                "max_fresh": None,
                "target": None,
                "network": Network.SMALL,
                "learning_rate": 0.03,
                "schedule": Schedule.CONSTANT,
                "eval_every": 100,
                "eval_examples": TEST,
                "seed": 0,
                "device": "cpu",
                **changes,
            }
        )

    return make
