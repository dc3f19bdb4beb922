"""Measuring the parts of a pipeline, all of them in turn, round after round."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from nvidia.dali.pipeline import Pipeline

from dali_echo.profile.clock import cores, run
from dali_echo.profile.cuts import Definition
from dali_echo.profile.model import STEP, Place, Round, places
from dali_echo.profile.stages import TRANSFER
from dali_echo.pytorch import Batch, to_torch
from dali_echo.store import batch_bytes

# Held batches are replayed from a buffer, as behind a mark: enough of them that caches do not hold them.
_HELD_BYTES = 256 << 20
_LEAST_HELD = 4
_REPLAYED = 4


class Held:
    """The latest batches that left a stage."""

    def __init__(self) -> None:
        self._batches: deque[tuple[Sequence[Any], int]] = deque()
        self._next = 0
        self.samples = self.bytes = 0
        """Seen so far."""

    def add(self, outputs: Sequence[Any]) -> None:
        """Hold a batch, and let go of the oldest that are too many."""
        size = batch_bytes(outputs)
        self.samples += len(outputs[0])
        self.bytes += size
        self._batches.append((outputs, size))
        while len(self._batches) > _LEAST_HELD and sum(size for _, size in self._batches) > _HELD_BYTES:
            self._batches.popleft()

    def next(self) -> Sequence[Any]:
        """The batches in turn, without end."""
        self._next += 1
        return self._batches[self._next % len(self._batches)][0]


class Bench:
    """The parts of a pipeline, set up to be measured.

    Args:
        make: makes the pipeline; see `Definition`.
        step: does one training step on a batch as `EchoIterator` gives it.
        outputs: the names of the pipeline's outputs, for the step.

    Raises:
        TypeError, ValueError: if `make` makes no pipeline that can be cut, or the names do not fit.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        step: Callable[[Batch], Any] | None = None,
        outputs: Sequence[str] = (),
    ) -> None:
        self.definition = definition = Definition(make)
        if step and not len(set(outputs)) == len(outputs) == definition.outputs:
            raise ValueError(
                f"outputs = {list(outputs)!r}: the step needs a different name for each of the pipeline's "
                f"{definition.outputs} outputs"
            )
        self._step, self._names = step, outputs
        self.places = places(definition.stages)
        last = definition.stages[-1]
        self.held = {stage: Held() for stage in definition.stages}
        self._up = {stage: definition.up_to(stage) for stage in definition.stages}
        self._whole = definition.whole() if step else self._up[last]
        self._emitted = Held()
        # The loop of a trainer that never waits also asks an echo for batches, and makes tensors of them.
        emitted = definition.held(TRANSFER, self._emitted.next)
        self._trainer = definition.echoed(TRANSFER, TRANSFER, emitted, _REPLAYED)
        self._down = {p.name: self._replay(p.stage, last, p.unit) for p in self.places}
        # What follows the last but one stage is the last one alone.
        self._alone = {
            stage: self._down[before] if stage == last else self._replay(before, stage)
            for before, stage in zip(definition.stages, definition.stages[1:], strict=False)
        }
        self._joined = {
            p.name: definition.echoed(p.stage, last, definition.up_to(p.stage), 1)
            for p in self.places
            if p.unit == "sample"
        }
        for pipeline in self._pipelines():
            pipeline.start_py_workers()  # before anything starts a thread or uses the GPU: they are forked
        self.uses_gpu = {**definition.uses_gpu, STEP: definition.device_id is not None}

    @property
    def has_step(self) -> bool:
        """Whether there is a training step."""
        return self._step is not None

    @property
    def pieces(self) -> int:
        """Pieces that a round measures."""
        return len(self._pipelines()) + (1 if self._step else 0)

    @property
    def dataset_samples(self) -> int | None:
        """Samples of an epoch of the first reader; None without one."""
        for meta in self._up[self.definition.stages[0]].reader_meta().values():
            return int(meta["epoch_size"])
        return None

    def bytes_per_sample(self, place: Place) -> float:
        """The mean size of a sample at a place."""
        held = self.held[place.stage]
        return held.bytes / held.samples

    def round(self, seconds: float) -> Round:
        """Measure every part for so long.

        Raises:
            Exception: what the pipeline or the step raises.
        """
        up = {stage: run(self._up[stage], seconds, held.add) for stage, held in self.held.items()}
        down = {name: run(pipeline, seconds) for name, pipeline in self._down.items()}
        alone = {self.definition.stages[0]: next(iter(up.values()))}
        for stage, pipeline in self._alone.items():
            measured = [down[name] for name, other in self._down.items() if other is pipeline]
            alone[stage] = measured[0] if measured else run(pipeline, seconds)
        whole = up[self.definition.stages[-1]]
        if self._step:
            run(self._whole, 0, self._emitted.add)
            alone[STEP] = run(self._trainer, seconds, self._receive)
            whole = run(self._whole, seconds, self._receive)
        joined = {
            name: run(pipeline, seconds, self._receive, stock=1 + pipeline.prefetch_queue_depth)
            for name, pipeline in self._joined.items()
        }
        joined[self.places[-1].name] = list(joined.values())[-1]  # whole batches, behind the same queue
        return Round(cores(), alone, up, down, joined, whole, self.uses_gpu)

    def _pipelines(self) -> list[Pipeline]:
        parts = (self._up, self._down, self._alone, self._joined)
        return list({id(p): p for part in parts for p in [*part.values(), self._whole]}.values())

    def _replay(self, begin: str, end: str, unit: Any = "sample") -> Pipeline:
        held = self.definition.held(begin, self.held[begin].next)
        return self.definition.echoed(begin, end, held, _REPLAYED, unit)

    def _receive(self, outputs: Sequence[Any]) -> None:
        if self._step:
            named = zip(self._names, outputs, strict=True)
            self._step({name: to_torch(name, output) for name, output in named})
