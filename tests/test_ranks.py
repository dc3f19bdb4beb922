"""Several ranks, each a real process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.streams import SAMPLES

SCRIPT = """
import json, sys
import nvidia.dali.fn as fn
import torch.distributed as dist
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from dali_echo import echo, pipeline_def, shards
from dali_echo.pytorch import EchoIterator

rank, ranks, store, distributed, factor = json.loads(sys.argv[1])
given = {}
if distributed:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
else:
    given = {"shard_id": rank, "num_shards": ranks}

@pipeline_def(batch_size=16, num_threads=1, device_id=None, seed=11)
def training(urls):
    _, label = shards.read(urls, ext=["jpg", "cls"], name="train", **given)
    before = fn.random.uniform(range=[0.0, 1.0])
    label, before = echo(label, before, factor=factor)
    return label, before, fn.random.uniform(range=[0.0, 1.0])

iterator = EchoIterator(
    training(json.loads(sys.argv[2])), ["label", "before", "after"],
    reader_name="train", last_batch_policy=LastBatchPolicy.PARTIAL,
)
epochs = [[{k: v.tolist() for k, v in batch.items()} for batch in iterator] for _ in range(2)]
print(json.dumps(epochs))
"""

Epochs = list[list[dict[str, list[Any]]]]


def run(shards: Sequence[str], ranks: int, factor: float, store: str, distributed: bool) -> list[Epochs]:
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                SCRIPT,
                json.dumps([rank, ranks, store, distributed, factor]),
                json.dumps(list(shards)),
            ],
            stdout=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    return [json.loads(process.communicate(timeout=120)[0]) for process in processes]


@pytest.mark.parametrize("distributed", [True, False])
def test_ranks_share_the_samples_and_take_the_same_steps(
    shards: Sequence[str], tmp_path: Any, distributed: bool
) -> None:
    ranks = run(shards, 3, 2, str(tmp_path / "store"), distributed)
    # 250 samples over 3 ranks: two have 83 and one has 84.
    for epoch in range(2):
        lengths = {tuple(len(batch["label"]) for batch in rank[epoch]) for rank in ranks}
        assert len(lengths) == 1, "every rank has the same batches"
    assert sum(len(batch["label"]) for rank in ranks for batch in rank[0]) in range(
        2 * SAMPLES - 3, 2 * SAMPLES + 1
    )
    readings = [
        Counter(
            (label, before)
            for epoch in rank
            for batch in epoch
            for label, before in zip(batch["label"], batch["before"], strict=True)
        )
        for rank in ranks
    ]
    labels = [{label for label, _ in reading} for reading in readings]
    assert max(max(reading.values()) for reading in readings) == 2
    assert set().union(*labels) == set(range(SAMPLES))
    for side in ("before", "after"):
        drawn = [{x for epoch in rank for batch in epoch for x in batch[side]} for rank in ranks]
        assert not drawn[0] & drawn[1]
        assert not drawn[1] & drawn[2]


def test_fresh_samples_of_ranks_are_disjoint_in_an_epoch(shards: Sequence[str], tmp_path: Any) -> None:
    ranks = run(shards, 2, 1, str(tmp_path / "store"), True)
    labels = [[label for batch in rank[0] for label in batch["label"]] for rank in ranks]
    assert sorted(labels[0] + labels[1]) == list(range(SAMPLES))
