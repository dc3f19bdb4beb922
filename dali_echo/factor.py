"""How often each fresh item is used: a number, a schedule over the reader's epochs, measured, or to fill."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

Schedule: TypeAlias = "Callable[[int], float]"


@dataclass(frozen=True)
class Factor:
    """A mean number of uses: constant, a function of the reader's epoch (from 0), "auto" or "fill"."""

    value: float | Schedule | Literal["auto", "fill"]

    @property
    def measured(self) -> bool:
        """Whether `dali_echo.auto` sets it, and the methods here do not know it."""
        return self.value == "auto"

    @property
    def fills(self) -> bool:
        """Whether time decides, in `dali_echo.filling`, and the methods here do not know it."""
        return self.value == "fill"

    def at(self, epoch: int) -> float:
        """The mean number of uses of the items read in `epoch`."""
        if not callable(self.value):
            return cast(float, self.value)
        return _check(self.value(epoch), f"the factor's schedule returned for epoch {epoch}:")

    def uses(self, epoch: int, index: int, ordinal: int, count: int) -> NDArray[np.int64]:
        """Planned uses of `count` items from the one that is `index` in its epoch and `ordinal` in all.

        Each item gets the integer below or above the factor, by error diffusion: after n items of a
        constant factor e, round(n * e) uses are planned; with a schedule, round(n * e) after n items of
        an epoch, so that every epoch has the length that its factor says.
        """
        first = index if callable(self.value) else ordinal
        planned = np.rint(np.arange(first, first + count + 1) * self.at(epoch))
        uses: NDArray[np.int64] = np.diff(planned).astype(np.int64)
        return uses

    def samples(self, epoch: int, size: int) -> int:
        """Samples that `size` fresh ones of `epoch` become.

        Raises:
            TypeError: with "fill", as nobody knows it.
        """
        if self.fills:
            raise TypeError(
                'with factor = "fill" an epoch has no length in advance, since samples are used as often as '
                "time allows: let EchoIterator(…, reader_name=…) end each epoch, with that mark the last "
                "one, count steps, or give a number as the factor"
            )
        return round(size * self.at(epoch))


def parse_factor(value: Any) -> Factor:
    """Check the `factor` argument of `echo`.

    Raises:
        TypeError: if it is neither a number, callable, "auto" nor "fill".
        ValueError: if it is below 1 or not finite.
    """
    known = callable(value) or (isinstance(value, str) and value in ("auto", "fill"))
    return Factor(value if known else _check(value, "factor ="))


def _check(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(
            f"{what} {value!r} is not a number; give the mean number of uses of each fresh item, "
            f'such as 2 or 2.5, a callable that returns it for an epoch, "auto" or "fill"'
        )
    if not math.isfinite(value) or value < 1:
        raise ValueError(f"{what} {value!r} must be a finite number, at least 1 (1 means no echo)")
    return float(value)
