"""Refusing what reaches a later stage without passing the mark before it.

Such a value would be made anew by an operator of the later stage: a second reader, whose labels do not
belong to the replayed images, or a second random stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nvidia.dali.data_node import DataNode

from dali_echo.origin import line_of
from dali_echo.read_only import is_read_only

if TYPE_CHECKING:
    from dali_echo.graph import Joint

_DATA_SOURCE = re.compile(r"(^|__)(readers|inputs)__|Reader$|^ExternalSource$")
_SIDE_EFFECTS = re.compile(r"PythonFunction|NumbaFunc")


def check(joints: Sequence[Joint], outputs: Sequence[Any], sinks: Sequence[DataNode]) -> list[int]:
    """Check every stage of one trace, and tell which stage owns each operator with side effects.

    Raises:
        ValueError: if a value bypasses a mark, or nothing after a mark uses it.
    """
    stand_ins = {id(node.source): i for i, joint in enumerate(joints) for node in joint.outputs}
    ends = [(f"the mark {j.mark.name!r}", j.inputs) for j in joints] + [("the outputs", tuple(outputs))]
    stage_of: dict[int, int] = {}
    for stage, (end, nodes) in enumerate(ends):
        operators, marks = _upstream_of(nodes, stand_ins)
        if stage:
            name = joints[stage - 1].mark.name
            _refuse_bypass(operators, marks, stage, joints, end, stage_of)
            if stage - 1 not in marks:
                raise ValueError(
                    f"nothing that reaches {end} uses what the mark {name!r} returns: go on with its "
                    f"return values, as in `image, label = echo(image, label)`"
                )
        for operator in operators:
            stage_of.setdefault(id(operator), stage)
    return [_owner(sink, stand_ins, stage_of, joints) for sink in sinks]


def writes_into(nodes: Sequence[DataNode], ends: Sequence[Any]) -> list[bool]:
    """For each stand-in of a mark, whether Python code of the stage with these ends may write into it.

    A Python function gets the memory of its input, which other operators (a reshape) may have passed on.
    """
    stand_ins = {id(node.source): i for i, node in enumerate(nodes)}
    written: set[int] = set()
    for operator in _upstream_of(ends, stand_ins)[0]:
        if _SIDE_EFFECTS.search(operator._op.schema.Name()) and not is_read_only(operator):
            written |= _upstream_of(inputs_of(operator), stand_ins)[1]
    return [i in written for i in range(len(nodes))]


def operators_of(joint: Joint | None, ends: Sequence[Any]) -> list[str]:
    """The types of the operators of the stage that begins with `joint` and has these ends, sorted."""
    stand_ins = {id(node.source): 0 for node in joint.outputs} if joint else {}
    return sorted(kind_of(operator) for operator in _upstream_of(ends, stand_ins)[0])


def image_decoders(ends: Sequence[Any]) -> list[tuple[str, Any]]:
    """Of each image decoder before these ends: its device, and its `output_type` if one is given."""
    operators = _upstream_of(ends, {})[0]
    return [
        (operator._op.device, operator._op._init_args.get("output_type"))
        for operator in operators
        if "decoders__Image" in operator._op.schema.Name()
    ]


def _owner(
    sink: DataNode, stand_ins: dict[int, int], stage_of: dict[int, int], joints: Sequence[Joint]
) -> int:
    operators, marks = _upstream_of([sink], stand_ins)
    if not marks:
        return stage_of.get(id(sink.source), 0)
    stage = max(marks) + 1
    _refuse_bypass(operators, marks, stage, joints, _describe(sink.source), stage_of)
    return stage


def _refuse_bypass(
    operators: Sequence[Any],
    marks: set[int],
    stage: int,
    joints: Sequence[Joint],
    end: str,
    stage_of: dict[int, int],
) -> None:
    """Refuse operators of a stage that must not run there."""
    name = joints[stage - 1].mark.name
    for operator in operators:
        kind = operator._op.schema.Name()
        earlier = stage_of.get(id(operator), stage) < stage
        random = operator._op.schema.HasRandomSeedArg() or _SIDE_EFFECTS.search(kind)
        if reads_data(operator) or (earlier and random):
            raise ValueError(
                f"a value from {_describe(operator)} reaches {end} without passing the mark {name!r}, so "
                f"it would not belong to the samples replayed there: pass it through the same "
                f"echo(...), as in `image, label = echo(image, label)`"
            )
    for other in sorted(marks - {stage - 1}):
        raise ValueError(
            f"a value from the mark {joints[other].mark.name!r} reaches {end} without passing the mark "
            f"{name!r} between them: pass it through the echo(...) of {name!r} too"
        )


def _upstream_of(nodes: Iterable[Any], stand_ins: dict[int, int]) -> tuple[list[Any], set[int]]:
    """The operators that `nodes` depend on up to the marks, and the indices of those marks."""
    operators: dict[int, Any] = {}
    marks: set[int] = set()
    pending = [node.source for node in nodes if isinstance(node, DataNode)]
    while pending:
        operator = pending.pop()
        if id(operator) in stand_ins:
            marks.add(stand_ins[id(operator)])
        elif id(operator) not in operators:
            operators[id(operator)] = operator
            pending += [node.source for node in inputs_of(operator)]
    return list(operators.values()), marks


def inputs_of(operator: Any) -> list[DataNode]:
    """All inputs of an operator; DALI keeps those of a set of inputs in a list of their own."""
    nodes: list[DataNode] = []
    for edge in operator.inputs:
        nodes += edge if isinstance(edge, list) else [edge]
    return nodes


def reads_data(operator: Any) -> bool:
    """Whether data enters the pipeline through an operator: a reader or an external source."""
    return bool(_DATA_SOURCE.search(operator._op.schema.Name()))


def _describe(operator: Any) -> str:
    name = "" if operator.name.startswith("__") else f" {operator.name!r}"
    return f"{kind_of(operator)}{name} ({line_of(operator)})"


def kind_of(operator: Any) -> str:
    """The type of an operator as it is written after `fn.`, such as "readers.Webdataset"."""
    kind: str = operator._op.schema.Name()
    return kind.replace("__", ".")
