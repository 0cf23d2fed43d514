"""The wire over TCP: messages with their length before them, on one connection a session or call.

A connection begins with the name of what it is for, `Session` or a call's. The worker takes a session with an
empty message, and then messages go both ways; a call is its argument, and back its reply. Either side says
when it has ended, the worker also why. gRPC does the same for 20 times the processor time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable
from typing import cast

from fleet.errors import (
    DeadlineExceeded,
    FleetError,
    NotFound,
    TooLarge,
    Unavailable,
    WorkerLost,
    error_named,
)
from fleet.tls import Tls
from fleet.wire import WorkerService
from fleet.wire.calls import CALLS, Caller
from fleet.wire.session import RouterSession, WireSettings, WorkerSessions

_LOG = logging.getLogger(__name__)
_HEAD = struct.Struct("<IB")
"""Before each message: its length, and its kind."""
_SAID, _END = 0, 1
"""What is said; the last word, empty where all went well, else an error: its name, a line end, its text."""
_SESSION = "Session"
_NAME_BYTES = 64
"""Longest first message of a connection: until then anybody may be speaking."""
_AHEAD_BYTES = 1 << 18
"""Read and not yet taken; with more the peer is made to wait."""


class Connection(asyncio.Protocol):
    """One connection, as `session.Pipe`."""

    def __init__(
        self,
        message_bytes: int,
        came: Callable[[Connection], None] | None = None,
        name_bytes: int | None = None,
    ) -> None:
        """`came` is called when it stands; `name_bytes` limits its first message."""
        self._limit = message_bytes if name_bytes is None else name_bytes
        self._later_limit = message_bytes
        self._came = came
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._messages: deque[bytes] = deque()
        self._ahead = 0
        self._ended: FleetError | None = None
        """Why nothing more comes, once all messages are read."""
        self._reader: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        """Set while the peer takes nothing."""
        self.lost = self._loop.create_future()
        """Done when the connection is no more."""

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._came is not None:
            self._came(self)

    def data_received(self, data: bytes) -> None:
        if self._ended is not None:
            return
        buffer = self._buffer
        buffer += data
        start, have = 0, len(buffer)
        while have - start >= _HEAD.size:
            length, kind = _HEAD.unpack_from(buffer, start)
            if length > self._limit:
                self._end(TooLarge(f"a message of {length} bytes; at most {self._limit} are allowed"))
                break
            end = start + _HEAD.size + length
            if have < end:
                break
            message = bytes(buffer[start + _HEAD.size : end])
            start = end
            if kind != _SAID:
                self._end(_error(message))
                break
            self._limit = self._later_limit
            self._messages.append(message)
            self._ahead += length
        del buffer[:start]
        if self._ahead > _AHEAD_BYTES:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(WorkerLost(f"the connection broke: {error}" if error else "the connection was closed"))
        self.resume_writing()
        if not self.lost.done():
            self.lost.set_result(None)

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    # -- session.Pipe

    async def read(self) -> bytes:
        while not self._messages:
            if self._ended is not None:
                raise self._ended
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        message = self._messages.popleft()
        before, self._ahead = self._ahead, self._ahead - len(message)
        if before > _AHEAD_BYTES >= self._ahead and not self._transport.is_closing():
            self._transport.resume_reading()
        return message

    async def write(self, data: bytes) -> None:
        if self._transport.is_closing():
            raise self._ended or WorkerLost("the connection is closed")
        self._transport.write(_HEAD.pack(len(data), _SAID) + data)
        while self._writable is not None:
            await asyncio.shield(self._writable)

    async def finish(self) -> bool:
        self.last_word()
        return True

    # -- its end

    def last_word(self, error: FleetError | None = None) -> None:
        """Nothing more comes from here; the peer is told why, where that is an error."""
        text = b"" if error is None else f"{type(error).__name__}\n{error.message}".encode("utf-8", "replace")
        if not self._transport.is_closing():
            self._transport.write(_HEAD.pack(len(text), _END) + text)

    async def close(self, limit_s: float) -> None:
        """Returns when it is no more: what was written is taken by then, or `limit_s` seconds have passed."""
        self._transport.close()
        await asyncio.wait({self.lost}, timeout=limit_s)
        self._transport.abort()
        await asyncio.wait({self.lost})

    def abort(self) -> None:
        self._transport.abort()

    def _end(self, why: FleetError) -> None:
        self._ended = self._ended or why
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class _WorkerPipe:
    """The worker's end: it has the last word when all is done."""

    def __init__(self, connection: Connection) -> None:
        self.read, self.write = connection.read, connection.write

    async def finish(self) -> bool:
        return False


def _error(last_word: bytes) -> FleetError:
    if not last_word:
        return WorkerLost("the peer ended the session")
    name, _, message = last_word.decode("utf-8", "replace").partition("\n")
    return error_named(name, message)


