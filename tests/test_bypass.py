"""What reaches a stage without passing the mark before it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import nvidia.dali.fn as fn
import pytest
from nvidia.dali import types

from dali_echo import echo, pipeline_def
from tests.streams import read


def make(body: Callable[[], Any], **kwargs: Any) -> Any:
    return pipeline_def(body, batch_size=8, num_threads=1, device_id=None, seed=1, **kwargs)()


def line_of(body: Callable[[], Any], text: str) -> int:
    lines, first = inspect.getsourcelines(body)
    return first + next(i for i, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("conditionals", [False, True])
def test_a_label_returned_directly(shards: Sequence[str], conditionals: bool) -> None:
    def body() -> Any:
        jpeg, label = read(shards)
        return echo(jpeg), label

    with pytest.raises(ValueError, match="readers.Webdataset 'train'") as error:
        make(body, enable_conditionals=conditionals)
    assert "reaches the outputs without passing the mark 'echo0'" in str(error.value)
    assert "echo(image, label)" in str(error.value)


def test_the_error_names_the_line_of_the_operator(shards: Sequence[str]) -> None:
    def body() -> Any:
        jpeg, label = fn.readers.webdataset(paths=shards, ext=["jpg", "cls"], name="here")
        return echo(jpeg), label

    for conditionals in (False, True):
        with pytest.raises(ValueError, match="readers.Webdataset 'here'") as error:
            make(body, enable_conditionals=conditionals)
        assert f"({__file__}:{line_of(body, 'here')})" in str(error.value)


def test_a_second_reader(shards: Sequence[str]) -> None:
    def body() -> Any:
        jpeg, _ = read(shards)
        other, _ = fn.readers.webdataset(paths=shards, ext=["jpg", "cls"], name="other")
        return echo(jpeg), other

    with pytest.raises(ValueError, match="readers.Webdataset 'other' .* reaches the outputs"):
        make(body)


def test_an_external_source_after_the_mark(shards: Sequence[str]) -> None:
    def body() -> Any:
        jpeg, _ = read(shards)
        return echo(jpeg), fn.external_source(source=lambda: [0] * 8, name="numbers")

    with pytest.raises(ValueError, match="ExternalSource 'numbers'"):
        make(body)


def test_a_random_operator_that_feeds_both_sides(shards: Sequence[str]) -> None:
    def body() -> Any:
        jpeg, _ = read(shards)
        flip = fn.random.coin_flip()
        image = fn.flip(fn.decoders.image(jpeg), horizontal=flip)
        return echo(image), flip

    with pytest.raises(ValueError, match="random.CoinFlip .*reaches the outputs"):
        make(body)


def test_a_value_around_the_second_mark(shards: Sequence[str]) -> None:
    def body() -> Any:
        jpeg, label = echo(*read(shards), name="first")
        image = echo(fn.decoders.image(jpeg), name="second")
        return image, label

    with pytest.raises(ValueError, match="the mark 'first' reaches the outputs without .* 'second'"):
        make(body)


def test_a_python_function_that_reads_both_sides(shards: Sequence[str]) -> None:
    def body() -> Any:
        jpeg, label = read(shards)
        image = echo(jpeg)
        fn.python_function(image, label, function=lambda *_: None, num_outputs=0)
        return image

    with pytest.raises(ValueError, match="readers.Webdataset 'train' .* reaches .*PythonFunction"):
        make(body)


def test_a_mark_whose_result_is_not_used(shards: Sequence[str]) -> None:
    def body() -> Any:
        jpeg, _ = read(shards)
        echo(jpeg)
        return types.Constant(1)

    with pytest.raises(ValueError, match="nothing that reaches the outputs uses .* 'echo0'"):
        make(body)


def test_a_random_operator_after_the_mark_alone_is_fine(shards: Sequence[str]) -> None:
    def body() -> Any:
        flip = fn.random.coin_flip()
        jpeg, _ = read(shards)
        return fn.flip(echo(fn.decoders.image(jpeg)), horizontal=flip), flip

    make(body)


def test_constants_may_be_used_on_both_sides(shards: Sequence[str]) -> None:
    def body() -> Any:
        jpeg, _ = read(shards)
        one = types.Constant(1)
        return echo(fn.decoders.image(jpeg) + one) + one

    make(body)
