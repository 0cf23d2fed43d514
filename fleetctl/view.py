"""The fleet as a terminal picture: one drawing for `status` and for the live view of `up`."""

from __future__ import annotations

import json
import os

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from fleet.targets import Mode
from fleetctl.words import WORKERS, FleetPicture, WorkerRow

_LOOKS = {
    "ready": ("●", "green"),
    "starting": ("◌", "yellow"),
    "draining": ("◐", "cyan"),
    "stopping": ("◐", "cyan"),
    "turning": ("◐", "cyan"),
    "stalled": ("✗", "red"),
    "crashed": ("✗", "red"),
    "silent": ("✗", "red"),
    "away": ("✗", "red"),
}
"""Sign and colour of each state; sign and word say it too, for those who see no colour."""

_BAR = 6


def draw(picture: FleetPicture) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for title, align in (
        ("worker", "left"),
        ("role", "left"),
        ("state", "left"),
        ("running", "right"),
        ("waiting", "right"),
        ("KV blocks in use", "left"),
        ("pid", "right"),
    ):
        # Where there is no room it is the name that goes on below: cut, it could not be drained.
        name = title == "worker"
        justify: JustifyMethod = "right" if align == "right" else "left"
        table.add_column(title, justify=justify, no_wrap=not name, overflow="fold" if name else "ellipsis")
    for row in picture.workers:
        table.add_row(
            Text(row.id, style="bold"),
            row.role,
            state_text(row.state),
            _number(row.running),
            _number(row.waiting),
            _usage(row),
            _number(row.pid),
        )
    if not picture.workers:
        table.add_row(Text("no worker", style="dim"))
    return Group(
        _head(picture), *_planner(picture), Text(), table, *_troubles(picture), Text(), _servers(picture)
    )


def _head(picture: FleetPicture) -> Text:
    head = Text.assemble(("pdfleet ", "bold"), (picture.fleet, "bold cyan"))
    if picture.model:
        head.append(f"  {picture.model}", "dim")
    for kind in WORKERS:
        ready = sum(row.role == kind and row.state == "ready" for row in picture.workers)
        head.append(f"   {kind} ")
        if picture.desired is None:
            head.append(str(ready))
            continue
        want = picture.desired.of(kind)
        head.append(f"{ready}/{want}", "green" if ready == want else "yellow")
    return head


def _planner(picture: FleetPicture) -> list[RenderableType]:
    """What it wants and why, where it has anything to say."""
    desired, last = picture.desired, picture.decision
    if desired is None or desired.mode is Mode.OFF:
        return []
    head = Text.assemble(("planner ", "bold"), f"{desired.mode}s" if desired.mode is Mode.ADVISE else "acts")
    if desired.budget is not None:
        head.append(f", budget {desired.budget}", "dim")
    if last is None:
        return [head.append("  nothing decided yet", "yellow")]
    head.append(f"  prefill {last.prefill}, decode {last.decode}: ", "bold")
    head.append(last.why, "default")
    if last.advice:
        head.append(f"; {last.advice}", "dim")
    head.overflow = "fold"
    return [head]


def _servers(picture: FleetPicture) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for router in picture.routers:
        again = f"started again {router.restarts}×" if router.restarts else ""
        grid.add_row("router", state_text(router.state), f"{router.url}/v1", Text(again, style="dim"))
    if not picture.routers:
        grid.add_row("router", state_text("away"))
    if picture.nats is not None:
        grid.add_row("nats", state_text(picture.nats.state), picture.nats.address)
    grid.add_row("etcd", state_text(picture.etcd.state), picture.etcd.address)
    return grid


def state_text(state: str) -> Text:
    sign, style = _LOOKS.get(state, ("◌", "yellow"))
    return Text(f"{sign} {state}", style=style)


def _number(value: int | None) -> Text:
    return Text("–", style="dim") if value is None else Text(str(value))


def _usage(row: WorkerRow) -> Text:
    if row.blocks_free is None or not row.blocks_total:
        return Text("–", style="dim")
    used = row.blocks_total - row.blocks_free
    share = used / row.blocks_total
    # Any use at all is seen: at least one cell.
    cells = min(_BAR, max(round(share * _BAR), 1 if used else 0))
    style = "green" if share < 0.75 else "yellow" if share < 0.95 else "red"
    bar = Text("█" * cells, style=style).append("░" * (_BAR - cells), "dim")
    return bar.append(f" {_short(used)}/{_short(row.blocks_total)}", "default")


def _short(count: int) -> str:
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if count >= 10_000 and count >= size:
            scaled = count / size
            return f"{scaled:.1f}{letter}" if scaled < 9.95 else f"{scaled:.0f}{letter}"
    return str(count)


def _troubles(picture: FleetPicture) -> list[RenderableType]:
    """Below the table, where there is room: what is or was wrong with whom."""
    told: list[RenderableType] = []
    for row in picture.workers:
        notes = [row.note] if row.state in ("crashed", "silent") and row.note else []
        notes += [f"started again {row.restarts}×"] if row.restarts else []
        if notes:
            told.append(Text.assemble((row.id, "bold"), f"  {'; '.join(notes)}", overflow="fold"))
    return told


def try_line(url: str, model: str) -> str:
    """A command to paste, in one line, that shows that the fleet serves."""
    body = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    text = json.dumps(body).replace("'", "'\\''")
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{text}'"


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        """Nobody reads any more: rich would end the process, which may be a fleet's supervisor."""
        self.quiet = True


def terminal(stderr: bool = False) -> Console:
    # What stands in names and reasons is text, whatever brackets are in it.
    console = _Terminal(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160  # a pipe has no width: nothing is cut for one
    return console