class TcpWire(Caller):
    """`fleet.wire.Wire` of a router or an operator. With `tls` it speaks to no worker that lacks it."""

    def __init__(self, settings: WireSettings | None = None, tls: Tls | None = None) -> None:
        self._settings = settings or WireSettings()
        self._tls = None if tls is None else tls.client()
        self._sessions: dict[RouterSession, None] = {}

    async def open(self, address: str) -> RouterSession:
        """Returns when the worker has taken the session; `WorkerLost` at once when nobody listens."""
        try:
            async with asyncio.timeout(self._settings.connect_s):
                connection = await self._connect(address)
                try:
                    await connection.write(_SESSION.encode())
                    await connection.read()
                except BaseException:
                    connection.abort()
                    raise
        except TimeoutError:
            raise WorkerLost(f"{address}: no answer within {self._settings.connect_s} s") from None
        except FleetError as error:
            raise WorkerLost(f"{address}: {error.message}") from None

        async def hang_up() -> None:
            self._sessions.pop(session, None)
            await connection.close(0.0)

        session = RouterSession(address, connection, self._settings, hang_up)
        self._sessions[session] = None
        return session

    async def call(self, address: str, name: str, data: bytes, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connect(address)
                try:
                    await connection.write(name.encode())
                    await connection.write(data)
                    return await connection.read()
                finally:
                    connection.abort()
        except TimeoutError:
            raise DeadlineExceeded(f"{address}: no answer to {name} within {timeout_s:g} s") from None
        except FleetError as error:
            raise type(error)(f"{address}: {error.message}") from None

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in list(self._sessions)))

    async def _connect(self, address: str) -> Connection:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._settings.message_bytes),
                host,
                int(port),
                ssl=self._tls,
                server_hostname=host if self._tls else None,
            )
        except (OSError, ValueError) as error:
            raise WorkerLost(str(error) or type(error).__name__) from None
        return connection


class TcpServer:
    """`fleet.wire.WireServer`."""

    def __init__(self, service: WorkerService, settings: WireSettings) -> None:
        self._service = service
        self._settings = settings
        self._sessions = WorkerSessions(service, settings)
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._address = ""

    async def start(self, bind: str, port: int, advertise: str, tls: ssl.SSLContext | None) -> None:
        try:
            # Two workers on one port is an error, not a lottery.
            listener = socket.create_server(
                (bind, port), family=socket.AF_INET6 if ":" in bind else socket.AF_INET, reuse_port=False
            )
        except OSError as error:
            raise OSError(f"cannot listen at {bind}:{port}: {error}") from None
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._settings.message_bytes, self._came, _NAME_BYTES),
            sock=listener,
            backlog=1024,
            ssl=tls,
            ssl_handshake_timeout=self._settings.connect_s if tls else None,
        )
        self._address = f"{_host(advertise or bind)}:{listener.getsockname()[1]}"

    @property
    def address(self) -> str:
        return self._address

    async def close(self, grace_s: float) -> None:
        """Sessions end when their frames are written, or after `grace_s` seconds."""
        self._server.close()
        self._sessions.finish()
        if self._connections:
            await asyncio.wait(self._connections.values(), timeout=grace_s)
        for connection, task in list(self._connections.items()):
            connection.abort()
            task.cancel()
        await self._sessions.all_ended()
        if self._connections:
            await asyncio.wait(self._connections.values())

    def _came(self, connection: Connection) -> None:
        task = asyncio.get_running_loop().create_task(self._attend(connection))
        self._connections[connection] = task
        task.add_done_callback(lambda _: self._connections.pop(connection))

    async def _attend(self, connection: Connection) -> None:
        try:
            async with asyncio.timeout(self._settings.connect_s):
                name = (await connection.read()).decode("utf-8", "replace")
            if name == _SESSION:
                await connection.write(b"")  # it is taken
                why = await self._sessions.attend(_WorkerPipe(connection))
                _LOG.info("a session ended: %s", why.message)
                connection.last_word(None if isinstance(why, Unavailable) else why)
            else:
                await self._answer(connection, name)
            await connection.close(self._settings.connect_s)
        except (TimeoutError, FleetError) as error:
            _LOG.debug("a connection ended: %s", error)
        finally:
            connection.abort()

    async def _answer(self, connection: Connection, name: str) -> None:
        """One call; given up when the caller has gone."""
        try:
            if name not in CALLS:
                raise NotFound(f"a worker knows no {name}")
            argument = await connection.read()
            call = asyncio.ensure_future(CALLS[name](self._service, argument))
            try:
                await asyncio.wait({call, connection.lost}, return_when=asyncio.FIRST_COMPLETED)
                if call.done():
                    await connection.write(call.result())
            finally:
                call.cancel()
        except FleetError as error:
            connection.last_word(error)


async def serve(
    service: WorkerService,
    bind: str = "127.0.0.1",
    port: int = 0,
    *,
    advertise: str = "",
    settings: WireSettings | None = None,
    tls: Tls | None = None,
) -> TcpServer:
    """Answers for `service` at `bind`; port 0 takes a free one. Its address has `advertise`, if given,
    for a host. With `tls` only callers with a certificate of its authority are heard. OSError when the
    port is taken or the certificate is none."""
    server = TcpServer(service, settings or WireSettings())
    await server.start(bind, port, advertise, None if tls is None else tls.server())
    return server


def _host(name: str) -> str:
    return f"[{name}]" if ":" in name and not name.startswith("[") else name
