"""The little HTTP server of a worker's figures, on a real port; and what is no request for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import httpx

from fleet.metrics import Kind, value
from fleet.metrics_server import MetricsServer, MetricsSettings
from fleet.telemetry import page


async def _page() -> bytes:
    return await page([value("a", "A.", Kind.GAUGE, 1.0)])


def serving(scenario: Callable[[int], Awaitable[None]], made: Callable[[], Awaitable[bytes]] = _page) -> None:
    async def main() -> None:
        server = await MetricsServer.start(made, MetricsSettings())
        try:
            async with asyncio.timeout(30):
                await scenario(server.port)
        finally:
            await server.close()

    asyncio.run(main())


def test_the_page_and_nothing_else() -> None:
    async def scenario(port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            told = await client.get("/metrics?x=1")
            assert (told.status_code, told.headers["content-type"][:25]) == (200, "text/plain; version=0.0.4")
            assert "\na 1.0\n" in told.text
            head = await client.head("/metrics")
            assert (head.status_code, head.text) == (200, "")
            assert (await client.get("/")).status_code == 404
            assert (await client.get("/metrics/../secret")).status_code == 404
            assert (await client.post("/metrics", content=b"x")).status_code == 405

    serving(scenario)


def test_what_is_no_request_ends_nothing() -> None:
    async def scenario(port: int) -> None:
        long = b"GET /metrics HTTP/1.1\r\n" + b"a" * 10_000
        for data in (b"", b"\r\n\r\n", b"\x16\x03\x01\x02\x00" * 20, long):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            writer.write_eof()
            try:
                assert b" 200 " not in await reader.read()
            except ConnectionError:
                pass
            finally:
                writer.close()
        # Connections that say nothing are few, and do not stay.
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        ended = asyncio.as_completed([reader.read() for reader, _ in idle])
        for _ in range(24):
            with suppress(ConnectionError):
                assert await next(ended) == b""
        for _, writer in idle:
            writer.close()
        async with httpx.AsyncClient() as client:
            while True:
                try:
                    told = await client.get(f"http://127.0.0.1:{port}/metrics")
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.01)
            assert told.status_code == 200

    serving(scenario)


def test_a_defect_in_a_figure_is_told_and_ends_nothing() -> None:
    broken = [True]

    async def made() -> bytes:
        if broken[0]:
            raise ZeroDivisionError("a figure")
        return await _page()

    async def scenario(port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            told = await client.get("/metrics")
            assert (told.status_code, "ZeroDivisionError" in told.text) == (500, False)
            broken[0] = False
            assert (await client.get("/metrics")).status_code == 200

    serving(scenario, made)
