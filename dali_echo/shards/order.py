"""In which order a stream of shards is read and given out: numbers only, no data.

Shards are dealt to lanes, which read one shard each at a time. A sample has a place in the reading
(the lanes take turns) and one in the giving out, which shuffles the places within a window.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dali_echo.epochs import Reader

_SHARD_ORDER = 20_181_107  # the same on ranks with different seeds, who must agree on the order of shards


@dataclass(frozen=True)
class Epoch:
    """One reader's samples of one epoch, by their place in the reading."""

    shard: NDArray[np.int64]
    """Of each sample, the number of its shard,"""
    sample: NDArray[np.int64]
    """its number in the shard,"""
    lane: NDArray[np.int64]
    """and the lane that reads it."""
    given: NDArray[np.int64]
    """The places in the reading, in the order of giving out,"""
    reach: NDArray[np.int64]
    """and how many samples must have been read when so many (and one more) are given out."""

    def __len__(self) -> int:
        return len(self.shard)


@dataclass(frozen=True)
class Order:
    """The order of all epochs: a function of these fields, and of nothing else.

    Attributes:
        counts: samples in each shard.
        reader: its part and its epochs, divided as DALI divides those of its readers.
        batch_size: samples that each iteration gives.
        lanes: shards that are read at a time.
        window: samples held to shuffle, or 0 for the order of the shards.
        seed: of the shuffling.
    """

    counts: Sequence[int]
    reader: Reader
    batch_size: int
    lanes: int
    window: int
    seed: int

    def position(self, iteration: int) -> tuple[int, int]:
        """The epoch, and the place in it, of the first sample of an iteration.

        The place is beyond the epoch's end where the iteration has copies only.
        """
        reader = self.reader
        if reader.pads:
            epoch, batch = divmod(iteration, reader.batches(self.batch_size))
            return epoch, batch * self.batch_size
        # All parts come up once in as many epochs as there are.
        epochs = 1 if reader.sticks else reader.shards
        cycle = reader.samples(0) if reader.sticks else reader.size
        cycles, place = divmod(iteration * self.batch_size, cycle)
        epoch = cycles * epochs
        while place >= reader.samples(epoch):
            place -= reader.samples(epoch)
            epoch += 1
        return epoch, place

    def epoch(self, number: int) -> Epoch:
        """The samples of an epoch, counted from 0."""
        shards, firsts, counts = self._pieces(number)
        lanes, starts = self._deal(counts)
        shard, lane = np.repeat(shards, counts), np.repeat(lanes, counts)
        within = np.arange(len(shard)) - np.repeat(np.cumsum(counts) - counts, counts)
        sample, turn = np.repeat(firsts, counts) + within, np.repeat(starts, counts) + within
        given: NDArray[np.int64] = np.arange(len(shard))
        if self.window:
            read = np.lexsort((lane, turn))
            shard, sample, lane = shard[read], sample[read], lane[read]
            # Each sample is due at random within twice the window after it is read. So as many as the
            # window holds wait at a time, none waits longer, and the first need not wait for it to fill.
            random = np.random.default_rng([self.seed, number, self.reader.shard_at(number)])
            given = np.argsort(given + 2 * self.window * random.random(len(given)), kind="stable")
        return Epoch(shard, sample, lane, given, np.maximum.accumulate(given) + 1)

    def _pieces(self, epoch: int) -> tuple[NDArray[np.int64], ...]:
        """The shards that the part of this epoch lies in: number, first sample and samples."""
        reader = self.reader
        order: NDArray[np.int64] = np.arange(len(self.counts))
        if self.window and not reader.sticks:
            order = np.random.default_rng([_SHARD_ORDER, epoch]).permutation(len(order))
        part = reader.shard_at(epoch)
        counts = np.asarray(self.counts, np.int64)[order]
        ends = np.cumsum(counts)
        first, end = (reader.size * p // reader.shards for p in (part, part + 1))
        low = np.clip(first - (ends - counts), 0, counts)
        high = np.clip(end - (ends - counts), 0, counts)
        inside = high > low
        return order[inside], low[inside], (high - low)[inside]

    def _deal(self, counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each piece, the lane that is free first, and the lane's samples before it."""
        free = [(0, lane) for lane in range(self.lanes)]
        lanes, starts = np.empty(len(counts), np.int64), np.empty(len(counts), np.int64)
        for i, count in enumerate(counts.tolist()):
            starts[i], lanes[i] = start, lane = free[0]
            heapq.heapreplace(free, (start + count, lane))
        return lanes, starts
