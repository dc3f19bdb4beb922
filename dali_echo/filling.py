"""The source of a mark with `factor="fill"`: it takes what has arrived, and repeats so as never to wait."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dali_echo.epochs import Cut, FreshEpochs, Run
from dali_echo.fill import FillBuffer
from dali_echo.source import Fresh, Source
from dali_echo.store import Sample

_START_S = 1.0
"""How long each batch that DALI prepares before the first training step waits for fresh samples.

Nothing is known of the trainer's pace then, and an upstream that keeps up with it would otherwise have its
first samples repeated. One that does not delays the start by no more than this.
"""


class FillSource(Source):
    """Takes upstream batches when they have come, and fills the draws with repeats until then."""

    _buffer_kind = FillBuffer
    _buffer: FillBuffer
    emitted: FreshEpochs
    _begun = 0
    # Fresh rows that a draw has chosen, and whether what is left of the last batch for unit "batch" is such.
    _chosen = 0
    _rest_is_fresh = False

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a `Moment`, with other draws: the samples' uses are counted on."""
        self._chosen, self._rest_is_fresh = state["chosen"]
        super().restore(state)

    @property
    def _used(self) -> int:
        """Fresh rows emitted."""
        return self._chosen - (len(self._rest[1]) if self._rest_is_fresh else 0)

    @property
    def _factor(self) -> float:
        return self._emitted / self._used if self._used else 1.0

    def _next_batch(self) -> list[Any]:
        self._begun += 1
        batch = super()._next_batch()
        self.emitted.advance(self._used + self._skipped - self._position.dropped)
        return batch

    def _cut(self) -> Cut:
        count = self._batch_size if self._by_sample else 1
        while (
            (boundary := self._boundary()) is None
            and self._wants(count)
            and self._take(needed=self._buffer.live < count)
        ):
            pass
        if boundary is None:
            return Cut(self._batch_size)
        left = len(self._rest[1]) + boundary - self._chosen
        if self._ended and self._used == self._fresh:
            raise StopIteration
        return Cut(min(self._batch_size, left))

    def _boundary(self) -> int | None:
        """Fresh rows after which the next batch must end: those of the epoch, or all when no more come."""
        left_out = self._skipped - self._position.dropped  # in the epochs that have been read
        self.emitted.advance(self._used + left_out)
        boundary = self.emitted.boundary(self._fresh + left_out)
        if boundary is not None:
            return boundary - left_out
        return self._fresh if self._ended else None

    def _draw_items(self, count: int) -> tuple[list[int], list[Sample]]:
        # What has come has been taken: more could be of the next epoch.
        while self._buffer.live < count and self._take(needed=True):
            pass
        unused = self._buffer.unused
        items, samples = self._use_items(count)
        fresh = unused - self._buffer.unused
        self._chosen += fresh if self._by_sample else fresh * len(samples)
        self._rest_is_fresh = fresh > 0
        return items, samples

    def _planned_uses(self, runs: Sequence[Run], epoch: int, index: int) -> NDArray[np.int64]:
        count = sum(run.count for run in runs) if self._by_sample else 1
        return np.full(count, math.floor(self._mark.max_factor))

    def _has_room(self, size: int) -> bool:
        """Let used samples go until an upstream batch of `size` bytes fits, if it then does."""
        if not self._memory.has_room(size, self._store.bytes_of(self._buffer.unused_items.tolist())):
            return False
        excess = self._buffer.live + self._buffer.intake - self._buffer.capacity
        gone: list[int] = []
        for item in self._buffer.leaving().tolist():
            if excess <= len(gone) and super()._has_room(size):
                break
            self._store.remove([item])
            gone.append(item)
        self._buffer.discard(gone)
        return super()._has_room(size)

    def _fetch(self, needed: bool) -> Fresh | None:
        # Before the trainer can have made a step, it has been given one batch at most.
        starting = self._begun - 1 - len(self.moments) < 2
        timeout = self._mark.timeout
        fresh = self._upstream.next(timeout if needed else _START_S if starting else 0.0)
        if fresh is None and needed:
            where = " and ".join(f"the reader {name!r}" for name in self._readers) or "the external source"
            raise TimeoutError(
                f"nothing has come from {where} for {timeout:g} s, and the mark {self._mark.name!r} has no "
                f"samples left to repeat, each at most {self._mark.max_factor:g} times (max_factor): see "
                f"why the data stalls, or raise timeout, max_factor or shuffle_buffer"
            )
        return cast("Fresh | None", fresh)

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "chosen": (self._chosen, self._rest_is_fresh)}
