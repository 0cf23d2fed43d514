"""The dashboard page, and the snapshots that it and `fleetctl top` show: one, or news about once a second.

A snapshot is made when somebody looks, and once for all who do; nothing runs while nobody does.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse

from fleet.errors import NotFound, Unauthorized
from fleet.ids import RequestId
from router.live import Live, Snapshot, changes
from router.openai.callers import CALLER, Caller
from router.openai.event_streams import Seats

if TYPE_CHECKING:
    from router.openai.asgi import Ingress

PAGE = "/dashboard"
MAX_VIEWERS = 16
"""Streams of news at the same time."""
EVERY_S = 1.0
"""Seconds between two snapshots."""


class Shown:
    """The newest snapshot, as bytes: made by whoever looks first, written once for all."""

    def __init__(self) -> None:
        self.made = 0
        """Snapshots so far: the number of the newest."""
        self.next_at = 0.0
        self._newest: Snapshot | None = None
        self._whole: bytes | None = None
        self._change = b""

    def look(self, live: Live, shown: dict[RequestId, str], now: float) -> int:
        """The number of the newest snapshot."""
        if self._newest is None or now >= self.next_at:
            before, self._newest = self._newest, live.snapshot(now, shown)
            self.made += 1
            self.next_at = now + EVERY_S
            self._whole = None
            self._change = b"" if before is None else _event("change", changes(before, self._newest))
        return self.made

    @property
    def whole(self) -> bytes:
        if self._whole is None:
            self._whole = _event("whole", self._newest)
        return self._whole

    async def follow(
        self, live: Live, shown: dict[RequestId, str], over: Callable[[], bool]
    ) -> AsyncIterator[bytes]:
        """First all, then what changes; all again for one who reads too slowly for that."""
        clock = asyncio.get_running_loop().time
        seen = 0
        while not over():
            number = self.look(live, shown, clock())
            if number != seen:
                yield self._change if seen and number == seen + 1 else self.whole
                seen = number
            await asyncio.sleep(max(0.01, self.next_at - clock()))


def _event(name: str, said: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(said) + b"\n\n"


def read_page() -> tuple[bytes, dict[str, str]]:
    """The page, and the headers that allow it nothing but its own style, its own script and this router."""
    page = resources.files(__package__).joinpath("page.html").read_text("utf-8")
    policy = [
        "default-src 'none'",
        *(f"{kind}-src {_sources(page, kind)}" for kind in ("style", "script")),
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return page.encode(), {
        "content-security-policy": "; ".join(policy),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }


def _sources(page: str, tag: str) -> str:
    """Hashes of what stands between these tags: nothing else of the kind is run or applied."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    hashes = (base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in found)
    return " ".join(f"'sha256-{one}'" for one in hashes)


def add_routes(app: FastAPI, ingress: Ingress) -> None:
    shown, (page, headers) = Shown(), read_page()
    seats = Seats(MAX_VIEWERS, f"{MAX_VIEWERS} look on here already")

    def asked(request: Request) -> Live:
        """Raises what forbids it to this caller."""
        caller: Caller = request.scope[CALLER]
        if not caller.admin:
            raise Unauthorized("this API key is not an admin's: draw one with fleetctl key new --admin")
        if ingress.live is None:
            raise NotFound("this router shows nothing")
        return ingress.live

    @app.get(PAGE, include_in_schema=False)
    async def dashboard() -> Response:
        return Response(page, headers=headers, media_type="text/html; charset=utf-8")

    @app.get("/fleet/live")
    async def live(request: Request) -> Response:
        """All that the dashboard shows, now: classes, requests, workers. For admins."""
        made = asked(request)
        snapshot = made.snapshot(asyncio.get_running_loop().time(), ingress.explained.shown)
        return Response(msgspec.json.encode(snapshot), media_type="application/json")

    # Not in the OpenAPI document: whoever calls all that stands there would wait for ever.
    @app.get("/fleet/live/events", include_in_schema=False)
    async def events(request: Request) -> StreamingResponse:
        """`whole`, a snapshot, and about once a second `change`, what is new in it; for admins."""
        made = asked(request)
        return seats.stream(shown.follow(made, ingress.explained.shown, lambda: ingress.draining))
