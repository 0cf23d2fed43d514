"""A mean of late, over as long as nothing has clearly changed: steady where nothing does, new at once where
something does. Pure.

Observations of late are kept in a window. Whenever the newest of them are clearly others than those before,
the older ones are dropped (as ADWIN does: Bifet and Gavaldà, "Learning from Time-Changing Data with Adaptive
Windowing", 2007; here with normal bounds). A mean of a fixed time is both noisy where
nothing changes and late where something does.
"""

from __future__ import annotations

import math
from collections import deque

_SURE = 4.0
"""Standard errors by which the newest must differ: they are looked at again and again."""
_CLEAR = 2.5
"""The same of a trend."""
_LIKELY = 1.0
"""Standard errors by which a value is likely not less."""
_POINTS = 12
"""Observations that make a line."""
_BENDS = 4
"""Observations from one time at which a rise may have begun to the next."""
_MOST = 3.0
"""Times the mean that a trend's end is at most."""
_FLOOR = 0.02
"""Share of the mean that the deviation of single ones is at least taken to be."""
_DOUBT = 0.5
"""Weight of what was before, as a share of that of what is new, when a change is found."""
_NEW = 0.02
"""Weight of the newest observation in how counts vary."""

Row = tuple[float, float, float, float]
"""When it was seen, its weight, the sum of its values, and of their squares."""


