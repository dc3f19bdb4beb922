"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipelines.classification import EchoStage
from train.data import ShardSet
from train.errors import TrainError
from train.feed import Feed, cores, held_out
from train.learner import Learner
from train.record import Evaluation, Record, Result
from train.timing import Busy
from train.workloads import Settings

Progress = Callable[[int, int, Evaluation | None], None]
"""Told after each step: its number, how many are planned, and the latest evaluation."""


def fit(settings: Settings, shards: ShardSet, out: Path, progress: Progress | None = None) -> Result:
    """Train until the target or a limit is reached, and write the files of `Record` to `out`.

    Times leave out evaluation, so that how often it is done does not matter.

    Raises:
        TrainError: for settings, shards or a folder that cannot be used, and for a loss that is
            not finite.
    """
    device = torch.device(settings.device)
    # Leave a core to the pipeline: threads that spin while they wait would take it away.
    torch.set_num_threads(max(1, cores() - 1))
    held = held_out(settings, shards)
    feed = Feed(settings, shards)
    planned = _planned_steps(settings, feed.epoch_size)
    learner = Learner(settings, planned)
    record = Record(out)
    busy = Busy(device)
    max_fresh = math.inf if settings.max_fresh is None else settings.max_fresh
    target = math.inf if settings.target is None else settings.target
    next_eval = settings.eval_every
    losses: list[torch.Tensor] = []
    evaluation_s = 0.0
    start = time.perf_counter()
    for step, batch in enumerate(feed, start=1):
        with busy.working():
            losses.append(learner.step(**batch))
        over = step >= planned or feed.fresh >= max_fresh
        if over or feed.fresh >= next_eval:
            busy_s = busy.seconds()
            paused = time.perf_counter()
            evaluation = Evaluation(
                step=step,
                fresh=feed.fresh,
                emitted=feed.emitted,
                wall_s=paused - start - evaluation_s,
                learning_rate=learner.learning_rate,
                train_loss=_mean(losses, step),
                accuracy=learner.accuracy(held),
            )
            record.add(evaluation)
            losses.clear()
            next_eval = (feed.fresh // settings.eval_every + 1) * settings.eval_every
            over = over or evaluation.accuracy >= target
            evaluation_s += time.perf_counter() - paused
        if progress:
            progress(step, planned, record.latest)
        if over:
            break
    summary = {
        **_results(settings, evaluation),
        "upstream_wait_s": feed.upstream_wait_s,
        "busy_fraction": busy_s / evaluation.wall_s,
        "evaluation_s": evaluation_s,
        "evaluated_on": sum(len(batch["label"]) for batch in held),
    }
    return record.close(summary)


def _planned_steps(settings: Settings, epoch_size: int) -> int:
    """Steps until the first limit; a target may end training before."""
    steps = math.ceil(settings.epochs * epoch_size / settings.batch_size)
    if settings.max_fresh is not None:
        steps = min(steps, math.ceil(settings.max_fresh * settings.uses / settings.batch_size))
    return steps if settings.max_steps is None else min(steps, settings.max_steps)


def _mean(losses: list[torch.Tensor], step: int) -> float:
    mean = float(torch.stack(losses).mean())
    if not math.isfinite(mean):
        raise TrainError(f"the loss is {mean} at step {step}: training has diverged. Lower --lr")
    return mean


def _results(settings: Settings, final: Evaluation) -> dict[str, Any]:
    reached = settings.target is not None and final.accuracy >= settings.target
    return {
        "workload": settings.workload.name,
        "seed": settings.seed,
        "echo": _echo(settings),
        "fresh_examples": final.fresh,
        "emitted_examples": final.emitted,
        "steps": final.step,
        "wall_s": final.wall_s,
        "metric": "accuracy",
        "value": final.accuracy,
        "target": settings.target,
        "reached": reached,
        "fresh_to_target": final.fresh if reached else None,
        "wall_s_to_target": final.wall_s if reached else None,
        "device": settings.device,
        "network": settings.network.value,
        "batch_size": settings.batch_size,
        "learning_rate": settings.learning_rate,
        "schedule": settings.schedule.value,
    }


def _echo(settings: Settings) -> dict[str, Any]:
    stage = settings.echo_stage
    if stage is EchoStage.NONE:
        return {"stage": stage.value, "factor": 1, "unit": None, "shuffle_buffer": None}
    unit = "batch" if stage is EchoStage.BATCH else "sample"
    # The buffer that `echo` takes by itself.
    buffer = settings.shuffle_buffer or (1 if unit == "batch" else 4 * settings.batch_size)
    return {
        "stage": stage.value,
        "factor": settings.echo_factor,
        "unit": unit,
        "shuffle_buffer": buffer,
    }
