"""What a profile says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageTime:
    """What one stage takes alone, in seconds per sample: the median over the rounds.

    Attributes:
        name: "read", "decode", "augment", "transfer" or "step".
        s_per_sample: by the clock, when it never waits for another stage.
        n: rounds.
        spread: their interquartile range.
        cpu_s_per_sample: of the process's threads; less than by the clock where the stage waits.
        busy: the share of the time that the pipeline without a mark leaves it for.
    """

    name: str
    s_per_sample: float
    n: int
    spread: float
    cpu_s_per_sample: float
    busy: float


@dataclass(frozen=True)
class MarkGain:
    """What a mark at one place would give.

    Attributes:
        after: the stage before it; "batch" for whole batches, last of all.
        R: what is before it takes R times as long as what is after it; the median over the rounds.
        n: rounds.
        spread: their interquartile range.
        judged: whether anything after this place was measured. Else R is no more than the upper limit that
            handing out batches sets.
        factor: R rounded down; 1 if nothing is gained here.
        speed_up: samples emitted with it for each one without echo.
        bytes_per_sample: that a live sample takes in the buffer.
        starved: share of the time for which, with factor 1, what is after the mark waited for what is
            before it,
        blocked: and for which a batch from before the mark lay in the queue (of one) and was not taken.
    """

    after: str
    R: float
    n: int
    spread: float
    judged: bool
    factor: float
    speed_up: float
    bytes_per_sample: float
    starved: float
    blocked: float


@dataclass(frozen=True)
class Best:
    """The arguments of the mark to set. `shuffle_buffer` counts samples, or batches after "batch"."""

    after: str
    factor: float
    shuffle_buffer: int
    memory_bytes: int


@dataclass(frozen=True)
class Profile:
    """What was measured of a pipeline, and what it means.

    Attributes:
        stages: in order; the step last, if one was given.
        marks: in order.
        best: None where echo would not help.
        bottleneck: the stage that needs the most time, or the most of the resource that is short.
        predicted_speedup: samples emitted with `best` for each one without echo, e · max(R, 1) / max(R, e)
            where both sides of it overlap: how many times faster training becomes at most, as far as a
            repeat is worth a fresh sample. 1 without `best`.
        fresh_share: fresh samples read with `best` for each one without echo: max(R, 1) / max(R, e) there.
        batches: measured in all.
        rounds: in which all parts were measured once.
        cores: that the process got.
        samples_per_s: of the whole pipeline without a mark, with the step.
        step_waits: share of that time for which the step waited for batches; None without a step.
        advice: all this in words, with cautions.
    """

    stages: list[StageTime]
    marks: list[MarkGain]
    best: Best | None
    bottleneck: str
    predicted_speedup: float
    fresh_share: float
    batches: int
    rounds: int
    cores: float
    samples_per_s: float
    step_waits: float | None
    advice: list[str]
