import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_echo.plan import MARKS, Job, batch_seconds, over_ranks, plan, speed_up

# The paper's network experiment in round numbers: storage six times slower than the step.
NETWORK = Job(batch_size=100, step_ms=100, samples_per_s=1000 / 6)
TIMES = st.floats(0.01, 100)


@st.composite
def jobs(draw):
    return Job(
        batch_size=draw(st.integers(1, 1024)),
        step_ms=draw(st.floats(1, 1000)),
        samples_per_s=draw(st.floats(1, 1e6)),
        decode_ms=draw(TIMES),
        augment_ms=draw(st.just(0.0) | TIMES),
        cores=draw(st.floats(1, 64)),
        ranks=draw(st.integers(1, 4096)),
        encoded_bytes=draw(st.none() | st.floats(1e3, 1e6)),
        memory_bytes=draw(st.none() | st.floats(1e6, 1e12)),
        dataset_samples=1e6,
        epochs=90,
        repeat_worth=draw(st.floats(0, 1)),
    )


def test_the_network_experiment_of_the_paper():
    result = plan(NETWORK)
    assert result.work.bottleneck == "the storage"
    assert result.best.mark == "read"
    assert pytest.approx(6) == result.best.R
    assert result.best.factor == 6
    assert result.best.speed_up == pytest.approx(6)
    assert speed_up(NETWORK, result.work, "read", 5) == pytest.approx(5)
    # Beyond R, repeats take time: max(R, 1) / max(R, e) per fresh batch.
    assert speed_up(NETWORK, result.work, "read", 8) == pytest.approx(8 * 6 / 8)


def test_repeats_that_are_worth_less():
    job = dataclasses.replace(NETWORK, repeat_worth=0.5625)
    assert speed_up(job, plan(job).work, "read", 5) == pytest.approx(3.25)


@given(jobs(), st.floats(1, 20), st.sampled_from(MARKS))
def test_the_law(job, factor, mark):
    """With nothing on the cores on one side of the mark, T(1) / T(e) = max(R, 1) / max(R, e)."""
    job = dataclasses.replace(job, augment_ms=0) if mark == "decode" else job
    result = plan(job)
    option = result.options[MARKS.index(mark)]
    ratio = batch_seconds(result.work, mark, 1) / batch_seconds(result.work, mark, factor)
    assert ratio == pytest.approx(max(option.R, 1) / max(option.R, factor))


@given(jobs())
def test_what_every_plan_keeps(job):
    result = plan(job)
    for option in result.options:
        assert 1 <= option.factor <= max(1, min(option.R * (1 + 1e-9), 8))
        assert option.speed_up <= max(option.factor, 1) * (1 + 1e-9)  # but for rounding
        assert option.t_up_s / option.t_down_s == pytest.approx(option.R)
    if result.best is None:
        assert "not help" in result.advice[0]
        assert result.without_echo == result.with_echo
    else:
        assert result.best.factor > 1
        assert result.best.shuffle_buffer >= job.batch_size
        assert result.without_echo.hours / result.with_echo.hours == pytest.approx(result.best.speed_up)
        if job.encoded_bytes is not None:
            assert result.with_echo.bytes_read <= result.without_echo.bytes_read


@given(jobs())
def test_nothing_is_gained_where_the_accelerator_is_busy(job):
    slow = plan(dataclasses.replace(job, step_ms=1e13))
    assert slow.best is None
    assert slow.advice[0].startswith("Echo would not help here: the accelerator is the bottleneck (R = 0.")


