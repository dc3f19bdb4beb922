"""`echo`: the mark that a pipeline definition sets where its outputs are to be replayed."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import Pipeline, do_not_convert

from dali_echo import graph
from dali_echo.factor import Factor, parse_factor
from dali_echo.memory import parse_bytes

Unit = Literal["sample", "batch"]
MAX_FACTOR = 8
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Mark:
    """The checked arguments of one `echo`."""

    name: str
    factor: Factor
    unit: Unit
    shuffle_buffer: int
    memory_limit: int | None
    max_factor: float
    timeout: float
    seed: int | None


@do_not_convert  # type: ignore[untyped-decorator]
def echo(
    *nodes: DataNode,
    factor: float | Callable[[int], float] | Literal["auto", "fill"] = 2,
    unit: Unit = "sample",
    shuffle_buffer: int | None = None,
    memory_limit: int | str | None = None,
    max_factor: float = MAX_FACTOR,
    timeout: float = TIMEOUT_S,
    seed: int | None = None,
    name: str | None = None,
) -> Any:
    """Replay `nodes`: everything before runs once per fresh item, everything after `factor` times.

    Use it inside a function decorated with `dali_echo.pipeline_def`, and pass every value that is
    needed after the mark through the same call: rows stay aligned.

    Args:
        nodes: outputs of DALI operators, on CPU or GPU.
        factor: mean number of uses of each fresh item, at least 1. An integer e: exactly e uses each.
            Otherwise the integer below or above, so that n fresh items have round(n * e) uses. A
            callable `f(epoch) -> float`: the factor of the items read in that epoch, counted from 0.
            "auto": measured, so that the upstream and the trainer take the same time; see
            docs/how-it-works.md. It changes at batches that no seed determines, from 1 at the beginning.
            While it measures, up to 10 upstream batches wait beside the buffer, or more with deeper queues.
            One mark of a pipeline can have it.
            "fill": as many uses as it takes for the training never to wait. A batch holds the fresh items
            that have come, and in its other places those used least that have rested since. What it holds
            depends on time, not on the seed alone, and an epoch has no length in advance.
        unit: "sample" forms new batches, in which no sample occurs twice; "batch" repeats whole batches.
        shuffle_buffer: live items from which each batch is drawn: samples for unit "sample", by default
            4 batches of them and never fewer than one; batches for "batch", by default 1, which repeats
            each batch at once. Larger puts the uses of an item further apart and costs memory.
        memory_limit: bytes, or a string such as "512MiB" or "4GiB", that the buffer holds at most. If
            fewer samples fit than `shuffle_buffer`, it shrinks, and warns once. Each sample then has memory
            of its own, by a copy: otherwise it keeps the whole upstream batch that it came in. A batch that
            is being taken from the upstream comes on top.
        max_factor: the highest value that "auto" takes, and the most uses of an item with "fill", in whole
            uses; at least 1. With a number or a schedule it would limit nothing, and is refused.
        timeout: seconds that "fill" waits for a fresh item, when too few live ones have uses left for a
            batch, before it raises; positive. With another factor the wait has no end, and it is refused.
        seed: of the order of the replay. By default it follows from the pipeline's seed.
        name: of the mark, in statistics and messages; "echo0", "echo1", … by default.

    Returns:
        One node for one argument, else a tuple as long as `nodes`.

    Raises:
        MemoryError: when it runs, if one upstream batch does not fit into `memory_limit`.
        TimeoutError: when it runs with "fill", after `timeout`; naming the reader.
        RuntimeError: outside of a `dali_echo.pipeline_def` definition, or inside an `if` on a DataNode.
        TypeError, ValueError: for an argument that cannot be; the message holds its value.
    """
    trace = graph.current_trace()
    if trace is None:
        raise RuntimeError(
            "echo() was called outside of a pipeline definition that knows it: decorate the function "
            "with `dali_echo.pipeline_def` instead of `nvidia.dali.pipeline_def`"
        )
    _check_nodes(nodes)
    pipeline = Pipeline.current()
    if pipeline._conditionals_enabled and pipeline._condition_stack.stack_depth() > 1:
        raise RuntimeError(
            "echo() was called inside an `if` on a DataNode, where only a part of the batch passes: "
            "set the mark before or after the `if`"
        )
    _check_beside_others(factor, trace)
    mark = Mark(
        name=_check_name(name, trace),
        factor=parse_factor(factor),
        unit=_check_unit(unit),
        shuffle_buffer=_check_buffer(shuffle_buffer, unit, pipeline.max_batch_size),
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
        max_factor=_check_max_factor(max_factor),
        timeout=_check_timeout(timeout),
        seed=_check_seed(seed),
    )
    _check_has_effect(mark)
    outputs = trace.add(mark, nodes)
    return outputs[0] if len(outputs) == 1 else outputs


def _check_nodes(nodes: tuple[Any, ...]) -> None:
    if not nodes:
        raise TypeError("echo() needs at least one DALI output to replay: echo(image, label, factor=2)")
    for position, node in enumerate(nodes):
        if isinstance(node, (list, tuple)):
            raise TypeError(f"echo() argument {position} is a {type(node).__name__}: expand it with *")
        if not isinstance(node, DataNode):
            raise TypeError(
                f"echo() argument {position} is {node!r}, not the output of a DALI operator; "
                f"constants need not pass through echo()"
            )


def _check_beside_others(factor: Any, trace: graph.Trace) -> None:
    marks = [joint.mark for joint in trace.joints]
    adaptive = next((mark for mark in marks if mark.factor.measured or mark.factor.fills), None)
    if adaptive is None:
        return
    if isinstance(factor, str) and (factor == "auto" or adaptive.factor.measured):
        raise ValueError(
            f"factor = {factor!r} is used with factor = {adaptive.factor.value!r} of the mark "
            f"{adaptive.name!r}, and each would measure what the other changes: give one of them a number"
        )
    if callable(factor):
        raise ValueError(
            f"factor = {factor!r} is a schedule over epochs, and the mark {adaptive.name!r} before it, with "
            f'factor = "{adaptive.factor.value}", changes how long they are: give a number'
        )


def _check_unit(unit: Any) -> Unit:
    if unit not in ("sample", "batch"):
        raise ValueError(f'unit = {unit!r} is not known; use "sample" or "batch"')
    return cast(Unit, unit)


def _check_buffer(size: Any, unit: Unit, batch_size: int) -> int:
    if size is None:
        return 4 * batch_size if unit == "sample" else 1
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"shuffle_buffer = {size!r} must be an integer number of {unit}s")
    if unit == "sample" and size < batch_size:
        raise ValueError(
            f"shuffle_buffer = {size} is below the batch size of {batch_size}, and a batch holds no sample "
            f"twice: use {batch_size} or more samples"
        )
    if size < 1:
        raise ValueError(f"shuffle_buffer = {size} must hold at least one {unit}")
    return size


def _check_max_factor(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"max_factor = {value!r} must be a number, at least 1")
    if not 1 <= value < math.inf:
        raise ValueError(f"max_factor = {value!r} must be a finite number, at least 1")
    return float(value)


def _check_timeout(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"timeout = {value!r} must be a number of seconds, such as 300.0")
    if not 0 < value <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"timeout = {value!r} must be positive, and at most {threading.TIMEOUT_MAX:.0f} seconds: give "
            f"the longest time without a fresh sample that is no fault, such as 300.0"
        )
    return float(value)


def _check_has_effect(mark: Mark) -> None:
    factor = mark.factor
    kind = "a schedule" if callable(factor.value) else repr(factor.value)
    if mark.max_factor != MAX_FACTOR and not (factor.measured or factor.fills):
        raise ValueError(
            f"max_factor = {mark.max_factor:g} limits nothing with factor = {kind}: leave it out, or give "
            f'factor="auto" or factor="fill"'
        )
    if mark.timeout != TIMEOUT_S and not factor.fills:
        raise ValueError(
            f"timeout = {mark.timeout:g} ends no wait with factor = {kind}: leave it out, or give "
            f'factor="fill"'
        )


def _check_seed(seed: Any) -> int | None:
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed = {seed!r} must be an integer from 0 to 2**63 - 1, or None")
    return seed


def _check_name(name: Any, trace: graph.Trace) -> str:
    if name is None:
        return f"echo{len(trace.joints)}"
    if not isinstance(name, str) or not name:
        raise TypeError(f"name = {name!r} must be a string that is not empty")
    if any(joint.mark.name == name for joint in trace.joints):
        raise ValueError(f"name = {name!r} is used by two marks: give each its own")
    return name
