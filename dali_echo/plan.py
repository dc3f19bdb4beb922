"""Whether echoing is worth it, where and how often: a model of one training job, from given numbers.

Every stage works on several batches at a time with the others, so a fresh batch takes as long as the
resource that is busiest with it: the storage, the CPU cores or the accelerator. With the mark after
some stage and the factor e, work before the mark is done once per fresh batch, work after it e times:

    T(e) = max(storage, cores before the mark + e · cores after it, e · step)

With t_up = max(storage, cores before it), t_down = max(cores after it, step) and R = t_up / t_down,
this is max(t_up, e · t_down) unless both sides of the mark use the cores, and T(1) / T(e) is
max(R, 1) / max(R, e): repeats are free up to e = R. To train on N₁ fresh samples without echo takes
(N₁ · T(1)) / (Nₑ · T(e)) times as long as on Nₑ with it (Choi et al. 2019, Faster Neural Network
Training with Data Echoing, arXiv 1907.05550). Nₑ is not known beforehand: if a repeat is worth v fresh
samples, Nₑ = N₁ / (1 + v · (e - 1)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

MARKS = ("read", "decode", "augment")
_MAX_FACTOR = 8
_LARGE_FACTOR = 4
_LEAST_FACTOR = 1.1
BUFFER_BATCHES = 4  # what `echo` holds by default
# How many times greater a later mark's speed-up must be: its buffer takes more memory, and after
# augment, repeats show the same view and are worth less than this model assumes.
_CLEARLY = {"read": 1.0, "decode": 1.1, "augment": 2.0, "batch": 2.0}
_PLACES = {"batch": 'last of all, with unit="batch"'}


@dataclass(frozen=True)
class Job:
    """A training job. Sizes are in bytes, times in milliseconds.

    Attributes:
        batch_size: samples in a batch of one rank.
        step_ms: what one training step on a batch takes, once the batch is there.
        samples_per_s: what the storage gives to all ranks together.
        decode_ms: on one core, for one sample.
        augment_ms: likewise.
        cores: CPU cores that decode and augment, for one rank.
        ranks: processes that share the storage, each with an accelerator and cores of its own.
        encoded_bytes: size of a sample as it is stored, the mean, as all that follow.
        decoded_bytes: size of a decoded sample. The default is 500 × 375 pixels, in RGB.
        augmented_bytes: size of an augmented sample. The default is 224 × 224 pixels, in RGB.
        memory_bytes: what one rank has for the buffer of samples; None if it does not matter.
        dataset_samples: fresh samples of an epoch, of all ranks together.
        epochs: of a training without echo.
        repeat_worth: how many fresh samples a repeat is worth, from 0 to 1. 1 is the best there can
            be, and gives speed-ups that are upper limits.
    """

    batch_size: int
    step_ms: float
    samples_per_s: float
    decode_ms: float = 0.0
    augment_ms: float = 0.0
    cores: float = 1
    ranks: int = 1
    encoded_bytes: float | None = None
    decoded_bytes: float = 500 * 375 * 3
    augmented_bytes: float = 224 * 224 * 3
    memory_bytes: float | None = None
    dataset_samples: float | None = None
    epochs: float | None = None
    repeat_worth: float = 1.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value in vars(self).items():
            least = 0 if name in ("decode_ms", "augment_ms", "repeat_worth") else None
            good = value is None or (math.isfinite(value) and (value > 0 or value == least))
            if not good:
                kind = "number of 0 or more" if least == 0 else "positive number"
                raise ValueError(f"{name} = {value!r}: give a {kind}")
        if self.repeat_worth > 1:
            raise ValueError(f"repeat_worth = {self.repeat_worth}: a repeat is worth 1 fresh sample at most")


@dataclass(frozen=True)
class Work:
    """What a batch of one rank takes, in seconds, of each resource.

    Attributes:
        read: of this rank's share of the storage.
        decode: of its cores.
        augment: of its cores.
        step: of its accelerator.
    """

    read: float
    decode: float
    augment: float
    step: float

    @property
    def bottleneck(self) -> str:
        """What a batch takes most time of: "the storage", "decoding", "augmentation" or "the accelerator"."""
        cores = "decoding" if self.decode >= self.augment else "augmentation"
        times = {"the accelerator": self.step, cores: self.decode + self.augment, "the storage": self.read}
        return max(times, key=lambda name: times[name])


@dataclass(frozen=True)
class Option:
    """What a mark at one place gives.

    Attributes:
        mark: the stage that it stands after.
        t_up_s: seconds per batch before the mark,
        t_down_s: and after it.
        R: their ratio.
        factor: the e to choose: R rounded down, 8 at most; 1 if a mark here gains nothing.
        shuffle_buffer: samples in the buffer of one rank: 4 batches, or if a memory is given what it
            holds, up to the rank's share of the data set.
        buffer_bytes: its size.
        batch_s: seconds per fresh batch with this factor.
        speed_up: of the training, if a repeat is worth what the job says.
    """

    mark: str
    t_up_s: float
    t_down_s: float
    R: float
    factor: float
    shuffle_buffer: int
    buffer_bytes: float | None
    batch_s: float
    speed_up: float


@dataclass(frozen=True)
class Cost:
    """What a whole training takes: hours, and bytes read from the storage if the samples' size is known."""

    hours: float
    bytes_read: float | None


