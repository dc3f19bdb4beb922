"""Training on shards with damaged images."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import webdataset

from pipelines.classification import EchoStage
from train.data import ShardSet
from train.errors import TrainError
from train.loop import fit
from train.workloads import OnError, Settings


@pytest.fixture
def damaged(tiny: ShardSet, tmp_path: Path) -> ShardSet:
    """The tiny training set with another shard, half of which does not decode."""
    path = tmp_path / "damaged.tar"
    good = next(iter(webdataset.WebDataset(str(tiny.train[0]), shardshuffle=False)))
    extension = next(extension for extension in ("jpg", "png") if extension in good)
    with webdataset.TarWriter(str(path), encoder=False) as tar:
        for number in range(20):
            image = good[extension] if number % 2 else good[extension][: 40 * number]
            tar.write({"__key__": f"{number:02}", extension: image, "cls": b"0"})
    return replace(tiny, train=[*tiny.train, path])


@pytest.mark.parametrize("stage", [EchoStage.NONE, EchoStage.DECODE])
def test_damaged_images_are_left_out_and_named_once(
    damaged: ShardSet, settings: Callable[..., Settings], tmp_path: Path, stage: EchoStage
) -> None:
    def run(**changes: Any) -> dict[str, Any]:
        chosen = settings(on_error=OnError.SKIP, echo_stage=stage, seed=1, **changes)
        return fit(chosen, damaged, out, checkpoint_every=10, resume=True).summary

    def keys() -> list[str]:
        entries = [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]
        assert all(entry.keys() == {"shard", "key", "reason"} for entry in entries)
        return sorted(entry["key"] for entry in entries)

    out = tmp_path / "out"
    run(max_steps=12)
    summary = run(max_steps=60, epochs=9)
    assert summary["steps"] == 60
    assert summary["skipped_examples"] >= 20
    assert keys() == [f"{number:02}" for number in range(0, 20, 2)]


def test_a_new_run_begins_the_file_anew(
    tiny: ShardSet, settings: Callable[..., Settings], tmp_path: Path
) -> None:
    (tmp_path / "skipped.jsonl").write_text('{"shard": "a", "key": "b", "reason": "c"}\n')
    fit(settings(on_error=OnError.SKIP, max_steps=2), tiny, tmp_path)
    assert not (tmp_path / "skipped.jsonl").exists()


def test_otherwise_the_run_ends_with_the_sample_s_name(
    damaged: ShardSet, settings: Callable[..., Settings], tmp_path: Path
) -> None:
    with pytest.raises(TrainError, match=r"damaged.tar: sample '\d\d': "):
        fit(settings(epochs=3), damaged, tmp_path)
    with pytest.raises(TrainError, match="more than max_errors = 3"):
        fit(settings(epochs=3, on_error=OnError.SKIP, max_errors=3), damaged, tmp_path)
