"""The demonstration: the fresh examples that a network needs with echo, and without."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pipelines.classification import EchoStage
from train import compare
from train.chart import draw_comparison
from train.compare import Condition
from train.data import ShardSet
from train.loop import fit
from train.progress import ProgressBar
from train.workloads import WORKLOADS, Network, Schedule, Settings

FACTORS = (1, 2, 4)
WORKLOAD = WORKLOADS["fashion-mnist"]


@dataclass(frozen=True)
class Size:
    """How much to run; counts are of examples."""

    target: float
    max_fresh: int
    seeds: int
    eval_every: int
    eval_examples: int = 2000


FULL = Size(target=0.89, max_fresh=150_000, seeds=3, eval_every=1500)
QUICK = Size(target=0.80, max_fresh=30_000, seeds=1, eval_every=1000)


def run(size: Size, shards: ShardSet, device: str, folder: Path) -> None:
    """Train with each factor and seed, print a table and write demo.png to a folder.

    Each run stops at the target, and leaves its own files in a folder below runs/demo.
    """
    console = Console(highlight=False)
    conditions = [
        _condition(size, factor, shards, device, folder / "runs" / "demo", console) for factor in FACTORS
    ]
    base, *echoed = conditions
    title = f"Fashion-MNIST to {size.target:.0%} accuracy, echo after decode"
    console.print(compare.table(conditions, title))
    for line in (
        f"{_over(size.seeds)}Accuracy is on the first "
        f"{size.eval_examples:,} test images, looked at every {size.eval_every:,} fresh examples; "
        f"seconds leave that out. All have the same learning rate of {WORKLOAD.learning_rate} and "
        f"batches of {WORKLOAD.batch_size}: nothing was tuned again for echo.",
        *(compare.verdict(base, condition) for condition in echoed),
        compare.why(base),
    ):
        console.print(line)
    picture = folder / "demo.png"
    draw_comparison(picture, conditions, title, size.target)
    console.print(f"written: {picture}, and the files of each run in {folder / 'runs' / 'demo'}")


def _condition(
    size: Size, factor: int, shards: ShardSet, device: str, folder: Path, console: Console
) -> Condition:
    results = []
    for seed in range(size.seeds):
        settings = _settings(size, factor, seed, device)
        with ProgressBar(f"{_name(factor)}, seed {seed}") as bar:
            run = folder / f"echo-{factor}-seed-{seed}"
            results.append(fit(settings, shards, run, bar.update))
        summary = results[-1].summary
        console.print(
            f"{_name(factor)}, seed {seed}: accuracy {summary['value']:.1%} after "
            f"{summary['fresh_examples']:,} fresh examples and {summary['wall_s']:.1f} s"
        )
    return Condition(_name(factor), results)


def _settings(size: Size, factor: int, seed: int, device: str) -> Settings:
    return Settings(
        workload=WORKLOAD,
        echo_stage=EchoStage.DECODE if factor > 1 else EchoStage.NONE,
        echo_factor=factor,
        shuffle_buffer=None,
        batch_size=WORKLOAD.batch_size,
        epochs=WORKLOAD.epochs,
        max_steps=None,
        max_fresh=size.max_fresh,
        target=size.target,
        network=Network.SMALL,
        learning_rate=WORKLOAD.learning_rate,
        schedule=Schedule.CONSTANT,
        eval_every=size.eval_every,
        eval_examples=size.eval_examples,
        seed=seed,
        device=device,
    )


def _name(factor: int) -> str:
    return "no echo" if factor == 1 else f"echo × {factor}"


def _over(seeds: int) -> str:
    return f"Mean ± standard deviation over {seeds} seeds. " if seeds > 1 else "A single seed. "
