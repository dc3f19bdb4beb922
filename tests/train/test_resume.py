"""Runs that are interrupted: killed for good at any moment, and on several ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.classification import EchoStage
from tests.train.conftest import banded
from train import checkpoint
from train.data import ShardSet, write_shards
from train.errors import TrainError
from train.loop import fit
from train.workloads import Schedule

# Forks a process for each life of a run, since starting Python anew would take most of the time.
KILLED_RUN = """
import os, random, signal, sys
from pathlib import Path
from pipelines.classification import EchoStage
from train.data.shard_set import find_shards
from train.loop import fit
from train.workloads import WORKLOADS, Network, Schedule, Settings

shards, out = find_shards(Path(sys.argv[1])), Path(sys.argv[2])
settings = Settings(
    workload=WORKLOADS["fashion-mnist"], echo_stage=EchoStage.DECODE, echo_factor=2.5, shuffle_buffer=None,
    batch_size=16, epochs=5, max_steps=110, max_fresh=None, target=None, network=Network.SMALL,
    learning_rate=0.03, schedule=Schedule.LINEAR, eval_every=100, eval_examples=60, seed=3, device="cpu",
)
random.seed(5)
kills = 0
while True:
    steps, step_taken = os.pipe()
    life = os.fork()
    if life == 0:
        os.close(steps)
        fit(settings, shards, out, lambda *_: os.write(step_taken, b"."), checkpoint_every=4, resume=True)
        os._exit(0)
    os.close(step_taken)
    limit = random.randint(1, 9) if kills < 22 else 10**6
    seen = 0
    while seen < limit and (read := len(os.read(steps, limit - seen))):
        seen += read
    if seen == limit:
        os.kill(life, signal.SIGKILL)
    os.close(steps)
    if os.waitpid(life, 0)[1] == 0:
        break
    kills += 1
print(kills)
"""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state = checkpoint.load(folder)
    assert state is not None
    return state["learner"]["network"]


def run(arguments: list[Any], **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        **kwargs,
    )


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_weights(
    settings: Any, tiny: ShardSet, tmp_path: Path
) -> None:
    killed = run(["-c", KILLED_RUN, tiny.train[0].parent, tmp_path / "killed"])
    assert killed.returncode == 0, killed.stderr
    assert int(killed.stdout) >= 20
    undisturbed = settings(
        echo_stage=EchoStage.DECODE,
        echo_factor=2.5,
        epochs=5,
        max_steps=110,
        schedule=Schedule.LINEAR,
        seed=3,
    )
    fit(undisturbed, tiny, tmp_path / "whole", checkpoint_every=1000)
    expected, got = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    lines = [
        [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").open()]
        for folder in ("whole", "killed")
    ]
    for key in ("step", "fresh", "emitted", "accuracy", "train_loss"):
        assert [line[key] for line in lines[0]] == [line[key] for line in lines[1]]


@pytest.mark.parametrize("stage", [EchoStage.NONE, EchoStage.READ, EchoStage.BATCH])
def test_a_finished_run_goes_on_to_a_later_limit(
    settings: Any, tiny: ShardSet, tmp_path: Path, stage: EchoStage
) -> None:
    echo = {"echo_stage": stage, "echo_factor": 2, "epochs": 9}
    fit(settings(max_steps=10, **echo), tiny, tmp_path / "a", checkpoint_every=1000)
    again = fit(settings(max_steps=10, **echo), tiny, tmp_path / "a", checkpoint_every=9, resume=True)
    assert again.summary["steps"] == 10
    fit(settings(max_steps=25, **echo), tiny, tmp_path / "a", checkpoint_every=1000, resume=True)
    fit(settings(max_steps=25, **echo), tiny, tmp_path / "b", checkpoint_every=1000)
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_without_a_checkpoint_it_starts(settings: Any, tiny: ShardSet, tmp_path: Path) -> None:
    assert fit(settings(max_steps=3), tiny, tmp_path, checkpoint_every=2, resume=True).summary["steps"] == 3


def test_other_settings_are_refused_by_name(settings: Any, tiny: ShardSet, tmp_path: Path) -> None:
    fit(settings(max_steps=3), tiny, tmp_path, checkpoint_every=2)
    with pytest.raises(TrainError, match="batch_size was 16, and is 8; seed was 0, and is 1"):
        fit(settings(batch_size=8, seed=1), tiny, tmp_path, checkpoint_every=2, resume=True)


def test_a_damaged_checkpoint_is_refused(settings: Any, tiny: ShardSet, tmp_path: Path) -> None:
    fit(settings(max_steps=3), tiny, tmp_path, checkpoint_every=2)
    path = tmp_path / checkpoint.NAME
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(TrainError, match=r"checkpoint.pt is damaged .* without --resume"):
        fit(settings(max_steps=3), tiny, tmp_path, checkpoint_every=2, resume=True)


def test_checkpoints_are_written_when_asked(settings: Any, tiny: ShardSet, tmp_path: Path) -> None:
    written = []

    def look(step: int, *_: Any) -> None:
        state = checkpoint.load(tmp_path)
        written.append(state and state["run"]["step"])

    fit(settings(max_steps=7, eval_every=10**6), tiny, tmp_path, look, checkpoint_every=3)
    assert written == [None, None, 3, 3, 3, 6, 7]


@pytest.fixture(scope="module")
def coloured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards in the place of CIFAR-10."""
    splits = {"train": banded(320, 32, 3), "test": banded(60, 32, 3, seed=1)}
    folder = tmp_path_factory.mktemp("coloured") / "shards"
    write_shards(folder, splits)
    return folder


def on_ranks(count: int, arguments: list[Any]) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
    return run([*launcher, "-m", "train", "cifar10", "--device", "cpu", *arguments])


def test_two_ranks_train_resume_and_count_like_one_with_twice_the_batch(
    coloured: Path, tmp_path: Path
) -> None:
    common = ["--data", coloured, "--echo-stage", "decode", "--eval-every", 100, "--checkpoint-every", 8]
    two, one = tmp_path / "two", tmp_path / "one"
    for steps in (12, 25):  # the second time it goes on
        ended = on_ranks(2, [*common, "--out", two, "--batch-size", 8, "--max-steps", steps, "--resume"])
        assert ended.returncode == 0, ended.stderr
    assert len(checkpoint.load(two)["feeds"]) == 2  # type: ignore[index]
    ended = run(["-m", "train", "cifar10", *common, "--out", one, "--batch-size", 16, "--max-steps", 25])
    assert ended.returncode == 0, ended.stderr
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (two, one)]
    for key in ("fresh_examples", "emitted_examples", "steps"):
        assert summaries[0][key] == summaries[1][key]
    assert [summary["ranks"] for summary in summaries] == [2, 1]


def test_when_a_rank_dies_the_others_end_with_an_error(coloured: Path, tmp_path: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text(
        "import os, signal, sys\n"
        "from train import loop\n"
        "from train.cli import main\n"
        "from train.learner import Learner\n"
        "step = Learner.step\n"
        "def dying(self, **batch):\n"
        "    if os.environ['RANK'] == '1' and self._schedule.last_epoch == 5:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return step(self, **batch)\n"
        "Learner.step = dying\n"
        "main()\n"
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    arguments = ["cifar10", "--data", coloured, "--device", "cpu", "--out", tmp_path / "out", "--epochs", 99]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    ended = run([*launcher, script, *arguments], env=environment)
    assert ended.returncode != 0
    assert f"Signal {signal.SIGKILL.value}" in ended.stderr
