"""How many items a memory limit allows to hold."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dali_echo.mark import Mark

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{infix}B": base**power
    for power, prefix in enumerate("kMGT", 1)
    for infix, base in (("i", 1024), ("", 1000))
}


class MemoryPlan:
    """Decides from the sizes seen so far how many items fit into a mark's `memory_limit`."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self._limit = mark.memory_limit
        self._bytes = 0
        self._items = 0
        self._warned = False

    def has_room(self, size: int, live_bytes: int) -> bool:
        """Whether an upstream batch of `size` bytes may be held besides what is live."""
        return self._limit is None or live_bytes + size <= self._limit

    def complaint(self, size: int, live_bytes: int) -> str:
        """What to say when it may not and has to be."""
        beside = f" beside the {live_bytes:,} bytes of samples that have uses left" if live_bytes else ""
        return (
            f"memory_limit = {self._limit:,} bytes of the mark {self._mark.name!r} does not hold an upstream "
            f"batch of {size:,} bytes{beside}: raise it to {2 * (size + live_bytes):,} or more, use smaller "
            f"batches, or set the mark where the samples are smaller, such as before they are decoded"
        )

    def capacity(self, size: int, items: int, least: int) -> int:
        """Items to hold, now that another upstream batch of so many bytes and items has come."""
        if self._limit is None:
            return self._mark.shuffle_buffer
        self._bytes += size
        self._items += items
        fitting = self._limit * self._items // self._bytes if self._bytes else self._mark.shuffle_buffer
        if fitting < self._mark.shuffle_buffer and not self._warned:
            self._warned = True
            warnings.warn(
                f"memory_limit = {self._limit:,} bytes of the mark {self._mark.name!r} holds about {fitting} "
                f"{self._mark.unit}s of {self._bytes // self._items:,} bytes: the shuffle buffer shrinks to "
                f"that from {self._mark.shuffle_buffer}",
                stacklevel=2,
            )
        return max(least, min(fitting, self._mark.shuffle_buffer))

    def state(self) -> tuple[int, int]:
        """What `restore` needs."""
        return self._bytes, self._items

    def restore(self, state: tuple[int, int]) -> None:
        """Go on from a state."""
        self._bytes, self._items = state


def parse_bytes(value: Any) -> int:
    """Check a size in bytes: an integer, or a string such as "512MiB", "4GiB" or "1.5 GB".

    Raises:
        TypeError: if it is neither.
        ValueError: if the string is no size, or the size is not positive.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2] not in _UNITS:
            raise ValueError(
                f"{value!r} is no size: give a number with one of {', '.join(filter(None, _UNITS))}, such as "
                f'"4GiB"'
            )
        value = int(float(match[1]) * _UNITS[match[2]])
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f'{value!r} is no size: give an integer in bytes, or a string such as "4GiB"')
    if value < 1:
        raise ValueError(f"{value!r} is no size: it must be positive")
    return value
