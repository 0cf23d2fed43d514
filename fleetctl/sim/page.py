"""A simulation as one HTML file that needs nothing else: like a load test, and what its workers did. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetctl.bench.page import card, class_table, html_table, page, pair, run_plots, share
from fleetctl.bench.plan import Plan
from fleetctl.bench.plots import Axis, Series, plot
from fleetctl.bench.words import Record
from fleetctl.sim.words import Asked, Played

MOST_POINTS = 300
"""Of a line: an hour's seconds would be a band."""


def sim_page(said: Mapping[str, Any], plan: Plan, played: Played) -> str:
    """`said` is the report, with `workload`."""
    records = [_record(one) for one in played.asked]
    first_s = played.asked[0].at_s
    plots = [*run_plots(plan, records), _busy_plot(played, first_s)]
    shown = {**said, "settings": {**said["workload"], **said["settings"]}}
    return page(
        "Simulation",
        shown,
        [
            _cards(said),
            f'<h2>Latency and load</h2><div class="plots">{"".join(plots)}</div>',
            "<h2>By class</h2>",
            class_table(said),
            "<h2>Workers</h2>",
            _role_table(said),
        ],
    )


def _record(one: Asked) -> Record:
    """As a load generator would have noted it that is never late."""
    return Record(
        conversation=one.number,
        turn=0,
        service_class=one.service_class,
        due_s=one.at_s,
        asked_tokens=one.prompt_tokens,
        wanted_tokens=one.wanted_tokens,
        sent_s=one.at_s,
        outcome=one.outcome,
        prompt_tokens=one.prompt_tokens,
        cached_tokens=one.cached_tokens,
        output_tokens=one.output_tokens,
    )


def _cards(said: Mapping[str, Any]) -> str:
    whole, requests = said["all"], said["requests"]
    failed = requests["judged"] - requests["ends"].get("finished", 0)
    cards = [
        card("goodput", f"{whole['goodput']:g}/s" if "goodput" in whole else "–"),
        card("attainment", share(whole.get("attainment"))),
        card("requests judged", f"{requests['judged']}"),
        card("not finished", f"{failed}", "bad" if failed else "good"),
        card("TTFT p50 / p99", pair(whole.get("ttft_ms"))),
        card("TPOT p50 / p99", pair(whole.get("tpot_ms"))),
        card("prompts found in caches", share(said["tokens"]["cached_share"])),
        card("KV moved", f"{said['transfers']['bytes'] / 1e9:,.1f} GB"),
    ]
    return f'<div class="cards">{"".join(cards)}</div>'


def _busy_plot(played: Played, first_s: float) -> str:
    series = []
    for name, role in played.roles.items():
        width = -(-len(role.busy) // MOST_POINTS)
        points = [
            (first_s + start, sum(part) / len(part))
            for start in range(0, len(role.busy), max(1, width))
            if (part := role.busy[start : start + width])
        ]
        series.append(Series(f"{role.workers} {name}", points))
    title = "Time in which workers computed"
    return plot(title, Axis("seconds since the start"), Axis("share", least=0.0, most=1.0), series)


def _role_table(said: Mapping[str, Any]) -> str:
    rows = [
        [
            name,
            role["workers"],
            share(role["busy_share"]),
            "–" if role["tokens_a_step"] is None else f"{role['tokens_a_step']:.4g}",
            share(role["cached_share"]),
            role["counters"].get("preemptions", 0),
        ]
        for name, role in said["roles"].items()
    ]
    titles = ("role", "workers", "busy while asked", "tokens a step", "prompts found", "preemptions")
    return html_table(titles, rows)
