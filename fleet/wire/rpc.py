"""Control over gRPC: the calls of `calls.py` as the service of proto/, without stubs; errors by one table.

Calls to a worker that follow one another share a channel, which takes three quarters of their cost away. A
failure ends the sharing, so that no call inherits the back-off of an earlier one. A worker closes connections
that ask nothing, that never finish a handshake or a call, or whose peer is silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio

from fleet.errors import (
    ERRORS,
    BadRequest,
    DeadlineExceeded,
    FleetError,
    Internal,
    NotFound,
    TooLarge,
    WorkerLost,
)
from fleet.tls import Tls
from fleet.wire import WorkerService
from fleet.wire.calls import CALLS, Caller
from fleet.wire.session import WireSettings
from fleet.wire.tcp import host_in_address
from fleet.wire.v1 import worker_pb2

SERVICE: str = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
_NAME_KEY = "pdfleet-error"
"""Trailing metadata: name of the error in `ERRORS`, finer than gRPC's status."""
_DETAILS = 1000
"""Characters of an error's text that travel: gRPC allows all metadata together 8 KiB."""
_ARGUMENT_BYTES = 1 << 16
"""Longest argument of a call; all are a few numbers and names."""

_BY_STATUS: dict[str, type[FleetError]] = {row.grpc: row.error for row in reversed(ERRORS.values())} | {
    "UNAVAILABLE": WorkerLost,  # nobody there, or cut off
    "CANCELLED": WorkerLost,
    "UNIMPLEMENTED": NotFound,
    "RESOURCE_EXHAUSTED": TooLarge,
}
"""Of a status that gRPC itself gave, without a name: else the broadest error of each."""


def _options(settings: WireSettings) -> list[tuple[str, Any]]:
    """Of both sides. A peer that answers no ping is gone, as in a session after `silence_s`."""
    beat_ms = int(settings.heartbeat_s * 1000)
    return [
        ("grpc.keepalive_time_ms", beat_ms),
        ("grpc.keepalive_timeout_ms", 2 * beat_ms),
        ("grpc.http2.ping_timeout_ms", 2 * beat_ms),  # a minute else, whatever the line above says
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_send_message_length", settings.message_bytes),
    ]


@dataclass(slots=True)
class _Held:
    channel: grpc.aio.Channel
    calls: int = 0
    """Under way."""
    idle_since: float = 0.0


