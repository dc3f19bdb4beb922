"""Pictures of runs, for files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

TARGET_COLOUR = "0.35"


def draw_curve(path: Path, evaluations: Sequence[Any], summary: dict[str, Any]) -> None:
    """Accuracy over fresh examples, from a run's evaluations and summary."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([e.fresh for e in evaluations], [e.accuracy for e in evaluations], marker=".")
    label_curve_axes(axes, summary["target"])
    axes.set_title(f"{summary['workload']}, {describe_echo(summary['echo'])}, seed {summary['seed']}")
    figure.savefig(path, dpi=150)


def label_curve_axes(axes: Axes, target: float | None) -> None:
    """What is the same for one curve and for several."""
    axes.set_xlabel("fresh examples")
    axes.set_ylabel("accuracy on held-out examples")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.grid(alpha=0.3)
    if target is not None:
        axes.axhline(target, color=TARGET_COLOUR, linestyle="--", linewidth=1)
        axes.annotate(
            f"target {target:.1%}",
            (1, target),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            color=TARGET_COLOUR,
        )


def describe_echo(echo: dict[str, Any]) -> str:
    """In words, from a summary."""
    if echo["stage"] == "none":
        return "no echo"
    return f"echo × {echo['factor']:g} after {echo['stage']}"
