"""Two real routers over real workers: each hears what the other sends, and any request is explained."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import FLEET, Fleet, Plan, router_ready, until
from servers import Etcd, Nats

pytestmark = pytest.mark.live

LIMIT_S = 120.0
"""Nothing here takes so long; beyond, the test fails."""


@pytest.fixture
def fleet(tmp_path: Path, etcd: Etcd, nats: Nats) -> Iterator[Fleet]:
    made = Fleet(
        tmp_path,
        Plan(prefill=1, decode=1, flags={"router": ["--cost.local-prefill-tokens", "0"]}),
        etcd,
        nats,
    )
    try:
        made.start()
        yield made
    finally:
        made.stop()


def fleetctl(fleet: Fleet, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "fleetctl", *arguments, "--etcd", fleet.etcd.address, "--fleet", FLEET]
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_request_is_explained_and_traced_whichever_router_had_it(fleet: Fleet) -> None:
    async def ask(client: httpx.AsyncClient, router: str, id: str, tokens: int) -> None:
        body = {"model": "latency", "prompt": "on the way " * 30, "max_tokens": tokens, "ignore_eos": True}
        url = f"http://127.0.0.1:{fleet.http[router]}/v1/completions"
        response = await client.post(url, json=body, headers={"x-request-id": id})
        assert response.status_code == 200, response.text
        assert response.headers["x-request-id"] == id

    async def messages(client: httpx.AsyncClient, router: str) -> float:
        page = (await client.get(f"http://127.0.0.1:{fleet.http[router]}/metrics")).text
        return sum(float(line.split()[-1]) for line in page.splitlines() if 'event="peer_messages"' in line)

    async def main() -> None:
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:
            for router in fleet.http:
                await until(lambda r=router: router_ready(fleet.address(r)), LIMIT_S, fleet.logs)
            for router in fleet.http:  # Both tell, and hear.
                await until(lambda r=router: messages(client, r), LIMIT_S, fleet.logs)
            news = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "fleetctl", "trace", "--count", "2", "--json"),
                *("--etcd", fleet.etcd.address, "--fleet", FLEET),
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert news.stdout is not None
            seen: list[dict[str, Any]] = []
            number = 0
            while {event["router"] for event in seen if event["event"] == "end"} != set(fleet.http):
                # It follows from some moment on that nobody here is told of.
                number += 1
                await asyncio.gather(*(ask(client, r, f"{r}.{number}", 5) for r in fleet.http))
                while True:
                    try:
                        async with asyncio.timeout(1.0):
                            line = await news.stdout.readline()
                    except TimeoutError:
                        break
                    if not line:
                        break
                    seen.append(json.loads(line))
            assert await news.wait() == 0
            assert all(event["id"].startswith(f"{event['router']}.") for event in seen)
            long = asyncio.create_task(ask(client, "router-1", "long", 300))
            url = f"http://127.0.0.1:{fleet.http['router-1']}/fleet/requests/long"

            async def known() -> bool:
                return (await client.get(url)).status_code == 200

            await until(known, LIMIT_S, fleet.logs)
            traced = await asyncio.to_thread(fleetctl, fleet, "trace", "long", "--json")
            await long
            events = [json.loads(line) for line in traced.splitlines()]
            assert events[-1]["event"] == "end"
            assert events[-1]["outcome"]["tokens"] == 300
            assert {event["router"] for event in events} == {"router-1"}
            endless = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "fleetctl", "trace", "--json"),
                *("--etcd", fleet.etcd.address, "--fleet", FLEET),
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert endless.stdout is not None
            reading = asyncio.create_task(endless.stdout.readline())
            while not reading.done():
                await ask(client, "router-0", "any", 1)
            endless.send_signal(signal.SIGINT)
            assert await endless.wait() == 0, "Ctrl-C is how one ends it"

    asyncio.run(main())
    told = json.loads(fleetctl(fleet, "explain", "long", "--json"))
    (record,) = told["requests"]
    assert (record["router"], record["state"], told["silent"]) == ("router-1", "done", [])
    picture = fleetctl(fleet, "explain", "long")
    for word in (
        "request long",
        "finished",
        "prompt computed",
        "KV brought",
        "▸ prefill-0",
        "▸ decode-0",
        "█",
    ):
        assert word in picture, picture
    assert "long" in fleetctl(fleet, "explain", "--slow", "0")
    assert "of 2 routers none does" in fleetctl(fleet, "explain", "nothing", code=1)
    assert "of 2 routers none does" in fleetctl(fleet, "trace", "nothing", code=1)
    fleet.processes["router-0"].kill()
    missing = fleetctl(fleet, "explain", "long")
    assert "request long" in missing
    assert "router router-0 at" in missing, "it is said who did not answer"
    print(picture)
