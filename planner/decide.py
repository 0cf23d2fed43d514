"""The decision: both counts at once, from an observation and what was learnt. Pure.

In this order: who decides at all; whether data can be trusted; an idle fleet; what the load needs; more at
once, less only when it was enough for long; a change of role before start and stop; what the budget allows.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile

from fleet.targets import Mode
from planner.capacity import Capacity
from planner.needs import Load, Needs, Typical
from planner.trial import Trials
from planner.words import ROLES, Ages, Observation, Plan, PlannerSettings

_LONGEST_SETTLE_S = 3600.0
_FLAP_S = 1800.0
"""A count that had to rise so soon after it fell was let fall too easily."""
_JUDGED_S = 60.0
"""Over which misses are added up."""
_JUDGED = 20
"""Requests that make a judgement."""
_PRESSED = 1.1
_MOST_PRESSURE = 1.5
_RELIEF_S = 1200.0
"""Time constant by which a correction for misses is given up again."""
_FREE_MISSES = 0.5
"""Share of the misses that are allowed which is no reason to look for their cause."""
_FEWER_AGGREGATED = 0.85
_TURN_S = 10.0
"""In which a worker has changed its role."""


@dataclass(slots=True)
class _Pool:
    """What is remembered of one role."""

    wanted: int = -1
    rose_at: float = -math.inf
    fell_at: float = -math.inf
    settle_times: float = 1.0
    needs: deque[tuple[float, int]] = field(default_factory=deque)
    """When, and how many would have to stay."""
    pressure: float = 1.0
    judged: deque[tuple[float, int, int]] = field(default_factory=deque)
    """When, requests that count, and those that missed by this pool's fault."""


class State:
    """What is learnt and remembered from one decision to the next; belongs to one fleet and one planner."""

    def __init__(self, settings: PlannerSettings) -> None:
        self.settings = settings
        self.capacity = Capacity(settings.warm_up_s)
        self.load = Load(settings)
        self.pools = {role: _Pool() for role in ROLES}
        self.trials = Trials(settings)
        self.at = -math.inf
        self.blind: tuple[int, int] | None = None
        """What was wanted when data began to be missing."""
        self.blind_at = -math.inf
        self.waited_at = -math.inf
        """When requests were last seen to wait for a place to decode."""
        self.turned_at = -math.inf
        self.turned_to = ""

    @property
    def pressure(self) -> tuple[float, float]:
        return self.pools["prefill"].pressure, self.pools["decode"].pressure


def decide(seen: Observation, state: State, now: float) -> Plan:
    """What there should be. `state` learns from `seen` first; nothing else is changed or read."""
    fresh = _missing(seen.ages, state.settings) == ""
    typical = _remember(seen, state, now, fresh)
    settings = state.settings
    if seen.mode is Mode.OFF:
        return _hold(seen, settings, now, "an operator decides (mode off)")
    budget = settings.budget if seen.budget is None else seen.budget
    if not fresh:
        return _blind(seen, state, now, budget, _missing(seen.ages, settings))
    state.blind = None
    wanted = {role: seen.pool(role).wanted for role in ROLES}
    if (plan := _idle(seen, state, now, budget)) is not None:
        return plan
    ahead_s = _ahead_s(seen, settings)
    times, pressure = settings.headroom, state.pressure
    up = state.load.needs(seen, state.capacity, ahead_s, pressure=pressure)
    stay = state.load.needs(seen, state.capacity, ahead_s, times=times, pressure=pressure)
    if isinstance(up, str) or isinstance(stay, str):
        reason = up if isinstance(up, str) else str(stay)
        fitted = _fit(wanted, wanted, budget, settings)
        return _plan(settings, now, fitted, f"{reason}; nothing is changed")
    least = {"prefill": settings.least_prefill, "decode": settings.least_decode}
    for role in ROLES:
        pool = state.pools[role]
        tried, _ = state.trials.needed(role, stay.of(role), seen.pool(role).wanted, typical, now)
        pool.needs.append((now, max(least[role], stay.of(role), tried)))
        while pool.needs and pool.needs[0][0] < now - _LONGEST_SETTLE_S:
            pool.needs.popleft()
    return _weigh(seen, state, now, budget, up, least, typical)


