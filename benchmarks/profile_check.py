"""What `dali-echo profile` predicts, beside what real marks then give.

    python benchmarks/profile_check.py 'FOLDER/train-{0000..0003}.tar'

For a mark after read, decode and augment, and e = 1, 2, 4 and 8: images/s as the model of
`dali_echo.profile` has them from the parts that it measures, and of a pipeline with that mark. Each round
measures the parts of the profile and then all pipelines, since the speed of a shared machine drifts; the
table shows medians over the rounds and the middle half of them, and a ratio (measured / predicted) compares
figures of one round. The last column is the ratio of the CPU time per image, which others that use the
machine change less. Exits with 1 if a median of the former is off by more than 10 %.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import nvidia.dali.fn as fn
import typer
from echo_law import augment
from nvidia.dali import types
from nvidia.dali.pipeline import Pipeline
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dali_echo import echo, pipeline_def, shards
from dali_echo.profile.bench import Bench
from dali_echo.profile.clock import settle

FACTORS = (1, 2, 4, 8)
PLACES = ("read", "decode", "augment")
WITHIN = 0.1
STOCK = 4  # upstream batches that may be ready from before
MEASURED = 4  # upstream batches, at least


@pipeline_def
def training(urls: list[str], size: int, after: str | None = None, factor: float = 1) -> Any:
    def mark(place: str, *nodes: Any) -> Any:
        return echo(*nodes, factor=factor) if place == after else nodes

    jpeg, label = mark("read", *shards.read(urls, ext=["jpg", "cls"], name="train"))
    image = fn.decoders.image(jpeg, device="cpu", output_type=types.RGB)
    image, label = mark("decode", image, label)
    return mark("augment", augment(image, size), label)


def main(
    urls: Annotated[list[str], typer.Argument(help="Shards of JPEGs (jpg, cls), braces allowed.")],
    batch_size: int = 64,
    size: Annotated[int, typer.Option(help="Side of the crop, in pixels.")] = 224,
    threads: int = 2,
    rounds: int = 12,
    seconds: Annotated[float, typer.Option(help="To measure each part of the profile in a round.")] = 0.5,
) -> None:
    common = {"batch_size": batch_size, "num_threads": threads, "device_id": None, "seed": 1}
    bench = Bench(lambda: training(urls, size, **common))
    places = {place.name: place for place in bench.places}
    cases = list(itertools.product(PLACES, FACTORS))
    pipelines = {case: training(urls, size, *case, **common) for case in cases}
    found: dict[Any, list[Comparison]] = {case: [] for case in cases}
    bench.round(0)
    for (_, factor), pipeline in pipelines.items():
        measure(pipeline, factor)  # the buffer fills
    try:
        for _ in track(range(rounds), "Measuring", console=Console(stderr=True), transient=True):
            parts = bench.round(seconds)
            measured = {case: measure(pipelines[case], case[1]) for case in cases}
            for (place, factor), (wall, cpu) in measured.items():
                predicted = parts.emitted_s(places[place], factor)
                predicted_cpu = parts.up[place].cpu / factor + parts.down[place].cpu
                found[place, factor].append(
                    Comparison(1 / predicted, 1 / wall, predicted / wall, cpu / predicted_cpu)
                )
    except KeyboardInterrupt:
        pass  # the finished rounds count
    sys.exit(report(found))


class Comparison(NamedTuple):
    predicted: float
    measured: float
    ratio: float
    cpu_ratio: float


def measure(pipeline: Pipeline, factor: int) -> tuple[float, float]:
    """Seconds per image by the clock and of the cores.

    Over whole upstream batches, and after those that were made while other pipelines were measured.
    """
    settle()
    for _ in range(STOCK * factor):
        pipeline.run()
    batches = max(8, MEASURED * factor)
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(batches):
        pipeline.run()
    images = batches * pipeline.max_batch_size
    return (time.perf_counter() - start) / images, (time.process_time() - cpu) / images


def report(found: dict[Any, list[Comparison]]) -> int:
    rounds = len(next(iter(found.values())))
    table = Table(box=SIMPLE_HEAD, title=f"images/s, median of {rounds} rounds (middle half)")
    for column in ("after", "e", "predicted", "measured", "ratio", "of CPU time"):
        table.add_column(column, justify="left" if column == "after" else "right", no_wrap=True)
    off = 0
    for (place, factor), comparisons in found.items():
        predicted, measured, ratios, cpu = zip(*comparisons, strict=True)
        off += abs(statistics.median(ratios) - 1) > WITHIN
        figures = spread(predicted, "{:,.0f}"), spread(measured, "{:,.0f}")
        table.add_row(place, str(factor), *figures, spread(ratios, "{:.2f}"), spread(cpu, "{:.2f}"))
    Console(width=120).print(table)
    return int(off > 0)


def spread(values: Sequence[float], form: str) -> str:
    low, mid, high = (form.format(quartile) for quartile in statistics.quantiles(values, n=4))
    return f"{mid} ({low} – {high})"


if __name__ == "__main__":
    typer.run(main)
