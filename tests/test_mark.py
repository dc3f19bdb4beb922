"""The arguments of `echo`."""

from __future__ import annotations

from typing import Any

import numpy as np
import nvidia.dali
import nvidia.dali.fn as fn
import pytest
from nvidia.dali import types

from dali_echo import echo, pipeline_def


def image() -> Any:
    return fn.random.uniform(range=[0.0, 1.0], shape=[3])


def make(body: Any, **kwargs: Any) -> Any:
    return pipeline_def(body, batch_size=8, num_threads=1, device_id=None, seed=1, **kwargs)()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"factor": 0.5}, ValueError, r"factor = 0.5 must be .* at least 1"),
        ({"factor": "two"}, TypeError, r"factor = 'two' is not a number"),
        ({"unit": "epoch"}, ValueError, r"unit = 'epoch' is not known; use \"sample\" or \"batch\""),
        ({"shuffle_buffer": 7}, ValueError, r"shuffle_buffer = 7 is below the batch size of 8"),
        ({"shuffle_buffer": 0, "unit": "batch"}, ValueError, r"shuffle_buffer = 0 must hold"),
        ({"shuffle_buffer": 8.0}, TypeError, r"shuffle_buffer = 8.0 must be an integer"),
        ({"seed": -1}, ValueError, r"seed = -1 must be an integer from 0"),
        ({"seed": "x"}, ValueError, r"seed = 'x' must be an integer from 0"),
        ({"max_factor": 0.9, "factor": "fill"}, ValueError, r"max_factor = 0.9 must be a finite number, at"),
        ({"max_factor": "8", "factor": "fill"}, TypeError, r"max_factor = '8' must be a number, at least 1"),
        ({"timeout": 0}, ValueError, r"timeout = 0 must be positive, .*: give the longest time without"),
        ({"timeout": -1.0}, ValueError, r"timeout = -1.0 must be positive"),
        ({"timeout": float("nan")}, ValueError, r"timeout = nan must be positive"),
        ({"timeout": float("inf")}, ValueError, r"timeout = inf must be positive, and at most \d+ seconds"),
        ({"timeout": None}, TypeError, r"timeout = None must be a number of seconds, such as 300.0"),
        ({"max_factor": 4}, ValueError, r"max_factor = 4 limits nothing with factor = 2.0: leave it out, or"),
        ({"max_factor": 4, "factor": lambda epoch: 2}, ValueError, r"max_factor = 4 .* factor = a schedule"),
        ({"timeout": 9}, ValueError, r"timeout = 9 ends no wait with factor = 2.0: leave it out, or give"),
        ({"timeout": 9, "factor": "auto"}, ValueError, r"timeout = 9 ends no wait with factor = 'auto'"),
        ({"name": ""}, TypeError, r"name = '' must be a string"),
    ],
)
def test_an_argument_that_cannot_be_is_named(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(lambda: echo(image(), **arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_factor": 8, "timeout": 300},
        {"factor": "auto", "max_factor": 4, "timeout": 300.0},
        {"factor": "fill", "max_factor": 4, "timeout": 9},
    ],
)
def test_defaults_may_be_given_with_any_factor(arguments: dict[str, Any]) -> None:
    make(lambda: echo(image(), **arguments))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (lambda: (), "needs at least one DALI output"),
        (lambda: ([image()],), r"argument 0 is a list: expand it with \*"),
        (lambda: (image(), 3), "argument 1 is 3, not the output of a DALI operator"),
        (lambda: (np.zeros(3),), "argument 0 is array"),
    ],
)
def test_what_is_no_node_is_refused(nodes: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make(lambda: echo(*nodes()))


def test_one_node_gives_a_node_and_more_give_a_tuple() -> None:
    def body() -> Any:
        one = echo(image())
        two = echo(one, one + 1)
        assert isinstance(two, tuple)
        assert len(two) == 2
        return (one.name, *two)[1:]

    make(body)


def test_two_marks_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="name = 'again' is used by two marks"):
        make(lambda: echo(echo(image(), name="again"), name="again"))


def test_the_name_appears_in_the_statistics() -> None:
    pipeline = make(lambda: echo(echo(image()), name="second"))
    assert [record.name for record in pipeline.echo_stats()] == ["echo0", "second"]


def test_dali_s_own_decorator_is_refused() -> None:
    factory = nvidia.dali.pipeline_def(lambda: echo(image()), batch_size=8, num_threads=1, device_id=None)
    with pytest.raises(RuntimeError, match=r"decorate the function with `dali_echo.pipeline_def`"):
        factory()


def test_a_mark_inside_a_condition_is_refused() -> None:
    def body() -> Any:
        value = image()
        if fn.random.coin_flip(dtype=types.BOOL):
            value = echo(value)
        return value

    with pytest.raises(RuntimeError, match="inside an `if` on a DataNode"):
        make(body, enable_conditionals=True)
