"""Where requests went and why, by the ids that clients know: records, lists of them, and news of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Request
from starlette.responses import StreamingResponse

from fleet.errors import NotFound
from fleet.ids import RequestId
from router.openai.callers import CALLER, Caller
from router.openai.event_streams import Seats
from router.record import HandoffRecord, Records, Transition

if TYPE_CHECKING:
    from router.openai.asgi import Ingress

_WAITING = 1024
"""News that wait for a follower who reads slowly; then the oldest are dropped, and it is told how many."""
_SAME = 16
"""Requests remembered under one id: clients choose ids, and may use one again and again."""
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")
"""In front of a request's id where an answer shows it."""
_LOOK_S = 1.0
"""How often a silent stream is looked after."""


class Explained:
    """The records of a router, found by the id of the HTTP request, of its answer or of one run of it."""

    def __init__(self, records: Records | None, router: str = "") -> None:
        """`router`: its name, to be shown."""
        self.router = router
        self.records = records or Records(1)
        self._requests: OrderedDict[str, tuple[RequestId, ...]] = OrderedDict()
        """Those of an HTTP request, by the id in its header."""
        self.shown: dict[RequestId, str] = {}

    def began(self, shown: str, requests: tuple[RequestId, ...]) -> None:
        """An HTTP request with this id in its header sets these going."""
        before = self._requests.pop(shown, ())
        kept = (*before, *requests)[-_SAME:] if len(requests) < _SAME else requests
        for request in before:
            if request not in kept:
                self.shown.pop(request, None)
        self._requests[shown] = kept
        for request in requests:
            self.shown[request] = shown
        while len(self._requests) > self.records.limit:
            for request in self._requests.popitem(last=False)[1]:
                self.shown.pop(request, None)

    def find(self, id: str, caller: Caller) -> list[HandoffRecord]:
        """Raises `NotFound`; of a request of another tenant too, which is nobody's business."""
        bare = id
        for prefix in _PREFIXES:
            bare = bare.removeprefix(prefix)
        # As it stands first: a client may have chosen one that looks like an answer's.
        for name in (id, bare):
            ids = self._requests.get(name, (RequestId(name),))
            found = [one for key in ids if (one := self.records.get(key)) and caller.sees(one.tenant)]
            if found:
                break
        else:
            shown = id if len(id) <= 100 else id[:100] + "…"
            raise NotFound(
                f"this router knows no request {shown!r}: it remembers the last {self.records.limit} "
                "(setting flow.records), and none that were refused before a worker was looked for"
            )
        return found

    def describe(self, record: HandoffRecord, now: float) -> dict[str, Any]:
        return {"id": self.shown.get(record.request, record.request), **record.as_dict(now)}

    def recent(
        self, caller: Caller, limit: int, wanted: Callable[[HandoffRecord], bool], slow: float, now: float
    ) -> list[dict[str, Any]]:
        """The newest; of slow ones, those that run included, the slowest."""
        found = (record for record in self.records.newest() if caller.sees(record.tenant) and wanted(record))
        if slow:
            chosen = sorted((r for r in found if r.took(now) >= slow), key=lambda r: -r.took(now))[:limit]
        else:
            chosen = [record for record, _ in zip(found, range(limit), strict=False)]
        return [
            {"id": self.shown.get(record.request, record.request), **record.summary(now)} for record in chosen
        ]

    def news(self, record: HandoffRecord, step: Transition | None) -> dict[str, Any]:
        """`step` or, when it has ended, `end`."""
        named = {
            "id": self.shown.get(record.request, record.request),
            "request": record.request,
            "model": record.model,
            "class": record.slo_class,
        }
        if step is None:
            return {"event": "end", **named, "seconds": round(record.seconds, 6), "outcome": record.outcome}
        said = step.as_dict()
        said.pop("considered", None)
        return {"event": "step", **named, **said}

    async def follow(
        self,
        wanted: Callable[[HandoffRecord], bool],
        of: list[HandoffRecord],
        over: Callable[[], bool],
        seconds: float,
    ) -> AsyncIterator[bytes]:
        """Server-sent events of what is `wanted`. `of` some: first what was, and the end with the last of
        them. `over`: whether the stream is to end now."""
        waiting: deque[dict[str, Any]] = deque()
        stirred = asyncio.Event()
        missed = 0

        def take(record: HandoffRecord, step: Transition | None) -> None:
            nonlocal missed
            if wanted(record):
                if len(waiting) >= _WAITING:
                    waiting.popleft()
                    missed += 1
                waiting.append(self.news(record, step))
                stirred.set()

        running = {record.request for record in of}
        for record in of:
            waiting.extend(self.news(record, step) for step in record.transitions)
            if record.outcome is not None:
                waiting.append(self.news(record, None))
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        self.records.followers.append(take)
        try:
            while True:
                while waiting:
                    if missed:
                        yield _event({"event": "missed", "count": missed})
                        missed = 0
                    said = waiting.popleft()
                    yield _event(said)
                    if said["event"] == "end":
                        running.discard(said["request"])
                if (of and not running) or over() or loop.time() >= until:
                    return
                stirred.clear()
                try:
                    async with asyncio.timeout_at(min(until, loop.time() + _LOOK_S)):
                        await stirred.wait()
                except TimeoutError:
                    yield b": ping\n\n"  # Written, so that a reader who has gone is noticed.
        finally:
            self.records.followers.remove(take)


