"""How much will be asked: level, trend and season of a rate, each plain. Pure.

Level and trend are discounted regression (Brown, "Smoothing, Forecasting and Prediction of Discrete Time
Series", 1963): the level is the mean of late, the trend a line through it, used only where it is clearly more
than noise. The season is a profile: what was asked at this time of earlier seasons, scaled by how the present
one compares (the multiplicative form of Winters, 1960).
"""

from __future__ import annotations

import math

_LEVEL_S = 45.0
"""Over which the level is a mean."""
_TREND_S = 150.0
"""Over which the trend is a line."""
_CLEAR = 3.0
"""Times its standard error that a trend must be to count: it is looked at again and again, so that a smaller
number would find one in any noise."""
_POINTS = 20
"""Of which a line is made at least."""
_MOST_GROWTH = 1.0
"""Share of the level by which a trend may be expected to add, however steep."""
_SLOTS = 288
"""Of a season: five minutes of a day."""
_SLOT_WEIGHT = 0.5
"""Of the newest season in the profile."""
_MOST_SCALE = 2.0


class Forecast:
    """Of one rate, a second."""

    level_of_s = 2 * _LEVEL_S
    """Seconds of which a plain mean would be as steady as the level is."""

    def __init__(self, season_s: float) -> None:
        self._season_s = season_s
        self._since: float | None = None
        self._at = 0.0
        self._level_weight = self._level_sum = 0.0
        # Weighted sums of 1, t, t², y, ty, y², with t counted from `_at`.
        self._line = [0.0] * 6
        self._profile: dict[int, float] = {}
        self._usual_weight = self._usual_sum = 0.0
        """Of the profile what the level is of the rate: as late, so that the two can be compared."""
        self._slot: int | None = None
        self._slot_sum = self._slot_seconds = 0.0

    def add(self, count: float, seconds: float, now: float) -> None:
        """So many came in the last `seconds`."""
        if seconds <= 0:
            return
        rate = count / seconds
        self._since = now - seconds if self._since is None else self._since
        passed, self._at = max(0.0, now - self._at), now
        keep = math.exp(-seconds / _LEVEL_S)
        self._level_weight = self._level_weight * keep + (1 - keep)
        self._level_sum = self._level_sum * keep + (1 - keep) * rate
        # Shifted so that now is 0, older ones negative.
        n, t, tt, y, ty, yy = self._line
        t, tt, ty = t - passed * n, tt - 2 * passed * t + passed * passed * n, ty - passed * y
        fade, middle = math.exp(-seconds / _TREND_S), -seconds / 2
        self._line = [
            n * fade + 1,
            t * fade + middle,
            tt * fade + middle * middle,
            y * fade + rate,
            ty * fade + middle * rate,
            yy * fade + rate * rate,
        ]
        self._season(count, seconds, now)
        usual = self._profile.get(self._slot_of(now))
        if usual is not None:
            self._usual_weight = self._usual_weight * keep + (1 - keep)
            self._usual_sum = self._usual_sum * keep + (1 - keep) * usual

    @property
    def level(self) -> float | None:
        """The rate of late; None: nothing was seen."""
        return self._level_sum / self._level_weight if self._level_weight else None

    @property
    def trend(self) -> float:
        """By which the rate changes a second; 0 where that is not clear."""
        n, t, tt, y, ty, yy = self._line
        spread = tt - t * t / n if n else 0.0
        if n < _POINTS or spread <= 0:
            return 0.0
        slope = (ty - t * y / n) / spread
        left = max(0.0, (yy - y * y / n) - slope * slope * spread)
        error = math.sqrt(left / n / spread)
        return slope if abs(slope) > _CLEAR * error else 0.0

    def at(self, ahead_s: float) -> float | None:
        """The rate to be ready for in so many seconds, never below the present one: what is to come is no
        reason to have less now."""
        level = self.level
        if level is None:
            return None
        # The level is a mean, as old as its weight.
        grown = level + min(max(0.0, self.trend) * (_LEVEL_S + ahead_s), _MOST_GROWTH * level)
        return max(level, grown, self._seasonal(level, ahead_s) or 0.0)

    def _seasonal(self, level: float, ahead_s: float) -> float | None:
        """None: no season was seen whole yet."""
        if self._since is None or self._at - self._since < self._season_s:
            return None
        there = self._profile.get(self._slot_of(self._at + ahead_s))
        usual = self._usual_sum / self._usual_weight if self._usual_weight else 0.0
        if there is None or not usual:
            return there
        return there * min(_MOST_SCALE, max(1 / _MOST_SCALE, level / usual))

    def _slot_of(self, now: float) -> int:
        return int(now / self._season_s * _SLOTS) % _SLOTS

    def _season(self, count: float, seconds: float, now: float) -> None:
        slot = self._slot_of(now)
        if slot != self._slot and self._slot is not None and self._slot_seconds:
            rate = self._slot_sum / self._slot_seconds
            before = self._profile.get(self._slot, rate)
            self._profile[self._slot] = before + _SLOT_WEIGHT * (rate - before)
            self._slot_sum = self._slot_seconds = 0.0
        self._slot = slot
        self._slot_sum += count
        self._slot_seconds += seconds


class Rate:
    """Of what came over so many seconds, the newest weighing most."""

    def __init__(self, tau_s: float) -> None:
        self._tau_s = tau_s
        self._sum = self._seconds = 0.0

    def add(self, total: float, seconds: float) -> None:
        keep = math.exp(-seconds / self._tau_s)
        self._sum = self._sum * keep + total
        self._seconds = self._seconds * keep + seconds

    @property
    def value(self) -> float | None:
        """A second; None: no time has passed."""
        return self._sum / self._seconds if self._seconds else None


_MEAN_OF = 25.0
"""Of so many a mean is at least, however long ago they came: of fewer it would be noise."""


class Mean:
    """A mean over what came of late: of `tau_s` seconds or the `least` last ones, weighted by counts."""

    def __init__(self, tau_s: float, least: float = _MEAN_OF) -> None:
        self._tau_s = tau_s
        self._least = least
        self._sum = self._count = 0.0

    def add(self, total: float, count: float, seconds: float) -> None:
        if count > 0:
            # Where little comes little is forgotten.
            keep = max(math.exp(-seconds / self._tau_s), math.exp(-count / self._least))
            self._sum = self._sum * keep + total
            self._count = self._count * keep + count

    @property
    def count(self) -> float:
        return self._count

    @property
    def value(self) -> float | None:
        return self._sum / self._count if self._count else None
