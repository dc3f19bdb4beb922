"""What a run leaves behind: metrics.jsonl, TensorBoard's events, summary.json and curve.png."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from train.chart import draw_curve
from train.errors import TrainError


@dataclass(frozen=True)
class Evaluation:
    """One look at the held-out examples; times are in seconds since training began."""

    step: int
    fresh: int
    emitted: int
    wall_s: float
    learning_rate: float
    train_loss: float
    accuracy: float
    echo: list[dict[str, Any]] = field(default_factory=list)
    """The pipeline's `echo_stats()`, a record for each mark; of the first rank."""


@dataclass(frozen=True)
class Result:
    """A run that has ended: what summary.json and metrics.jsonl hold."""

    summary: dict[str, Any]
    evaluations: list[Evaluation]


class Record:
    """Writes into a folder, in which it replaces the files of an earlier run.

    Args:
        folder: where to write.
        evaluations: of the run that is resumed, to go on after.
    """

    def __init__(self, folder: Path, evaluations: list[Evaluation]) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "summary.json").unlink(missing_ok=True)
            for events in folder.glob("events.out.tfevents.*"):
                events.unlink()
            self._metrics = (folder / "metrics.jsonl").open("w")
            self._board = SummaryWriter(folder)
        except OSError as error:
            raise TrainError(
                f"cannot write to --out {folder}: {error.strerror}. Name another folder"
            ) from error
        for evaluation in evaluations:
            self.add(evaluation)

    def add(self, evaluation: Evaluation) -> None:
        """Append to metrics.jsonl and the events at once, so that they can be watched."""
        values = asdict(evaluation)
        print(json.dumps(values), file=self._metrics, flush=True)
        step = values.pop("step")
        for mark in values.pop("echo"):
            name = mark.pop("name")
            values.update({f"{name}/{key}": value for key, value in mark.items()})
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self, result: Result) -> None:
        """Write what describes the whole run."""
        self._metrics.close()
        self._board.close()
        (self._folder / "summary.json").write_text(json.dumps(result.summary, indent=2) + "\n")
        draw_curve(self._folder / "curve.png", result)
