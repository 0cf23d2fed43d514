"""`status`, `role`, `drain`: looking at a running fleet and changing it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import click

from fleet.errors import BadRequest, FleetError, NotFound, Unavailable
from fleetctl.options import DRY_RUN, Target, complete_workers, fleet_options, going_on
from fleetctl.words import WORKERS, FleetPicture, Phase

if TYPE_CHECKING:
    from fleet.member import WorkerCard
    from fleet.registry import Registry, View
    from fleet.wire import Wire

_LIMIT = click.option(
    "--limit",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="Seconds after which requests that still run there are moved to other workers.",
)

_FORCE = click.option("--force", is_flag=True, help="Also where no decode worker would be left.")


@click.command()
@fleet_options()
def status(target: Target) -> None:
    """Show workers, router and servers: state, load and KV in use."""
    picture = asyncio.run(look(target))
    if target.as_json:
        target.say("", **status_fields(picture))
        return
    from fleetctl.view import draw, terminal

    terminal().print(draw(picture))


async def look(target: Target) -> FleetPicture:
    etcd = target.etcd()
    from fleetctl.connect import connected
    from fleetctl.picture import take_picture

    async with connected(etcd, own=target.given_etcd is None) as (registry, wire):
        return await take_picture(registry, wire, target.fleet, etcd, target.state())


def status_fields(picture: FleetPicture) -> dict[str, Any]:
    """The object of `status --json`. null = unknown, which is not zero."""
    from msgspec import to_builtins

    from fleet.targets import Mode

    routers, desired = to_builtins(picture.routers), picture.desired
    return {
        "fleet": picture.fleet,
        "model": picture.model,
        "router": routers[0] if routers else None,
        "routers": routers,
        "workers": to_builtins(picture.workers),
        "desired": desired and {"prefill": desired.prefill, "decode": desired.decode},
        "planner": {
            "mode": str(desired.mode if desired else Mode.OFF),
            "budget": desired.budget if desired else None,
            "decision": to_builtins(picture.decision),
        },
        "nats": to_builtins(picture.nats),
        "etcd": to_builtins(picture.etcd),
        "supervisor": picture.supervisor,
    }


async def wait_ended(target: Target, name: str, limit_s: float) -> None:
    """Until the process of `name` is not on its way out any more: a card goes a little before its process.

    Only a supervisor here knows of processes.
    """
    until = asyncio.get_running_loop().time() + limit_s
    while state := target.state():
        leaving = (Phase.STOPPING, Phase.DRAINING)
        if not any(child.name == name and child.phase in leaving for child in state.children):
            return
        if asyncio.get_running_loop().time() > until:
            raise Unavailable(f"{name} is still ending after {limit_s:g} s")
        await asyncio.sleep(0.05)


@click.command()
@click.argument("worker", metavar="ID", shell_complete=complete_workers)
@fleet_options()
@click.option("--wait", is_flag=True, help="Return when the worker has left.")
@DRY_RUN
@_FORCE
@_LIMIT
def drain(target: Target, worker: str, wait: bool, dry_run: bool, force: bool, limit: float) -> None:
    """Let worker ID finish its requests, take no new ones, and leave.

    The wanted counts stay: a supervisor starts another in its place at once. To have one worker
    less, use `scale`, which drains the least loaded.
    """
    asyncio.run(_drain(target, worker, wait, dry_run, force, limit))


async def _drain(target: Target, worker: str, wait: bool, dry_run: bool, force: bool, limit: float) -> None:
    etcd = target.etcd()
    from fleetctl.connect import connected
    from fleetctl.picture import cards_in, read_view

    async with connected(etcd, own=target.given_etcd is None) as (registry, wire):
        cards = cards_in(await read_view(registry, target.fleet, etcd), target.fleet)
        card = _known(target, cards, worker)
        if not force:
            _not_the_last(cards, card)
        if dry_run:
            running = await _running(wire, card)
            target.say(f"would drain {worker}, after the {running} requests there",
                       id=worker, state=str(card.state), dry_run=True)  # fmt: skip
            return
        state = str(await wire.drain(card.address, limit, 5.0))
        if wait:
            with going_on(f"{worker} drains all the same"):
                async with _telling_what_runs(target, wire, card):
                    # A card vanishes when its worker leaves; the margin is for one that dies over it.
                    await _wait_gone(registry, target.fleet, worker, card.incarnation, limit + 30.0)
                await wait_ended(target, worker, 30.0)
            state = "left"
        said = f"{worker} {'has left' if wait else f'is {state}'}"
        target.say(said, id=worker, state=state, dry_run=False)


def _known(target: Target, cards: dict[str, WorkerCard], worker: str) -> WorkerCard:
    if worker not in cards:
        known = ", ".join(cards) or "none"
        raise NotFound(f"fleet {target.fleet} has no worker {worker!r}; its workers: {known}")
    return cards[worker]


def _not_the_last(cards: dict[str, WorkerCard], card: WorkerCard) -> None:
    """BadRequest: without it nobody would decode until another one has started."""
    same = [one for one in cards.values() if one.model == card.model and one.state == "ready"]
    if [one.id for one in same if one.role == "decode"] == [card.id]:
        raise BadRequest(
            f"{card.id} is the only decode worker that is ready; without one every request is refused: "
            "start another first (`fleetctl scale decode=2 --wait`), or insist with --force"
        )


async def _wait_gone(registry: Registry, fleet: str, worker: str, incarnation: str, limit_s: float) -> None:
    from fleetctl.picture import cards_in, wait_view

    def gone(view: View) -> bool:
        card = cards_in(view, fleet).get(worker)
        return card is None or card.incarnation != incarnation

    if await wait_view(registry, fleet, gone, limit_s) is None:
        raise Unavailable(f"{worker} is still there after {limit_s:g} s; see `fleetctl logs {worker}`")


@click.command()
@click.argument("worker", metavar="ID", shell_complete=complete_workers)
@click.argument("to", metavar="prefill|decode", type=click.Choice([str(kind) for kind in WORKERS]))
@fleet_options()
@click.option("--wait", is_flag=True, help="Return when the worker serves in its new role.")
@DRY_RUN
@_FORCE
@_LIMIT
def role(target: Target, worker: str, to: str, wait: bool, dry_run: bool, force: bool, limit: float) -> None:
    """Make worker ID a prefill or a decode worker, with the weights and the prefix cache it has.

    What runs there ends first, and it takes no new requests until then. The wanted counts move with it, so
    that a supervisor starts and stops nobody. Asked for the role that it is about to leave, it stays.
    """
    asyncio.run(_role(target, worker, to, wait, dry_run, force, limit))


async def _role(
    target: Target, worker: str, to: str, wait: bool, dry_run: bool, force: bool, limit: float
) -> None:
    etcd = target.etcd()
    from fleet.member import Role
    from fleetctl.connect import connected
    from fleetctl.picture import cards_in, read_view

    async with connected(etcd, own=target.given_etcd is None) as (registry, wire):
        cards = cards_in(await read_view(registry, target.fleet, etcd), target.fleet)
        card = _known(target, cards, worker)
        fields = {"id": worker, "before": str(card.role), "role": to, "dry_run": dry_run}
        if card.role == to and card.state == "ready":
            target.say(f"{worker} is a {to} worker already", **fields, state="ready", changed=False)
            return
        if to == "prefill" and not force:
            _not_the_last(cards, card)
        if dry_run:
            running = await _running(wire, card)
            target.say(
                f"would make {worker} a {to} worker, after the {running} requests there",
                **fields, state=str(card.state), changed=False,
            )  # fmt: skip
            return
        state = str(await wire.take_role(card.address, Role(to), limit, 5.0))
        said = f"{worker} is a {to} worker" if state == "ready" else f"{worker} drains, then is a {to} worker"
        if wait:
            # The margin is for the last step, and for a worker that dies over it.
            with going_on(f"{said} all the same"):
                await _wait_role(target, registry, wire, card, to, limit + 30.0)
            state, said = "ready", f"{worker} is a {to} worker"
        target.say(said, **fields, state=state, changed=True)


async def _wait_role(
    target: Target, registry: Registry, wire: Wire, card: WorkerCard, to: str, limit_s: float
) -> None:
    """Until it serves in that role, and its supervisor, where there is one here, counts it there."""
    from fleetctl.picture import cards_in, wait_view

    outcome, turning = "", False

    def over(view: View) -> bool:
        nonlocal outcome, turning
        now = cards_in(view, target.fleet).get(card.id)
        if now is None or now.incarnation != card.incarnation:
            outcome = "it has ended"
        elif now.state == "ready" and now.role == to:
            outcome = "done"
        elif turning and now.turning is None:
            outcome = "it stays what it is" if now.state == "ready" else "it is leaving"
        else:
            turning = now.turning is not None
        return outcome != ""

    until = asyncio.get_running_loop().time() + limit_s
    async with _telling_what_runs(target, wire, card):
        await wait_view(registry, target.fleet, over, limit_s)
    if outcome != "done":
        raise Unavailable(
            f"{card.id} is no {to} worker: {outcome or f'not within {limit_s:g} s'}; "
            f"see `fleetctl logs {card.id}`"
        )
    while (state := target.state()) and any(
        child.name == card.id and (child.kind != to or child.phase is not Phase.READY)
        for child in state.children
    ):
        if asyncio.get_running_loop().time() > until:
            raise Unavailable(f"{card.id} is a {to} worker, and its supervisor does not count it as one")
        await asyncio.sleep(0.05)


async def _running(wire: Wire, card: WorkerCard) -> int:
    load = await wire.status(card.address, 5.0)
    return load.running + load.waiting


@contextlib.asynccontextmanager
async def _telling_what_runs(target: Target, wire: Wire, card: WorkerCard) -> AsyncIterator[None]:
    telling = asyncio.create_task(_tell_what_runs(target, wire, card))
    try:
        yield
    finally:
        telling.cancel()


async def _tell_what_runs(target: Target, wire: Wire, card: WorkerCard) -> None:
    """A line for who waits, whenever it has changed."""
    said = 0
    while not target.as_json:
        with contextlib.suppress(FleetError):
            load = await wire.status(card.address, 2.0)
            if said != (said := load.running + load.waiting) and said:
                click.echo(f"{card.id}: {said} requests still run there", err=True)
        await asyncio.sleep(1.0)
