"""A picture of a profile: the pipeline from top to bottom, with the time and the idle share of each stage."""

from __future__ import annotations

import itertools
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dali_echo.profile.model import STEP
from dali_echo.profile.result import MarkGain, Profile, StageTime

# Okabe and Ito's colours, as in the picture of a plan; a stage has the same there.
_COLOURS = {
    "read": "#0072B2",
    "decode": "#E69F00",
    "augment": "#009E73",
    "transfer": "#56B4E9",
    STEP: "#CC79A7",
}
_IDLE, _QUIET, _CHOSEN = "0.9", "0.5", "#D55E00"
_ROW_INCHES = 0.5
_SHORT = 0.1


def draw(path: Path, found: Profile) -> None:
    """Draw a profile.

    Raises:
        ValueError: the name of `path` ends like no format that can be written.
    """
    rows = _rows(found)
    figure = Figure(figsize=(9, 1.7 + _ROW_INCHES * len(rows)), layout="constrained")
    axes = figure.subplots()
    whole = 1e3 / found.samples_per_s
    right = max(whole, *(stage.s_per_sample * 1e3 for stage in found.stages))
    for height, row in enumerate(rows):
        if isinstance(row, StageTime):
            _draw_stage(axes, height, row, whole, row.name == found.bottleneck)
        else:
            _draw_mark(axes, height, row, right, found)
    stages = [height for height, row in enumerate(rows) if isinstance(row, StageTime)]
    axes.set_yticks(stages, [stage.name for stage in found.stages])
    for above, below in itertools.pairwise(stages):
        axes.annotate(
            "",
            xy=(0.012 * right, below - 0.38),
            xytext=(0.012 * right, above + 0.38),
            arrowprops={"arrowstyle": "->", "color": _QUIET},
        )
    axes.set_xlim(0, 1.02 * right)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_xlabel("ms per sample, each stage alone; grey: idle in the whole pipeline, without echo")
    axes.set_title(_title(found), loc="left")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _rows(found: Profile) -> list[StageTime | MarkGain]:
    """The stages, and between them the places of marks."""
    at = {mark.after: mark for mark in found.marks}
    rows: list[StageTime | MarkGain] = []
    for stage in found.stages:
        if stage.name == STEP:
            rows.append(at.pop("batch"))
        rows.append(stage)
        if stage.name in at:
            rows.append(at.pop(stage.name))
    return rows + list(at.values())


def _draw_stage(axes: Axes, height: int, stage: StageTime, whole: float, slowest: bool) -> None:
    taken = stage.s_per_sample * 1e3
    axes.barh(height, whole, color=_IDLE, height=0.76)
    axes.barh(height, taken, color=_COLOURS[stage.name], height=0.76)
    text = f"{taken:.3g} ms, idle {1 - stage.busy:.0%}" + (" – the bottleneck" if slowest else "")
    axes.annotate(
        text,
        (taken if taken < _SHORT * whole else 0, height),  # beside a bar that is too short to write on
        xytext=(14, 0),
        textcoords="offset points",
        va="center",
        weight="bold" if slowest else "normal",
    )


def _draw_mark(axes: Axes, height: int, mark: MarkGain, right: float, found: Profile) -> None:
    chosen = found.best is not None and found.best.after == mark.after
    colour = _CHOSEN if chosen else _QUIET
    axes.hlines(height, 0, right, color=colour, linestyle="--", linewidth=2.0 if chosen else 1.0, zorder=0)
    if not mark.judged:
        gain = "not judged without a step"
    elif mark.factor > 1:
        gain = f"R = {mark.R:.2g}: e = {mark.factor:g} emits × {mark.speed_up:.2f}"
    else:
        gain = f"R = {mark.R:.2g}: no gain"
    name = "whole batches" if mark.after == "batch" else f"after {mark.after}"
    axes.text(
        right,
        height,
        f"echo {name} – {gain}",
        ha="right",
        va="center",
        color=colour,
        weight="bold" if chosen else "normal",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 2.0},
    )


def _title(found: Profile) -> str:
    text = f"{found.samples_per_s:,.0f} samples/s without echo"
    if found.step_waits is not None:
        text += f", the step waits for {found.step_waits:.0%} of the time"
    return text
