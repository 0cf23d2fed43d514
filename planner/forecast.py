"""How much will be asked: level, trend and season of a rate, each plain. Pure.

Level and trend are of a window without a clear change in it (`planner.recent`). The trend is damped: one that
was seen over some minutes lasts about as long (Gardner and McKenzie, "Forecasting Trends in Time Series",
1985). The season is a profile: what was asked at this time of earlier seasons, scaled by how the present one
compares (the multiplicative form of Winters, 1960).
"""

from __future__ import annotations

import math

from planner.recent import Recent

_LEVEL_S = 45.0
"""Over which the season's profile is a mean where it is compared with the level."""
_WINDOW_S = 300.0
"""Longest that the level is a mean of."""
_SHORTEST_S = 40.0
"""What came in so long and longer counts where it is likely more: it may have begun to rise."""
_LEAST = 8.0
"""Requests that must have come, or stayed away, before a change is believed."""
_LASTS_S = 150.0
"""For which a trend goes on: time constant of its damping."""
_MOST_GROWTH = 1.0
"""Share of the level by which a trend may be expected to add, however steep."""
_SLOTS = 288
"""Of a season: five minutes of a day."""
_SLOT_WEIGHT = 0.5
"""Of the newest season in the profile."""
_MOST_SCALE = 2.0


_UNSEEN = 0.5
"""Rises that count as seen from the beginning: none in so long is no proof that there is none (Jeffreys)."""


class Forecast:
    """Of one rate, a second."""

    def __init__(self, season_s: float) -> None:
        self._season_s = season_s
        self._since: float | None = None
        self._at = 0.0
        self._recent = Recent(_WINDOW_S, _LEAST, counts=True)
        self._rises = Rate(season_s)
        self._rises.add(_UNSEEN, 0.0)
        self._profile: dict[int, float] = {}
        self._usual_weight = self._usual_sum = 0.0
        """Of the profile what the level is of the rate: as late, so that the two can be compared."""
        self._slot: int | None = None
        self._slot_sum = self._slot_seconds = 0.0

    def add(self, count: float, seconds: float, now: float) -> None:
        """So many came in the last `seconds`."""
        if seconds <= 0:
            return
        self._since = now - seconds if self._since is None else self._since
        self._at = now
        self._recent.add(now, seconds, count)
        self._rises.add(float(self.changed_at == now and not self.fell), seconds)
        self._season(count, seconds, now)
        usual = self._profile.get(self._slot_of(now))
        if usual is not None:
            keep = math.exp(-seconds / _LEVEL_S)
            self._usual_weight = self._usual_weight * keep + (1 - keep)
            self._usual_sum = self._usual_sum * keep + (1 - keep) * usual

    @property
    def level(self) -> float | None:
        """The rate of late; None: nothing was seen."""
        value = self._recent.value
        return None if value is None else max(value, self._recent.surely(_SHORTEST_S))

    @property
    def error(self) -> float:
        """Standard error of the level, as a share of it."""
        return self._recent.error

    def newest(self, seconds: float) -> float | None:
        """The rate of the last so many seconds, whatever was before."""
        return self._recent.newest(seconds)

    @property
    def changed_at(self) -> float:
        """When it was last found to be clearly another one."""
        return self._recent.changed_at

    @property
    def fell(self) -> bool:
        """Whether it was a lower one then."""
        return self._recent.fell

    def surprise(self, within_s: float) -> float:
        """The odds that clearly more is asked at once within so many seconds, by how often that was so."""
        rises = self._rises.value
        return 1.0 if rises is None else min(1.0, rises * within_s)

    @property
    def trend(self) -> float:
        """By which the rate changes a second; 0 where that is not clear."""
        return self._recent.trend

    def at(self, ahead_s: float) -> float | None:
        """The rate to be ready for in so many seconds, never below the present one: what is to come is no
        reason to have less now."""
        level = self.level
        if level is None:
            return None
        lasts_s = _LASTS_S * (1 - math.exp(-ahead_s / _LASTS_S))
        grown = level + min(max(0.0, self.trend) * lasts_s, _MOST_GROWTH * level)
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
