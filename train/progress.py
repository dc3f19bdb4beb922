"""The progress bar of a run."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from train import ranks
from train.record import Evaluation


class ProgressBar:
    """Shows steps, of those at most to come, and the latest accuracy, on standard error."""

    def __init__(self, name: str) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps at most"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[latest]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal or ranks.rank() > 0,
        )
        self._task = self._bar.add_task(name, total=None, latest="")

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def update(self, step: int, planned: int, latest: Evaluation | None) -> None:
        """Takes what `fit` tells."""
        text = f"accuracy {latest.accuracy:.1%} at {latest.fresh:,} fresh" if latest else ""
        self._bar.update(self._task, completed=step, total=planned, latest=text)
