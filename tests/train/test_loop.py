from __future__ import annotations

import json
from itertools import pairwise

import pytest

from pipelines.classification import EchoStage
from tests.train.conftest import TRAIN
from train.errors import TrainError
from train.loop import fit
from train.workloads import Schedule


@pytest.mark.parametrize("stage", list(EchoStage))
def test_what_a_run_leaves(settings, tiny, tmp_path, stage):
    result = fit(settings(echo_stage=stage, echo_factor=3, epochs=2), tiny, tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary == result.summary
    none = stage is EchoStage.NONE
    unit, buffer = ("batch", 1) if stage is EchoStage.BATCH else ("sample", 64)
    assert summary["echo"] == {
        "stage": stage.value,
        "factor": 1 if none else 3,
        "unit": None if none else unit,
        "shuffle_buffer": None if none else buffer,
    }
    emitted = 2 * TRAIN * (1 if none else 3)
    assert summary["emitted_examples"] == emitted
    assert summary["steps"] == emitted / 16
    # What is in the buffer at the end has been read but not yet used up.
    assert 0 <= summary["fresh_examples"] - 2 * TRAIN <= (0 if none else 64)
    assert (summary["workload"], summary["seed"], summary["device"]) == ("fashion-mnist", 0, "cpu")
    assert (summary["metric"], summary["target"], summary["reached"]) == ("accuracy", None, False)
    assert summary["value"] > 0.5
    assert summary["fresh_to_target"] is None
    assert summary["wall_s_to_target"] is None
    assert 0 < summary["upstream_wait_s"] < summary["wall_s"]
    assert 0 < summary["busy_fraction"] < 1
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").open()]
    assert lines[-1]["fresh"] == summary["fresh_examples"]
    assert lines[-1]["accuracy"] == summary["value"]
    # About every 100 fresh examples, and at the end.
    assert [line["fresh"] // 100 for line in lines[:-1]] == list(range(1, len(lines)))
    assert all(a["wall_s"] < b["wall_s"] and a["step"] < b["step"] for a, b in pairwise(lines))
    assert (tmp_path / "out" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_target_ends_a_run(settings, tiny, tmp_path):
    chosen = settings(target=0.6, epochs=50, eval_every=32)
    summary = fit(chosen, tiny, tmp_path).summary
    assert summary["reached"]
    assert summary["value"] >= 0.6
    assert summary["fresh_to_target"] == summary["fresh_examples"] < 20 * TRAIN
    assert summary["wall_s_to_target"] == summary["wall_s"]
    *before, last = (json.loads(line) for line in (tmp_path / "metrics.jsonl").open())
    assert all(line["accuracy"] < 0.6 for line in before)
    assert last["accuracy"] == summary["value"]


def test_the_target_may_be_missed(settings, tiny, tmp_path):
    summary = fit(settings(target=1.0, max_steps=2), tiny, tmp_path).summary
    assert not summary["reached"]
    assert summary["fresh_to_target"] is None


def test_limits(settings, tiny, tmp_path):
    echo = {"echo_stage": EchoStage.DECODE, "echo_factor": 2, "epochs": 9}
    assert fit(settings(max_steps=7, **echo), tiny, tmp_path).summary["steps"] == 7
    limited = fit(settings(max_fresh=100, **echo), tiny, tmp_path).summary
    assert 100 <= limited["fresh_examples"] < 116
    assert limited["steps"] < 2 * 116 / 16


def test_a_linear_schedule_ends_with_the_first_limit(settings, tiny, tmp_path):
    for changes in ({"max_steps": 7}, {"max_fresh": 100}, {"epochs": 2}):
        fit(settings(schedule=Schedule.LINEAR, **changes), tiny, tmp_path)
        *_, last = (json.loads(line) for line in (tmp_path / "metrics.jsonl").open())
        assert last["learning_rate"] == 0


def test_progress_is_told(settings, tiny, tmp_path):
    told = []
    fit(settings(max_steps=9), tiny, tmp_path, lambda *values: told.append(values))
    assert [step for step, _, _ in told] == list(range(1, 10))
    assert {planned for _, planned, _ in told} == {9}
    assert [latest and latest.step for *_, latest in told] == [None] * 6 + [7, 7, 9]


def test_a_diverged_run_says_so(settings, tiny, tmp_path):
    with pytest.raises(TrainError, match=r"loss is nan at step .* Lower --lr"):
        fit(settings(learning_rate=1e30), tiny, tmp_path)


def test_a_buffer_below_a_batch_is_refused(settings, tiny, tmp_path):
    chosen = settings(echo_stage=EchoStage.READ, echo_factor=2, shuffle_buffer=3)
    with pytest.raises(TrainError, match="shuffle_buffer = 3"):
        fit(chosen, tiny, tmp_path)


def test_a_folder_that_cannot_be_written_is_named(settings, tiny, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TrainError, match="--out"):
        fit(settings(), tiny, tmp_path / "file" / "out")
