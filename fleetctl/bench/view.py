"""What the terminal shows of a run: live while it runs, and its figures at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fleet.goodput import Percentiles
from fleetctl.bench.play import Snapshot
from fleetctl.bench.search import Trial


def live(snapshot: Snapshot | None, duration_s: float | None, title: str) -> RenderableType:
    """`duration_s`: how long it sends; None: until the workload ends."""
    if snapshot is None:
        return Text(f"{title}: starting", style="dim")
    counted = snapshot.attained + snapshot.missed
    head = Text.assemble((title, "bold"), f"  {snapshot.elapsed_s:5.1f} s")
    if snapshot.ending:
        head.append(f"  all sent; {snapshot.running} still run", style="yellow")
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(6):
        table.add_column(no_wrap=True)
    table.add_row(
        "sent", f"{snapshot.sent}", "running", f"{snapshot.running}", "TTFT", _spread(snapshot.ttft)
    )
    table.add_row(
        "finished",
        f"{snapshot.finished}",
        "output",
        f"{snapshot.output_tokens / max(snapshot.elapsed_s, 1e-9):.0f} tokens/s",
        "TPOT",
        _spread(snapshot.tpot),
    )
    table.add_row(
        "attained",
        _attainment(snapshot.attained / counted if counted else None),
        "missed",
        f"{snapshot.missed}",
        "own lag",
        _spread(snapshot.lag),
    )
    parts: list[RenderableType] = [head]
    if duration_s:
        parts.append(ProgressBar(total=duration_s, completed=min(snapshot.elapsed_s, duration_s), width=60))
    parts.append(table)
    if snapshot.errors:
        said = ", ".join(f"{kind} {count}" for kind, count in snapshot.errors.items())
        parts.append(Text(f"errors: {said}", style="red"))
    return Group(*parts)


def figures(report: Mapping[str, Any]) -> RenderableType:
    """The end of a run."""
    rows = dict(report["classes"])
    if len(rows) != 1:
        rows["all"] = report["all"]
    parts = class_tables(rows)
    missed = report["all"]["missed_by"]
    if missed:
        parts.append(Text("missed by " + ", ".join(f"{reason} {count}" for reason, count in missed.items())))
    tokens = report["tokens"]
    said = []
    if "prompt" in tokens:
        said.append(f"prompts of {tokens['prompt']['p50']} tokens (median)")
    if "output" in tokens:
        said.append(f"answers of {tokens['output']['p50']}, {tokens['output_per_s']:g} tokens/s")
    if "cached_share" in tokens:
        said.append(f"{tokens['cached_share']:.0%} of prompts found in caches")
    if said:
        parts.append(Text(", ".join(said)))
    for kind, row in report["errors"].items():
        parts.append(Text(f"{row['count']} × {kind}: {row['first']}", style="red"))
    lag = report["generator"]["lag_ms"]
    if lag is not None:
        parts.append(
            Text(
                f"generator: sends late by {pair(lag)} ms (p50 / p99), "
                f"{report['generator']['cpu_share']:.0%} of a core",
                style="dim",
            )
        )
    if "interrupted" in report:
        parts.append(Text(f"ended early: {report['interrupted']}", style="yellow"))
    parts += [Text(f"! {remark}", style="yellow") for remark in report["remarks"]]
    return Group(*parts)


def class_tables(rows: Mapping[str, Mapping[str, Any]]) -> list[RenderableType]:
    """Figures by class, as `fleetctl.bench.report` makes them: counts, and below them latencies, so that both
    fit 80 columns."""
    counts = lean_table("class", "attained", "missed", "attainment", "goodput")
    latencies = lean_table("class", "TTFT", "TPOT", "ITL")
    for name, row in rows.items():
        goodput = f"{row['goodput']:.4g}/s" if "goodput" in row else "–"
        share = _attainment(row.get("attainment"))
        counts.add_row(name, f"{row['attained']:,}", f"{row['missed']:,}", share, goodput)
        latencies.add_row(name, *(_triple(row.get(f"{key}_ms")) for key in ("ttft", "tpot", "itl")))
    return [counts, Text(), latencies, Text("milliseconds: p50 / p90 / p99", style="dim"), Text()]


def lean_table(*titles: str) -> Table:
    """Without lines; the first column to the left, numbers to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for place, title in enumerate(titles):
        table.add_column(title, justify="right" if place else "left", no_wrap=True)
    return table


def trials(done: Sequence[Trial], why: str) -> RenderableType:
    """The runs of a search so far, and what comes next."""
    table = lean_table("rate", "attained", "missed", "attainment", "goodput", "TTFT ms", "TPOT ms")
    for one in done:
        table.add_row(
            f"{one.rate:.4g}/s",
            str(one.attained),
            str(one.missed),
            _attainment(one.attainment),
            "–" if one.goodput is None else f"{one.goodput:.4g}/s",
            pair(one.facts.get("ttft_ms")),
            pair(one.facts.get("tpot_ms")),
        )
    note = [Text("TTFT, TPOT: p50 / p99", style="dim")] if done else []
    return Group(*([table] if done else []), *note, Text(why, style="cyan"))


def _attainment(share: float | None) -> Text:
    if share is None:
        return Text("–")
    return Text(f"{share:.1%}", style="green" if share >= 0.95 else "red")


def _spread(percentiles: Percentiles | None) -> str:
    if percentiles is None:
        return "–"
    return f"{_short(percentiles.p50 * 1e3)} / {_short(percentiles.p99 * 1e3)} ms"


def pair(row: Mapping[str, float] | None) -> str:
    """p50 / p99."""
    return "–" if row is None else f"{_short(row['p50'])} / {_short(row['p99'])}"


def _triple(row: Mapping[str, float] | None) -> str:
    return "–" if row is None else " / ".join(_short(row[key]) for key in ("p50", "p90", "p99"))


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
