"""`dali-echo profile`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dali_echo.commands import Json, print_json, usage
from dali_echo.memory import parse_bytes
from dali_echo.profile import Profile
from dali_echo.profile import profile as measure
from dali_echo.profile.target import load, parse_arguments, pipeline_maker, user_code


def profile(
    target: Annotated[
        str,
        typer.Argument(
            help="A function decorated with pipeline_def, or one without arguments that makes the pipeline.",
            metavar="MODULE:FUNCTION",
        ),
    ],
    arg: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE, an argument of the function or the pipeline: a Python literal, or a string.",
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a batch.")] = None,
    num_threads: Annotated[int | None, typer.Option(help="DALI's threads.")] = None,
    device_id: Annotated[str | None, typer.Option(help="Of the GPU, or none.")] = None,
    step: Annotated[
        str | None,
        typer.Option(help="A function that does a training step on a batch.", metavar="MODULE:CALLABLE"),
    ] = None,
    outputs: Annotated[
        str | None, typer.Option(help="Names of the outputs in the step's batch, as image,label.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="That the buffer may take, such as 16GiB.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="To measure for, about.")] = 60,
    plot: Annotated[Path | None, typer.Option(help="Draw the pipeline here.")] = None,
    json: Json = False,
) -> None:
    """Measure a pipeline: its stages, where it loses time, and where and how often to echo.

    Marks that the definition holds are left out. What is measured and the model behind the predictions
    are explained in docs/profiling.md.
    """
    with usage():
        given = {"batch_size": batch_size, "num_threads": num_threads}
        arguments = parse_arguments(arg or []) | {k: v for k, v in given.items() if v is not None}
        if device_id is not None:
            arguments["device_id"] = _device(device_id)
        limit = None if memory is None else parse_bytes(memory)
        names = [name.strip() for name in outputs.split(",")] if outputs else []
        make = pipeline_maker(target, arguments)
        trains = None
        if step is not None:
            trains = load(step)
            if not callable(trains):
                raise ValueError(f"{step!r} is {trains!r}: give a function that takes a batch")
        console = Console(stderr=True)
        with Progress(console=console, transient=True) as bar, warnings.catch_warnings():
            # DALI's advice on parts of the pipeline that nobody runs.
            warnings.simplefilter("ignore")
            task = bar.add_task("Measuring", total=1.0)
            with user_code(target):
                found = measure(
                    make,
                    trains,
                    names,
                    memory=limit,
                    seconds=seconds,
                    progress=lambda share: bar.update(task, completed=share),
                )
        if plot is not None:
            from dali_echo.profile.chart import draw  # matplotlib takes its time to load

            draw(plot, found)
    if json:
        print_json(found)
        return
    report(Console(highlight=False), found)
    if plot is not None:
        typer.echo(f"written: {plot}")


def report(console: Console, found: Profile) -> None:
    """Print the tables and the advice."""
    console.print(_stages(found))
    console.print(_marks(found))
    line = f"{found.samples_per_s:,.0f} samples/s without echo"
    if found.step_waits is not None:
        line += f"; the step waits for {found.step_waits:.0%} of the time"
    console.print(
        f"{line}. {found.batches:,} batches in {found.rounds} rounds, on {found.cores:.1f} cores: medians "
        "(and the width of their middle half).",
        soft_wrap=True,
    )
    console.print(
        "With a mark of factor 1: what follows it is starved, and its queue holds a batch, for that share of "
        "the time.",
        soft_wrap=True,
    )
    for advice in found.advice:
        console.print(advice, markup=False, soft_wrap=True)


def _stages(found: Profile) -> Table:
    table = Table("stage", "ms per sample", "CPU ms", "busy", "idle", box=SIMPLE_HEAD)
    for stage in found.stages:
        bold = "bold" if stage.name == found.bottleneck else None
        table.add_row(
            stage.name,
            f"{stage.s_per_sample * 1e3:.3g} ({stage.spread * 1e3:.2g})",
            f"{stage.cpu_s_per_sample * 1e3:.3g}",
            f"{stage.busy:.0%}",
            f"{1 - stage.busy:.0%}",
            style=bold,
        )
    return table


def _marks(found: Profile) -> Table:
    table = Table("mark after", "R", "e", "emits", "kB/sample", "starved", "queue", box=SIMPLE_HEAD)
    limit = "≤ " if found.step_waits is None else ""
    for mark in found.marks:
        best = found.best is not None and mark.after == found.best.after
        table.add_row(
            mark.after,
            f"{limit}{mark.R:.3g} ({mark.spread:.2g})",
            f"{mark.factor:g}" if mark.judged else "–",
            f"× {mark.speed_up:.2f}" if mark.judged else "–",
            f"{mark.bytes_per_sample / 1e3:,.0f}",
            f"{mark.starved:.0%}",
            f"{mark.blocked:.0%}",
            style="bold" if best else None,
        )
    return table


def _device(text: str) -> Any:
    if text.lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"device_id = {text!r}: give the number of a GPU, or none") from None
