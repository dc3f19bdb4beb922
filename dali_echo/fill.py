"""Which items fill a batch when time decides how often each is used: bookkeeping alone, no DALI.

Fresh items come first, in order. Then come the items used least, so that uses stay even; but first of all
those that have rested since their last use, since the newest items are the ones used least, and each would
otherwise be repeated in batch after batch. How long an item rests is random, about half the number of live
items in uses drawn: that re-forms the batches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dali_echo.buffer import Draw, EchoBuffer, uniform


class FillBuffer(EchoBuffer):
    """An `EchoBuffer` whose intake and order follow what has arrived.

    The "arrival" of an item that has been used is that of its last use, and its stretch how many items were
    live then; it is due when it has rested.
    """

    @property
    def unused(self) -> int:
        """Live items that have not been used yet."""
        return int(np.count_nonzero(self._used == 0))

    @property
    def unused_items(self) -> NDArray[np.int64]:
        """Their ordinals."""
        unused: NDArray[np.int64] = self._item[self._used == 0]
        return unused

    def wants(self, batch_size: int, factor: float) -> bool:
        """Whether an upstream batch, if there is one, should be added before `batch_size` items are drawn.

        Only when fresh items are too few for the batch: the upstream is not read further ahead. Not when
        unused ones would then not fit, unless there are too few different items for the batch.
        """
        if self.live < batch_size:
            return True
        return self.unused < batch_size and self.unused + self.intake <= self.capacity

    def leaving(self) -> NDArray[np.int64]:
        """The items that can make room, in the order in which to let them go: the most used, then oldest."""
        rows = np.flatnonzero(self._used)
        leaving: NDArray[np.int64] = self._item[rows[np.argsort(-self._used[rows], kind="stable")]]
        return leaving

    def discard(self, items: Collection[int]) -> None:
        """Let go of live items."""
        if items:
            self._keep(~np.isin(self._item, list(items)))

    def draw(self, batch_size: int) -> Draw:
        """Use `batch_size` items, all different; all live ones if they are fewer."""
        rows = np.lexsort((self._due, self._used, self._due > self.drawn))[:batch_size]
        self._arrival[rows] = self.drawn + len(rows)
        self._stretch[rows] = self.live
        return self._use(rows)

    def state(self) -> dict[str, Any]:
        """A copy of all that `restore` needs, in small non-negative integers and arrays of them."""
        return {**super().state(), "stretch": self._stretch.copy(), "arrival": self.drawn - self._arrival}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        arrival = state["drawn"] - state["arrival"]
        super().restore({**state, "arrival": np.diff(arrival, prepend=0)})

    def _plan(self, rows: NDArray[np.intp]) -> None:
        use = self._used[rows]
        rest = self._stretch[rows] * (0.25 + 0.5 * uniform(self.seed, self._item[rows], use))
        self._due[rows] = self._arrival[rows] + np.where(use > 0, rest, 0)
