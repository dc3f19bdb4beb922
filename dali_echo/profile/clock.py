"""Running a part of a pipeline for a while, and what it takes."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nvidia.dali.pipeline import Pipeline

from dali_echo.pipeline import EchoPipeline

_FILL = 1
_LEAST_BATCHES = 3
_QUIET = 0.1
_QUIET_S = 0.005
_SETTLE_S = 2.0
_PROBE_S = 0.1
_BLOCK = bytes(1 << 20)


@dataclass(frozen=True)
class Piece:
    """What a run took, in seconds per sample.

    Attributes:
        wall: by the clock, from batch to batch.
        cpu: of all threads of this process.
        batches: measured.
        waited: share of the time for which the receiver waited for batches.
        starved: share of it for which the pipeline waited for what comes before its mark,
        blocked: and for which that had a batch ready in the queue of one, which was not yet taken.
    """

    wall: float
    cpu: float
    batches: int
    waited: float = 0.0
    starved: float = 0.0
    blocked: float = 0.0


def run(
    pipeline: Pipeline,
    seconds: float,
    receive: Callable[[Sequence[Any]], None] = lambda outputs: None,
    stock: int = 0,
) -> Piece:
    """Run a pipeline for so long, at least a few batches, and leave nothing in its queues.

    Batches do not count for the wall until the queues are full. The CPU time is that of all of them.

    Args:
        pipeline: not run otherwise.
        seconds: to measure for.
        receive: is given the outputs of each batch.
        stock: how many batches its upstream may have ready from before.

    Raises:
        ValueError: if the data ends and there is none when it starts again.
    """
    settle()
    cpu, filled = time.process_time(), 0
    for _ in range(pipeline.prefetch_queue_depth + stock + _FILL):
        outputs = _next(pipeline)
        receive(outputs)
        filled += len(outputs[0])
    _synchronize(pipeline.device_id)
    before, start = _waits(pipeline), time.perf_counter()
    samples = batches = 0
    waited = now = 0.0
    while batches < _LEAST_BATCHES or now < seconds:
        asked = time.perf_counter()
        outputs = _next(pipeline)
        waited += time.perf_counter() - asked
        receive(outputs)
        samples += len(outputs[0])
        batches += 1
        now = time.perf_counter() - start
    _synchronize(pipeline.device_id)
    taken = time.perf_counter() - start
    # A wait that began earlier is counted when it ends.
    starved, blocked = (min(b - a, taken) for a, b in zip(before, _waits(pipeline), strict=True))
    drained = _drain(pipeline)
    settle()
    cpu = (time.process_time() - cpu) / (filled + samples + drained)
    return Piece(taken / samples, cpu, batches, waited / taken, starved / taken, blocked / taken)


def cores() -> float:
    """How many cores this process gets, when as many of its threads as there are work at once.

    Others that use the machine, and limits of a container, take their share of what the system counts.
    """

    def work() -> None:
        while time.perf_counter() < end:
            hashlib.sha256(_BLOCK)  # releases the interpreter's lock

    count = len(os.sched_getaffinity(0))
    start, cpu = time.perf_counter(), time.process_time()
    end = start + _PROBE_S
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.process_time() - cpu) / (time.perf_counter() - start)


def settle() -> None:
    """Wait until no thread of this process works: what was asked for ahead must not count for the next."""
    end = time.perf_counter() + _SETTLE_S
    busy = 1.0
    while busy > _QUIET and time.perf_counter() < end:
        start, cpu = time.perf_counter(), time.process_time()
        time.sleep(_QUIET_S)
        busy = (time.process_time() - cpu) / (time.perf_counter() - start)


def _next(pipeline: Pipeline) -> Sequence[Any]:
    for _ in range(2):
        _schedule(pipeline)
        try:
            outputs: Sequence[Any] = pipeline.share_outputs()
        except StopIteration:
            pipeline.reset()
        else:
            pipeline.release_outputs()
            return outputs
    raise ValueError(
        "the source ended and gives nothing when it starts again: give it more data, or let it start anew "
        'when it is asked for another epoch (an iterable with cycle="raise")'
    )


def _schedule(pipeline: Pipeline) -> None:
    """Keep the queue full, unless the data ends."""
    queued = -1
    while queued < pipeline._batches_to_consume < pipeline.prefetch_queue_depth:
        queued = pipeline._batches_to_consume
        pipeline.schedule_run()


def _drain(pipeline: Pipeline) -> int:
    """Take what is still in the queue; the number of samples."""
    samples = 0
    while pipeline._batches_to_consume:
        samples += len(pipeline.share_outputs()[0])
        pipeline.release_outputs()
    return samples


def _waits(pipeline: Pipeline) -> tuple[float, float]:
    if not isinstance(pipeline, EchoPipeline):
        return 0.0, 0.0
    stats = pipeline.echo_stats()[-1]
    return stats.upstream_wait_s, stats.downstream_wait_s


def _synchronize(device: int | None) -> None:
    if device is not None or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
