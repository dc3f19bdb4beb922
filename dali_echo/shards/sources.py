"""What a stream of bytes can come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Readable(Protocol):
    """What bytes are read from."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""

    def close(self) -> None:
        """Give up what it holds."""


class TransientError(Exception):
    """A failure after which another try may work, after at least `wait_s` seconds."""

    def __init__(self, cause: str, wait_s: float = 0.0) -> None:
        super().__init__(cause)
        self.wait_s = wait_s


@dataclass(frozen=True)
class Opened:
    """A source that has begun to send.

    Attributes:
        file: its bytes,
        first: from this one on.
        size: of the whole, if known.
        tag: changes whenever the bytes do, if known.
        ranges: whether it can begin at any byte.
        interrupt: ends a `read` that waits on another thread.
    """

    file: Readable
    first: int
    size: int | None
    tag: str | None
    ranges: bool
    interrupt: Callable[[], None]


class Source(Protocol):
    """Where the bytes of one shard come from."""

    @property
    def shown(self) -> str:
        """Its name in messages, without credentials."""

    @property
    def host(self) -> str:
        """Whose rate it counts for."""

    def open(self, start: int, timeout: float) -> Opened:
        """Begin to send, from byte `start` on or from an earlier one."""
