"""`EchoPipeline`: a DALI pipeline after a mark, with what it replays from."""

from __future__ import annotations

import atexit
import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import nvidia.dali
from nvidia.dali.pipeline import Pipeline

from dali_echo.ahead import Ahead
from dali_echo.auto import Auto
from dali_echo.bypass import operators_of, writes_into
from dali_echo.epochs import (
    EmittedEpochs,
    FreshEpochs,
    MovingEnds,
    Reader,
    ReadPosition,
    ceil_div,
    shard_size,
)
from dali_echo.filling import FillSource
from dali_echo.graph import Joint
from dali_echo.ranks import sharing
from dali_echo.source import Fresh, Moment, Snapshot, Source
from dali_echo.state import dump, load, refuse_difference
from dali_echo.stats import EchoStats
from dali_echo.streamed import StreamedPipeline


class EchoPipeline(Pipeline):  # type: ignore[misc]
    """A DALI pipeline that begins with an echo mark, and owns the pipeline before the mark.

    It is run, iterated and measured like any other. `pipeline_def` makes it.
    """

    _upstream: Pipeline
    _joint: Joint
    _draw_seed: int
    _given_seed: int | None
    _ahead: Ahead
    _emitted: EmittedEpochs | None
    _source: Source | None
    _delivered: Moment
    _checkpoint: bytes | None

    def __new__(cls, *args: Any, **kwargs: Any) -> EchoPipeline:
        """Not to be called."""
        raise TypeError("an EchoPipeline is made by a function decorated with dali_echo.pipeline_def")

    @classmethod
    def of_stage(
        cls, stage: Pipeline, upstream: Pipeline, joint: Joint, draw_seed: int, given_seed: int | None
    ) -> EchoPipeline:
        """Make an EchoPipeline of what DALI's decorator constructed, which is a Pipeline."""
        stage.__class__ = cls
        stage._upstream = upstream
        stage._joint = joint
        stage._draw_seed = draw_seed
        stage._given_seed = given_seed
        stage._ahead = Ahead(functools.partial(_run_upstream, upstream, joint.bad is not None))
        stage._emitted = None
        stage._source = None
        # DALI keeps the callback of an external source in a reference cycle. One that owned the upstream
        # would let the garbage collector free it on a worker thread, which DALI answers with an abort.
        this: Callable[[], Any] = weakref.ref(stage)
        joint.feed = lambda position, info: this()._source.feed(position, info)
        _alive.add(stage)
        return cast(EchoPipeline, stage)

    @property
    def stages(self) -> list[Pipeline]:
        """The chain of pipelines between the marks, from the one that reads to this one."""
        upstream = self._upstream
        return [*(upstream.stages if isinstance(upstream, EchoPipeline) else [upstream]), self]

    @property
    def fills(self) -> bool:
        """Whether the mark has `factor="fill"`."""
        return self._joint.mark.factor.fills

    def build(self) -> None:
        """Build all stages. See `nvidia.dali.Pipeline.build`.

        Raises:
            ValueError: if the pipeline was made with a `checkpoint` of another one.
        """
        if self._source is not None:
            return
        checkpoint, self._checkpoint = self._checkpoint, None
        self._upstream.build()
        self._source = self._make_source()
        self._delivered = self._source.moments.popleft()
        super().build()
        if checkpoint is not None:
            state = load(checkpoint)
            refuse_difference(state["made_by"], describe(self))
            restore(self, state["pipeline"])

    def start_py_workers(self) -> None:
        """See `nvidia.dali.Pipeline.start_py_workers`."""
        self._upstream.start_py_workers()
        super().start_py_workers()

    def reader_meta(self, name: str | None = None) -> dict[str, Any]:
        """As of `nvidia.dali.Pipeline`, of a reader before the mark, in samples after the mark.

        The epoch is `factor` times as long, so that iterators made for DALI's readers measure it right.
        With a factor that is a schedule, it is the length of the first epoch; with "auto", it is for the
        factor of the last batch delivered.

        Raises:
            TypeError: if a mark has `factor="fill"`.
        """
        self.build()
        meta = self._upstream.reader_meta(name)
        return self._scale(meta) if name else {key: self._scale(m) for key, m in meta.items()}

    def epoch_size(self, name: str | None = None) -> Any:
        """As of `nvidia.dali.Pipeline`, in samples after the mark."""
        meta = self.reader_meta(name)
        if name:
            return meta["epoch_size_padded"]
        return {key: m["epoch_size_padded"] for key, m in meta.items()}

    def epoch_samples(self, reader_name: str, epoch: int) -> int:
        """Samples that this pipeline emits in an epoch (counted from 0) of a reader before the mark.

        Where shards differ in size, all ranks emit the same number: over as many epochs as there are
        shards, exactly as many as the fresh samples of all ranks give. With the factor "auto" it is what
        was known at the last batch delivered.
        """
        return self._samples_by(self._delivered.ends, reader_name, epoch)

    def samples_drawn(self, reader_name: str, epoch: int) -> int:
        """`epoch_samples` as known at the last batch drawn, which is ahead of the last one delivered."""
        return self._samples_by(cast(Source, self._source).ends, reader_name, epoch)

    def fresh_samples(self, reader_name: str) -> int:
        """Samples that one pass of a reader before the mark, on all ranks, brings to it."""
        return int(self._upstream.reader_meta(reader_name)["epoch_size"])

    def cut_nowhere(self) -> None:
        """Emit an unbroken stream of full batches."""
        self.cut((FreshEpochs if self.fills else EmittedEpochs)(self.max_batch_size))

    def cut(self, emitted: EmittedEpochs) -> None:
        """Set the sizes of the batches to emit, which otherwise follow the reader's `pad_last_batch`.

        Raises:
            RuntimeError: if batches have been made already.
        """
        if self._source and self._source.started:
            raise RuntimeError("the pipeline has begun to make batches: give the iterator a new pipeline")
        self._emitted = emitted
        if self._source:
            emitted.epoch, emitted.batch = self._source.emitted.epoch, self._source.emitted.batch
            self._source.emitted = emitted

    def pad(self) -> None:
        """Pad the emitted epochs, whose length may change, if the reader has `pad_last_batch`. See `cut`."""
        self.cut(self._padded_like(self._reader()))

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0, of the batch to be delivered next."""
        self.build()
        return self._delivered.epoch

    def echo_stats(self) -> list[EchoStats]:
        """What each mark has done up to the last batch delivered, in the order of the marks."""
        self.build()
        return self._delivered.stats

    def share_outputs(self, *args: Any, **kwargs: Any) -> Any:
        """See `nvidia.dali.Pipeline.share_outputs`."""
        return self._deliver(super().share_outputs(*args, **kwargs))

    def outputs(self, *args: Any, **kwargs: Any) -> Any:
        """See `nvidia.dali.Pipeline.outputs`."""
        return self._deliver(super().outputs(*args, **kwargs))

    def reset(self) -> None:
        """Start again after the end of the data. See `nvidia.dali.Pipeline.reset`."""
        if self._last_iter and self._source:
            self._upstream.reset()
            self._source.restart()
        super().reset()

    def _shutdown(self) -> None:
        if isinstance(self._upstream, StreamedPipeline):
            self._upstream.end_streams()  # a thread that waits for a server would wait on
        # The thread must not be running a pipeline that is being taken down.
        self._ahead.stop()
        super()._shutdown()

    def _deliver(self, outputs: Any) -> Any:
        self._delivered = self._source.moments.popleft()  # type: ignore[union-attr]
        return outputs

    def _make_source(self) -> Source:
        reader = self._reader()
        return (FillSource if self.fills else Source)(
            mark=self._joint.mark,
            upstream=self._ahead,
            upstream_stats=_stats_of(self._upstream),
            upstream_now=snapshot(self._upstream),
            position=ReadPosition(reader, self.max_batch_size),
            readers=list(self.stages[0].reader_meta()),
            emitted=self._emitted or self._as_dali_counts(reader),
            batch_size=self.max_batch_size,
            seed=self._draw_seed,
            private=writes_into(self._joint.outputs, [*self._graph_out, *self._sinks]),
            keeps_state=self._enable_checkpointing,
            upstream_ends=_ends_of(self._upstream),
            auto=self._make_auto(reader) if self._joint.mark.factor.measured else None,
        )

    def _make_auto(self, reader: Reader | None) -> Auto:
        # Each stage has its queue and two batches in hand; an earlier mark turns one batch into several.
        period, prefetched = 1, 0
        for stage in self.stages[:-1]:
            if isinstance(stage, EchoPipeline):
                repeats = math.ceil(stage._joint.mark.factor.at(0))
                period, prefetched = period * repeats, prefetched * repeats
            prefetched += stage.prefetch_queue_depth + 2
        return Auto(
            self._joint.mark.max_factor,
            period=period,
            prefetched=prefetched,
            ends=MovingEnds(reader.size) if reader else None,
            shards=reader.shards if reader else 1,
            agree=sharing(),
        )

    def _get_checkpoint(self, iterator_data: str = "") -> bytes:
        # DALI's `checkpoint()` and its iterators end here.
        return dump({"made_by": describe(self), "pipeline": self.snapshot(iterator_data)()})

    def snapshot(self, iterator_data: str = "") -> Snapshot:
        """The state after the last batch delivered. `restore` reads it."""
        self.build()
        source = self._delivered.state
        if source is None:
            raise ValueError(
                "the pipeline keeps no state that a checkpoint could hold: make it with "
                "enable_checkpointing=True"
            )
        here = super()._get_checkpoint(iterator_data)
        return lambda: {"here": here, "source": {**source, "upstream": source["upstream"]()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `snapshot`; only before the first batch is made."""
        self.build()
        source = cast(Source, self._source)
        if source.started:
            raise RuntimeError("the pipeline has begun to make batches: restore a new one instead")
        restore(self._upstream, state["source"]["upstream"])
        source.restore(state["source"])
        self._delivered = source.moments.popleft()
        self._checkpoint = state["here"]
        self._restore_state_from_checkpoint()

    def describe(self) -> dict[str, Any]:
        """What this stage must have in common with the one that a checkpoint is of."""
        mark = self._joint.mark
        return {
            f"factor of {mark.name!r}": "a schedule" if callable(mark.factor.value) else mark.factor.value,
            f"max_factor of {mark.name!r}": mark.max_factor,
            f"unit of {mark.name!r}": mark.unit,
            f"shuffle_buffer of {mark.name!r}": mark.shuffle_buffer,
            f"memory_limit of {mark.name!r}": mark.memory_limit,
            f"seed of {mark.name!r}": mark.seed,
            # A random seed is in the states of the random operators and of the buffer.
            "seed": self._given_seed,
            f"operators after {mark.name!r}": _operators(self),
        }

    def _reader(self) -> Reader | None:
        """The reader that defines the epoch, if there is one."""
        if any(isinstance(stage, EchoPipeline) and stage.fills for stage in self.stages[:-1]):
            return None  # its epochs do not come through
        for meta in self._upstream.reader_meta().values():
            reader = Reader.from_meta(meta)
            # What an earlier mark emits to this one is an unbroken stream.
            return replace(reader, pads=reader.pads and not isinstance(self._upstream, EchoPipeline))
        return None

    def _samples_by(self, ends: MovingEnds | None, reader_name: str, epoch: int) -> int:
        reader = Reader.from_meta(self._upstream.reader_meta(reader_name))
        return shard_size(self._total(ends, epoch, reader.size), reader.shards, epoch % reader.shards)

    def _total(self, ends: MovingEnds | None, epoch: int, fresh: int) -> int:
        factor = self._joint.mark.factor
        if ends is not None and factor.measured:
            return ends.samples(epoch)
        if ends is not None and isinstance(self._upstream, EchoPipeline):
            fresh = self._upstream._total(ends, epoch, fresh)
        return factor.samples(epoch, fresh)

    def _as_dali_counts(self, reader: Reader | None) -> EmittedEpochs:
        if self.fills:
            return FreshEpochs(self.max_batch_size)
        # DALI's own iterators count an epoch once, and would look for the padding where it is not.
        moves = self._joint.mark.factor.measured or _ends_of(self._upstream)
        return EmittedEpochs(self.max_batch_size) if moves else self._padded_like(reader)

    def _padded_like(self, reader: Reader | None) -> EmittedEpochs:
        if reader is None or not reader.pads:
            return EmittedEpochs(self.max_batch_size)

        def scaled(epoch: int) -> Reader:
            return replace(reader, size=self._total(cast(Source, self._source).ends, epoch, reader.size))

        return EmittedEpochs(
            self.max_batch_size,
            samples=lambda epoch: scaled(epoch).samples(epoch),
            padded_batches=lambda epoch: scaled(epoch).batches(self.max_batch_size),
        )

    def _scale(self, meta: dict[str, Any]) -> dict[str, Any]:
        factor = self._joint.mark.factor
        if factor.measured:
            size = round(meta["epoch_size"] * self._delivered.stats[-1].factor)
        else:
            size = factor.samples(0, meta["epoch_size"])
        padded = size
        if meta["epoch_size_padded"] != meta["epoch_size"]:
            padded = ceil_div(size, meta["number_of_shards"]) * meta["number_of_shards"]
        return {**meta, "epoch_size": size, "epoch_size_padded": padded}


