"""Measuring how long a device is at work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Busy:
    """Adds up the time in which a device works on what is given to it.

    A GPU works later than it is told to, so its own clock is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._seconds = 0.0
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the work that is given to the device inside."""
        if self._gpu:
            events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            events[0].record()
            yield
            events[1].record()
            self._pending.append(events)
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def seconds(self) -> float:
        """The sum so far; waits for the device to finish."""
        if self._pending:
            self._pending[-1][1].synchronize()
            self._seconds += sum(start.elapsed_time(end) for start, end in self._pending) / 1000
            self._pending.clear()
        return self._seconds
