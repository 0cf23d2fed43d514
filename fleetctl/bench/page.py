"""A report as one HTML file that needs nothing else: figures, tables, plots. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fleet.goodput import End
from fleetctl.bench.plan import Plan
from fleetctl.bench.plots import Axis, Rule, Series, cdf, plot
from fleetctl.bench.report import judged, timeline
from fleetctl.bench.search import Trial
from fleetctl.bench.words import Record

_STYLE = """
:root { color-scheme: light dark; --text: #1d2430; --soft: #5d6778; --line: #d9dee6; --back: #fff;
  --card: #f6f8fb; --good: #18794e; --bad: #c0262d; --rule: #8a5a00;
  --c0: #1f6feb; --c1: #d1570b; --c2: #18794e; --c3: #8250df; --c4: #bf3989; --c5: #57606a; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e9f1; --soft: #9aa6b8; --line: #333c4a;
  --back: #12161d; --card: #1a2029; --good: #4cc38a; --bad: #ff7b72; --rule: #d9a441;
  --c0: #6cb0ff; --c1: #ff9b5e; --c2: #4cc38a; --c3: #c29bff; --c4: #ff8bc8; --c5: #a5b0bf; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1360px; padding: 28px 24px 60px;
  background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 22px; margin: 0; } h2 { font-size: 17px; margin: 36px 0 10px; }
h3 { font-size: 14px; margin: 0 0 6px; font-weight: 600; } p { margin: 4px 0; } .soft { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px;
  margin: 20px 0; }
.card { background: var(--card); border-radius: 10px; padding: 12px 16px; }
.card b { display: block; font-size: 21px; white-space: nowrap; line-height: 1.25; }
.card span { color: var(--soft); font-size: 13px; }
.good { color: var(--good); } .bad { color: var(--bad); }
.remark { border-left: 3px solid var(--bad); padding: 4px 12px; margin: 8px 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 18px; }
figure { margin: 0; background: var(--card); border-radius: 10px; padding: 14px 16px 10px; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 11.5px; }
svg .title { fill: var(--text); } .middle { text-anchor: middle; } .end { text-anchor: end; }
.none { text-anchor: middle; } .grid { stroke: var(--line); } .axis { stroke: var(--soft); fill: none; }
.rule { stroke: var(--rule); stroke-dasharray: 5 4; } .line { fill: none; stroke-width: 1.8; }
figcaption { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; color: var(--soft); }
.key { display: inline-block; width: 18px; border-top: 3px solid var(--s); margin-right: 6px;
  vertical-align: middle; }
