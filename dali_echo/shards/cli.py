"""Index, check, describe and write WebDataset shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from dali_echo.commands import Json, finish, print_json, usage
from dali_echo.shards import describing, indexing, verifying, writing
from dali_echo.shards.locating import local_paths

app = typer.Typer(no_args_is_help=True, help=__doc__)

Shards = Annotated[
    list[str],
    typer.Argument(
        help="Tars: paths, '{0000..0009}', globs, or a .txt file that lists them.", metavar="SHARD..."
    ),
]
_SHOWN = 10


def _track(paths: Sequence[Path], what: str) -> Iterable[Path]:
    return track(paths, what, console=Console(stderr=True), transient=True)


@app.command()
def index(shards: Shards, json: Json = False) -> None:
    """Make the index files of shards, or find those that are there, and print their paths.

    Exits with 1 if a shard is damaged, empty or unreadable.
    """
    with usage():
        paths = local_paths(shards)
    files: dict[str, str] = {}
    damaged: dict[str, str] = {}
    for path in _track(paths, "Indexing"):
        try:
            files[str(path)] = str(indexing.shard_index(path).file)
        except (OSError, ValueError) as error:
            damaged[str(path)] = str(error)
    if json:
        print_json({"indexes": files, "damaged": damaged})
    else:
        for file in files.values():
            typer.echo(file)
        for message in damaged.values():
            Console(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True)
    finish(bool(damaged))


@app.command()
def verify(
    shards: Shards,
    ext: Annotated[
        list[str] | None,
        typer.Option(
            help="A component that each sample must have, such as jpg;jpeg. [default: the usual ones]"
        ),
    ] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="Decode every image, with DALI on the CPU.")
    ] = False,
    json: Json = False,
) -> None:
    """Name what is wrong with shards, and with which sample.

    Exits with 1 if there is anything.
    """
    with usage(), Progress(console=Console(stderr=True), transient=True) as bars:
        tasks = {what: bars.add_task(what, total=1, visible=False) for what in ("Counting", "Verifying")}

        def progress(what: str, fraction: float) -> None:
            bars.update(tasks[what], completed=fraction, visible=True)

        findings = verifying.verify(shards, ext, decode=decode, progress=progress)
    if json:
        print_json({"findings": findings})
    else:
        _print_findings(findings)
    finish(bool(findings))


def _print_findings(findings: Sequence[verifying.Finding]) -> None:
    console = Console(highlight=False)
    if not findings:
        console.print("Nothing wrong.")
        return
    counts = Counter(finding.problem for finding in findings)
    shown: Counter[str] = Counter()
    for finding in findings:
        shown[finding.problem] += 1
        if shown[finding.problem] <= _SHOWN:
            key = "" if finding.key is None else f" sample {finding.key!r}"
            text = f"{finding.problem}: {finding.shard}:{key} {finding.detail}"
            console.print(text, markup=False, soft_wrap=True)
    for problem, count in counts.most_common():
        if count > _SHOWN:
            console.print(f"{problem}: … and {count - _SHOWN:,} more")
    table = Table("problem", "times")
    for problem, count in counts.most_common():
        table.add_row(problem, f"{count:,}")
    console.print(table)
    if max(counts.values()) > _SHOWN:
        console.print(f"The first {_SHOWN} of each are listed; --json lists all.")


@app.command()
def info(
    shards: Shards,
    preview: Annotated[Path | None, typer.Option(help="Draw some of the images here.")] = None,
    json: Json = False,
) -> None:
    """Count samples, components, bytes and classes."""
    with usage():
        found = describing.info(shards, track=_track)
        if preview is not None:
            describing.preview(shards, preview)
    per_shard = describing.summarize(list(found.samples.values()))
    if json:
        per_name = {str(shard): count for shard, count in found.samples.items()}
        print_json({"samples_per_shard": per_shard, **vars(found), "samples": per_name})
        return
    console = Console(highlight=False)
    console.print(
        f"{per_shard.total:,} samples in {len(found.samples):,} shard(s) of {per_shard.least:,} to "
        f"{per_shard.greatest:,}"
    )
    table = Table("component", "samples", "bytes: least", "median", "greatest", "in all")
    for extension, size in found.bytes.items():
        numbers = (found.components[extension], size.least, size.median, size.greatest, size.total)
        table.add_row(extension, *(f"{number:,.0f}" for number in numbers))
    console.print(table)
    for extension, classes in found.classes.items():
        console.print(
            f"{extension}: {len(classes):,} classes from {min(classes)} to {max(classes)}, of "
            f"{min(classes.values()):,} to {max(classes.values()):,} samples"
        )
    if preview is not None:
        console.print(f"written: {preview}", soft_wrap=True)


@app.command()
def write(
    folder: Annotated[Path, typer.Argument(help="A folder with a sub-folder of images for each class.")],
    pattern: Annotated[str, typer.Argument(help="Names of the shards, such as train-%04d.tar.")],
    max_samples: Annotated[int, typer.Option(min=1, help="Samples in a shard, at most.")] = 10_000,
    max_bytes: Annotated[str, typer.Option(help="Size of a shard, at most.")] = "1GiB",
    seed: Annotated[int, typer.Option(help="Of the order of the samples.")] = 0,
    json: Json = False,
) -> None:
    """Write the images of class sub-folders to shards, in random order.

    A sample holds the image as it is and its class as cls: the place of its sub-folder in the
    alphabet, from 0. Its key is the path of the file.
    """
    with usage():
        images = writing.image_folder(folder, seed=seed)
        progress = track(images, "Writing", console=Console(stderr=True), transient=True)
        samples = writing.image_samples(folder, progress)
        shards = writing.write(samples, pattern, max_samples=max_samples, max_bytes=max_bytes)
    if json:
        print_json({"shards": shards, "samples": len(images)})
    else:
        typer.echo(f"{len(images):,} samples in {len(shards):,} shard(s), from {shards[0]} to {shards[-1]}")
