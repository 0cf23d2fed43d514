"""The fewest workers with which enough requests attain: which fleet to play next, and when it is known. Pure.

From where the estimate begins, workers are added on the side that misses, or on the other one where that does
not help, until a fleet passes; then taken away again, one by one, while it still passes. A fleet with as many
or fewer workers on both sides than one that failed is supposed to fail, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

LEAST = 0.7
"""Of the estimate: an objective that some may miss needs less, and prompts share steps."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Workers of each kind; no prefill workers: aggregated."""

    prefill: int
    decode: int

    @property
    def workers(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill} P + {self.decode} D" if self.prefill else f"{self.decode} aggregated"


@dataclass(frozen=True, slots=True)
class Trial:
    """What a simulation of one fleet found."""

    shape: Shape
    attainment: float
    missed_by: Mapping[str, int] = field(default_factory=dict)
    """Objective, or end, → requests: as `fleet.goodput` counts them."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further figures, for who reads the table."""


@dataclass(frozen=True, slots=True)
class Next:
    shape: Shape | None
    """None: it is over."""
    why: str


@dataclass(slots=True)
class Search:
    """`apply` what a simulation found; `next` says what to play."""

    start: Shape
    most: int
    """Workers, both sides together."""
    target: float = 0.95
    trials: list[Trial] = field(default_factory=list)

    def apply(self, trial: Trial) -> None:
        self.trials.append(trial)

    @property
    def best(self) -> Trial | None:
        """With the fewest workers of those that pass; of equal ones that with the highest attainment."""
        return min(filter(self._passes, self.trials), key=_order, default=None)

    def next(self) -> Next:
        if not self.trials:
            return Next(self.start, "what the work alone needs")
        best = self.best
        if best is None:
            return self._more()
        shape = best.shape
        if shape.prefill:
            prefill = self._fewer(shape.prefill, self.start.prefill, lambda one: one.prefill, shape, True)
            if prefill is not None:
                return self._down(shape, Shape(prefill, shape.decode), "prefill")
        decode = self._fewer(shape.decode, self.start.decode, lambda one: one.decode, shape, False)
        if decode is not None:
            side = "decode" if shape.prefill else "aggregated"
            return self._down(shape, Shape(shape.prefill, decode), side)
        return Next(None, f"{shape} passes, and fewer do not")

    def _down(self, passed: Shape, fewer: Shape, side: str) -> Next:
        return Next(fewer, f"{passed} passes: {passed.workers - fewer.workers} {side} fewer")

    def _more(self) -> Next:
        """Workers for the side that misses more, a few at once where much is missed; for the other one where
        that was tried and did not help: who waits for a full decode pool misses TTFT, too."""
        base = max(self.trials, key=lambda one: (one.attainment, -one.shape.workers))
        shape = base.shape
        add = max(1, math.ceil((self.target - base.attainment) / 4 * shape.workers))
        largest = max((one.shape for one in self.trials), key=lambda one: one.workers)
        room = self.most - largest.workers
        if room <= 0:
            return Next(None, f"not even {largest} attains {self.target:.0%}, and no more are allowed")
        add = min(add, self.most - shape.workers)
        late = base.missed_by.get("tpot", 0) + base.missed_by.get("itl", 0)
        # A request that was refused, or waited too long, waited for its prompt.
        first = sum(base.missed_by.values()) - late
        missed = f"{shape} misses {'TTFT' if first >= late else 'TPOT'} most"
        if not shape.prefill:
            more = Shape(0, largest.decode + min(add, room))
            return Next(more, f"{missed}: {more.decode - shape.decode} more aggregated")
        prefill, decode = Shape(shape.prefill + add, shape.decode), Shape(shape.prefill, shape.decode + add)
        tried = [one.shape for one in self.trials]
        more_prefill = any(one.prefill > shape.prefill and one.decode == shape.decode for one in tried)
        more_decode = any(one.decode > shape.decode and one.prefill == shape.prefill for one in tried)
        if not more_prefill and (first >= late or more_decode):
            helped = "; more decode did not help" if first < late else ""
            return Next(prefill, f"{missed}{helped}: {add} more prefill")
        if not more_decode:
            helped = "; more prefill did not help" if first >= late else ""
            return Next(decode, f"{missed}{helped}: {add} more decode")
        while (both := Shape(shape.prefill + add, shape.decode + add)) in tried:
            add *= 2
        if both.workers > self.most:
            return Next(None, f"more than {shape} does not help, and no more are allowed")
        return Next(both, f"{missed}, and more on one side did not help: {add} more on both")

    def _fewer(
        self, now: int, estimate: int, of: Callable[[Shape], int], shape: Shape, prefill: bool
    ) -> int | None:
        """Half way down to what is known or supposed to fail on this side; None: nothing is between."""

        def other(one: Shape) -> int:
            return one.decode if prefill else one.prefill

        failed = (one.shape for one in self.trials if not self._passes(one))
        floor = max((of(one) for one in failed if other(one) >= other(shape)), default=0)
        # What is far below the estimate cannot be: it would not get its work done.
        floor = max(floor, math.ceil(LEAST * estimate) - 1)
        return (floor + now) // 2 if floor + 1 < now else None

    def _passes(self, trial: Trial) -> bool:
        return trial.attainment >= self.target


def _order(trial: Trial) -> tuple[int, float]:
    return trial.shape.workers, -trial.attainment
