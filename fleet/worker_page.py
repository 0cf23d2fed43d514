"""What a worker tells Prometheus, from its card, its report and its jobs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleet.events import LoadReport
from fleet.member import WorkerCard
from fleet.metrics import Family, Kind, Labels, counter, gauge, value

ENDS = ("finished", "cancelled", "failed")
"""Counters of the engine that say how sequences ended."""
TIERS: Mapping[str, str] = {"cached_tokens": "device"}
"""Counters of prompt tokens that were found in the prefix cache → where."""
GAUGES = (
    "leases",
    "memory_weights_bytes",
    "memory_activations_bytes",
    "memory_graphs_bytes",
    "memory_kv_bytes",
    "memory_device_bytes",
)
"""Among the counters, the ones that may fall."""


def families(
    card: WorkerCard, report: LoadReport, received: Mapping[Labels, int], ended: Mapping[Labels, int]
) -> Iterable[Family]:
    """`received`: jobs by kind; `ended`: by how. Their difference is what runs."""
    yield gauge("pdfleet_worker_info", "1; the labels say what it is.",
                ("worker", "role", "state", "model", "version"),
                {(card.id, card.role, report.state, card.model, card.version): 1.0})  # fmt: skip
    yield counter("pdfleet_worker_jobs_received", "Jobs that routers sent.", ("kind",), received)
    yield counter("pdfleet_worker_jobs_ended",
                  "Of those, the ones that had their last word: prefilled, stop, length, cancelled or the "
                  "name of an error.", ("end",), ended)  # fmt: skip
    yield value("pdfleet_worker_jobs_running", "Of those, the ones that had not.",
                Kind.GAUGE, sum(received.values()) - sum(ended.values()))  # fmt: skip
    yield gauge("pdfleet_worker_sequences", "Sequences in the batch, and those that wait.",
                ("state",), {("running",): report.running, ("waiting",): report.waiting})  # fmt: skip
    yield value("pdfleet_worker_queued_tokens", "Prompt tokens accepted and not computed yet.",
                Kind.GAUGE, report.queued_tokens)  # fmt: skip
    used = (report.blocks_total - report.blocks_free) / report.blocks_total if report.blocks_total else None
    yield value("pdfleet_worker_blocks_used_ratio", "Share of the KV blocks that could not be had at once.",
                Kind.GAUGE, used)  # fmt: skip
    yield value("pdfleet_worker_stalled_seconds", "For how long a step has been owed and none has ended.",
                Kind.GAUGE, report.stalled_s)  # fmt: skip
    yield value("pdfleet_worker_prefill_tokens_per_second", "Measured in recent steps with prompts.",
                Kind.GAUGE, report.prefill_tokens_s)  # fmt: skip
    yield value("pdfleet_worker_decode_step_seconds", "Measured of recent steps without prompts.",
                Kind.GAUGE, report.decode_step_s)  # fmt: skip
    yield value("pdfleet_worker_pull_bytes_per_second", "Measured of recent pulls.",
                Kind.GAUGE, report.pull_bytes_s)  # fmt: skip
    yield from _counters(report.counters)


def _counters(counters: Mapping[str, int]) -> Iterable[Family]:
    yield counter("pdfleet_worker_sequences_ended", "Sequences of the engine by their end.", ("end",),
                  {(name,): counters[name] for name in ENDS if name in counters})  # fmt: skip
    yield counter("pdfleet_worker_prefix_hit_tokens", "Prompt tokens found in the prefix cache.", ("tier",),
                  {(tier,): counters[name] for name, tier in TIERS.items() if name in counters})  # fmt: skip
    for name, number in sorted(counters.items()):
        if name not in ENDS and name not in TIERS:
            kind = Kind.GAUGE if name in GAUGES else Kind.COUNTER
            shown = name.replace("_", " ")
            yield value(f"pdfleet_worker_{name}", f"{shown}: docs/counters.md.", kind, number)
