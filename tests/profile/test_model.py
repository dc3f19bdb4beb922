import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_echo.plan import MARKS, Work, batch_seconds
from dali_echo.profile.clock import Piece
from dali_echo.profile.model import Part, Place, Round, emitted_s, places

SECONDS = st.floats(1e-6, 1)
FACTORS = st.floats(1, 10)


@given(SECONDS, SECONDS, FACTORS)
def test_a_part_that_waits_overlaps_with_the_rest(up, down, factor):
    fresh_s = factor * emitted_s(Part(up, 0), [Part(down, 0)], 2, factor)
    assert fresh_s == pytest.approx(max(up, factor * down))
    ratio = up / down
    gain = emitted_s(Part(up, 0), [Part(down, 0)], 2, 1) / (fresh_s / factor)
    assert gain == pytest.approx(factor * max(ratio, 1) / max(ratio, factor))


@pytest.mark.parametrize("resource", ["cpu", "gpu"])
@given(up=SECONDS, down=SECONDS, factor=FACTORS)
def test_parts_that_fill_the_same_cores_or_gpu_add_up(resource, up, down, factor):
    def part(seconds):
        return Part(seconds, 2 * seconds) if resource == "cpu" else Part(seconds, 0, seconds)

    assert emitted_s(part(up), [part(down)], 2, factor) == pytest.approx(up / factor + down)


@given(
    read=SECONDS, decode=SECONDS, augment=SECONDS, step=SECONDS, mark=st.sampled_from(MARKS), factor=FACTORS
)
def test_it_is_the_model_of_the_plan(read, decode, augment, step, mark, factor):
    cores = 3
    stages = [decode, augment]
    before, after = sum(stages[: MARKS.index(mark)]), sum(stages[MARKS.index(mark) :])
    up, down = Part(max(read, before), cores * before), Part(after, cores * after)
    fresh_s = factor * emitted_s(up, [down, Part(step, 0)], cores, factor)
    assert fresh_s == pytest.approx(batch_seconds(Work(read, decode, augment, step), mark, factor))


def one_round(**alone):
    """A round in which a stage has these seconds by the clock and of the cores."""
    pieces = {name: Piece(*times, batches=10) for name, times in alone.items()}
    sides = {name: Piece(0, 0, 10) for name in (*alone, "batch")}
    return Round(2, pieces, sides, sides, sides, Piece(1, 1, 10), dict.fromkeys(alone, False))


@pytest.mark.parametrize(
    ("stages", "bottleneck"),
    [
        ({"read": (3, 0.1), "decode": (2, 1), "step": (1, 0)}, "read"),
        ({"read": (1, 0.1), "decode": (1, 1.5), "augment": (1, 2.5), "step": (1.9, 0)}, "augment"),
        ({"read": (1, 0.1), "decode": (1, 1.5), "augment": (1, 2.5), "step": (2.1, 0)}, "step"),
    ],
)
def test_the_bottleneck_is_what_needs_most_of_what_is_short(stages, bottleneck):
    assert one_round(**stages).bottleneck() == bottleneck


def test_a_gpu_is_shared_by_the_stages_on_it():
    measured = one_round(read=(2, 0), decode=(1.5, 0), augment=(1, 0), step=(1, 0))
    measured.uses_gpu.update(decode=True, augment=True, step=True)
    assert measured.bottleneck() == "decode"
    place = Place("decode", "decode", "sample")
    assert measured.t_up(place) == 1.5
    assert measured.t_down(place) == 2
    assert measured.emitted_s(place, 3) == pytest.approx(1.5 / 3 + 2)


def test_where_a_mark_could_stand():
    assert [place.name for place in places(["read", "augment"])] == ["read", "augment", "batch"]
    assert places(["read", "decode", "transfer"])[-1] == Place("batch", "transfer", "batch")
