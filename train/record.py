"""What a run leaves behind: metrics.jsonl, summary.json and curve.png."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Result:
    """A run that has ended: what summary.json and metrics.jsonl hold."""

    summary: dict[str, Any]
    evaluations: list[Evaluation]


class Record:
    """Writes into a folder, in which it replaces the files of an earlier run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.evaluations: list[Evaluation] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "summary.json").unlink(missing_ok=True)
            self._metrics = (folder / "metrics.jsonl").open("w")
        except OSError as error:
            raise TrainError(
                f"cannot write to --out {folder}: {error.strerror}. Name another folder"
            ) from error

    @property
    def latest(self) -> Evaluation | None:
        """The last evaluation so far."""
        return self.evaluations[-1] if self.evaluations else None

    def add(self, evaluation: Evaluation) -> None:
        """Append a line to metrics.jsonl at once, so that it can be watched."""
        self.evaluations.append(evaluation)
        print(json.dumps(asdict(evaluation)), file=self._metrics, flush=True)

    def close(self, summary: dict[str, Any]) -> Result:
        """Write what describes the whole run."""
        result = Result(summary, self.evaluations)
        self._metrics.close()
        (self._folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        draw_curve(self._folder / "curve.png", result)
        return result
