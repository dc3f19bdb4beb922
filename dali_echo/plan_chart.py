"""A picture of plans."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dali_echo.plan import MARKS, Job, Plan, speed_up

# Okabe and Ito's colours, which colour-blind readers tell apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_IDLE, _QUIET = "0.9", "0.5"
_FACTORS = np.linspace(1, 8, 71)


def draw(path: Path, job: Job, plans: list[Plan]) -> None:
    """Draw what keeps the accelerator waiting in the first plan, and what echoing gains.

    The gain is drawn over e for one plan, over the ranks for several.

    Raises:
        ValueError: the name of `path` ends like no format that can be written.
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    busy, gain = figure.subplots(1, 2, width_ratios=(1, 1.25))
    _draw_work(busy, plans[0])
    if len(plans) == 1:
        _draw_over_factors(gain, job, plans[0])
    else:
        _draw_over_ranks(gain, plans)
    gain.set_ylabel("training is so many times faster")
    gain.set_title("Speed-up, if a repeat is worth " + _worth(job))
    gain.legend(frameon=False)
    for axes in (busy, gain):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _worth(job: Job) -> str:
    return "a fresh sample" if job.repeat_worth == 1 else f"{job.repeat_worth:g} fresh samples"


def _draw_work(axes: Axes, plan: Plan) -> None:
    work = {
        "storage": [("read", plan.work.read)],
        "CPU cores": [("decode", plan.work.decode), ("augment", plan.work.augment)],
        "accelerator": [("step", plan.work.step)],
    }
    axes.barh(list(work), plan.batch_s * 1000, color=_IDLE, label="idle")
    colours = iter(_COLOURS)
    for row, (resource, stages) in enumerate(work.items()):
        start = 0.0
        for stage, seconds in stages:
            axes.barh(resource, seconds * 1000, left=start * 1000, color=next(colours), label=stage)
            start += seconds
        text = f"busy {start / plan.batch_s:.0%}"
        axes.annotate(text, (0, row), xytext=(6, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.set_xlabel("ms per batch, without echo")
    axes.set_title(f"{plan.ranks:,} rank{'s' * (plan.ranks > 1)}: {plan.work.bottleneck} is the bottleneck")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=5, frameon=False)


def _draw_over_factors(axes: Axes, job: Job, plan: Plan) -> None:
    for option, colour in zip(plan.options, _COLOURS, strict=False):
        gains = [speed_up(job, plan.work, option.mark, float(factor)) for factor in _FACTORS]
        axes.plot(_FACTORS, gains, color=colour, label=f"mark after {option.mark}, R = {option.R:.1f}")
        if option == plan.best:
            axes.plot(option.factor, option.speed_up, "o", color=colour, label="planned")
    axes.axhline(1, color=_QUIET, linewidth=1, linestyle="--")
    axes.set_xlabel("factor e")
    axes.set_ylim(bottom=0)


def _draw_over_ranks(axes: Axes, plans: list[Plan]) -> None:
    ranks = [plan.ranks for plan in plans]
    chosen = [plan.best or max(plan.options, key=lambda option: option.R) for plan in plans]
    axes.plot(ranks, [option.R for option in chosen], color=_QUIET, linestyle="--", label="R")
    axes.plot(ranks, [option.speed_up for option in chosen], color=_QUIET, zorder=1)
    for mark, colour in zip(MARKS, _COLOURS, strict=False):
        places = [(p.ranks, p.best.speed_up) for p in plans if p.best and p.best.mark == mark]
        if places:
            axes.plot(*zip(*places, strict=True), "o", color=colour, label=f"mark after {mark}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set_xticks(ranks)
    axes.set_xlabel("ranks that share the storage")
