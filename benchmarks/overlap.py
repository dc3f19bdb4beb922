"""Do the upstream and the trainer overlap as the paper's model says?

    python benchmarks/overlap.py

An upstream that waits (for a network, say) for each batch, and a trainer that computes on each one emitted.
With t_up for an upstream batch alone, and t_down for the downstream and the trainer on a batch when they
never starve, data echoing promises max(t_up, e * t_down) for each fresh batch (Choi et al. 2019, arXiv
1907.05550). Both times are measured in the same run; the table shows what the wall clock says, from e = 1 to
10 around R = 6.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated, Any

import numpy as np
import nvidia.dali.fn as fn
import torch
import typer
from rich.console import Console
from rich.table import Table

from dali_echo import echo, pipeline_def
from dali_echo.pytorch import EchoIterator

BATCH = 32
FACTORS = (1, 2, 3, 4, 5, 5.5, 6, 6.5, 7, 8, 10)


@pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=1)
def waiting(t_up: float, factor: float) -> Any:
    def read() -> list[np.ndarray]:
        time.sleep(t_up)
        return [np.zeros((64, 64, 3), np.uint8) for _ in range(BATCH)]

    image = echo(fn.external_source(source=read), factor=factor, shuffle_buffer=4 * BATCH)
    return fn.flip(image, horizontal=fn.random.coin_flip())


def compute(seconds: float, weights: torch.Tensor) -> None:
    """Work for so long, without holding the interpreter's lock."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(weights, weights)


def per_fresh_batch(t_up: float, t_down: float, factor: float, fresh_batches: int) -> float:
    """Seconds for each fresh batch, once the buffer is full."""
    iterator = EchoIterator(waiting(t_up, factor), ["image"])
    weights = torch.randn(64, 64)
    for _ in range(round(8 * factor)):
        next(iterator)
        compute(t_down, weights)
    batches = round(fresh_batches * factor)
    start = time.perf_counter()
    for _ in range(batches):
        next(iterator)
        compute(t_down, weights)
    return (time.perf_counter() - start) / (batches / factor)


def main(
    wait: Annotated[float, typer.Option(help="Seconds for which the upstream waits, a batch.")] = 0.12,
    work: Annotated[float, typer.Option(help="Seconds for which the trainer computes, a batch.")] = 0.0195,
    fresh_batches: int = 20,
    rounds: int = 3,
) -> None:
    torch.set_num_threads(1)
    taken: dict[float, list[float]] = {factor: [] for factor in FACTORS}
    ratios: dict[float, list[float]] = {factor: [] for factor in FACTORS}
    t_ups, t_downs = [], []
    for _ in range(rounds):
        t_up = per_fresh_batch(wait, 0, 1, fresh_batches)
        t_down = per_fresh_batch(0, work, 4, 20) / 4
        t_ups.append(t_up)
        t_downs.append(t_down)
        for factor in FACTORS:
            taken[factor].append(per_fresh_batch(wait, work, factor, fresh_batches))
            ratios[factor].append(taken[factor][-1] / max(t_up, factor * t_down))
    table = Table(title=f"ms for each fresh batch, median of {rounds} rounds (range)")
    for column in ("e", "measured", "measured / max(t_up, e · t_down)"):
        table.add_column(column, justify="right")
    for factor in FACTORS:
        table.add_row(
            f"{factor:g}", spread([1e3 * t for t in taken[factor]], ".1f"), spread(ratios[factor], ".3f")
        )
    console = Console()
    console.print(table)
    up, down = spread([1e3 * t for t in t_ups], ".1f"), spread([1e3 * t for t in t_downs], ".2f")
    console.print(f"t_up {up} ms, t_down {down} ms, R = {t_ups[0] / t_downs[0]:.2f}")


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    typer.run(main)
