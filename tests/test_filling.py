"""`factor="fill"` over real pipelines, whose upstream is let go on batch by batch."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import nvidia.dali.fn as fn
import pytest
from nvidia.dali import types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from dali_echo import echo, filling, pipeline_def
from dali_echo.pytorch import EchoIterator
from tests.streams import BATCH, SAMPLES, echoed, read, rows, run, uses

SIZE = 8
FILL = {"factor": "fill"}


class Upstream:
    """Numbers in order, as far as they are allowed."""

    def __init__(self, batches: int = 0, end: int | None = None) -> None:
        self.allowed = threading.Semaphore(batches)
        self.made = 0
        self.end = end

    def __call__(self, info: types.BatchInfo) -> list[np.int32]:
        if info.iteration == self.end:
            raise StopIteration
        self.allowed.acquire()
        self.made += 1
        return [np.int32(info.iteration * SIZE + i) for i in range(SIZE)]

    def allow(self, batches: int) -> None:
        for _ in range(batches):
            self.allowed.release()


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    source = Upstream()
    yield source
    source.allow(1000)  # so that the thread ends


def numbers(source: Any, *marks: dict[str, Any], **pipeline: Any) -> Any:
    pipeline = {"prefetch_queue_depth": 1, **pipeline}

    @pipeline_def(batch_size=SIZE, num_threads=1, device_id=None, seed=3, **pipeline)
    def define() -> Any:
        number = fn.external_source(source=source, batch_info=True, dtype=types.INT32, ndim=0)
        for mark in marks or (FILL,):
            number = echo(number, **mark)
        return number

    return define()


def draw(pipeline: Any) -> list[int]:
    (output,) = pipeline.run()
    return [int(np.asarray(output[i])) for i in range(len(output))]


def await_batch(pipeline: Any) -> None:
    """Wait until the batch that is made ahead has come."""
    batches = pipeline._ahead._channel.batches
    batches.put(batches.get(timeout=60))


def fast(pipeline: Any, batches: int) -> list[int]:
    """The samples of an upstream that always has a batch ready."""
    drawn = draw(pipeline)
    for _ in range(batches - 1):
        await_batch(pipeline)
        drawn += draw(pipeline)
    return drawn


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batches do not wait for fresh samples either."""
    monkeypatch.setattr(filling, "_START_S", 0.0)


@pytest.mark.parametrize("unit", ["sample", "batch"])
def test_an_upstream_that_keeps_up_is_never_repeated_nor_read_ahead(upstream: Upstream, unit: str) -> None:
    upstream.allow(1000)
    pipeline = numbers(upstream, {**FILL, "unit": unit})
    assert fast(pipeline, 30) == list(range(30 * SIZE))
    (stats,) = pipeline.echo_stats()
    assert (stats.fresh, stats.emitted, stats.factor) == (30 * SIZE, 30 * SIZE, 1.0)
    await_batch(pipeline)
    # One is made ahead, and the upstream pipeline prefetches one.
    assert upstream.made <= 30 + 2


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_batches_before_the_first_step_wait_for_fresh_samples(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    monkeypatch.setattr(filling, "_START_S", 60.0)
    pipeline = numbers(upstream, prefetch_queue_depth=depth)
    asked, take = 0, pipeline._ahead.next

    def allow_and_take(timeout: float) -> Any:
        nonlocal asked
        asked += 1
        upstream.allow(depth if asked == 1 else 1)
        return take(timeout)

    pipeline._ahead.next = allow_and_take
    iterator = EchoIterator(pipeline, ["number"])
    first = next(iterator)["number"].tolist()
    assert asked == depth + 1
    monkeypatch.setattr(filling, "_START_S", 0.0)
    first += [value for _ in range(depth) for value in next(iterator)["number"].tolist()]
    assert first == list(range((depth + 1) * SIZE))


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("unit", ["sample", "batch"])
@pytest.mark.parametrize("most", [1, 3, 3.9])
def test_a_stall_is_bridged_while_uses_last_then_raises_and_then_goes_on(
    upstream: Upstream, unit: str, most: float
) -> None:
    upstream.allow(4)
    mark = {**FILL, "unit": unit, "max_factor": most, "shuffle_buffer": 4 * SIZE if unit == "sample" else 4}
    pipeline = numbers(upstream, {**mark, "timeout": 0.2})
    counts = Counter(fast(pipeline, 4))
    while sum(counts.values()) < 4 * SIZE * int(most):
        values = draw(pipeline)
        assert len(set(values)) == SIZE
        counts.update(values)
        assert max(counts.values()) - min(counts.values()) <= 1
    message = (
        r"nothing has come from the external source for 0.2 s, and the mark 'echo0' has no samples left to "
        rf"repeat, each at most {most:g} times \(max_factor\): see why the data stalls, or raise timeout"
    )
    assert set(counts.values()) == {int(most)}
    with pytest.raises(TimeoutError, match=message):
        draw(pipeline)
    assert pipeline.echo_stats()[0].factor == int(most)
    upstream.allow(1)
    assert min(draw(pipeline)) >= 4 * SIZE


@pytest.mark.usefixtures("no_start")
def test_the_iterator_delivers_all_that_is_prepared_before_it_raises(upstream: Upstream) -> None:
    upstream.allow(2)
    pipeline = numbers(upstream, {**FILL, "max_factor": 5, "timeout": 0.2}, prefetch_queue_depth=2)
    iterator = EchoIterator(pipeline, ["number"])
    counts: Counter[int] = Counter()
    for _ in range(3):
        with pytest.raises(TimeoutError, match="nothing has come from"):
            for batch in iterator:
                counts.update(batch["number"].tolist())
        assert set(counts.values()) <= {5}
    upstream.allow(20)
    for batch, _ in zip(iterator, range(8), strict=False):
        counts.update(batch["number"].tolist())
    assert max(counts.values()) <= 5
    assert len(counts) >= 4 * SIZE


def test_the_error_names_the_reader(shards: Sequence[str]) -> None:
    gate = threading.Event()

    def wait(info: types.BatchInfo) -> list[np.float32]:
        if info.iteration > 2:
            gate.wait()
        return [np.float32(0)] * BATCH

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=1, prefetch_queue_depth=1)
    def gated() -> Any:
        jpeg, _ = read(shards)
        slow = fn.external_source(source=wait, batch_info=True, dtype=types.FLOAT, ndim=0)
        return echo(jpeg, slow, factor="fill", max_factor=2, timeout=0.2)

    pipeline = gated()
    try:
        with pytest.raises(TimeoutError, match="from the reader 'train' for 0.2 s"):
            for _ in range(9):
                pipeline.run()
    finally:
        gate.set()


