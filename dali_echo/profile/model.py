"""What the measured parts of a pipeline say about a mark between them.

A mark after some stage and the factor e let a sample that is emitted cost a share 1/e of what comes before
the mark, and all of what comes after it. Parts that run at the same time take as long as the slowest; the
cores, and the accelerator, take as long as all that is done on them:

    T(e) = max(up / e, down, step, (CPU(up) / e + CPU(down) + CPU(step)) / cores,
               GPU(up) / e + GPU(down) + GPU(step))

in seconds per sample emitted. `up`, `down` and `step` are what each part takes alone by the clock, CPU(·)
the time of its threads, and GPU(·) the clock time of those of its stages that use the GPU. Where a part
waits (for a network, a disk), this is the law max(t_up / e, t_down) of Choi et al. 2019 (arXiv 1907.05550),
with R = t_up / t_down; where both sides fill the same cores, it is t_up / e + t_down.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dali_echo.profile.clock import Piece
from dali_echo.profile.stages import STAGES

STEP = "step"


@dataclass(frozen=True)
class Place:
    """Where a mark could stand: its name, the stage before it, and the unit that is echoed there."""

    name: str
    stage: str
    unit: str


@dataclass(frozen=True)
class Part:
    """Seconds per sample: by the clock, of the CPU cores, of the GPU."""

    wall: float
    cpu: float
    gpu: float = 0.0


@dataclass(frozen=True)
class Round:
    """The pieces measured one after the other in one round.

    Attributes:
        cores: that this process gets.
        alone: each stage, fed from memory, and the step if there is one.
        up: all stages up to one.
        down: all stages after the mark at a place, fed by the echo from memory.
        joined: the same, fed by the stages before the mark, with factor 1 and the step.
        whole: the pipeline without a mark, with the step.
        uses_gpu: whether a stage, or the step, does.
    """

    cores: float
    alone: Mapping[str, Piece]
    up: Mapping[str, Piece]
    down: Mapping[str, Piece]
    joined: Mapping[str, Piece]
    whole: Piece
    uses_gpu: Mapping[str, bool]

    @property
    def batches(self) -> int:
        """Batches measured."""
        pieces = [*self.alone.values(), *self.up.values(), *self.down.values(), *self.joined.values()]
        return sum(piece.batches for piece in {id(piece): piece for piece in [*pieces, self.whole]}.values())

    def emitted_s(self, place: Place, factor: float) -> float:
        """T(e) of this module's head."""
        return emitted_s(self._up(place), self._down(place), self.cores, factor)

    def t_up(self, place: Place) -> float:
        """Seconds per sample of what comes before a mark."""
        return emitted_s(self._up(place), [], self.cores, 1)

    def t_down(self, place: Place) -> float:
        """Seconds per sample of what comes after it, and of the step."""
        return emitted_s(Part(0, 0), self._down(place), self.cores, 1)

    def ratio(self, place: Place) -> float:
        """R."""
        return self.t_up(place) / self.t_down(place)

    def bottleneck(self) -> str:
        """The stage that needs most: of time, or of cores or an accelerator that more than time are short."""
        needs = {name: piece.wall for name, piece in self.alone.items()}
        cpu = {name: piece.cpu for name, piece in self.alone.items()}
        gpu = {name: wall for name, wall in needs.items() if self.uses_gpu[name]}
        shared = [(sum(cpu.values()) / self.cores, cpu), (sum(gpu.values()), gpu)]
        _, needs = max([(max(needs.values()), needs), *shared], key=lambda need: need[0])
        return max(needs, key=lambda name: needs[name])

    def _up(self, place: Place) -> Part:
        piece = self.up[place.stage]
        return Part(piece.wall, piece.cpu, self._gpu(lambda stage: not _is_after(stage, place)))

    def _down(self, place: Place) -> list[Part]:
        piece = self.down[place.name]
        parts = [Part(piece.wall, piece.cpu, self._gpu(lambda stage: _is_after(stage, place)))]
        if STEP in self.alone:
            step = self.alone[STEP]
            parts.append(Part(step.wall, step.cpu, step.wall if self.uses_gpu[STEP] else 0.0))
        return parts

    def _gpu(self, belongs: Callable[[str], bool]) -> float:
        stages = [stage for stage in self.alone if stage != STEP and belongs(stage)]
        return sum(self.alone[stage].wall for stage in stages if self.uses_gpu[stage])


def emitted_s(up: Part, down: Sequence[Part], cores: float, factor: float) -> float:
    """T(e) of this module's head, for what is before a mark and the parts after it."""
    walls = [up.wall / factor, *(part.wall for part in down)]
    cpu = up.cpu / factor + sum(part.cpu for part in down)
    return max(*walls, cpu / cores, up.gpu / factor + sum(part.gpu for part in down))


def places(stages: Sequence[str]) -> list[Place]:
    """Where a mark could stand in a pipeline of these stages."""
    marked = [Place(stage, stage, "sample") for stage in STAGES[:-1] if stage in stages]
    return [*marked, Place("batch", stages[-1], "batch")]


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """The interquartile range."""
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


def _is_after(stage: str, place: Place) -> bool:
    return STAGES.index(stage) > STAGES.index(place.stage)
