"""What a worker can do, learnt from what workers measured: robust against cold starts and outliers. Pure.

Learnt only from workers past their warm-up that have computed something since they were seen last. A speed
far from what is known is left out, unless it comes again and again: then the world has changed. Nothing here
looks at how much is asked, so that what is needed grows with it and never shrinks.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median, quantiles

from planner.words import WorkerSeen

_SAMPLES = 128
"""Of prompt speed, that are remembered."""
_FAR = 2.5
"""Times more or less than what is known: an outlier."""
_KNOWN = 6
"""Samples from which on there is something to be far from."""
_PERSISTS = 40
"""Outliers in a row that are no outliers."""
_FIRST_WORKS = 3
"""Observations with work that a worker must have had before it is learnt from."""
_BIN = 1.3
"""A bin of batch sizes ends so many times above its beginning."""
_BIN_SAMPLES = 24
_REACH = 2.0
"""How many times the largest batch that was seen another one is supposed to be foreseen."""
_CAREFUL_REACH = 1.5
_LEAST_REACH = 16.0
_PRIOR_SLOPE = 0.5
"""Share of a step that is supposed to be proportional to its batch, until two sizes were seen."""
_PRIOR_BATCH = 8.0
"""Sequences from which on it is: fewer hardly make a step longer."""


@dataclass(frozen=True, slots=True)
class DecodeCapacity:
    """What one decode worker sustains within an objective."""

    batch: float
    """Sequences at a time."""
    step_s: float
    """Of a step of so many."""
    base_s: float
    each_s: float
    limited_by: str


class _Robust:
    """Values without outliers."""

    def __init__(self, most: int) -> None:
        self.values: deque[float] = deque(maxlen=most)
        self._odd: deque[float] = deque(maxlen=_PERSISTS)

    def add(self, value: float) -> None:
        if len(self.values) >= _KNOWN:
            known = median(self.values)
            if not known / _FAR <= value <= known * _FAR:
                self._odd.append(value)
                if len(self._odd) == _PERSISTS:
                    self.values.clear()
                    self.values.extend(self._odd)
                    self._odd.clear()
                return
        self._odd.clear()
        self.values.append(value)


class Capacity:
    """A fold of what ready workers report."""

    def __init__(self, warm_up_s: float) -> None:
        self._warm_up_s = warm_up_s
        self._works: dict[tuple[str, str], int] = {}
        self._prefill = _Robust(_SAMPLES)
        self._steps: dict[int, tuple[_Robust, _Robust]] = {}
        """Bin of batch sizes → batches, seconds of a step."""
        # What was made of them, until there are more: it is asked for several times a decision.
        self._speed: float | None = None
        self._lines: dict[float, tuple[float, float, float]] = {}
        self.kv_tokens: int | None = None
        """Of a decode worker, at least."""

    def learn(self, worker: WorkerSeen) -> None:
        if not worker.worked:
            return
        key = (worker.id, worker.role)
        if worker.ready_s < self._warm_up_s:
            self._works.pop(key, None)
            return
        works = self._works[key] = self._works.get(key, 0) + 1
        if works <= _FIRST_WORKS:
            return
        if worker.role == "prefill":
            if worker.prefill_tokens_s:
                self._prefill.add(worker.prefill_tokens_s)
                self._speed = None
        elif worker.decode_step_s and worker.decode_batch:
            size = int(math.log(max(1.0, worker.decode_batch)) / math.log(_BIN))
            batches, steps = self._steps.setdefault(size, (_Robust(_BIN_SAMPLES), _Robust(_BIN_SAMPLES)))
            batches.add(worker.decode_batch)
            steps.add(worker.decode_step_s)
            self._lines.clear()
            self.kv_tokens = worker.kv_tokens or self.kv_tokens

    def forget(self, alive: set[str]) -> None:
        """Of workers that are gone how much they have worked."""
        self._works = {key: works for key, works in self._works.items() if key[0] in alive}

    @property
    def prefill_tokens_s(self) -> float | None:
        """Prompt tokens a second of one prefill worker while it computes; the upper quartile, for a step
        that is not full is slower by the token. None: not known yet."""
        values = self._prefill.values
        if len(values) < _KNOWN:
            return None
        if self._speed is None:
            self._speed = quantiles(values, n=4)[2]
        return self._speed

    def decode(self, tpot_s: float, tokens: float, *, careful: bool = False) -> DecodeCapacity | None:
        """With steps within `tpot_s`, of sequences of so many tokens. `careful`: not far beyond what was
        seen, where steps are supposed to grow at least half as batches do. None: not known yet."""
        line = self._line(_PRIOR_SLOPE if careful else 0.0)
        if line is None:
            return None
        reach = _CAREFUL_REACH if careful else _REACH
        base_s, each_s, largest = line
        fast = (tpot_s - base_s) / each_s if each_s > 0 else math.inf
        limits = [
            (max(1.0, fast), f"steps within {tpot_s * 1000:.0f} ms"),
            (max(_LEAST_REACH, reach * largest), f"{reach:g} times the {largest:.0f} that were seen"),
        ]
        if self.kv_tokens and tokens > 0:
            limits.append((max(1.0, 0.9 * self.kv_tokens / tokens), "room for KV"))
        batch, why = min(limits)
        return DecodeCapacity(batch, base_s + each_s * batch, base_s, each_s, why)

    def _line(self, steep: float) -> tuple[float, float, float] | None:
        """Seconds of a step without sequences, seconds for each, and the largest batch that was seen: least
        squares through the medians of the bins, weighted by their samples, neither part below zero; of a
        step of the mean batch at least the share `steep` is proportional to it."""
        if steep in self._lines:
            return self._lines[steep]
        points = [
            (median(batches.values), median(steps.values), len(steps.values))
            for _, (batches, steps) in sorted(self._steps.items())
            if steps.values
        ]
        if sum(count for _, _, count in points) < _KNOWN:
            return None
        weight = sum(count for _, _, count in points)
        mean_x = sum(x * count for x, _, count in points) / weight
        mean_y = sum(y * count for _, y, count in points) / weight
        spread = sum(count * (x - mean_x) ** 2 for x, _, count in points)
        if spread > (0.2 * mean_x) ** 2 * weight:
            each = sum(count * (x - mean_x) * (y - mean_y) for x, y, count in points) / spread
        else:
            each = _PRIOR_SLOPE * mean_y / max(mean_x, _PRIOR_BATCH)
        each = min(max(steep * mean_y / mean_x, each), mean_y / mean_x)
        found = mean_y - each * mean_x, each, max(x for x, _, _ in points)
        self._lines[steep] = found
        return found
