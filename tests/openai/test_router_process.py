"""The router as a process: it serves HTTP without etcd and NATS, and leaves on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator

import httpx
import pytest


def nobody() -> int:
    """A port at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def router(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    """One that serves HTTP; its exit code is 0 once it was told to leave."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--model", "latency", "--http.port", "0", *flags),
        *("--control.etcd", f"127.0.0.1:{nobody()}", "--control.nats", f"nats://127.0.0.1:{nobody()}"),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    log = ""
    async with asyncio.timeout(120):
        while (found := re.search(r"serves latency at (http://\S+)", log)) is None:
            line = (await process.stderr.readline()).decode()
            assert line, log
            log += line
    rest = asyncio.create_task(process.stderr.read())
    try:
        async with httpx.AsyncClient(base_url=found[1], timeout=60) as client:
            yield process, client
        async with asyncio.timeout(120):
            code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
        log += (await rest).decode()
    assert code == 0, log


@pytest.mark.live
def test_sigterm_ends_it_well() -> None:
    async def main() -> None:
        async with router() as (process, client):
            assert (await client.get("/health")).status_code == 200
            ready = await client.get("/ready")
            assert ready.status_code == 503
            assert ready.json()["error"]["message"] == "no worker is known"
            asked = await client.post("/v1/completions", json={"model": "latency", "prompt": "x"})
            assert asked.status_code == 503
            assert asked.headers["retry-after"] == "10"
            process.send_signal(signal.SIGTERM)

    asyncio.run(main())


@pytest.mark.live
def test_it_lingers_for_load_balancers_until_told_again() -> None:
    async def main() -> None:
        async with router("--http.linger-s", "3600") as (process, client):
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(120):
                while "leaving" not in (await client.get("/ready")).text:
                    await asyncio.sleep(0.05)
            # Who asks now, on a connection of its own, is served like before.
            async with httpx.AsyncClient(base_url=client.base_url) as other:
                assert (await other.get("/health")).status_code == 200
            process.send_signal(signal.SIGTERM)

    asyncio.run(main())
