"""The wire over gRPC: channels, a server with a table of methods, errors by one table; no generated stubs.

A message costs about 0.1 ms however small, so a session carries one frame a step. Channels are made fresh
for each session and call: none inherits the back-off of an earlier failure.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from fleet.errors import ERRORS, FleetError, Internal, Unavailable, WorkerLost
from fleet.tls import Tls
from fleet.wire import WorkerService
from fleet.wire.calls import CALLS, Caller
from fleet.wire.session import RouterSession, WireSettings, WorkerSessions

_LOG = logging.getLogger(__name__)
_SERVICE = "pdfleet.v1.Worker"
_NAME_KEY = "pdfleet-error"
"""Trailing metadata: name of the error in `ERRORS`, finer than gRPC's status."""

_BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""What reading or writing a finished or broken stream raises; the last on a write after its end."""

_BY_STATUS: dict[str, type[FleetError]] = {row.grpc: row.error for row in reversed(ERRORS.values())} | {
    "UNAVAILABLE": WorkerLost,
    "CANCELLED": WorkerLost,
}
"""For a status without a name: the broadest error of each; nobody there, or cut off, is a lost worker."""


def _options(settings: WireSettings) -> list[tuple[str, Any]]:
    """Explicit for both sides. Keep-alive pings find a dead host even where no session is open."""
    ping_ms = int(settings.heartbeat_s * 1000)
    return [
        ("grpc.max_receive_message_length", settings.message_bytes),
        ("grpc.max_send_message_length", settings.message_bytes),
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", 2 * ping_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _channel(address: str, settings: WireSettings, tls: Tls | None) -> grpc.aio.Channel:
    """The only place where channels are made."""
    options = [
        *_options(settings),
        ("grpc.use_local_subchannel_pool", 1),  # a shared one would share back-off too
        ("grpc.min_reconnect_backoff_ms", int(settings.connect_s * 1000)),  # limits one connect
        ("grpc.enable_http_proxy", 0),  # workers are not behind a web proxy
        ("grpc.enable_retries", 0),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
    return grpc.aio.secure_channel(address, credentials, options=options)


def _error(address: str, status: grpc.StatusCode, details: str | None, name: str | None) -> FleetError:
    kind = ERRORS[name].error if name in ERRORS else _BY_STATUS.get(status.name, Internal)
    return kind(f"{address}: {details or status.name.lower()}")


def _raised(address: str, error: BaseException) -> FleetError:
    """Of a call or session that failed at the caller."""
    if isinstance(error, grpc.aio.AioRpcError):
        name = dict(error.trailing_metadata() or ()).get(_NAME_KEY)
        return _error(address, error.code(), error.details(), str(name) if name else None)
    return WorkerLost(f"{address}: {error}")


class RouterPipe:
    """The caller's end of a stream, as `session.Pipe`."""

    def __init__(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        self._call = call

    async def read(self) -> bytes:
        try:
            data = await self._call.read()
        except _BROKEN as error:
            raise Unavailable(_why(error)) from None
        if isinstance(data, bytes):
            return data
        raise Unavailable("the worker ended the session")

    async def write(self, data: bytes) -> None:
        try:
            await self._call.write(data)
        except _BROKEN as error:
            raise Unavailable(_why(error)) from None

    async def finish(self) -> bool:
        try:
            await self._call.done_writing()
        except _BROKEN as error:
            raise Unavailable(_why(error)) from None
        return True


class WorkerPipe:
    """The server's end of a stream, as `session.Pipe`."""

    def __init__(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self._context = context

    async def read(self) -> bytes:
        try:
            data = await self._context.read()
        except _BROKEN as error:
            raise Unavailable(_why(error)) from None
        if isinstance(data, bytes):
            return data
        raise Unavailable("the router closed the session")

    async def write(self, data: bytes) -> None:
        try:
            await self._context.write(data)
        except _BROKEN as error:
            raise Unavailable(_why(error)) from None

    async def finish(self) -> bool:
        return False  # the handler's return is what tells the peer


def _why(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name.lower()
    return str(error) or type(error).__name__


class GrpcWire(Caller):
    """`fleet.wire.Wire` of a router or an operator. With `tls` it speaks to no worker that lacks it."""

    def __init__(self, settings: WireSettings | None = None, tls: Tls | None = None) -> None:
        self._settings = settings or WireSettings()
        self._tls = tls
        self._sessions: dict[RouterSession, None] = {}

    async def open(self, address: str) -> RouterSession:
        """Returns when the worker has taken the session; `WorkerLost` at once when nobody listens."""
        channel = _channel(address, self._settings, self._tls)
        try:
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(f"/{_SERVICE}/Session")()
            async with asyncio.timeout(self._settings.connect_s):
                await call.wait_for_connection()
        except TimeoutError:
            await channel.close()
            raise WorkerLost(f"{address}: no answer within {self._settings.connect_s} s") from None
        except _BROKEN as error:
            await channel.close()
            raise WorkerLost(f"{address}: {_why(error)}") from None
        except BaseException:
            await channel.close()
            raise

        async def hang_up() -> None:
            self._sessions.pop(session, None)
            call.cancel()
            await channel.close()

        session = RouterSession(address, RouterPipe(call), self._settings, hang_up)
        self._sessions[session] = None
        return session

    async def call(self, address: str, name: str, data: bytes, timeout_s: float) -> bytes:
        async with _channel(address, self._settings, self._tls) as channel:
            try:
                method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
                method = channel.unary_unary(f"/{_SERVICE}/{name}")
                return await method(data, timeout=timeout_s)
            except _BROKEN as error:
                raise _raised(address, error) from None

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in list(self._sessions)))


class GrpcServer:
    """`fleet.wire.WireServer`."""

    def __init__(self, server: grpc.aio.Server, sessions: WorkerSessions, address: str) -> None:
        self._server = server
        self._sessions = sessions
        self._address = address

    @property
    def address(self) -> str:
        return self._address

    async def close(self, grace_s: float) -> None:
        """Sessions end when their frames are written, or after `grace_s` seconds."""
        self._sessions.finish()
        await self._server.stop(grace_s)
        await self._sessions.all_ended()


async def serve(
    service: WorkerService,
    bind: str = "127.0.0.1",
    port: int = 0,
    *,
    advertise: str = "",
    settings: WireSettings | None = None,
    tls: Tls | None = None,
) -> GrpcServer:
    """Answers for `service` at `bind`; port 0 takes a free one. Its address has `advertise`, if given,
    for a host. With `tls` only callers with a certificate of its authority are heard. OSError when the
    port is taken or the certificate is none."""
    chosen = settings or WireSettings()
    sessions = WorkerSessions(service, chosen)
    server = grpc.aio.server(
        options=[
            *_options(chosen),
            ("grpc.so_reuseport", 0),  # two workers on one port is an error, not a lottery
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10),  # routers' pings are welcome
            ("grpc.http2.max_ping_strikes", 0),
        ]
    )

    async def session(requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.send_initial_metadata(())  # tells the router that the session is taken
        why = await sessions.attend(WorkerPipe(context))
        _LOG.info("session with %s ended: %s", context.peer(), why.message)
        if not isinstance(why, Unavailable):
            await _abort(context, why)

    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Session": grpc.stream_stream_rpc_method_handler(session)
    }
    methods |= {name: grpc.unary_unary_rpc_method_handler(_answer(name, service)) for name in CALLS}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    place = f"{_host(bind)}:{port}"
    try:
        if tls is None:
            chosen_port = server.add_insecure_port(place)
        else:
            credentials = grpc.ssl_server_credentials([(tls.key, tls.cert)], tls.ca, require_client_auth=True)
            chosen_port = server.add_secure_port(place, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen at {bind}:{port}: {error}") from None
    await server.start()
    return GrpcServer(server, sessions, f"{_host(advertise or bind)}:{chosen_port}")


def _host(name: str) -> str:
    return f"[{name}]" if ":" in name and not name.startswith("[") else name


def _answer(name: str, service: WorkerService) -> Callable[..., Any]:
    async def answer(data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        try:
            return await CALLS[name](service, data)
        except FleetError as error:
            await _abort(context, error)

    return answer


async def _abort(context: grpc.aio.ServicerContext[bytes, bytes], error: FleetError) -> NoReturn:
    name = ((_NAME_KEY, type(error).__name__),)
    await context.abort(grpc.StatusCode[error.grpc_status], error.message, name)
