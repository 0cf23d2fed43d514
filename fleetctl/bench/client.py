"""A streaming client for OpenAI's API that costs a few microseconds a token: kept connections, no tasks."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from fleet.goodput import End
from fleetctl.bench.http import Answer, BadAnswer, Events
from fleetctl.bench.words import Failure, Server, end_of_error, end_of_status

GOOD_REASONS = frozenset(("stop", "length", "tool_calls", "function_call", "content_filter", "eos"))
"""Reasons for a finish that are an answer; servers tell of an aborted one in the same field."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_event = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Heard:
    """One streamed answer. Times on the monotonic clock: that of uvloop counts whole milliseconds."""

    sent_at: float
    """When its sending began; making the connection, where a new one was needed, comes after it."""
    ended_at: float = 0.0
    times: list[float] = field(default_factory=list)
    """When each event with something to read in it came."""
    text: list[str] = field(default_factory=list)
    finish: str | None = None
    usage: Usage | None = None
    request_id: str = ""
    end: End = End.FAILED
    failure: Failure | None = None
    retried: bool = False

    def token_times(self) -> list[float]:
        """One time a token: where an event brought several, those came at the same moment.

        Which event that was is not told, and makes no difference to the first, the last or the gaps.
        """
        count = self.usage.completion_tokens if self.usage is not None else None
        more = (count or 0) - len(self.times)
        return self.times + self.times[-1:] * more if more > 0 else self.times


class Client:
    """All requests of a run. Used within one loop; `close` at its end."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._running: set[_Exchange] = set()
        self.connections = 0
        """Made so far."""
        parts = urlsplit(server.url)
        assert parts.hostname is not None, "checked by Server"
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._address: str | None = None
        headers = {"Host": parts.netloc.rpartition("@")[2], "User-Agent": "pdfleet-bench", **server.headers}
        if server.api_key:
            headers["Authorization"] = f"Bearer {server.api_key}"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        kind = "chat/completions" if server.chat else "completions"
        self._post = (
            f"POST {server.path}/{kind} HTTP/1.1\r\n{self._headers}"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
        )

    def request(self, body: Mapping[str, Any], service_class: str = "") -> bytes:
        """The bytes of one request, which can be made before it is due."""
        data = msgspec.json.encode(body)
        named = f"{self._server.class_header}: {service_class}\r\n" if service_class else ""
        return f"{self._post}{named}Content-Length: {len(data)}\r\n\r\n".encode() + data

    async def stream(self, request: bytes) -> Heard:
        """Sends it now and reads the answer to its end. Whatever the server does is in what was heard."""
        exchange = _Exchange(self._loop)
        await self._exchange(request, exchange)
        exchange.conclude()
        return exchange.heard

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET below the API's path; 0 where there was no whole answer."""
        exchange = _Exchange(self._loop, events=False)
        head = f"GET {self._server.path}{path} HTTP/1.1\r\n{self._headers}\r\n"
        await self._exchange(head.encode(), exchange)
        if exchange.heard.failure is not None:
            return 0, exchange.heard.failure.message.encode()
        return exchange.answer.status, bytes(exchange.body)

    def give_up(self) -> None:
        """Cancels all that runs, as clients that go away."""
        for exchange in list(self._running):
            exchange.answer.keep = False
            exchange.end(End.CANCELLED, None)

    def close(self) -> None:
        for connection in list(self._open):
            connection.drop()

    async def _exchange(self, request: bytes, exchange: _Exchange) -> None:
        timer = self._loop.call_later(self._server.timeout_s, exchange.time_out)
        self._running.add(exchange)
        try:
            while True:
                kept = bool(self._idle)
                connection = self._idle.pop() if kept else await self._connect(exchange)
                if connection is None:
                    return
                if exchange.over.done():
                    connection.drop()
                    return
                connection.send(request, exchange)
                try:
                    await exchange.over
                finally:
                    self._put_back(connection, exchange)
                if not (kept and exchange.stale):
                    return
                # The server closed a kept connection just when it was used, as far as one can tell unread.
                exchange.again()
        finally:
            timer.cancel()
            self._running.discard(exchange)

    def _put_back(self, connection: _Connection, exchange: _Exchange) -> None:
        connection.exchange = None
        if connection.usable and exchange.answer.done and exchange.answer.keep:
            self._idle.append(connection)
        else:
            connection.drop()

    async def _connect(self, exchange: _Exchange) -> _Connection | None:
        """None: it failed, as `exchange` now says."""
        try:
            async with asyncio.timeout(min(self._server.connect_timeout_s, self._server.timeout_s)):
                transport, connection = await self._loop.create_connection(
                    lambda: _Connection(self),
                    self._address or self._host,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._host if self._tls else None,
                )
        except TimeoutError:
            exchange.end(End.TIMED_OUT, Failure("timeout connect", "no connection in time"))
            return None
        except (OSError, ssl.SSLError) as error:
            exchange.end(End.FAILED, Failure("connect", str(error)))
            return None
        # A name is looked up once: a thread a connection would be slow, and may change the server.
        self._address = self._address or transport.get_extra_info("peername")[0]
        self.connections += 1
        return connection

    def _made(self, connection: _Connection) -> None:
        self._open.add(connection)

    def _lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)


