"""`factor="auto"`: the factor at which the upstream and the trainer need the same time, measured.

R = t_up / t_down, with t_up the time that the upstream takes for a batch when it never rests, and t_down the
time between two batches without what the trainer waited for the upstream. While the trainer waits, the
upstream cannot rest, and every interval shows t_up. So the factor is set a little below R: the upstream stays
saturated, which costs the trainer a known share of its time, and R stays in sight. When nothing waits,
prefetched batches hide t_up; then some batches are fetched back to back, ahead of their time, and the first
ones, which were prefetched, are not counted.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dali_echo.buffer import EchoBuffer
from dali_echo.epochs import MovingEnds

logger = logging.getLogger("dali_echo")

PARTS = 64  # the factor is a multiple of 1 / PARTS, so that planned uses add up exactly
WARM_UP = 4  # draws that are not measured: they fill DALI's queues, compile, allocate
WINDOW = 24  # upstream batches between decisions
BLOCK = 3  # upstream batches that are measured as one
BURST = 6  # upstream batches fetched back to back to be measured, after those that were prefetched
SATURATED = 0.01  # share of waiting from which on the upstream cannot have rested
TARGET = 0.98  # factor / R: the trainer waits for the remaining share of its time
KEPT = (0.9, 1.045)  # R / factor between which the factor stays
DEEPEST = 3  # divides the factor at most by this at a time
FEW = 4  # upstream batches: a buffer of fewer hardly shuffles
SPACING = 0.98  # of the draws that an upstream batch lasts for must pass before the next one

Agree = Callable[[Sequence[float]], Sequence[Sequence[float]]]
"""Gives the numbers of every rank to every rank."""


@dataclass(frozen=True)
class _Block:
    """A few upstream batches and the draws between them."""

    seconds: float
    waited: float
    draws: int
    taken: int


class Meter:
    """Times draws in blocks of a few upstream batches each.

    The block with the slowest draws and the one with the longest waiting are left out, so that what happens
    once in a window does not count: a checkpoint, an evaluation, one slow batch.

    Args:
        period: upstream batches over which its times repeat: one is made anew, the others are repeats of an
            earlier mark. They count as one.
    """

    def __init__(self, period: int) -> None:
        self._period = period
        self.reset()

    def reset(self) -> None:
        """Begin a window with the next draw."""
        self._blocks: list[_Block] = []
        self._begun: tuple[float, float, int] | None = None
        self._draws = 0

    def asked(self, now: float, wait_s: float, taken: int) -> None:
        """A batch was asked for, after so much waiting and so many upstream batches since the beginning."""
        if self._begun is None:
            self._begun = now, wait_s, taken
        at, waited, before = self._begun
        if taken - before >= BLOCK * self._period:
            self._blocks.append(_Block(now - at, wait_s - waited, self._draws, taken - before))
            self._begun, self._draws = (now, wait_s, taken), 0
        self._draws += 1

    @property
    def waiting(self) -> float:
        """Share of its time for which the trainer waited for the upstream."""
        total = self._usual()
        return total.waited / total.seconds if total.seconds else 0.0

    def measure(self, factor: float, burst: Sequence[float]) -> tuple[float, float] | None:
        """t_up and t_down in seconds; None if too little has been seen.

        Args:
            factor: at present.
            burst: seconds that the upstream took for each of the batches that were fetched back to back.
        """
        total = self._usual()
        if not total.draws:
            return None
        t_down = (total.seconds - total.waited) / total.draws
        if self.waiting >= SATURATED:
            return total.seconds / total.taken, t_down
        if factor == 1:
            return t_down, t_down  # at most that, and there is no lower factor
        if not burst:
            return None
        n = self._period
        times = sorted(sum(burst[i : i + n]) / n for i in range(0, len(burst), n))
        return statistics.mean(times[1:-1]), t_down

    def _usual(self) -> _Block:
        slowest = max(self._blocks, key=lambda b: (b.seconds - b.waited) / b.draws, default=None)
        starved = max(self._blocks, key=lambda b: b.waited, default=None)
        usual = [b for b in self._blocks if b is not slowest and b is not starved]
        return _Block(
            sum(b.seconds for b in usual),
            sum(b.waited for b in usual),
            sum(b.draws for b in usual),
            sum(b.taken for b in usual),
        )


class Auto:
    """The factor of one mark, what it is decided from, and the uses planned with it.

    Decisions are made at positions in the sequence of batches drawn that are the same on every rank, from
    the measurements of all ranks, and are part of the state.

    Args:
        max_factor: the highest.
        period: see `Meter`.
        prefetched: batches that the upstream may have ready in DALI's queues.
        ends: where the reader's epochs end; None without a reader.
        shards: that the ranks together read.
        agree: shares numbers between the ranks.
        clock: gives seconds.
    """

    def __init__(
        self,
        max_factor: float,
        period: int,
        prefetched: int,
        ends: MovingEnds | None,
        shards: int,
        agree: Agree,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._highest = math.floor(max_factor * PARTS)
        self.ends = ends
        self._shards = shards
        self._agree = agree
        self._clock = clock
        self._meter = Meter(period)
        self._period = period
        self._prefetched = prefetched
        self._burst = 0
        self._parts = PARTS
        self._owed = 0  # parts of a use by which the planned uses lag behind the factors
        self._planned = self._fresh = 0
        self._draws = self._samples = 0
        self._decision = self._window = WARM_UP + WINDOW * period
        self._next_intake = 0  # in parts of a use drawn
        # Lowered on the word of a burst; decisions to make without one, and how many after the next mistake.
        self._trusted = False
        self._blind = 0
        self._patience = 1

    @property
    def factor(self) -> float:
        """Mean number of uses of what is taken now, a multiple of 1 / 64."""
        return self._parts / PARTS

    def uses(self, count: int) -> NDArray[np.int64]:
        """Plan the uses of the next `count` items, by error diffusion that goes on across changes."""
        owed = self._owed + self._parts * np.arange(count + 1, dtype=np.int64)
        planned = (owed + PARTS // 2) // PARTS
        self._owed = int(owed[-1] - planned[-1] * PARTS)
        uses: NDArray[np.int64] = np.diff(planned)
        return uses

    def may_take(self, buffer: EchoBuffer) -> bool:
        """Whether another upstream batch is due, if the buffer wants one.

        A buffer that is to hold more, because the factor rose, is filled hardly faster than the upstream
        delivers, so that its filling does not make the trainer wait; but one that is almost empty at once.
        """
        few = buffer.live < min(buffer.capacity / 2, FEW * buffer.intake)
        return few or buffer.drawn * PARTS >= self._next_intake

    def took(self, rows: int, uses: int, items: int, drawn: int) -> None:
        """An upstream batch of so many fresh rows and items, for so many uses of rows, was taken."""
        self._fresh += rows
        self._planned += uses
        lasts = items * self._parts
        self._next_intake = max(self._next_intake, drawn * PARTS - lasts) + round(SPACING * lasts)

    def asked(self, wait_s: float, taken: int) -> None:
        """The trainer asks for a batch; see `Meter.asked`."""
        if self._draws >= WARM_UP:
            self._meter.asked(self._clock(), wait_s, taken)

    def burst(self) -> int:
        """Batches to fetch back to back now: none, but in the middle of a window in which nothing waits."""
        middle = self._draws == self._decision - self._window // 2
        if not middle or self._parts == PARTS or self._blind or self._meter.waiting >= SATURATED:
            return 0
        self._burst = self._prefetched + BURST * self._period
        return self._burst

    def drew(self, samples: int, burst: Sequence[float]) -> str | None:
        """A batch of so many samples was drawn. Decide, if it is time; what is to be said of a change."""
        self._draws += 1
        self._samples += samples
        if self._draws < self._decision:
            return None
        said = self._decide(burst[self._prefetched :] if 0 < self._burst <= len(burst) else ())
        self._window = math.ceil(WINDOW * self._period * self.factor)
        self._decision = self._draws + self._window
        self._burst = 0
        self._meter.reset()
        return said

    def _decide(self, burst: Sequence[float]) -> str | None:
        measured = self._meter.measure(self.factor, burst)
        t_up, t_down = measured or (math.nan, math.nan)
        ranks = self._agree([t_up, t_down, self._meter.waiting, float(self._planned), float(self._fresh)])
        # Ranks that train together wait for the slowest upstream, and see that in their own t_down.
        t_up, t_down = max(r[0] for r in ranks), min(r[1] for r in ranks)
        waiting = max(r[2] for r in ranks)
        before = self.factor
        if not any(math.isnan(x) for rank in ranks for x in rank[:2]):
            self._follow(t_up / t_down, waiting >= SATURATED)
        elif self._blind:
            self._blind -= 1
        if self.factor == before:
            return None
        if self.ends is not None:
            planned, fresh = (round(sum(r[i] for r in ranks) * self._shards / len(ranks)) for i in (3, 4))
            self.ends = self.ends.changed(planned, fresh, self._samples * self._shards, self.factor)
        return (
            f"factor {before:.4g} -> {self.factor:.4g} after batch {self._draws}: "
            f"t_up = {1e3 * t_up:.4g} ms, t_down = {1e3 * t_down:.4g} ms, R = {t_up / t_down:.3g} "
            f"(n = {self._window} batches, {waiting:.1%} of their time waiting; {len(ranks)} ranks)"
        )

    def _follow(self, ratio: float, saturated: bool) -> None:
        relative = ratio / self.factor
        if saturated:
            # What a burst said was prefetched after all: do not ask one again too soon.
            mistaken = self._trusted and relative > 1.2
            self._patience = min(2 * self._patience, 16) if mistaken else 1
            self._blind = self._patience if mistaken else max(0, self._blind - 1)
            self._trusted = False
        elif self._blind:
            self._blind -= 1
        if KEPT[0] < relative < KEPT[1]:
            return
        parts = math.floor(TARGET * ratio * PARTS)
        parts = max(parts, PARTS, self._parts // DEEPEST)
        self._trusted = not saturated and parts < self._parts
        self._parts = min(parts, self._highest)

    def state(self) -> dict[str, Any]:
        """What `restore` needs, in integers. The window under way is measured anew after a restore."""
        return {
            **{name: getattr(self, "_" + name) for name in _STATE},
            "ends": None if self.ends is None else asdict(self.ends),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        for name in _STATE:
            setattr(self, "_" + name, state[name])
        self.ends = None if state["ends"] is None else MovingEnds(**state["ends"])
        self._meter.reset()


_STATE = (
    "parts", "owed", "planned", "fresh", "draws", "samples", "decision", "window", "next_intake", "trusted",
    "blind", "patience",
)  # fmt: skip
