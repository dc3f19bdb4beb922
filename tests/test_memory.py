"""The memory limit, and the bytes that are really held."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import nvidia.dali.fn as fn
import pytest
from nvidia.dali import types

from dali_echo import echo, pipeline_def
from dali_echo.memory import parse_bytes
from dali_echo.pytorch import EchoIterator
from dali_echo.testing import assert_resumes_exactly

BATCH = 8
ROOT = Path(__file__).parents[1]
MEGA = 1024 * 1024


def image(number: int, megabytes: float) -> np.ndarray:
    return np.full((int(megabytes * MEGA),), number % 251, np.uint8)


def make(size: Any, **kwargs: Any) -> Any:
    """Echoes arrays of size(number) MiB that hold their number; only that reaches the outputs."""
    mark = {"factor": 3, "shuffle_buffer": 8 * BATCH, **kwargs.pop("mark", {})}

    def source(info: types.BatchInfo) -> list[np.ndarray]:
        first = info.iteration * BATCH
        return [image(number, size(number)) for number in range(first, first + BATCH)]

    def number(info: types.BatchInfo) -> list[np.ndarray]:
        return [np.int32(info.iteration * BATCH + i) for i in range(BATCH)]

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=3, prefetch_queue_depth=1, **kwargs)
    def arrays() -> Any:
        large = fn.external_source(source=source, batch_info=True, dtype=types.UINT8, ndim=1)
        small = fn.external_source(source=number, batch_info=True, dtype=types.INT32, ndim=0)
        large, small = echo(fn.copy(large), small, **mark)
        return fn.slice(large, 0, 1, axes=[0]), small

    return arrays()


def run(pipeline: Any, batches: int) -> tuple[Counter[int], int]:
    """Uses of each number, and the most bytes held."""
    uses: Counter[int] = Counter()
    most = 0
    for _ in range(batches):
        firsts, numbers = pipeline.run()
        got = [int(np.asarray(numbers[i])) for i in range(BATCH)]
        assert len(set(got)) == BATCH
        assert [int(np.asarray(firsts[i])[0]) for i in range(BATCH)] == [n % 251 for n in got]
        uses.update(got)
        most = max(most, pipeline.echo_stats()[0].live_bytes)
    return uses, most


def mixed_sizes(number: int) -> float:
    """Mostly small, with a large one here and there."""
    return 2.0 if number % 13 == 0 else 0.05


@pytest.mark.parametrize("size", [lambda _: 0.25, mixed_sizes])
@pytest.mark.parametrize("factor", [2, 2.5, 4])
def test_the_limit_holds_and_uses_stay_exact(size: Any, factor: float) -> None:
    limit = 9 * MEGA
    pipeline = make(size, mark={"factor": factor, "memory_limit": limit})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        uses, most = run(pipeline, 120)
    assert most <= limit
    assert most > limit / 2
    counts = Counter(uses.values())
    assert max(counts) == np.ceil(factor)
    assert sum(count for n, count in counts.items() if n < int(factor)) <= 8 * BATCH


def test_hitting_the_limit_shrinks_the_buffer_and_says_so_once() -> None:
    pipeline = make(lambda _: 0.25, mark={"memory_limit": 6 * MEGA})
    message = (
        r"memory_limit = 6,291,456 bytes of the mark 'echo0' holds about 23 samples of 262,148 bytes: "
        r"the shuffle buffer shrinks to that from 64"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        run(pipeline, 50)
    assert len([w for w in caught if "memory_limit" in str(w.message)]) == 1
    assert pipeline.echo_stats()[0].live_samples <= 23


def test_a_limit_that_fits_all_changes_nothing_and_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limited, _ = run(make(lambda _: 0.1, mark={"memory_limit": "1GiB"}), 40)
        free, _ = run(make(lambda _: 0.1), 40)
    assert limited == free


def test_a_limit_of_one_batch_suffices() -> None:
    pipeline = make(lambda _: 0.25, mark={"memory_limit": int(BATCH * 0.25 * MEGA + 4 * BATCH)})
    with pytest.warns(UserWarning, match="shrinks"):
        uses, most = run(pipeline, 30)
    assert set(uses.values()) == {3}
    assert most <= BATCH * 0.25 * MEGA + 4 * BATCH


def test_a_limit_below_one_batch_is_an_error_with_both_numbers() -> None:
    pipeline = make(lambda _: 0.25, mark={"memory_limit": "1MiB"})
    message = "memory_limit = 1,048,576 bytes .* does not hold an upstream batch of 2,097,184 bytes: raise"
    with pytest.raises(MemoryError, match=message):
        pipeline.run()


def test_a_sample_does_not_keep_its_batch_alive_when_there_is_a_limit() -> None:
    """Without a limit, the bytes counted are those of whole upstream batches."""
    per_sample = 0.25 * MEGA + 4
    for mark, exact in (({}, False), ({"memory_limit": "1GiB"}, True)):
        pipeline = make(lambda _: 0.25, mark=mark)
        run(pipeline, 41)
        (stats,) = pipeline.echo_stats()
        own = stats.live_samples * per_sample
        assert stats.live_bytes == own if exact else stats.live_bytes > own
        assert stats.live_bytes % per_sample == 0


def test_it_resumes_exactly_at_the_limit() -> None:
    def iterate() -> EchoIterator:
        pipeline = make(
            mixed_sizes,
            mark={"factor": 2.5, "memory_limit": 6 * MEGA},
            enable_checkpointing=True,
        )
        return EchoIterator(pipeline, ["first", "number"])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_resumes_exactly(iterate, 30)


def test_loops_left_early_hold_nothing() -> None:
    """In a process of its own, since what other tests left is let go of at any time."""
    code = """
import gc, threading
from dali_echo.pytorch import EchoIterator
from tests.test_memory import make

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

def leave():
    for _ in zip(range(3), EchoIterator(make(lambda _: 0.05), ["first", "number"]), strict=False):
        pass

for _ in range(20):
    leave()
gc.collect()
before, threads = resident(), threading.active_count()
for _ in range(100):
    leave()
gc.collect()
print(threading.active_count() - threads, resident() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    threads, grown = map(int, done.stdout.split())
    assert threads <= 0
    assert grown < 40 * MEGA


@pytest.mark.parametrize(
    ("text", "size"),
    [(7, 7), ("7", 7), ("512MiB", 512 * MEGA), ("4GiB", 2**32), ("1.5 GB", 1_500_000_000), ("2kB", 2000)],
)
def test_sizes_are_read(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "4 apples", "GiB", "-1GiB", "4gib", 0, -3])
def test_what_is_no_size_is_refused(text: int | str) -> None:
    with pytest.raises(ValueError, match=f"{text!r} is no size"):
        parse_bytes(text)


@pytest.mark.parametrize("value", [1.5, None, True, b"1"])
def test_another_type_of_size_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="give an integer in bytes, or a string"):
        parse_bytes(value)
