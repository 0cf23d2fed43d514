"""The highest rate at which enough requests attain: which rate to try next, and when it is known. Pure.

Doubling brackets it, halving the bracket (in the logarithm) narrows it. A run says whether its rate passes
only where its attainment is clearly on one side of the target; else the same rate is run again and the counts
are added up, until they are clear or `runs` were made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SearchSettings:
    target: float = 0.95
    """Share of the countable requests that must attain."""
    start: float = 1.0
    """First rate, requests a second."""
    least: float = 0.01
    most: float = 10_000.0
    """Bounds of what is tried, requests a second."""
    tolerance: float = 0.05
    """Ends when the lowest rate that failed is at most this much above the highest that passed."""
    runs: int = 3
    """Most runs at one rate."""
    confidence: float = 1.28
    """Standard errors that attainment must be away from the target to be clear after one run; 1.28: one
    run in ten at exactly the target is judged too early. Requests of one run queue behind each other and are
    not independent, so this is less than it says: `runs` and the bracket's confirmation are the answer."""

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise ValueError(f"target is {self.target}; a share between 0 and 1 is needed")
        if not 0 < self.least <= self.start <= self.most < math.inf:
            raise ValueError("least, start and most are rates above 0, in this order")
        if not self.tolerance > 0 or self.runs < 1:
            raise ValueError("tolerance is above 0, and runs at least 1")


@dataclass(frozen=True, slots=True)
class Trial:
    """One run."""

    rate: float
    attained: int
    missed: int
    kept_up: bool = True
    """Whether the generator did; else the run says nothing of the server."""
    goodput: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Further figures, for who reads the table."""

    @property
    def attainment(self) -> float | None:
        counted = self.attained + self.missed
        return self.attained / counted if counted else None


@dataclass(frozen=True, slots=True)
class Next:
    rate: float | None
    """None: it is over."""
    why: str


@dataclass(slots=True)
class Search:
    """`apply` what a run gave; `next` says what to run."""

    settings: SearchSettings = field(default_factory=SearchSettings)
    trials: list[Trial] = field(default_factory=list)

    def apply(self, trial: Trial) -> None:
        self.trials.append(trial)

    @property
    def passed(self) -> float | None:
        """The highest rate that passed, below every one that failed."""
        failed = self.failed
        rates = [
            rate for rate in self._rates() if self.verdict(rate) is True and (failed is None or rate < failed)
        ]
        return max(rates, default=None)

    @property
    def failed(self) -> float | None:
        """The lowest rate that failed."""
        return min((rate for rate in self._rates() if self.verdict(rate) is False), default=None)

    @property
    def reach(self) -> float | None:
        """The lowest rate at which the generator never kept up, so that nobody knows whether it passes."""
        return min((rate for rate in self._rates() if self._out_of_reach(rate)), default=None)

    def next(self) -> Next:
        """What to run now, and why."""
        settings = self.settings
        if not self.trials:
            return Next(settings.start, "the first rate")
        last = self.trials[-1]
        if self.verdict(last.rate) is None and not self._out_of_reach(last.rate):
            why = "is too close to call" if last.kept_up else "was too much for the generator in this run"
            return Next(last.rate, f"{last.rate:.4g}/s {why}: again")
        passed, failed, reach = self.passed, self.failed, self.reach
        fails = "fails"
        if reach is not None and (failed is None or reach < failed):
            failed, fails = reach, "is more than the generator can do here"
        if failed is None:
            assert passed is not None
            if passed >= settings.most:
                return Next(None, f"the most that was to be tried, {settings.most:.4g}/s, passes")
            return Next(min(passed * 2, settings.most), f"{passed:.4g}/s passes: twice as much")
        if passed is None:
            if failed <= settings.least:
                return Next(None, f"even {settings.least:.4g}/s, the least that these runs can tell, {fails}")
            return Next(max(failed / 2, settings.least), f"{failed:.4g}/s {fails}: half as much")
        if failed <= passed * (1 + settings.tolerance):
            return Next(None, f"{passed:.4g}/s passes and {failed:.4g}/s {fails}")
        return Next(math.sqrt(passed * failed), f"between {passed:.4g}/s, which passes, and {failed:.4g}/s")

    def verdict(self, rate: float) -> bool | None:
        """Whether a rate passes, all its runs together; None: not clear yet, or never tried."""
        tried = [one for one in self.trials if one.rate == rate]
        here = [one for one in tried if one.kept_up]
        attained, missed = sum(one.attained for one in here), sum(one.missed for one in here)
        if not attained + missed:
            # Runs in which nothing could be counted attain nothing.
            return False if here and len(tried) >= self.settings.runs else None
        settings = self.settings
        low, high = wilson(attained, attained + missed, settings.confidence)
        if low >= settings.target:
            return True
        if high < settings.target:
            return False
        if len(tried) >= settings.runs:
            return attained / (attained + missed) >= settings.target
        return None

    def _out_of_reach(self, rate: float) -> bool:
        here = [one for one in self.trials if one.rate == rate]
        return len(here) >= self.settings.runs and not any(one.kept_up for one in here)

    def _rates(self) -> set[float]:
        return {one.rate for one in self.trials}


def wilson(good: int, total: int, errors: float) -> tuple[float, float]:
    """Interval of a share, so many standard errors wide (Wilson, 1927)."""
    share, square = good / total, errors * errors
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = errors / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def hopeless_after(expected: int, target: float, confidence: float) -> int:
    """Misses with which a run of so many requests has failed for sure, were all others good: it may end."""
    for missed in range(expected + 1):
        if wilson(expected - missed, expected, confidence)[1] < target:
            return missed
    return expected


def last_facts(trials: Sequence[Trial], rate: float | None) -> dict[str, Any] | None:
    """The figures of the last run at that rate."""
    return next((one.facts for one in reversed(trials) if one.rate == rate), None)
