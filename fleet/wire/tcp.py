"""Sessions over TCP: messages with their length before them, on one connection a router–worker pair.

The router begins with a greeting, the worker takes the session with an empty message, and then messages go
both ways. Either side says when it has ended, the worker also why. gRPC, which carries the calls (`rpc.py`),
could do this too; a message would then take 0.1 to 0.4 ms more of the processor, both sides together.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import cast

from fleet.errors import BadRequest, FleetError, TooLarge, Unavailable, WorkerLost, error_named
from fleet.tls import Tls, names_in
from fleet.wire import WorkerService
from fleet.wire.session import WireSettings, WorkerSessions

_LOG = logging.getLogger(__name__)
_HEAD = struct.Struct("<IB")
"""Before each message: its length, and its kind."""
_SAID, _END = 0, 1
"""What is said; the last word, empty where all went well, else an error: its name, a line end, its text."""
_GREETING = b"pdfleet.v1.Session"
_GREETING_BYTES = 64
"""Longest first message of a connection: until then anybody may be speaking."""
_AHEAD_BYTES = 1 << 18
"""Read and not yet taken; with more the peer is made to wait."""


class Connection(asyncio.Protocol):
    """One connection, as `session.Pipe`."""

    def __init__(
        self,
        message_bytes: int,
        came: Callable[[Connection], None] | None = None,
        first_bytes: int | None = None,
    ) -> None:
        """`came` is called when it stands; `first_bytes` limits its first message."""
        self._limit = message_bytes if first_bytes is None else first_bytes
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

    @property
    def certificate(self) -> dict[str, object] | None:
        """The peer's, over TLS."""
        found: dict[str, object] | None = self._transport.get_extra_info("peercert")
        return found

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


async def connect(address: str, settings: WireSettings, tls: Tls | None) -> Connection:
    """A session's connection, when the worker has taken it; `WorkerLost` at once when nobody listens."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        async with asyncio.timeout(settings.connect_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(settings.message_bytes),
                host,
                int(port),
                ssl=tls.client() if tls else None,
                server_hostname=tls.expects(host) if tls else None,
            )
            try:
                await connection.write(_GREETING)
                await connection.read()
            except BaseException:
                connection.abort()
                raise
    except TimeoutError:
        raise WorkerLost(f"{address}: no answer within {settings.connect_s} s") from None
    except FleetError as error:
        raise WorkerLost(f"{address}: {error.message}") from None
    except (OSError, ValueError) as error:
        raise WorkerLost(f"{address}: {str(error) or type(error).__name__}") from None
    return connection


class SessionServer:
    """Where a worker takes sessions."""

    def __init__(self, service: WorkerService, settings: WireSettings) -> None:
        self._settings = settings
        self._sessions = WorkerSessions(service, settings)
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._address = ""

    async def start(self, bind: str, port: int, advertise: str, tls: Tls | None) -> None:
        self._tls, context = tls, None if tls is None else tls.server()
        try:
            # Two workers on one port is an error, not a lottery.
            listener = socket.create_server(
                (bind, port), family=socket.AF_INET6 if ":" in bind else socket.AF_INET, reuse_port=False
            )
        except OSError as error:
            raise OSError(f"cannot listen at {bind}:{port}: {error}") from None
        # asyncio does so only for sockets whose protocol is named: a frame would wait 40 ms for the last one.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._settings.message_bytes, self._came, _GREETING_BYTES),
            sock=listener,
            backlog=1024,
            ssl=context,
            ssl_handshake_timeout=self._settings.connect_s if tls else None,
        )
        self._address = f"{host_in_address(advertise or bind)}:{listener.getsockname()[1]}"

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
            known = self._tls is None or self._tls.admits(names_in(connection.certificate))
            async with asyncio.timeout(self._settings.connect_s):
                greeting = await connection.read()
            if not known:
                connection.last_word(BadRequest("the caller's certificate does not bear the fleet's name"))
            elif greeting == _GREETING:
                await connection.write(b"")  # it is taken
                why = await self._sessions.attend(_WorkerPipe(connection))
                _LOG.info("a session ended: %s", why.message)
                connection.last_word(None if isinstance(why, Unavailable) else why)
            else:
                connection.last_word(BadRequest("sessions are taken here; they begin with another greeting"))
            await connection.close(self._settings.connect_s)
        except (TimeoutError, FleetError) as error:
            _LOG.debug("a connection ended: %s", error)
        finally:
            connection.abort()


def host_in_address(name: str) -> str:
    """As it stands before a port."""
    return f"[{name}]" if ":" in name and not name.startswith("[") else name
