"""The batches of a run, and what it took to make them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from nvidia.dali.pipeline import Pipeline
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from dali_echo import EchoPipeline, EchoStats
from dali_echo.pytorch import EchoIterator
from pipelines.classification import OUTPUTS, READER, training, validation
from train import ranks
from train.data import ShardSet
from train.errors import TrainError
from train.workloads import OnError, Settings


def cores() -> int:
    """Processor cores for this process: its share, if others of torchrun are beside it."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class Feed:
    """Training batches without end, counted by the pipeline.

    Args:
        settings: of the run.
        shards: to read.
        keeps_state: whether `state_dict` will be asked for.
        skipped: the file that names images which were left out, if the settings say so.
    """

    def __init__(
        self, settings: Settings, shards: ShardSet, keeps_state: bool = False, skipped: Path | None = None
    ) -> None:
        pipeline = _checked(
            training,
            shards.train,
            settings.workload.images,
            settings.echo_stage,
            settings.echo_factor,
            settings.shuffle_buffer,
            skipped if settings.on_error is OnError.SKIP else None,
            settings.max_errors,
            batch_size=settings.batch_size,
            seed=settings.seed,
            enable_checkpointing=keeps_state,
            **_machine(settings.device),
        )
        # Only full batches: a last batch of one example would break batch normalisation.
        self._batches = EchoIterator(
            pipeline, OUTPUTS, reader_name=READER, last_batch_policy=LastBatchPolicy.FILL
        )
        reading = pipeline.stages[0] if isinstance(pipeline, EchoPipeline) else pipeline
        self.epoch_size = int(reading.reader_meta(READER)["epoch_size"])
        """Fresh examples that one pass over the shards gives to all ranks."""
        self.emitted = 0
        """Examples given out, repeats included."""
        self.wait_s = 0.0
        """Seconds for which the receiver waited for batches."""
        self._waited_before = 0.0

    @property
    def fresh(self) -> int:
        """Examples read for the batches given out, as the echo mark counts them."""
        stats = self._batches.stats
        return stats[0].fresh if stats else self.emitted

    @property
    def skipped(self) -> int:
        """Examples that were left out before, since they do not decode."""
        return sum(stats.skipped for stats in self._batches.stats)

    @property
    def upstream_wait_s(self) -> float:
        """Seconds for which what follows the mark waited for what is before it.

        Without a mark all of the pipeline is upstream, and the trainer waits for it.
        """
        stats = self.stats
        return self._waited_before + (stats[0].upstream_wait_s if stats else self.wait_s)

    @property
    def stats(self) -> list[EchoStats]:
        """Of each mark."""
        return self._batches.stats

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch given out."""
        return {
            "emitted": self.emitted,
            "upstream_wait_s": self.upstream_wait_s,
            "iterator": self._batches.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position, before the first batch."""
        self.emitted, self._waited_before = state["emitted"], state["upstream_wait_s"]
        try:
            self._batches.load_state_dict(state["iterator"])
        except ValueError as error:
            raise TrainError(f"--resume: {error}") from error

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            start = time.perf_counter()
            for batch in self._readable():
                self.wait_s += time.perf_counter() - start
                self.emitted += len(batch["label"])
                yield batch
                start = time.perf_counter()

    def _readable(self) -> Iterator[dict[str, torch.Tensor]]:
        """The batches of one epoch."""
        try:
            yield from self._batches
        except ValueError as error:
            raise TrainError(str(error)) from error


def held_out(settings: Settings, shards: ShardSet) -> list[dict[str, torch.Tensor]]:
    """This rank's part of the first test examples, in memory: small images are decoded only once."""
    wanted = -(-settings.eval_examples // ranks.count())
    pipeline = _checked(
        validation,
        shards.test,
        settings.workload.images,
        batch_size=min(500, wanted),
        **_machine(settings.device),
    )
    kept, left = [], wanted
    for batch in EchoIterator(
        pipeline, OUTPUTS, reader_name=READER, last_batch_policy=LastBatchPolicy.PARTIAL
    ):
        kept.append({name: tensor[:left] for name, tensor in batch.items()})
        left -= len(kept[-1]["label"])
        if left == 0:
            break
    return kept


def _checked(factory: Callable[..., Pipeline], *args: Any, **kwargs: Any) -> Pipeline:
    """Make a pipeline. What it refuses is the user's: shards, or a flag's value."""
    try:
        return factory(*args, **kwargs)
    except (OSError, TypeError, ValueError) as error:
        raise TrainError(str(error)) from error


def _machine(device: str) -> dict[str, int | None]:
    gpu = torch.device(device)
    if gpu.type == "cuda":
        return {"device_id": gpu.index or 0, "num_threads": cores()}
    # The other half is for the network.
    return {"device_id": None, "num_threads": max(1, cores() // 2)}
