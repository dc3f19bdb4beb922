"""The stream of an EchoPipeline over real shards."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import nvidia.dali
import nvidia.dali.fn as fn
import pytest
from nvidia.dali import types
from nvidia.dali.pipeline import Pipeline

from dali_echo import EchoPipeline, echo, pipeline_def
from tests.streams import BATCH, SAMPLES, decode, echoed, read, rows, run, uses


@pytest.mark.parametrize("reader", [{}, {"pad_last_batch": True}, {"random_shuffle": True}])
@pytest.mark.parametrize("factor", [1, 2, 2.5, 5])
def test_every_sample_is_used_as_planned(
    shards: Sequence[str], factor: float, reader: dict[str, Any]
) -> None:
    pipeline = echoed(shards, reader, {"factor": factor, "shuffle_buffer": 96})
    batches = run(pipeline, round(3 * SAMPLES * factor / BATCH))
    counts = Counter(uses(batches).values())
    most = int(np.ceil(factor))
    if "pad_last_batch" not in reader:
        assert max(counts) == most
    # What is live or read ahead at the end has uses left.
    unfinished = sum(count for uses_, count in counts.items() if uses_ < int(factor))
    assert unfinished <= 96 + 3 * BATCH


@pytest.mark.parametrize("factor", [2, 3.5])
def test_a_batch_holds_no_sample_twice_and_rows_stay_aligned(shards: Sequence[str], factor: float) -> None:
    for batch in run(echoed(shards, None, {"factor": factor}), 50):
        assert len({(image, before) for image, _, before, _ in batch}) == BATCH
        assert all(image == label for image, label, _, _ in batch)


def test_the_first_batch_needs_one_upstream_batch(shards: Sequence[str]) -> None:
    pipeline = echoed(shards, None, {"factor": 4, "shuffle_buffer": 2048})
    pipeline.run()
    (stats,) = pipeline.echo_stats()
    assert (stats.fresh, stats.emitted, stats.live_samples) == (BATCH, BATCH, BATCH)


def test_random_operators_on_the_two_sides_are_independent(shards: Sequence[str]) -> None:
    batches = run(echoed(shards, None, {"factor": 2}), 40)
    before = {b for batch in batches for _, _, b, _ in batch}
    after = [a for batch in batches for _, _, _, a in batch]
    assert not before & set(after)
    by_sample: dict[float, set[float]] = {}
    for batch in batches:
        for _, _, b, a in batch:
            by_sample.setdefault(b, set()).add(a)
    assert max(map(len, by_sample.values())) == 2


def test_the_pipelines_of_a_chain_have_seeds_of_their_own(shards: Sequence[str]) -> None:
    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=11)
    def chain() -> Any:
        jpeg, _ = read(shards)
        return echo(echo(jpeg))

    seeds = [stage.seed for stage in chain().stages]
    assert seeds[0] == 11
    assert len(set(seeds)) == 3


def test_the_seed_decides_the_stream_bit_for_bit(shards: Sequence[str]) -> None:
    reader = {"random_shuffle": True, "initial_fill": 100}
    one, same, other = (run(echoed(shards, reader, {"factor": 2.5}, seed=seed), 30) for seed in (11, 11, 12))
    assert one == same
    assert one != other


def test_the_mark_s_seed_decides_the_order_alone(shards: Sequence[str]) -> None:
    one, other = (run(echoed(shards, None, {"seed": seed}), 30) for seed in (1, 2))
    assert one != other
    readings = [{key for key, count in uses(stream).items() if count == 2} for stream in (one, other)]
    assert len(readings[0] & readings[1]) > 0.7 * len(readings[0])


@pytest.mark.parametrize("unit", ["sample", "batch"])
def test_factor_one_passes_upstream_batches_in_order(shards: Sequence[str], unit: str) -> None:
    mark = {"factor": 1, "unit": unit, "shuffle_buffer": 512}
    images = [[image for image, *_ in batch] for batch in run(echoed(shards, None, mark), 20)]
    assert sum(images, []) == [i % SAMPLES for i in range(20 * BATCH)]


def test_a_batch_that_repeats_follows_itself(shards: Sequence[str]) -> None:
    batches = run(echoed(shards, None, {"factor": 3, "unit": "batch"}), 30)
    images = [[image for image, *_ in batch] for batch in batches]
    assert [images[i] == images[i + 1] for i in range(29)] == [i % 3 != 2 for i in range(29)]
    assert batches[0] != batches[1], "random operators after the mark are drawn anew"


def test_a_buffer_of_batches_spreads_them(shards: Sequence[str]) -> None:
    batches = run(echoed(shards, None, {"factor": 3, "unit": "batch", "shuffle_buffer": 6}), 60)
    firsts = [batch[0][2] for batch in batches]
    assert sum(a == b for a, b in itertools.pairwise(firsts)) < 15
    assert max(Counter(firsts).values()) == 3


def test_a_schedule_changes_the_factor_by_epoch(shards: Sequence[str]) -> None:
    mark = {"factor": lambda epoch: epoch + 1, "shuffle_buffer": BATCH}
    batches = run(echoed(shards, None, mark), (6 * SAMPLES) // BATCH)
    readings: dict[int, list[int]] = {}
    for (image, _), count in uses(batches).items():
        readings.setdefault(image, []).append(count)
    complete = [counts[:2] for counts in readings.values() if len(counts) >= 3]
    assert len(complete) > SAMPLES / 2
    assert all(counts == [1, 2] for counts in complete)


def test_copies_that_pad_a_batch_are_not_echoed(shards: Sequence[str]) -> None:
    pipeline = echoed(shards, {"pad_last_batch": True}, {"factor": 2})
    batches = run(pipeline, 4 * 16)
    for epoch in range(4):
        last = batches[16 * epoch + 15]
        samples = 2 * SAMPLES - 15 * BATCH
        assert len({row[:3] for row in last}) == samples
        assert {row[:3] for row in last[samples:]} == {last[samples - 1][:3]}
        batches[16 * epoch + 15] = last[:samples]
    counts = uses(batches)
    assert max(counts.values()) == 2
    (stats,) = pipeline.echo_stats()
    assert stats.fresh - stats.live_samples == sum(count == 2 for count in counts.values())
    # The reader's copies of the last sample are other readings of it.
    assert len([image for image, _ in counts if image == SAMPLES - 1]) <= 5


def test_marks_in_a_chain_multiply(shards: Sequence[str]) -> None:
    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=None, seed=11)
    def chain() -> Any:
        jpeg, label = read(shards)
        jpeg, label, before = echo(jpeg, label, fn.random.uniform(range=[0.0, 1.0]), factor=2)
        image = fn.decoders.image(jpeg)
        image, label, before = echo(image, label, before, factor=3, shuffle_buffer=BATCH)
        return image, label, before, fn.random.uniform(range=[0.0, 1.0])

    pipeline = chain()
    assert pipeline.reader_meta("train")["epoch_size"] == 6 * SAMPLES
    batches = run(pipeline, 70)
    assert max(uses(batches).values()) == 6
    assert all(image == label for batch in batches for image, label, *_ in batch)
    first, second = pipeline.echo_stats()
    assert second.emitted == 70 * BATCH
    assert first.emitted == second.fresh
    assert first.fresh < first.emitted


def test_conditions_on_both_sides(shards: Sequence[str]) -> None:
    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=None, seed=11, enable_conditionals=True)
    def conditional() -> Any:
        jpeg, label = read(shards)
        image = fn.decoders.image(jpeg)
        if fn.random.coin_flip(dtype=types.BOOL):
            image = fn.flip(image)
        image, label = echo(image, label)
        flipped = fn.random.coin_flip(dtype=types.BOOL)
        if flipped:
            image = fn.cast(255 - image, dtype=types.UINT8)
        return image, label, flipped

    pipeline = conditional()
    seen = Counter()
    for _ in range(20):
        images, labels, flips = pipeline.run()
        for i in range(BATCH):
            image, flip = np.asarray(images[i]), bool(np.asarray(flips[i]))
            seen[flip] += 1
            assert decode(255 - image if flip else image) == int(bytes(np.asarray(labels[i])))
    assert set(seen) == {False, True}


def test_the_function_s_own_arguments_pass(shards: Sequence[str]) -> None:
    @pipeline_def(num_threads=1, device_id=None)
    def sized(paths: Sequence[str], factor: float, *, offset: int = 0) -> Any:
        jpeg, label = echo(*read(paths), factor=factor)
        return fn.decoders.image(jpeg) + offset, label

    pipeline = sized(shards, 3, offset=1, batch_size=16, seed=3)
    assert pipeline.max_batch_size == 16
    assert pipeline.epoch_size("train") == 3 * SAMPLES
    assert pipeline.echo_stats()[0].factor == 3


def test_a_definition_without_a_mark_gives_dali_s_pipeline(shards: Sequence[str]) -> None:
    def body() -> Any:
        jpeg, label = read(shards, random_shuffle=True)
        return fn.decoders.image(jpeg), label, fn.random.uniform(), fn.random.uniform()

    kwargs = {"batch_size": BATCH, "num_threads": 1, "device_id": None, "seed": 4}
    ours = pipeline_def(body, **kwargs)()
    theirs = nvidia.dali.pipeline_def(body, **kwargs)()
    assert type(ours) is Pipeline
    assert run(ours, 3) == run(theirs, 3)


def test_side_effects_run_in_their_own_stage_only(shards: Sequence[str]) -> None:
    calls: Counter[str] = Counter()

    def count(name: str) -> Any:
        return lambda *_: calls.update([name])

    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=None, seed=11)
    def counting() -> Any:
        jpeg, label = read(shards)
        fn.python_function(label, function=count("before"), num_outputs=0)
        jpeg = echo(jpeg, factor=4)
        fn.python_function(jpeg, function=count("after"), num_outputs=0)
        return jpeg

    pipeline = counting()
    for _ in range(40):
        pipeline.run()
    assert calls["after"] >= 40 * BATCH
    assert calls["before"] <= calls["after"] / 2


@pytest.mark.parametrize("view", [lambda node: node, lambda node: fn.reshape(node, shape=[-1])])
def test_python_code_that_writes_into_its_input_does_not_reach_the_buffer(
    shards: Sequence[str], view: Any
) -> None:
    def brighten(image: np.ndarray) -> np.ndarray:
        image += 1
        return image

    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=None, seed=11)
    def writing() -> Any:
        jpeg, _ = read(shards)
        image = echo(fn.decoders.image(jpeg), factor=6, shuffle_buffer=BATCH)
        return fn.python_function(view(image), function=brighten)

    pipeline = writing()
    for _ in range(6):
        (images,) = pipeline.run()
        got = {int(np.asarray(images[i]).ravel()[0]) for i in range(BATCH)}
        assert all(value % 32 in range(12, 22) for value in got), got


def test_feeding_is_without_a_copy(shards: Sequence[str]) -> None:
    addresses: list[int] = []

    def note(image: np.ndarray) -> None:
        addresses.append(image.__array_interface__["data"][0])

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=11)
    def plain() -> Any:
        jpeg, _ = read(shards)
        return echo(fn.decoders.image(jpeg), factor=3, shuffle_buffer=BATCH)

    pipeline = plain()
    pipeline.build()
    fed = [pipeline._source.feed(0, types.BatchInfo(i, 0)) for i in range(3)]
    for batch in fed:
        for i in range(BATCH):
            note(np.asarray(batch[i]))
    assert set(Counter(addresses).values()) == {3}


def test_layouts_survive(shards: Sequence[str]) -> None:
    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=11)
    def plain() -> Any:
        jpeg, _ = read(shards)
        return echo(fn.decoders.image(jpeg))

    assert plain().run()[0].layout() == "HWC"


def test_the_end_of_a_source_drains_the_buffer_and_a_reset_starts_anew() -> None:
    def batches() -> Any:
        for first in range(0, 40, 8):
            yield [np.int32(first + i) for i in range(8)]

    @pipeline_def(batch_size=8, num_threads=1, device_id=None, seed=1)
    def finite() -> Any:
        number = fn.external_source(source=batches, cycle="raise", dtype=types.INT32, ndim=0)
        return echo(number, factor=3, shuffle_buffer=24)

    pipeline = finite()
    for _ in range(2):
        got: Counter[int] = Counter()
        with pytest.raises(StopIteration):
            while True:
                (numbers,) = pipeline.run()
                values = [int(np.asarray(numbers[i])) for i in range(len(numbers))]
                assert len(set(values)) == len(values)
                got.update(values)
        assert got == Counter(dict.fromkeys(range(40), 3))
        pipeline.reset()


def test_an_error_of_the_upstream_reaches_the_caller() -> None:
    def broken(info: types.BatchInfo) -> Any:
        if info.iteration == 3:
            raise KeyError("shard 3 is gone")
        return [np.int32(0)] * 8

    @pipeline_def(batch_size=8, num_threads=1, device_id=None, seed=1)
    def failing() -> Any:
        return echo(fn.external_source(source=broken, batch_info=True), factor=2)

    pipeline = failing()
    with pytest.raises(KeyError, match="shard 3 is gone"):
        for _ in range(20):
            pipeline.run()


def test_other_executors_are_refused(shards: Sequence[str]) -> None:
    with pytest.raises(ValueError, match="leave out exec_async=False"):
        echoed(shards, exec_async=False)


def test_an_echo_pipeline_cannot_be_constructed() -> None:
    with pytest.raises(TypeError, match=r"made by a function decorated with dali_echo.pipeline_def"):
        EchoPipeline(batch_size=1)


def test_a_definition_that_is_not_deterministic_is_refused(shards: Sequence[str]) -> None:
    count = 0

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)
    def moody() -> Any:
        nonlocal count
        count += 1
        jpeg, _ = echo(*read(shards))
        return echo(jpeg) if count == 1 else jpeg

    with pytest.raises(RuntimeError, match="set 2 marks when it ran first and 1 when it ran again"):
        moody()


def test_a_pipeline_is_freed_with_its_threads_without_the_garbage_collector(
    shards: Sequence[str],
) -> None:
    others = set(threading.enumerate())
    pipeline = echoed(shards)
    rows(pipeline.run())
    assert set(threading.enumerate()) > others
    stages = [weakref.ref(stage) for stage in pipeline.stages]
    gc.disable()
    try:
        del pipeline
        assert [stage() for stage in stages] == [None, None]
    finally:
        gc.enable()
    assert set(threading.enumerate()) <= others


ENDINGS = {
    "an error": ("raise KeyError('left')", "KeyError: 'left'"),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT)", "KeyboardInterrupt"),
    "Ctrl-C while the upstream is stuck": (
        "signal.alarm(1)\nfor _ in range(9): pipeline.run()",
        "KeyboardInterrupt",
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends_in_the_middle_of_an_epoch(ending: str) -> None:
    """An upstream that hangs from its eighth batch on does not keep it."""
    code, expected = ENDINGS[ending]
    script = f"""
import os, signal, threading
import numpy as np
import nvidia.dali.fn as fn
from dali_echo import echo, pipeline_def

def read(info):
    if info.iteration == 8:
        threading.Event().wait()
    return [np.float32(i) for i in range(8)]

@pipeline_def(batch_size=8, num_threads=1, device_id=None, seed=1)
def stuck():
    return echo(fn.external_source(source=read, batch_info=True), factor=1)

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
signal.signal(signal.SIGINT, interrupt)  # a background job starts with it ignored
pipeline = stuck()
for _ in range(3):
    pipeline.run()
{code}
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stderr.strip().endswith(expected), ended.stderr
