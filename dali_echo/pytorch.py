"""`EchoIterator`: batches as PyTorch tensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from nvidia.dali.pipeline import Pipeline
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from dali_echo.epochs import EmittedEpochs, FreshEpochs, ceil_div
from dali_echo.pipeline import EchoPipeline, describe, restore, snapshot
from dali_echo.ranks import ranks
from dali_echo.state import dump, load, refuse_difference
from dali_echo.stats import EchoStats

Batch = dict[str, torch.Tensor]


class EchoIterator:
    """Iterates over a pipeline, epoch by epoch.

    `for batch in iterator:` runs one epoch, and the next such loop the next one. A loop that was left
    early is continued. An epoch is `factor` times the reader's, and uses that its samples still have
    left carry over into the next.

    Args:
        pipeline: made by `dali_echo.pipeline_def`, with or without a mark, and not run before.
        output_map: a name for each of the pipeline's outputs.
        reader_name: of the reader that defines the epoch. Without it one loop runs to the end of the data,
            for a source that ends, and there is no `len`.
        last_batch_policy: what becomes of the samples at the end of an epoch that do not fill a batch.
            With a mark none is lost, and every rank gets as many batches: FILL goes on with samples of
            the next epoch, or with copies of the last sample if the reader has `pad_last_batch`; PARTIAL
            ends with a short batch; DROP leaves them to the next epoch. Without a mark, as DALI has it.
            With `factor="fill"` an epoch is one pass of the reader, and ends with the batch in which the
            last of its samples is used for the first time. That batch is full, with repeats or samples of
            the next epoch after it; with PARTIAL it ends there.

    Yields:
        The outputs by name, as dense tensors of shape (batch, …) on the device of the output. They are the
        caller's own to change.

    Raises:
        ValueError: for names that are not one for each output, and for an output whose samples differ in
            shape; for `reader_name` with `factor="fill"` on one of several ranks, which would take different
            numbers of steps.
        TypeError: for `reader_name` with `factor="fill"` at a mark that is not the last.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        output_map: Sequence[str],
        *,
        reader_name: str | None = None,
        last_batch_policy: LastBatchPolicy = LastBatchPolicy.FILL,
    ) -> None:
        names = list(output_map)
        pipeline.build()
        if isinstance(output_map, str) or not len(set(names)) == len(names) == pipeline.num_outputs:
            raise ValueError(
                f"output_map = {output_map!r} must be a list of different names, one for each of the "
                f"pipeline's {pipeline.num_outputs} outputs"
            )
        if not isinstance(last_batch_policy, LastBatchPolicy):
            raise TypeError(
                f"last_batch_policy = {last_batch_policy!r} must be a member of "
                f"nvidia.dali.plugin.base_iterator.LastBatchPolicy"
            )
        echoed = isinstance(pipeline, EchoPipeline)
        readers = (pipeline.stages[0] if echoed else pipeline).reader_meta()
        if reader_name is not None and reader_name not in readers:
            raise ValueError(f"reader_name = {reader_name!r} is not among {sorted(readers)}")
        self._policy = last_batch_policy
        kind = (_FilledEpochs if pipeline.fills else _EchoedEpochs) if echoed else _PlainEpochs
        self._epochs = kind(pipeline, names, reader_name, last_batch_policy)
        self._pipeline = pipeline

    @property
    def stats(self) -> list[EchoStats]:
        """`EchoPipeline.echo_stats()` as of the last batch yielded; empty without a mark."""
        return self._pipeline.echo_stats() if isinstance(self._pipeline, EchoPipeline) else []

    def __len__(self) -> int:
        """Batches of the epoch that is under way, or else of the next one."""
        return len(self._epochs)

    def __iter__(self) -> EchoIterator:
        iter(self._epochs)
        return self

    def __next__(self) -> Batch:
        return next(self._epochs)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch yielded, for `load_state_dict` of an iterator made the same way.

        It holds no pixels, a few kilobytes, and loads with `torch.load(weights_only=True)`. Each rank has
        its own.

        Raises:
            ValueError: if the pipeline was not made with `enable_checkpointing=True`.
        """
        if not self._pipeline._enable_checkpointing:
            raise ValueError(
                "the pipeline keeps no state: make it with enable_checkpointing=True, as in "
                "training(enable_checkpointing=True)"
            )
        state = {
            "made_by": self._describe(),
            "epochs": self._epochs.state(),
            "pipeline": snapshot(self._pipeline)(),
        }
        return {"dali_echo": dump(state).decode()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on after the batch at which `state_dict()` was called; only before the first batch.

        The upstream reads the batches of the samples that were live again, when the first batch is asked
        for; then the stream goes on bit for bit.

        Raises:
            ValueError: for a state that is damaged, or of another pipeline; the message names what differs.
            RuntimeError: if the iterator has yielded batches already.
        """
        if self._epochs.started:
            raise RuntimeError(
                "the iterator has begun to make batches: load the state into a new one, before the loop"
            )
        state = load(str(state_dict.get("dali_echo", "")).encode())
        refuse_difference(state["made_by"], self._describe())
        self._epochs.restore(state["epochs"], state["pipeline"])

    def _describe(self) -> dict[str, Any]:
        return {"last_batch_policy": self._policy.name, **describe(self._pipeline)}


