"""Readers in Python that a DALI pipeline answers for as if they were its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvidia.dali.pipeline import Pipeline


class StreamedPipeline(Pipeline):  # type: ignore[misc]
    """A DALI pipeline with external sources that have the name, the epoch and the end of a reader."""

    _streamed: dict[str, dict[str, Any]]
    _ends: list[Callable[[], None]]

    @classmethod
    def add(cls, name: str, meta: dict[str, Any], end: Callable[[], None]) -> None:
        """Add a reader to the pipeline that is being defined.

        Args:
            name: of the reader.
            meta: as `reader_meta` gives it.
            end: called when the pipeline is taken down.
        """
        pipeline = Pipeline.current()
        if not isinstance(pipeline, StreamedPipeline):
            pipeline.__class__ = type("StreamedPipeline", (cls, type(pipeline)), {})
            pipeline._streamed, pipeline._ends = {}, []
        pipeline._streamed[name] = meta
        pipeline._ends.append(end)

    def reader_meta(self, name: str | None = None) -> dict[str, Any]:
        """See `nvidia.dali.Pipeline.reader_meta`."""
        if name is None:
            return {**super().reader_meta(), **self._streamed}
        return self._streamed[name] if name in self._streamed else super().reader_meta(name)

    def epoch_size(self, name: str | None = None) -> Any:
        """See `nvidia.dali.Pipeline.epoch_size`."""
        meta = self.reader_meta(name)
        if name is not None:
            return meta["epoch_size_padded"]
        return {key: m["epoch_size_padded"] for key, m in meta.items()}

    def end_streams(self) -> None:
        """End all streams, so that whoever waits for one gets an error."""
        for end in self._ends:
            end()

    def _shutdown(self) -> None:
        self.end_streams()
        super()._shutdown()
