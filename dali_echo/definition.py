"""`pipeline_def`: DALI's decorator, for definitions that hold marks."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import nvidia.dali
from nvidia.dali.pipeline import Pipeline

from dali_echo.bypass import image_decoders
from dali_echo.graph import Stage, split
from dali_echo.guarded import GuardedPipeline
from dali_echo.pipeline import EchoPipeline


def pipeline_def(
    fn: Callable[..., Any] | None = None,
    *,
    enable_conditionals: bool = False,
    **pipeline_kwargs: Any,
) -> Callable[..., Any]:
    """`nvidia.dali.pipeline_def`, for definitions that hold `echo` marks.

    Takes what DALI's decorator takes, and so does the factory that it makes. A definition with marks gives
    an `EchoPipeline`; the definition runs once for each stage. A definition without one gives what DALI's
    decorator gives.

    Raises:
        ValueError: when the pipeline is made, if a value reaches the outputs without passing a mark, or
            for pipeline arguments that echo cannot work with.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Pipeline]:
        dali_factory = nvidia.dali.pipeline_def(
            function, enable_conditionals=enable_conditionals, **pipeline_kwargs
        )

        @functools.wraps(function)
        def factory(*args: Any, **kwargs: Any) -> Pipeline:
            return join(split(lambda: dali_factory(*args, **kwargs)))

        factory._is_pipeline_def = True  # type: ignore[attr-defined]  # as DALI marks its own
        return factory

    return decorate(fn) if fn else decorate


def join(stages: list[Stage]) -> Pipeline:
    """Chain stages, each of which begins with the outputs of the one before it."""
    pipeline = stages[0].pipeline
    if stages[0].guards:
        ends = [node for stage in stages for node in (*stage.pipeline._graph_out, *stage.pipeline._sinks)]
        pipeline = GuardedPipeline.of_stage(pipeline, stages[0].guards, image_decoders(ends))
    if len(stages) == 1:
        return pipeline
    given = pipeline.seed
    seed = secrets.randbits(31) if given is None else given
    for number, stage in enumerate(stages):
        _prepare(stage.pipeline, stages[-1].pipeline)
        # By default DALI deals the seeds of operators from the pipeline's, in order: with one seed for all
        # stages, random operators before and after a mark would be the same stream, and so would those of
        # two ranks.
        stage.pipeline._seed = _derive(seed, number, stage.rank) if number or stage.rank else seed
        if stage.joint is None:
            continue
        mark = stage.joint.mark
        draw_seed = _derive(seed if mark.seed is None else mark.seed, number, stage.rank, 1)
        if isinstance(pipeline, EchoPipeline):
            pipeline.cut_nowhere()
        pipeline = EchoPipeline.of_stage(stage.pipeline, pipeline, stage.joint, draw_seed, given)
    return pipeline


def _prepare(pipeline: Pipeline, last: Pipeline) -> None:
    """Check what marks need of a stage's pipeline, and keep what describes the outputs for the last."""
    if not pipeline.exec_dynamic:
        raise ValueError(
            "echo holds outputs of the pipeline before the mark, which only DALI's default executor "
            "allows: leave out exec_async=False, exec_pipelined=False, exec_dynamic=False and separate "
            f"queue sizes (prefetch_queue_depth = {pipeline.prefetch_queue_depth!r})"
        )
    if pipeline is not last:
        pipeline._output_dtype = pipeline._output_ndim = pipeline._output_layout = None
        pipeline._checkpoint = None  # `build` of the last restores the whole chain


def _derive(seed: int, *path: int) -> int:
    return int(np.random.SeedSequence([seed, *path]).generate_state(1, np.uint32)[0])
