"""What a router shows of its fleet to people: one snapshot, and what has changed since another. Pure.

Requests are those of this router; workers are those of the fleet, as they reported last. A figure that nobody
gave is null, never zero. Totals only grow: who shows rates takes two snapshots.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from fleet.goodput import Figures, Percentiles, Rolling
from fleet.ids import RequestId
from fleet.member import MemberState
from fleet.objectives import Objectives
from fleet.targets import LastDecision, Mode
from router.record import HandoffRecord
from router.roster import LinkState, Standing

if TYPE_CHECKING:
    from router.flow import Flow

NOW_S = 60.0
"""What counts as now in figures of classes, seconds."""
WINDOWS: Mapping[float, str] = {300.0: "5m", 1_800.0: "30m", 3_600.0: "1h", 21_600.0: "6h"}
HISTORY_S = 600.0
SLOW = 12
"""Requests that are shown as slow."""
SLOW_S = 300.0
"""How long ago they may have ended, seconds."""

SUMS = ("pulled_bytes", "prompt_tokens", "cached_tokens", "filled_tokens", "generated_tokens")
"""Counters of workers that are shown added up."""
CHOICES = ("requests", "prefills_remote", "prefills_local", "handoffs", "early_handoffs", "borrows",
           "refusals", "failovers", "queued", "shed")  # fmt: skip
"""Counters of the flow that are shown."""


class RouterLook(msgspec.Struct, frozen=True):
    id: str
    fleet: str
    version: str
    target: float
    """Share of requests that is to attain."""
    others: tuple[tuple[str, str], ...]
    """Id and URL of each of the other routers."""
    unseen: int
    """Of those, the ones whose choices are not heard of here."""
    trouble: str | None
    """Why no request could be served now."""


class ClassLook(msgspec.Struct, frozen=True):
    name: str
    objectives: dict[str, float]
    """Of ttft_ms, tpot_ms, itl_ms and e2e_ms those that are set."""
    sheddable: bool
    waiting: int
    running: int
    goodput: float | None
    """Requests a second that attained, over the last minute, as all down to `e2e`; null: none ended yet."""
    attainment: float | None
    attained: int
    missed: int
    reasons: dict[str, int]
    ttft: tuple[float, float, float] | None
    """Seconds: p50, p90, p99."""
    tpot: tuple[float, float, float] | None
    e2e: tuple[float, float, float] | None
    burn: dict[str, float | None]
    """Window → how many times faster than allowed misses happen."""
    burning: str | None
    """Why somebody should be called."""


class WorkerLook(msgspec.Struct, frozen=True, array_like=True):
    """In JSON an array, in this order: there may be a thousand, each second."""

    id: str
    role: str
    state: str
    """As on its card or in its report; `connecting` or `lost` where no session stands, `silent` where it has
    reported nothing for long, `turning` while it drains to change its role."""
    model: str
    host: str
    running: int | None
    waiting: int | None
    queued_tokens: int
    """Of prompts, as this router believes now."""
    used: int | None
    """KV blocks that are not free."""
    blocks: int
    here: int
    """Requests of this router there."""
    prefill_tokens_s: float | None
    decode_step_ms: float | None


WORKER_FIELDS = WorkerLook.__struct_fields__


class FlowLook(msgspec.Struct, frozen=True):
    """Requests under way, by where they are."""

    waiting: int
    """At the router: for their turn, or for a worker."""
    prefilling: int
    """At a worker that computes their prompt."""
    moving: int
    """Their KV is on its way to a decode worker, or waits for one."""
    decoding: int


class RequestLook(msgspec.Struct, frozen=True):
    id: str
    """For `/fleet/requests/{id}`."""
    slo_class: str = msgspec.field(name="class")
    model: str
    prompt_tokens: int
    state: str
    seconds: float
    attained: bool | None
    """null: it is not over, or does not count."""
    why: str | None
    """What it missed."""
    stages: dict[str, float]
    workers: tuple[str, ...]


class Plan(msgspec.Struct, frozen=True):
    """A planner's last decision."""

    prefill: int
    decode: int
    why: str
    at: float


