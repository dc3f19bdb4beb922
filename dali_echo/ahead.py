"""Making batches on a thread of its own, one ahead of what is asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class _Channel:
    """What the thread and its owner share."""

    def __init__(self) -> None:
        self.requests: SimpleQueue[None] = SimpleQueue()
        self.batches: SimpleQueue[Any] = SimpleQueue()
        self.stopped = threading.Event()
        self.idle_s = 0.0
        self.burst_s: list[float] = []
        self.measured = 0


class Ahead:
    """Hands out what `make` returns, and has the next batch made meanwhile.

    The thread lets an upstream that waits in Python (a network stream in an external source) overlap with
    the downstream and the training step. It makes a batch only when asked to, so that an abandoned loop
    leaves it idle, and it refers to nothing but `make`.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._channel = _Channel()
        self._thread: threading.Thread | None = None
        self._surplus = 0

    @property
    def idle_s(self) -> float:
        """Seconds for which the thread had its batch ready and waited for a request."""
        return self._channel.idle_s

    def next(self, timeout: float | None = None) -> Any:
        """The next batch, or None if it does not come within `timeout` seconds (0: if it is not there yet).

        Raises:
            Exception: what `make` raised, StopIteration included. The call after that starts anew.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run,
                args=(self._make, self._channel),
                name="dali_echo-upstream",
                daemon=True,
            )
            self._thread.start()
            self._channel.requests.put(None)
        try:
            batch = self._channel.batches.get(timeout=timeout)
        except Empty:
            return None
        if self._surplus:
            self._surplus -= 1
        else:
            self._channel.requests.put(None)
        if isinstance(batch, _Failure):
            self.stop()
            raise batch.error
        return batch

    def burst(self, batches: int) -> None:
        """Have so many more batches made, one after the other; they are handed out before any other.

        `burst_s` then tells how long each of them took.
        """
        if batches and self._thread is not None:
            self._channel.burst_s, self._channel.measured = [], batches
            self._surplus += batches
            for _ in range(batches):
                self._channel.requests.put(None)

    @property
    def burst_s(self) -> list[float]:
        """Seconds that each batch of the last burst took, as far as they are made."""
        return self._channel.burst_s

    def stop(self) -> None:
        """End the thread; a batch that is being made is lost, and waited for at most a second."""
        if self._thread is None:
            return
        self._channel.stopped.set()
        self._channel.requests.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)
        self._channel, self._thread, self._surplus = _Channel(), None, 0


def _run(make: Callable[[], Any], channel: _Channel) -> None:
    while True:
        start = time.perf_counter()
        channel.requests.get()
        channel.idle_s += time.perf_counter() - start
        if channel.stopped.is_set():
            return
        start = time.perf_counter()
        try:
            batch = make()
            if len(channel.burst_s) < channel.measured:
                channel.burst_s.append(time.perf_counter() - start)
            channel.batches.put(batch)
        except BaseException as error:
            channel.batches.put(_Failure(error))
            return
