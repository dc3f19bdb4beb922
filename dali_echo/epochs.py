"""Where epochs begin and end: in what the upstream reads, and in what the echo emits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def shard_size(samples: int, shards: int, shard: int) -> int:
    """Samples in one of `shards` shards, divided as DALI divides its readers."""
    return samples * (shard + 1) // shards - samples * shard // shards


@dataclass(frozen=True)
class Reader:
    """What DALI's `reader_meta` says of the reader that defines the epoch, for one pipeline."""

    size: int
    shards: int
    shard: int
    pads: bool
    sticks: bool

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Reader:
        """Of one reader's entry in `Pipeline.reader_meta()`."""
        return cls(
            size=meta["epoch_size"],
            shards=meta["number_of_shards"],
            shard=meta["shard_id"],
            pads=bool(meta["pad_last_batch"]),
            sticks=bool(meta["stick_to_shard"]),
        )

    def shard_at(self, epoch: int) -> int:
        """The shard that this pipeline reads in `epoch`."""
        return self.shard if self.sticks else (self.shard + epoch) % self.shards

    def samples(self, epoch: int) -> int:
        """Samples that this pipeline reads in `epoch`, without the copies that pad its last batch."""
        return shard_size(self.size, self.shards, self.shard_at(epoch))

    def batches(self, batch_size: int) -> int:
        """Batches of an epoch when the last one is padded: as many for every shard."""
        return ceil_div(ceil_div(self.size, self.shards), batch_size)


@dataclass(frozen=True)
class Run:
    """Consecutive rows of one upstream batch that are used: `count` of them, from number `index` of `epoch`.

    Rows that are dropped do not count.
    """

    epoch: int
    index: int
    count: int


@dataclass(frozen=True)
class Rows:
    """Those of an upstream batch that are not copies which pad it."""

    runs: list[Run]
    used: list[int]
    """Their places in the batch: of all rows in the runs."""
    dropped: int
    """How many others there are."""


class ReadPosition:
    """Follows a reader through its epochs, batch by batch.

    Without a reader (an external source, say) everything is epoch 0.
    """

    def __init__(self, reader: Reader | None, batch_size: int) -> None:
        self._reader = reader
        self._batch_size = batch_size
        self.epoch = 0
        self.index = 0
        self.dropped = 0

    @property
    def state(self) -> tuple[int, int, int]:
        """What `restore` needs."""
        return self.epoch, self.index, self.dropped

    def restore(self, state: tuple[int, int, int]) -> None:
        """Go on from a state."""
        self.epoch, self.index, self.dropped = state

    def advance(self, bad: NDArray[np.bool_]) -> Rows:
        """Go on by one upstream batch, given for each of its rows whether it is dropped."""
        runs: list[Run] = []
        used: list[int] = []
        dropped = 0
        rows = len(bad)
        while True:
            size = self._reader.samples(self.epoch) if self._reader else self.index + rows
            count = max(0, min(rows, size - self.index))
            first = len(bad) - rows
            good = (first + np.flatnonzero(~bad[first : first + count])).tolist()
            if good:
                runs.append(Run(self.epoch, self.index - self.dropped, len(good)))
            used += good
            dropped += count - len(good)
            self.dropped += count - len(good)
            pads = self._reader is not None and self._reader.pads
            self.index += rows if pads else count
            rows -= count
            if self._reader is None:
                return Rows(runs, used, dropped)
            end = self._reader.batches(self._batch_size) * self._batch_size if pads else size
            if self.index >= end:
                self.epoch, self.index, self.dropped = self.epoch + 1, 0, 0
            if pads or rows == 0:
                return Rows(runs, used, dropped)


