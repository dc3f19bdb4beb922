"""A pipeline whose readers have guards: it names the sample that ends it, or survives it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from nvidia.dali import types
from nvidia.dali.pipeline import Pipeline

if TYPE_CHECKING:
    from dali_echo.shards.guarding import Guard


class GuardedPipeline(Pipeline):  # type: ignore[misc]
    """A DALI pipeline that reads images through guards. `pipeline_def` makes it."""

    _guards: Sequence[Guard]
    _before: bytes | None
    _ended: list[Any]
    _lock: threading.RLock

    @classmethod
    def of_stage(
        cls, stage: Pipeline, guards: Sequence[Guard], decoders: Sequence[tuple[str, Any]]
    ) -> GuardedPipeline:
        """Make a GuardedPipeline of what DALI's decorator constructed, which is a Pipeline.

        Args:
            stage: that reads.
            guards: behind its readers.
            decoders: of all stages, see `bypass.image_decoders`.
        """
        stage.__class__ = cls if type(stage) is Pipeline else type(cls.__name__, (cls, type(stage)), {})
        stage._guards = guards
        stage._before = None
        stage._ended = []
        stage._lock = threading.RLock()
        for guard in guards:
            guard.prepare(
                decodes=bool(decoders),
                any_data=("cpu", types.ANY_DATA) in decoders,
                device_id=stage.device_id if "mixed" in dict(decoders) else None,
            )
        if stage._skips:
            stage._enable_checkpointing = True  # to go back before a batch that failed
        return cast(GuardedPipeline, stage)

    def build(self) -> None:
        """See `nvidia.dali.Pipeline.build`."""
        with self._lock:
            super().build()

    def reader_meta(self, name: str | None = None) -> Any:
        """See `nvidia.dali.Pipeline.reader_meta`."""
        # An iterator asks in its own thread, and another may just build the pipeline anew.
        with self._lock:
            return super().reader_meta(name)

    @property
    def _skips(self) -> bool:
        return any(guard.skips for guard in self._guards)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """See `nvidia.dali.Pipeline.run`. With a guard that skips, samples that end it are left out.

        An error ends a pipeline. It is built anew, and goes back to where it was before the batch that
        failed; then the guards look for what fails in it: in this batch alone, or, as the error may be of a
        batch that was being made ahead, in those as well.
        """
        if not self._skips:
            return super().run(*args, **kwargs)
        self.build()
        if self._before is None:
            self._before = self._get_checkpoint()
        depth = max(self._cpu_queue_size, self._gpu_queue_size)
        for batches_to_try in (1, depth + 1, 0):
            try:
                outputs = super().run(*args, **kwargs)
                break
            except RuntimeError:
                if not batches_to_try:
                    raise
            self._rebuild()
            for guard in self._guards:
                guard.try_batches(batches_to_try)
        self._before = self._get_checkpoint()
        if len(self._ended) > 2:
            del self._ended[0]
        return outputs

    def outputs(self, *args: Any, **kwargs: Any) -> Any:
        """See `nvidia.dali.Pipeline.outputs`."""
        return self._naming(super().outputs, *args, **kwargs)

    def share_outputs(self, *args: Any, **kwargs: Any) -> Any:
        """See `nvidia.dali.Pipeline.share_outputs`."""
        return self._naming(super().share_outputs, *args, **kwargs)

    def _naming(self, get: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Name the sample in the place of DALI's error, which does not."""
        try:
            return get(*args, **kwargs)
        except RuntimeError as error:
            for guard in self._guards:
                if guard.error is not None:
                    raise guard.error from None
            if self._skips or "decoders" not in str(error):
                raise
            culprits = filter(None, (guard.culprit() for guard in self._guards))
            for culprit in culprits:
                raise ValueError(culprit) from error
            raise

    def _rebuild(self) -> None:
        with self._lock:
            self._build_anew()

    def _build_anew(self) -> None:
        # Its threads may still decode the rest of the batch, and DALI crashes if it is taken down meanwhile.
        self._ended.append(self._pipe)
        self._pipe: Any = None
        self._api_type = None
        self._backend_prepared = self._built = self._last_iter = False
        self._first_iter = True
        self._batches_to_consume = 0
        self._checkpoint = self._before
        self.build()
