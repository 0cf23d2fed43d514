"""From messages to observations: a fold of the registry's view, load reports and what routers say. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet.demand import Demand
from fleet.events import LoadReport
from fleet.ids import Incarnation, WorkerId
from fleet.member import MemberState, WorkerCard
from fleet.targets import Desired
from planner.words import ROLES, Ages, Asked, ClassSeen, Observation, PoolSeen, WorkerSeen

_FORGET_S = 60.0
"""A router that is not listed and has said nothing for so long is over."""
_TOTALS = (
    *("arrived", "prompt_tokens", "prompt_squares", "ended", "ended_tokens", "cached_tokens"),
    *("output_tokens", "rejected"),
)
_NOW = ("waiting", "waiting_tokens", "held", "running")
_COLD_WEIGHT = 0.3


@dataclass(slots=True)
class _Worker:
    card: WorkerCard
    ready_at: float | None
    """When it was first seen ready in its role."""
    report: LoadReport | None = None
    reported_at: float = 0.0
    steps: int = 0
    """It had done at the last observation."""
    starts: bool = True
    """It was not seen ready yet, in whatever role."""


@dataclass(slots=True)
class _Router:
    listed_at: float
    """When it was first known of."""
    listed: bool = False
    last: Demand | None = None
    heard_at: float | None = None
    counted: Demand | None = None
    """As of the last observation."""


@dataclass(slots=True)
class _Short:
    """Of one role."""

    wanted: int = 0
    ready: int = 0
    since: float | None = None
    full: bool = False
    """Whether all that are wanted were ready once: who comes before that was not started just now."""
    begun: deque[float] = field(default_factory=deque)
    """When each start that is under way was wanted, the oldest first."""


@dataclass(slots=True)
class Observer:
    """`now` is on one clock everywhere."""

    workers: dict[WorkerId, _Worker] = field(default_factory=dict)
    _routers: dict[Incarnation, _Router] = field(default_factory=dict)
    _viewed_at: float | None = None
    """When the registry was last known to be right."""
    _live: bool = False
    _observed_at: float | None = None
    _short: dict[str, _Short] = field(default_factory=lambda: {role: _Short() for role in ROLES})
    _cold_start_s: float | None = None

    # -- what is heard

    def apply_view(
        self,
        cards: Mapping[WorkerId, WorkerCard],
        routers: frozenset[Incarnation],
        now: float,
        *,
        live: bool,
        emptied: bool = False,
    ) -> None:
        """Not `live`, or `emptied`: nobody is gone for that, and the picture grows old."""
        self._live = live and not emptied
        if not self._live:
            return
        self._viewed_at = now
        for id in self.workers.keys() - cards.keys():
            del self.workers[id]
        for id, card in cards.items():
            old = self.workers.get(id)
            same = old is not None and old.card.incarnation == card.incarnation
            ready = card.state is MemberState.READY
            if old is None or not same:
                self.workers[id] = _Worker(card, now if ready else None)
                continue
            if old.card.role is not card.role or (ready and old.ready_at is None):
                old.ready_at = now if ready else None
            old.card = card
        for life in routers:
            self._routers.setdefault(life, _Router(now)).listed = True
        for life, router in list(self._routers.items()):
            router.listed = life in routers
            heard_at = router.listed_at if router.heard_at is None else router.heard_at
            if not router.listed and now - heard_at > _FORGET_S:
                del self._routers[life]

    def apply_load(self, report: LoadReport, now: float) -> None:
        worker = self.workers.get(report.worker)
        if worker is not None and worker.card.incarnation == report.incarnation:
            if worker.report is None:
                worker.steps = report.counters.get("steps", 0)
            worker.report, worker.reported_at = report, now

    def apply_demand(self, demand: Demand, now: float) -> None:
        router = self._routers.setdefault(demand.life, _Router(now))
        if router.last is not None and demand.sequence <= router.last.sequence:
            return
        if router.last is None:
            # What came before anybody listened is of no rate; of a router that has just begun, all of it is.
            young = self._observed_at is not None and demand.up_s <= now - self._observed_at + 1.0
            router.counted = None if young else demand
        router.last, router.heard_at = demand, now

    @property
    def calling(self) -> bool:
        """Whether requests wait and there is no worker at all for them."""
        return any(router.last is not None and router.last.held for router in self._routers.values())

    def least_loaded(self, role: str) -> list[WorkerCard]:
        """Ready workers of that role, those with least to do first."""
        ready = [one for one in self.workers.values() if one.card.role == role and _ready(one)]

        def load(one: _Worker) -> tuple[int, int, str]:
            report = one.report
            return (0, 0, one.card.id) if report is None else (
                report.running + report.waiting, report.queued_tokens, one.card.id
            )  # fmt: skip

        return [one.card for one in sorted(ready, key=load)]

    # -- what is seen

    def observe(self, desired: Desired, now: float) -> Observation:
        """Of the time since the last one."""
        seconds = 0.0 if self._observed_at is None else now - self._observed_at
        asked = self._asked(seconds)
        pools = {role: self._pool(role, desired.of(role), now) for role in ROLES}
        seen = tuple(self._seen(one, now) for _, one in sorted(self.workers.items()) if _ready(one))
        ages = self._ages(now)
        self._observed_at = now
        return Observation(
            desired.mode, desired.budget, pools["prefill"], pools["decode"], asked, ages, seen,
            self._cold_start_s,
        )  # fmt: skip

    def _asked(self, seconds: float) -> Asked:
        totals: dict[str, float] = dict.fromkeys((*_TOTALS, *_NOW), 0)
        classes: dict[str, dict[str, float | None]] = {}
        for router in self._routers.values():
            last, before = router.last, router.counted
            if last is None:
                continue
            for name in _TOTALS:
                totals[name] += getattr(last, name) - (getattr(before, name) if before is not None else 0)
            if router.listed:
                for name in _NOW:
                    totals[name] += getattr(last, name)
            for name, one in last.classes.items():
                told = classes.setdefault(name, {"ttft_ms": one.ttft_ms, "tpot_ms": one.tpot_ms})
                old = before.classes.get(name) if before is not None else None
                for key in ("arrived", "attained", "missed", "missed_ttft", "missed_tpot"):
                    more = getattr(one, key) - (getattr(old, key) if old is not None else 0)
                    told[key] = (told.get(key) or 0) + more
            router.counted = last
        kinds = {name: ClassSeen(**told) for name, told in sorted(classes.items())}  # type: ignore[arg-type]
        return Asked(seconds, **totals, classes=kinds)  # type: ignore[arg-type]

    def _pool(self, role: str, wanted: int, now: float) -> PoolSeen:
        cards = [(one.card, _ready(one)) for one in self.workers.values()]
        ready = sum(card.role == role and is_ready for card, is_ready in cards)
        leaving = [card for card, _ in cards if card.state is MemberState.DRAINING]
        draining = sum(card.role == role and card.turning is None for card in leaving)
        coming = sum(card.turning == role for card in leaving)
        short = self._short[role]
        self._measure(short, role, max(0, wanted - ready - coming), now)
        if ready >= wanted:
            short.since, short.full = None, True
        elif short.since is None or ready > short.ready or wanted > short.wanted:
            short.since = now
        short.wanted, short.ready = wanted, ready
        return PoolSeen(
            wanted,
            ready,
            max(0, wanted - ready),
            draining,
            0.0 if short.since is None else now - short.since,
            coming,
        )

    def _measure(self, short: _Short, role: str, starting: int, now: float) -> None:
        """How long starts take: who was wanted first is ready first, and the newest are given up first."""
        for one in self.workers.values():
            if not (one.starts and one.card.role == role and _ready(one)):
                continue
            one.starts = False
            took = now - short.begun.popleft() if short.begun else 0.0
            if short.full and took:
                known = self._cold_start_s
                self._cold_start_s = took if known is None else known + _COLD_WEIGHT * (took - known)
        while len(short.begun) > starting:
            short.begun.pop()
        short.begun.extend([now] * (starting - len(short.begun)))

    def _seen(self, worker: _Worker, now: float) -> WorkerSeen:
        card, report = worker.card, worker.report
        ready_s = now - (now if worker.ready_at is None else worker.ready_at)
        if report is None:
            return WorkerSeen(card.id, card.role.value, ready_s, False)
        steps = report.counters.get("steps", 0)
        worked, worker.steps = steps != worker.steps, steps
        block = card.fingerprint.block_size
        return WorkerSeen(
            card.id,
            card.role.value,
            ready_s,
            worked,
            report.running,
            report.waiting,
            report.queued_tokens,
            report.prefill_tokens_s,
            report.decode_step_s,
            report.decode_batch,
            card.blocks * block,
        )

    def _ages(self, now: float) -> Ages:
        listed = [router for router in self._routers.values() if router.listed]
        silent = [now - (one.listed_at if one.heard_at is None else one.heard_at) for one in listed]
        spoke = any(one.heard_at is not None for one in listed)
        loads = [
            now - (one.reported_at if one.report is not None else one.ready_at or now)
            for one in self.workers.values()
            if _ready(one)
        ]
        viewed = None if self._viewed_at is None else 0.0 if self._live else now - self._viewed_at
        return Ages(viewed, max(silent) if spoke else None, max(loads, default=0.0))


def _ready(worker: _Worker) -> bool:
    stalled = worker.report is not None and worker.report.state == MemberState.STALLED
    return worker.card.state is MemberState.READY and not stalled
