"""What the trainer can train, with its defaults, and the settings of one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pipelines.classification import EchoFactor, EchoStage, ImageFormat
from train import models
from train.data import ShardSet, cifar10, fashion_mnist


class Network(str, Enum):
    """The networks to choose from."""

    SMALL = "small"
    RESNET6 = "resnet6"
    RESNET32 = "resnet32"

    @property
    def make(self) -> models.NetworkMaker:
        """Makes one, with random weights."""
        return {
            Network.SMALL: models.small,
            Network.RESNET6: models.resnet6,
            Network.RESNET32: models.resnet32,
        }[self]


class Schedule(str, Enum):
    """How the learning rate goes after its warm-up."""

    CONSTANT = "constant"
    """As it is, so that nothing depends on when training is to end."""
    LINEAR = "linear"
    """Down to 0 at the end of what --epochs, --max-steps and --max-fresh allow."""


class OnError(str, Enum):
    """What becomes of a training image that does not decode."""

    RAISE = "raise"
    SKIP = "skip"
    """It is left out, and named in skipped.jsonl."""


@dataclass(frozen=True)
class Workload:
    """A data set, how its images are fed, and settings that suit it."""

    name: str
    prepare: Callable[[Path | None], ShardSet]
    images: ImageFormat
    classes: int
    epochs: int
    learning_rate: float
    batch_size: int = 128
    momentum: float = 0.9
    weight_decay: float = 5e-4
    eval_every: int = 5000
    eval_examples: int = 10_000


@dataclass(frozen=True)
class Settings:
    """One run. Counts are of examples, except for steps and epochs (passes over fresh examples)."""

    workload: Workload
    echo_stage: EchoStage
    echo_factor: EchoFactor
    shuffle_buffer: int | None
    batch_size: int
    epochs: int
    max_steps: int | None
    max_fresh: int | None
    target: float | None
    network: Network
    learning_rate: float
    schedule: Schedule
    eval_every: int
    eval_examples: int
    seed: int
    device: str
    on_error: OnError = OnError.RAISE
    max_errors: float | None = None

    @property
    def uses(self) -> float | None:
        """Mean number of uses of a fresh example; None if only time will tell."""
        if self.echo_stage is EchoStage.NONE:
            return 1.0
        return None if isinstance(self.echo_factor, str) else self.echo_factor


# Means and standard deviations are of the training images.
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="fashion-mnist",
            prepare=fashion_mnist.prepare,
            images=ImageFormat(size=28, mean=(72.9,), std=(90.0,), padding=2),
            classes=10,
            epochs=5,
            learning_rate=0.03,
        ),
        Workload(
            name="cifar10",
            prepare=cifar10.prepare,
            images=ImageFormat(size=32, mean=(125.3, 123.0, 113.9), std=(63.0, 62.1, 66.7)),
            classes=10,
            epochs=10,
            learning_rate=0.02,
        ),
    )
}
