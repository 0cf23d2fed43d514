"""The fleet at a glance as a terminal picture: what its routers show, put together. For `fleetctl top`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


class RouterSaid(msgspec.Struct):
    id: str
    fleet: str
    target: float
    trouble: str | None


class ClassSaid(msgspec.Struct):
    name: str
    objectives: Mapping[str, float]
    waiting: int
    running: int
    goodput: float | None
    attained: int
    missed: int
    ttft: tuple[float, float, float] | None
    tpot: tuple[float, float, float] | None
    burn: Mapping[str, float | None]
    burning: str | None


class FlowSaid(msgspec.Struct):
    waiting: int
    prefilling: int
    moving: int
    decoding: int


class RequestSaid(msgspec.Struct):
    id: str
    slo_class: str = msgspec.field(name="class")
    state: str
    seconds: float
    attained: bool | None
    why: str | None
    workers: tuple[str, ...]


class PlanSaid(msgspec.Struct):
    prefill: int
    decode: int
    why: str
    at: float


class Said(msgspec.Struct):
    """What one router answers at `/fleet/live`; what a newer one says besides is passed over."""

    at: float
    router: RouterSaid
    classes: tuple[ClassSaid, ...]
    flow: FlowSaid
    totals: Mapping[str, int]
    slow: tuple[RequestSaid, ...]
    worker_fields: tuple[str, ...]
    workers: tuple[tuple[Any, ...], ...]
    plan: PlanSaid | None = None

    def rows(self) -> list[dict[str, Any]]:
        return [dict(zip(self.worker_fields, row, strict=False)) for row in self.workers]


Row = Mapping[str, Any]
_BAD = ("lost", "stalled", "silent")
SORTS: Mapping[str, Callable[[Row], Any]] = {
    "queue": lambda row: (-(row["waiting"] or 0), -row["queued_tokens"], -(row["running"] or 0)),
    "kv": lambda row: -((row["used"] or 0) / row["blocks"] if row["blocks"] else 0.0),
    "running": lambda row: -(row["running"] or 0),
    "state": lambda row: (row["state"] not in _BAD, row["state"] == "ready"),
    "name": lambda row: 0,
}
"""What stands first in the list of workers; all else by role and name."""


def draw_glance(
    said: Sequence[Said], before: Sequence[Said], sort: str, height: int, silent: Sequence[str] = ()
) -> RenderableType:
    """Fits into `height` lines if that is 20 or more. `before`: what the routers said earlier, for rates;
    `silent`: what is wrong with others."""
    troubles = [*silent, *_troubles(said)][:3]
    classes = _classes(said)
    slow = _slowest(said)
    plan = next(([_planned(one.plan, one.at)] for one in said if one.plan is not None), [])
    left = (
        height - 9 - len(classes.rows) - len(troubles) - len(plan)
    )  # blank lines, titles, and one for the cursor
    slow_rows = min(len(slow), max(2, left // 3))
    rows = sorted(said[0].rows(), key=lambda row: (row["role"] == "decode", len(row["id"]), row["id"]))
    rows.sort(key=SORTS[sort])
    workers = _workers(rows, max(3, left - slow_rows))
    return Group(
        _head(said, rows),
        _places(said, before),
        *plan,
        *(Text(f"! {trouble}", style="red", no_wrap=True, overflow="ellipsis") for trouble in troubles),
        Text(),
        classes,
        Text(),
        workers,
        Text(),
        _slow(slow[:slow_rows]),
    )


def _head(said: Sequence[Said], rows: Sequence[Row]) -> Text:
    head = Text.assemble(("pdfleet ", "bold"), (said[0].router.fleet, "bold cyan"), no_wrap=True)
    for role in ("prefill", "decode"):
        of = [row for row in rows if row["role"] == role]
        ready = sum(row["state"] == "ready" for row in of)
        head.append(f"   {role} ").append(
            f"{ready}/{len(of)} ready", "green" if ready == len(of) else "yellow"
        )
    routers = f"{len(said)} routers" if len(said) > 1 else f"router {said[0].router.id}"
    return head.append(f"   {routers}", "dim")


def _places(said: Sequence[Said], before: Sequence[Said]) -> Text:
    def count(name: str) -> int:
        return sum(getattr(one.flow, name) for one in said)

    def told(name: str, unit: str, once: bool = False) -> str:
        return f"{_scaled(_rate(said, before, name, once))}{unit}/s"

    return Text.assemble(
        (told("requests", " req"), "dim"), " → ",
        (str(count("waiting")), "bold yellow"), " wait → ",
        (str(count("prefilling")), "bold green"), " in prefill → ",
        (str(count("moving")), "bold magenta"), " move KV ", (told("pulled_bytes", "B", True), "dim"), " → ",
        (str(count("decoding")), "bold blue"), " in decode ", (told("generated_tokens", " tok", True), "dim"),
        no_wrap=True, overflow="ellipsis",
    )  # fmt: skip


def _planned(plan: PlanSaid, now: float) -> Text:
    """In one line: `fleetctl status` has all of it."""
    return Text.assemble(
        ("planner ", "bold"), f"prefill {plan.prefill}, decode {plan.decode} ",
        (f"({_seconds(max(0.0, now - plan.at))} ago): ", "dim"), plan.why,
        no_wrap=True, overflow="ellipsis",
    )  # fmt: skip


def _rate(said: Sequence[Said], before: Sequence[Said], name: str, once: bool) -> float | None:
    """A second. `once`: of workers, whom each router counts. None: there is nothing to compare with."""
    earlier = {one.router.id: one for one in before}
    rates = []
    for one in said:
        old = earlier.get(one.router.id)
        if old is None or one.at <= old.at or one.totals[name] < old.totals[name]:
            return None
        rates.append((one.totals[name] - old.totals[name]) / (one.at - old.at))
    return max(rates) if once else sum(rates)


def _troubles(said: Sequence[Said]) -> list[str]:
    found = [one.router.trouble for one in said if one.router.trouble]
    found += [f"{each.name}: {each.burning}" for one in said for each in one.classes if each.burning]
    return list(dict.fromkeys(found))


def _table(*titles: str, apart: int = 2) -> Table:
    table = Table(box=None, padding=(0, apart, 0, 0), header_style="dim", pad_edge=False)
    for title in titles:
        left = title in ("class", "worker", "state", "KV in use")
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    return table


def _classes(said: Sequence[Said]) -> Table:
    """Counts of all routers; times of the one where they are worst, for percentiles do not add up."""
    table = _table(
        "class", "good/s", "attain", "burn", "TTFT p50", "p99", "TPOT p50", "p99", "run", "wait", apart=1
    )
    target = said[0].router.target
    names = list(dict.fromkeys(each.name for one in said for each in one.classes))
    for name in names:
        of = [each for one in said for each in one.classes if each.name == name]
        goodput = [each.goodput for each in of if each.goodput is not None]
        attained, missed = sum(each.attained for each in of), sum(each.missed for each in of)
        share = attained / (attained + missed) if attained + missed else None
        burn = max((rate for each in of if (rate := each.burn.get("5m")) is not None), default=None)
        limits = of[0].objectives
        table.add_row(
            Text(name, style="bold"),
            _scaled(sum(goodput) if goodput else None),
            _told(None if share is None else f"{share:.1%}", share is not None and share < target),
            _told(None if burn is None else f"{burn:.1f}×", burn is not None and burn > 1),
            *_times([each.ttft for each in of], limits.get("ttft_ms")),
            *_times([each.tpot for each in of], limits.get("tpot_ms")),
            str(sum(each.running for each in of)),
            str(sum(each.waiting for each in of)),
        )
    return table


def _times(of: Sequence[tuple[float, float, float] | None], limit_ms: float | None) -> list[Text]:
    known = [each for each in of if each is not None]
    worst = [max((each[place] for each in known), default=None) for place in (0, 2)]
    late = [limit_ms is not None and value is not None and value * 1000 > limit_ms for value in worst]
    return [_told(_seconds(value), bad) for value, bad in zip(worst, late, strict=True)]


def _workers(rows: Sequence[Row], most: int) -> RenderableType:
    if not rows:
        return Text("no worker is there", style="dim")
    table = _table("worker", "state", "run", "queue", "prompt tokens", "KV in use")
    shown = rows if len(rows) <= most else rows[: most - 1]
    for row in shown:
        table.add_row(
            Text(row["id"], style="bold", overflow="ellipsis"),
            Text(row["state"], style=_state_style(row["state"])),
            _scaled(row["running"]),
            _scaled(row["waiting"]),
            _scaled(row["queued_tokens"]),
            _gauge(row["used"], row["blocks"]),
        )
    if len(shown) == len(rows):
        return table
    rest = rows[len(shown) :]
    idle = sum(row["state"] == "ready" for row in rest)
    return Group(table, Text(f"and {len(rest)} more, {idle} of them ready", style="dim"))


def _state_style(state: str) -> str:
    return "green" if state == "ready" else "red" if state in _BAD else "yellow"


def _gauge(used: int | None, blocks: int) -> Text:
    if used is None or not blocks:
        return Text("–", style="dim")
    share = used / blocks
    # Any use at all is seen: at least one cell.
    cells = min(10, max(round(share * 10), 1 if used else 0))
    style = "green" if share < 0.75 else "yellow" if share < 0.95 else "red"
    return Text("█" * cells, style=style).append("░" * (10 - cells), "dim").append(f" {share:.0%}", "default")


def _slowest(said: Sequence[Said]) -> list[RequestSaid]:
    found = [request for one in said for request in one.slow]
    return sorted(found, key=lambda one: (one.attained is not False, -one.seconds))


def _slow(requests: Sequence[RequestSaid]) -> RenderableType:
    if not requests:
        return Text()
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name in ("slow request", "class", "seconds", "why"):
        grid.add_column(no_wrap=True, overflow="ellipsis", justify="right" if name == "seconds" else "left")
    grid.add_row(*(Text(title, style="dim") for title in ("slow request", "class", "took", "")))
    for one in requests:
        why = Text(one.why, style="red") if one.why else Text(one.state, style="dim")
        grid.add_row(one.id, one.slo_class, _seconds(one.seconds) or "", why)
    return grid


def _told(text: str | None, bad: bool) -> Text:
    return Text("–", style="dim") if text is None else Text(text, style="red" if bad else "")


def _seconds(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _scaled(value: float | None) -> str:
    if value is None:
        return "–"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if letter == 'k' else size):.1f} {letter}"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