@dataclass(frozen=True)
class Plan:
    """What to do for a job.

    Attributes:
        ranks: of the job.
        work: what a batch takes of each resource.
        batch_s: seconds per batch without echo.
        options: a mark after each stage, in order.
        best: the one to choose; None where echo would not help.
        without_echo: the cost of the training, if its length is known,
        with_echo: and with `best`.
        advice: all this in words, with cautions.
    """

    ranks: int
    work: Work
    batch_s: float
    options: list[Option]
    best: Option | None
    without_echo: Cost | None
    with_echo: Cost | None
    advice: list[str]


def plan(job: Job) -> Plan:
    """Find the mark and the factor to choose: a later mark only if its speed-up is clearly greater."""
    work = Work(
        read=job.batch_size * job.ranks / job.samples_per_s,
        decode=job.batch_size * job.decode_ms / 1000 / job.cores,
        augment=job.batch_size * job.augment_ms / 1000 / job.cores,
        step=job.step_ms / 1000,
    )
    options = [_option(job, work, mark) for mark in MARKS]
    best = choose(options)
    batch_s = batch_seconds(work, "read", 1)
    without = _cost(job, batch_s, gain=1)
    cost = _cost(job, best.batch_s, _gain(job, best.factor)) if best else without
    if best is None:
        advice = [_why_not(job, work, options)]
    else:
        advice = advise(work.bottleneck, best, job.batch_size, job.repeat_worth)
    return Plan(job.ranks, work, batch_s, options, best, without, cost, advice)


def choose(options: Sequence[Option]) -> Option | None:
    """The best of the marks: a later one only if its speed-up is clearly greater than an earlier one's."""
    best = None
    for option in options:
        if option.factor > 1 and option.speed_up > (best.speed_up * _CLEARLY[option.mark] if best else 1):
            best = option
    return best


def over_ranks(job: Job, ranks: list[int]) -> list[Plan]:
    """Plan for each number of ranks that share the storage."""
    return [plan(replace(job, ranks=count)) for count in ranks]


def batch_seconds(work: Work, mark: str, factor: float) -> float:
    """Seconds per fresh batch: T(e) of this module's head."""
    before, after = _cores(work, mark)
    return max(work.read, before + factor * after, factor * work.step)


def speed_up(job: Job, work: Work, mark: str, factor: float) -> float:
    """How many times shorter the training becomes: (N₁ · T(1)) / (Nₑ · T(e))."""
    return _gain(job, factor) * batch_seconds(work, mark, 1) / batch_seconds(work, mark, factor)


def _gain(job: Job, factor: float) -> float:
    return 1 + job.repeat_worth * (factor - 1)


def _cores(work: Work, mark: str) -> tuple[float, float]:
    stages = [work.decode, work.augment]
    place = MARKS.index(mark)
    return sum(stages[:place]), sum(stages[place:])


