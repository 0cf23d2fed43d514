"""The wire between processes: calls over gRPC (`rpc.py`), sessions over TCP (`tcp.py`), with the same TLS.

A worker has a port for each; its card names both.
"""

from __future__ import annotations

import asyncio

from fleet.tls import Tls
from fleet.wire import WorkerService
from fleet.wire.rpc import CallServer, GrpcCaller
from fleet.wire.session import RouterSession, WireSettings
from fleet.wire.tcp import SessionServer, connect


class NetworkWire(GrpcCaller):
    """`fleet.wire.Wire` of a router or an operator. With `tls` it speaks to no worker that lacks it."""

    def __init__(self, settings: WireSettings | None = None, tls: Tls | None = None) -> None:
        self._settings = settings or WireSettings()
        super().__init__(self._settings, tls)
        self._tls = tls
        self._sessions: dict[RouterSession, None] = {}

    async def open(self, address: str) -> RouterSession:
        connection = await connect(address, self._settings, self._tls)

        async def hang_up() -> None:
            self._sessions.pop(session, None)
            await connection.close(0.0)

        session = RouterSession(address, connection, self._settings, hang_up)
        self._sessions[session] = None
        return session

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in list(self._sessions)))
        await super().close()


class NetworkServer:
    """`fleet.wire.WireServer`."""

    def __init__(self, calls: CallServer, sessions: SessionServer) -> None:
        self._calls = calls
        self._sessions = sessions

    @property
    def address(self) -> str:
        return self._calls.address

    @property
    def sessions(self) -> str:
        return self._sessions.address

    async def close(self, grace_s: float) -> None:
        await asyncio.gather(self._calls.close(grace_s), self._sessions.close(grace_s))


async def serve(
    service: WorkerService,
    bind: str = "127.0.0.1",
    port: int = 0,
    session_port: int = 0,
    *,
    advertise: str = "",
    settings: WireSettings | None = None,
    tls: Tls | None = None,
) -> NetworkServer:
    """Answers for `service` at `bind`; port 0 takes a free one. Its addresses have `advertise`, if given,
    for a host. With `tls` only callers with a certificate of its authority are heard. OSError when a
    port is taken or the certificate is none."""
    chosen = settings or WireSettings()
    calls, sessions = CallServer(service, chosen), SessionServer(service, chosen)
    await sessions.start(bind, session_port, advertise, tls)
    try:
        await calls.start(bind, port, advertise, tls)
    except BaseException:
        await asyncio.gather(calls.close(0), sessions.close(0))
        raise
    return NetworkServer(calls, sessions)
