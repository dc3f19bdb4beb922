from hypothesis import given
from hypothesis import strategies as st

from dali_echo.epochs import Reader
from dali_echo.shards.order import Order

COUNTS = st.lists(st.integers(1, 30), min_size=1, max_size=8)


def order(counts, parts=1, part=0, *, pads=False, sticks=False, batch_size=4, lanes=3, window=10, seed=1):
    reader = Reader(sum(counts), parts, part, pads, sticks)
    return Order(counts, reader, batch_size, lanes, window, seed)


def samples(epoch):
    return list(zip(epoch.shard[epoch.given].tolist(), epoch.sample[epoch.given].tolist(), strict=True))


@given(COUNTS, st.integers(1, 4), st.booleans(), st.integers(0, 40), st.integers(1, 5), st.integers(0, 3))
def test_parts_are_disjoint_and_complete(counts, parts, sticks, window, lanes, number):
    parts = min(parts, sum(counts))
    together = [
        sample
        for part in range(parts)
        for sample in samples(
            order(counts, parts, part, sticks=sticks, window=window, lanes=lanes).epoch(number)
        )
    ]
    assert sorted(together) == [(shard, i) for shard, count in enumerate(counts) for i in range(count)]


@given(COUNTS, st.integers(1, 40), st.integers(1, 5))
def test_no_sample_is_given_long_after_or_before_its_place(counts, window, lanes):
    epoch = order(counts, window=window, lanes=lanes).epoch(0)
    for number, place in enumerate(epoch.given.tolist()):
        assert abs(place - number) <= 2 * window
        assert place < epoch.reach[number]


@given(COUNTS, st.integers(1, 5))
def test_without_a_window_the_order_is_that_of_the_shards(counts, lanes):
    expected = [(shard, i) for shard, count in enumerate(counts) for i in range(count)]
    assert samples(order(counts, window=0, lanes=lanes).epoch(3)) == expected


def test_lanes_read_one_shard_at_a_time_and_take_turns():
    epoch = order([20] * 6, lanes=3, window=1).epoch(0)
    assert epoch.lane[:6].tolist() == [0, 1, 2, 0, 1, 2]
    for lane in range(3):
        mine = epoch.shard[epoch.lane == lane]
        assert len(set(mine[:20].tolist())) == len(set(mine[20:].tolist())) == 1


def test_seeds_and_epochs_differ_and_repeat():
    counts = [50] * 4
    first = samples(order(counts).epoch(0))
    assert samples(order(counts).epoch(0)) == first
    assert samples(order(counts).epoch(1)) != first
    assert samples(order(counts, seed=2).epoch(0)) != first
    # ... but ranks with different seeds agree on the order of the shards.
    halves = [samples(order(counts, 2, part, seed=part).epoch(5)) for part in range(2)]
    assert len({*halves[0], *halves[1]}) == 200


@given(COUNTS, st.integers(1, 4), st.booleans(), st.booleans(), st.integers(1, 7), st.integers(0, 60))
def test_the_position_of_an_iteration(counts, parts, pads, sticks, batch_size, iteration):
    parts = min(parts, sum(counts))
    tested = order(counts, parts, parts - 1, pads=pads, sticks=sticks, batch_size=batch_size)
    reader, epoch, place = tested.reader, 0, 0
    for _ in range(iteration):
        place += batch_size
        while place >= (reader.batches(batch_size) * batch_size if pads else reader.samples(epoch)):
            place -= reader.batches(batch_size) * batch_size if pads else reader.samples(epoch)
            epoch += 1
    assert tested.position(iteration) == (epoch, place)
