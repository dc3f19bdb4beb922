"""Is held memory flat over a long run, and after loops that are left early?

    python benchmarks/soak.py

Runs batches of images of very different sizes (64 × 64 beside 1500 × 1000) through an echo with a memory
limit, then makes and leaves iterators, and prints resident memory, threads, open files and child processes as
it goes.
"""

from __future__ import annotations

import gc
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import nvidia.dali.fn as fn
import typer

from dali_echo import echo, pipeline_def
from dali_echo.pytorch import EchoIterator

BATCH = 16


@pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=1)
def varied(memory_limit: str | None) -> Any:
    random = np.random.default_rng(0)
    small = [np.zeros((64 + i, 64, 3), np.uint8) for i in range(40)]
    large = [np.zeros((1000 + 10 * i, 1500, 3), np.uint8) for i in range(3)]

    def read() -> list[np.ndarray]:
        rare = random.random(BATCH) < 0.02
        return [
            large[k % 3] if rare[i] else small[k % 40] for i, k in enumerate(random.integers(0, 120, BATCH))
        ]

    image = echo(fn.external_source(source=read), factor=3, shuffle_buffer=1024, memory_limit=memory_limit)
    return fn.resize(image, size=[16, 16])


def resources() -> str:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(os.listdir("/proc/self/fd"))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    threads = threading.active_count()
    return f"{megabytes:6.0f} MB, {threads} Python threads, {files} files, {len(children)} children"


def main(batches: int = 20_000, loops: int = 1_000, memory_limit: str = "48MiB") -> None:
    warnings.simplefilter("ignore")
    iterator = EchoIterator(varied(memory_limit), ["image"])
    most = 0
    for number in range(batches):
        next(iterator)
        most = max(most, iterator.stats[0].live_bytes)
        if number % (batches // 10) == batches // 20:
            print(f"batch {number:6}: {resources()}; buffer at most {most / 2**20:.1f} MiB", flush=True)
    del iterator
    for number in range(loops):
        for _ in zip(range(3), EchoIterator(varied(memory_limit), ["image"]), strict=False):
            pass
        if number % (loops // 10) == loops // 20:
            print(f"loop  {number:6}: {resources()}", flush=True)


if __name__ == "__main__":
    typer.run(main)
