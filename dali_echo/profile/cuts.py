"""Cutting a pipeline definition between its stages, so that each can run alone.

The definition runs once more for every part that is made of it. A part ends where the values that leave
a stage become its outputs, and begins where external sources take the place of those that enter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import Pipeline
from nvidia.dali.types import BatchInfo

from dali_echo.bypass import kind_of
from dali_echo.definition import join
from dali_echo.factor import parse_factor
from dali_echo.graph import Joint, Stage, without_marks
from dali_echo.mark import Mark, Unit
from dali_echo.profile.stages import DECODE, READ, STAGES, TRANSFER, Trace


class Definition:
    """The stages of a pipeline definition, as it is without its marks.

    Args:
        make: makes the pipeline, which may hold marks; called anew for each part.

    Raises:
        TypeError, ValueError: if it makes no pipeline, or one that was made before or reads nothing.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        with without_marks() as marks:
            trace = Trace(make)
        self.marks = [mark.name for mark in marks]
        self.stages = trace.stages
        """Those of `STAGES` that it has, in order."""
        self.uses_gpu = {stage: trace.uses_gpu(stage) for stage in self.stages}
        """Whether a stage has operators on the GPU."""
        self.random_decoders = sorted(
            kind_of(operator)
            for operator in trace.operators
            if trace.stage_of[id(operator)] == DECODE and operator._op.schema.HasRandomSeedArg()
        )
        """Operators that draw random numbers while decoding."""
        self.batch_size = int(trace.pipeline.max_batch_size)
        self.device_id = trace.pipeline.device_id
        self.outputs = len(trace.pipeline._graph_out)
        self._cuts = {stage: trace.leaving(stage) for stage in {*self.stages, TRANSFER}}
        if READ not in self.stages:
            raise ValueError("its pipeline holds no reader and no external source, so nothing can be echoed")

    def up_to(self, end: str) -> Pipeline:
        """A pipeline of the stages up to `end`."""
        return self._part(None, end, None).pipeline

    def whole(self) -> Pipeline:
        """The pipeline without its marks."""
        with without_marks():
            return Trace(self._make).pipeline

    def echoed(
        self, begin: str, end: str, upstream: Pipeline, factor: float, unit: Unit = "sample"
    ) -> Pipeline:
        """A pipeline of the stages after `begin` up to `end`, which may be none, after a mark.

        Args:
            begin: the stage that the mark stands after. The transfer, even without copies, ends with all
                outputs.
            end: the last stage.
            upstream: makes what leaves `begin`.
            factor: of the mark.
            unit: of the mark.
        """
        mark = _mark(f"after {begin}", factor, unit, 4 * self.batch_size if unit == "sample" else 1)
        down = self._part(begin, end, mark) if begin != end else self._source(begin, mark)
        return join([Stage(upstream, None, rank=0, guards=[]), down])

    def held(self, begin: str, source: Callable[[], Sequence[Any]]) -> Pipeline:
        """A pipeline that hands out what `source` returns: batches of what leaves `begin`."""
        mark = _mark(f"held {begin}", 1, "batch", 1)
        stage = self._source(begin, mark)
        batch: Sequence[Any] = ()
        last: Any = None

        def feed(position: int, info: BatchInfo) -> Any:
            nonlocal batch, last
            request = info.epoch_idx, info.iteration
            if request != last:
                batch, last = source(), request
            return batch[position]

        stage.joint.feed = feed  # type: ignore[union-attr]
        return stage.pipeline

    def _part(self, begin: str | None, end: str, mark: Mark | None) -> Stage:
        with without_marks():
            trace = Trace(self._make)
        if any(trace.leaving(stage) != cut for stage, cut in self._cuts.items()):
            raise ValueError("it made another pipeline when it ran again: it must make the same each time")
        first = STAGES.index(begin) + 1 if begin else 0
        trace.keep_effects(STAGES[first : STAGES.index(end) + 1])
        trace.end_after(end)
        joint = trace.begin_after(begin, mark) if begin and mark else None
        return Stage(trace.pipeline, joint, rank=0, guards=[])

    def _source(self, begin: str, mark: Mark) -> Stage:
        pipeline = Pipeline(batch_size=self.batch_size, num_threads=1, device_id=self.device_id)
        joint = Joint(mark, tuple(DataNode("", device) for _, device in self._cuts[begin]))
        with pipeline:
            joint.stand_in([f"{mark.name}[{position}]" for position in range(len(joint.inputs))])
        pipeline.set_outputs(*joint.outputs)
        return Stage(pipeline, joint, rank=0, guards=[])


def _mark(name: str, factor: float, unit: Unit, buffer: int) -> Mark:
    return Mark(
        name,
        parse_factor(factor),
        unit,
        buffer,
        memory_limit=None,
        max_factor=factor,
        timeout=300.0,
        seed=None,
    )
