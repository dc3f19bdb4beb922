"""Data echoing for NVIDIA DALI: measure or plan where and how often to echo, and look after shards."""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dali_echo.commands import Json, print_json, usage
from dali_echo.memory import parse_bytes
from dali_echo.plan import Job, Plan, over_ranks
from dali_echo.profile.cli import profile
from dali_echo.shards.cli import app as shards

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
app.add_typer(shards, name="shards")
app.command()(profile)

_KEYS = {field.name for field in fields(Job)} | {"bandwidth"}
_SIZES = {key for key in _KEYS if key.endswith("_bytes")} | {"bandwidth"}


@app.command()
def plan(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(help="TOML or JSON with numbers as below: batch_size = 256.", exists=True),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a batch of one rank.")] = None,
    step_ms: Annotated[float | None, typer.Option(help="A training step on a batch that is there.")] = None,
    samples_per_s: Annotated[float | None, typer.Option(help="What the storage gives, in all.")] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Instead: bytes/s, such as 1.2GB; needs --encoded-bytes.")
    ] = None,
    encoded_bytes: Annotated[str | None, typer.Option(help="Of a stored sample, such as 110kB.")] = None,
    decode_ms: Annotated[float | None, typer.Option(help="Of a sample, on one core.")] = None,
    augment_ms: Annotated[float | None, typer.Option(help="Of a sample, on one core.")] = None,
    cores: Annotated[float | None, typer.Option(help="CPU cores of one rank.")] = None,
    decoded_bytes: Annotated[
        str | None, typer.Option(help="Of a decoded sample.  [default: 562500, 500 × 375 in RGB]")
    ] = None,
    augmented_bytes: Annotated[
        str | None, typer.Option(help="Of an augmented sample.  [default: 150528, 224 × 224 in RGB]")
    ] = None,
    memory_bytes: Annotated[
        str | None, typer.Option(help="For the buffer of one rank, such as 16GiB.")
    ] = None,
    dataset_samples: Annotated[float | None, typer.Option(help="Samples of an epoch, in all.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Of a training without echo.")] = None,
    repeat_worth: Annotated[
        float | None, typer.Option(help="Fresh samples that a repeat is worth, 0 to 1.  [default: 1]")
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="How many share the storage; several as 1,8,64.  [default: 1]")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the plan here.")] = None,
    json: Json = False,
) -> None:
    """Say from known numbers whether to echo, after which stage and how often, and what it saves.

    The model and its limits are explained in docs/planning.md.
    """
    with usage():
        given = {key: value for key, value in context.params.items() if key in _KEYS and value is not None}
        numbers = {**_read(file), **given} if file else given
        counts = _ranks(numbers.pop("ranks", 1))
        job = _job(numbers)
        plans = over_ranks(job, counts)
        if plot is not None:
            from dali_echo.plan_chart import draw  # matplotlib takes its time to load

            draw(plot, job, plans)
    if json:
        print_json([{**vars(plan), "bottleneck": plan.work.bottleneck} for plan in plans])
        return
    console = Console(highlight=False)
    console.print(_table(plans))
    for plan in plans:
        lines = plan.advice if len(plans) == 1 else [f"{plan.ranks:,} ranks: {plan.advice[0]}"]
        for line in lines:
            console.print(line, soft_wrap=True)
    if plot is not None:
        console.print(f"written: {plot}", soft_wrap=True)


def _read(file: Path) -> dict[str, Any]:
    text = file.read_text()
    try:
        numbers = json_format.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{file}: {error}. Expected TOML, or JSON in a file named .json") from error
    unknown = sorted(set(numbers) - _KEYS)
    if unknown:
        raise ValueError(f"{file}: unknown {', '.join(unknown)}. Known are {', '.join(sorted(_KEYS))}")
    return dict(numbers)


def _ranks(given: Any) -> list[int]:
    entries = given if isinstance(given, list) else str(given).split(",")
    try:
        counts = [int(entry) for entry in entries]
    except (TypeError, ValueError):
        counts = []
    if not counts or min(counts) < 1:
        raise ValueError(f"ranks = {given!r}: give a number, or several as 1,8,64")
    return counts


def _job(numbers: dict[str, Any]) -> Job:
    numbers = {key: _number(key, value) for key, value in numbers.items()}
    bandwidth = numbers.pop("bandwidth", None)
    if bandwidth is not None:
        if "samples_per_s" in numbers or "encoded_bytes" not in numbers:
            raise ValueError("bandwidth needs encoded_bytes beside it, and no samples_per_s")
        numbers["samples_per_s"] = bandwidth / numbers["encoded_bytes"]
    missing = [key for key in ("batch_size", "step_ms", "samples_per_s") if key not in numbers]
    if missing:
        raise ValueError(
            f"missing: {', '.join(missing)}. Give them as options (samples_per_s may be bandwidth and "
            "encoded_bytes instead), or in a file"
        )
    return Job(**numbers)


def _number(key: str, value: Any) -> Any:
    if isinstance(value, str):
        try:
            return parse_bytes(value if key in _SIZES else "")
        except ValueError as error:
            raise ValueError(f"{key} = {value!r}: {error}") from error
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} = {value!r}: give a number")
    return value


def _table(plans: list[Plan]) -> Table:
    table = Table("ranks", "bottleneck", "mark", "R", "e", "speed-up", box=SIMPLE_HEAD)
    savings = [_savings(plan) for plan in plans]
    for heading in ("hours", "GB read"):
        if any(heading in saving for saving in savings):
            table.add_column(heading)
    for plan, saving in zip(plans, savings, strict=True):
        table.add_row(
            f"{plan.ranks:,}",
            plan.work.bottleneck.removeprefix("the "),
            *_choice(plan),
            *saving.values(),
        )
    return table


def _choice(plan: Plan) -> list[str]:
    if plan.best is None:
        return ["none", f"{max(option.R for option in plan.options):.2f}", "1", "× 1"]
    best = plan.best
    return [best.mark, f"{best.R:.2f}", f"{best.factor:g}", f"× {best.speed_up:.2f}"]


def _savings(plan: Plan) -> dict[str, str]:
    before, after = plan.without_echo, plan.with_echo
    if before is None or after is None:
        return {}
    savings = {"hours": f"{before.hours:,.3g} → {after.hours:,.3g}"}
    if before.bytes_read is not None and after.bytes_read is not None:
        savings["GB read"] = f"{before.bytes_read / 1e9:,.0f} → {after.bytes_read / 1e9:,.0f}"
    return savings
