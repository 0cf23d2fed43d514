"""The router as a process: it serves HTTP without etcd and NATS, and leaves on SIGTERM."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys

import httpx
import pytest


def nobody() -> int:
    """A port at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.live
def test_sigterm_ends_it_well() -> None:
    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router", "--model", "latency", "--http.port", "0"),
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
        async with httpx.AsyncClient(base_url=found[1], timeout=60) as client:
            assert (await client.get("/health")).status_code == 200
            ready = await client.get("/ready")
            assert ready.status_code == 503
            assert ready.json()["error"]["message"] == "no worker is known"
            asked = await client.post("/v1/completions", json={"model": "latency", "prompt": "x"})
            assert asked.status_code == 503
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(120):
                code = await process.wait()
        assert code == 0, log + (await rest).decode()

    asyncio.run(main())
