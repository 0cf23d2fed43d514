"""What a router without its ingress tells Prometheus: read when it is asked for, at no cost before. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fleet.goodput import Rolling
from fleet.metrics import Family, Kind, Labels, counter, gauge, value

if TYPE_CHECKING:
    from router.flow import Flow

WINDOWS: Mapping[float, str] = {300.0: "5m", 1_800.0: "30m", 3_600.0: "1h", 21_600.0: "6h"}
"""As they are called in labels; those of `fleet.goodput.WINDOWS_S`."""

DECISIONS: Mapping[str, str] = {
    "prefills_remote": "remote",
    "prefills_local": "local",
    "handoffs": "handoff",
    "early_legs": "early",
    "borrows": "borrowed",
}
"""Counter of the flow → why a worker was chosen."""
WATCHED = (
    *("views", "kv_messages", "load_messages", "bad_messages", "bus_dropped"),
    *("snapshots", "snapshots_failed", "unproven", "forgotten"),
)
EVENTS = ("early_handoffs", "refusals", "failovers", "queued", "shed")


def targets(flow: Flow, fleet: str) -> list[dict[str, object]]:
    """Where the workers' own figures are, as Prometheus' http_sd wants it."""
    return [
        {
            "targets": [card.metrics],
            "labels": {"fleet": fleet, "worker": card.id, "role": card.role.value, "model": card.model},
        }
        for card in (worker.card for worker in flow.roster.workers())
        if card.metrics
    ]


def families(flow: Flow, watched: Mapping[str, int], now: float) -> list[Family]:
    """`watched`: counters of what the router follows its workers by."""
    return [
        *flow.meters.families(),
        *flow.demand.families(),
        *_objectives(flow, now),
        *_choices(flow),
        *_picture(flow, watched),
    ]


def _objectives(flow: Flow, now: float) -> Iterable[Family]:
    target = flow.settings.admission.target
    goodput: dict[Labels, float] = {}
    attainment: dict[Labels, float] = {}
    burn: dict[Labels, float] = {}
    for slo_class, rolling in flow.goodput.items():
        for window_s, figures in rolling.counts(now).items():
            labels = (slo_class, WINDOWS[window_s])
            for held, number in (
                (goodput, figures.goodput),
                (attainment, figures.attainment),
                (burn, figures.burn_rate(target)),
            ):
                if number is not None:
                    held[labels] = number
    by_window = ("slo_class", "window")
    yield gauge("pdfleet_goodput", "Requests a second that met every objective of their class.",
                by_window, goodput)  # fmt: skip
    yield gauge("pdfleet_attainment_ratio", "Share of the requests that count which met every objective.",
                by_window, attainment)  # fmt: skip
    yield gauge("pdfleet_burn_rate", "How many times faster than allowed the budget of misses is used up.",
                by_window, burn)  # fmt: skip
    yield value("pdfleet_attainment_target", "The share that is to attain: setting admission.target.",
                Kind.GAUGE, target)  # fmt: skip
    yield gauge("pdfleet_burning", "1: somebody should be called, for both windows of a pair burn too fast.",
                ("slo_class",), {(name,): float(_burning(rolling, target, now))
                                 for name, rolling in flow.goodput.items()})  # fmt: skip


def _burning(rolling: Rolling, target: float, now: float) -> bool:
    return rolling.burning(target, now) is not None


def _choices(flow: Flow) -> Iterable[Family]:
    counted = flow.counters
    yield counter("pdfleet_router_decisions",
                  "Workers chosen: remote (a prefill worker), local (a decode worker computes the prompt), "
                  "handoff (a decode worker goes on), early (one brings KV while the prompt is computed), "
                  "borrowed (with what another one caches).",
                  ("reason",), {(reason,): counted[name] for name, reason in DECISIONS.items()})  # fmt: skip
    yield counter("pdfleet_router_events",
                  "Early hand-offs gone on with; workers' refusals; workers lost; requests queued and shed.",
                  ("event",), {(name,): counted[name] for name in EVENTS})  # fmt: skip
    failed = {name.removeprefix("failed_"): count for name, count in counted.items() if "failed_" in name}
    yield counter("pdfleet_requests_failed", "Requests that ended with an error, by its name.",
                  ("error",), {(name,): count for name, count in failed.items()})  # fmt: skip
    waiting = flow.admission.waiting()
    yield gauge("pdfleet_router_queue", "Requests that wait for their turn.",
                ("slo_class",), {(name,): waiting[name] for name in flow.settings.objectives})  # fmt: skip


def _picture(flow: Flow, watched: Mapping[str, int]) -> Iterable[Family]:
    index, workers = flow.index, flow.roster.workers()
    unproven = index.unproven()
    known = ("worker", "role", "model")
    keys = {worker.id: (worker.id, worker.card.role.value, worker.card.model) for worker in workers}
    yield value("pdfleet_router_ready", "1: a request could be served, or is held until one wakes the fleet.",
                Kind.GAUGE, float(flow.ready() is None))  # fmt: skip
    yield value("pdfleet_router_index_blocks", "Blocks in the prefix index; one of two workers, twice.",
                Kind.GAUGE, index.size)  # fmt: skip
    yield value("pdfleet_router_index_unproven", "Workers of whose blocks the index is not certain.",
                Kind.GAUGE, len(unproven))  # fmt: skip
    yield counter("pdfleet_router_watch", "What came from registry and bus, and workers' snapshots.",
                  ("event",), {(name,): watched.get(name, 0) for name in {*WATCHED, *watched}})  # fmt: skip
    yield gauge("pdfleet_router_worker_usable", "1: a request could be sent there now.", known,
                {keys[worker.id]: float(worker.usable) for worker in workers})  # fmt: skip
    yield gauge("pdfleet_router_worker_proven", "1: the index equals the worker's own table.", known,
                {keys[worker.id]: float(worker.id not in unproven) for worker in workers})  # fmt: skip
    yield gauge("pdfleet_router_worker_index_blocks", "Its blocks in the prefix index.", known,
                {keys[worker.id]: index.blocks(worker.id) for worker in workers})  # fmt: skip
    yield gauge("pdfleet_router_worker_queued_tokens", "Prompt tokens believed to be queued there.", known,
                {keys[worker.id]: worker.queued_tokens for worker in workers})  # fmt: skip
    yield gauge("pdfleet_router_worker_sequences", "Sequences believed to be there.", known,
                {keys[worker.id]: worker.sequences for worker in workers})  # fmt: skip
