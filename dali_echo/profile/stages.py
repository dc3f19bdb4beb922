"""Which stage of a pipeline each of its operators belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import Pipeline

from dali_echo.bypass import inputs_of, reads_data
from dali_echo.graph import Joint
from dali_echo.mark import Mark
from dali_echo.origin import made_here
from dali_echo.pipeline import EchoPipeline

READ, DECODE, AUGMENT, TRANSFER = STAGES = ("read", "decode", "augment", "transfer")
_DECODER = re.compile(r"(^|__)decoders__|Decoder")

Cut = list[tuple[str, str]]
"""The values that leave a stage: the name of each, and the device that it is on."""


class Trace:
    """One run of a definition: its operators and their stages, by position in the graph.

    Readers, external sources and what `shards.read` makes of labels read. Decoders decode, and so does all
    that leads to one. What remains augments. A copy to the GPU of what leaves the pipeline is the transfer;
    other copies belong to the operators that need them.

    Args:
        make: makes the pipeline, not built.

    Raises:
        TypeError, ValueError: if that is not what it makes.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.pipeline = _unbuilt(make())
        self.outputs = [edge for edge in self.pipeline._graph_out if isinstance(edge, DataNode)]
        self.operators = _in_order([*self.outputs, *self.pipeline._sinks])
        self.nodes = {node.name: node for operator in self.operators for node in operator.outputs}
        self.stage_of = _stages(self.operators)
        copied = any(edge.device != self.nodes[edge.name].device for edge in self.outputs)
        self.stages = [stage for stage in STAGES if stage in self.stage_of.values()]
        self.stages += [TRANSFER] * copied

    def leaving(self, stage: str) -> Cut:
        """What later stages and the outputs take from this stage and the earlier ones, in order."""
        if stage == TRANSFER:
            return [
                (getattr(out, "name", ""), getattr(out, "device", "cpu")) for out in self.pipeline._graph_out
            ]
        last = STAGES.index(stage)
        after = [operator for operator in self.operators if STAGES.index(self._stage(operator)) > last]
        edges = [edge for operator in after for edge in inputs_of(operator)] + self.outputs
        names = [edge.name for edge in edges if STAGES.index(self._stage(edge.source)) <= last]
        return [(name, self.nodes[name].device) for name in dict.fromkeys(names)]

    def uses_gpu(self, stage: str) -> bool:
        """Whether an operator of this stage runs on the GPU."""
        return any(o._op.device != "cpu" for o in self.operators if self._stage(o) == stage)

    def end_after(self, stage: str) -> None:
        """Let what leaves this stage be the pipeline's outputs."""
        if stage != TRANSFER:
            self.pipeline.set_outputs(*(self.nodes[name] for name, _ in self.leaving(stage)))

    def begin_after(self, stage: str, mark: Mark) -> Joint:
        """Let external sources give what leaves this stage."""
        names = [name for name, _ in self.leaving(stage)]
        joint = Joint(mark, tuple(self.nodes[name] for name in names))
        with self.pipeline:
            joint.stand_in(names)
        stand_ins = dict(zip(names, joint.outputs, strict=True))
        # The specification of an operator holds its inputs by name, so a source of the same name takes over.
        for edge in [edge for operator in self.operators for edge in inputs_of(operator)] + self.outputs:
            if edge.name in stand_ins:
                edge.source, edge.index = stand_ins[edge.name].source, 0
        return joint

    def keep_effects(self, stages: Sequence[str]) -> None:
        """Let operators with side effects run only if they belong to one of these stages."""
        self.pipeline._sinks = [s for s in self.pipeline._sinks if self._stage(s.source) in stages]

    def _stage(self, operator: Any) -> str:
        return self.stage_of[id(operator)]


def _unbuilt(pipeline: Any) -> Pipeline:
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"it returned {pipeline!r}, which is no pipeline")
    if isinstance(pipeline, EchoPipeline) or pipeline._py_graph_built:
        raise ValueError("it returned a pipeline that was made before: it must make a new one each time")
    if pipeline._graph_out is None:
        raise ValueError("its pipeline defines no graph yet: use pipeline_def instead of define_graph")
    return pipeline


def _in_order(nodes: Sequence[DataNode]) -> list[Any]:
    """The operators that `nodes` depend on, each after those it depends on itself."""
    operators: dict[int, Any] = {}

    def visit(operator: Any) -> None:
        if id(operator) not in operators:
            for edge in inputs_of(operator):
                visit(edge.source)
            operators[id(operator)] = operator

    for node in nodes:
        visit(node.source)
    return list(operators.values())


def _stages(operators: Sequence[Any]) -> dict[int, str]:
    decoders = [o for o in operators if _DECODER.search(o._op.schema.Name()) and not reads_data(o)]
    leading = {id(operator) for operator in _in_order([DataNode("", source=o) for o in decoders])}
    stage_of: dict[int, str] = {}
    for operator in operators:
        decodes = id(operator) in leading
        own = DECODE if decodes else AUGMENT
        if reads_data(operator) or (made_here(operator) and not decodes):
            own = READ
        before = [stage_of[id(edge.source)] for edge in inputs_of(operator)]
        stage_of[id(operator)] = max([own, *before], key=STAGES.index)
    return stage_of
