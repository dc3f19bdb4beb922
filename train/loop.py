"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from dali_echo.state import differences
from pipelines.classification import EchoStage
from train import checkpoint, ranks
from train.data import ShardSet
from train.errors import TrainError
from train.feed import Feed, cores, held_out
from train.learner import Learner
from train.record import Evaluation, Record, Result
from train.timing import Busy
from train.workloads import OnError, Schedule, Settings

MOST_USES = 8
"""Of a fresh example with the factors "auto" and "fill": the default of `echo`."""

Progress = Callable[[int, int, Evaluation | None], None]
"""Told after each step: its number, how many are planned, and the latest evaluation."""


def fit(
    settings: Settings,
    shards: ShardSet,
    out: Path,
    progress: Progress | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
) -> Result:
    """Train until the target or a limit is reached, and write the files of `Record` to `out`.

    Times leave out evaluation and checkpoints, so that how often they are made does not matter.

    Args:
        settings: of the run; the same on every rank.
        shards: to train on and to evaluate on.
        out: folder to write to.
        progress: told after each step.
        checkpoint_every: steps after which `checkpoint.pt` is written, as at the end; None for never.
        resume: go on from `checkpoint.pt` in `out`, if there is one. The weights become the same, bit
            for bit, as if the run had not been interrupted.

    Raises:
        TrainError: for settings, shards, a folder or a checkpoint that cannot be used, and for a loss
            that is not finite.
    """
    device = torch.device(settings.device)
    # Leave a core to the pipeline: threads that spin while they wait would take it away.
    torch.set_num_threads(max(1, cores() - 1))
    saved = checkpoint.load(out) if resume else None
    held = held_out(settings, shards)
    feed = Feed(settings, shards, checkpoint_every is not None, _skipped(settings, out, saved is not None))
    planned = _planned_steps(settings, feed.epoch_size)
    learner = Learner(settings, planned)
    run = Run(next_eval=settings.eval_every)
    if saved is not None:
        _refuse_difference(settings, saved["settings"], out)
        learner.load_state_dict(saved["learner"])
        feed.load_state_dict(saved["feeds"][ranks.rank()])
        run = Run.of_state(saved["run"])
    # Only the first rank writes.
    record = Record(out, run.evaluations) if ranks.rank() == 0 else None
    busy = Busy(device)
    limit = _fresh_limit(settings, feed.epoch_size)
    target = math.inf if settings.target is None else settings.target
    batches = iter(feed)
    before = (run.wall_s, run.busy_s)
    paused_s = 0.0
    start = time.perf_counter()

    def done() -> bool:
        return run.step >= planned or run.fresh >= limit or run.accuracy >= target

    while not done():
        batch = next(batches)
        with busy.working():
            run.losses.append(learner.step(**batch))
        run.step += 1
        run.fresh, run.emitted = map(int, ranks.total([feed.fresh, feed.emitted], device))
        evaluate = done() or run.fresh >= run.next_eval
        write = checkpoint_every is not None and (run.step % checkpoint_every == 0)
        if evaluate or write:
            run.busy_s = before[1] + busy.seconds()
            paused = time.perf_counter()
            run.wall_s = before[0] + paused - start - paused_s
            if evaluate:
                evaluation = _evaluate(run, learner, feed, held)
                run.next_eval = (run.fresh // settings.eval_every + 1) * settings.eval_every
                if record:
                    record.add(evaluation)
            if checkpoint_every is not None and (write or done()):
                _checkpoint(settings, out, run, learner, feed)
            paused_s += time.perf_counter() - paused
        if progress:
            progress(run.step, planned, run.evaluations[-1] if run.evaluations else None)
    summary = {
        **_results(settings, run.evaluations[-1]),
        "upstream_wait_s": feed.upstream_wait_s,
        "busy_fraction": run.busy_s / run.wall_s,
        "skipped_examples": int(ranks.total([feed.skipped], device)[0]),
        "evaluated_on": int(ranks.total([sum(len(batch["label"]) for batch in held)], device)[0]),
    }
    result = Result(summary, run.evaluations)
    if record:
        record.close(result)
    return result


@dataclass
class Run:
    """How far a run is; counts are of examples over all ranks, times in seconds."""

    step: int = 0
    fresh: int = 0
    emitted: int = 0
    next_eval: int = 0
    wall_s: float = 0.0
    busy_s: float = 0.0
    losses: list[torch.Tensor] = field(default_factory=list)
    """Of the steps since the last evaluation, on this rank."""
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """As last evaluated."""
        return self.evaluations[-1].accuracy if self.evaluations else -math.inf

    def state(self) -> dict[str, Any]:
        """In plain values and tensors."""
        return {
            **{f.name: getattr(self, f.name) for f in fields(self)},
            "losses": [float(loss) for loss in self.losses],
            "evaluations": [asdict(evaluation) for evaluation in self.evaluations],
        }

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Run:
        """Read what `state` gave."""
        evaluations = [Evaluation(**evaluation) for evaluation in state["evaluations"]]
        losses = [torch.tensor(loss) for loss in state["losses"]]
        return cls(**{**state, "losses": losses, "evaluations": evaluations})


def _skipped(settings: Settings, out: Path, resumed: bool) -> Path | None:
    """The file that names what is left out, which all ranks share; a new run begins it anew."""
    if settings.on_error is OnError.RAISE:
        return None
    path = out / "skipped.jsonl"
    if ranks.rank() == 0 and not resumed:
        try:
            out.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
        except OSError as error:
            raise TrainError(f"cannot write to --out {out}: {error.strerror}. Name another folder") from error
    ranks.gathered(None)  # the others wait for this
    return path


def _evaluate(run: Run, learner: Learner, feed: Feed, held: list[dict[str, torch.Tensor]]) -> Evaluation:
    loss = float(torch.stack([loss.cpu() for loss in run.losses]).mean())
    if not math.isfinite(loss):
        raise TrainError(f"the loss is {loss} at step {run.step}: training has diverged. Lower --lr")
    run.losses.clear()
    run.evaluations.append(
        Evaluation(
            step=run.step,
            fresh=run.fresh,
            emitted=run.emitted,
            wall_s=run.wall_s,
            learning_rate=learner.learning_rate,
            train_loss=loss,
            accuracy=learner.accuracy(held),
            echo=[asdict(stats) for stats in feed.stats],
        )
    )
    return run.evaluations[-1]


def _checkpoint(settings: Settings, out: Path, run: Run, learner: Learner, feed: Feed) -> None:
    feeds = ranks.gathered(feed.state_dict())
    if ranks.rank() == 0:
        state = {
            "settings": _plain(settings),
            "learner": learner.state_dict(),
            "feeds": feeds,
            "run": run.state(),
        }
        checkpoint.save(out, state)


def _plain(settings: Settings) -> dict[str, Any]:
    """Settings that a resumed run must share, and the number of ranks."""
    values = {
        f.name: getattr(settings, f.name)
        for f in fields(settings)
        if f.name not in ("device", "workload", "on_error", "max_errors")
    }
    if settings.schedule is Schedule.CONSTANT:
        # Where a run ends changes nothing of the way there.
        for limit in ("epochs", "max_steps", "max_fresh", "target"):
            del values[limit]
    plain = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
    return {"workload": settings.workload.name, "ranks": ranks.count(), **plain}


def _refuse_difference(settings: Settings, saved: dict[str, Any], out: Path) -> None:
    different = [f"{name} was {was}, and is {now}" for name, was, now in differences(saved, _plain(settings))]
    if different:
        raise TrainError(
            f"--resume: the run in {out} had other settings: {'; '.join(different)}. Give the same, or start "
            f"a new run in another folder with --out"
        )


def _planned_steps(settings: Settings, epoch_size: int) -> int:
    """Steps until the first limit; a target, and a limit on fresh examples, may end training before."""
    batch_size = settings.batch_size * ranks.count()
    uses = MOST_USES if settings.uses is None else settings.uses
    steps = math.ceil(settings.epochs * round(epoch_size * uses) / batch_size)
    if settings.max_fresh is not None:
        steps = min(steps, math.ceil(settings.max_fresh * uses / batch_size))
    return steps if settings.max_steps is None else min(steps, settings.max_steps)


def _fresh_limit(settings: Settings, epoch_size: int) -> float:
    limit = math.inf if settings.max_fresh is None else settings.max_fresh
    # Where the number of uses is not known before, steps cannot tell when the last pass is over.
    return min(limit, settings.epochs * epoch_size) if settings.uses is None else limit


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
        "ranks": ranks.count(),
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
