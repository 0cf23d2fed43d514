"""Serves the ingress with uvicorn inside a loop that runs already; signals stay the process's business."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.middleware.cors import CORSMiddleware

from fleet.tls import renewed
from router.openai.asgi import Ingress
from router.openai.protocol import bounded
from router.openai.settings import HttpSettings

_GRACE_S = 5.0
"""For requests that were told to end to do so, seconds."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _for_browsers(ingress: Ingress, settings: HttpSettings) -> CORSMiddleware:
    """Answers preflights before any key is asked for: browsers send none with them."""
    return CORSMiddleware(
        ingress,
        allow_origins=settings.cors_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after"),
    )


def _notice_silence(listener: socket.socket, limit_s: float) -> None:
    """A client whose host or network is gone says nothing, not even that it left: after `limit_s` seconds its
    connection counts as closed, whether it is written to or waited for. Accepted sockets inherit this."""
    probe_s = max(1, round(limit_s / 4))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", probe_s),
        ("TCP_KEEPINTVL", probe_s),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", round(limit_s * 1000)),
    ):
        if hasattr(socket, name):  # the last is Linux's own
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class HttpServer:
    """Listens from `start` on."""

    def __init__(self, ingress: Ingress, server: _Server, port: int, task: asyncio.Task[None]) -> None:
        self._ingress = ingress
        self._server = server
        self._task = task
        self.port = port

    @classmethod
    async def start(cls, ingress: Ingress, settings: HttpSettings, bind: str = "127.0.0.1") -> HttpServer:
        """OSError: the port is taken, the address is not of this host, or the certificate is none."""
        config = uvicorn.Config(
            _for_browsers(ingress, settings) if settings.cors_origins else ingress,
            http=bounded(settings),
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=max(1, round(settings.idle_timeout_s)),
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        if settings.tls_cert is not None and settings.tls_key is not None:
            config.load()
            assert isinstance(config.ssl, ssl.SSLContext)
            renewed(config.ssl, settings.tls_cert, settings.tls_key)
        listener = socket.create_server(
            (bind, settings.port), family=socket.AF_INET6 if ":" in bind else socket.AF_INET, backlog=2048
        )
        _notice_silence(listener, settings.write_timeout_s)
        # asyncio does so only for sockets whose protocol is named; uvloop for all.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not task.done():
            await asyncio.sleep(0.001)
        if task.done():
            listener.close()
            task.result()
            raise OSError("the HTTP server ended before it began")
        return cls(ingress, server, listener.getsockname()[1], task)

    async def serve(self) -> None:
        """Until stopped. Raises what ended the server before."""
        await asyncio.shield(self._task)
        if not self._server.should_exit:
            raise RuntimeError("the HTTP server has ended by itself")

    async def stop(self, limit_s: float, hurry: asyncio.Event | None = None) -> None:
        """Accepts no more, waits for what runs, then, or when told to hurry, ends it with an error."""
        self._ingress.draining = True
        self._server.should_exit = True
        if not await self._ended(limit_s, hurry):
            await self._ingress.stop_running()
            if not await self._ended(_GRACE_S):
                self._server.force_exit = True
                if not await self._ended(_GRACE_S):
                    self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _ended(self, limit_s: float, hurry: asyncio.Event | None = None) -> bool:
        hurried = asyncio.create_task((hurry or asyncio.Event()).wait())
        await asyncio.wait({self._task, hurried}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        return self._task.done()