def _now() -> float:
    """On the clock of records."""
    return asyncio.get_running_loop().time()


def _event(said: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(said) + b"\n\n"


_Text = Annotated[str, Query(max_length=256)]
_Slow = Annotated[float, Query(ge=0, le=86_400, description="Only those that took as many seconds or more.")]
_Limit = Annotated[int, Query(ge=1, le=500, description="How many.")]
_Seconds = Annotated[float, Query(ge=0, le=86_400, description="How long.")]


def add_routes(app: FastAPI, ingress: Ingress) -> None:
    explained, most = ingress.explained, ingress.settings.max_followers
    full = (
        f"{most} streams of news are read here already, or {max(1, most // 2)} by keys that are no admin's "
        "(setting http.max_followers)"
    )
    seats = Seats(most, full, most_of_others=max(1, most // 2))

    def asking(request: Request) -> Caller:
        caller: Caller = request.scope[CALLER]
        return caller

    @app.get("/fleet/requests")
    async def requests(
        request: Request,
        slow: _Slow = 0.0,
        limit: _Limit = 20,
        model: _Text = "",
        slo_class: Annotated[str, Query(alias="class", max_length=256)] = "",
    ) -> dict[str, Any]:
        """Requests of late, the newest first; with slow, the slowest first."""
        listed = explained.recent(asking(request), limit, _of(model, slo_class), slow, _now())
        return {"router": explained.router, "requests": listed}

    @app.get("/fleet/requests/{id}")
    async def one(request: Request, id: str) -> dict[str, Any]:
        """Where a request went and why: by the id in its x-request-id header, or that of its answer."""
        found = explained.find(id, asking(request))
        return {
            "router": explained.router,
            "requests": [explained.describe(record, _now()) for record in found],
        }

    def stream(
        caller: Caller, wanted: Callable[[HandoffRecord], bool], of: list[HandoffRecord], seconds: float
    ) -> StreamingResponse:
        def seen(record: HandoffRecord) -> bool:
            return caller.sees(record.tenant) and wanted(record)

        events = explained.follow(seen, of, lambda: ingress.draining, seconds)
        return seats.stream(events, caller.admin)

    @app.get("/fleet/requests/{id}/events")
    async def events_of(request: Request, id: str, seconds: _Seconds = 600.0) -> StreamingResponse:
        """What became of it and becomes of it, as server-sent events, until it has ended."""
        caller = asking(request)
        found = explained.find(id, caller)
        names = {record.request for record in found}
        return stream(caller, lambda record: record.request in names, found, seconds)

    # Not in the OpenAPI document: whoever calls all that stands there would wait for ever.
    @app.get("/fleet/events", include_in_schema=False)
    async def events(
        request: Request,
        model: _Text = "",
        slo_class: Annotated[str, Query(alias="class", max_length=256)] = "",
        seconds: _Seconds = 600.0,
    ) -> StreamingResponse:
        """Of all requests from now on, as server-sent events."""
        return stream(asking(request), _of(model, slo_class), [], seconds)


def _of(model: str, slo_class: str) -> Callable[[HandoffRecord], bool]:
    return lambda record: (
        (not model or record.model == model) and (not slo_class or record.slo_class == slo_class)
    )