class _Exchange:
    """One request and what comes of it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, events: bool = True) -> None:
        self._loop = loop
        self.heard = Heard(monotonic())
        self.answer = Answer()
        self.body = bytearray()
        """Of an answer that is no stream of events."""
        self.stale = False
        self._events = Events() if events else None
        self._done = False
        self.over: asyncio.Future[None] = loop.create_future()

    def again(self) -> None:
        self.stale, self.heard.retried, self.heard.failure = False, True, None
        self.answer = Answer()
        self.over = self._loop.create_future()

    def receive(self, data: bytes) -> None:
        now = monotonic()
        try:
            body = self.answer.feed(data)
            if self.answer.status != 200 or self._events is None:
                self.body += body
            elif body:
                for event in self._events.feed(body):
                    self._hear(event, now)
        except (BadAnswer, msgspec.MsgspecError) as error:
            self.answer.keep = False
            self.end(End.FAILED, Failure("bad answer", str(error)))
            return
        if self.answer.done:
            self._whole(now)

    def lost(self, error: Exception | None) -> None:
        if self.over.done():
            return
        if self.answer.closed():
            self._whole(monotonic())
            return
        self.stale = not self.answer.begun
        what = "before the answer began" if self.stale else "in the middle of the answer"
        self.end(End.FAILED, Failure("reset", f"the connection ended {what}{f': {error}' if error else ''}"))

    def time_out(self) -> None:
        self.answer.keep = False
        self.end(End.TIMED_OUT, Failure("timeout", "no whole answer in time"))

    def end(self, end: End, failure: Failure | None) -> None:
        if not self.over.done():
            self.heard.end, self.heard.failure = end, failure
            self.heard.ended_at = monotonic()
            self.over.set_result(None)

    def conclude(self) -> None:
        self.heard.request_id = self.answer.headers.get(b"x-request-id", b"").decode("latin-1")

    def _hear(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        event, heard = _event(data), self.heard
        if event.error is not None:
            error = event.error if isinstance(event.error, dict) else {"message": str(event.error)}
            kind = error.get("type") or error.get("code") or "error"
            heard.failure = Failure(f"stream {kind}", str(error.get("message", "")))
            heard.end = end_of_error(error)
            return
        if event.usage is not None:
            heard.usage = event.usage
        for choice in event.choices:
            delta = choice.delta
            text = choice.text if delta is None else delta.content
            if text:
                heard.times.append(now)
                heard.text.append(text)
            elif delta is not None and (delta.reasoning_content or delta.reasoning or delta.tool_calls):
                heard.times.append(now)
            if choice.finish_reason is not None:
                heard.finish = choice.finish_reason

    def _whole(self, now: float) -> None:
        """The answer's last byte has come."""
        if self.over.done():
            return
        heard = self.heard
        heard.ended_at = now
        status = self.answer.status
        if self._events is None:
            heard.end = End.FINISHED
        elif status != 200:
            message = bytes(self.body[:2000]).decode("utf-8", "replace")
            heard.end, heard.failure = end_of_status(status), Failure(f"http {status}", message)
        elif heard.failure is None:
            for event in self._events.closed():
                self._hear(event, now)
            if heard.finish in GOOD_REASONS and heard.failure is None:
                heard.end = End.FINISHED
            elif heard.failure is None:
                why = f"its finish reason is {heard.finish!r}" if heard.finish else "without a finish reason"
                heard.end, heard.failure = End.FAILED, Failure("cut", f"the stream ended, {why}")
        self.over.set_result(None)


class _Connection(asyncio.Protocol):
    def __init__(self, client: Client) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self.exchange: _Exchange | None = None

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes, exchange: _Exchange) -> None:
        self.exchange = exchange
        if self._transport is None or not self.usable:
            exchange.lost(None)
        else:
            self._transport.write(request)

    def drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._client._made(self)

    def data_received(self, data: bytes) -> None:
        if self.exchange is not None:
            self.exchange.receive(data)
        else:
            self.drop()  # Nobody asked.

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._client._lost(self)
        if self.exchange is not None:
            self.exchange.lost(error)
