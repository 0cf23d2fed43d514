"""The page of metrics of a process without another HTTP server: GET /metrics, and how it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

log = logging.getLogger(__name__)

_HEAD_BYTES = 8192
_HEAD_S = 5.0
_WRITE_S = 10.0
_CONNECTIONS = 16
"""At the same time; more are closed at once: whoever scrapes comes back."""


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Where a worker tells its figures. Whoever reaches the port may read them: no key is asked for."""

    bind: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface, where others than this host scrape."""
    port: int = 0
    """TCP port; 0 takes a free one. The address stands in the worker's card, and routers list it for
    Prometheus at /fleet/targets."""
    vllm_names: bool = False
    """Whether figures that vLLM has too are also told under its names: see docs/metrics.md."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; 0 to 65535 is possible")


class MetricsServer:
    """Listens from `start` on. `checks`: further paths, such as `/live`, each answered with 200, or with 503
    and why not where there is a reason."""

    def __init__(
        self, page: Callable[[], Awaitable[bytes]], checks: Mapping[str, Callable[[], str]] | None = None
    ) -> None:
        self._page = page
        self._checks = {path.encode(): check for path, check in (checks or {}).items()}
        self._server: asyncio.Server
        self._open: set[asyncio.Task[None]] = set()
        self.port = 0

    @classmethod
    async def start(
        cls,
        page: Callable[[], Awaitable[bytes]],
        settings: MetricsSettings,
        checks: Mapping[str, Callable[[], str]] | None = None,
    ) -> MetricsServer:
        """OSError: the port is taken, or the address is not of this host."""
        self = cls(page, checks)
        self._server = await asyncio.start_server(
            self._accept, settings.bind, settings.port, limit=_HEAD_BYTES, backlog=64
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def close(self) -> None:
        self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
            status, body = await self._answer(head)
            writer.write(
                f"HTTP/1.1 {status}\r\ncontent-type: text/plain; version=0.0.4; charset=utf-8\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            )
            writer.write(b"" if head.startswith(b"HEAD ") else body)
            async with asyncio.timeout(_WRITE_S):
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            writer.transport.abort()
        finally:
            writer.close()

    async def _answer(self, head: bytes) -> tuple[str, bytes]:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        check = self._checks.get(path)
        if path != b"/metrics" and check is None:
            return "404 Not Found", b"there is only /metrics here\n"
        if method not in (b"GET", b"HEAD"):
            return "405 Method Not Allowed", b"GET it\n"
        if check is not None:
            wrong = check()
            return ("503 Service Unavailable", f"{wrong}\n".encode()) if wrong else ("200 OK", b"ok\n")
        try:
            return "200 OK", await self._page()
        except Exception:
            # The root of a request: a defect in a figure must not end the worker.
            log.exception("the page of metrics cannot be made")
            return "500 Internal Server Error", b"the page cannot be made; the log says why\n"
