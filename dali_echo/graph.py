"""Tracing a pipeline definition that holds marks into the stages between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvidia.dali import fn
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import Pipeline
from nvidia.dali.types import BatchInfo

from dali_echo import bypass
from dali_echo.ranks import ranks

if TYPE_CHECKING:
    from dali_echo.mark import Mark
    from dali_echo.shards.guarding import Guard


@dataclass(eq=False)
class Joint:
    """One mark in one trace: the nodes that enter it, and the external sources that stand for them after it.

    `feed(position, info)` is set later, by the pipeline that replays, to give the batch of a node.
    """

    mark: Mark
    inputs: tuple[DataNode, ...]
    outputs: tuple[DataNode, ...] = ()
    feed: Callable[[int, BatchInfo], Any] | None = None
    bad: DataNode | None = None
    """Which rows of the inputs are to be dropped, if any may be."""

    def stand_in(self, names: Sequence[str]) -> None:
        """Make the external sources, in the pipeline that is being defined."""
        self.outputs = tuple(
            fn.external_source(
                source=_source(self, position),
                batch_info=True,
                no_copy=True,
                device=node.device,
                name=names[position],
            )
            for position, node in enumerate(self.inputs)
        )


@dataclass
class Trace:
    """The marks met while a definition runs, the guards behind its readers, and the rank that it is for."""

    joints: list[Joint] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    bad: DataNode | None = None
    """Rows that the guards want to have dropped."""
    rank: int = field(default_factory=lambda: ranks()[0])

    def guard(self, guard: Guard, bad: DataNode) -> None:
        """Note a guard, and the rows that it calls bad: the first mark drops them, if it skips them."""
        self.guards.append(guard)
        if guard.skips:
            self.bad = bad if self.bad is None else self.bad | bad

    def add(self, mark: Mark, inputs: tuple[DataNode, ...]) -> tuple[DataNode, ...]:
        """Note a mark, and return the nodes that its definition goes on with."""
        left_out = _left_out.get()
        if left_out is not None:
            left_out.append(mark)
            return inputs
        joint = Joint(mark, inputs, bad=None if self.joints else self.bad)
        joint.stand_in([f"{mark.name}[{position}]" for position in range(len(inputs))])
        self.joints.append(joint)
        return joint.outputs


@dataclass(frozen=True)
class Stage:
    """A pipeline that ends where the next stage begins, and the joint that it begins with."""

    pipeline: Pipeline
    joint: Joint | None
    rank: int
    guards: list[Guard]


def current_trace() -> Trace | None:
    """The trace of the definition that is running, if any."""
    return _current.get()


@contextlib.contextmanager
def without_marks() -> Iterator[list[Mark]]:
    """Let definitions run as if no mark were in them; gives those that are left out.

    Guards behind readers do not act then, since it takes a mark to drop what they flag.
    """
    marks: list[Mark] = []
    token = _left_out.set(marks)
    try:
        yield marks
    finally:
        _left_out.reset(token)


def split(define: Callable[[], Pipeline]) -> list[Stage]:
    """Run a definition once for each of its stages, and keep in each run what belongs to that stage.

    Args:
        define: builds the pipeline of the whole definition, always in the same way.

    Raises:
        ValueError: if a value bypasses a mark, a mark is not used, or none drops what is to be skipped.
        RuntimeError: if the definition sets other marks when it runs again.
    """
    whole, trace = _trace(define)
    joints = trace.joints
    measured = _left_out.get() is not None
    if trace.bad is not None and not joints and not measured:
        raise ValueError(
            'on_error="skip" leaves samples out at an echo mark, and the definition has none: add one after '
            "the decoder, as in `image, label = echo(image, label, factor=1)`"
        )
    owners = bypass.check(joints, whole._graph_out, whole._sinks)
    stages: list[Stage] = []
    for number in range(len(joints) + 1):
        last = number == len(joints)
        pipeline, again = (whole, trace) if last else _trace(define)
        marks = again.joints
        if len(marks) != len(joints) or len(pipeline._sinks) != len(owners):
            raise RuntimeError(
                f"the pipeline definition set {len(joints)} marks when it ran first and {len(marks)} "
                f"when it ran again: it must build the same graph each time"
            )
        if not last:
            bad = marks[number].bad
            pipeline.set_outputs(*marks[number].inputs, *([] if bad is None else [bad]))
        # An operator with side effects is kept by every trace; it must run in its own stage only.
        pipeline._sinks = [
            sink for sink, owner in zip(pipeline._sinks, owners, strict=True) if owner == number
        ]
        joint, guards = (marks[number - 1], []) if number else (None, [] if measured else again.guards)
        stages.append(Stage(pipeline, joint, trace.rank, guards))
    return stages


def _source(joint: Joint, position: int) -> Callable[[BatchInfo], Any]:
    def source(info: BatchInfo) -> Any:
        if joint.feed is None:
            raise RuntimeError(f"the mark {joint.mark.name!r} has nothing to replay from")
        return joint.feed(position, info)

    return source


def _trace(define: Callable[[], Pipeline]) -> tuple[Pipeline, Trace]:
    with _tracing() as trace:
        pipeline = define()
    return pipeline, trace


@contextlib.contextmanager
def _tracing() -> Iterator[Trace]:
    trace = Trace()
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


_current: ContextVar[Trace | None] = ContextVar("dali_echo_trace", default=None)
_left_out: ContextVar[list[Mark] | None] = ContextVar("dali_echo_left_out", default=None)
