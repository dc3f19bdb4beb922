"""Where in the user's files a DALI operator was defined."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from nvidia.dali import ops

_here = str(Path(__file__).parent)
_lines: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_ours: weakref.WeakSet[Any] = weakref.WeakSet()


def line_of(operator: Any) -> str:
    """ "file:line" of the definition of an operator instance, or "an unknown line"."""
    return _lines.get(operator, "an unknown line")


def made_here(operator: Any) -> bool:
    """Whether this package defined an operator instance, such as what `shards.read` makes of labels."""
    return operator in _ours


def _remember(operator: Any, arguments: dict[str, Any]) -> None:
    _process_trace(operator, arguments)
    stack = zip(
        arguments.get("_origin_stack_filename", ()),
        arguments.get("_origin_stack_lineno", ()),
        strict=True,
    )
    filename = ""
    for filename, line in stack:
        if not filename.startswith(_here):
            _lines[operator] = f"{filename}:{line}"
    if filename.startswith(_here):
        _ours.add(operator)


# DALI works out the line, also below AutoGraph, and writes it into the operator's specification, from which
# Python cannot read it back: so listen while it is written.
_process_trace = ops._OperatorInstance._process_trace
ops._OperatorInstance._process_trace = _remember
