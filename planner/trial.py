"""Fewer workers than the model asks for, where what was measured says that they may do: one at a time. Pure.

The model plans with margins: for noise in what is asked, for half of the misses that are allowed, for the
longest prompts. In a small pool they cost a whole worker. Where next to no requests missed for long enough,
one fewer is tried. While it does, what noise makes of the model's answer is not followed; when it does not,
that is remembered.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from planner.needs import Typical
from planner.words import ROLES, Observation, PlannerSettings

_EVIDENCE = 60
"""Requests that must have been judged: where none of so many missed, hardly ever more than one in twenty does
(the rule of three)."""
_WELL = 0.25
"""Share of the misses that are allowed up to which a pool is well above what it has to be."""
_ERRORS = 3.0
"""Standard errors by which misses must be more than they may: they are looked at again and again."""
_OVER_S = (60.0, 600.0)
"""Time constants of the two means that misses are judged by: what breaks, and what wears."""
_GROWN = 1.1
"""Times the load that fewer were tried at, from which on they have been tried at something else, where that
is more than noise."""
_LESS = 0.8
"""Times the load that too few were found at, below which they may do."""
_SURE_S = 60.0
"""For which it must have been worth a trial: what a worker can do is known with noise."""
_EARLY_S = 1800.0
"""A trial that is over so soon is not to be repeated at once, whatever ended it."""
_CORRECTED = 1.05
"""A correction for misses from which on nothing is tried."""


@dataclass(slots=True)
class _Tried:
    """Of one role."""

    faults: list[float] = field(default_factory=lambda: [0.0] * len(_OVER_S))
    """Requests that missed by it, over each of these times."""
    least: deque[tuple[float, int]] = field(default_factory=deque)
    """When, and with how many it was worth trying."""
    proposed: int | None = None
    count: int | None = None
    """Workers that are there by a trial."""
    load: float = 0.0
    """That they were tried at."""
    at: float = -math.inf
    barred: int = 0
    """So many, and fewer, are not tried again at this load until then."""
    barred_load: float = 0.0
    barred_until: float = -math.inf
    too_few: bool = False
    """Whether they missed: then there must be more of them, too."""


@dataclass(slots=True)
class Trials:
    """A fold of what requests of late became. Belongs to one planner."""

    settings: PlannerSettings
    pools: dict[str, _Tried] = field(default_factory=lambda: {role: _Tried() for role in ROLES})
    _since: float = -math.inf
    """Since when both counts have been as they are, with all of them ready."""
    _wanted: dict[str, int] = field(default_factory=dict)
    _counted: list[float] = field(default_factory=lambda: [0.0] * len(_OVER_S))

    def runs(self, role: str) -> bool:
        return self.pools[role].count is not None

    def learn(
        self, seen: Observation, typical: Typical | None, counted: int, faults: dict[str, int], now: float
    ) -> None:
        """`faults`: of `counted` since the observation before, requests that missed by each pool's fault."""
        wanted = {role: seen.pool(role).wanted for role in ROLES}
        before, self._wanted = self._wanted, wanted
        for role, pool in self.pools.items():
            if pool.proposed == wanted[role] and before.get(role) == wanted[role] + 1 and typical is not None:
                pool.count, pool.load, pool.at = wanted[role], typical.load[role], now
            elif pool.count is not None and wanted[role] != pool.count:
                # It was more than a trial that took them: what is asked has changed, or an operator has.
                if wanted[role] > pool.count and typical is not None:
                    self._end(pool, typical.load[role], now)
                pool.count = None
            if wanted[role] != before.get(role):
                pool.proposed = None
        if wanted != before or any(seen.pool(role).starting for role in ROLES):
            self._since, self._counted = now, [0.0] * len(_OVER_S)
            for pool in self.pools.values():
                pool.faults = [0.0] * len(_OVER_S)
            return
        keep = [math.exp(-seen.asked.seconds / over_s) for over_s in _OVER_S]
        self._counted = [one * left + counted for one, left in zip(self._counted, keep, strict=True)]
        for role, pool in self.pools.items():
            pool.faults = [one * left + faults[role] for one, left in zip(pool.faults, keep, strict=True)]
            if typical is None:
                continue
            pool.least.append((now, typical.least[role]))
            while pool.least[0][0] < now - _SURE_S:
                pool.least.popleft()
            if pool.count is not None and self._too_many(pool):
                self._end(pool, min(pool.load, typical.load[role]), now, missed=True)

    def _too_many(self, pool: _Tried) -> bool:
        """Whether clearly more missed than half of the misses that are allowed."""
        for faults, counted in zip(pool.faults, self._counted, strict=True):
            allowed = (1 - self.settings.target) / 2 * counted
            if faults > 1 + allowed + _ERRORS * math.sqrt(allowed):
                return True
        return False

    def _end(self, pool: _Tried, load: float, now: float, *, missed: bool = False) -> None:
        assert pool.count is not None
        if missed or now - pool.at < _EARLY_S:
            pool.barred, pool.barred_load, pool.too_few = pool.count, load, missed
            pool.barred_until = now + self.settings.trial_again_s
        pool.count = None

    def needed(
        self, role: str, needed: int, wanted: int, typical: Typical | None, now: float
    ) -> tuple[int, str]:
        """How many are needed by the model and by what was tried; and why, where that differs."""
        pool = self.pools[role]
        if typical is None:
            return needed, ""
        load = typical.load[role]
        if (
            pool.too_few
            and now < pool.barred_until
            and needed <= pool.barred
            and load > _LESS * pool.barred_load
        ):
            return pool.barred + 1, f"{pool.barred} {role} were tried, and too many requests missed"
        if pool.count is None or pool.count != wanted or needed <= wanted:
            return needed, ""
        if typical.strained[role]:
            return needed, f"{wanted} {role} were tried, and are overrun"
        most = max(_GROWN, 1 + _ERRORS * typical.noise) * pool.load
        if max(load, typical.now[role]) > most or load * typical.growth > most:
            return needed, ""
        faults, counted = pool.faults[-1], self._counted[-1]
        if counted < _EVIDENCE:
            return wanted, f"{wanted} {role} are tried instead"
        return (
            wanted,
            f"{wanted} {role} do: {1 - faults / counted:.1%} of {counted:.0f} requests did not miss by them",
        )

    def propose(
        self, seen: Observation, typical: Typical | None, pressure: tuple[float, float],
        settle_s: dict[str, float], least: dict[str, int], now: float,
    ) -> tuple[str, str] | None:  # fmt: skip
        """The role of which one fewer is to be tried now, and why; None: of none."""
        settings = self.settings
        counted = self._counted[-1]
        if not settings.trials or typical is None or counted < _EVIDENCE:
            return None
        allowed = (1 - settings.target) * counted
        missed = sum(pool.faults[-1] for pool in self.pools.values())
        if missed > allowed / 2:
            return None
        for role, correction in zip(ROLES, pressure, strict=True):
            pool, fewer, load = self.pools[role], seen.pool(role).wanted - 1, typical.load[role]
            barred = fewer <= pool.barred and now < pool.barred_until and load > _LESS * pool.barred_load
            if (
                fewer < max(1, least[role], *(many for _, many in pool.least))
                or barred
                or now - self._since < settle_s[role]
                or pool.faults[-1] > _WELL * allowed
                or correction > _CORRECTED
                or typical.strained[role]
                or typical.growth > 1
                # If more is asked at once than those there can do, one of them lacks until another starts.
                or missed + typical.surprise / (fewer + 1) * counted > allowed
                or typical.now[role] > load  # It may be rising, though that is not clear yet.
            ):
                continue
            pool.proposed = fewer
            return role, (
                f"{fewer} {role} are tried, as {1 - pool.faults[-1] / counted:.1%} of {counted:.0f} "
                f"requests did not miss by {fewer + 1}"
            )
        return None
