"""`top`: the fleet as its routers show it, again and again: goodput, pools, queues, slow requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fleet.errors import Unavailable
from fleetctl.commands.explain import CA, _ask, _routers
from fleetctl.options import Target, fleet_options

if TYPE_CHECKING:
    from fleetctl.glance import Said
    from fleetctl.routers import Asker, RouterAddress

PATH = "/fleet/live"
_RATES_OVER = 10
"""Pictures over which rates are taken."""


@click.command()
@fleet_options()
@CA
@click.option(
    "--sort",
    type=click.Choice(["queue", "kv", "running", "state", "name"]),
    default="queue",
    show_default=True,
    help="Which workers stand first.",
)
@click.option("--every", type=click.FloatRange(0.2, 60), default=1.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="Show it once and end: for scripts, and where no terminal is.")
def top(target: Target, ca: Path | None, sort: str, every: float, once: bool) -> None:
    """Watch the fleet: goodput, workers, queues and slow requests, until Ctrl-C.

    With --json, what each router says, once. A fleet with API keys wants an admin's in PDFLEET_API_KEY.
    """
    # Ctrl-C is how one ends it, where it does not end by itself.
    with contextlib.nullcontext() if once or target.as_json else contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_top(target, ca, sort, every, once))


async def _top(target: Target, ca: Path | None, sort: str, every: float, once: bool) -> None:
    import msgspec

    from fleetctl.routers import Asker

    asker, routers = Asker(ca), await _routers(target)
    if target.as_json:
        answers, silent = await _ask(asker, routers, PATH)
        target.say("", routers=[msgspec.json.decode(one.body) for one in answers], silent=silent)
        return
    from rich.console import RenderableType
    from rich.live import Live
    from rich.text import Text

    from fleetctl.glance import draw_glance
    from fleetctl.view import terminal

    console = terminal()
    past: deque[list[Said]] = deque(maxlen=_RATES_OVER)

    async def look() -> RenderableType:
        said, silent = await _said(asker, routers)
        past.append(said)
        return draw_glance(said, past[0], sort, max(20, console.height), silent)

    if once or not console.is_terminal:
        await look()
        await asyncio.sleep(min(every, 1.0))  # the second look has rates
        console.print(await look())
        return
    with Live(await look(), console=console, screen=True, auto_refresh=False) as shown:
        while True:
            await asyncio.sleep(every)
            try:
                shown.update(await look(), refresh=True)
            except Unavailable as error:
                past.clear()
                shown.update(Text(f"{error.message}; trying again", style="red"), refresh=True)
                routers = await _found_again(target) or routers


async def _said(asker: Asker, routers: list[RouterAddress]) -> tuple[list[Said], list[str]]:
    import msgspec

    from fleetctl.glance import Said

    answers, silent = await _ask(asker, routers, PATH)
    if not answers:
        raise Unavailable(
            "no router of this fleet shows anything: they may be of an older version; see `fleetctl status`"
        )
    return [msgspec.json.decode(one.body, type=Said) for one in answers], silent


async def _found_again(target: Target) -> list[RouterAddress]:
    """A router that was started again may have another address."""
    try:
        return await _routers(target)
    except Unavailable:
        return []
