"""The external source that joins two stages: it replays what the upstream made."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

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


class Fresh(NamedTuple):
    """One upstream batch."""

    outputs: Sequence[Any]
    """A tensor list for each node of the mark."""
    stats: list[EchoStats]
    """Of the marks further up, as of this batch."""


class Source:
    """Takes upstream batches, and answers the downstream pipeline's requests with echoed ones.

    Args:
        mark: what to do.
        upstream: makes the `Fresh` batches.
        upstream_stats: of the marks further up, before the first batch.
        position: of the upstream in its epochs.
        emitted: the sizes of the batches to emit.
        batch_size: of both pipelines.
        seed: of the order of the replay.
        private: for each node, whether the downstream may write into its tensors, so that it must get a
            copy and not the buffer's own memory.
    """

    def __init__(
        self,
        mark: Mark,
        upstream: Ahead,
        upstream_stats: list[EchoStats],
        position: ReadPosition,
        emitted: EmittedEpochs,
        batch_size: int,
        seed: int,
        private: Sequence[bool],
    ) -> None:
        self.emitted = emitted
        self._mark = mark
        self._upstream = upstream
        self._position = position
        self._batch_size = batch_size
        self._private = private
        by_sample = mark.unit == "sample"
        self._buffer = EchoBuffer(mark.shuffle_buffer, batch_size if by_sample else 1, seed)
        self._items: dict[int, list[Sample]] = {}
        self._rest: list[Sample] = []
        self._ended = False
        self._fresh = self._emitted = self._live_samples = 0
        self._wait_s = 0.0
        self._request: tuple[int, int] | None = None
        self._batch: list[Any] = []
        self._last: Sample | None = None
        self._upstream_stats = upstream_stats
        self.history = deque([self._stats()])
        """The statistics of all marks before the first batch, and after each one not yet delivered."""

    def feed(self, position: int, info: BatchInfo) -> Any:
        """The batch of one node. The first node that asks makes the draw for all of them."""
        request = (info.epoch_idx, info.iteration)
        if request != self._request:
            self._batch = self._next_batch()
            self._request = request
            self.history.append(self._stats())
        return self._batch[position]

    @property
    def started(self) -> bool:
        """Whether a batch has been drawn."""
        return self._request is not None

    def restart(self) -> None:
        """Go on after the end of the upstream's data, for an upstream that starts anew."""
        self._ended = False

    @property
    def _factor(self) -> float:
        return self._mark.factor.at(self._position.epoch)

    def _stats(self) -> list[EchoStats]:
        own = EchoStats(
            name=self._mark.name,
            fresh=self._fresh,
            emitted=self._emitted,
            factor=self._factor,
            live_samples=self._live_samples,
            upstream_wait_s=self._wait_s,
        )
        return [*self._upstream_stats, own]

    def _next_batch(self) -> list[Any]:
        cut = self.emitted.next()
        samples = self._draw(cut.samples)
        if not samples and (cut.samples or self._last is None):
            raise StopIteration
        self._emitted += len(samples)
        samples += [samples[-1] if samples else self._last] * cut.copies  # type: ignore[list-item]
        self._last = samples[-1]
        return [
            _tensor_list(node, contiguous=private)
            for node, private in zip(zip(*samples, strict=True), self._private, strict=True)
        ]

    def _draw(self, count: int) -> list[Sample]:
        """The next `count` rows, or fewer at the end of the data."""
        if self._mark.unit == "sample":
            return self._draw_items(count)
        while len(self._rest) < count:
            rows = self._draw_items(1)
            if not rows:
                break
            self._rest += rows
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def _draw_items(self, count: int) -> list[Sample]:
        while not self._ended and self._buffer.wants(count, self._factor):
            self._take_upstream_batch()
        draw = self._buffer.draw(count)
        rows: list[Sample] = []
        for item, finished in zip(draw.items.tolist(), draw.finished.tolist(), strict=True):
            rows += self._items[item]
            if finished:
                self._live_samples -= len(self._items.pop(item))
        return rows

    def _take_upstream_batch(self) -> None:
        start = time.perf_counter()
        try:
            outputs, self._upstream_stats = self._upstream.next()
        except StopIteration:
            self._ended = True
            return
        finally:
            self._wait_s += time.perf_counter() - start
        rows = len(outputs[0])
        for output in outputs:
            if len(output) != rows:
                raise RuntimeError(
                    f"the nodes of the mark {self._mark.name!r} hold batches of different sizes: "
                    f"{[len(o) for o in outputs]}"
                )
        factor = self._factor
        runs = self._position.advance(rows)
        # Index, since a slice of a tensor list crashes. Copies that pad a batch are its last rows.
        fresh = range(sum(run.count for run in runs))
        samples = list(zip(*([output[i] for i in fresh] for output in outputs), strict=True))
        if self._mark.unit == "sample":
            items = [[sample] for sample in samples]
        else:
            items = [samples] if samples else []
        self._items.update(enumerate(items, self._buffer.added))
        self._buffer.add(self._planned_uses(runs), factor)
        self._fresh += len(samples)
        self._live_samples += len(samples)

    def _planned_uses(self, runs: Sequence[Run]) -> NDArray[np.int64]:
        ordinal = self._buffer.added
        if self._mark.unit == "batch":
            # A batch counts for the epoch of its first row.
            runs = [Run(run.epoch, run.index // self._batch_size, 1) for run in runs[:1]]
        uses = []
        for run in runs:
            uses.append(self._mark.factor.uses(run.epoch, run.index, ordinal, run.count))
            ordinal += run.count
        return np.concatenate(uses) if uses else np.empty(0, np.int64)


def _tensor_list(samples: Sequence[Any], *, contiguous: bool) -> Any:
    """A batch of these samples; without a copy of them if it need not be contiguous."""
    on_gpu = hasattr(samples[0], "device_id")
    cls = TensorListGPU if on_gpu else TensorListCPU
    return cls(list(samples), contiguous=contiguous)
