"""How fast sources deliver."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """What came from a source in this process.

    Attributes:
        bytes: received.
        seconds: for which at least one stream waited for them, so not those of a slow consumer.
    """

    bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """While they were waited for, over all streams from there."""
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclass
class _Meter:
    bytes: int = 0
    seconds: float = 0.0
    waiting: int = 0
    since: float = 0.0


_meters: defaultdict[str, _Meter] = defaultdict(_Meter)
_lock = threading.Lock()


def rates() -> dict[str, Rate]:
    """The rate of each source that this process has streamed from: by host, `pipe:` together."""
    now = time.monotonic()
    with _lock:
        return {
            host: Rate(m.bytes, m.seconds + (now - m.since if m.waiting else 0.0))
            for host, m in _meters.items()
        }


@contextmanager
def waiting(host: str) -> Iterator[None]:
    """Count the time of this block for a source."""
    with _lock:
        meter = _meters[host]
        if not meter.waiting:
            meter.since = time.monotonic()
        meter.waiting += 1
    try:
        yield
    finally:
        with _lock:
            meter.waiting -= 1
            if not meter.waiting:
                meter.seconds += time.monotonic() - meter.since


def received(host: str, count: int) -> None:
    """Count bytes for a source."""
    with _lock:
        _meters[host].bytes += count