@dataclass(frozen=True)
class MovingEnds:
    """Where the reader's epochs end in the stream emitted, while the factor changes; all ranks together.

    An epoch ends where the uses planned for its fresh samples end. Those of samples that were not read by
    the last change count with the present factor.
    """

    size: int
    """Samples of the reader, in all shards."""
    factor: float = 1.0
    planned: int = 0
    """Uses planned by the last change."""
    fresh: int = 0
    """Samples read by then."""
    fixed: Sequence[int] = ()
    """Ends of the epochs that had been read or emitted by then."""

    def end(self, epoch: int) -> int:
        """Samples emitted by the end of an epoch."""
        if epoch < len(self.fixed):
            return self.fixed[epoch] if epoch >= 0 else 0
        return round(self.planned + self.factor * (self.size * (epoch + 1) - self.fresh))

    def samples(self, epoch: int) -> int:
        """Samples emitted in an epoch."""
        return self.end(epoch) - self.end(epoch - 1)

    def changed(self, planned: int, fresh: int, emitted: int, factor: float) -> MovingEnds:
        """Go on with another factor, now that so many uses are planned, samples read, and samples emitted."""
        fixed = list(self.fixed)
        while self.size * (len(fixed) + 1) <= fresh or self.end(len(fixed)) <= emitted:
            fixed.append(self.end(len(fixed)))
        return replace(self, factor=factor, planned=planned, fresh=fresh, fixed=fixed)


@dataclass(frozen=True)
class Cut:
    """Size of one emitted batch: `samples` that are drawn, then `copies` of the last one."""

    samples: int
    copies: int = 0


class EmittedEpochs:
    """Cuts the stream of emitted samples into batches, and its epochs into short or padded last ones.

    Args:
        batch_size: of full batches.
        samples: the length of each epoch, or None for a stream of full batches without a boundary.
        padded_batches: if given, every epoch is padded with copies to this many full batches, instead of
            ending with a short one.
    """

    def __init__(
        self,
        batch_size: int,
        samples: Callable[[int], int] | None = None,
        padded_batches: Callable[[int], int] | None = None,
    ) -> None:
        self._batch_size = batch_size
        self._samples = samples
        self._padded_batches = padded_batches
        self.epoch = 0
        self.batch = 0

    @property
    def pads(self) -> bool:
        """Whether epochs are padded with copies."""
        return self._padded_batches is not None

    def next(self) -> Cut:
        """The size of the next batch."""
        if self._samples is None:
            return Cut(self._batch_size)
        size = self._samples(self.epoch)
        if 0 < size <= self.batch * self._batch_size and not self.pads:
            # It was longer before the factor changed, and ended with the batch before.
            self.epoch, self.batch = self.epoch + 1, 0
            return self.next()
        samples = max(0, min(self._batch_size, size - self.batch * self._batch_size))
        self.batch += 1
        if self._padded_batches is not None:
            copies, batches = self._batch_size - samples, self._padded_batches(self.epoch)
        else:
            copies, batches = 0, ceil_div(size, self._batch_size)
        if self.batch >= batches:
            self.epoch, self.batch = self.epoch + 1, 0
        return Cut(samples, copies)


class FreshEpochs(EmittedEpochs):
    """Epochs of as many batches as it takes to use every fresh sample of one pass of the reader.

    Args:
        batch_size: of full batches.
        samples: fresh ones in a pass, or None for a stream without a boundary.
        short: whether an epoch's last batch ends with the last of them, so that it may be short.
    """

    def __init__(self, batch_size: int, samples: int | None = None, short: bool = False) -> None:
        super().__init__(batch_size)
        self._pass = samples
        self._short = short

    def boundary(self, taken: int) -> int | None:
        """How many fresh samples may be used by the end of the next batch, now that so many are taken.

        None if that batch cannot be, or need not be, the one in which the epoch ends.
        """
        if self._pass is None or not self._short or taken < self._end(self._pass):
            return None
        return self._end(self._pass)

    def advance(self, used: int) -> None:
        """End each epoch of which every fresh sample has been used, now that so many have."""
        while self._pass is not None and used >= self._end(self._pass):
            self.epoch += 1

    def _end(self, samples: int) -> int:
        return (self.epoch + 1) * samples
