"""What the echo itself costs in Python: bookkeeping, re-listing and feeding, per batch.

    python benchmarks/overhead.py

Batches of 256 small images with a label, drawn from 8,192 live samples. Measured is the CPU time of the
thread that runs the pipeline, while DALI asks the echo for a batch and is fed. The first line is the same for
an external source that returns ready batches: what of it is DALI's.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Annotated, Any

import numpy as np
import nvidia.dali.fn as fn
import typer
from nvidia.dali.backend import TensorListCPU
from nvidia.dali.pipeline import Pipeline

from dali_echo import echo, pipeline_def


@pipeline_def(num_threads=1, device_id=None, seed=1)
def echoed(factor: float | None, live: int) -> Any:
    size = Pipeline.current().max_batch_size
    images = TensorListCPU(np.zeros((size, 16, 16, 3), np.uint8), "HWC")
    labels = TensorListCPU(np.arange(size))
    image = fn.external_source(itertools.repeat(images), no_copy=True)
    label = fn.external_source(itertools.repeat(labels), no_copy=True)
    if factor is not None:
        image, label = echo(image, label, factor=factor, shuffle_buffer=live)
    return image, label


def feeding_ms(pipeline: Pipeline, batches: int) -> list[float]:
    """CPU milliseconds in which each batch was asked for and fed, on the thread that runs the pipeline."""
    taken: list[float] = []
    feed = pipeline._run_input_callbacks

    def timed() -> Any:
        start = time.thread_time()
        result = feed()
        taken.append(1e3 * (time.thread_time() - start))
        return result

    pipeline._run_input_callbacks = timed
    for _ in range(batches):
        pipeline.run()
    return taken


def main(
    batch_size: int = 256,
    live: Annotated[int, typer.Option(help="Size of the shuffle buffer, in samples.")] = 8192,
    factor: float = 4,
    batches: Annotated[int, typer.Option(help="Batches to measure.")] = 400,
) -> None:
    cases = {"DALI alone": (None, False), "echo": (factor, False), "echo, with checkpoints": (factor, True)}
    for name, (mark, checkpoints) in cases.items():
        pipeline = echoed(mark, live, batch_size=batch_size, enable_checkpointing=checkpoints)
        pipeline.build()
        for _ in range(3 * live // batch_size):  # the buffer fills
            pipeline.run()
        taken = feeding_ms(pipeline, batches)
        low, high = np.quantile(taken, [0.1, 0.9])
        held = f", {pipeline.echo_stats()[0].live_samples:,} live" if mark else ""
        print(
            f"{name + held:40} median {statistics.median(taken):.2f} ms a batch "
            f"(10 to 90 %: {low:.2f} to {high:.2f}, n = {len(taken)})"
        )


if __name__ == "__main__":
    typer.run(main)