def test_both_sides_of_a_mark_share_the_cores():
    job = Job(batch_size=100, step_ms=50, samples_per_s=1e6, decode_ms=2, augment_ms=0.5)
    work = plan(job).work
    assert batch_seconds(work, "decode", 3) == pytest.approx(0.2 + 3 * 0.05)
    assert batch_seconds(work, "read", 3) == pytest.approx(3 * 0.25)
    assert batch_seconds(work, "augment", 3) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("job", "bottleneck", "mark"),
    [
        # Slow storage, idle cores: repeats of encoded bytes are cheapest.
        (Job(100, 100, 100, decode_ms=1, cores=8), "the storage", "read"),
        # Slow decoding.
        (Job(100, 100, 1e6, decode_ms=30, cores=8), "decoding", "decode"),
        # Slow storage, but decoding again would leave little of the gain.
        (Job(100, 100, 200, decode_ms=30, cores=8), "the storage", "decode"),
        # Nothing but repeating the same view helps.
        (Job(100, 100, 1e6, augment_ms=30, cores=8), "augmentation", "augment"),
    ],
)
def test_where_the_mark_goes(job, bottleneck, mark):
    result = plan(job)
    assert result.work.bottleneck == bottleneck
    assert result.best.mark == mark
    assert f"after {mark}" in result.advice[0]


@pytest.mark.parametrize(("ratio", "factor"), [(1.05, 1), (1.57, 1.5), (2.9, 2), (7.9, 7), (50, 8)])
def test_the_factor_is_rounded_down(ratio, factor):
    job = Job(batch_size=100, step_ms=100, samples_per_s=1000 / ratio)
    assert plan(job).options[0].factor == factor


def test_memory():
    job = dataclasses.replace(NETWORK, encoded_bytes=1e5)
    assert (plan(job).best.shuffle_buffer, plan(job).best.buffer_bytes) == (400, 4e7)
    large = plan(dataclasses.replace(job, memory_bytes=1e9))
    assert (large.best.shuffle_buffer, large.best.buffer_bytes) == (10_000, 1e9)
    capped = plan(dataclasses.replace(job, memory_bytes=1e9, dataset_samples=3000, ranks=2))
    assert capped.best.shuffle_buffer == 1500
    small = plan(dataclasses.replace(job, memory_bytes=2e7))
    assert "small" in small.advice[-1]
    none = plan(dataclasses.replace(job, memory_bytes=1e6))
    assert none.best is None
    assert "not help here: the memory for the buffer holds less than a batch" in none.advice[0]


def test_repeats_without_worth():
    result = plan(dataclasses.replace(NETWORK, repeat_worth=0))
    assert "not help here: with repeat_worth = 0" in result.advice[0]


def test_what_a_training_costs():
    job = dataclasses.replace(NETWORK, encoded_bytes=1e5, dataset_samples=1e6, epochs=90)
    result = plan(job)
    assert result.without_echo.hours == pytest.approx(90e6 / (1000 / 6) / 3600)
    assert result.with_echo.hours == pytest.approx(result.without_echo.hours / 6)
    assert result.without_echo.bytes_read == pytest.approx(9e12)
    assert result.with_echo.bytes_read == pytest.approx(1.5e12)
    assert plan(NETWORK).without_echo is None


def test_ranks_share_the_storage():
    job = Job(batch_size=100, step_ms=100, samples_per_s=8000, decode_ms=1, cores=8)
    plans = over_ranks(job, [1, 8, 64, 4096])
    assert [result.best is None for result in plans] == [True, True, False, False]
    assert [result.ranks for result in plans] == [1, 8, 64, 4096]
    assert pytest.approx(8) == plans[2].best.R
    assert pytest.approx(512) == plans[3].best.R
    assert any("Caution" in line for line in plans[3].advice)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0: give a positive number"),
        ({"step_ms": -1}, "step_ms = -1"),
        ({"samples_per_s": math.nan}, "samples_per_s = nan"),
        ({"decode_ms": -1}, "decode_ms = -1: give a number of 0 or more"),
        ({"memory_bytes": math.inf}, "memory_bytes = inf"),
        ({"repeat_worth": 1.5}, "repeat_worth = 1.5"),
    ],
)
def test_numbers_that_are_none(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(NETWORK, **change)