.line { stroke: var(--s); } .mark { fill: var(--s); fill-opacity: .65; }
.series-0 { --s: var(--c0); } .series-1 { --s: var(--c1); } .series-2 { --s: var(--c2); }
.series-3 { --s: var(--c3); } .series-4 { --s: var(--c4); } .series-5 { --s: var(--c5); }
.line.series-1 { stroke-dasharray: 7 3; } .line.series-2 { stroke-dasharray: 2 3; }
.line.series-3 { stroke-dasharray: 9 3 2 3; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; padding: 5px 9px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--soft); } th:first-child, td:first-child { text-align: left; }
td.text { text-align: left; white-space: normal; }
pre { background: var(--card); border-radius: 10px; padding: 14px 16px; overflow-x: auto; font-size: 13px; }
"""


def run_page(report: Mapping[str, Any], plan: Plan, records: Sequence[Record]) -> str:
    """Of one run."""
    return page(
        "Load test",
        report,
        [
            _run_cards(report),
            _remarks(report),
            f'<h2>Latency and load</h2><div class="plots">{"".join(run_plots(plan, records))}</div>',
            "<h2>By class</h2>",
            class_table(report),
            _error_table(report),
        ],
    )


def find_page(report: Mapping[str, Any], trials: Sequence[Trial]) -> str:
    """Of a search for the highest rate."""
    return page(
        "Highest rate",
        report,
        [
            _find_cards(report),
            _remarks(report),
            f'<h2>By rate</h2><div class="plots">{"".join(_find_plots(report, trials))}</div>',
            "<h2>Runs</h2>",
            _trial_table(trials),
        ],
    )


def page(title: str, report: Mapping[str, Any], parts: Sequence[str]) -> str:
    """A whole one: a title, its parts, the settings."""
    server = report.get("server", {})
    about = " · ".join(
        escape(str(one)) for one in (server.get("url"), server.get("model"), report.get("began")) if one
    )
    settings = escape(json.dumps({"server": server, **report["settings"]}, indent=2))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{escape(title)}</h1><p class="soft">{about}</p>{"".join(parts)}'
        f"<h2>Settings</h2><pre>{settings}</pre></body></html>\n"
    )


def card(name: str, value: str, kind: str = "") -> str:
    return f'<div class="card"><span>{escape(name)}</span><b class="{kind}">{escape(value)}</b></div>'


def _run_cards(report: Mapping[str, Any]) -> str:
    figures, tokens = report["all"], report["tokens"]
    judged_count, ends = report["requests"]["judged"], report["requests"]["ends"]
    failed = judged_count - ends.get("finished", 0)
    cards = [
        card("goodput", f"{figures['goodput']:g}/s" if "goodput" in figures else "–"),
        card("attainment", share(figures.get("attainment"))),
        card("requests judged", f"{judged_count}"),
        card("not finished", f"{failed}", "bad" if failed else "good"),
        card("TTFT p50 / p99", pair(figures.get("ttft_ms"))),
        card("TPOT p50 / p99", pair(figures.get("tpot_ms"))),
    ]
    if "output_per_s" in tokens:
        cards.append(card("output tokens", f"{tokens['output_per_s']:g}/s"))
    lag = report["generator"]["lag_ms"]
    if lag:
        kind = "good" if report["generator"]["kept_up"] else "bad"
        cards.append(card("generator's lag p99", f"{_short(lag['p99'])} ms", kind))
    return f'<div class="cards">{"".join(cards)}</div>'


def _find_cards(report: Mapping[str, Any]) -> str:
    found = report["found"]
    rate = found.get("rate")
    at = found.get("figures") or {}
    cards = [
        card("highest rate that passes", f"{rate:.4g}/s" if rate else "none", "good" if rate else "bad"),
        card("lowest rate that fails", f"{found['failed']:.4g}/s" if "failed" in found else "–"),
        card("target", share(found["target"])),
        card("goodput there", f"{at['goodput']:g}/s" if "goodput" in at else "–"),
        card("TTFT p50 / p99 there", pair(at.get("ttft_ms"))),
        card("TPOT p50 / p99 there", pair(at.get("tpot_ms"))),
    ]
    return f'<div class="cards">{"".join(cards)}</div><p class="soft">Ended: {escape(found["why"])}.</p>'


def _remarks(report: Mapping[str, Any]) -> str:
    said = [
        *([f"interrupted: {report['interrupted']}"] if "interrupted" in report else []),
        *report["remarks"],
    ]
    return "".join(f'<p class="remark">{escape(one)}</p>' for one in said)


def run_plots(plan: Plan, records: Sequence[Record]) -> list[str]:
    """Of one run: how latencies are distributed, and how it went over time."""
    counted = judged(plan, records)
    names = sorted({record.service_class for record, _ in counted})
    plots = []
    for what, key in (("TTFT", "ttft"), ("TPOT", "tpot")):
        series, rules = [], []
        longest = 0.0
        for name in names:
            values = [
                value * 1e3
                for record, outcome in counted
                if record.service_class == name
                and (value := getattr(outcome, f"{key}_s")) is not None
                and value > 0
            ]
            series.append(Series(name or "default", cdf(values)))
            longest = max([longest, *values])
            limit = getattr(plan.of(name), f"{key}_ms")
            if limit is not None:
                label = f"{name}: {limit:g} ms" if name else f"objective: {limit:g} ms"
                rules.append(Rule(label, limit, vertical=True))
        # An objective far beyond all that was measured would press it into a corner.
        rules = [rule for rule in rules if rule.at < longest * 20]
        axis = Axis(f"{what}, ms", logarithmic=True)
        plots.append(plot(f"{what}: share of requests", axis, Axis("share", most=1.0), series, rules))
    rows = timeline(plan, records)
    rates = [
        Series(title, [(row["at_s"], row[key]) for row in rows])
        for title, key in (
            ("sent", "sent_per_s"),
            ("finished", "finished_per_s"),
            ("attained", "attained_per_s"),
        )
    ]
    seconds = Axis("seconds since the start")
    plots.append(plot("Requests a second", seconds, Axis("requests/s"), rates))
    running = [Series("running", [(row["at_s"], row["running_most"]) for row in rows])]
    plots.append(plot("Requests running at once", seconds, Axis("requests"), running))
    plots.append(plot("TTFT of each request", seconds, Axis("TTFT, ms", logarithmic=True), _scatter(counted)))
    tokens = [Series("tokens", [(row["at_s"], row["tokens_per_s"]) for row in rows])]
    plots.append(plot("Output tokens a second", seconds, Axis("tokens/s"), tokens))
    return plots


def _scatter(counted: Sequence[Any], most: int = 3000) -> list[Series]:
    """One mark a request, of at most so many: a browser draws no hundred thousand."""
    step = -(-len(counted) // most) if counted else 1
    good: list[tuple[float, float]] = []
    bad: list[tuple[float, float]] = []
    for record, outcome in counted[::step]:
        if outcome.ttft_s:
            (good if outcome.end is End.FINISHED else bad).append((record.sent_s, outcome.ttft_s * 1e3))
    return [Series("finished", good, line=False), Series("did not finish", bad, line=False)]


def _find_plots(report: Mapping[str, Any], trials: Sequence[Trial]) -> list[str]:
    """Lines go through what all runs at a rate say together; marks are single runs."""
    rate = Axis("rate, requests/s")
    rates = sorted({one.rate for one in trials})
    single = [(one.rate, one.attainment) for one in trials if one.attainment is not None]
    together = [(at, part) for at in rates if (part := _attainment(trials, at)) is not None]
    plots = [
        plot(
            "Goodput: rate × attainment",
            rate,
            Axis("attaining requests/s"),
            [
                Series("all runs at a rate", [(at, at * part) for at, part in together]),
                Series("all that is asked", [(0.0, 0.0), (rates[-1], rates[-1])] if rates else []),
                Series("one run", [(at, at * part) for at, part in single], line=False, marks=True),
            ],
        ),
        plot(
            "Attainment",
            rate,
            Axis("share", least=0.0, most=1.0),
            [
                Series("all runs at a rate", together),
                Series("one run", single, line=False, marks=True),
            ],
            [Rule(f"target {share(report['found']['target'])}", report["found"]["target"])],
        ),
    ]
    for name in ("ttft", "tpot"):
        told = [one for one in _longest_runs(trials) if f"{name}_ms" in one.facts]
        series = [
            Series(percent, [(one.rate, one.facts[f"{name}_ms"][percent]) for one in told], marks=True)
            for percent in ("p50", "p90", "p99")
        ]
        plots.append(plot(name.upper(), rate, Axis("ms", logarithmic=True), series))
    return plots


def _attainment(trials: Sequence[Trial], rate: float) -> float | None:
    here = [one for one in trials if one.rate == rate]
    counted = sum(one.attained + one.missed for one in here)
    return sum(one.attained for one in here) / counted if counted else None


def _longest_runs(trials: Sequence[Trial]) -> list[Trial]:
    """The run with most requests of each rate, by rate."""
    best: dict[float, Trial] = {}
    for one in trials:
        known = best.get(one.rate)
        if known is None or one.attained + one.missed > known.attained + known.missed:
            best[one.rate] = one
    return [best[rate] for rate in sorted(best)]


def class_table(report: Mapping[str, Any]) -> str:
    rows = []
    classes = dict(report["classes"])
    if len(classes) > 1:
        classes["all"] = report["all"]
    for name, figures in classes.items():
        cells = [
            name,
            figures["attained"],
            figures["missed"],
            figures["uncounted"],
            share(figures.get("attainment")),
            figures.get("goodput", "–"),
            *(_triple(figures.get(f"{key}_ms")) for key in ("ttft", "tpot", "itl", "e2e")),
            ", ".join(f"{reason} {count}" for reason, count in figures["missed_by"].items()) or "–",
        ]
        rows.append(cells)
    counts = ("class", "attained", "missed", "uncounted", "attainment", "goodput /s")
    titles = (*counts, "TTFT ms", "TPOT ms", "ITL ms", "E2E ms", "missed by")
    note = '<p class="soft">Milliseconds: p50 / p90 / p99.</p>'
    return html_table(titles, rows) + note


def _error_table(report: Mapping[str, Any]) -> str:
    if not report["errors"]:
        return ""
    rows = [[kind, row["count"], row["first"]] for kind, row in report["errors"].items()]
    return "<h2>Errors</h2>" + html_table(("kind", "count", "the first said"), rows, text=2)


def _trial_table(trials: Sequence[Trial]) -> str:
    rows = [
        [
            number,
            f"{one.rate:.4g}",
            one.attained,
            one.missed,
            share(one.attainment),
            "–" if one.goodput is None else f"{one.goodput:g}",
            _triple(one.facts.get("ttft_ms")),
            _triple(one.facts.get("tpot_ms")),
            "yes" if one.kept_up else "no",
        ]
        for number, one in enumerate(trials, 1)
    ]
    titles = ("run", "rate /s", "attained", "missed", "attainment", "goodput /s", "TTFT ms", "TPOT ms")
    return html_table((*titles, "generator kept up"), rows)


def html_table(titles: Sequence[str], rows: Sequence[Sequence[object]], text: int | None = None) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=text' if place == text else ''}>{escape(str(cell))}</td>"
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def pair(figures: Mapping[str, float] | None) -> str:
    return "–" if figures is None else f"{_short(figures['p50'])} / {_short(figures['p99'])} ms"


def _triple(figures: Mapping[str, float] | None) -> str:
    return "–" if figures is None else " / ".join(_short(figures[key]) for key in ("p50", "p90", "p99"))


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