@pytest.mark.usefixtures("no_start")
@pytest.mark.filterwarnings("ignore:memory_limit")
def test_max_factor_and_the_buffer_hold_and_every_sample_is_used(shards: Sequence[str]) -> None:
    for mark in ({"max_factor": 3, "shuffle_buffer": 2 * BATCH}, {"max_factor": 6, "memory_limit": 40_000}):
        pipeline = echoed(shards, None, {**FILL, **mark})
        counts: Counter[tuple[int, float]] = Counter()
        for _ in range(100):
            batch = rows(pipeline.run())
            assert len({(image, before) for image, _, before, _ in batch}) == len(batch) == BATCH
            assert all(image == label for image, label, *_ in batch)
            counts.update(uses([batch]))
            (stats,) = pipeline.echo_stats()
            assert stats.live_samples <= mark.get("shuffle_buffer", 4 * BATCH)
            assert stats.live_bytes <= mark.get("memory_limit", 10**9)
        assert max(counts.values()) <= mark["max_factor"]
        assert stats.emitted == 100 * BATCH
        # Whatever was taken has been used: a fresh sample goes into the next batch.
        assert len(counts) == stats.fresh
        assert stats.factor == pytest.approx(sum(counts.values()) / len(counts))


@pytest.mark.parametrize("limit", [2 * SIZE, 3 * SIZE - 1, 3 * SIZE])
def test_a_new_batch_replaces_what_was_used_most(upstream: Upstream, limit: int) -> None:
    live = list(range(5 * SIZE - limit, 5 * SIZE))
    upstream.allow(1000)
    pipeline = numbers(upstream, {**FILL, "memory_limit": 4 * limit})
    with pytest.warns(UserWarning, match="the shuffle buffer shrinks"):
        fast(pipeline, 5)
    assert pipeline.echo_stats()[0].live_bytes == 4 * len(live)
    assert pipeline._source._buffer.items.tolist() == live


