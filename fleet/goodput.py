"""Goodput: what a request's outcome was, whether it attained its objectives, and the figures of many. Pure.

The one definition for what serves, what is simulated and what is measured from outside. TTFT: accepted by
the ingress → first token written to the client. ITL: gap between two tokens as the client sees them. TPOT:
(last − first) / (tokens − 1). E2E: accepted → last byte. Goodput: requests a second that finished properly
and met every objective of their class. What was never reached is absent, never zero.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

from fleet.objectives import Objectives
from fleet.stages import Stage, Timeline


class End(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    """The client went away."""
    REJECTED = "rejected"
    """Refused for load: 429."""
    TIMED_OUT = "timed_out"
    FAILED = "failed"
    INVALID = "invalid"
    """The client's own error: no fleet however fast could have served it, so it counts on neither side."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. Seconds since its acceptance."""

    end: End
    ended_s: float
    """Last byte, or when it was given up."""
    times: Sequence[float] = ()
    """When each token was written to the client."""
    stages: Mapping[Stage, float] = field(default_factory=dict)
    """Those that were reached."""

    @classmethod
    def of(cls, timeline: Timeline, times: Sequence[float], end: End, now: float) -> Outcome:
        return cls(end, now - timeline.start, times, timeline.marks)

    @property
    def ttft_s(self) -> float | None:
        return self.times[0] if self.times else None

    @property
    def tpot_s(self) -> float | None:
        """None for fewer than two tokens."""
        count = len(self.times)
        return (self.times[-1] - self.times[0]) / (count - 1) if count > 1 else None

    @property
    def e2e_s(self) -> float | None:
        """None unless it finished."""
        return self.ended_s if self.end is End.FINISHED else None

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]

    def as_dict(self) -> dict[str, Any]:
        figures = {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "e2e_s": self.e2e_s}
        return {
            "end": self.end.value,
            "tokens": len(self.times),
            **{name: round(value, 6) for name, value in figures.items() if value is not None},
            "stages": {stage.value: round(at, 6) for stage, at in self.stages.items()},
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a request attained its objectives, and why."""

    attained: bool | None
    """None: it counts on neither side."""
    missed: tuple[str, ...]
    """Of ttft, tpot, itl, e2e, and ends other than a proper one: few names, fit for labels."""
    why: str


def attains(outcome: Outcome, objectives: Objectives) -> Verdict:
    """Cancelled before it missed anything: on neither side. An answer of one token has no TPOT."""
    end = outcome.end
    if end is End.INVALID:
        return Verdict(None, (), "the request itself was at fault")
    late = _late(outcome, objectives)
    why = ", ".join(late.values())
    if end is End.FINISHED:
        return Verdict(not late, tuple(late), why or "every objective was met")
    if end is End.CANCELLED:
        if not late:
            return Verdict(None, (), "cancelled before it missed an objective")
        return Verdict(False, tuple(late), f"cancelled after it missed: {why}")
    return Verdict(False, (end.value, *late), f"{end.value.replace('_', ' ')}{', ' if why else ''}{why}")


def _late(outcome: Outcome, objectives: Objectives) -> dict[str, str]:
    """Objective → by how much it was missed, as far as the request went."""
    late: dict[str, str] = {}

    def judge(name: str, seconds: float | None, limit_ms: float | None) -> None:
        # Equal is met, and the last bits of a float are not to decide it.
        if seconds is not None and limit_ms is not None and seconds * 1000 > limit_ms * (1 + 1e-9):
            late[name] = f"{name} {seconds * 1000:.0f} ms > {limit_ms:g} ms"

    finished, times = outcome.end is End.FINISHED, outcome.times
    # What a client did not wait for any longer it had waited for until then.
    judge("ttft", outcome.ttft_s if times or finished else outcome.ended_s, objectives.ttft_ms)
    tpot = outcome.tpot_s
    if times and not finished:
        # Had the next token come at that moment, this would have been its TPOT.
        tpot = max(tpot or 0.0, (outcome.ended_s - times[0]) / len(times))
    judge("tpot", tpot, objectives.tpot_ms)
    if objectives.itl_ms is not None and len(times) > 1:
        judge("itl", percentile(sorted(outcome.gaps), objectives.itl_percentile), objectives.itl_ms)
    judge("e2e", outcome.ended_s, objectives.e2e_ms)
    return late


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest of ascending samples, at least one, that so many percent do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


_GROWTH = 1.05
_LEAST_S = 1e-4
_SCALE = 1 / math.log(_GROWTH)
_SHIFT = math.log(_LEAST_S) * _SCALE


class Histogram:
    """Durations in buckets that each are 5 % wider than the one before: a percentile is told within 2.5 %,
    and 3 µs where it is very short. Some 430 buckets up to a day (Masson et al., "DDSketch", 2019)."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.total = 0

    def add(self, seconds: float) -> None:
        self.counts[int(math.log(seconds + _LEAST_S) * _SCALE - _SHIFT)] += 1
        self.total += 1

    def add_all(self, seconds: Sequence[float]) -> None:
        log = math.log  # hundreds at once: a gap each token
        self.counts.update([int(log(one + _LEAST_S) * _SCALE - _SHIFT) for one in seconds])
        self.total += len(seconds)

    def merge(self, other: Histogram) -> None:
        self.counts.update(other.counts)
        self.total += other.total

    def percentile(self, percent: float) -> float | None:
        """Seconds; None: nothing was added."""
        left = math.ceil(self.total * percent / 100)
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                return float(_LEAST_S * (_GROWTH**bucket * math.sqrt(_GROWTH) - 1))
        return None


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, histogram: Histogram) -> Percentiles | None:
        p50, p90, p99 = (histogram.percentile(percent) for percent in (50, 90, 99))
        return None if p50 is None or p90 is None or p99 is None else cls(p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one class, or of all, over a while."""

    seconds: float
    attained: int
    missed: int
    uncounted: int
    """Cancelled in time, or wrong in themselves."""
    reasons: Mapping[str, int]
    """How often each objective was missed, and each bad end; one request may have several."""
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl: Percentiles | None
    e2e: Percentiles | None

    @property
    def goodput(self) -> float | None:
        """Attaining requests a second. Of one GPU: divide by how many there are."""
        return self.attained / self.seconds if self.seconds > 0 else None

    @property
    def attainment(self) -> float | None:
        """None: nothing that counts has ended."""
        counted = self.attained + self.missed
        return self.attained / counted if counted else None

    def burn_rate(self, target: float) -> float | None:
        """How many times faster than allowed the budget of misses is used up. `target` as 0.95."""
        return None if self.attainment is None else (1 - self.attainment) / (1 - target)


class Tally:
    """Adds outcomes up. Bounded, however many there are."""

    __slots__ = ("attained", "e2e", "itl", "missed", "reasons", "tpot", "ttft", "uncounted")

    def __init__(self) -> None:
        self.attained = self.missed = self.uncounted = 0
        self.reasons: Counter[str] = Counter()
        self.ttft, self.tpot, self.itl, self.e2e = Histogram(), Histogram(), Histogram(), Histogram()

    def add(self, outcome: Outcome, verdict: Verdict) -> None:
        if verdict.attained is None:
            self.uncounted += 1
        elif verdict.attained:
            self.attained += 1
        else:
            self.missed += 1
            self.reasons.update(verdict.missed)
        for histogram, seconds in (
            (self.ttft, outcome.ttft_s),
            (self.tpot, outcome.tpot_s),
            (self.e2e, outcome.e2e_s),
        ):
            if seconds is not None:
                histogram.add(seconds)
        self.itl.add_all(outcome.gaps)

    def merge(self, other: Tally) -> None:
        self.attained += other.attained
        self.missed += other.missed
        self.uncounted += other.uncounted
        self.reasons.update(other.reasons)
        for mine, theirs in zip(self._histograms(), other._histograms(), strict=True):
            mine.merge(theirs)

    def forget_times(self) -> None:
        """Keeps the counts only."""
        self.ttft, self.tpot, self.itl, self.e2e = Histogram(), Histogram(), Histogram(), Histogram()

    def figures(self, seconds: float) -> Figures:
        return Figures(
            seconds,
            self.attained,
            self.missed,
            self.uncounted,
            dict(self.reasons),
            *(Percentiles.of(histogram) for histogram in self._histograms()),
        )

    def _histograms(self) -> tuple[Histogram, Histogram, Histogram, Histogram]:
        return self.ttft, self.tpot, self.itl, self.e2e


def summarize(outcomes: Iterable[Outcome], objectives: Objectives, seconds: float) -> Figures:
    """The figures of a benchmark or a simulation that took so long."""
    tally = Tally()
    for outcome in outcomes:
        tally.add(outcome, attains(outcome, objectives))
    return tally.figures(seconds)


_SLOT_S = 10.0
_TIMES_S = 600.0
"""How long times are kept for percentiles; counts are kept as long as the longest window needs them."""
WINDOWS_S = (300.0, 1_800.0, 3_600.0, 21_600.0)
BURNING: tuple[tuple[float, float, float], ...] = ((300.0, 3_600.0, 14.4), (1_800.0, 21_600.0, 6.0))
"""(short window, long window, burn rate): the budget burns too fast when both windows do; the short one
says that it still does (Google, "The Site Reliability Workbook", 2018, chapter 5)."""
NEARLY_ALL = 0.72
"""Misses that are too many whatever the target: with one below 95 %, 14.4 times as many as may be are more
than all."""


class Rolling:
    """The figures of one class over the last minutes and hours."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._slots: deque[tuple[float, Tally]] = deque()
        self._timed: deque[tuple[float, Tally]] = deque()

    def add(self, outcome: Outcome, verdict: Verdict, now: float) -> None:
        if not self._slots or now >= self._slots[-1][0] + _SLOT_S:
            slot = (now, Tally())
            self._slots.append(slot)
            self._timed.append(slot)
        self._slots[-1][1].add(outcome, verdict)
        while self._timed[0][0] < now - _TIMES_S:
            self._timed.popleft()[1].forget_times()
        while self._slots[0][0] < now - WINDOWS_S[-1]:
            self._slots.popleft()

    def figures(self, window_s: float, now: float) -> Figures:
        """Times at most of the last ten minutes, and all to within ten seconds."""
        tally, since = Tally(), max(self._since, now - window_s)
        for start, slot in reversed(self._slots):
            if start < now - window_s:
                # It began before the window and is left out whole: so are the seconds that it shares with it.
                since = max(since, start + _SLOT_S)
                break
            tally.merge(slot)
        return tally.figures(now - since)

    def history(self, after: float, now: float) -> list[tuple[float, Figures]]:
        """Since when, and figures, of every ten seconds that began after that and are over, the oldest first;
        of the last ten minutes. Where nothing ended for longer, there is none."""
        return [
            (start, slot.figures(_SLOT_S)) for start, slot in self._timed if after < start <= now - _SLOT_S
        ]

    def counts(self, now: float) -> dict[float, Figures]:
        """Window in seconds → figures without reasons and times, all in one pass: for who asks often."""
        attained = missed = uncounted = 0
        found: dict[float, Figures] = {}
        slots = deque(self._slots)
        for window_s in WINDOWS_S:
            while slots and slots[-1][0] >= now - window_s:
                tally = slots.pop()[1]
                attained += tally.attained
                missed += tally.missed
                uncounted += tally.uncounted
            since = max(self._since, now - window_s)
            if slots:
                since = max(since, slots[-1][0] + _SLOT_S)  # That one is left out whole.
            found[window_s] = Figures(now - since, attained, missed, uncounted, {}, None, None, None, None)
        return found

    def burn_rates(self, target: float, now: float) -> dict[float, float | None]:
        """Window in seconds → burn rate."""
        return {window_s: figures.burn_rate(target) for window_s, figures in self.counts(now).items()}

    def burning(self, target: float, now: float) -> str | None:
        """Why somebody should be called; None: nobody need be."""
        rates = self.burn_rates(target, now)
        for short_s, long_s, limit in BURNING:
            short, long = rates[short_s], rates[long_s]
            if (
                short is not None
                and long is not None
                and min(short, long) > min(limit, NEARLY_ALL / (1 - target))
            ):
                return (
                    f"the budget of {1 - target:.0%} misses burns {short:.1f} times too fast over "
                    f"{short_s / 60:.0f} min and {long:.1f} times over {long_s / 3600:.0f} h"
                )
        return None
