"""Training that reads over a slow network: how much sooner does echo reach an accuracy?

    python benchmarks/network.py FOLDER

The experiment of section 5 of Choi et al. 2019 (arXiv 1907.05550), small enough for two cores. An HTTP server
on this machine sends CIFAR-10's shards, FOLDER/train-*.tar, at a limited rate over all its connections, such
that a batch takes R times as long to arrive as the network takes to learn from it. `python -m train cifar10`
streams them, and stops at a target accuracy. Nothing else differs between conditions than the echo factor and
the learning rate, which `--tune` tried for each one with seeds that are not among those reported.

Every run keeps its files in `--out`, so that an interrupted experiment goes on. The table is printed in
Markdown; network.png and network.json are written to `--results`.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from serving import served

TARGET = 0.63
"""Accuracy on the first 2,000 test images, which takes about two epochs without echo."""

BATCH = 128
ALIKE = ["--network", "resnet6", "--eval-every", "1280", "--eval-examples", "2000", "--max-fresh", "250000"]
"""Flags of all runs: evaluations that cost little and are close enough to tell conditions apart."""

BUFFER = 2048
"""Decoded images of 3 kB that wait for their next use."""

TUNED = {"none": 0.2, "1": 0.2, "2": 0.1, "3": 0.05, "5": 0.2, "8": 0.1, "auto": 0.05, "fill": 0.05}
"""Learning rate of each factor: the best of --tune, where e = 6 stands for auto and fill."""

NOT_RETUNED = ("auto",)
"""Factors that are measured with the rate of training without echo too."""

TRIED = (0.05, 0.1, 0.2)
TUNING_SEEDS = {"none": (100, 101), "2": (100,), "3": (100,), "5": (100, 101), "6": (100,), "8": (100,)}

PACKAGES = {"DALI": "nvidia-dali-cuda120", "torch": "torch", "webdataset": "webdataset"}
SHOWN = ("none", "2", "5", "auto")
# Of Okabe and Ito, which colour-blind readers tell apart.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00")
BLUE = "#0072B2"

console = Console(highlight=False, width=150)


@dataclass(frozen=True)
class Condition:
    """Runs that differ in their seed."""

    factor: str
    rate: float

    @property
    def name(self) -> str:
        """For tables and pictures."""
        name = "no echo" if self.factor == "none" else self.factor
        name = f"e = {name}" if name.isdigit() else name
        return name if self.rate == TUNED.get(self.factor) else f"{name}, not retuned"

    def flags(self) -> list[str]:
        """Of the trainer."""
        flags = ["--lr", str(self.rate)]
        if self.factor != "none":
            flags += ["--echo-stage", "decode", "--echo-factor", self.factor, "--shuffle-buffer", str(BUFFER)]
        return flags


Runs = dict[Condition, list[dict[str, Any]]]

RETUNED = [Condition(factor, rate) for factor, rate in TUNED.items()]
CONDITIONS = [*RETUNED, *(Condition(factor, TUNED["none"]) for factor in NOT_RETUNED)]


def main(
    data: Annotated[Path, typer.Argument(help="CIFAR-10's shards: train-*.tar and test-*.tar.")],
    out: Annotated[Path, typer.Option(help="Folder for the files of each run.")] = Path("runs/network"),
    results: Annotated[Path, typer.Option(help="Folder for network.png and network.json.")] = Path(
        "docs/results"
    ),
    ratio: Annotated[float, typer.Option(help="R: time of a batch to arrive, in steps of training.")] = 6,
    seeds: int = 3,
    port: Annotated[
        int, typer.Option(help="Of the server; the same again spares indexing the shards.")
    ] = 8642,
    tune: Annotated[
        bool, typer.Option("--tune", help="Try learning rates, on local shards, instead.")
    ] = False,
    report_only: Annotated[bool, typer.Option("--report", help="Report on the runs there are.")] = False,
) -> None:
    if tune:
        return tune_rates(data, out / "tune")
    if not report_only:
        measure(data, out, ratio, seeds, port)
    report(out, results, seeds)


def measure(data: Path, out: Path, ratio: float, seeds: int, port: int) -> None:
    link = calibrated(data, out, ratio)
    with served(data, link["bytes_per_s"], port) as address:
        names = ",".join(path.stem for path in sorted(data.glob("*-*.tar")))
        # Seeds outside: what the machine does meanwhile meets all conditions alike.
        for seed in range(1, seeds + 1):
            for condition in CONDITIONS:
                run = folder(out, condition, seed)
                train(run, f"{address}/{{{names}}}.tar", seed, *condition.flags(), "--target", str(TARGET))


def train(out: Path, data: str, seed: int, *flags: str) -> dict[str, Any]:
    """Train in a process of its own, unless that has been done; returns the summary."""
    file = out / "summary.json"
    if not file.exists():
        command = [sys.executable, "-m", "train", "cifar10", "--data", data, "--out", str(out)]
        command += ["--batch-size", str(BATCH), "--seed", str(seed), *ALIKE, *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads(file.read_text())
        console.print(
            f"{out.name}: {summary['value']:.1%} after {summary['fresh_examples']:,} fresh examples, "
            f"{summary['wall_s']:.1f} s"
        )
    return json.loads(file.read_text())


def folder(out: Path, condition: Condition, seed: int) -> Path:
    return out / f"{condition.factor}-lr{condition.rate}-seed{seed}"


def calibrated(data: Path, out: Path, ratio: float) -> dict[str, float]:
    """The time of a step that does not wait, and the server's rate."""
    file = out / "link.json"
    if not file.exists():
        # Shards on the disk and many repeats: nothing waits.
        flags = [*Condition("8", TUNED["8"]).flags(), "--max-steps", "400"]
        summary = train(out / "calibration", str(data), 0, *flags)
        step_s = summary["wall_s"] / summary["steps"]
        shard = min(data.glob("train-*.tar"))
        with tarfile.open(shard) as tar:
            samples = sum(name.endswith(".cls") for name in tar.getnames())
        batch_bytes = BATCH * shard.stat().st_size / samples
        link = {"step_s": step_s, "batch_bytes": batch_bytes, "bytes_per_s": batch_bytes / (ratio * step_s)}
        file.write_text(json.dumps(link))
    return json.loads(file.read_text())


