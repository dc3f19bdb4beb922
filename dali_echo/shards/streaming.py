"""Shards that arrive over a network, as the batches of an external source."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray
from nvidia.dali.types import BatchInfo

from dali_echo.shards.bytestream import ByteStream
from dali_echo.shards.order import Epoch, Order
from dali_echo.shards.patience import Patience
from dali_echo.shards.remote import RemoteShard
from dali_echo.shards.tar import is_header_of

_HEADER = 512  # bytes of a tar's header before a member

Parts = tuple[bytes, ...]
"""The components of a sample, and then where each comes from, as DALI's readers say it."""


class Stream:
    """Gives the batches of an `Order`, from whichever iteration it is first asked for.

    Args:
        shards: to read.
        outputs: of each output, the lower-case extensions that it takes.
        order: of the samples.
        timeout: see `read`.
        retries: see `read`.
    """

    def __init__(
        self,
        shards: Sequence[RemoteShard],
        outputs: Sequence[Sequence[str]],
        order: Order,
        timeout: float,
        retries: int,
    ) -> None:
        self._shards = shards
        self._outputs = outputs
        self._order = order
        self._allowed = timeout, retries
        self._fetched: _Fetched | None = None
        self._stop: weakref.finalize[..., Any] | None = None
        self._next = 0
        self._batch: list[Parts] = []
        self._epoch = self._given = 0
        self._last: Parts | None = None

    def feed(self, output: int, info: BatchInfo) -> list[NDArray[np.uint8]]:
        """One output's batch. The first output that asks has it made for all."""
        if info.iteration != self._next - 1:
            if info.iteration != self._next or self._fetched is None:
                self._start(info.iteration)
            try:
                self._batch = self._make()
            except BaseException:
                # The error's traceback would keep this, and so the other lanes, for as long as they wait.
                self.close()
                raise
            self._next = info.iteration + 1
        return [np.frombuffer(parts[output], np.uint8) for parts in self._batch]

    def close(self) -> None:
        """End the threads."""
        if self._stop is not None:
            self._stop()
        self._fetched = None

    def _start(self, iteration: int) -> None:
        self.close()
        self._epoch, self._given = self._order.position(iteration)
        patience = Patience(*self._allowed)
        fetched = _Fetched(self._order, self._epoch, self._given, patience)
        self._stop = weakref.finalize(self, fetched.close)
        self._fetched, self._last = fetched, None
        for lane in range(self._order.lanes):
            threading.Thread(
                target=_run,
                args=(fetched, lane, self._shards, self._outputs),
                name=f"dali_echo-stream-{lane}",
                daemon=True,
            ).start()

    def _make(self) -> list[Parts]:
        assert self._fetched is not None
        order, batch = self._order, list[Parts]()
        pads, size = order.reader.pads, order.reader.samples
        padded = order.reader.batches(order.batch_size) * order.batch_size
        while len(batch) < order.batch_size:
            samples = size(self._epoch)
            if self._given < samples:
                self._last = self._fetched.take(self._epoch, self._given)
                batch.append(self._last)
            elif pads:
                # A state may have been saved among the copies.
                self._last = self._last or self._fetched.take(self._epoch, samples - 1)
                batch.append(self._last)
            self._given += 1
            if self._given >= (padded if pads else samples):
                self._epoch, self._given = self._epoch + 1, 0
        return batch


class _Fetched:
    """The samples that lanes have read and nobody has taken, and how far the lanes may go."""

    def __init__(self, order: Order, epoch: int, given: int, patience: Patience) -> None:
        self.patience = patience
        self.streams: dict[int, ByteStream] = {}
        self.first_epoch = epoch
        self.first_given = min(given, order.reader.samples(epoch) - 1)
        self._order = order
        self._ahead = 2 * order.batch_size + order.lanes
        self._changed = threading.Condition()
        self._samples: dict[int, Parts] = {}
        self._failed: dict[int, BaseException] = {}
        # Places count on from epoch to epoch; `_taken` is how many are given out.
        self._epochs: dict[int, tuple[int, Epoch]] = {}
        self._epoch, self._given = epoch, self.first_given
        self._planning = threading.Lock()

    def epoch(self, number: int) -> tuple[int, Epoch]:
        """The places before an epoch, and the epoch."""
        with self._planning:
            if number not in self._epochs:
                before = self._epochs.get(number - 1)
                base = before[0] + len(before[1]) if before else 0
                self._epochs[number] = base, self._order.epoch(number)
                for old in [n for n in self._epochs if n < min(self._epoch, number - 1)]:
                    del self._epochs[old]
            return self._epochs[number]

    def wait_for_room(self, place: int) -> bool:
        """Wait until the sample of a place may be held; False when there is nothing to wait for."""
        with self._changed:
            self._changed.wait_for(lambda: self.patience.stop.is_set() or place < self._limit())
        return not self.patience.stop.is_set()

    def put(self, place: int, sample: Parts) -> None:
        """Hand over a sample."""
        with self._changed:
            self._samples[place] = sample
            self._changed.notify_all()

    def fail(self, lane: int, error: BaseException) -> None:
        """Hand over what ended a lane."""
        with self._changed:
            self._failed[lane] = error
            self._changed.notify_all()

    def take(self, number: int, given: int) -> Parts:
        """Wait for a sample, by its epoch and its place in the giving out.

        Raises:
            Exception: what ended the lane that was to read it.
        """
        base, epoch = self.epoch(number)
        place = int(epoch.given[given])
        lane = int(epoch.lane[place])
        place += base
        with self._changed:
            self._epoch, self._given = number, given
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: place in self._samples or lane in self._failed or self.patience.stop.is_set()
            )
            if place not in self._samples:
                raise self._failed.get(lane) or InterruptedError("the pipeline is being shut down")
            return self._samples.pop(place)

    def close(self) -> None:
        """End the lanes."""
        self.patience.stop.set()
        with self._changed:
            self._changed.notify_all()
            self._samples.clear()
        for stream in list(self.streams.values()):
            stream.interrupt()

    def _limit(self) -> int:
        """The place up to which the lanes may read."""
        base, epoch = self._epochs[self._epoch]
        ahead = self._given + self._ahead
        reach = int(epoch.reach[min(ahead, len(epoch) - 1)])
        return base + max(reach, ahead + self._order.window)


