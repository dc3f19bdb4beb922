"""The measured factor: what it follows, in virtual time, and what it must not disturb, in real pipelines."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nvidia.dali.fn as fn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

import dali_echo.auto
from dali_echo import echo, pipeline_def
from dali_echo.auto import KEPT, PARTS, TARGET, Auto
from dali_echo.buffer import EchoBuffer
from dali_echo.epochs import MovingEnds
from dali_echo.pytorch import EchoIterator
from dali_echo.ranks import sharing
from dali_echo.testing import assert_resumes_exactly
from tests.streams import SAMPLES, echoed, read, rows, uses

BATCH = 16


@dataclass
class Window:
    """What happened between two decisions."""

    factor: float
    seconds: float
    waited: float

    @property
    def waiting(self) -> float:
        return self.waited / self.seconds


class Virtual:
    """A trainer, the buffer, and an upstream with a queue of finished batches, in virtual time.

    The upstream makes batch i when batch i - depth has left the queue. As in `ahead.py`, one batch has left
    it before it is asked for, or as many more as a burst says.
    """

    def __init__(self, depth: int, capacity: int, t_down: Callable[[int], float]) -> None:
        self.now = 0.0
        self.waited = 0.0
        self.auto = Auto(8, 1, 4, MovingEnds(10**6), 1, sharing(), clock=lambda: self.now)
        self.buffer = EchoBuffer(capacity * BATCH, BATCH, seed=1)
        self.depth, self.t_down = depth, t_down
        self.draws = self.taken = self.planned = self.drawn = 0
        self.made, self.left = [0.0], [0.0] * depth
        self.asked = [0.0]
        self.burst: list[float] = []
        self.measured = 0
        self.most_ahead = 0

    def upstream(self, t_up: Callable[[int], float]) -> None:
        """Have all batches made that were asked for, one after the other."""
        while len(self.left) - self.depth < len(self.asked):
            i = len(self.left) - self.depth
            self.made.append(max(self.made[-1], self.left[i]) + t_up(i))
            start = max(self.asked[i], self.left[-1] if i else 0.0)
            self.left.append(max(start, self.made[-1]))
            if len(self.burst) < self.measured:
                self.burst.append(self.left[-1] - start)

    def step(self, t_up: Callable[[int], float]) -> None:
        self.auto.asked(self.waited, self.taken)
        burst = self.auto.burst()
        if burst:
            self.burst, self.measured = [], burst
            self.asked += [self.now] * burst
        buffer = self.buffer
        while (buffer.live < BATCH or self.auto.may_take(buffer)) and buffer.wants(BATCH, self.auto.factor):
            self.upstream(t_up)
            given = max(self.now, self.left[self.depth + self.taken])
            self.waited += given - self.now
            self.now = given
            self.taken += 1
            self.most_ahead = max(self.most_ahead, len(self.asked) - self.taken)
            if len(self.asked) <= self.taken:
                self.asked.append(self.now)
            planned = self.auto.uses(BATCH)
            factor = self.auto.factor
            assert set(planned.tolist()) <= {int(factor), -int(-factor // 1)}
            buffer.add(planned, factor)
            self.planned += int(planned.sum())
            self.auto.took(BATCH, int(planned.sum()), BATCH, buffer.drawn)
        self.drawn += len(buffer.draw(BATCH).items)
        self.auto.drew(BATCH, self.burst if self.left[-1] <= self.now else [])
        self.now += self.t_down(self.draws)
        self.draws += 1

    def windows(self, count: int, t_up: Callable[[int], float]) -> list[Window]:
        """Run through so many decisions."""
        result = []
        for _ in range(count):
            decision, now, waited = self.auto._decision, self.now, self.waited
            factor = self.auto.factor
            while self.auto._decision == decision:
                self.step(t_up)
            result.append(Window(factor, self.now - now, self.waited - waited))
        return result


def noise(size: float, seed: int) -> Callable[[int], float]:
    generator = random.Random(seed)
    return lambda i: 1 + size * generator.uniform(-1, 1)


def kept(factor: float, ratio: float, margin: float = 0.03) -> bool:
    """Whether the factor is one that the ratio, clamped, leaves as it is."""
    if factor == 1 and ratio < KEPT[1] + margin:
        return True
    return KEPT[0] - margin < ratio / factor < KEPT[1] + margin


@settings(max_examples=12, derandomize=True)
@given(
    before=st.floats(1.3, 7.5),
    after=st.floats(1.3, 7.5),
    depth=st.integers(1, 3),
    capacity=st.sampled_from([2, 4, 16]),
    size=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 99),
)
def test_the_factor_follows_within_two_windows_and_the_trainer_hardly_waits(
    before: float, after: float, depth: int, capacity: int, size: float, seed: int
) -> None:
    up, down = noise(size, seed), noise(size, seed + 1)
    virtual = Virtual(depth, capacity, lambda i: down(i))
    for ratio in (before, after, before):
        windows = virtual.windows(9, lambda i, ratio=ratio: ratio * up(i))  # type: ignore[misc]
        # The first window holds the change, if only at its beginning; the two after it follow.
        assert all(kept(w.factor, ratio, 0.03 + size / 4) for w in windows[3:]), (ratio, windows)
        settled = windows[5:]
        # Noise of 10 % moves the factor within what hysteresis allows, and costs up to half as much again.
        assert sum(w.waited for w in settled) < (0.05 + size / 4) * sum(w.seconds for w in settled), windows
        assert virtual.planned == virtual.drawn + virtual.buffer.remaining


@pytest.mark.parametrize(("ratio", "factor"), [(0.5, 1.0), (1.0, 1.0), (5.0, 5 * TARGET), (20.0, 8.0)])
def test_the_factor_is_r_between_1_and_the_highest(ratio: float, factor: float) -> None:
    virtual = Virtual(3, 4, lambda i: 1.0)
    virtual.windows(4, lambda i: ratio)
    assert virtual.auto.factor == pytest.approx(factor, abs=0.2)
    assert virtual.auto.factor * PARTS == int(virtual.auto.factor * PARTS)


def test_one_slow_batch_or_one_pause_does_not_move_it() -> None:
    virtual = Virtual(3, 4, lambda i: 500.0 if i % 400 == 399 else 1.0)
    slow = lambda i: 100.0 if i % 60 == 59 else 4.0  # noqa: E731
    virtual.windows(2, lambda i: 4.0)
    factors = {window.factor for window in virtual.windows(20, slow)}
    assert len(factors) == 1


def test_a_deep_queue_that_hides_the_upstream_is_not_asked_again_at_once() -> None:
    virtual = Virtual(3, 4, lambda i: 1.0)
    virtual.windows(4, lambda i: 4.0)
    factor = virtual.auto.factor
    for _ in range(12):
        # A burst finds twelve batches in a socket's buffer: nothing waited, and all come at once.
        virtual.auto._meter.reset()
        virtual.auto._follow(0.1, False)
        virtual.auto._follow(4.0, True)
        assert virtual.auto.factor == pytest.approx(factor, abs=0.1)
    assert virtual.auto._patience == 16
    assert virtual.auto._blind == 16
    virtual.auto._draws = virtual.auto._decision - virtual.auto._window // 2
    assert virtual.auto.burst() == 0


@given(st.lists(st.tuples(st.integers(PARTS, 8 * PARTS), st.integers(1, 300)), min_size=1, max_size=30))
def test_planned_uses_add_up_exactly_across_changes(parts: list[tuple[int, int]]) -> None:
    auto = Auto(8, 1, 4, None, 1, sharing())
    total = planned = 0
    for part, count in parts:
        auto._parts = part
        uses = auto.uses(count)
        total += part * count
        planned += int(uses.sum())
        assert uses.min() >= part // PARTS
        assert uses.max() <= -(-part // PARTS)
        assert planned == (total + PARTS // 2) // PARTS


@given(
    st.integers(5, 200),
    st.lists(st.tuples(st.integers(PARTS, 8 * PARTS), st.integers(1, 300)), min_size=1, max_size=20),
)
def test_epochs_end_where_the_uses_of_their_samples_do(size: int, parts: list[tuple[int, int]]) -> None:
    ends, planned, fresh, real = MovingEnds(size), 0.0, 0, []
    for part, count in parts:
        ends = ends.changed(round(planned), fresh, 0, part / PARTS)
        for _ in range(count):
            planned += part / PARTS
            fresh += 1
            if fresh % size == 0:
                real.append(planned)
    for epoch, end in enumerate(real):
        assert abs(ends.end(epoch) - end) <= 1
        assert ends.samples(epoch) > 0


class Scripted:
    """In place of the meter: R depends on nothing but the present factor, which so goes 1, 3, 2, 5, 1, ..."""

    NEXT: dict[float, float] = {1.0: 3.0, 3.0: 2.0, 2.0: 5.0, 5.0: 1.0}  # noqa: RUF012

    def __init__(self, period: int) -> None:
        self.waiting = 0.5

    def reset(self) -> None:
        pass

    def asked(self, now: float, wait_s: float, taken: int) -> None:
        pass

    def measure(self, factor: float, burst: Sequence[float]) -> tuple[float, float]:
        return self.NEXT[factor], 1.0


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dali_echo.auto, "Meter", Scripted)
    for name, value in {"TARGET": 1.0, "WINDOW": 3, "WARM_UP": 2, "DEEPEST": 8}.items():
        monkeypatch.setattr(dali_echo.auto, name, value)


@pipeline_def(batch_size=24, num_threads=2, device_id=None, seed=11, enable_checkpointing=True)
def resumable(shards: Sequence[str], marks: list[dict[str, Any]], reader: dict[str, Any]) -> Any:
    jpeg, label = read(shards, random_shuffle=True, **reader)
    for mark in marks:
        jpeg, label = echo(jpeg, label, **mark)
    return fn.pad(label, fill_value=32, shape=[3]), fn.random.uniform(range=[0.0, 1.0])


@pipeline_def(batch_size=32, num_threads=2, device_id=None, seed=11)
def labels(shards: Sequence[str], mark: dict[str, Any]) -> Any:
    _, label = read(shards)
    label, before = echo(fn.pad(label, fill_value=32, shape=[3]), fn.random.uniform(range=[0.0, 1.0]), **mark)
    return label, before


MARKS: dict[str, list[dict[str, Any]]] = {
    "samples": [{"factor": "auto"}],
    "batches": [{"factor": "auto", "unit": "batch", "shuffle_buffer": 3}],
    "first of two": [{"factor": "auto"}, {"factor": 2}],
    "second of two": [{"factor": 1.5}, {"factor": "auto", "shuffle_buffer": 48}],
}
READERS = [{}, {"pad_last_batch": True, "num_shards": 3, "shard_id": 1}]


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("marks", MARKS.values(), ids=MARKS.keys())
@pytest.mark.parametrize("policy", list(LastBatchPolicy), ids=lambda policy: policy.name)
@pytest.mark.parametrize("reader", READERS, ids=["whole", "padded shard"])
def test_a_state_resumes_bit_for_bit_across_changes(
    shards: Sequence[str], marks: list[dict[str, Any]], policy: LastBatchPolicy, reader: dict[str, Any]
) -> None:
    def make() -> EchoIterator:
        pipeline = resumable(shards, marks, reader)
        return EchoIterator(pipeline, ["label", "after"], reader_name="train", last_batch_policy=policy)

    assert_resumes_exactly(make, 20)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("unit", ["sample", "batch"])
def test_an_epoch_is_one_pass_of_the_fresh_samples_at_whatever_factor(
    shards: Sequence[str], unit: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="dali_echo")
    iterator = EchoIterator(
        labels(shards, {"factor": "auto", "unit": unit}),
        ["label", "before"],
        reader_name="train",
        last_batch_policy=LastBatchPolicy.PARTIAL,
    )
    seen: list[float] = []
    lengths, factors = [], set()
    for _ in range(12):
        length = len(iterator)
        count = 0
        for batch in iterator:
            seen += batch["before"].flatten().tolist()
            factors.add(iterator.stats[0].factor)
            count += 1
        lengths.append((length, count))
    assert factors == {1.0, 2.0, 3.0, 5.0}
    assert any(length != count for length, count in lengths), "len is for the present factor"
    stats = iterator.stats[0]
    assert stats.emitted == len(seen)
    # Twelve passes have been emitted, but for what the buffer holds.
    assert 12 * SAMPLES - 2 * 32 <= stats.fresh <= 12 * SAMPLES + 5 * 32
    assert "factor 1 -> 3 after batch 5: t_up = 3000 ms, t_down = 1000 ms, R = 3" in caplog.text


@pytest.mark.usefixtures("scripted")
def test_every_sample_is_used_as_planned(shards: Sequence[str]) -> None:
    pipeline = echoed(shards, mark={"factor": "auto"})
    counts = uses(rows(pipeline.run()) for _ in range(300))
    stats = pipeline.echo_stats()[0]
    finished = [n for n in counts.values() if n in (1, 2, 3, 5)]
    assert len(counts) - len(finished) <= stats.live_samples
    assert set(finished) == {1, 2, 3, 5}
    assert sum(counts.values()) == stats.emitted == 300 * 32


@pytest.mark.usefixtures("scripted")
def test_dali_s_own_iterator_takes_it(shards: Sequence[str]) -> None:
    pipeline = labels(shards, {"factor": "auto"})
    iterator = DALIGenericIterator(pipeline, ["label", "before"], reader_name="train", auto_reset=True)
    assert len(iterator) == -(-SAMPLES // 32)
    for _ in range(8):
        # DALI's iterator carries over what its last batch has too much.
        assert sum(1 for _ in iterator) in (7, 8)
    assert pipeline.echo_stats()[0].factor > 1
    assert pipeline.reader_meta("train")["epoch_size"] == round(SAMPLES * pipeline.echo_stats()[0].factor)


@pytest.mark.parametrize(
    ("second", "error"),
    [("auto", "give one of them a number"), (lambda epoch: 2, "is a schedule over epochs")],
)
def test_what_cannot_stand_beside_it_is_refused(shards: Sequence[str], second: Any, error: str) -> None:
    @pipeline_def(batch_size=32, num_threads=1, device_id=None)
    def both() -> Any:
        jpeg, label = read(shards)
        jpeg, label = echo(jpeg, label, factor="auto")
        return echo(jpeg, label, factor=second)

    with pytest.raises(ValueError, match=error):
        both()


@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf")])
def test_a_highest_factor_out_of_range_is_refused(shards: Sequence[str], value: float) -> None:
    with pytest.raises(ValueError, match="max_factor = .* must be a finite number, at least 1"):
        echoed(shards, mark={"factor": "auto", "max_factor": value})


RANK = """
import json, sys
import nvidia.dali.fn as fn
import torch.distributed as dist
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
import dali_echo.auto
from dali_echo import echo, pipeline_def, shards
from dali_echo.pytorch import EchoIterator