def tune_rates(data: Path, out: Path) -> None:
    """Fresh examples to the target for each learning rate; they do not depend on how fast data comes."""
    for factor, seeds in TUNING_SEEDS.items():
        limit = 140_000 // (1 if factor == "none" else min(int(factor), 4))
        for seed, rate in itertools.product(seeds, TRIED):
            condition = Condition(factor, rate)
            flags = [*condition.flags(), "--target", str(TARGET), "--max-fresh", str(limit)]
            train(folder(out, condition, seed), str(data), seed, *flags)


def report(out: Path, results: Path, seeds: int) -> None:
    runs = {}
    for condition in CONDITIONS:
        folders = [folder(out, condition, seed) for seed in range(1, seeds + 1)]
        found = [load(run) for run in folders if (run / "summary.json").exists()]
        if found:
            runs[condition] = found
    table(runs)
    link = json.loads((out / "link.json").read_text())
    starved, saturated = (next(c for c in runs if c.factor == factor) for factor in ("1", "8"))
    up, down = (values(runs[c], seconds_per_step) for c in (starved, saturated))
    console.print(
        f"\nt_up {1e3 * fmean(up):.0f} ms (e = 1), t_down {1e3 * fmean(down):.1f} ms (e = 8): R = "
        f"{spread([u / d for u, d in zip(up, down, strict=True)], '.2f')}. Server: "
        f"{link['bytes_per_s'] / 1e6:.2f} MB/s. {machine()}"
    )
    results.mkdir(parents=True, exist_ok=True)
    draw(runs, results / "network.png")
    record = [
        {"condition": condition.name, **{key: value for key, value in run.items() if key != "evaluations"}}
        for condition, found in runs.items()
        for run in found
    ]
    (results / "network.json").write_text(
        json.dumps({"machine": machine(), **link, "runs": record}, indent=1)
    )