def _run(
    fetched: _Fetched, lane: int, shards: Sequence[RemoteShard], outputs: Sequence[Sequence[str]]
) -> None:
    """Read the samples of a lane until nobody wants them."""
    try:
        number, given = fetched.first_epoch, fetched.first_given
        while True:
            base, epoch = fetched.epoch(number)
            wanted = np.zeros(len(epoch), bool)
            wanted[epoch.given[given:]] = True
            places = np.flatnonzero(wanted & (epoch.lane == lane))
            if not _read(fetched, lane, base, epoch, places, shards, outputs):
                return
            number, given = number + 1, 0
    except BaseException as error:
        fetched.fail(lane, error)


def _read(
    fetched: _Fetched,
    lane: int,
    base: int,
    epoch: Epoch,
    places: NDArray[np.int64],
    shards: Sequence[RemoteShard],
    outputs: Sequence[Sequence[str]],
) -> bool:
    """Read samples of an epoch, in the order of their places; False when told to stop."""
    open_shard: int | None = None
    components: list[list[_Part]] = []
    if not len(places):  # nothing for this lane: wait like the others, lest it plans epochs without end
        return fetched.wait_for_room(base + len(epoch))
    try:
        for place in places.tolist():
            if not fetched.wait_for_room(base + place):
                return False
            number, sample = int(epoch.shard[place]), int(epoch.sample[place])
            shard = shards[number]
            if number != open_shard:
                if open_shard is not None:
                    fetched.streams.pop(lane).close()
                fetched.streams[lane] = ByteStream(shard.source, fetched.patience, shard.size, shard.tag)
                components, open_shard = _places(shard, outputs), number
            fetched.put(base + place, _sample(fetched.streams[lane], shard, components[sample]))
    finally:
        if lane in fetched.streams:
            fetched.streams.pop(lane).close()
    return True


class _Part(NamedTuple):
    """A component: its bytes' offset and size, and its name as in the index."""

    offset: int
    size: int
    name: str


def _places(shard: RemoteShard, outputs: Sequence[Sequence[str]]) -> list[list[_Part]]:
    """Of each sample, the component for each output."""
    places: list[list[_Part]] = []
    with shard.file.open(encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        next(lines)
        for line in lines:
            fields = line.rstrip("\n").split(" ")
            parts = [
                (unquote(extension, errors="surrogateescape").lower(), _Part(int(offset), int(size), name))
                for extension, offset, size, name in zip(*(fields[i::4] for i in range(4)), strict=True)
            ]
            places.append([next(part for e, part in parts if e in output) for output in outputs])
    offsets = [offset for parts in places for offset in sorted({part.offset for part in parts})]
    if not shard.ranges and offsets != sorted(offsets):
        raise ValueError(
            f"{shard.shard}: the components of samples are not neighbours, and the source cannot go back: "
            "write the shard again with `dali_echo.shards.write`, or put it where byte ranges are served"
        )
    return places


def _sample(stream: ByteStream, shard: RemoteShard, parts: list[_Part]) -> Parts:
    read: dict[int, bytes] = {}
    for offset, size, name in sorted(set(parts)):
        data = stream.read(offset - _HEADER, _HEADER + size)
        if len(data) < _HEADER + size or not (size >> 33 or is_header_of(data[:_HEADER], size)):
            shard.file.unlink(missing_ok=True)
            raise OSError(
                f"{shard.shard}: member {name!r} is not at byte {offset} any more: the shard has changed "
                "since it was indexed. Start again, with a new index beside it if there is one"
            )
        read[offset] = data[_HEADER:]
    origins = [
        f"{shard.shard}:{part.offset}:{part.name}".encode("utf-8", "surrogateescape") for part in parts
    ]
    return (*(read[part.offset] for part in parts), *origins)
