"""`EchoIterator`: batches as PyTorch tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from nvidia.dali.pipeline import Pipeline
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from dali_echo.epochs import EmittedEpochs, ceil_div
from dali_echo.pipeline import EchoPipeline
from dali_echo.stats import EchoStats

Batch = dict[str, torch.Tensor]


class EchoIterator:
    """Iterates over a pipeline, epoch by epoch.

    `for batch in iterator:` runs one epoch, and the next such loop the next one. A loop that was left
    early is continued. An epoch is `factor` times the reader's epoch, and uses of its samples that are
    still due carry over into the next.

    Args:
        pipeline: made by `dali_echo.pipeline_def`, with or without a mark, and not run before.
        output_map: a name for each of the pipeline's outputs.
        reader_name: of the reader that defines the epoch. Without it one loop runs to the end of the data,
            for a source that ends, and there is no `len`.
        last_batch_policy: what becomes of the samples at the end of an epoch that fill no batch. With a
            mark, none is lost: FILL goes on with samples of the next epoch, or copies of the last sample
            if the reader has pad_last_batch; PARTIAL ends with a short batch; DROP leaves them to the
            next epoch. All ranks get the same number of batches. Without a mark, as DALI has it.

    Yields:
        The outputs by name, as dense tensors of shape (batch, …) on the device of the output. They
        are the caller's own to change.

    Raises:
        ValueError: for output names that are not distinct or not one for each output, and for outputs
            whose samples differ in shape.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        output_map: Sequence[str],
        *,
        reader_name: str | None = None,
        last_batch_policy: LastBatchPolicy = LastBatchPolicy.FILL,
    ) -> None:
        self._names = _check_names(output_map, pipeline)
        self._pipeline = pipeline
        self._plain: Iterator[list[Batch]] | None = None
        if not isinstance(pipeline, EchoPipeline):
            self._plain = DALIGenericIterator(
                pipeline,
                self._names,
                reader_name=reader_name,
                last_batch_policy=last_batch_policy,
                auto_reset=True,
            )
            return
        self._has_epochs = reader_name is not None
        self._policy = last_batch_policy
        self._epoch = 0
        self._emitted = 0
        self._left: int | None = None
        self._scheduled = False
        if reader_name is not None:
            self._pads = bool(pipeline.reader_meta(reader_name)["pad_last_batch"])
            if last_batch_policy == LastBatchPolicy.PARTIAL:
                pipeline.cut(EmittedEpochs(pipeline.max_batch_size, pipeline.epoch_samples))
            elif last_batch_policy == LastBatchPolicy.DROP:
                pipeline.cut(EmittedEpochs(pipeline.max_batch_size))

    @property
    def stats(self) -> list[EchoStats]:
        """`EchoPipeline.echo_stats()`, up to the last batch yielded; empty without a mark."""
        return self._pipeline.echo_stats() if self._plain is None else []

    def __len__(self) -> int:
        """Batches of the epoch that is under way, or else of the next one."""
        if self._plain is not None:
            return len(self._plain)  # type: ignore[arg-type]
        if not self._has_epochs:
            raise TypeError("EchoIterator without reader_name has no len: give the name of the reader")
        return self._batches_in_epoch()

    def __iter__(self) -> EchoIterator:
        if self._plain is not None:
            iter(self._plain)
        elif self._left is None:
            self._left = self._batches_in_epoch() if self._has_epochs else -1
        return self

    def __next__(self) -> Batch:
        if self._plain is not None:
            return next(self._plain)[0]
        if self._left is None:
            iter(self)
        if self._left == 0:
            self._end_epoch()
            raise StopIteration
        if not self._scheduled:
            self._pipeline.schedule_run()
            self._scheduled = True
        try:
            outputs = self._pipeline.share_outputs()
        except StopIteration:
            self._left, self._scheduled = None, False
            self._pipeline.reset()
            raise
        batch = {n: _to_torch(n, o) for n, o in zip(self._names, outputs, strict=True)}
        self._pipeline.release_outputs()
        self._pipeline.schedule_run()
        self._left -= 1  # type: ignore[operator]
        self._emitted += len(outputs[0])
        return batch

    def _batches_in_epoch(self) -> int:
        samples = self._pipeline.epoch_samples(self._epoch)
        size = self._pipeline.max_batch_size
        if self._policy == LastBatchPolicy.DROP:
            return int(samples // size)
        if self._policy == LastBatchPolicy.FILL and not self._pads:
            ahead = self._emitted_before_epoch - sum
        return ceil_div(samples, size)