def load(run: Path) -> dict[str, Any]:
    """A summary, and the evaluations on the way."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    evaluations = [json.loads(line) for line in lines]
    return {**json.loads((run / "summary.json").read_text()), "evaluations": evaluations}


def values(runs: list[dict[str, Any]], of: Callable[[dict[str, Any]], float]) -> list[float]:
    return [of(run) for run in runs if run["reached"]]


def seconds(run: dict[str, Any]) -> float:
    return run["wall_s_to_target"]


def seconds_per_step(run: dict[str, Any]) -> float:
    """Over the second half of a run, when the buffer has long been full."""
    middle, *_, last = run["evaluations"][len(run["evaluations"]) // 2 :]
    return (last["wall_s"] - middle["wall_s"]) / (last["step"] - middle["step"])


def fresh(run: dict[str, Any]) -> float:
    return run["fresh_to_target"]


def spread(numbers: list[float], form: str) -> str:
    if len(numbers) < 2:
        return "".join(f"{number:{form}}" for number in numbers)
    return f"{fmean(numbers):{form}} ± {stdev(numbers):{form}}"


def table(runs: Runs) -> None:
    base = next(iter(runs.values()))
    grid = Table(box=MARKDOWN)
    for heading in (
        *(
            "echo after decode",
            "learning rate",
            "seconds to target",
            "times as fast",
            "fresh examples to target",
        ),
        *("times fewer", "uses of each", "waiting", "reached"),
    ):
        grid.add_column(heading, justify="right" if grid.columns else "left")
    for condition, found in runs.items():
        gains = [fmean(values(base, of)) / fmean(values(found, of)) for of in (seconds, fresh)]
        grid.add_row(
            condition.name,
            f"{condition.rate:g}",
            spread(values(found, seconds), ".1f"),
            f"{gains[0]:.2f}",
            spread(values(found, fresh), ",.0f"),
            f"{gains[1]:.2f}",
            spread(values(found, lambda run: run["emitted_examples"] / run["fresh_examples"]), ".2f"),
            f"{fmean(1 - run['busy_fraction'] for run in found):.0%}",
            f"{len(values(found, seconds))}/{len(found)}",
        )
    console.print(grid)


def draw(runs: Runs, path: Path) -> None:
    """Bars of what the target took, and the way there."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(f"CIFAR-10 over HTTP to {TARGET:.0%} accuracy, echo after decode", fontweight="bold")
    tuned = {condition: runs[condition] for condition in RETUNED if condition in runs}
    (time_bars, fresh_bars), (time_curves, fresh_curves) = figure.subplots(2, 2)
    for axes, of, label in (
        (time_bars, seconds, "seconds to the target"),
        (fresh_bars, fresh, "fresh examples to the target"),
    ):
        base = fmean(values(tuned[RETUNED[0]], of))
        for x, found in enumerate(tuned.values()):
            numbers = values(found, of)
            axes.bar(x, fmean(numbers), color=BLUE, alpha=0.35)
            axes.plot([x] * len(numbers), numbers, "o", color=BLUE, markersize=4)
            axes.annotate(
                f"{base / fmean(numbers):.1f}×",
                (x, max(numbers)),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
            )
        axes.set_xticks(range(len(tuned)), [condition.name for condition in tuned])
        axes.set_ylabel(f"{label}: mean, each seed")
        axes.set_ylim(top=1.1 * axes.get_ylim()[1])
    shown = [condition for condition in tuned if condition.factor in SHOWN]
    for axes, key, label in (
        (time_curves, "wall_s", "seconds"),
        (fresh_curves, "fresh", "fresh examples"),
    ):
        for condition, colour in zip(shown, COLOURS, strict=False):
            for number, run in enumerate(tuned[condition]):
                name = condition.name if number == 0 else None
                points = [(e[key], e["accuracy"]) for e in run["evaluations"]]
                axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.3, label=name)
        axes.axhline(TARGET, color="0.4", linestyle="--", linewidth=1)
        axes.set_xlim(left=0)
        axes.set_ylim(0.3, TARGET + 0.03)
        axes.set_xlabel(label)
        axes.set_ylabel("accuracy on held-out examples")
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
        axes.legend(loc="lower right", frameon=False)
    for axis in (fresh_bars.yaxis, fresh_curves.xaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def machine() -> str:
    model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    versions = ", ".join(f"{name} {version(package)}" for name, package in PACKAGES.items())
    return (
        f"{os.cpu_count()} cores of {model[1] if model else platform.machine()}, "
        f"Python {platform.python_version()}, {versions}"
    )


if __name__ == "__main__":
    typer.run(main)