def _run_upstream(pipeline: Pipeline, drops: bool) -> Fresh:
    outputs = pipeline.run()
    bad = None
    if drops:
        *outputs, flags = outputs
        bad = np.asarray(flags.as_tensor())
    return Fresh(outputs, bad, _stats_of(pipeline), snapshot(pipeline), _ends_of(pipeline))


def _stats_of(pipeline: Pipeline) -> list[EchoStats]:
    return pipeline.echo_stats() if isinstance(pipeline, EchoPipeline) else []


def _ends_of(pipeline: Pipeline) -> MovingEnds | None:
    return pipeline._delivered.ends if isinstance(pipeline, EchoPipeline) else None


def _operators(pipeline: Pipeline) -> str:
    joint = pipeline._joint if isinstance(pipeline, EchoPipeline) else None
    return ", ".join(operators_of(joint, [*pipeline._graph_out, *pipeline._sinks]))


def snapshot(pipeline: Pipeline) -> Snapshot:
    """The state of a pipeline, with or without marks, after the last batch that it delivered."""
    if not pipeline._enable_checkpointing:
        return lambda: None
    if isinstance(pipeline, EchoPipeline):
        return pipeline.snapshot()
    checkpoint = pipeline._get_checkpoint()
    return lambda: checkpoint


def restore(pipeline: Pipeline, state: Any) -> None:
    """Let a pipeline that is built, but has not run, go on from a `snapshot`."""
    if isinstance(pipeline, EchoPipeline):
        pipeline.restore(state)
    else:
        pipeline._checkpoint = state
        pipeline._restore_state_from_checkpoint()


def describe(pipeline: Pipeline) -> dict[str, Any]:
    """What a pipeline must have in common with the one that a checkpoint is of, by field."""
    if isinstance(pipeline, EchoPipeline):
        return {**describe(pipeline.stages[-2]), **pipeline.describe()}
    return {
        "DALI": ".".join(nvidia.dali.__version__.split(".")[:2]),
        "batch_size": pipeline.max_batch_size,
        "seed": pipeline.seed,
        "readers": pipeline.reader_meta(),
        **{f"shards of {name!r}": what for name, what in vars(pipeline).get("_dali_echo_shards", {}).items()},
        "operators that read": _operators(pipeline),
    }


_alive: weakref.WeakSet[EchoPipeline] = weakref.WeakSet()


# Runs before DALI takes its pipelines down in no particular order, since DALI registered first.
@atexit.register
def _shutdown_in_order() -> None:
    for pipeline in list(_alive):
        pipeline._shutdown()
