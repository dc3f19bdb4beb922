"""How long to go on trying, and when."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

FIRST_WAIT_S = 0.5


@dataclass(frozen=True)
class Patience:
    """What a user allows a source: `timeout` seconds without a byte, and `retries` in a row.

    Attributes:
        stop: set when nobody waits for the bytes any more.
    """

    timeout: float
    retries: int
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ValueError(f"timeout = {self.timeout} must be positive: seconds without a byte")
        if self.retries < 0:
            raise ValueError(f"retries = {self.retries} must be 0 or more")


class Tries:
    """The tries to get the next byte, none of which may outlast the patience."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self.restart()

    def restart(self) -> None:
        """Begin anew: a byte has come."""
        self._failed = 0
        self._end = time.monotonic() + self._patience.timeout

    @property
    def allowed_s(self) -> float:
        """Seconds that one try may wait, so that there is time for another one."""
        left = max(self._end - time.monotonic(), 0.001)
        return left if self._failed >= self._patience.retries else left / 2

    def again(self, wait_s: float = 0.0) -> str | None:
        """Wait before the next try, for `wait_s` seconds or longer; or say why there is none."""
        self._failed += 1
        left = self._end - time.monotonic()
        if left <= 0.001:
            return f"no byte came for {self._patience.timeout:g} s (timeout)"
        if self._failed > self._patience.retries:
            return f"{self._failed} tries in a row failed (retries = {self._patience.retries})"
        # Ranks that failed together do not come back together.
        backoff = FIRST_WAIT_S * 2 ** (self._failed - 1) * random.uniform(0.5, 1.0)
        self._patience.stop.wait(min(max(backoff, wait_s), left / 2))
        return None
