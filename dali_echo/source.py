"""The external source that joins two stages: it replays what the upstream made."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from nvidia.dali.types import BatchInfo

from dali_echo.ahead import Ahead
from dali_echo.auto import Auto, logger
from dali_echo.buffer import EchoBuffer
from dali_echo.epochs import Cut, EmittedEpochs, MovingEnds, ReadPosition, Rows, Run
from dali_echo.mark import Mark
from dali_echo.memory import MemoryPlan
from dali_echo.stats import EchoStats
from dali_echo.store import Sample, Store, batch_bytes, tensor_list

Snapshot = Callable[[], Any]
"""Gives the state of a pipeline as it was, to be written into a checkpoint."""


@dataclass(frozen=True)
class Fresh:
    """One upstream batch."""

    outputs: Sequence[Any]
    """A tensor list for each node of the mark."""
    bad: NDArray[np.bool_] | None
    """For each row, whether it is dropped; None if none is."""
    stats: list[EchoStats]
    """Of the marks further up, with this batch."""
    after: Snapshot
    """Of the upstream after this batch."""
    ends: MovingEnds | None = None
    """See `Source.ends`; of the upstream, as of this batch."""


@dataclass(frozen=True)
class Taken:
    """Where an upstream batch that was taken begins: what it needs to be taken again."""

    first_item: int
    position: tuple[int, int, int]
    before: Snapshot


@dataclass(frozen=True)
class Moment:
    """The source after one of its batches."""

    stats: list[EchoStats]
    epoch: int
    """The one that the next batch is of."""
    state: dict[str, Any] | None
    """See `Source.restore`; None if checkpoints are not enabled."""
    ends: MovingEnds | None
    """See `Source.ends`."""


class Source:
    """Takes upstream batches, and answers the downstream pipeline's requests with echoed ones.

    Args:
        mark: what to do.
        upstream: makes the `Fresh` batches.
        upstream_stats: of the marks further up, before the first batch.
        upstream_now: snapshot of the upstream, before the first batch.
        readers: names of the readers that the data comes from.
        position: of the upstream in its epochs.
        emitted: the sizes of the batches to emit.
        batch_size: of both pipelines.
        seed: of the order of the replay.
        private: for each node, whether the downstream may write into its tensors, so that it must get a
            copy and not the buffer's own memory.
        keeps_state: whether each `Moment` is to have a state.
        upstream_ends: `Source.ends` of the upstream, before the first batch.
        auto: measures the factor, if the mark says so.
    """

    _buffer_kind = EchoBuffer

    def __init__(
        self,
        mark: Mark,
        upstream: Ahead,
        upstream_stats: list[EchoStats],
        upstream_now: Snapshot,
        readers: Sequence[str],
        position: ReadPosition,
        emitted: EmittedEpochs,
        batch_size: int,
        seed: int,
        private: Sequence[bool],
        keeps_state: bool,
        upstream_ends: MovingEnds | None = None,
        auto: Auto | None = None,
    ) -> None:
        self.emitted = emitted
        self._upstream_ends = upstream_ends
        self._auto = auto
        self._taken_batches = 0
        self._mark = mark
        self._readers = readers
        self._upstream = upstream
        self._upstream_stats = upstream_stats
        self._upstream_now = upstream_now
        self._position = position
        self._batch_size = batch_size
        self._private = private
        self._keeps_state = keeps_state
        self._by_sample = mark.unit == "sample"
        self._buffer = self._buffer_kind(mark.shuffle_buffer, batch_size if self._by_sample else 1, seed)
        self._store = Store(self._by_sample, own_memory=mark.memory_limit is not None)
        self._memory = MemoryPlan(mark)
        self._refused: Fresh | None = None
        self._taken: deque[Taken] = deque()
        # For unit "batch": the item that a batch was cut from, and its rows that are still to be emitted.
        self._rest: tuple[int, list[Sample]] = (0, [])
        # The last sample emitted, which may be copied: its item, how many rows follow it there, and itself.
        self._last: tuple[int, int, Sample] | None = None
        self._ended = False
        self._fresh = self._skipped = self._emitted = 0
        self._wait_s = 0.0
        self._request: tuple[int, int] | None = None
        self._batch: list[Any] = []
        self._to_restore: Mapping[str, Any] | None = None
        self.moments = deque([self._moment()])
        """Before the first batch, and after each one that is not yet delivered."""

    def feed(self, position: int, info: BatchInfo) -> Any:
        """The batch of one node. The first node that asks makes the draw for all of them."""
        request = (info.epoch_idx, info.iteration)
        if request != self._request:
            self._batch = self._next_batch()
            self._request = request
            self.moments.append(self._moment())
        return self._batch[position]

    @property
    def started(self) -> bool:
        """Whether a batch has been drawn."""
        return self._request is not None

    def restart(self) -> None:
        """Go on after the end of the upstream's data, for an upstream that starts anew."""
        self._ended = False

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a `Moment`, on an upstream that goes on from its "upstream" checkpoint.

        The upstream batches of the live items are taken again when the first batch is asked for.
        """
        self._to_restore = state
        self._fresh, self._skipped, self._emitted = (state[k] for k in ("fresh", "skipped", "emitted"))
        self._memory.restore(state["memory"])
        self.emitted.epoch, self.emitted.batch = state["emitted_position"]
        self._position.restore(state["position"])
        if self._auto:
            self._auto.restore(state["auto"])
        ends = state["upstream_ends"]
        self._upstream_ends = MovingEnds(**ends) if ends else None
        upstream = state["upstream"]
        self._upstream_now = lambda: upstream
        self.moments = deque([replace(self._moment(), state={**state, "upstream": self._upstream_now})])

    @property
    def _factor(self) -> float:
        return self._auto.factor if self._auto else self._mark.factor.at(self._position.epoch)

    @property
    def ends(self) -> MovingEnds | None:
        """Where the epochs of the mark with a measured factor end, as of the batches taken; if any."""
        return self._auto.ends if self._auto else self._upstream_ends

    def _next_batch(self) -> list[Any]:
        if self._to_restore is not None:
            self._take_again(self._to_restore)
            self._to_restore = None
        if self._auto:
            self._auto.asked(self._wait_s, self._taken_batches)
            self._upstream.burst(self._auto.burst())
        cut = self._cut()
        samples = self._draw(cut.samples)
        if not samples and (cut.samples or self._last is None):
            raise StopIteration
        self._emitted += len(samples)
        if self._auto:
            change = self._auto.drew(cut.samples, self._upstream.burst_s)
            if change:
                logger.info("mark %r: %s", self._mark.name, change)
        if cut.copies:
            samples += [self._last[2]] * cut.copies  # type: ignore[index]
        return [
            tensor_list(node, contiguous=private)
            for node, private in zip(zip(*samples, strict=True), self._private, strict=True)
        ]

    def _cut(self) -> Cut:
        return self.emitted.next()

    def _draw(self, count: int) -> list[Sample]:
        """The next `count` rows, or fewer at the end of the data."""
        if self._by_sample:
            items, samples = self._draw_items(count)
            if items:
                self._last = items[-1], 0, samples[-1]
            return samples
        samples = []
        while len(samples) < count:
            item, rest = self._rest
            if not rest:
                items, rest = self._draw_items(1)
                if not items:
                    break
                item = items[0]
            missing = count - len(samples)
            part, rest = rest[:missing], rest[missing:]
            samples += part
            self._rest = item, rest
            self._last = item, len(rest), part[-1]
        return samples

    def _draw_items(self, count: int) -> tuple[list[int], list[Sample]]:
        """Items for a batch, and their rows."""
        while self._wants(count) and self._take(needed=self._buffer.live < count):
            pass
        return self._use_items(count)

    def _use_items(self, count: int) -> tuple[list[int], list[Sample]]:
        draw = self._buffer.draw(count)
        items = draw.items.tolist()
        samples = self._store.rows(items)
        self._store.remove(draw.items[draw.finished].tolist())
        return items, samples

    def _wants(self, count: int) -> bool:
        buffer = self._buffer
        paced = self._auto is not None and buffer.live >= count and not self._auto.may_take(buffer)
        return not paced and buffer.wants(count, self._factor)

    def _take(self, needed: bool) -> bool:
        """Take one upstream batch into the buffer, unless there is none or no memory for it.

        A batch without room waits, and the draws go on with what is live, if that suffices.
        """
        fresh = self._refused or self._wait_for_upstream(needed)
        if fresh is None:
            return False
        self._refused = None
        size = batch_bytes(fresh.outputs)
        if not self._has_room(size):
            if needed:
                raise MemoryError(self._memory.complaint(size, self._store.bytes))
            self._refused = fresh
            return False
        factor = self._factor
        epoch, index, _ = self._position.state
        rows = self._unpack(fresh, self._buffer.added)
        self._skipped += rows.dropped
        if not rows.runs:
            if self._auto:
                self._auto.took(rows.dropped, 0, 0, self._buffer.drawn)
            return True  # nothing to use: no batch was taken
        items = self._store.add(self._buffer.added, fresh.outputs, rows.used, size)
        self._buffer.capacity = self._memory.capacity(size, items, self._buffer.intake)
        uses = self._planned_uses(rows.runs, epoch, index)
        self._buffer.add(uses, factor)
        self._fresh += len(rows.used)
        self._taken_batches += 1
        if self._auto:
            planned = int(uses.sum()) * (1 if self._by_sample else len(rows.used))
            self._auto.took(len(rows.used) + rows.dropped, planned, len(uses), self._buffer.drawn)
        return True

    def _has_room(self, size: int) -> bool:
        return self._memory.has_room(size, self._store.bytes)

    def _wait_for_upstream(self, needed: bool) -> Fresh | None:
        if self._ended:
            return None
        start = time.perf_counter()
        try:
            fresh = self._fetch(needed)
        except StopIteration:
            self._ended = True
            return None
        finally:
            self._wait_s += time.perf_counter() - start
        return fresh

    def _fetch(self, needed: bool) -> Fresh | None:
        """The next upstream batch, which may be None only where it is not needed."""
        fresh: Fresh = self._upstream.next()
        return fresh

    def _unpack(self, fresh: Fresh, first_item: int) -> Rows:
        """Note where an upstream batch begins, and find its rows to use."""
        sizes = {len(output) for output in fresh.outputs}
        if len(sizes) > 1:
            raise RuntimeError(
                f"the nodes of the mark {self._mark.name!r} hold batches of different sizes, {sizes}: "
                f"they must come from operators that work on the same batch"
            )
        self._taken.append(Taken(first_item, self._position.state, self._upstream_now))
        self._upstream_now = fresh.after
        self._upstream_stats = fresh.stats
        self._upstream_ends = fresh.ends
        return self._position.advance(np.zeros(sizes.pop(), bool) if fresh.bad is None else fresh.bad)

    def _planned_uses(self, runs: Sequence[Run], epoch: int, index: int) -> NDArray[np.int64]:
        """Of the items of a batch that begins at `index` of `epoch`."""
        ordinal = self._buffer.added
        if self._auto:
            return self._auto.uses(sum(run.count for run in runs) if self._by_sample else 1)
        if not self._by_sample:
            # A batch counts for the epoch of its first row.
            number = index // self._batch_size if runs[0].epoch == epoch else 0
            runs = [Run(runs[0].epoch, number, 1)]
        uses = []
        for run in runs:
            uses.append(self._mark.factor.uses(run.epoch, run.index, ordinal, run.count))
            ordinal += run.count
        return np.concatenate(uses) if uses else np.empty(0, np.int64)

    def _moment(self) -> Moment:
        own = EchoStats(
            name=self._mark.name,
            fresh=self._fresh,
            skipped=self._skipped,
            emitted=self._emitted,
            factor=self._factor,
            live_samples=self._store.samples,
            live_bytes=self._store.bytes,
            upstream_wait_s=self._wait_s,
            downstream_wait_s=self._upstream.idle_s,
        )
        self._forget_taken()
        state = self._state() if self._keeps_state else None
        return Moment([*self._upstream_stats, own], self.emitted.epoch, state, self.ends)

    def _forget_taken(self) -> None:
        """Forget where upstream batches began whose items are no longer needed."""
        needed = self._needed()
        while len(self._taken) > 1 and self._taken[1].first_item <= needed:
            self._taken.popleft()
        if needed == self._buffer.added:
            self._taken.clear()

    def _needed(self) -> int:
        """The oldest item that is live, or whose rows are still to be emitted or copied."""
        rest_item, rest = self._rest
        needed = [self._buffer.oldest]
        if rest:
            needed.append(rest_item)
        if self._last is not None and self.emitted.pads:
            needed.append(self._last[0])
        return min(needed)

    def _state(self) -> dict[str, Any]:
        rest_item, rest = self._rest
        oldest = self._taken[0] if self._taken else None
        return {
            "fresh": self._fresh,
            "skipped": self._skipped,
            "emitted": self._emitted,
            "memory": self._memory.state(),
            "auto": self._auto.state() if self._auto else None,
            "upstream_ends": asdict(self._upstream_ends) if self._upstream_ends else None,
            "emitted_position": (self.emitted.epoch, self.emitted.batch),
            "buffer": self._buffer.state(),
            "rest": (rest_item, len(rest)),
            "last": self._last[:2] if self._last and self.emitted.pads else None,
            "first_item": oldest.first_item if oldest else self._buffer.added,
            "position": oldest.position if oldest else self._position.state,
            "upstream": oldest.before if oldest else self._upstream_now,
        }

    def _take_again(self, state: Mapping[str, Any]) -> None:
        """Take the upstream batches again that hold what the state needs, and forget their other rows."""
        self._buffer.restore(state["buffer"])
        rest_item, rest = state["rest"]
        last = state["last"]
        needed = {*self._buffer.items.tolist(), *([rest_item] if rest else []), *(last[:1] if last else [])}
        item = state["first_item"]
        while item < self._buffer.added:
            fresh = cast(Fresh, self._fetch(needed=True))
            used = self._unpack(fresh, item).used
            item += self._store.add(item, fresh.outputs, used, batch_bytes(fresh.outputs), needed)
        if rest:
            self._rest = rest_item, self._store.rows([rest_item])[-rest:]
        if last:
            item, following = last
            self._last = item, following, self._store.rows([item])[-1 - following]
        self._store.keep(set(self._buffer.items.tolist()))