class Snapshot(msgspec.Struct, frozen=True):
    at: float
    """On the router's clock, seconds; with `totals`, rates follow."""
    router: RouterLook
    classes: tuple[ClassLook, ...]
    history: dict[str, tuple[tuple[float, ...], ...]]
    """Class → since when, goodput, attainment, p50 and p99 of TTFT, p50 and p99 of TPOT, each for about ten
    seconds; null where it was not reached."""
    flow: FlowLook
    totals: dict[str, int]
    """Since the start of the router (`CHOICES`), and of the workers that are there (`SUMS`)."""
    slow: tuple[RequestLook, ...]
    """Slowest of late: those that missed an objective first, running ones among them."""
    plan: Plan | None
    workers: tuple[WorkerLook, ...]
    worker_fields: tuple[str, ...] = WORKER_FIELDS


def changes(old: Snapshot, new: Snapshot) -> dict[str, Any]:
    """Sections of `new` that differ; workers that do, and under `gone` the ids of those that left."""
    said: dict[str, Any] = {
        name: value
        for name in Snapshot.__struct_fields__
        if name not in ("workers", "worker_fields") and (value := getattr(new, name)) != getattr(old, name)
    }
    before = {worker.id: worker for worker in old.workers}
    said["workers"] = [worker for worker in new.workers if before.pop(worker.id, None) != worker]
    said["gone"] = list(before)
    return said


class Beside(Protocol):
    """Who knows of other routers: the watcher."""

    @property
    def others(self) -> tuple[tuple[str, str], ...]:
        """Id and URL of each."""
        ...


class Live:
    """Makes snapshots. Remembers only figures of times that are over, which change no more."""

    def __init__(
        self,
        flow: Flow,
        *,
        router: str = "",
        fleet: str = "",
        version: str = "",
        beside: Beside | None = None,
    ) -> None:
        self.plan: Plan | None = None
        self._beside = beside
        self._flow = flow
        self._names = {"id": router, "fleet": fleet, "version": version}
        self._history: dict[str, deque[tuple[float, ...]]] = {}

    def planned(self, decision: LastDecision | None, now: float) -> None:
        """`now`: on the router's clock, when it was heard."""
        self.plan = (
            None
            if decision is None
            else Plan(decision.prefill, decision.decode, _told(decision), round(now, 3))
        )

    def snapshot(self, now: float, shown: Mapping[RequestId, str] = {}) -> Snapshot:
        """`shown`: ids by which clients know requests, where those are other than the router's own."""
        flow = self._flow
        target = flow.settings.admission.target
        workers = flow.roster.workers()
        running = flow.records.running
        beside = self._beside
        router = RouterLook(
            **self._names,
            target=target,
            others=() if beside is None else beside.others,
            unseen=flow.roster.routers - 1,
            trouble=flow.ready(),
        )
        return Snapshot(
            round(now, 3),
            router,
            tuple(self._classes(target, running, now)),
            {name: self._of_late(name, rolling, now) for name, rolling in flow.goodput.items()},
            _places(running),
            _totals(flow.counters, workers),
            tuple(_request(record, now, shown) for record in _slowest(flow, now)),
            self.plan,
            tuple(sorted(map(_worker, workers), key=lambda worker: (worker.role, len(worker.id), worker.id))),
        )

    def _classes(self, target: float, running: Iterable[HandoffRecord], now: float) -> Iterable[ClassLook]:
        flow = self._flow
        waiting = flow.admission.waiting()
        under_way = Counter(record.slo_class for record in running)
        for name, objectives in flow.settings.objectives.items():
            rolling = flow.goodput.get(name)
            figures = rolling.figures(NOW_S, now) if rolling is not None else None
            rates = rolling.burn_rates(target, now) if rolling is not None else {}
            yield ClassLook(
                name=name,
                objectives=_set(objectives),
                sheddable=objectives.sheddable,
                waiting=waiting[name],
                running=under_way[name],
                goodput=_short(figures.goodput) if figures else None,
                attainment=_short(figures.attainment) if figures else None,
                attained=figures.attained if figures else 0,
                missed=figures.missed if figures else 0,
                reasons=dict(figures.reasons) if figures else {},
                ttft=_three(figures.ttft) if figures else None,
                tpot=_three(figures.tpot) if figures else None,
                e2e=_three(figures.e2e) if figures else None,
                burn={label: _short(rates.get(window_s)) for window_s, label in WINDOWS.items()},
                burning=rolling.burning(target, now) if rolling is not None else None,
            )

    def _of_late(self, name: str, rolling: Rolling, now: float) -> tuple[tuple[float, ...], ...]:
        points = self._history.setdefault(name, deque())
        while points and points[0][0] < now - HISTORY_S:
            points.popleft()
        for since, figures in rolling.history(points[-1][0] if points else now - HISTORY_S, now):
            points.append(_point(since, figures))
        return tuple(points)


