"""Properties of the bookkeeping of "fill", whatever arrives when."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dali_echo.fill import FillBuffer

# For each draw, how many upstream batches have arrived since the one before.
ARRIVALS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


class Stream:
    """Drives a buffer as the source does, and keeps what it did."""

    def __init__(self, capacity: int, batch: int, most: int = 8, seed: int = 0) -> None:
        self.buffer = FillBuffer(capacity, batch, seed)
        self.batch, self.most = batch, most
        self.ready = 0
        self.draws: list[list[int]] = []
        self.uses: Counter[int] = Counter()
        self.left: set[int] = set()
        self.waited = 0

    def take(self, rows: int | None = None) -> None:
        buffer = self.buffer
        leaving = buffer.leaving()[: max(0, buffer.live + buffer.intake - buffer.capacity)].tolist()
        assert all(self.uses[item] for item in leaving), "what leaves has been used"
        self.left |= set(leaving)
        buffer.discard(leaving)
        buffer.add(np.full(rows or self.batch, self.most), 1.0)

    def draw(self, arrived: int = 0) -> list[int]:
        self.ready = min(1, self.ready + arrived)
        while self.buffer.wants(self.batch, 1.0):
            if not self.ready and self.buffer.live >= self.batch:
                break
            self.waited += not self.ready
            self.ready = 0
            self.take()
        items = self.buffer.draw(self.batch).items.tolist()
        self.uses.update(items)
        self.draws.append(items)
        return items


@given(st.integers(1, 9), st.floats(1, 6), st.integers(1, 6), ARRIVALS)
def test_batches_are_full_of_different_items_and_no_item_has_more_than_the_most_uses(
    batch: int, buffers: float, most: int, arrivals: list[int]
) -> None:
    stream = Stream(int(batch * buffers), batch, most)
    for arrived in arrivals:
        items = stream.draw(arrived)
        assert len(set(items)) == len(items) == batch
        assert not set(items) & stream.left
        assert stream.buffer.live <= max(stream.buffer.capacity, batch)
    assert max(stream.uses.values()) <= most
    # Nothing is passed over: what has been taken is used at once, in order.
    assert sorted(stream.uses) == list(range(stream.buffer.added))
    assert stream.buffer.unused == 0


@given(st.integers(1, 9), st.integers(1, 6))
def test_an_upstream_that_keeps_up_is_never_repeated(batch: int, buffers: int) -> None:
    stream = Stream(batch * buffers, batch)
    drawn = [item for _ in range(30) for item in stream.draw(arrived=1)]
    assert drawn == list(range(30 * batch))


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 8))
def test_a_stall_is_bridged_until_every_use_is_spent(batch: int, buffers: int, most: int) -> None:
    stream = Stream(batch * buffers, batch, most)
    for _ in range(buffers):
        stream.draw(arrived=1)
    stream.waited = 0
    for _ in range(buffers * (most - 1)):
        stream.draw()
    assert stream.waited == 0
    assert set(stream.uses.values()) == {most}
    assert stream.buffer.live == 0


@given(st.integers(4, 12), st.integers(4, 12), st.integers(0, 2**64 - 1))
def test_uses_stay_even_during_a_stall(batch: int, buffers: int, seed: int) -> None:
    stream = Stream(batch * buffers, batch, 100, seed)
    for _ in range(buffers):
        stream.draw(arrived=1)
    for _ in range(5 * buffers):
        stream.draw()
        assert max(stream.uses.values()) - min(stream.uses.values()) <= 1


@given(st.integers(1, 8), st.integers(2, 40), st.integers(2, 6))
@settings(max_examples=30)
def test_repeats_lie_apart_and_each_sample_gets_its_share(batch: int, buffers: int, period: int) -> None:
    stream = Stream(batch * buffers, batch)
    draws = 20 * period + 4 * buffers
    for number in range(draws):
        stream.draw(arrived=number % period == 0)
    last = dict.fromkeys(range(stream.buffer.added), -1)
    for number, items in enumerate(stream.draws):
        for item in items:
            # While few are live, they must be repeated at once.
            if number > 2 * buffers * period and last[item] >= 0:
                assert number - last[item] > min(buffers, 8 * period) // 4 - 1
            last[item] = number
    settled = [stream.uses[item] for item in stream.left if item >= batch * buffers]
    assert not settled or np.mean(settled) >= period * 0.6


def test_a_stall_re_forms_the_batches_differently_with_each_seed() -> None:
    orders = []
    for seed in (1, 2):
        stream = Stream(64, 8, seed=seed)
        for _ in range(8):
            stream.draw(arrived=1)
        orders.append([stream.draw() for _ in range(24)])
    assert orders[0] != orders[1]
    blocks = [{item // 8 for item in items} for items in orders[0]]
    assert np.mean([len(block) for block in blocks]) > 2


@given(ARRIVALS, st.integers(0, 59))
def test_a_restored_buffer_goes_on_with_the_same_uses(arrivals: list[int], saved: int) -> None:
    def run(restored: bool) -> tuple[list[list[int]], dict[str, Any]]:
        stream = Stream(24, 8, 4)
        for number, arrived in enumerate(arrivals):
            stream.draw(arrived)
            if restored and number == saved:
                state = stream.buffer.state()
                assert min(min(v) for v in state.values() if isinstance(v, np.ndarray) and len(v)) >= 0
                stream.buffer = FillBuffer(24, 8, 99)
                stream.buffer.restore(state)
        return stream.draws, stream.buffer.state()

    expected, got = run(restored=False), run(restored=True)
    assert expected[0] == got[0]
    assert all(np.array_equal(expected[1][key], got[1][key]) for key in expected[1])


def test_the_upstream_is_not_read_beyond_what_a_batch_needs() -> None:
    buffer = FillBuffer(32, 8, 0)
    buffer.add(np.full(8, 3), 1.0)
    assert not buffer.wants(8, 1.0)
    buffer.draw(5)
    assert buffer.wants(8, 1.0)
    full = FillBuffer(8, 8, 0)
    full.add(np.full(8, 3), 1.0)
    full.draw(5)
    assert not full.wants(8, 1.0), "three unused items and eight more do not fit"
