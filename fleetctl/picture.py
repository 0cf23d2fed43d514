"""Asks a fleet what it is: cards, routers and counts from etcd, loads from the workers themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace

import msgspec

from fleet.card_codec import decode_card
from fleet.errors import BadRequest, FleetError, Unavailable
from fleet.member import WorkerCard, desired_key, workers_prefix
from fleet.registry import Registry, View
from fleet.targets import Desired, decision_key, parse_decision, parse_desired, planner_prefix
from fleet.wire import Wire
from fleetctl.servers import http_status
from fleetctl.words import (
    WORKERS,
    FleetPicture,
    FleetState,
    Kind,
    Phase,
    RouterRow,
    ServerRow,
    WorkerRow,
)

ANSWER_S = 3.0
"""How long a worker or router may take to answer before it is shown as silent."""


async def wait_view(
    registry: Registry, fleet: str, enough: Callable[[View], bool], limit_s: float
) -> View | None:
    """The first live view that is `enough`; None when none came in time."""
    watch = registry.watch(f"/fleet/{fleet}/")
    try:
        async with asyncio.timeout(limit_s):
            async for view in watch:
                if view.live and enough(view):
                    return view
    except TimeoutError:
        pass
    finally:
        if isinstance(watch, AsyncGenerator):
            await watch.aclose()
    return None


def no_answer(etcd: str) -> Unavailable:
    return Unavailable(f"etcd at {etcd} does not answer; is the fleet up, and --etcd right?")


async def read_view(registry: Registry, fleet: str, etcd: str, limit_s: float = 5.0) -> View:
    """All keys of the fleet now. Raises `Unavailable` when etcd does not answer."""
    view = await wait_view(registry, fleet, lambda view: True, limit_s)
    if view is None:
        raise no_answer(etcd)
    return view


def cards_in(view: View, fleet: str) -> dict[str, WorkerCard]:
    """By worker id. A card that cannot be read is left out: it belongs to another version."""
    cards = {}
    for key, data in sorted(view.values.items()):
        if key.startswith(workers_prefix(fleet)):
            try:
                card = decode_card(data, key)
            except ValueError:
                continue
            cards[str(card.id)] = card
    return cards


def readable_desired(data: bytes) -> Desired | None:
    """None: somebody wrote what is no wanted counts, which changes nothing until it is written over."""
    try:
        return parse_desired(data)
    except BadRequest:
        return None


async def take_picture(
    registry: Registry, wire: Wire, fleet: str, etcd: str, state: FleetState | None
) -> FleetPicture:
    """`state` is the supervisor's file, where the fleet has one on this machine."""
    try:
        view, etcd_state = await read_view(registry, fleet, etcd), "ready"
    except Unavailable:
        if state is None:
            raise
        # The supervisor brings it back; meanwhile its own file tells what it knows.
        view, etcd_state = View({}, live=False), _phase(state, Kind.ETCD)
        etcd_state = "silent" if etcd_state == "ready" else etcd_state
    cards = cards_in(view, fleet)
    rows = {row.id: row for row in await asyncio.gather(*(_worker(card, wire) for card in cards.values()))}
    for child in state.children if state else ():
        if child.kind in WORKERS:
            # Without a card it starts, or crashed and waits: the supervisor alone knows of it.
            frozen = view.live and child.phase is Phase.READY
            row = rows.get(child.name) or WorkerRow(
                child.name, child.kind, "silent" if frozen else child.phase, child.pid
            )
            rows[child.name] = replace(row, restarts=child.restarts, note=child.note)
    models = sorted({card.model for card in cards.values()} | ({state.model} if state else set()))
    data, decided = view.values.get(desired_key(fleet)), view.values.get(decision_key(fleet))
    return FleetPicture(
        fleet=fleet,
        model=", ".join(models),
        workers=tuple(sorted(rows.values(), key=lambda row: (row.role != Kind.PREFILL, row.id))),
        routers=tuple(
            await asyncio.gather(*(_router(found, state) for found in _routers(view, fleet, state)))
        ),
        desired=readable_desired(data) if data is not None else None,
        etcd=ServerRow(etcd, etcd_state, _pid(state, Kind.ETCD)),
        nats=ServerRow(state.nats, _phase(state, Kind.NATS), _pid(state, Kind.NATS)) if state else None,
        supervisor=state.pid if state else None,
        decision=parse_decision(decided) if decided is not None else None,
    )


async def _worker(card: WorkerCard, wire: Wire) -> WorkerRow:
    row = WorkerRow(
        id=card.id,
        role=card.turning or card.role,
        state=card.state,
        pid=card.pid,
        host=card.host,
        address=card.address,
        metrics=card.metrics or None,
        sessions=card.sessions,
        model=card.model,
        blocks_total=card.blocks,
    )
    try:
        report = await wire.status(card.address, ANSWER_S)
    except FleetError as error:
        return replace(row, state="silent", note=error.message)
    return replace(
        row,
        state=report.state if card.turning is None else Phase.TURNING,
        running=report.running,
        waiting=report.waiting,
        queued_tokens=report.queued_tokens,
        blocks_free=report.blocks_free,
        blocks_total=report.blocks_total,
        counters=dict(sorted(report.counters.items())),
    )


def registered_routers(view: View, fleet: str) -> Iterator[tuple[str, str, int]]:
    """Id, URL and pid of each."""
    for key, data in sorted(view.values.items()):
        if key.startswith(f"/fleet/{fleet}/routers/"):
            try:
                card = msgspec.json.decode(data, type=dict[str, str | int])
                yield str(card["id"]), str(card["http"]), int(card["pid"])
            except (msgspec.DecodeError, KeyError, ValueError):
                continue


def registered_planners(view: View, fleet: str) -> frozenset[int]:
    """Pids of those that show themselves."""
    pids = set()
    for key, data in view.values.items():
        if key.startswith(f"{planner_prefix(fleet)}planners/"):
            with contextlib.suppress(msgspec.MsgspecError, KeyError, ValueError):
                pids.add(int(msgspec.json.decode(data, type=dict[str, str | int])["pid"]))
    return frozenset(pids)


def _routers(view: View, fleet: str, state: FleetState | None) -> list[tuple[str, str, int | None]]:
    """Those that registered, or the supervised one while it starts."""
    found: list[tuple[str, str, int | None]] = [*registered_routers(view, fleet)]
    if not found and state is not None:
        found.append(("router", state.router, _pid(state, Kind.ROUTER)))
    return found


async def _router(found: tuple[str, str, int | None], state: FleetState | None) -> RouterRow:
    name, url, pid = found
    status = await http_status(f"{url.rstrip('/')}/ready", ANSWER_S)
    said = {200: "ready", None: "silent"}.get(status, "not ready")
    restarts = next((child.restarts for child in state.children if child.pid == pid), 0) if state else 0
    return RouterRow(name, url, said, pid, restarts)


def _pid(state: FleetState | None, kind: Kind) -> int | None:
    return next((child.pid for child in state.children if child.kind is kind), None) if state else None


def _phase(state: FleetState, kind: Kind) -> str:
    return next((str(child.phase) for child in state.children if child.kind is kind), "away")