def _weigh(
    seen: Observation,
    state: State,
    now: float,
    budget: int,
    up: Needs,
    least: dict[str, int],
    typical: Typical | None,
) -> Plan:
    settings = state.settings
    wanted = {role: seen.pool(role).wanted for role in ROLES}
    needed = {role: max(least[role], up.of(role)) for role in ROLES}
    goal = dict(wanted)
    notes: list[str] = []
    for role in ROLES:
        pool = seen.pool(role)
        needed[role], tried = state.trials.needed(role, needed[role], wanted[role], typical, now)
        if tried:
            notes.append(tried)
        if needed[role] > wanted[role]:
            if pool.starting and pool.short_s > settings.ready_limit_s:
                notes.append(
                    f"{pool.starting} {role} workers have not become ready in {pool.short_s:.0f} s: "
                    "no more of them are wanted until they do"
                )
                continue
            most = wanted[role] + max(1, math.ceil(settings.most_step * wanted[role]))
            goal[role] = min(needed[role], most)
    # What the pools may give up: after long enough for good, sooner for the other role.
    spare: dict[str, int] = {}
    for role in ROLES:
        enough, why = _enough(role, seen, state, now)
        # What was needed before it changed says nothing of what is needed now, and neither does one look.
        since, needs = max(now - settings.turn_settle_s, state.load.changed_at), state.pools[role].needs
        known = needs[0][0] <= now - settings.turn_settle_s
        spare[role] = max(0, wanted[role] - _most(needs, since)) if known else 0
        if goal[role] == wanted[role] and enough < wanted[role]:
            step = max(1, math.ceil(settings.most_step * wanted[role] / 2))
            goal[role] = max(enough, wanted[role] - step)
            notes.append(f"{enough} {role} have been enough for {why}")
    turns: tuple[str, ...] = ()
    if settings.turns and sum(wanted.values()) <= budget:
        short = _short(seen, state, now, wanted, needed, typical)
        goal, turns = _turn(seen, state, now, goal, wanted, needed, short, spare, notes)
    fitted = goal
    if turns:
        # One kind of change at a time: whoever keeps the counts moves them with each worker that turns.
        notes.append(f"{len(turns)} of the other role become {turns[0]}, which is sooner than a cold start")
    else:
        fitted = _fit(goal, wanted, budget, settings, needed)
        if fitted != goal:
            notes.append(f"the budget is {budget}")
            if settings.turns:
                fitted, turns = _swap(seen, state, now, fitted, wanted)
    if fitted == wanted and not turns:
        settle_s = {role: _settle_s(state, role) for role in ROLES}
        trial = state.trials.propose(seen, typical, state.pressure, settle_s, least, now)
        if trial is not None:
            fitted = {**wanted, trial[0]: wanted[trial[0]] - 1}
            notes.append(trial[1])
    why = "; ".join([up.why, *notes])
    plan = _plan(settings, now, fitted, why, turns, (up.prefill, up.decode))
    together = up.aggregated
    total = sum(needed.values())
    if together is not None and up.prefill and together <= _FEWER_AGGREGATED * total:
        return _advised(plan, f"{max(1, together)} aggregated workers would do instead of {total}")
    return plan


def _enough(role: str, seen: Observation, state: State, now: float) -> tuple[int, str]:
    """How many of the role may stay now; the present count while it is too early to say."""
    settings, pool, wanted = state.settings, state.pools[role], seen.pool(role).wanted
    settle_s = _settle_s(state, role)
    if state.load.falls(now, settle_s):
        # It is not by chance that fewer are enough: a mistake costs a cold start, and no more is waited for.
        settle_s = min(settle_s, _cold_start_s(seen, settings) * pool.settle_times)
    if now - pool.rose_at < settle_s:
        return wanted, ""
    if not pool.needs or pool.needs[0][0] > now - settle_s:
        return wanted, ""
    if seen.pool(role).starting:
        return wanted, ""  # What is under way is waited for.
    if _missed(pool, now, settings) > 1 - settings.target:
        return wanted, ""
    return min(wanted, _most(pool.needs, now - settle_s)), f"{settle_s:.0f} s"


def _settle_s(state: State, role: str) -> float:
    return min(_LONGEST_SETTLE_S, state.settings.settle_s * state.pools[role].settle_times)


