"""How many workers of each role a load needs: from demand and capacity as they were learnt, and why. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.capacity import Capacity
from planner.forecast import Forecast, Mean, Rate
from planner.queueing import aggregated_workers, decode_workers, prefill_workers
from planner.recent import Recent
from planner.words import Observation, PlannerSettings, WorkerSeen

_MIX_S = 30.0
"""Over which answers' lengths and shares are means."""
_LENGTHS_S = 120.0
"""Over which prompts' lengths are a mean while nothing changes."""
_FEW = 8.0
"""Requests whose lengths make a mean that is relied on."""
_ASKED_SHARE = 0.05
"""Share of requests from which on the objectives of their class are planned for."""
_DRAIN_S = 30.0
"""In which queues are to be worked off."""
_MOST_BACKLOG = 0.5
"""Share of what comes anew by which a backlog may add to it, beside one worker: what has piled up while
workers start is no reason for many times as many."""
_QUEUE_S = 0.5
"""Of prompts at a worker that are no backlog."""
_IDLE_S = 0.2
"""Of prompts at each prefill worker, below which these are not what requests wait for."""
_PROGRESS_S = 15.0
"""Over which the number of answers in progress is a mean."""
_MARGIN = 0.9
"""Share of an objective that is planned for; the rest is for hand-off, network and noise."""
_TPOT_MARGIN = 0.8
"""The same of the time per token: a router gives a worker only what it holds in nine of ten cases."""
_LATE_SHARE = 0.5
"""Share of the misses that are allowed which either pool may cause."""
_TYPICAL_S = 180.0
"""Over which the typical load is a mean: as long as fewer workers must be enough."""
_MINUTE_S = 60.0
_TYPICAL_LATE = 5.0
"""Times the misses that are allowed which the model may foresee where fewer are tried: it errs by as much."""
_OVERRUN = 2.0
"""Times the time to the first token that prompts wait where prefill workers are overrun."""
_OVERFULL = 1.25
"""Times the sequences that decode workers are to have."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Workers that a load needs, whatever there may be."""

    prefill: int
    decode: int
    why: str
    aggregated: int | None = None
    """Workers that would do without a split; None: unknown, or none would."""

    def of(self, role: str) -> int:
        return self.prefill if role == "prefill" else self.decode


@dataclass(frozen=True, slots=True)
class Typical:
    """What is asked over some minutes, by role, without what a minute more or less makes of it."""

    load: dict[str, float]
    """Prefill: workers' worth of computing. Decode: answers in progress, at the steps of a full batch."""
    least: dict[str, int]
    """Workers with which it is worth trying, by the model for that load and without its margins."""
    now: dict[str, float]
    """The load of the last minute."""
    noise: float
    """Standard deviation of how that compares with an earlier typical load, where nothing changes."""
    surprise: float
    """The odds that clearly more is asked at once, before another worker could serve."""
    growth: float
    """Times the present rate that is foreseen; 1: no more than now."""
    strained: dict[str, bool]
    """Whether those who are there are overrun at this moment."""


