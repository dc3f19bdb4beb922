"""Comparing runs that differ in their echo, over several seeds: in a table and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean, stdev
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from train.record import Result

NOTHING = "–"


@dataclass(frozen=True)
class Condition:
    """The runs of one condition, which differ in their seed."""

    name: str
    results: list[Result]

    @property
    def reached(self) -> list[Result]:
        """The runs that reached their target."""
        return [result for result in self.results if result.summary["reached"]]

    @property
    def complete(self) -> bool:
        """Whether all runs reached their target, without which a mean says little."""
        return len(self.reached) == len(self.results)

    def values(self, key: str) -> list[Any]:
        """An entry of the summaries of the runs that reached their target."""
        return [result.summary[key] for result in self.reached]

    def mean(self, key: str) -> float:
        """Mean of `values`; NaN if no run reached its target."""
        values = self.values(key)
        return fmean(values) if values else float("nan")

    def ratio(self, base: Condition, key: str) -> float:
        """`mean` in units of another condition's."""
        return self.mean(key) / base.mean(key)


def table(conditions: Sequence[Condition], title: str) -> Table:
    """Means over the runs that reached the target, with the standard deviation."""
    base = conditions[0]
    grid = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    grid.add_column("", no_wrap=True)
    for heading in ("fresh examples", "ratio", "steps", "seconds", "accuracy %", "reached"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for condition in conditions:
        ratio = condition.ratio(base, "fresh_to_target")
        grid.add_row(
            condition.name,
            _spread(condition.values("fresh_to_target"), "{:,.0f}"),
            f"{ratio:.2f}" if isfinite(ratio) else NOTHING,
            f"{condition.mean('steps'):,.0f}" if condition.reached else NOTHING,
            _spread(condition.values("wall_s_to_target"), "{:.1f}"),
            _spread([100 * value for value in condition.values("value")], "{:.1f}"),
            f"{len(condition.reached)}/{len(condition.results)}",
        )
    return grid


def verdict(base: Condition, echoed: Condition) -> str:
    """What an echo changed, in fresh examples and in seconds."""
    if not (base.complete and echoed.complete):
        return f"{echoed.name}: not every run reached the target: there is no fair comparison."
    fresh = echoed.ratio(base, "fresh_to_target")
    seconds = echoed.ratio(base, "wall_s_to_target")
    return (
        f"{echoed.name}: {fresh:.2f} times the fresh examples{_comment(fresh)}, "
        f"{seconds:.2f} times the seconds{_comment(seconds)}."
    )


def why(base: Condition) -> str:
    """What there was to gain in seconds, from the runs without echo."""
    busy = fmean(result.summary["busy_fraction"] for result in base.results)
    text = (
        f"Without echo the network was at work for {busy:.0%} of the time, so less waiting for data "
        f"could make it {1 / busy:.2f} times as fast at most"
    )
    if busy > 0.8:
        text += (
            ": these small images are decoded faster than the network learns from them, and echo is "
            "for data that comes slower than the network could take it"
        )
    return text + "."


def _comment(ratio: float) -> str:
    return "" if ratio < 1 else " (echo does not help here)"


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return NOTHING
    mean = form.format(fmean(values))
    return f"{mean} ± {form.format(stdev(values))}" if len(values) > 1 else mean
