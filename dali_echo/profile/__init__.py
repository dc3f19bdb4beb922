"""Where a pipeline loses its time, and where and how often to echo: measured on the machine that runs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from dali_echo.profile.bench import Bench
from dali_echo.profile.model import Round
from dali_echo.profile.result import Profile
from dali_echo.profile.summary import summarize
from dali_echo.pytorch import Batch

__all__ = ["Profile", "profile"]

_ROUNDS = 8
_LEAST_ROUNDS = 5


def profile(
    make: Callable[[], Any],
    step: Callable[[Batch], Any] | None = None,
    outputs: Sequence[str] = (),
    *,
    memory: int | None = None,
    seconds: float = 60.0,
    progress: Callable[[float], None] = lambda share: None,
) -> Profile:
    """Measure a pipeline, and find where and how often to echo.

    Args:
        make: makes the pipeline, with or without marks, which are left out; called once for each part.
        step: does one training step on a batch as `EchoIterator` gives it.
        outputs: the names of the pipeline's outputs in that batch.
        memory: bytes that the buffer may take.
        seconds: to measure for, about; at least five rounds are measured.
        progress: is told now and then which share is done.

    Raises:
        TypeError, ValueError: if `make` makes no pipeline that can be cut, the names do not fit, or the
            data ends.
        Exception: what the pipeline or the step raises.
    """
    bench = Bench(make, step, outputs)
    bench.round(0)
    rounds: list[Round] = []
    start = time.perf_counter()
    share = 0.0
    while share < 1:
        # Filling and emptying the queues takes about as long again as measuring.
        rounds.append(bench.round(seconds / (2 * _ROUNDS * bench.pieces)))
        share = min((time.perf_counter() - start) / max(seconds, 1e-9), len(rounds) / _LEAST_ROUNDS)
        progress(min(share, 1.0))
    return summarize(bench, rounds, memory)
