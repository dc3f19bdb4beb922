"""From what was measured to what it means."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dali_echo.plan import BUFFER_BATCHES, Option, advise, choose, round_down
from dali_echo.profile.bench import Bench
from dali_echo.profile.model import STEP, Place, Round, median, spread
from dali_echo.profile.result import Best, MarkGain, Profile, StageTime

# A smaller gain is less than what measuring can tell, and than what a repeat loses to a fresh sample.
_LEAST_GAIN = 1.1
_MOST_CORES = 0.8
_CAUSES = {
    "read": "reading",
    "decode": "decoding",
    "augment": "augmentation",
    "transfer": "the transfer",
    STEP: "the accelerator",
}


def summarize(bench: Bench, rounds: Sequence[Round], memory: int | None = None) -> Profile:
    """What the rounds say."""
    n = len(rounds)
    emitted_s = median([r.whole.wall for r in rounds])
    stages = []
    for name in rounds[0].alone:
        walls = [r.alone[name].wall for r in rounds]
        cpu = median([r.alone[name].cpu for r in rounds])
        wall = median(walls)
        stages.append(StageTime(name, wall, n, spread(walls), cpu, min(1.0, wall / emitted_s)))
    options = [_option(bench, rounds, place, memory) for place in bench.places]
    judged = [o for o, place in zip(options, bench.places, strict=True) if _judged(bench, place)]
    best = choose(judged)
    causes = [r.bottleneck() for r in rounds]
    bottleneck = max(sorted(set(causes)), key=causes.count)
    return Profile(
        stages=stages,
        marks=[_gain(bench, rounds, o, p) for o, p in zip(options, bench.places, strict=True)],
        best=Best(best.mark, best.factor, best.shuffle_buffer, round(best.buffer_bytes or 0))
        if best
        else None,
        bottleneck=bottleneck,
        predicted_speedup=best.speed_up if best else 1.0,
        fresh_share=best.speed_up / best.factor if best else 1.0,
        batches=sum(r.batches for r in rounds),
        rounds=n,
        cores=median([r.cores for r in rounds]),
        samples_per_s=1 / emitted_s,
        step_waits=median([r.whole.waited for r in rounds]) if STEP in rounds[0].alone else None,
        advice=[*_advice(bench, judged, best, bottleneck, memory), *_doubts(rounds)],
    )


def _judged(bench: Bench, place: Place) -> bool:
    """Whether anything after a place was measured that repeats would have to pass."""
    return bench.has_step or place.stage != bench.definition.stages[-1]


def _option(bench: Bench, rounds: Sequence[Round], place: Place, memory: int | None) -> Option:
    batch = bench.definition.batch_size
    ratio = median([r.ratio(place) for r in rounds])
    item = batch if place.unit == "batch" else 1
    item_bytes = item * bench.bytes_per_sample(place)
    buffer = BUFFER_BATCHES * batch // item
    if memory is not None and item_bytes:
        held = bench.dataset_samples
        buffer = min(int(memory // item_bytes), memory if held is None else max(1, held // item))
    factor = round_down(ratio) if buffer * item >= batch else 1.0

    def emitted_s(e: float) -> float:
        return median([r.emitted_s(place, e) for r in rounds])

    if emitted_s(1) / emitted_s(factor) < _LEAST_GAIN:
        factor = 1.0
    return Option(
        mark=place.name,
        t_up_s=batch * median([r.t_up(place) for r in rounds]),
        t_down_s=batch * median([r.t_down(place) for r in rounds]),
        R=ratio,
        factor=factor,
        shuffle_buffer=buffer,
        buffer_bytes=buffer * item_bytes,
        batch_s=batch * factor * emitted_s(factor),
        speed_up=emitted_s(1) / emitted_s(factor),
    )


def _gain(bench: Bench, rounds: Sequence[Round], option: Option, place: Place) -> MarkGain:
    joined = [r.joined[place.name] for r in rounds]
    return MarkGain(
        after=place.name,
        R=option.R,
        n=len(rounds),
        spread=spread([r.ratio(place) for r in rounds]),
        judged=_judged(bench, place),
        factor=option.factor,
        speed_up=option.speed_up,
        bytes_per_sample=bench.bytes_per_sample(place),
        starved=median([piece.starved for piece in joined]),
        blocked=median([piece.blocked for piece in joined]),
    )


def _advice(
    bench: Bench, judged: Sequence[Option], best: Option | None, bottleneck: str, memory: int | None
) -> list[str]:
    definition = bench.definition
    if best:
        size = 1 if best.mark == "batch" else definition.batch_size
        advice = advise(_CAUSES[bottleneck], best, size)
    else:
        advice = [_why_not(judged, _CAUSES[bottleneck], memory, definition.batch_size)]
    if definition.random_decoders:
        advice.append(
            f"{', '.join(definition.random_decoders)} draws at random while decoding: repeats after decode "
            "show what it drew, such as the same crop. Decode whole and crop after the mark for fresh views."
        )
    if not bench.has_step:
        advice.append(
            "Without --step the trainer is taken to need no time: R is at most this, and marks after "
            f"{definition.stages[-1]} are not judged."
        )
    if definition.marks:
        advice.append(f"Measured without the definition's own marks: {', '.join(definition.marks)}.")
    return advice


def _doubts(rounds: Sequence[Round]) -> list[str]:
    got, counted = median([r.cores for r in rounds]), len(os.sched_getaffinity(0))
    if got > _MOST_CORES * counted:
        return []
    return [
        f"This process got {got:.1f} of {counted} cores: others use them, or a limit holds. Measure while "
        "the machine is as busy as it will be in training."
    ]


def _why_not(judged: Sequence[Option], cause: str, memory: int | None, least: int) -> str:
    if not judged:
        return "Echo would not help here: nothing comes after reading, as far as was measured."
    most = max(judged, key=lambda option: option.R)
    if most.R < _LEAST_GAIN:
        return f"Echo would not help here: {cause} is the bottleneck (R = {most.R:.1f})."
    if memory is not None and not any(option.shuffle_buffer >= least for option in judged):
        return f"Echo would not help here: {memory:,} bytes hold no batch of samples (R = {most.R:.1f})."
    return (
        f"Echo would not help here: {cause} is the bottleneck, and shares what it runs on with what would be "
        f"repeated (R = {most.R:.1f})."
    )
