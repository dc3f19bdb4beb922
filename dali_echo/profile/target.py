"""What the user named on the command line, imported."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turn whatever the user's code raises into an error of one line that says where it came from."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The kind and message of an error; of what DALI says about one, what it is at heart."""
    text = str(error)
    if "encountered:" in text:
        where = text.partition("which was used")[0].strip(" ,\n").rpartition("\n")[2]
        text = f"{where}: {text.partition('encountered:')[2].partition('Current pipeline object')[0]}"
    text = " ".join(line.strip() for line in text.splitlines() if not line.startswith("Stacktrace"))
    kind = "" if isinstance(error, (ValueError, TypeError, RuntimeError)) else f"{type(error).__name__}: "
    return (kind + text).strip().removesuffix(":") or type(error).__name__


def load(target: str) -> Any:
    """The object named MODULE:NAME, with the current folder on the path.

    Raises:
        ValueError: if there is none, or its module fails.
    """
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{target!r}: give MODULE:NAME, such as train.pipelines:training")
    if "" not in sys.path:
        sys.path.insert(0, "")
    with user_code(f"cannot import {module!r}"):
        found = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            known = ", ".join(n for n, v in vars(found).items() if callable(v) and not n.startswith("_"))
            raise ValueError(f"{target!r}: {module!r} has no {part!r}. It has {known or 'nothing callable'}")
        found = getattr(found, part)
    return found


def pipeline_maker(target: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    """A function without arguments that makes the pipeline.

    Raises:
        ValueError: if the target is no function.
    """
    found = load(target)
    if not callable(found) or not (inspect.isroutine(found) or inspect.isclass(found)):
        raise ValueError(
            f"{target!r} is {found!r}: give a function decorated with dali_echo.pipeline_def, or one that "
            "makes such a pipeline"
        )
    return functools.partial(found, **arguments)


def parse_arguments(given: Sequence[str]) -> dict[str, Any]:
    """Arguments from NAME=VALUE, where VALUE is a Python literal, or else a string as it is.

    Raises:
        ValueError: for one that has not this form.
    """
    arguments = {}
    for entry in given:
        name, equals, value = entry.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f'{entry!r}: give NAME=VALUE, such as urls=\'["a.tar", "b.tar"]\'')
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[name] = value
    return arguments