def _option(job: Job, work: Work, mark: str) -> Option:
    before, after = _cores(work, mark)
    t_up, t_down = max(work.read, before), max(after, work.step)
    ratio = t_up / t_down
    buffer, size = _buffer(job, mark)
    factor = round_down(ratio) if buffer >= job.batch_size else 1.0
    if speed_up(job, work, mark, factor) <= 1:
        factor = 1.0
    return Option(
        mark=mark,
        t_up_s=t_up,
        t_down_s=t_down,
        R=ratio,
        factor=factor,
        shuffle_buffer=buffer,
        buffer_bytes=None if size is None else buffer * size,
        batch_s=batch_seconds(work, mark, factor),
        speed_up=speed_up(job, work, mark, factor),
    )


def _buffer(job: Job, mark: str) -> tuple[int, float | None]:
    sizes = {"read": job.encoded_bytes, "decode": job.decoded_bytes, "augment": job.augmented_bytes}
    size = sizes[mark]
    if job.memory_bytes is None or size is None:
        return BUFFER_BATCHES * job.batch_size, size
    fitting = int(job.memory_bytes // size)
    if job.dataset_samples is not None:
        fitting = min(fitting, math.ceil(job.dataset_samples / job.ranks))
    return fitting, size


def round_down(ratio: float) -> float:
    """The factor for R: an integer from 2 on, else with a tenth; 8 at most."""
    factor = min(ratio, _MAX_FACTOR)
    return float(math.floor(factor)) if factor >= 2 else max(1.0, math.floor(factor * 10) / 10)


def _cost(job: Job, batch_s: float, gain: float) -> Cost | None:
    if job.dataset_samples is None or job.epochs is None:
        return None
    fresh = job.dataset_samples * job.epochs / gain
    read = None if job.encoded_bytes is None else fresh * job.encoded_bytes
    return Cost(fresh / (job.batch_size * job.ranks) * batch_s / 3600, read)


def advise(bottleneck: str, best: Option, batch_size: int, repeat_worth: float = 1) -> list[str]:
    """What to do, in words, with cautions."""
    advice = [
        f"{bottleneck.capitalize()} is the bottleneck (R = {best.R:.1f}): set the mark "
        f"{_PLACES.get(best.mark, f'after {best.mark}')}, with factor={best.factor:g} and "
        f"shuffle_buffer={best.shuffle_buffer}{_memory(best)}."
    ]
    kind = "at most " if repeat_worth == 1 else ""
    advice.append(
        f"Training becomes {kind}{best.speed_up:.2f} times faster"
        + (": that much if a repeat is worth a fresh sample, and less as it is worth less." if kind else ".")
    )
    if best.factor > _LARGE_FACTOR:
        advice.append(
            "Caution with factors this large: each further repeat is worth less, and some harm. Choi et al. "
            "found the best e between 4 and 8 for a language model, and 3.25 times faster training at e = 5 "
            "where 5 was the limit. Start with 2 and raise it while the accuracy per hour improves."
        )
    if best.mark in ("augment", "batch"):
        advice.append("Repeats after augment show the same view, and are worth less than those before it.")
    if best.shuffle_buffer < BUFFER_BATCHES * batch_size:
        advice.append(
            f"The buffer is small: repeats come within {best.shuffle_buffer / batch_size:.1f} batches of "
            "each other. More memory for it helps."
        )
    return advice


def _memory(option: Option) -> str:
    return "" if option.buffer_bytes is None else f" ({option.buffer_bytes / 1e9:.2g} GB)"


def _why_not(job: Job, work: Work, options: list[Option]) -> str:
    ratio = max(option.R for option in options)
    reason, remedy = f"{work.bottleneck} is the bottleneck", ""
    if ratio >= _LEAST_FACTOR:
        fitting = [option for option in options if option.R >= _LEAST_FACTOR and _fits(job, option)]
        if fitting:
            reason = f"with repeat_worth = {job.repeat_worth:g}, repeats bring less than they take"
        else:
            reason = "the memory for the buffer holds less than a batch of samples"
            remedy = ". Give it more, or use smaller batches"
    return f"Echo would not help here: {reason} (R = {ratio:.1f}){remedy}."


def _fits(job: Job, option: Option) -> bool:
    return option.shuffle_buffer >= job.batch_size
