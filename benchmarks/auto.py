"""Does `factor="auto"` follow an upstream that slows down and recovers?

    python benchmarks/auto.py

An upstream that waits for each batch, now longer and now shorter, and a trainer that waits for its
accelerator on each batch emitted. A row is one window of `dali_echo.auto`, from one decision to the next: R,
the factor at its end, and the share of its time for which the trainer waited for the upstream. R is what the
last upstream batches took, over the time between two batches without that waiting.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from typing import Annotated, Any

import numpy as np
import nvidia.dali.fn as fn
import typer
from rich.console import Console
from rich.table import Table

from dali_echo import echo, pipeline_def
from dali_echo.auto import WARM_UP, WINDOW
from dali_echo.pytorch import EchoIterator

BATCH = 32


class Throttled:
    """An external source that takes `t_up` seconds for a batch."""

    def __init__(self, t_up: float) -> None:
        self.t_up = t_up
        self.took: deque[float] = deque(maxlen=WINDOW)

    def __call__(self) -> list[np.ndarray]:
        start = time.perf_counter()
        time.sleep(self.t_up)
        self.took.append(time.perf_counter() - start)
        return [np.zeros((64, 64, 3), np.uint8) for _ in range(BATCH)]


@pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=1)
def throttled(source: Throttled) -> Any:
    image = echo(fn.external_source(source=source), factor="auto", shuffle_buffer=4 * BATCH)
    return fn.flip(image, horizontal=fn.random.coin_flip())


def compute(seconds: float) -> None:
    """Wait for so long, as for an accelerator."""
    time.sleep(seconds)


def follow(ratios: list[float], windows: int, work: float) -> list[tuple[int, float, float, float]]:
    """Of each window: how many since R was set, R, the factor at the end, the share of waiting."""
    source = Throttled(ratios[0] * work)
    iterator = EchoIterator(throttled(source), ["image"])
    rows = []
    steps = WARM_UP + WINDOW
    for t_up in (ratio * work for ratio in ratios):
        source.t_up = t_up
        source.took.clear()
        for window in range(windows):
            waited, start = iterator.stats[0].upstream_wait_s if rows or window else 0.0, time.perf_counter()
            for _ in range(steps):
                next(iterator)
                compute(work)
            elapsed = time.perf_counter() - start
            stats = iterator.stats[0]
            waited = stats.upstream_wait_s - waited
            rows.append(
                (
                    window,
                    statistics.mean(source.took) * steps / (elapsed - waited),
                    stats.factor,
                    waited / elapsed,
                )
            )
            steps = math.ceil(WINDOW * stats.factor)
    return rows


def main(
    work: Annotated[float, typer.Option(help="Seconds for which the trainer computes, a batch.")] = 0.01,
    windows: Annotated[int, typer.Option(help="For which R stays.")] = 6,
    rounds: int = 3,
) -> None:
    console = Console()
    ratios = [6.0, 2.0, 6.0, 1.0]
    settled, followed = [], []
    for number in range(rounds):
        table = Table(title=f"round {number}")
        for column in ("window", "R", "e", "e / R", "waiting"):
            table.add_column(column, justify="right")
        for row, (window, ratio, factor, waiting) in enumerate(follow(ratios, windows, work)):
            table.add_row(
                str(row), f"{ratio:.2f}", f"{factor:.3f}", f"{factor / ratio:.3f}", f"{waiting:.1%}",
                end_section=window == windows - 1,
            )  # fmt: skip
            if window == 2:
                followed.append(factor / max(1, ratio))
            if window > 2:
                settled.append(waiting)
        console.print(table)
    console.print(f"e / max(R, 1) in the third window after a change: {spread(followed)}")
    console.print(f"waiting share of the windows after that: {spread(settled)}")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f}), n = {len(values)}"


if __name__ == "__main__":
    typer.run(main)
