"""The external source that joins two stages: it replays what the upstream made."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali.backend import TensorListCPU, TensorListGPU
from nvidia.dali.types import BatchInfo

from dali_echo.ahead import Ahead
from dali_echo.buffer import EchoBuffer
from dali_echo.epochs import EmittedEpochs, ReadPosition, Run
from dali_echo.mark import Mark
from dali_echo.stats import EchoStats

Sample = tuple[Any, ...]
"""One row: a DALI tensor for each node of the mark."""

Snapshot = Callable[[], Any]
"""Gives the state of a pipeline as it was, to be written into a checkpoint."""


@dataclass(frozen=True)
class Fresh:
    """One upstream batch."""

    outputs: Sequence[Any]
    """A tensor list for each node of the mark."""
    stats: list[EchoStats]
    """Of the marks further up, with this batch."""
    after: Snapshot
    """Of the upstream after this batch."""


@dataclass(frozen=True)
class Taken:
    """Where an upstream batch that was taken begins: what it needs to be taken again."""

    first_item: int
    position: tuple[int, int]
    before: Snapshot


@dataclass(frozen=True)
class Moment:
    """The source after one of its batches."""

    stats: list[EchoStats]
    state: dict[str, Any] | None
    """See `Source.restore`; None if checkpoints are not enabled."""


class Source:
    """Takes upstream batches, and answers the downstream pipeline's requests with echoed ones.

    Args:
        mark: what to do.
        upstream: makes the `Fresh` batches.
        upstream_stats: of the marks further up, before the first batch.
        upstream_now: snapshot of the upstream, before the first batch.
        position: of the upstream in its epochs.
        emitted: the sizes of the batches to emit.
        batch_size: of both pipelines.
        seed: of the order of the replay.
        private: for each node, whether the downstream may write into its tensors, so that it must get a
            copy and not the buffer's own memory.
        keeps_state: whether each `Moment` is to have a state.
    """

    def __init__(
        self,
        mark: Mark,
        upstream: Ahead,
        upstream_stats: list[EchoStats],
        upstream_now: Snapshot,
        position: ReadPosition,
        emitted: EmittedEpochs,
        batch_size: int,
        seed: int,
        private: Sequence[bool],
        keeps_state: bool,
    ) -> None:
        self.emitted = emitted
        self._mark = mark
        self._upstream = upstream
        self._upstream_stats = upstream_stats
        self._upstream_now = upstream_now
        self._position = position
        self._batch_size = batch_size
        self._private = private
        self._keeps_state = keeps_state
        self._by_sample = mark.unit == "sample"
        self._buffer = EchoBuffer(mark.shuffle_buffer, batch_size if self._by_sample else 1, seed)
        # The rows of each live item: one for unit "sample".
        self._items: dict[int, list[Sample]] = {}
        self._taken: deque[Taken] = deque()
        # For unit "batch": the item that a batch was cut from, and its rows that are still to be emitted.
        self._rest: tuple[int, list[Sample]] = (0, [])
        # If epochs are padded with copies of the last sample: its item, and itself.
        self._last: tuple[int, Sample] | None = None
        self._ended = False
        self._fresh = self._emitted = 0
        self._live_samples = 0
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
        self._fresh, self._emitted = state["fresh"], state["emitted"]
        self._live_samples = state["live_samples"]
        self.emitted.epoch, self.emitted.batch = state["emitted_position"]
        self._position.epoch, self._position.index = state["position"]
        upstream = state["upstream"]
        self._upstream_now = lambda: upstream
        self.moments = deque([replace(self._moment(), state={**state, "upstream": self._upstream_now})])

    @property
    def _factor(self) -> float:
        return self._mark.factor.at(self._position.epoch)

    def _next_batch(self) -> list[Any]:
        if self._to_restore is not None:
            self._take_again(self._to_restore)
            self._to_restore = None
        cut = self.emitted.next()
        rows = self._draw(cut.samples)
        if not rows and (cut.samples or self._last is None):
            raise StopIteration
        self._emitted += len(rows)
        if rows and self.emitted.pads:
            self._last = rows[-1]
        samples = [sample for _, sample in rows]
        if self._last is not None:
            samples += [self._last[1]] * cut.copies
        return [
            _tensor_list(node, contiguous=private)
            for node, private in zip(zip(*samples, strict=True), self._private, strict=True)
        ]

    def _draw(self, count: int) -> list[tuple[int, Sample]]:
        """The next `count` rows with their items, or fewer at the end of the data."""
        if self._by_sample:
            return self._draw_items(count)
        rows: list[tuple[int, Sample]] = []
        while len(rows) < count:
            item, rest = self._rest
            if not rest:
                drawn = self._draw_items(1)
                if not drawn:
                    break
                item, rest = drawn[0][0], [sample for _, sample in drawn]
            part, rest = rest[: count - len(rows)], rest[count - len(rows) :]
            self._rest = item, rest
            rows += [(item, sample) for sample in part]
        return rows

    def _draw_items(self, count: int) -> list[tuple[int, Sample]]:
        while not self._ended and self._buffer.wants(count, self._factor):
            self._take()
        draw = self._buffer.draw(count)
        rows: list[tuple[int, Sample]] = []
        for item, finished in zip(draw.items.tolist(), draw.finished.tolist(), strict=True):
            rows += [(item, sample) for sample in self._items[item]]
            if finished:
                self._live_samples -= len(self._items.pop(item))
        return rows

    def _take(self) -> None:
        """Take one upstream batch into the buffer."""
        start = time.perf_counter()
        try:
            fresh: Fresh = self._upstream.next()
        except StopIteration:
            self._ended = True
            return
        finally:
            self._wait_s += time.perf_counter() - start
        factor = self._factor
        runs, items = self._unpack(fresh, self._buffer.added)
        self._items.update(items)
        self._buffer.add(self._planned_uses(runs), factor)
        samples = sum(run.count for run in runs)
        self._fresh += samples
        self._live_samples += samples

    def _unpack(self, fresh: Fresh, first_item: int) -> tuple[list[Run], dict[int, list[Sample]]]:
        """The fresh rows of an upstream batch, as items from `first_item` on."""
        sizes = {len(output) for output in fresh.outputs}
        if len(sizes) > 1:
            raise RuntimeError(
                f"the nodes of the mark {self._mark.name!r} hold batches of different sizes, {sizes}: "
                f"they must come from operators that work on the same batch"
            )
        position = (self._position.epoch, self._position.index)
        self._taken.append(Taken(first_item, position, self._upstream_now))
        self._upstream_now = fresh.after
        self._upstream_stats = fresh.stats
        runs = self._position.advance(sizes.pop())
        # Index, since a slice of a tensor list crashes. Copies that pad a batch are its last rows.
        rows = range(sum(run.count for run in runs))
        samples = list(zip(*([output[i] for i in rows] for output in fresh.outputs), strict=True))
        if self._by_sample:
            return runs, {first_item + i: [sample] for i, sample in enumerate(samples)}
        return runs, {first_item: samples} if samples else {}

    def _planned_uses(self, runs: Sequence[Run]) -> NDArray[np.int64]:
        ordinal = self._buffer.added
        if not self._by_sample:
            # A batch counts for the epoch of its first row.
            runs = [Run(run.epoch, run.index // self._batch_size, 1) for run in runs[:1]]
        uses = []
        for run in runs:
            uses.append(self._mark.factor.uses(run.epoch, run.index, ordinal, run.count))
            ordinal += run.count
        return np.concatenate(uses) if uses else np.empty(0, np.int64)

    def _moment(self) -> Moment:
        own = EchoStats(
            name=self._mark.name,
            fresh=self._fresh,
            emitted=self._emitted,
            factor=self._factor,
            live_samples=self._live_samples,
            upstream_wait_s=self._wait_s,
        )
        self._forget_taken()
        return Moment([*self._upstream_stats, own], self._state() if self._keeps_state else None)

    def _forget_taken(self) -> None:
        """Forget where upstream batches began whose items are no longer needed."""
        needed = self._needed()
        while (
            self._taken
            and (self._taken[1].first_item if len(self._taken) > 1 else self._buffer.added) <= needed
        ):
            self._taken.popleft()

    def _needed(self) -> int:
        """The oldest item that is live, or whose rows are still to be emitted or copied."""
        rest_item, rest = self._rest
        needed = [self._buffer.oldest]
        if rest:
            needed.append(rest_item)
        if self._last is not None:
            needed.append(self._last[0])
        return min(needed)

    def _state(self) -> dict[str, Any]:
        rest_item, rest = self._rest
        oldest = self._taken[0] if self._taken else None
        return {
            "fresh": self._fresh,
            "emitted": self._emitted,
            "live_samples": self._live_samples,
            "emitted_position": (self.emitted.epoch, self.emitted.batch),
            "buffer": self._buffer.state(),
            "rest": (rest_item, len(rest)),
            "last": -1 if self._last is None else self._last[0],
            "first_item": oldest.first_item if oldest else self._buffer.added,
            "position": oldest.position if oldest else (self._position.epoch, self._position.index),
            "upstream": oldest.before if oldest else self._upstream_now,
        }

    def _take_again(self, state: Mapping[str, Any]) -> None:
        """Take the upstream batches again that hold what the state needs, and forget their other rows."""
        self._buffer.restore(state["buffer"])
        rest_item, rest = state["rest"]
        needed = {*self._buffer.items.tolist(), state["last"], *([rest_item] if rest else [])}
        item = state["first_item"]
        while item < self._buffer.added:
            _, items = self._unpack(self._upstream.next(), item)
            item += len(items)
            self._items.update((i, rows) for i, rows in items.items() if i in needed)
        self._rest = rest_item, self._items[rest_item][-rest:] if rest else []
        if state["last"] >= 0:
            self._last = state["last"], self._items[state["last"]][-1]
        for gone in needed.intersection(self._items) - set(self._buffer.items.tolist()):
            del self._items[gone]


def _tensor_list(samples: Sequence[Any], *, contiguous: bool) -> Any:
    """A batch of these samples; without a copy of them if it need not be contiguous."""
    on_gpu = hasattr(samples[0], "device_id")
    cls = TensorListGPU if on_gpu else TensorListCPU
    return cls(list(samples), contiguous=contiguous)
