"""Comparing runs that differ in their echo, over several seeds: in a table and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from train.record import Result


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


def table(conditions: Sequence[Condition], title: str) -> Table:
    """Means over the runs that reached the target, with the standard deviation."""
    base = conditions[0]
    grid = Table(title=title)
    grid.add_column("")
    for heading in ("fresh examples", "vs no echo", "steps", "seconds", "accuracy", "reached"):
        grid.add_column(heading, justify="right")
    for condition in conditions:
        fresh = condition.mean("fresh_to_target")
        grid.add_row(
            condition.name,
            _spread(condition.values("fresh_to_target"), "{:,.0f}"),
            f"× {fresh / base.mean('fresh_to_target'):.2f}"
            if condition.reached and base.reached
            else "–",
            _spread(condition.values("steps"), "{:,.0f}"),
            _spread(condition.values("wall_s_to_target"), "{:.1f}"),
            _spread(condition.values("value"), "{:.2%}"),
            f"{len(condition.reached)}/{len(condition.results)}",
        )
    return grid


def verdict(base: Condition, echoed: Condition) -> str:
    """What an echo changed, in fresh examples and in seconds."""
    if not (base.complete and echoed.complete):
        return f"{echoed.name}: not every run reached the target, so there is no fair comparison."
    fresh = echoed.mean("fresh_to_target") / base.mean("fresh_to_target")
    seconds = echoed.mean("wall_s_to_target") / base.mean("wall_s_to_target")
    return (
        f"{echoed.name}: × {fresh:.2f} the fresh examples{_comment(fresh)}, "
        f"× {seconds:.2f} the seconds{_comment(seconds)}."
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
    return "" if ratio < 1 else " (it does not help here)"


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "–"
    mean = form.format(fmean(values))
    return f"{mean} ± {form.format(stdev(values))}" if len(values) > 1 else mean
