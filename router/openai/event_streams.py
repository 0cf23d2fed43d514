"""Streams of server-sent events that only so many may read at the same time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from fleet.errors import Overloaded


class Seats:
    """Who reads, counted from the moment of the request: many that come at once are counted, too."""

    def __init__(self, most: int, full: str, *, most_of_others: int | None = None) -> None:
        """`full` says what there is no more room for. `most_of_others`: most that those who are no
        operators may have together, so that they do not keep operators out; None: all."""
        self._most = most
        self._most_of_others = most if most_of_others is None else most_of_others
        self._full = full
        self.taken = 0
        self._by_others = 0

    def stream(self, events: AsyncIterator[bytes], operator: bool = True) -> StreamingResponse:
        """Answers with these events. Raises `Overloaded` where there is no seat."""
        if self.taken >= self._most or (not operator and self._by_others >= self._most_of_others):
            raise Overloaded(self._full, retry_after_s=5.0)
        self._count(1, operator)
        return _Seated(events, lambda: self._count(-1, operator))

    def _count(self, one: int, operator: bool) -> None:
        self.taken += one
        if not operator:
            self._by_others += one


class _Seated(StreamingResponse):
    def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in the events' own `finally`: of those that nobody began to read it never runs.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()
