"""Properties of the bookkeeping, for all buffers, factors and batch sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dali_echo.buffer import EchoBuffer
from dali_echo.factor import Factor

FACTORS = st.one_of(st.integers(1, 9), st.floats(1, 9).map(lambda f: round(f, 3)))


class Stream:
    """Drives a buffer as the source does, and keeps what it did."""

    def __init__(self, capacity: int, batch: int, factor: float, seed: int = 0) -> None:
        self.buffer = EchoBuffer(capacity, batch, seed)
        self.batch = batch
        self.factor = factor
        self.planned: list[int] = []
        self.intakes: list[int] = []
        self.live: list[int] = []
        self.draws: list[list[int]] = []
        self.finished: list[tuple[int, int]] = []
        self.born: list[int] = []

    def take(self, rows: int | None = None) -> None:
        uses = Factor(self.factor).uses(0, 0, self.buffer.added, rows or self.batch)
        self.born += [self.buffer.drawn] * len(uses)
        self.buffer.add(uses, self.factor)
        self.planned += uses.tolist()
        self.intakes.append(len(self.draws))
        self.live.append(self.buffer.live)

    def step(self, size: int | None = None, more: bool = True) -> list[int]:
        size = size or self.batch
        while more and self.buffer.wants(size, self.factor):
            self.take()
        draw = self.buffer.draw(size)
        items = draw.items.tolist()
        self.draws.append(items)
        self.finished += [(i, self.buffer.drawn) for i in draw.items[draw.finished].tolist()]
        return items

    def drain(self) -> None:
        while self.step(more=False):
            pass


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    batch = draw(st.integers(1, 12))
    capacity = draw(st.integers(batch, 12 * batch))
    return Stream(capacity, batch, draw(FACTORS), draw(st.integers(0, 2**64 - 1)))


@given(streams(), st.lists(st.integers(1, 12), max_size=80))
def test_uses_are_as_planned_and_a_batch_holds_no_item_twice(stream: Stream, sizes: list[int]) -> None:
    for size in sizes:
        items = stream.step(min(size, stream.batch))
        assert len(items) == min(size, stream.batch)
        assert len(set(items)) == len(items)
    stream.drain()
    used = np.bincount(sum(stream.draws, []), minlength=len(stream.planned))
    assert used.tolist() == stream.planned
    assert stream.buffer.live == stream.buffer.remaining == 0
    assert sorted(i for i, _ in stream.finished) == list(range(len(stream.planned)))


@given(streams(), st.integers(1, 60))
def test_the_first_batch_needs_one_upstream_batch_and_no_batch_waits_for_two(
    stream: Stream, steps: int
) -> None:
    for _ in range(steps):
        stream.step()
    assert stream.intakes[0] == 0
    assert len(stream.intakes) == len(set(stream.intakes))


@given(streams(), st.integers(1, 60))
def test_no_more_are_live_than_the_capacity_unless_a_batch_needs_them(stream: Stream, steps: int) -> None:
    for _ in range(steps):
        before = stream.buffer.live
        taken = len(stream.live)
        stream.step()
        if len(stream.live) > taken:
            assert stream.live[-1] <= stream.buffer.capacity or before < stream.batch


@given(streams())
@settings(max_examples=30)
def test_an_upstream_batch_is_taken_once_in_factor_draws(stream: Stream) -> None:
    for _ in range(200):
        stream.step()
    in_use = 200 / stream.factor
    held = stream.buffer.capacity / stream.batch
    assert in_use - 1 <= len(stream.intakes) <= in_use + held + 1


@given(streams())
@settings(max_examples=30)
def test_no_item_lives_longer_than_its_stretches_and_the_uses_before_it(stream: Stream) -> None:
    for _ in range(200):
        stream.step()
    most = math.ceil(stream.factor)
    stretch = 2 * stream.buffer.capacity
    bound = most * (stretch + stream.buffer.capacity + stream.batch)
    assert all(at - stream.born[item] <= bound for item, at in stream.finished)


@given(st.integers(1, 12), st.integers(0, 2**64 - 1), st.integers(1, 40))
def test_factor_one_passes_items_in_order(batch: int, seed: int, steps: int) -> None:
    stream = Stream(8 * batch, batch, 1, seed)
    assert sum((stream.step() for _ in range(steps)), []) == list(range(steps * batch))
    assert stream.buffer.live == 0


@pytest.mark.parametrize("factor", [2, 3.5, 8])
@pytest.mark.parametrize("batches", [4, 32])
def test_gaps_between_uses_are_spread(factor: float, batches: int) -> None:
    stream = Stream(batches * 32, 32, factor, seed=5)
    last: dict[int, int] = {}
    gaps = []
    for draw in range(1500):
        for item in stream.step():
            if item in last and draw > 300:
                gaps.append(draw - last[item])
            last[item] = draw
    # Two uses, each uniform in its stretch, lie a stretch apart on average, with a triangular spread of
    # 1 / sqrt(6) of it.
    mean = np.mean(gaps)
    assert 0.7 * batches <= mean <= 1.5 * batches
    assert 0.35 <= np.std(gaps) / mean <= 0.5
    assert np.quantile(gaps, 0.05) < 0.4 * mean
    assert np.quantile(gaps, 0.95) > 1.5 * mean


@pytest.mark.parametrize("factor", [2, 3.5, 8])
def test_a_full_buffer_is_used(factor: float) -> None:
    stream = Stream(64 * 32, 32, factor)
    live = []
    for _ in range(1500):
        stream.step()
        live.append(stream.buffer.live)
    assert np.mean(live[700:]) > 0.85 * stream.buffer.capacity


def test_items_of_many_upstream_batches_meet_in_a_batch() -> None:
    stream = Stream(32 * 32, 32, 4)
    for _ in range(600):
        stream.step()
    origins = [len({item // 32 for item in draw}) for draw in stream.draws[300:]]
    assert np.mean(origins) > 15


def test_the_seed_decides_the_order() -> None:
    def order(seed: int) -> list[list[int]]:
        stream = Stream(128, 32, 2.5, seed)
        return [stream.step() for _ in range(50)]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_a_short_upstream_batch_is_followed_by_another() -> None:
    stream = Stream(8, 8, 2)
    stream.take(3)
    assert len(set(stream.step())) == 8


def test_a_capacity_below_an_upstream_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer of 7 items .* batches of 8: use a capacity of 8"):
        EchoBuffer(7, 8, 0)
