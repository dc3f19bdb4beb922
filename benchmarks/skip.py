"""What it costs to leave out damaged samples, and to look for them where there are none.

    python benchmarks/skip.py 'FOLDER/train-{0000..0003}.tar'

The same pipeline, of shards of photos and `echo(factor=1)`, in four ways: with DALI's own reader and no
guard; with `shards.read` on the same shards; with on_error="skip" on them; and with on_error="skip" on a
copy to which damaged samples were added, so that as many good ones are read. They run a piece at a time, in
turn, and each is compared with the first in its own round. The last one runs a whole pass before, in which
it meets every damaged sample for the first time. CPU time is of all threads of the process, and tells more
than the clock on a machine that others use too.
"""

from __future__ import annotations

import io
import itertools
import random
import statistics
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import nvidia.dali.fn as fn
import typer
from nvidia.dali import types
from rich.console import Console
from rich.table import Table

from dali_echo import echo, pipeline_def, shards
from dali_echo.shards import labels
from dali_echo.shards.locating import local_paths

BATCH = 64


@pipeline_def(batch_size=BATCH, device_id=None, seed=1)
def decoded(paths: list[str], on_error: str | None, log: str | None = None) -> Any:
    if on_error is None:
        jpeg, label = fn.readers.webdataset(
            paths=paths,
            index_paths=[str(path) for path in shards.index(paths)],
            ext=["jpg", "cls"],
            random_shuffle=True,
            name="train",
        )
        label = labels.decode(label)
    else:
        more = {"on_error": "skip", "error_log": log} if on_error == "skip" else {}
        jpeg, label = shards.read(paths, ["jpg", "cls"], name="train", **more)
    image = fn.decoders.image(jpeg, output_type=types.RGB)
    image, label = echo(image, label, factor=1)
    return fn.resize(image, size=[224, 224]), label


def damaged_copy(paths: list[Path], share: float, folder: Path) -> tuple[list[str], int]:
    """Shards with damaged samples among the good ones, and how many they are."""
    rng, bad, copies = random.Random(0), 0, []
    for path in paths:
        copies.append(str(folder / path.name))
        with tarfile.open(path) as original, tarfile.open(copies[-1], "w") as copy:
            jpeg = None
            for member in original:
                data = original.extractfile(member)
                assert data is not None
                copy.addfile(member, data)
                if member.name.endswith(".jpg"):
                    jpeg = member, original.extractfile(member).read()  # type: ignore[union-attr]
                elif jpeg is not None and rng.random() < share:
                    for part, text in (jpeg, (member, b"0")):
                        info = tarfile.TarInfo(f"bad{bad:05}{part.name[part.name.rfind('.') :]}")
                        text = text if part is member else damage(text, rng)
                        info.size = len(text)
                        copy.addfile(info, io.BytesIO(text))
                    bad += 1
    return copies, bad


def damage(jpeg: bytes, rng: random.Random) -> bytes:
    """Cut short (half of them), another file, or nothing."""
    kind = rng.randrange(4)
    return [jpeg[: rng.randrange(len(jpeg))], jpeg[: len(jpeg) // 2], b"<html>not found</html>", b""][kind]


def main(
    urls: str,
    share: Annotated[float, typer.Option(help="Damaged samples, as a fraction of the good ones.")] = 0.01,
    rounds: int = 20,
    batches: Annotated[int, typer.Option(help="Batches of each way in a round.")] = 8,
    threads: int = 2,
) -> None:
    paths = local_paths(urls)
    names = [str(path) for path in paths]
    with tempfile.TemporaryDirectory() as folder:
        copies, bad = damaged_copy(paths, share, Path(folder))
        log = f"{folder}/skipped.jsonl"
        ways = {
            "DALI's reader": decoded(names, None, num_threads=threads),
            'shards.read, on_error="raise"': decoded(names, "raise", num_threads=threads),
            'on_error="skip", no damage': decoded(names, "skip", log, num_threads=threads),
            f'on_error="skip", {bad} damaged': decoded(copies, "skip", log, num_threads=threads),
        }
        pipelines = list(ways.values())
        good = sum(shards.info(names).samples.values())
        for pipeline in pipelines:
            for _ in range(good // BATCH + 2):  # a whole pass
                pipeline.run()
        wall: dict[str, list[float]] = {name: [] for name in ways}
        cpu: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            order = list(itertools.islice(itertools.cycle(ways.items()), number % 4, number % 4 + 4))
            for name, pipeline in order:
                start, cpu_start = time.perf_counter(), time.process_time()
                for _ in range(batches):
                    pipeline.run()
                wall[name].append(batches * BATCH / (time.perf_counter() - start))
                cpu[name].append(batches * BATCH / (time.process_time() - cpu_start))
    table = Table(title=f"{good} photos, batches of {BATCH}; median of {rounds} rounds (middle half)")
    for column in (
        "",
        "images/s",
        "of the first, in its round",
        "images per second of CPU time",
        "of the first, in its round",
    ):
        table.add_column(column, justify="right")
    for name in ways:
        cells = [name]
        for rates in (wall, cpu):
            ratios = [rate / base for rate, base in zip(rates[name], next(iter(rates.values())), strict=True)]
            cells += [spread(rates[name], ",.0f"), spread(ratios, ".3f")]
        table.add_row(*cells)
    Console(width=140).print(table)


def spread(values: list[float], form: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} ({low:{form}} – {high:{form}})"


if __name__ == "__main__":
    typer.run(main)