def _told(decision: LastDecision) -> str:
    """With what is not the planner's to do, and that it only advises where it does."""
    mode = "" if decision.mode == Mode.ACT else f"({decision.mode}) "
    return mode + "; ".join(filter(None, (decision.why, decision.advice)))


def _point(since: float, figures: Figures) -> tuple[Any, ...]:
    ttft, tpot = figures.ttft, figures.tpot
    numbers = (
        figures.goodput,
        figures.attainment,
        *((ttft.p50, ttft.p99) if ttft else (None, None)),
        *((tpot.p50, tpot.p99) if tpot else (None, None)),
    )
    return (since, *map(_short, numbers))


def _set(objectives: Objectives) -> dict[str, float]:
    limits = {name: getattr(objectives, name) for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")}
    return {name: limit for name, limit in limits.items() if limit is not None}


def _places(running: Iterable[HandoffRecord]) -> FlowLook:
    count = Counter(record.place for record in running)
    return FlowLook(*(count[place] for place in ("waiting", "prefilling", "moving", "decoding")))


def _totals(counted: Mapping[str, int], workers: Iterable[Standing]) -> dict[str, int]:
    totals = {name: counted.get(name, 0) for name in CHOICES} | dict.fromkeys(SUMS, 0)
    for worker in workers:
        if worker.report is not None:
            for name in SUMS:
                totals[name] += worker.report.counters.get(name, 0)
    return totals


def _slowest(flow: Flow, now: float) -> list[HandoffRecord]:
    late = (r for r in flow.records.newest() if not r.ended or r.accepted + r.seconds >= now - SLOW_S)
    return heapq.nlargest(SLOW, late, key=lambda record: (_missed(record), record.took(now)))


def _missed(record: HandoffRecord) -> bool:
    return record.outcome is not None and record.outcome["attained"] is False


def _request(record: HandoffRecord, now: float, shown: Mapping[RequestId, str]) -> RequestLook:
    return RequestLook(
        id=shown.get(record.request, record.request),
        slo_class=record.slo_class,
        model=record.model,
        prompt_tokens=record.prompt_tokens,
        state=record.place,
        seconds=round(record.took(now), 4),
        attained=None if record.outcome is None else record.outcome["attained"],
        why=record.outcome["why"] if record.outcome is not None and _missed(record) else None,
        stages={stage.value: round(at, 4) for stage, at in record.stages.items()},
        workers=tuple(dict.fromkeys(step.worker for step in record.transitions if step.worker)),
    )


def _worker(worker: Standing) -> WorkerLook:
    card, report = worker.card, worker.report
    return WorkerLook(
        id=card.id,
        role=card.role.value,
        state=_state(worker),
        model=card.model,
        host=card.host,
        running=None if report is None else report.running,
        waiting=None if report is None else report.waiting,
        queued_tokens=round(worker.queued_tokens),
        used=None if report is None else report.blocks_total - report.blocks_free,
        blocks=card.blocks,
        here=len(worker.sent),
        prefill_tokens_s=None if report is None else _short(report.prefill_tokens_s),
        decode_step_ms=None
        if report is None or report.decode_step_s is None
        else _short(report.decode_step_s * 1000),
    )


def _state(worker: Standing) -> str:
    card, report = worker.card, worker.report
    if card.state is not MemberState.READY:
        return "turning" if card.turning is not None else card.state.value
    if worker.link is not LinkState.UP:
        return "lost" if worker.link is LinkState.LOST else "connecting"
    return "silent" if report is None else report.state


def _three(figures: Percentiles | None) -> tuple[Any, ...] | None:
    return None if figures is None else tuple(map(_short, (figures.p50, figures.p90, figures.p99)))


def _short(number: float | None) -> float | None:
    """Three digits that count: more would be noise, and a change each second."""
    return None if number is None else float(f"{number:.3g}")