def _most(needs: deque[tuple[float, int]], since: float) -> int:
    late = takewhile(lambda one: one[0] >= since, reversed(needs))
    return max((need for _, need in late), default=0)


def _short(
    seen: Observation,
    state: State,
    now: float,
    wanted: dict[str, int],
    needed: dict[str, int],
    typical: Typical | None,
) -> dict[str, int]:
    """How many workers more each role could use within seconds: those that are only starting do not count."""
    short = {role: needed[role] - wanted[role] for role in ROLES}
    soon = state.load.needs(seen, state.capacity, _TURN_S, pressure=state.pressure)
    if isinstance(soon, Needs):
        for role in ROLES:
            pool = seen.pool(role)
            there = pool.ready + pool.turning
            by_then, _ = state.trials.needed(role, soon.of(role), wanted[role], typical, now)
            if pool.starting > pool.turning:
                short[role] = max(short[role], by_then - there)
    if state.load.waits_for_decode(seen, state.capacity) and not seen.decode.turning:
        # Whatever the model says, who waits for a place finds none.
        short["decode"] = max(short["decode"], 1)
    return short


def _turn(
    seen: Observation,
    state: State,
    now: float,
    goal: dict[str, int],
    wanted: dict[str, int],
    needed: dict[str, int],
    lacking: dict[str, int],
    spare: dict[str, int],
    notes: list[str],
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Of a pool that lacks workers now the other one gives those that it can spare; starts under way that
    these make needless are given up."""
    settings = state.settings
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        short = lacking[role]
        if short <= 0 or spare[other] <= 0 or not seen.pool(other).ready:
            continue
        back = _turned_back(state, role, now)
        rose_at = state.pools[other].rose_at
        rose = now - rose_at < settings.turn_settle_s and rose_at > state.load.changed_at
        if back or rose or seen.pool(other).turning:
            notes.append(f"{other} has only just been given its workers: none of them changes its role yet")
            continue
        stay = max(1 if other == "decode" else settings.least_prefill, wanted[other] - spare[other])
        count = min(short, spare[other], seen.pool(other).ready - stay)
        if count > 0:
            here, there = wanted[role] + count, wanted[other] - count
            here -= max(0, min(count, _cold(seen, role), here - needed[role]))
            there -= min(_cold(seen, other), spare[other] - count)
            turned = {role: here, other: there}
            return {key: turned[key] for key in ROLES}, (role,) * count
    return goal, ()


def _cold(seen: Observation, role: str) -> int:
    """Workers that are only starting."""
    return max(0, seen.pool(role).starting - seen.pool(role).turning)


def _swap(
    seen: Observation, state: State, now: float, fitted: dict[str, int], wanted: dict[str, int]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Where the budget takes from one pool what it gives the other, the same workers go over; not back again
    before long, for where both are short a little noise decides."""
    settings = state.settings
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        gain, loss = fitted[role] - wanted[role], wanted[other] - fitted[other]
        stay = 1 if other == "decode" else settings.least_prefill
        if gain <= 0 or loss <= 0:
            continue
        if _turned_back(state, role, now):
            return wanted, ()
        count = min(gain, loss, seen.pool(other).ready - stay)
        if count > 0:
            return {role: wanted[role] + count, other: wanted[other] - count}, (role,) * count
    return fitted, ()


def _turned_back(state: State, role: str, now: float) -> bool:
    """Whether a worker that takes this role now would undo a change that was made just before."""
    return state.turned_to not in ("", role) and now - state.turned_at < state.settings.settle_s


def _idle(seen: Observation, state: State, now: float, budget: int) -> Plan | None:
    """To zero and back; None: neither."""
    settings, asked = state.settings, seen.asked
    wanted = {role: seen.pool(role).wanted for role in ROLES}
    calling = asked.held or asked.waiting or asked.arrived
    if wanted["decode"] == 0:
        if not calling:
            return _hold(seen, settings, now, "nothing is asked, and nobody is there")
        woken = {"prefill": max(settings.least_prefill, wanted["prefill"]), "decode": settings.least_decode}
        return _plan(
            settings,
            now,
            _fit(woken, wanted, max(1, budget), settings),
            f"{asked.held or asked.waiting or asked.arrived} requests wait and nobody serves",
        )
    idle = state.load.idle_since
    busy = calling or asked.running or any(one.running or one.waiting for one in seen.workers)
    if settings.scale_to_zero and idle is not None and not busy and now - idle >= settings.idle_s:
        return _plan(settings, now, dict.fromkeys(ROLES, 0), f"nothing was asked for {now - idle:.0f} s")
    return None


def _missing(ages: Ages, settings: PlannerSettings) -> str:
    """What is not known well enough to decide; empty: all is."""
    names = {"workers": "the registry", "demand": "demand from the routers", "loads": "reports of workers"}
    found = []
    for name, said in names.items():
        age = getattr(ages, name)
        if age is None:
            found.append(f"{said}: none")
        elif age > settings.stale_s:
            found.append(f"{said}: {age:.0f} s old")
    return "; ".join(found)


def _blind(seen: Observation, state: State, now: float, budget: int, missing: str) -> Plan:
    """Never less; and one more at most a cold start, up to a quarter of what there was, where those who can
    be seen say that they are behind."""
    settings = state.settings
    wanted = {role: seen.pool(role).wanted for role in ROLES}
    if state.blind is None:
        state.blind, state.blind_at = (wanted["prefill"], wanted["decode"]), now
    before = dict(zip(ROLES, state.blind, strict=True))
    goal = dict(wanted)
    loads = seen.ages.loads is not None and seen.ages.loads <= settings.stale_s
    registry = seen.ages.workers is not None and seen.ages.workers <= settings.stale_s
    late = now - state.blind_at >= _cold_start_s(seen, settings)
    if loads and registry and late:
        speed = state.capacity.prefill_tokens_s
        queued = sum(one.queued_tokens for one in seen.workers if one.role == "prefill")
        waiting = sum(one.waiting for one in seen.workers if one.role == "decode")
        ttft_s, _ = state.load.objectives()
        behind = {
            "prefill": speed is not None and queued > ttft_s * speed * max(1, seen.prefill.ready),
            "decode": waiting > seen.decode.ready,
        }
        for role in ROLES:
            most = before[role] + max(1, before[role] // 4)
            room = sum(goal.values()) < budget and not seen.pool(role).starting
            if behind[role] and room and wanted[role] < most:
                goal[role] += 1
                state.blind_at = now
    more = "; one more where queues are long" if goal != wanted else ""
    return _plan(settings, now, goal, f"data is missing ({missing}): nothing is reduced{more}")


def _fit(
    goal: dict[str, int],
    wanted: dict[str, int],
    budget: int,
    settings: PlannerSettings,
    needed: dict[str, int] | None = None,
) -> dict[str, int]:
    """Within the budget: of all splits of it the one that serves the pool best which it serves worst, and of
    those the one nearest to what is wanted now. Nothing grows beyond `goal`."""
    if sum(goal.values()) <= budget:
        return goal
    weights = {role: max(1, (needed or goal)[role]) for role in ROLES}
    least_decode = min(settings.least_decode, max(1, budget)) if goal["decode"] else 0
    best: tuple[tuple[float, int], dict[str, int]] | None = None
    for prefill in range(min(goal["prefill"], budget) + 1):
        split = {"prefill": prefill, "decode": min(goal["decode"], budget - prefill)}
        if split["decode"] < min(least_decode, budget) or (
            prefill < min(settings.least_prefill, goal["prefill"], budget - split["decode"])
        ):
            continue
        served = min(split[role] / weights[role] for role in ROLES)
        moved = sum(abs(split[role] - wanted[role]) for role in ROLES)
        if best is None or (served, -moved) > best[0]:
            best = ((served, -moved), split)
    return best[1] if best is not None else {"prefill": 0, "decode": min(goal["decode"], budget)}


def _remember(seen: Observation, state: State, now: float, fresh: bool) -> Typical | None:
    settings = state.settings
    moved = {role: seen.pool(role).wanted - pool.wanted for role, pool in state.pools.items()}
    if state.at > -math.inf and moved["prefill"] * moved["decode"] < 0:
        state.turned_at, state.turned_to = now, max(ROLES, key=lambda role: moved[role])
    for role in ROLES:
        if seen.pool(role).turning:
            state.turned_at, state.turned_to = now, role
    for role, pool in state.pools.items():
        wanted = seen.pool(role).wanted
        if pool.wanted >= 0 and wanted > pool.wanted:
            # A fall was wrong once, in however many steps it is taken back.
            if pool.fell_at > pool.rose_at and now - pool.fell_at < _FLAP_S:
                pool.settle_times = min(
                    2 * pool.settle_times, _LONGEST_SETTLE_S / max(1.0, settings.settle_s)
                )
            pool.rose_at = now
        elif 0 <= wanted < pool.wanted:
            if state.trials.pools[role].proposed != wanted:  # What came of a trial is remembered there.
                pool.fell_at = now
        elif now - max(pool.rose_at, pool.fell_at) > 4 * _FLAP_S:
            pool.settle_times = 1.0
        pool.wanted = wanted
    state.at = now
    if not fresh:
        return None
    state.load.add(seen, now)
    for worker in seen.workers:
        state.capacity.learn(worker)
    state.capacity.forget({worker.id for worker in seen.workers})
    typical = state.load.typical(seen, state.capacity, _ahead_s(seen, settings))
    _judge(seen, state, now, typical)
    return typical


def _judge(seen: Observation, state: State, now: float, typical: Typical | None) -> None:
    """Whether the pools, as they are, let too many requests miss: then they need more than the model says."""
    settings = state.settings
    counted = sum(one.attained + one.missed for one in seen.asked.classes.values())
    late = sum(one.missed_ttft for one in seen.asked.classes.values())
    slow = sum(one.missed_tpot for one in seen.asked.classes.values())
    if state.load.waits_for_decode(seen, state.capacity):
        state.waited_at = now
    # A first token comes late as well where a request waits for a place to decode.
    by_decode = now - state.waited_at < _JUDGED_S
    faults = {"prefill": 0 if by_decode else late, "decode": slow + (late if by_decode else 0)}
    steady = not any(seen.pool(role).starting for role in ROLES)
    state.trials.learn(seen, typical, counted, faults, now)
    for role, pool in state.pools.items():
        pool.pressure = 1 + (pool.pressure - 1) * math.exp(-seen.asked.seconds / _RELIEF_S)
        pool.judged.append((now, counted, faults[role]))
        while pool.judged[0][0] < now - _JUDGED_S:
            pool.judged.popleft()
        grown = now - pool.rose_at < 2 * _JUDGED_S
        if state.trials.runs(role):
            pool.judged.clear()  # It is judged by its own measure, over a longer time.
            pool.judged.append((now, 0, 0))
        elif steady and not grown and _missed(pool, now, settings) > (1 - settings.target) * _FREE_MISSES:
            pool.pressure = min(_MOST_PRESSURE, pool.pressure * _PRESSED)
            pool.judged.clear()
            pool.judged.append((now, 0, 0))


def _missed(pool: _Pool, now: float, settings: PlannerSettings) -> float:
    """Share of the requests of late that missed by this pool's fault; 0 while too few have ended."""
    counted = sum(count for _, count, _ in pool.judged)
    return sum(faults for _, _, faults in pool.judged) / counted if counted >= _JUDGED else 0.0


def _cold_start_s(seen: Observation, settings: PlannerSettings) -> float:
    return settings.cold_start_s if seen.cold_start_s is None else seen.cold_start_s


def _ahead_s(seen: Observation, settings: PlannerSettings) -> float:
    """To when a worker that is wanted now will serve."""
    return _cold_start_s(seen, settings) + settings.interval_s


def _hold(seen: Observation, settings: PlannerSettings, now: float, why: str) -> Plan:
    return _plan(settings, now, {role: seen.pool(role).wanted for role in ROLES}, why)


def _plan(
    settings: PlannerSettings,
    now: float,
    counts: dict[str, int],
    why: str,
    turns: tuple[str, ...] = (),
    needs: tuple[int, int] | None = None,
) -> Plan:
    return Plan(counts["prefill"], counts["decode"], why, now + settings.interval_s, turns, needs=needs)


def _advised(plan: Plan, advice: str) -> Plan:
    return Plan(plan.prefill, plan.decode, plan.why, plan.next_at, plan.turns, advice, plan.needs)
