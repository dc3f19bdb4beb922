"""How fast shards are indexed: members a second, beside `tarfile` and DALI's `wds2idx`.

    python benchmarks/index.py

Tars of small members, where headers are all the work: USTAR, GNU, and PAX with a header of its own for each
member. They are in the page cache. Each way runs in every round, in turn; the median and the range of members
a second of CPU time are printed, with the time of child processes, since wds2idx runs `tar`. `tarfile` only
lists the members; the others write an index.
"""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from wds2idx import IndexCreator

from dali_echo import shards

FORMATS = {
    "USTAR": (tarfile.USTAR_FORMAT, 0.0),
    "GNU": (tarfile.GNU_FORMAT, 0.0),
    "PAX per member": (tarfile.PAX_FORMAT, 1.5),  # a time with a fraction needs a PAX header
}


def write(path: Path, format: int, mtime: float, members: int) -> None:
    with tarfile.open(path, "w", format=format) as tar:
        for i in range(members):
            member = tarfile.TarInfo(f"train/{i // 2:08}.{('jpg', 'cls')[i % 2]}")
            member.size, member.mtime = 1, mtime
            tar.addfile(member, io.BytesIO(b"7"))


def dali_echo(shard: Path) -> None:
    os.utime(shard)  # makes the index that is there stale
    shards.index(shard)


def wds2idx(shard: Path) -> None:
    # It talks on standard output.
    with contextlib.redirect_stdout(io.StringIO()), IndexCreator(str(shard), f"{shard}.theirs") as creator:
        creator.create_index()


def by_tarfile(shard: Path) -> None:
    with tarfile.open(shard) as tar:
        tar.getmembers()


def cpu_seconds() -> float:
    return sum(os.times()[:4])


WAYS: dict[str, Callable[[Path], None]] = {
    "dali_echo": dali_echo,
    "wds2idx": wds2idx,
    "tarfile": by_tarfile,
}


def main(
    members: Annotated[int, typer.Option(help="Members in each tar.")] = 100_000, rounds: int = 5
) -> None:
    for name, (format, mtime) in FORMATS.items():
        with tempfile.TemporaryDirectory() as folder:
            shard = Path(folder, "a.tar")
            write(shard, format, mtime, members)
            rates: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(rounds):
                for way, run in WAYS.items():
                    start = cpu_seconds()
                    run(shard)
                    rates[way].append(members / (cpu_seconds() - start))
        for way, rate in rates.items():
            print(
                f"{name:15} {way:10} {statistics.median(rate):9,.0f} members/s "
                f"({min(rate):,.0f} to {max(rate):,.0f}, n = {len(rate)})"
            )


if __name__ == "__main__":
    typer.run(main)
