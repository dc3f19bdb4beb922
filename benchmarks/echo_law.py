"""Throughput of an echo after decode, beside the law that the two stages measured alone predict.

    python benchmarks/echo_law.py 'FOLDER/train-{0000..0003}.tar'

On a machine whose cores both stages share, one emitted image costs a share 1 / e of the upstream's time
for an image, and the downstream's whole: images/s = 1 / (t_up / e + t_down). A ratio near 1 says that the
echo itself costs nothing. The row "no mark" is the same pipeline without one, to compare e = 1 with.

All configurations are measured in turn, in short pieces and many rounds, since the speed of a shared machine
drifts. The table shows medians over the rounds and the middle half of them; a ratio compares pieces of one
round.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import nvidia.dali.fn as fn
import typer
from nvidia.dali import types
from nvidia.dali.pipeline import Pipeline
from rich.console import Console
from rich.table import Table

from dali_echo import echo, pipeline_def, shards

FACTORS = (1, 2, 4, 8)


def decode(urls: list[str]) -> tuple[Any, Any]:
    jpeg, label = shards.read(urls, ext=["jpg", "cls"], name="train")
    return fn.decoders.image(jpeg, device="cpu", output_type=types.RGB), label


def augment(image: Any, size: int) -> Any:
    image = fn.random_resized_crop(image, size=[size, size], device="cpu")
    return fn.crop_mirror_normalize(
        image,
        dtype=types.FLOAT,
        output_layout="CHW",
        mirror=fn.random.coin_flip(),
        mean=[123.7, 116.3, 103.5],
        std=[58.4, 57.1, 57.4],
    )


@pipeline_def
def whole(urls: list[str], size: int, factor: float | None) -> Any:
    image, label = decode(urls)
    if factor is not None:
        image, label = echo(image, label, factor=factor)
    return augment(image, size), label


@pipeline_def
def upstream(urls: list[str]) -> Any:
    return decode(urls)


@pipeline_def
def downstream(batches: list[Any], size: int) -> Any:
    # A batch of DALI tensors that is fed without a copy: what the echo does, less its bookkeeping.
    images = fn.external_source(itertools.cycle(batches), no_copy=True)
    return augment(images, size)


def images_per_second(pipeline: Pipeline, batches: int) -> float:
    start = time.perf_counter()
    for _ in range(batches):
        pipeline.run()
    return batches * pipeline.max_batch_size / (time.perf_counter() - start)


def main(
    urls: Annotated[list[str], typer.Argument(help="Shards of JPEGs (jpg, cls), braces allowed.")],
    batch_size: int = 64,
    size: Annotated[int, typer.Option(help="Side of the crop, in pixels.")] = 224,
    threads: int = 2,
    rounds: int = 15,
    pieces: Annotated[int, typer.Option("--batches", help="Batches measured at a time.")] = 16,
) -> None:
    common = {"batch_size": batch_size, "num_threads": threads, "device_id": None, "seed": 1}
    held = upstream(urls, **common)
    batches = [held.run()[0] for _ in range(8)]
    pipelines: dict[str, Pipeline] = {
        "upstream": upstream(urls, **common),
        "downstream": downstream(batches, size, **common),
        "no mark": whole(urls, size, None, **common),
        **{f"e = {e}": whole(urls, size, e, **common) for e in FACTORS},
    }
    rates: dict[str, list[float]] = {name: [] for name in pipelines}
    for pipeline in pipelines.values():
        images_per_second(pipeline, 2 * max(FACTORS))  # the buffer fills
    for _ in range(rounds):
        for name, pipeline in pipelines.items():
            # What was prefetched while others were measured must not count.
            images_per_second(pipeline, 5)
            rates[name].append(images_per_second(pipeline, pieces))
    report(rates, rounds)


def report(rates: dict[str, list[float]], rounds: int) -> None:
    def law(e: float) -> Callable[[int], float]:
        return lambda i: 1 / (1 / rates["upstream"][i] / e + 1 / rates["downstream"][i])

    table = Table(title=f"images/s, median of {rounds} rounds (middle half)")
    for column in ("", "measured", "law", "measured / law"):
        table.add_column(column, justify="right" if column else "left")
    for name, values in rates.items():
        row = [name, spread(values, "{:,.0f}"), "", ""]
        if name.startswith("e = "):
            predicted = [law(float(name[4:]))(i) for i in range(rounds)]
            row[2] = spread(predicted, "{:,.0f}")
            row[3] = spread([v / p for v, p in zip(values, predicted, strict=True)], "{:.3f}")
        table.add_row(*row)
    console = Console()
    console.print(table)
    ratio = [a / b for a, b in zip(rates["e = 1"], rates["no mark"], strict=True)]
    console.print(f"e = 1 / no mark: {spread(ratio, '{:.3f}')}")


def spread(values: list[float], form: str) -> str:
    low, mid, high = (form.format(quartile) for quartile in statistics.quantiles(values, n=4))
    return f"{mid} ({low} – {high})"


if __name__ == "__main__":
    typer.run(main)
