"""What a simulation found: figures by class and by role, as one object and as a table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType

from fleet.goodput import End, Figures, Tally, attains
from fleetctl.bench.report import figures_dict
from fleetctl.bench.view import class_tables, lean_table
from fleetctl.sim.words import Asked, Played, Setup


def judged(setup: Setup, played: Played) -> list[Asked]:
    first = played.asked[0].at_s
    return [one for one in played.asked if one.at_s - first >= setup.warm_up_s]


def figures(setup: Setup, asked: Iterable[Asked], seconds: float) -> dict[str, Figures]:
    """By class, and of all under the empty name. `seconds`: for how long requests came."""
    tallies: defaultdict[str, Tally] = defaultdict(Tally)
    for one in asked:
        assert one.outcome is not None, "a run ends when all requests have"
        verdict = attains(one.outcome, setup.objectives[one.service_class])
        for name in (one.service_class, ""):
            tallies[name].add(one.outcome, verdict)
    return {name: tally.figures(seconds) for name, tally in sorted(tallies.items())}


def report(setup: Setup, played: Played) -> dict[str, Any]:
    """Ready for JSON. Figures that were never reached are absent."""
    counted = judged(setup, played)
    window_s = max(0.0, played.sending_s - setup.warm_up_s)
    by_class = {name: figures_dict(found) for name, found in figures(setup, counted, window_s).items()}
    whole = by_class.pop("", {})
    finished = [one for one in counted if one.outcome is not None and one.outcome.end is End.FINISHED]
    prompt = sum(one.prompt_tokens for one in finished)
    ends = Counter(str(one.outcome.end) for one in counted if one.outcome is not None)
    workers = setup.prefill + setup.decode
    if "goodput" in whole:
        whole["goodput_per_worker"] = round(whole["goodput"] / workers, 6)
    return {
        "settings": settings(setup),
        "seconds": {
            "sending": round(played.sending_s, 3),
            "judged": round(window_s, 3),
            "total": round(played.total_s, 3),
        },
        "requests": {"sent": len(played.asked), "judged": len(counted), "ends": dict(sorted(ends.items()))},
        "all": whole,
        "classes": by_class,
        "tokens": {
            "prompt": prompt,
            "output": sum(one.output_tokens for one in counted),
            "cached_share": _share(sum(one.cached_tokens for one in finished), prompt),
        },
        "roles": {
            name: {
                "workers": role.workers,
                "busy_share": round(role.busy_share, 4),
                "tokens_a_step": _share(role.counters["computed_tokens"], role.counters["steps"]),
                "cached_share": _share(role.counters["cached_tokens"], role.counters["prompt_tokens"]),
                "counters": {key: count for key, count in role.counters.items() if count},
            }
            for name, role in played.roles.items()
        },
        "busy_by_second": {
            name: [round(share, 3) for share in role.busy] for name, role in played.roles.items()
        },
        "transfers": transfers(setup, played),
        "routers": dict(sorted(played.routers.items())),
        **({"scaling": played.scaled.told()} if played.scaled is not None else {}),
        "cpu_s": round(played.cpu_s, 3),
    }


def transfers(setup: Setup, played: Played) -> dict[str, Any]:
    totals: Counter[str] = Counter()
    for role in played.roles.values():
        totals.update(role.counters)
    return {
        "pulls": totals["pulls"],
        "failed": totals["pull_failures"],
        "recomputed": totals["pulls_recomputed"],
        "bytes": round(totals["pulled_blocks"] * setup.kv_bytes * setup.block_size),
        "tokens": totals["pulled_tokens"],
        "found_there_tokens": totals["pull_hit_tokens"],
    }


def settings(setup: Setup) -> dict[str, Any]:
    told = {name: value for name, value in asdict(setup).items() if name not in ("speed", "objectives")}
    if setup.scaling is not None:
        told["scaling"]["decisions"] = str(setup.scaling.decisions or "") or None
    told["faults"] = [f"{one.kind}:{one.process}@{one.at_s:g}+{one.for_s:g}" for one in setup.faults]
    told["policy"] = setup.policy.value
    told["objectives"] = {
        name: {key: limit for key, limit in asdict(one).items() if key.endswith("_ms") and limit is not None}
        for name, one in setup.objectives.items()
    }
    return {"speed": setup.speed.as_dict(), **told}


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def table(said: Mapping[str, Any]) -> RenderableType:
    """The same for people."""
    rows = dict(said["classes"])
    if len(rows) != 1:
        rows["all"] = said["all"]
    roles = lean_table("role", "workers", "busy", "prefix found", "prompt tokens", "preempted")
    for name, role in said["roles"].items():
        counters = role["counters"]
        computed = counters.get("computed_tokens", 0) - counters.get("generated_tokens", 0)
        roles.add_row(
            name,
            str(role["workers"]),
            f"{role['busy_share']:.0%}",
            "–" if role["cached_share"] is None else f"{role['cached_share']:.1%}",
            f"{max(0, computed):,}",
            str(counters.get("preemptions", 0)),
        )
    moved = said["transfers"]
    lines = [
        f"{moved['pulls']:,} pulls of {moved['bytes'] / 1e9:,.1f} GB, {moved['failed']} failed; "
        f"of all prompt tokens {said['tokens']['cached_share'] or 0:.1%} were found in a cache",
    ]
    missed = said["all"].get("missed_by")
    if missed:
        lines.append("missed by " + ", ".join(f"{reason} {count}" for reason, count in missed.items()))
    if scaled := said.get("scaling"):
        lines.append(
            f"{scaled['worker_hours']:.2f} worker hours; changes of the counts by the planner: "
            f"{scaled['changes']}, of a worker's role: {scaled['turns']}"
        )
    total_s, sent = said["seconds"]["total"], said["requests"]["sent"]
    lines.append(f"{sent:,} requests, {total_s:,.0f} s of the fleet's time in {said['cpu_s']:,.1f} s")
    return Group(*class_tables(rows), roles, "", *lines)
