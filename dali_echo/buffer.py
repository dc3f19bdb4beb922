"""Which items the next batch uses: bookkeeping alone, no DALI and no pixels.

Every use of an item has a due time, counted in uses drawn, and set at random within a stretch of its own.
A draw takes the items that are due first. From this one rule follow the properties of the stream: a batch
never holds an item twice, since an item waits for one use at a time; the uses of an item lie apart, and
their gaps vary; no item lives much longer than its last stretch; and all of it is a function of the seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Draw:
    """The items of one batch: their ordinals, and which of them have had their last use."""

    items: NDArray[np.int64]
    finished: NDArray[np.bool_]


class EchoBuffer:
    """Live items and the uses they have left.

    Items are numbered from 0 in the order in which they are added.

    Args:
        capacity: live items to hold at most. More are held only while fewer than a batch of them are
            live, since a batch needs that many different ones.
        intake: items that one upstream batch brings.
        seed: of the order, from 0 to 2**64 - 1.
    """

    def __init__(self, capacity: int, intake: int, seed: int) -> None:
        if not 0 < intake <= capacity:
            raise ValueError(
                f"a buffer of {capacity} items cannot take upstream batches of {intake}: "
                f"use a capacity of {intake} or more"
            )
        self.capacity = capacity
        self.intake = intake
        self.seed = seed
        self.added = 0
        self.drawn = 0
        self._last_intake = -1
        # One row per live item, in the order of arrival.
        self._item: NDArray[np.int64] = np.empty(0, np.int64)
        self._left: NDArray[np.int64] = np.empty(0, np.int64)
        self._used: NDArray[np.int64] = np.empty(0, np.int64)
        self._arrival: NDArray[np.int64] = np.empty(0, np.int64)
        self._stretch: NDArray[np.int64] = np.empty(0, np.int64)
        self._due: NDArray[np.float64] = np.empty(0, np.float64)

    @property
    def live(self) -> int:
        """Items with uses left."""
        return len(self._item)

    @property
    def remaining(self) -> int:
        """Uses that the live items have left."""
        return int(self._left.sum())

    @property
    def oldest(self) -> int:
        """Ordinal of the oldest live item, or of the next one to come when none is live."""
        return int(self._item[0]) if self.live else self.added

    def wants(self, batch_size: int, factor: float) -> bool:
        """Whether an upstream batch should be added before `batch_size` items are drawn.

        It should when the batch needs more different items than are live, or when the uses left have
        sunk to what a full, evenly aged buffer holds just before an upstream batch arrives: once in
        `factor` draws on average, at positions that depend on counts alone. The buffer fills by one
        upstream batch a draw, so that no batch waits for a second one.
        """
        if self.live < batch_size:
            return True
        if self._last_intake == self.drawn or self.live + self.intake > self.capacity:
            return False
        return self.remaining <= self._low_level(factor)

    def add(self, uses: NDArray[np.int64], factor: float) -> None:
        """Add the items of one upstream batch, with `uses[i]` planned uses, at least 1, of the i-th."""
        size = len(uses)
        self._item = np.append(self._item, np.arange(self.added, self.added + size))
        self._left = np.append(self._left, uses)
        self._used = np.append(self._used, np.zeros(size, np.int64))
        self._arrival = np.append(self._arrival, np.full(size, self.drawn))
        self._stretch = np.append(self._stretch, np.full(size, self._stretch_of_use(factor)))
        self._due = np.append(self._due, np.empty(size))
        self._plan(np.arange(self.live - size, self.live))
        self.added += size
        self._last_intake = self.drawn

    def draw(self, batch_size: int) -> Draw:
        """Use the `batch_size` items that are due first, all different; all live ones if they are fewer."""
        count = min(batch_size, self.live)
        if count == 0:
            return self._use(np.empty(0, np.intp))
        latest = np.partition(self._due, count - 1)[count - 1]
        candidates = np.flatnonzero(self._due <= latest)
        return self._use(candidates[np.argsort(self._due[candidates], kind="stable")[:count]])

    def state(self) -> dict[str, Any]:
        """A copy of all that `restore` needs, in small non-negative integers and arrays of them."""
        return {
            "seed": self.seed,
            "capacity": self.capacity,
            "added": self.added,
            "drawn": self.drawn,
            "item": np.diff(self._item, prepend=0),
            "left": self._left.copy(),
            "used": self._used.copy(),
            "arrival": np.diff(self._arrival, prepend=0),
            "stretch": self._stretch,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.seed = state["seed"]
        self.capacity = state["capacity"]
        self.added = state["added"]
        self.drawn = state["drawn"]
        self._item, self._arrival = np.cumsum(state["item"]), np.cumsum(state["arrival"])
        self._left, self._used, self._stretch = (
            state[column].copy() for column in ("left", "used", "stretch")
        )
        self._due = np.empty(self.live)
        self._plan(np.arange(self.live))

    @property
    def items(self) -> NDArray[np.int64]:
        """The ordinals of the live items, in order."""
        return self._item

    def _use(self, rows: NDArray[np.intp]) -> Draw:
        """Count a use of the items in these rows."""
        self._left[rows] -= 1
        self._used[rows] += 1
        self.drawn += len(rows)
        self._plan(rows)
        draw = Draw(self._item[rows], self._left[rows] == 0)
        if draw.finished.any():
            self._keep(self._left > 0)
        return draw

    def _keep(self, rows: NDArray[np.bool_]) -> None:
        for column in ("_item", "_left", "_used", "_arrival", "_stretch", "_due"):
            setattr(self, column, getattr(self, column)[rows])

    def _stretch_of_use(self, factor: float) -> int:
        """Over how many uses drawn the next use of an item is spread.

        An item lives until its last use, at a random time within its last stretch. Items that arrive at
        the rate 1 / factor and live for (factor - 1/2) stretches fill the capacity when a stretch is this
        long; half an upstream batch is left free, since a whole one arrives at a time.
        """
        if factor <= 1:
            return 0
        return round((self.capacity - self.intake) / (1 - 1 / (2 * factor)))

    def _low_level(self, factor: float) -> float:
        """Uses left at which a full, evenly aged buffer takes its next upstream batch.

        Items of age a have had a / stretch of their uses; summed over all ages, and less half of what an
        upstream batch brings, that is `flowing`. It is kept 5 % lower, since the number of live items
        varies and a full buffer would delay upstream batches. A buffer of few upstream batches is better
        described by `stepped`: each of them has had an equal share more than the next.
        """
        stepped = factor * (self.capacity - self.intake) / 2
        flowing = _mean_square(factor) / factor * self._stretch_of_use(factor) / 2
        return 0.0 if factor <= 1 else max(stepped, 0.95 * flowing - factor * self.intake / 2)

    def _plan(self, rows: NDArray[np.intp]) -> None:
        use = self._used[rows]
        jitter = uniform(self.seed, self._item[rows], use)
        self._due[rows] = self._arrival[rows] + self._stretch[rows] * (use + jitter)


def _mean_square(factor: float) -> float:
    """Mean of the squared number of uses, when the uses are the two integers around `factor`."""
    low = math.floor(factor)
    share = factor - low
    return (1 - share) * low**2 + share * (low + 1) ** 2


def uniform(seed: int, item: NDArray[np.int64], use: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number in [0, 1) for each (seed, item, use), so that a resumed buffer needs no generator's state.

    The mixing function of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
    generators").
    """
    with np.errstate(over="ignore"):
        x = item.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += (use.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03) + np.uint64(seed)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
