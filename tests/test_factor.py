"""Planned uses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_echo.factor import Factor, parse_factor

FACTORS = st.floats(1, 20).map(lambda f: round(f, 3))


@given(FACTORS, st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_uses_are_the_integers_around_the_factor_and_add_up(factor: float, parts: list[int]) -> None:
    uses: list[int] = []
    for part in parts:
        uses += Factor(factor).uses(0, 0, len(uses), part).tolist()
    assert set(uses) <= {math.floor(factor), math.ceil(factor)}
    totals = np.cumsum(uses)
    assert totals.tolist() == [round((i + 1) * factor) for i in range(len(uses))]


def test_a_schedule_counts_anew_in_each_epoch() -> None:
    factor = Factor(lambda epoch: 1.5 + epoch)
    for epoch in range(3):
        uses = factor.uses(epoch, 0, 2 * epoch + 1, 25)
        assert uses.sum() == factor.samples(epoch, 25) == round(25 * (1.5 + epoch))


@pytest.mark.parametrize("value", [0.99, 0, -2, math.nan, math.inf])
def test_a_factor_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=f"factor = {value!r} must be a finite number, at least 1"):
        parse_factor(value)


@pytest.mark.parametrize("value", ["2", None, True, [2]])
def test_a_factor_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="is not a number; give the mean number of uses"):
        parse_factor(value)


def test_a_schedule_that_returns_nonsense_is_refused_with_its_epoch() -> None:
    with pytest.raises(ValueError, match="returned for epoch 3: 0.5 must be"):
        parse_factor(lambda epoch: 0.5).at(3)
