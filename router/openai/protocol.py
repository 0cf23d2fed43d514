"""uvicorn's HTTP protocol with what it lacks: bounds on the size and time of headers, errors as JSON, streams
for HTTP/1.0, and a way to drop a client that reads no more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fleet.errors import BadRequest, FleetError
from router.openai.errors import HeadersTooLarge, SlowBody, error_body
from router.openai.settings import HttpSettings

ABORT = "pdfleet.abort"
"""Key in the scope: a function that drops the connection, unsent data included."""
LEFT = "pdfleet.left"
"""Key in the scope: a set of functions that are called when the connection is no more."""


_JOINED_BYTES = 1 << 16
"""What is written at once, turn of the loop or not: a client that reads slowly must be noticed."""


class _Joined:
    """A transport on which all that is written in one turn of the loop leaves together: the head and the body
    of an answer are one call of the system, and wake the client once."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self.is_closing = transport.is_closing
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size > _JOINED_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._parts.clear()
        self._transport.abort()

    def _flush(self) -> None:
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            self._size = 0
            if not self.is_closing():  # uvloop raises for one whose client was gone within this turn.
                self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _UntilClose(int):
    """Length of a body that ends where the connection does, as uvicorn counts down: nothing is too long for
    it, and it is always reached."""

    def __lt__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: int) -> _UntilClose:
        return self

    __hash__ = int.__hash__


def bounded(settings: HttpSettings) -> type[HttpToolsProtocol]:
    """The protocol class with these limits."""

    class BoundedProtocol(HttpToolsProtocol):
        _in_head = True
        _left: set[Callable[[], None]]
        _head_bytes = 0
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(cast(asyncio.Transport, _Joined(transport, self.loop)))
            self._left = set()
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)
            for tell in tuple(self._left):
                tell()

        def data_received(self, data: bytes) -> None:
            # Complete headers are weighed exactly by the application; here only those that never end. One
            # read may bring a long body too: the parser gets no more at once than may still be headers.
            while data and self._in_head and not self.transport.is_closing():
                room = settings.max_header_bytes + 65536 - self._head_bytes
                if room <= 0:
                    return self._refuse(
                        HeadersTooLarge(
                            f"the headers have more than {settings.max_header_bytes} bytes "
                            "(setting http.max_header_bytes)"
                        )
                    )
                part, data = data[:room], data[room:]
                self._head_bytes += len(part)
                super().data_received(part)
            if data and not self.transport.is_closing():
                super().data_received(data)
            return None

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
            self.scope[LEFT] = self._left  # type: ignore[literal-required]
            if not self._in_head:
                self._await_head()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._stop_timer()
            super().on_headers_complete()
            if self.scope["http_version"] == "1.0":
                # It knows no chunks, and uvicorn would send them.
                self.cycle.chunked_encoding = False
                self.cycle.expected_content_length = _UntilClose()

        def send_400_response(self, msg: str) -> None:
            self._refuse(BadRequest("this is not HTTP/1.1"))

        def _await_head(self) -> None:
            self._in_head = True
            self._head_bytes = 0
            self._stop_timer()
            self._head_timer = self.loop.call_later(settings.header_timeout_s, self._too_slow)

        def _too_slow(self) -> None:
            self._refuse(
                SlowBody(
                    f"the headers took more than {settings.header_timeout_s:g} s "
                    "(setting http.header_timeout_s)"
                )
            )

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _refuse(self, error: FleetError) -> None:
            """Outside any response: while one is under way on this connection, it is only cut off."""
            if self.transport.is_closing():
                return
            cycle = self.cycle
            if cycle is None or cycle.response_complete or not (cycle.response_started or self.pipeline):
                body = error_body(error)
                phrase = HTTPStatus(error.http_status).phrase
                self.transport.write(
                    f"HTTP/1.1 {error.http_status} {phrase}\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                    + body
                )
            self.transport.close()

    return BoundedProtocol
