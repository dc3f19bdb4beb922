"""Python functions that get the buffer's memory, and cannot write into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import nvidia.dali.fn as fn
import pytest
from nvidia.dali import types
from nvidia.dali.pipeline import Pipeline

from dali_echo import echo, pipeline_def, read_only
from tests.streams import BATCH, read


def make(shards: Sequence[str], function: Callable[..., Any], **kwargs: Any) -> Pipeline:
    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=3)
    def definition() -> Any:
        jpeg, _ = read(shards)
        image = echo(fn.decoders.image(jpeg), factor=3, shuffle_buffer=BATCH)
        return fn.python_function(image, function=function, **kwargs)

    pipeline: Pipeline = definition()
    return pipeline


def fed_and_seen(pipeline: Pipeline, seen: list[int]) -> tuple[set[int], set[int]]:
    """Addresses of what the mark holds, and of what the function has seen."""
    pipeline.build()
    source = pipeline._source
    held = {address(np.asarray(rows[0][0])) for rows, _ in source._store._items.values()}
    pipeline.run()
    held |= {address(np.asarray(rows[0][0])) for rows, _ in source._store._items.values()}
    return held, set(seen)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("wrap", [read_only, lambda function: function], ids=["read_only", "plain"])
def test_only_a_read_only_function_is_given_the_memory_of_the_buffer(
    shards: Sequence[str], wrap: Callable[..., Any]
) -> None:
    seen: list[int] = []

    def shrink(image: np.ndarray) -> np.ndarray:
        seen.append(address(image))
        return image[:4].copy()

    held, given = fed_and_seen(make(shards, wrap(shrink)), seen)
    assert bool(held & given) == (wrap is read_only)


@pytest.mark.parametrize("batch_processing", [True, False])
def test_writing_is_an_error(shards: Sequence[str], batch_processing: bool) -> None:
    @read_only
    def brighten(images: Any) -> Any:
        for image in images if batch_processing else [images]:
            image += 1
        return images

    pipeline = make(shards, brighten, batch_processing=batch_processing)
    with pytest.raises(RuntimeError, match="read-only"):
        pipeline.run()


def test_what_is_returned_is_what_the_function_made(shards: Sequence[str]) -> None:
    @read_only
    def total(images: list[np.ndarray]) -> list[np.ndarray]:
        return [image.sum(dtype=np.int64).reshape(1) for image in images]

    (sums,) = make(shards, total, batch_processing=True).run()
    assert sums.dtype == types.INT64
    assert len(sums) == BATCH


def test_what_is_no_numpy_array_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot keep identity from writing into a str"):

        def identity(image: Any) -> Any:
            return image

        read_only(identity)("tensor")