rank, store, urls = json.loads(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

class Scripted(dali_echo.auto.Meter):
    waiting = 0.5
    def measure(self, factor, burst):
        # Rank 1 has the slower upstream, and rank 0 waits for it in the training step.
        t_up = {1.0: 3.0, 3.0: 2.0, 2.0: 5.0, 5.0: 1.0}[factor]
        return (t_up / 4, 1.7) if rank == 0 else (t_up, 1.0)

dali_echo.auto.Meter = Scripted
dali_echo.auto.TARGET, dali_echo.auto.WINDOW, dali_echo.auto.WARM_UP = 1.0, 3, 2
dali_echo.auto.DEEPEST = 8

@pipeline_def(batch_size=16, num_threads=1, device_id=None, seed=11)
def training(urls):
    _, label = shards.read(urls, ext=["jpg", "cls"], name="train")
    return echo(label, factor="auto")

iterator = EchoIterator(
    training(urls), ["label"], reader_name="train", last_batch_policy=LastBatchPolicy.PARTIAL
)
epochs = []
for _ in range(6):
    epoch = []
    for batch in iterator:
        epoch.append((len(batch["label"]), iterator.stats[0].factor))
    epochs.append(epoch)
print(json.dumps(epochs))
"""


def test_ranks_agree_and_take_the_same_steps(shards: Sequence[str], tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, json.dumps([rank, str(tmp_path / "store"), list(shards)])],
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    first, second = (json.loads(process.communicate(timeout=120)[0]) for process in processes)
    assert first == second
    assert {factor for epoch in first for _, factor in epoch} == {1.0, 3.0, 2.0, 5.0}