class _Channels:
    """One an address, while its calls succeed and follow one another closely."""

    def __init__(self, make: Callable[[str], grpc.aio.Channel], idle_s: float) -> None:
        self._make = make
        self._idle_s = idle_s
        self._held: dict[str, _Held] = {}

    @asynccontextmanager
    async def to(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """For one call; an error raised in it ends the sharing."""
        now = asyncio.get_running_loop().time()
        idle = [held for held in self._held.items() if not held[1].calls]
        await self._close([name for name, held in idle if now - held.idle_since > self._idle_s])
        held = self._held.get(address)
        if held is None:
            held = self._held[address] = _Held(self._make(address))
        held.calls += 1
        try:
            yield held.channel
        except BaseException:
            if self._held.get(address) is held:
                del self._held[address]
            raise
        finally:
            held.calls -= 1
            held.idle_since = asyncio.get_running_loop().time()
            if not held.calls and self._held.get(address) is not held:
                await held.channel.close()

    async def close(self) -> None:
        """Of those in use, the last call does it."""
        await self._close(list(self._held))

    async def _close(self, addresses: list[str]) -> None:
        for held in [self._held.pop(address) for address in addresses]:
            if not held.calls:
                await held.channel.close()


class GrpcCaller(Caller):
    """The calls of `fleet.wire.Wire`. With `tls` it speaks to no worker that lacks it."""

    def __init__(self, settings: WireSettings, tls: Tls | None) -> None:
        idle_s = settings.call_idle_s / 10  # well before the worker does it: no call meets its end
        options = [
            *_options(settings),
            ("grpc.max_receive_message_length", settings.message_bytes),
            ("grpc.use_local_subchannel_pool", 1),  # a shared one would share back-off too
            ("grpc.min_reconnect_backoff_ms", int(settings.connect_s * 1000)),  # limits one connect
            ("grpc.enable_http_proxy", 0),  # workers are not behind a web proxy
            ("grpc.enable_retries", 0),
            ("grpc.client_idle_timeout_ms", int(idle_s * 1000)),
        ]
        if tls is not None and tls.name:
            options.append(("grpc.ssl_target_name_override", tls.name))

        def channel(address: str) -> grpc.aio.Channel:
            if tls is None:
                return grpc.aio.insecure_channel(address, options=options)
            own = tls.now()
            credentials = grpc.ssl_channel_credentials(own.ca, own.key, own.cert)
            return grpc.aio.secure_channel(address, credentials, options=options)

        self._channels = _Channels(channel, idle_s)

    async def call(self, address: str, name: str, data: bytes, timeout_s: float) -> bytes:
        try:
            async with self._channels.to(address) as channel:
                method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
                method = channel.unary_unary(f"/{SERVICE}/{name}")
                return await method(data, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _raised(address, name, timeout_s, error) from None

    async def close(self) -> None:
        await self._channels.close()


def _raised(address: str, call: str, timeout_s: float, error: grpc.aio.AioRpcError) -> FleetError:
    name = dict(error.trailing_metadata() or ()).get(_NAME_KEY)
    if isinstance(name, str) and name in ERRORS:
        return ERRORS[name].error(f"{address}: {error.details()}")
    kind = Internal if name else _BY_STATUS.get(error.code().name, Internal)
    if kind is DeadlineExceeded:
        return kind(f"{address}: no answer to {call} within {timeout_s:g} s")
    return kind(f"{address}: {error.details() or error.code().name.lower()}")


class CallServer:
    """Where a worker answers calls."""

    def __init__(self, service: WorkerService, settings: WireSettings) -> None:
        idle_ms = int(settings.call_idle_s * 1000)
        self._server = grpc.aio.server(
            options=[
                *_options(settings),
                ("grpc.max_receive_message_length", min(_ARGUMENT_BYTES, settings.message_bytes)),
                ("grpc.max_concurrent_streams", 100),
                ("grpc.so_reuseport", 0),  # two workers on one port is an error, not a lottery
                ("grpc.server_handshake_timeout_ms", int(settings.connect_s * 1000)),
                ("grpc.max_connection_idle_ms", idle_ms),
                # Ends one whose call never does: it is not idle, and answers pings.
                ("grpc.max_connection_age_ms", 2 * idle_ms),
                ("grpc.max_connection_age_grace_ms", int(settings.silence_s * 1000)),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10),  # callers' pings are welcome
                ("grpc.http2.max_ping_strikes", 0),
            ]
        )
        self._tls: Tls | None = None
        rows: dict[str, grpc.RpcMethodHandler[bytes, bytes]]
        rows = {name: grpc.unary_unary_rpc_method_handler(self._answer(name, service)) for name in CALLS}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, rows),))
        self._address = ""

    async def start(self, bind: str, port: int, advertise: str, tls: Tls | None) -> None:
        place = f"{host_in_address(bind)}:{port}"
        try:
            if tls is None:
                chosen = self._server.add_insecure_port(place)
            else:
                self._tls = tls
                credentials = _server_credentials(tls)
                chosen = self._server.add_secure_port(place, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen at {place}: {error}") from None
        await self._server.start()
        self._address = f"{host_in_address(advertise or bind)}:{chosen}"

    @property
    def address(self) -> str:
        return self._address

    def _answer(self, name: str, service: WorkerService) -> Callable[..., Any]:
        async def answer(data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            try:
                if self._tls is not None and not self._tls.admits(_names(context)):
                    raise BadRequest("the caller's certificate does not bear the fleet's name")
                return await CALLS[name](service, data)
            except FleetError as error:
                await _abort(context, error)

        return answer

    async def close(self, grace_s: float) -> None:
        """Calls under way are answered, or broken off after `grace_s` seconds."""
        await self._server.stop(grace_s)


def _server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """The certificate is asked for in each handshake, from a thread of gRPC's."""

    def now() -> Any:
        own = tls.now()
        return grpc.ssl_server_certificate_configuration([(own.key, own.cert)], own.ca)

    return grpc.dynamic_ssl_server_credentials(now(), now, require_client_authentication=True)


async def _abort(context: grpc.aio.ServicerContext[bytes, bytes], error: FleetError) -> NoReturn:
    name = ((_NAME_KEY, type(error).__name__),)
    await context.abort(grpc.StatusCode[error.grpc_status], error.message[:_DETAILS], name)


def _names(context: grpc.aio.ServicerContext[bytes, bytes]) -> list[str]:
    """Those that the caller's certificate bears."""
    found = context.auth_context().get("x509_subject_alternative_name", ())
    return [name.decode("utf-8", "replace") for name in found]
