"""The command line: `python -m train WORKLOAD`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from pipelines.classification import EchoFactor, EchoStage
from train import demo, ranks
from train.data import ShardSet, remote_shards
from train.errors import TrainError
from train.loop import fit
from train.progress import ProgressBar
from train.workloads import WORKLOADS, Network, OnError, Schedule, Settings, Workload

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

DEVICES = "cpu, cuda or cuda:N; auto is cuda where there is one."


def _command(workload: Workload) -> Callable[..., None]:
    def train(
        data: Annotated[
            str | None, typer.Option(help="Where the data is: a path, or a URL with braces for its shards.")
        ] = None,
        echo_stage: Annotated[
            EchoStage, typer.Option(help="Stage whose results are used several times.")
        ] = EchoStage.NONE,
        echo_factor: Annotated[
            str | None, typer.Option(help="Mean uses of a fresh example, auto or fill; 2 by default.")
        ] = None,
        shuffle_buffer: Annotated[
            int | None,
            typer.Option(min=1, help="Examples (stage batch: batches) from which repeats are drawn."),
        ] = None,
        batch_size: Annotated[int, typer.Option(min=2, help="Examples in a step.")] = workload.batch_size,
        epochs: Annotated[
            int, typer.Option(min=1, help="Passes over the fresh examples, at most.")
        ] = workload.epochs,
        max_steps: Annotated[int | None, typer.Option(min=1, help="Steps, at most.")] = None,
        max_fresh: Annotated[int | None, typer.Option(min=1, help="Fresh examples, at most.")] = None,
        target: Annotated[float | None, typer.Option(help="Accuracy, a fraction, at which to stop.")] = None,
        seed: Annotated[
            int, typer.Option(min=0, max=2**31 - 1, help="Of weights, order and augmentation.")
        ] = 0,
        device: Annotated[str, typer.Option(help=DEVICES)] = "auto",
        out: Annotated[
            Path | None, typer.Option(help="Folder for what the run writes; runs/WORKLOAD.")
        ] = None,
        lr: Annotated[
            float, typer.Option(min=0, help="Learning rate, after the warm-up.")
        ] = workload.learning_rate,
        schedule: Annotated[
            Schedule, typer.Option(help="Of the learning rate; linear goes to 0 at the limits.")
        ] = Schedule.CONSTANT,
        network: Annotated[
            Network, typer.Option(help="small and resnet6 suit a CPU, resnet32 a GPU.")
        ] = Network.SMALL,
        eval_every: Annotated[
            int, typer.Option(min=1, help="Fresh examples between evaluations.")
        ] = workload.eval_every,
        eval_examples: Annotated[
            int, typer.Option(min=1, help="Test examples to evaluate on, at most.")
        ] = workload.eval_examples,
        on_error: Annotated[
            OnError, typer.Option(help="What becomes of a training image that does not decode.")
        ] = OnError.RAISE,
        max_errors: Annotated[
            float | None,
            typer.Option(
                min=0, help="Such images to skip at most: a number, or a fraction; 0.05 by default."
            ),
        ] = None,
        resume: Annotated[
            bool, typer.Option("--resume", help="Go on from checkpoint.pt in --out, if there is one.")
        ] = False,
        checkpoint_every: Annotated[
            int, typer.Option(min=1, help="Steps between checkpoints; one is written at the end too.")
        ] = 200,
    ) -> None:
        with ranks.joined(_device(device)) as rank_device:
            settings = Settings(
                workload=workload,
                echo_stage=echo_stage,
                echo_factor=_echo_factor(echo_stage, echo_factor, shuffle_buffer, schedule, max_steps),
                shuffle_buffer=shuffle_buffer,
                batch_size=batch_size,
                epochs=epochs,
                max_steps=max_steps,
                max_fresh=max_fresh,
                target=_target(target),
                network=network,
                learning_rate=lr,
                schedule=schedule,
                eval_every=eval_every,
                eval_examples=eval_examples,
                seed=seed,
                device=rank_device,
                on_error=on_error,
                max_errors=_max_errors(on_error, max_errors),
            )
            folder = out or Path("runs") / workload.name
            shards = _shards(workload, data)
            with ProgressBar(workload.name) as bar:
                result = fit(settings, shards, folder, bar.update, checkpoint_every, resume)
            if ranks.rank() == 0:
                _report(result.summary, folder)

    return train


for _workload in WORKLOADS.values():
    app.command(_workload.name, help=f"Train on {_workload.name}.")(_command(_workload))


@app.command("demo", help=demo.__doc__)
def _demo(
    data: Annotated[Path | None, typer.Option(help="Where Fashion-MNIST is.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed and a lower target: a minute, not minutes.")
    ] = False,
    device: Annotated[str, typer.Option(help=DEVICES)] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for demo.png and runs/demo.")] = Path("."),
) -> None:
    size = demo.QUICK if quick else demo.FULL
    demo.run(size, demo.WORKLOAD.prepare(data), _device(device), out)


def main() -> None:
    """Run the command line; an error that a person can remedy ends with its message and code 1."""
    try:
        app(prog_name="python -m train")
    except TrainError as error:
        Console(stderr=True).print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(1)


def _shards(workload: Workload, data: str | None) -> ShardSet:
    if data is not None and "://" in data:
        return remote_shards(data)
    return workload.prepare(None if data is None else Path(data))


def _echo_factor(
    stage: EchoStage, factor: str | None, buffer: int | None, schedule: Schedule, max_steps: int | None
) -> EchoFactor:
    if stage is EchoStage.NONE:
        for flag, value in (("--echo-factor", factor), ("--shuffle-buffer", buffer)):
            if value is not None:
                raise typer.BadParameter(
                    f"{flag} {value} needs a stage to echo: add --echo-stage decode, or another"
                )
        return 1.0
    if factor == "auto" or factor == "fill":
        if schedule is Schedule.LINEAR and max_steps is None:
            raise typer.BadParameter(
                f"--echo-factor {factor} leaves open how many steps there are, and --schedule linear needs "
                f"to know: add --max-steps"
            )
        return factor
    try:
        return 2.0 if factor is None else float(factor)
    except ValueError:
        raise typer.BadParameter(f"--echo-factor {factor} is not a number, auto or fill") from None


def _max_errors(on_error: OnError, most: float | None) -> float | None:
    if most is None:
        return None
    if on_error is OnError.RAISE:
        raise typer.BadParameter(f"--max-errors {most:g} needs --on-error skip")
    if 0 < most < 1:
        return most
    if not most.is_integer():
        raise typer.BadParameter(f"--max-errors {most:g} is neither a whole number nor a fraction below 1")
    return int(most)


def _target(target: float | None) -> float | None:
    if target is not None and not 0 <= target <= 1:
        raise typer.BadParameter(f"--target {target:g} is not a fraction: write 0.9 for 90 %")
    return target


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device {name} is not known: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(
            f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices that "
            f"PyTorch can use. Use --device cpu, or a lower number"
        )
    return name


def _report(summary: dict[str, Any], folder: Path) -> None:
    console = Console(highlight=False)
    console.print(
        f"accuracy {summary['value']:.2%} on {summary['evaluated_on']:,} held-out examples after "
        f"{summary['fresh_examples']:,} fresh examples, {summary['steps']:,} steps and "
        f"{summary['wall_s']:.1f} s; the device was busy for {summary['busy_fraction']:.0%} of it",
        soft_wrap=True,
    )
    if summary["target"] is not None:
        verdict = "reached" if summary["reached"] else "not reached"
        console.print(f"target {summary['target']:.2%}: {verdict}")
    console.print(f"written: {folder}/summary.json, metrics.jsonl and curve.png", soft_wrap=True)
