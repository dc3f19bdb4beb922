"""Pictures of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

if TYPE_CHECKING:
    from train.compare import Condition
    from train.record import Result

# The first three of Okabe and Ito's colours, which colour-blind readers tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73")
QUIET = "0.4"


def draw_curve(path: Path, result: Result) -> None:
    """Accuracy over the fresh examples of a run."""
    summary = result.summary
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    _plot_accuracy(axes, result, color=COLOURS[0], marker=".")
    _finish_accuracy(axes, summary["target"])
    echo = describe_echo(summary["echo"])
    axes.set_title(f"{summary['workload']}, {echo}, seed {summary['seed']}")
    figure.savefig(path, dpi=150)


def draw_comparison(path: Path, conditions: Sequence[Condition], title: str, target: float) -> None:
    """The fresh examples to the target of each condition, and how its runs came there."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    figure.suptitle(title, fontweight="bold")
    bars, curves = figure.subplots(1, 2, width_ratios=(1, 1.25))
    base = conditions[0].mean("fresh_to_target")
    for row, (condition, colour) in enumerate(zip(conditions, COLOURS, strict=True)):
        fresh = condition.values("fresh_to_target")
        mean = condition.mean("fresh_to_target")
        if fresh:
            bars.barh(row, mean, color=colour, alpha=0.35)
            bars.plot(fresh, [row] * len(fresh), "o", color=colour)
        text = f"{mean:,.0f}  (ratio {mean / base:.2f})"
        if not condition.complete:
            text = f"{len(fresh)} of {len(condition.results)} runs reached the target"
        bars.annotate(text, (0, row), xytext=(6, 14), textcoords="offset points", va="center")
        for result in condition.results:
            _plot_accuracy(curves, result, color=colour, label=condition.name, linewidth=1.3)
    bars.set_yticks(range(len(conditions)), [condition.name for condition in conditions])
    bars.invert_yaxis()
    bars.set_xlim(left=0)
    bars.set_xlabel("fresh examples to the target: mean (bar), each seed (dot)")
    bars.xaxis.set_major_locator(MaxNLocator(5))
    _separate_thousands(bars.xaxis)
    bars.spines[["top", "right"]].set_visible(False)
    _finish_accuracy(curves, target)
    # The steep beginning would flatten what matters.
    curves.set_ylim(bottom=max(0, target - 0.3))
    handles, names = curves.get_legend_handles_labels()
    legend = dict(zip(names, handles, strict=True))
    curves.legend(legend.values(), legend.keys(), loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)


def describe_echo(echo: dict[str, Any]) -> str:
    """In words, from a summary."""
    if echo["stage"] == "none":
        return "no echo"
    factor = echo["factor"]
    uses = factor if isinstance(factor, str) else f"× {factor:g}"
    return f"echo {uses} after {echo['stage']}"


def _plot_accuracy(axes: Axes, result: Result, **style: Any) -> None:
    evaluations = result.evaluations
    axes.plot([e.fresh for e in evaluations], [e.accuracy for e in evaluations], **style)


def _finish_accuracy(axes: Axes, target: float | None) -> None:
    axes.set_xlabel("fresh examples")
    axes.set_ylabel("accuracy on held-out examples")
    axes.set_xlim(left=0)
    _separate_thousands(axes.xaxis)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if target is not None:
        axes.axhline(target, color=QUIET, linestyle="--", linewidth=1)
        axes.annotate(
            f"target {target:.0%}",
            (0, target),
            xytext=(4, 4),
            textcoords="offset points",
            color=QUIET,
        )


def _separate_thousands(axis: Axis) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