class Recent:
    """Of something that is seen now and then, each time with a weight: how many there were, or seconds."""

    def __init__(self, longest_s: float, least: float, *, counts: bool) -> None:
        """The window is so many seconds, or longer, until it has the weight `least`; so much has to be seen
        before a change is believed. `counts`: values are counts of what comes by itself (Poisson) in a time,
        which is the weight, and there may be a trend in them."""
        self._longest_s = longest_s
        self._least = least
        self._counts = counts
        self._rows: deque[Row] = deque()
        # Of counts: variance and mean of one observation's, over long; at first as if they were Poisson.
        self._spread = self._mean = 1.0
        self._last: float | None = None
        self._trend = self._above = 0.0
        """By how much the value changes a second; and is above the mean by now."""
        self.changed_at = -math.inf
        """When older ones were dropped last as they no longer held."""
        self.fell = False
        """Whether the value was a lower one then."""

    def add(self, now: float, weight: float, total: float, squares: float = 0.0) -> None:
        if weight <= 0:
            return
        rows = self._rows
        rows.append((now, weight, total, squares))
        while len(rows) > 1 and rows[0][0] < now - self._longest_s:
            if not self._counts and self.weight - rows[0][1] < self._least:
                break
            rows.popleft()
        cut = self._cut()
        if cut:
            old = [rows.popleft() for _ in range(cut)]
            before = sum(row[2] for row in old) / sum(row[1] for row in old)
            if self._counts:
                # What stands out most does so by chance as well: it is not believed wholly at first.
                share = _DOUBT * self.weight / sum(row[1] for row in old)
                doubt = [share * sum(row[place] for row in old) for place in (1, 2)]
                rows.appendleft((rows[0][0], doubt[0], doubt[1], 0.0))
            self.changed_at, self._above = now, 0.0
            self.fell = (self.value or 0.0) < before
        slope, sure, above = self._line()
        # Of what may be noise nothing, of what cannot be all of it.
        share = max(0.0, 1 - (_CLEAR / sure) ** 2) if sure else 0.0
        self._trend, self._above = share * slope, share * above
        if self._counts:
            # By how one differs from the one before: steps and trends hardly change it (von Neumann, 1941).
            if self._last is not None:
                self._spread += _NEW * ((total - self._last) ** 2 / 2 - self._spread)
                self._mean += _NEW * ((total + self._last) / 2 - self._mean)
            self._last = total

    @property
    def weight(self) -> float:
        return sum(row[1] for row in self._rows)

    @property
    def value(self) -> float | None:
        """None: nothing was seen. Of counts by the second, as of now: a trend is followed to the end."""
        weight = self.weight
        if not weight:
            return None
        mean = sum(row[2] for row in self._rows) / weight
        return max(mean / 2, min(_MOST * mean, mean + self._above))

    def surely(self, least: float) -> float:
        """Of counts: what the value likely is at least, by the newest that weigh `least` or more. Where it
        rises little by little these show it before it can be told from noise."""
        seen = total = best = 0.0
        for _, one, of_it, _ in reversed(self._rows):
            seen, total = seen + one, total + of_it
            if seen >= least:
                mean = total / seen
                best = max(best, mean - _LIKELY * math.sqrt(self._clumps * mean / seen))
        return best

    def newest(self, weight: float) -> float | None:
        """Mean of the newest that weigh so much together, or a little more."""
        seen = total = 0.0
        for _, one, of_it, _ in reversed(self._rows):
            seen, total = seen + one, total + of_it
            if seen >= weight:
                break
        return total / seen if seen else None

    @property
    def trend(self) -> float:
        """Of counts: by which the rate changes a second; 0 where that is not clear."""
        return self._trend

    @property
    def scv(self) -> float:
        """Squared coefficient of variation of single ones; of counts for which there are no squares 0."""
        value, weight = self.value, self.weight
        if not value or self._counts:
            return 0.0
        return max(0.0, sum(row[3] for row in self._rows) / weight / (value * value) - 1)

    @property
    def error(self) -> float:
        """Standard error of the value, as a share of it."""
        value, weight = self.value, self.weight
        if not value:
            return 1.0
        square = sum(row[3] for row in self._rows)
        return math.sqrt(self._variance(weight, value * weight, square) / weight) / value

    @property
    def _clumps(self) -> float:
        """Of counts: variance over mean; 1 where what comes knows nothing of each other."""
        return max(1.0, self._spread / self._mean)

    def _variance(self, weight: float, total: float, square: float) -> float:
        """Of one unit of weight."""
        mean = total / weight
        if self._counts:
            return self._clumps * mean
        return max(square / weight - mean * mean, (_FLOOR * mean) ** 2)

    def _cut(self) -> int:
        """How many of the oldest no longer hold."""
        _, weights, totals, squares = zip(*self._rows, strict=True)
        weight, total, square = sum(weights), sum(totals), sum(squares)
        clumps = self._clumps
        new_weight = new_total = new_square = 0.0
        best, most = 0, _SURE
        for place in range(len(weights) - 1, 0, -1):
            new_weight += weights[place]
            new_total += totals[place]
            new_square += squares[place]
            old_weight, old_total = weight - new_weight, max(0.0, total - new_total)
            # Of counts so many that came, or that would have come before.
            seen = max(new_total, old_total * new_weight / old_weight) if self._counts else new_weight
            if place > len(weights) - 2 or seen < self._least or old_weight < min(new_weight, self._least):
                continue
            old, new = old_total / old_weight, new_total / new_weight
            if self._counts:
                # Of the root of a count the variance is a quarter, however many there are (Bartlett, 1936).
                differs, variance = abs(math.sqrt(new) - math.sqrt(old)), clumps / 4
            else:
                before = self._variance(old_weight, old_total, square - new_square)
                differs = abs(new - old)
                variance = max(before, self._variance(new_weight, new_total, new_square))
            differs /= math.sqrt(variance * (1 / old_weight + 1 / new_weight)) or math.inf
            if differs > most:
                best, most = place, differs
        if best and self._counts and self._line(bent=False)[1] > most:
            return 0  # It is a line, and not a step.
        return best

    def _line(self, *, bent: bool = True) -> tuple[float, float, float]:
        """Of counts: of a line through them, or, if `bent`, of a rise that began at some time after a level,
        whichever is clearer; how many times its standard error that is, and how far above it ends."""
        best = 0.0, 0.0, 0.0
        if not self._counts or len(self._rows) < _POINTS:
            return best
        times, weights, totals, _ = zip(*self._rows, strict=True)
        weight, total = sum(weights), sum(totals)
        mean = total / weight
        for begun in range(0, len(times) - _POINTS + 1 if bent else 1, _BENDS):
            ages = [max(0.0, at - times[begun]) for at in times]
            middle = sum(age * share for age, share in zip(ages, weights, strict=True)) / weight
            apart = [age - middle for age in ages]
            spread = sum(share * one * one for one, share in zip(apart, weights, strict=True))
            moved = sum(
                one * (count - mean * share) for one, count, share in zip(apart, totals, weights, strict=True)
            )
            if begun and moved < 0:
                continue  # What falls is not urgent.
            early_s, early = sum(weights[:begun]), sum(totals[:begun])
            late = max(0.0, total - early) / (weight - early_s)
            # As where steps are looked for: of roots.
            root = (math.sqrt(early / early_s if begun else late) + math.sqrt(late)) / 2
            error = root * math.sqrt(self._clumps * spread)
            if error and abs(moved) / error > best[1]:
                slope = moved / spread
                best = slope, abs(moved) / error, slope * apart[-1]
        return best