@pytest.mark.parametrize("policy", list(LastBatchPolicy))
@pytest.mark.parametrize("reader", [{}, {"pad_last_batch": True}])
@pytest.mark.parametrize("unit", ["sample", "batch"])
def test_an_epoch_is_one_pass_of_the_reader(
    shards: Sequence[str], policy: LastBatchPolicy, reader: dict[str, Any], unit: str
) -> None:
    iterator = EchoIterator(
        _only_numbers(shards, reader, unit), ["before"], reader_name="train", last_batch_policy=policy
    )
    seen: set[float] = set()
    for epoch in range(1, 4):
        batches = [batch["before"].tolist() for batch in iterator]
        before = seen.copy()
        seen |= {value for batch in batches for value in batch}
        if policy == LastBatchPolicy.PARTIAL:
            assert len(seen) == epoch * SAMPLES
            assert not {value for batch in batches[:-1] for value in batch} >= seen - before
        else:
            assert epoch * SAMPLES <= len(seen) < epoch * SAMPLES + BATCH
            # An epoch ends with the batch that completes it.
            assert len(seen - {*batches[-1]}) < epoch * SAMPLES
        if unit == "sample":
            full = batches if policy != LastBatchPolicy.PARTIAL else batches[:-1]
            assert {len(batch) for batch in full} <= {BATCH}


def _only_numbers(shards: Sequence[str], reader: dict[str, Any], unit: str) -> Any:
    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=11, enable_checkpointing=True)
    def define() -> Any:
        jpeg, _ = read(shards, **reader)
        before, image = echo(fn.random.uniform(), fn.decoders.image(jpeg), factor="fill", unit=unit)
        # The image keeps the reader, and with it the epoch, in the pipeline.
        return before + 0 * fn.cast(fn.reductions.sum(image), dtype=types.FLOAT)

    return define()


@pytest.mark.parametrize("unit", ["sample", "batch"])
def test_a_source_that_ends_has_every_sample_used_and_can_begin_again(unit: str) -> None:
    source = Upstream(10**6, end=5)
    iterator = EchoIterator(numbers(source, {**FILL, "unit": unit}, prefetch_queue_depth=2), ["number"])
    for _ in range(3):
        counts = Counter(value for batch in iterator for value in batch["number"].tolist())
        assert set(counts) == set(range(5 * SIZE))
        assert max(counts.values()) <= 8


def test_there_is_no_length(shards: Sequence[str]) -> None:
    pipeline = _only_numbers(shards, {}, "sample")
    for ask in (pipeline.reader_meta, pipeline.epoch_size):
        for arguments in ((), ("train",)):
            with pytest.raises(TypeError, match='with factor = "fill" an epoch has no length in advance'):
                ask(*arguments)
    with pytest.raises(TypeError, match='no len with factor = "fill"'):
        len(EchoIterator(pipeline, ["before"], reader_name="train"))
    with pytest.raises(TypeError, match="has no length in advance"):
        DALIGenericIterator(_only_numbers(shards, {}, "sample"), ["before"], reader_name="train")
    endless = DALIGenericIterator(_only_numbers(shards, {}, "sample"), ["before"])
    assert [next(endless)[0]["before"].shape for _ in range(20)] == [(BATCH,)] * 20


def test_epochs_on_several_ranks_are_refused_and_steps_are_not(shards: Sequence[str]) -> None:
    reader = {"num_shards": 2, "shard_id": 1}
    with pytest.raises(ValueError, match="another number of steps on each of 2 ranks.*leave reader_name out"):
        EchoIterator(_only_numbers(shards, reader, "sample"), ["before"], reader_name="train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dali_echo.pytorch.ranks", lambda: (0, 3))
        with pytest.raises(ValueError, match="on each of 3 ranks"):
            EchoIterator(_only_numbers(shards, {}, "sample"), ["before"], reader_name="train")
    iterator = EchoIterator(_only_numbers(shards, reader, "sample"), ["before"])
    assert sum(1 for _ in zip(range(30), iterator, strict=False)) == 30


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("unit", ["sample", "batch"])
def test_a_restored_iterator_reads_what_is_live_and_counts_on(upstream: Upstream, unit: str) -> None:
    mark = {**FILL, "unit": unit, "max_factor": 4, "timeout": 0.2}
    mark["shuffle_buffer"] = 4 * SIZE if unit == "sample" else 4

    def make() -> EchoIterator:
        return EchoIterator(numbers(upstream, mark, enable_checkpointing=True), ["number"])

    upstream.allow(4)
    first = make()
    counts: Counter[int] = Counter()
    for _ in range(5):
        counts.update(next(first)["number"].tolist())
    state = first.state_dict()
    stats = first.stats[0]
    assert stats.emitted == 5 * SIZE

    upstream.allow(1000)
    # The threads of both draw from one source: end the first one's.
    first._pipeline._shutdown()
    second = make()
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert second.stats[0].fresh == stats.fresh
    for _ in range(60):
        counts.update(next(second)["number"].tolist())
    assert max(counts.values()) <= 4
    assert second.stats[0].emitted == 65 * SIZE
    assert sum(counts.values()) == 65 * SIZE
    assert len(counts) == second.stats[0].fresh
    with pytest.raises(ValueError, match="max_factor of 'echo0': 4.0 in the checkpoint, 5.0 here"):
        other = numbers(upstream, {**mark, "max_factor": 5}, enable_checkpointing=True)
        EchoIterator(other, ["number"]).load_state_dict(state)


