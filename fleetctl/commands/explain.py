"""`explain`: where a request went and why, or a list of late ones. `trace`: the same as it happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import click

from fleet.errors import BadRequest, FleetError, NotFound, Unavailable
from fleetctl.options import Target, fleet_options

if TYPE_CHECKING:
    from fleetctl.routers import Asker, RouterAddress, Said

ANSWER_S = 5.0
"""How long a router may take to answer before it is said to be silent."""
CA = click.option(
    "--ca",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Authority of the routers' https certificates; without it, those that the system trusts.",
)


@click.command()
@click.argument("request", required=False)
@fleet_options()
@CA
@click.option("--slow", type=click.FloatRange(0), metavar="SECONDS", help="List those that took as long.")
@click.option("--limit", type=click.IntRange(1, 500), default=20, show_default=True, help="Longest list.")
def explain(target: Target, request: str | None, ca: Path | None, slow: float | None, limit: int) -> None:
    """Show where REQUEST went and why: its time as bars, each choice with who else was weighed.

    REQUEST is the x-request-id of its response, or the id in its answer. Without it, requests of late are
    listed. A fleet with API keys wants one in PDFLEET_API_KEY: of an admin, or of the request's tenant.
    """
    if request is not None and not request.strip():
        raise BadRequest("REQUEST is empty; leave it out to list requests of late", param="request")
    if request and slow is not None:
        raise BadRequest("--slow lists requests; leave out either it or REQUEST", param="slow")
    asyncio.run(_explain(target, request, ca, slow, limit))


async def _explain(
    target: Target, request: str | None, ca: Path | None, slow: float | None, limit: int
) -> None:
    from fleetctl.routers import Asker

    asker, routers = Asker(ca), await _routers(target)
    if request is None:
        query = urlencode({"slow": slow or 0.0, "limit": limit})
        answers, silent = await _ask(asker, routers, f"/fleet/requests?{query}")
        return _show_list(target, answers, silent, slow, limit)
    answers, silent = await _ask(asker, routers, f"/fleet/requests/{quote(request, safe='')}")
    if not answers:
        raise NotFound(_nobody(request, routers, silent))
    _show(target, answers, silent)


async def _routers(target: Target) -> list[RouterAddress]:
    etcd = target.etcd()
    from fleetctl.connect import connected
    from fleetctl.picture import read_view, registered_routers
    from fleetctl.routers import RouterAddress

    async with connected(etcd, own=target.given_etcd is None) as (registry, _):
        view = await read_view(registry, target.fleet, etcd)
    found = [RouterAddress(id, url.rstrip("/")) for id, url, _ in registered_routers(view, target.fleet)]
    if not found:
        raise Unavailable(f"fleet {target.fleet} has no router in etcd; see `fleetctl status`")
    return found


async def _ask(asker: Asker, routers: list[RouterAddress], path: str) -> tuple[list[Said], list[str]]:
    """What those said that know it, and why others said nothing. Raises what all would say."""
    asked = (asker.get(router, path, ANSWER_S) for router in routers)
    said = await asyncio.gather(*asked, return_exceptions=True)
    answers, silent = [], []
    for one in said:
        if isinstance(one, FleetError):
            silent.append(one.message)
        elif isinstance(one, BaseException):
            raise one
        elif one.status == 200:
            answers.append(one)
        elif one.status != 404:
            _refuse(one)
    if not answers and len(silent) == len(routers):
        raise Unavailable("; ".join(silent))
    return answers, silent


def _refuse(said: Said) -> None:
    """Raises what a router that does not want to say makes of it."""
    if said.status == 401:
        raise BadRequest(
            f"router {said.router.id}: {said.error()}; put one into PDFLEET_API_KEY: of the tenant whose "
            "request it is, or one that `fleetctl key new --admin` drew",
            param="PDFLEET_API_KEY",
        )
    raise Unavailable(f"router {said.router.id}: {said.error()}")


def _nobody(request: str, routers: list[RouterAddress], silent: list[str]) -> str:
    known = "the router does" if len(routers) == 1 else f"of {len(routers)} routers none does"
    away = "".join(f"; {why}" for why in silent)
    return (
        f"nobody knows request {request!r}: {known}{away}. Routers remember their last requests only "
        "(setting flow.records); `fleetctl explain` lists them"
    )


def _show(target: Target, answers: list[Said], silent: list[str]) -> None:
    import msgspec

    if target.as_json:
        found = [
            {**record, "router": said.router.id}
            for said in answers
            for record in msgspec.json.decode(said.body)["requests"]
        ]
        target.say("", requests=found, silent=silent)
        return
    from fleetctl.story import Story, draw_story
    from fleetctl.view import terminal

    first = True
    for said in answers:
        for story in msgspec.convert(msgspec.json.decode(said.body)["requests"], list[Story]):
            terminal().print(*(() if first else ("",)), draw_story(story, said.router.id), sep="\n")
            first = False
    _warn(silent)


def _show_list(
    target: Target, answers: list[Said], silent: list[str], slow: float | None, limit: int
) -> None:
    import msgspec

    rows: list[dict[str, Any]] = [
        {**row, "router": said.router.id}
        for said in answers
        for row in msgspec.json.decode(said.body)["requests"]
    ]
    # Routers have clocks of their own: only how long they took puts requests of several into one order.
    if slow is not None:
        rows.sort(key=lambda row: -float(row["seconds"]))
        rows = rows[:limit]
    if target.as_json:
        target.say("", requests=rows, silent=silent)
        return
    from fleetctl.story import Row, draw_list
    from fleetctl.view import terminal

    console = terminal()
    console.print(draw_list(msgspec.convert(rows, list[Row]), console.width))
    _warn(silent)


def _warn(silent: list[str]) -> None:
    for why in silent:
        click.secho(f"warning: {why}", fg="yellow", err=True)


@click.command()
@click.argument("request", required=False)
@fleet_options()
@CA
@click.option("--class", "slo_class", metavar="NAME", default="", help="Only requests of this class.")
@click.option("--model", metavar="NAME", default="", help="Only requests for this model.")
@click.option("--count", type=click.IntRange(1), metavar="N", help="End when N requests have ended.")
@click.option(
    "--seconds", type=click.FloatRange(0, 86_400), default=600.0, show_default=True, help="Longest to follow."
)
def trace(
    target: Target,
    request: str | None,
    ca: Path | None,
    slo_class: str,
    model: str,
    count: int | None,
    seconds: float,
) -> None:
    """Follow REQUEST until it has ended, or all new requests: each step with its reason.

    With --json, one object a line. A fleet with API keys wants one in PDFLEET_API_KEY.
    """
    if request is not None and not request.strip():
        raise BadRequest("REQUEST is empty; leave it out to follow all new ones", param="request")
    if request and (slo_class or model or count):
        raise BadRequest("--class, --model and --count are for all requests; leave them or REQUEST out")
    query = {"class": slo_class, "model": model, "seconds": seconds}
    if request is None:
        path = f"/fleet/events?{urlencode(query)}"
    else:
        path = f"/fleet/requests/{quote(request, safe='')}/events?{urlencode({'seconds': seconds})}"
    # Ctrl-C is how one ends it.
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_trace(target, request, ca, path, count))


async def _trace(target: Target, request: str | None, ca: Path | None, path: str, count: int | None) -> None:
    from fleetctl.routers import Asker
    from fleetctl.story import event_line
    from fleetctl.view import terminal

    asker, routers = Asker(ca), await _routers(target)
    console, ended, silent = terminal(), 0, list[str]()
    telling: dict[str, bool] = {}
    """Of each router that had something to tell: whether the last thing was an end."""
    async for router, said in _merged(asker, routers, path):
        if isinstance(said, FleetError):
            silent.append(said.message)
            _warn([said.message])
        elif isinstance(said, Mark):
            telling.setdefault(router.id, False)
            if said is Mark.OVER and request is None:
                _warn([f"router {router.id} tells no more: the time to follow is over, or it is leaving"])
        else:
            if target.as_json:
                click.echo(json.dumps({"router": router.id, **said}))
            else:
                console.print(event_line(said, router.id))
            telling[router.id] = said["event"] == "end"
            ended += telling[router.id]
            if count is not None and ended >= count:
                return
    if not telling:
        raise NotFound(_nobody(request, routers, silent)) if request else Unavailable("; ".join(silent))
    if request and not all(telling.values()):
        raise Unavailable(
            f"the news of {request} broke off before its end: its router has left or died, or --seconds are "
            f"over; see `fleetctl explain {request}`"
        )


class Mark(StrEnum):
    """What a router's stream of news has come to."""

    BEGUN = "begun"
    OVER = "over"


_Told = tuple["RouterAddress", "dict[str, Any] | FleetError | Mark"]


async def _merged(asker: Asker, routers: list[RouterAddress], path: str) -> AsyncIterator[_Told]:
    """News of all routers as they come, until the last has no more to tell."""
    news: asyncio.Queue[_Told | BaseException | None] = asyncio.Queue(1024)

    async def read(router: RouterAddress) -> None:
        try:
            async with asker.events(router, path, ANSWER_S) as said:
                if not isinstance(said, AsyncIterator):
                    if said.status != 404:
                        _refuse(said)
                    return
                await news.put((router, Mark.BEGUN))
                async for data in said:
                    await news.put((router, json.loads(data)))
                await news.put((router, Mark.OVER))
        except Unavailable as error:
            await news.put((router, error))
        except Exception as error:  # noqa: BLE001 — whoever reads the news raises it
            await news.put(error)
        finally:
            await news.put(None)

    readers = [asyncio.create_task(read(router)) for router in routers]
    try:
        open_streams = len(readers)
        while open_streams:
            said = await news.get()
            if said is None:
                open_streams -= 1
            elif isinstance(said, BaseException):
                raise said
            else:
                yield said
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