class Load:
    """A fold of what is asked: how much, of what lengths, with which objectives."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings
        self.arrivals = Forecast(settings.season_s)
        self._prompt = Recent(_LENGTHS_S, _FEW, counts=False)
        self._answer, self._cached = Mean(_MIX_S), Mean(_MIX_S)
        self._typical, self._typical_tokens = Rate(_TYPICAL_S), Rate(_TYPICAL_S)
        self._classes: dict[str, tuple[Mean, float | None, float | None]] = {}
        self._progress: float | None = None
        """Answers in progress, as of late."""
        self._step_s: float | None = None
        """Of a decode step now, on average of the workers."""
        self.idle_since: float | None = None

    def add(self, seen: Observation, now: float) -> None:
        asked = seen.asked
        keep = math.exp(-asked.seconds / _PROGRESS_S) if self._progress is not None else 0.0
        there = sum(_in_progress(one) for one in seen.workers if one.role == "decode")
        self._progress = keep * (self._progress or 0.0) + (1 - keep) * there
        slow = [one.decode_step_s for one in seen.workers if one.role == "decode" and one.decode_step_s]
        self._step_s = sum(slow) / len(slow) if slow else None
        self.arrivals.add(asked.arrived, asked.seconds, now)
        self._prompt.add(now, asked.arrived, asked.prompt_tokens, asked.prompt_squares)
        self._typical.add(asked.arrived, asked.seconds)
        self._typical_tokens.add(asked.prompt_tokens, asked.seconds)
        if self.changed_at == now and (level := self.arrivals.level) is not None:
            # What was typical is so no more.
            self._typical, self._typical_tokens = Rate(_TYPICAL_S), Rate(_TYPICAL_S)
            self._typical.add(level * _MINUTE_S, _MINUTE_S)
            self._typical_tokens.add(level * (self._prompt.value or 0.0) * _MINUTE_S, _MINUTE_S)
        self._cached.add(asked.cached_tokens, asked.ended_tokens, asked.seconds)
        self._answer.add(asked.output_tokens, asked.ended, asked.seconds)
        for name, one in sorted(asked.classes.items()):
            held = self._classes.get(name, (Mean(_MIX_S),))[0]
            self._classes[name] = (held, one.ttft_ms, one.tpot_ms)
        for name, (held, _, _) in self._classes.items():
            arrived = asked.classes[name].arrived if name in asked.classes else 0
            held.add(arrived, asked.arrived, asked.seconds)
        # Who has asked for workers that are still starting is about to ask them.
        limit_s = self._settings.ready_limit_s
        coming = any(pool.starting and pool.short_s < limit_s for pool in (seen.prefill, seen.decode))
        if coming or asked.arrived or asked.running or asked.waiting:
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now

    def objectives(self) -> tuple[float, float]:
        """Time to the first token and time per token to plan for, seconds: the shortest of those that are
        asked for at all often."""
        asked = [
            (ttft_ms, tpot_ms)
            for held, ttft_ms, tpot_ms in self._classes.values()
            if (held.value or 0.0) >= _ASKED_SHARE
        ]
        ttft_ms = min((ttft for ttft, _ in asked if ttft is not None), default=self._settings.ttft_ms)
        tpot_ms = min((tpot for _, tpot in asked if tpot is not None), default=self._settings.tpot_ms)
        return ttft_ms / 1000, tpot_ms / 1000

    def needs(
        self,
        seen: Observation,
        capacity: Capacity,
        ahead_s: float,
        *,
        times: float = 1.0,
        pressure: tuple[float, float] = (1.0, 1.0),
    ) -> Needs | str:
        """For `times` what is expected in `ahead_s`; `pressure`: how many times more each pool is found to
        need than the model says. A text: why that is not known."""
        settings = self._settings
        level = self.arrivals.level
        if level is None:
            return "nothing was told of demand yet"
        rate = times * ((self.arrivals.at(ahead_s) or level) if settings.forecast else level)
        # Where few have come since something changed it may well be more than that.
        likely = max(1.0, (1 + self.arrivals.error) / times)
        ttft_s, tpot_s = self.objectives()
        prompt, answer = self._prompt.value, self._answer.value
        if prompt is None or self._prompt.weight < _FEW / 2:
            return "too few requests came to know how long their prompts are"
        speed = capacity.prefill_tokens_s
        decode = capacity.decode(_TPOT_MARGIN * tpot_s, prompt + (answer or 0.0) / 2)
        if speed is None and (decode is None or answer is None):
            return "no worker has shown its speed yet"
        late = (1 - settings.target) * _LATE_SHARE
        fresh = 1 - (self._cached.value or 0.0)
        # Of a pool whose speed is not known what is wanted stays: all may be in the caches of the other one.
        prefill, busy = seen.prefill.wanted, 0.0
        prefill_why = f"prefill {prefill} as before: none of them has shown its speed"
        if speed is not None:
            service_s = prompt * fresh / speed
            scv, wait_s = self._patience(service_s, prompt, ttft_s)
            queued = _queued(seen)
            if not self.waits_for_decode(seen, capacity):
                queued += seen.asked.waiting_tokens * fresh
            usual = _QUEUE_S * speed * max(1, seen.prefill.ready)
            backlog = max(0.0, times * queued - usual)
            anew = rate * service_s
            # By the time another worker serves, those there and those under way will have done part of it.
            spare = max(0.0, seen.prefill.wanted - pressure[0] * anew)
            left_s = max(0.0, backlog / speed - spare * ahead_s)
            piled_up = min(left_s / _DRAIN_S, _MOST_BACKLOG * anew + 1)
            busy = pressure[0] * max(likely * anew, anew + piled_up)
            prefill = prefill_workers(busy, service_s, scv, wait_s, late, settings.utilisation)
            piled = f", {backlog:.0f} queued" if backlog else ""
            prefill_why = (
                f"prefill {prefill}: {rate:.3g}/s of {prompt * fresh:.0f} new tokens{piled} at "
                f"{speed:.0f} tokens/s each"
            )
        if decode is None or answer is None:
            many = seen.decode.wanted
            return Needs(prefill, many, f"{prefill_why}; decode {many} as before: none has shown its speed")
        # Too many at a time are slow, and slow ones are many: as many as there would be at that speed.
        there = (self._progress or 0.0) / max(1.0, (self._step_s or decode.step_s) / decode.step_s)
        lasts_s = answer * decode.step_s
        anew = rate * lasts_s
        # As of prompts: those there and those under way have places for some of those that wait by then.
        waiting = times * seen.asked.waiting if self.waits_for_decode(seen, capacity) else 0.0
        spare = max(0.0, seen.decode.wanted * decode.batch - pressure[1] * anew)
        left_s = max(0.0, waiting * lasts_s - spare * ahead_s)
        piled_up = min(left_s / _DRAIN_S, _MOST_BACKLOG * anew + decode.batch)
        sequences = max(likely * anew, anew + piled_up, times * there)
        sequences *= pressure[1]
        many = decode_workers(sequences, decode.batch, late)
        why = (
            f"{prefill_why}; decode {many}: {sequences:.1f} answers in progress, {decode.batch:.0f} to a "
            f"worker ({decode.limited_by})"
        )
        together = aggregated_workers(
            busy, sequences, decode.base_s, decode.each_s, _TPOT_MARGIN * tpot_s, settings.utilisation
        )
        return Needs(prefill, many, why, together if speed is not None else None)

    def _patience(self, service_s: float, prompt: float, ttft_s: float) -> tuple[float, float]:
        """Squared coefficient of variation of what prompts take, and how long they may wait."""
        scv = self._prompt.scv
        # The longest tenth of prompts takes about so long itself.
        own_s = service_s * (1 + 1.3 * min(1.5, scv**0.5))
        return scv, _MARGIN * ttft_s - own_s

    def typical(self, seen: Observation, capacity: Capacity, ahead_s: float) -> Typical | None:
        """None: not known."""
        settings = self._settings
        rate, tokens, level = self._typical.value, self._typical_tokens.value, self.arrivals.level
        prompt, answer, speed = self._prompt.value, self._answer.value, capacity.prefill_tokens_s
        if not (rate and tokens and level and prompt and answer and speed):
            return None
        ttft_s, tpot_s = self.objectives()
        decode = capacity.decode(_TPOT_MARGIN * tpot_s, prompt + answer / 2, careful=True)
        if decode is None:
            return None
        late = min(0.5, (1 - settings.target) * _TYPICAL_LATE)
        fresh = 1 - (self._cached.value or 0.0)
        service_s = prompt * fresh / speed
        scv, wait_s = self._patience(service_s, prompt, ttft_s)
        load = tokens * fresh / speed
        sequences = rate * answer * decode.step_s
        least = {
            "prefill": prefill_workers(load, service_s, scv, wait_s, late, settings.utilisation),
            "decode": decode_workers(sequences, decode.batch, late),
        }
        ready = {"prefill": max(1, seen.prefill.ready), "decode": max(1, seen.decode.ready)}
        waits = self.waits_for_decode(seen, capacity)
        queued = _queued(seen) + (0.0 if waits else seen.asked.waiting_tokens * fresh)
        strained = {
            "prefill": queued / speed > _OVERRUN * ttft_s * ready["prefill"],
            "decode": waits or (self._progress or 0.0) > _OVERFULL * decode.batch * ready["decode"],
        }
        growth = max(1.0, (self.arrivals.at(ahead_s) or level) / level) if settings.forecast else 1.0
        late_rate = self.arrivals.newest(_MINUTE_S) or 0.0
        last = {"prefill": late_rate * service_s, "decode": late_rate * answer * decode.step_s}
        # Of three means: how many came, how long they were, and what both are compared with.
        came = math.sqrt((1 / _MINUTE_S + (1 + scv) / (2 * _TYPICAL_S)) / rate)
        noise = math.hypot(came, self._prompt.error)
        surprise = self.arrivals.surprise(ahead_s)
        return Typical({"prefill": load, "decode": sequences}, least, last, noise, surprise, growth, strained)

    @property
    def changed_at(self) -> float:
        """When what is asked was last found to be clearly other than before."""
        return max(self.arrivals.changed_at, self._prompt.changed_at)

    def falls(self, now: float, of_late_s: float) -> bool:
        """Whether clearly less is asked than before: it is, or was found out within `of_late_s`."""
        return self.arrivals.trend < 0 or any(
            one.fell and now - one.changed_at < of_late_s for one in (self.arrivals, self._prompt)
        )

    @staticmethod
    def waits_for_decode(seen: Observation, capacity: Capacity) -> bool:
        """Whether requests wait at routers though prefill workers have room: decode has none then."""
        speed = capacity.prefill_tokens_s
        if not seen.asked.waiting or speed is None or not seen.prefill.ready:
            return False
        return _queued(seen) < _IDLE_S * speed * seen.prefill.ready


def _queued(seen: Observation) -> float:
    return sum(one.queued_tokens for one in seen.workers if one.role == "prefill")


def _in_progress(worker: WorkerSeen) -> float:
    """Of those that wait there as many as run, at most."""
    return worker.running + min(worker.waiting, worker.running)