class _PlainEpochs(DALIGenericIterator):  # type: ignore[misc]
    """DALI's iterator over a pipeline without a mark."""

    def __init__(
        self, pipeline: Pipeline, names: list[str], reader: str | None, policy: LastBatchPolicy
    ) -> None:
        super().__init__(
            pipeline,
            names,
            reader_name=reader,
            last_batch_policy=policy,
            auto_reset=True,
            prepare_first_batch=False,  # so that a state can still be loaded
        )

    def __iter__(self) -> _PlainEpochs:
        # DALI warns of a loop that continues an epoch.
        return self if 0 < self._counter < self._size else super().__iter__()

    def __next__(self) -> Batch:
        batch: Batch = super().__next__()[0]
        return batch

    @property
    def started(self) -> bool:
        """Whether batches have been made."""
        return bool(self._ever_scheduled)

    def state(self) -> str:
        """DALI's own, as it writes it into a pipeline's checkpoint."""
        return str(self._save_state())

    def restore(self, state: str, pipeline: Any) -> None:
        """Go on from `state()` and a snapshot of the pipeline."""
        restore(self._pipes[0], pipeline)
        self._restore_state(state)


class _EchoedEpochs:
    """The epochs of an EchoPipeline."""

    def __init__(
        self, pipeline: EchoPipeline, names: list[str], reader: str | None, policy: LastBatchPolicy
    ) -> None:
        self._pipeline = pipeline
        self._names = names
        self._reader = reader
        self._epoch = 0
        self._yielded = 0
        self._ahead = 0
        self._scheduled = self._behind = False
        self._late: TimeoutError | None = None
        self._cut(policy)

    def __len__(self) -> int:
        if self._reader is None:
            raise TypeError("EchoIterator has no len without reader_name: give the name of the reader")
        samples = self._samples(self._epoch)
        size = self._pipeline.max_batch_size
        if self._drops:
            return int(samples // size)
        # A batch that read on into this epoch has been counted for the one before.
        return max(1, ceil_div(samples - self._ahead, size))

    def __iter__(self) -> _EchoedEpochs:
        # A loop that begins where an epoch is complete is the next epoch's; after a restored state it is
        # what is left of the epoch of that state, even if nothing is.
        if self._complete() and self._scheduled:
            self._end_epoch()
        return self

    def __next__(self) -> Batch:
        if self._complete():
            self._end_epoch()
            raise StopIteration
        if not self._scheduled or self._behind:
            self._pipeline.schedule_run()
            self._scheduled, self._behind = True, False
        try:
            outputs = self._pipeline.share_outputs()
        except StopIteration:
            if self._late is not None:
                late, self._late, self._behind = self._late, None, True
                raise late from None
            self._pipeline.reset()
            self._scheduled = False
            raise
        batch = {name: to_torch(name, output) for name, output in zip(self._names, outputs, strict=True)}
        self._pipeline.release_outputs()
        try:
            if self._late is None:
                self._pipeline.schedule_run()
        except TimeoutError as late:
            self._late = late  # until what is prepared has been delivered
        self._yielded += 1
        return batch

    @property
    def started(self) -> bool:
        """Whether batches have been made."""
        return self._scheduled

    def state(self) -> dict[str, int]:
        """The position in the epochs."""
        return {"epoch": self._epoch, "yielded": self._yielded, "ahead": self._ahead}

    def restore(self, state: dict[str, int], pipeline: Any) -> None:
        """Go on from `state()` and a snapshot of the pipeline."""
        restore(self._pipeline, pipeline)
        self._epoch, self._yielded, self._ahead = (state[k] for k in ("epoch", "yielded", "ahead"))

    def _cut(self, policy: LastBatchPolicy) -> None:
        pads = self._reader is not None and self._pipeline.reader_meta(self._reader)["pad_last_batch"]
        self._reads_on = policy == LastBatchPolicy.FILL and not pads
        self._drops = policy == LastBatchPolicy.DROP
        if self._reader is None or self._drops:
            self._pipeline.cut_nowhere()
        elif policy == LastBatchPolicy.PARTIAL:
            drawn = functools.partial(self._pipeline.samples_drawn, self._reader)
            self._pipeline.cut(EmittedEpochs(self._pipeline.max_batch_size, drawn))
        else:
            self._pipeline.pad()

    def _complete(self) -> bool:
        return self._reader is not None and self._yielded >= len(self)

    def _samples(self, epoch: int) -> int:
        return self._pipeline.epoch_samples(cast(str, self._reader), epoch)

    def _end_epoch(self) -> None:
        if self._reads_on:
            read = self._yielded * self._pipeline.max_batch_size
            self._ahead += read - self._samples(self._epoch)
        self._epoch += 1
        self._yielded = 0


class _FilledEpochs(_EchoedEpochs):
    """The epochs of a pipeline whose last mark has `factor="fill"`, which end when the pipeline says so."""

    def __len__(self) -> int:
        raise TypeError(
            'EchoIterator has no len with factor = "fill": an epoch has as many batches as time leaves room '
            "for; count the steps, or give a number as the factor"
        )

    def _cut(self, policy: LastBatchPolicy) -> None:
        if self._reader is None:
            self._pipeline.cut_nowhere()
            return
        shards = self._pipeline.stages[0].reader_meta(self._reader)["number_of_shards"]
        if max(shards, ranks()[1]) > 1:
            raise ValueError(
                f'reader_name = {self._reader!r} with factor = "fill" would end an epoch after another '
                f"number of steps on each of {max(shards, ranks()[1])} ranks, and they would wait for each "
                f"other forever: leave reader_name out and take as many steps on each rank, or give a number "
                f"as the factor"
            )
        fresh = self._pipeline.fresh_samples(self._reader)
        short = policy == LastBatchPolicy.PARTIAL
        self._pipeline.cut(FreshEpochs(self._pipeline.max_batch_size, fresh, short))

    def _complete(self) -> bool:
        return self._epoch < self._pipeline.epoch

    def _end_epoch(self) -> None:
        self._epoch = self._pipeline.epoch


def to_torch(name: str, output: Any) -> torch.Tensor:
    """One output of a pipeline as a tensor of shape (batch, …) that shares its memory.

    Raises:
        ValueError: if its samples differ in shape.
    """
    if not output.is_dense_tensor() and len({tuple(s) for s in output.shape()}) > 1:
        shapes = sorted({tuple(s) for s in output.shape()})
        raise ValueError(
            f"the samples of output {name!r} differ in shape, such as {shapes[0]} and {shapes[-1]}, and do "
            f"not make a tensor: resize, crop or pad them to one shape in the pipeline"
        )
    return torch.utils.dlpack.from_dlpack(output.as_tensor())