def test_an_epoch_goes_on_where_its_state_was_taken(shards: Sequence[str]) -> None:
    def make() -> EchoIterator:
        return EchoIterator(
            _only_numbers(shards, {}, "sample"),
            ["before"],
            reader_name="train",
            last_batch_policy=LastBatchPolicy.PARTIAL,
        )

    whole = make()
    seen: set[float] = set()
    for _ in range(5):
        seen |= {*next(whole)["before"].tolist()}
    resumed = make()
    resumed.load_state_dict(whole.state_dict())
    for epoch in (1, 2):
        seen |= {value for batch in resumed for value in batch["before"].tolist()}
        assert len(seen) == epoch * SAMPLES


CHAINS = {
    "before a number": (FILL, {"factor": 2}),
    "after a number": ({"factor": 2}, FILL),
    "twice": (FILL, FILL),
    "of batches, before a fraction": ({**FILL, "unit": "batch"}, {"factor": 1.5}),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_it_stands_beside_other_marks(chain: str) -> None:
    pipeline = numbers(Upstream(10**6), *CHAINS[chain])
    counts: Counter[int] = Counter()
    for _ in range(60):
        values = draw(pipeline)
        assert len(values) == SIZE
        counts.update(values)
    first, second = pipeline.echo_stats()
    assert first.emitted == second.fresh
    assert second.emitted == 60 * SIZE
    assert len(counts) > 8 * SIZE
    assert max(counts.values()) <= 64


def test_epochs_in_a_chain_need_it_at_the_last_mark(shards: Sequence[str]) -> None:
    def chain(*factors: Any) -> EchoIterator:
        @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=11)
        def define() -> Any:
            jpeg, _ = read(shards)
            image = fn.decoders.image(jpeg)
            for factor in factors:
                image = echo(image, factor=factor)
            return image

        policy = LastBatchPolicy.PARTIAL
        return EchoIterator(define(), ["image"], reader_name="train", last_batch_policy=policy)

    iterator = chain(2, "fill")
    for epoch in (1, 2):
        for _ in iterator:
            pass
        assert iterator.stats[1].fresh >= epoch * 2 * SAMPLES
    with pytest.raises(TypeError, match="with that mark the last one"):
        chain("fill", 2)


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        (("fill", lambda epoch: 2), 'is a schedule over epochs, and the mark .echo0. .* factor = "fill"'),
        (("fill", "auto"), "factor = 'auto' is used with factor = 'fill' of the mark 'echo0'"),
        (("auto", "fill"), "factor = 'fill' is used with factor = 'auto' of the mark 'echo0'"),
    ],
)
def test_what_cannot_stand_beside_it_is_refused(marks: Sequence[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        numbers(Upstream(), *({"factor": factor} for factor in marks))


@pytest.mark.usefixtures("no_start")
def test_the_seed_decides_which_samples_are_repeated_together() -> None:
    streams = []
    for seed in (1, 2, 1):
        source = Upstream(4)
        pipeline = numbers(source, {**FILL, "seed": seed, "shuffle_buffer": 4 * SIZE})
        fast(pipeline, 4)
        streams.append([draw(pipeline) for _ in range(6)])
        source.allow(1000)
    assert streams[0] == streams[2]
    assert streams[0] != streams[1]


@pytest.mark.usefixtures("no_start")
def test_whole_batches_repeat_with_their_unit(upstream: Upstream) -> None:
    upstream.allow(3)
    pipeline = numbers(upstream, {**FILL, "unit": "batch", "shuffle_buffer": 3})
    fast(pipeline, 3)
    repeats = [draw(pipeline) for _ in range(6)]
    assert all(values == list(range(values[0], values[0] + SIZE)) for values in repeats)
    assert {values[0] for values in repeats} == {0, SIZE, 2 * SIZE}


def test_one_use_each_is_no_echo(shards: Sequence[str]) -> None:
    batches = run(echoed(shards, None, {**FILL, "max_factor": 1}), 20)
    assert set(uses(batches).values()) == {1}
