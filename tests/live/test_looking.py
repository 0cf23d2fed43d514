"""A real fleet under load as people see it: the page in a browser, `fleetctl top` and `fleetctl doctor`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from processes import FLEET, Fleet, Plan, router_ready, until
from servers import Etcd, Nats

pytestmark = pytest.mark.live

LIMIT_S = 120.0
"""Nothing here takes so long; beyond, the test fails."""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def fleet(tmp_path: Path, etcd: Etcd, nats: Nats) -> Iterator[Fleet]:
    flags = {"router": ["--cost.local-prefill-tokens", "0"]}
    made = Fleet(tmp_path, Plan(prefill=1, decode=1, flags=flags), etcd, nats)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def fleetctl(fleet: Fleet, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "fleetctl", *arguments, "--etcd", fleet.etcd.address, "--fleet", FLEET]
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "PDFLEET_CONTROL_NATS": fleet.nats.url}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def watched_until_interrupted(fleet: Fleet) -> int:
    """The exit code of `fleetctl top` in a terminal, after Ctrl-C."""
    ours, its = os.openpty()
    command = [sys.executable, "-m", "fleetctl", "top", "--etcd", fleet.etcd.address, "--fleet", FLEET]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment)
    os.close(its)
    seen, asked = b"", False
    while True:
        try:
            seen += os.read(ours, 65536)
        except OSError:  # it has left
            os.close(ours)
            return process.wait(LIMIT_S)
        if not asked and b"decode-0" in seen:
            process.send_signal(signal.SIGINT)
            asked = True


async def load(urls: list[str], over: asyncio.Event) -> None:
    """A few requests at a time to each router, until it is over."""

    async def ask(client: httpx.AsyncClient, url: str) -> None:
        while not over.is_set():
            body = {"model": "latency", "prompt": "on the way " * 30, "max_tokens": 20, "ignore_eos": True}
            assert (await client.post(f"{url}/v1/completions", json=body)).status_code == 200

    async with httpx.AsyncClient(timeout=LIMIT_S) as client, asyncio.TaskGroup() as tasks:
        for url in urls:
            for _ in range(2):
                tasks.create_task(ask(client, url))


async def look(url: str, picture: Path) -> None:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = await opened.new_page(viewport={"width": 1280, "height": 1200})
            await page.goto(f"{url}/dashboard")
            await page.wait_for_selector("#link.good")
            await page.get_by_role("link", name="router-1").wait_for()
            # Polled from here: the page's policy forbids what playwright would have it evaluate by itself.
            while not await page.evaluate("rate('handoffs') > 0 && rate('pulled_bytes') > 0"):
                await asyncio.sleep(0.05)
            await page.locator(".request").first.click()
            await page.locator(".story").get_by_text("prefill-0: ").first.wait_for()
            assert await page.locator("#pools tbody tr").count() == 2
            await page.screenshot(path=str(picture))
        finally:
            await opened.close()


def test_a_fleet_under_load_is_seen_by_page_terminal_and_doctor(fleet: Fleet, tmp_path: Path) -> None:
    urls = [f"http://127.0.0.1:{port}" for port in fleet.http.values()]

    async def main() -> None:
        for router in fleet.http:
            await until(lambda r=router: router_ready(fleet.address(r)), LIMIT_S, fleet.logs)
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load(urls, over))

            async def ended(url: str) -> bool:
                async with httpx.AsyncClient(timeout=LIMIT_S) as client:
                    shown = (await client.get(f"{url}/fleet/live")).json()
                return any(one["attained"] for one in shown["classes"])

            for url in urls:
                await until(lambda u=url: ended(u), LIMIT_S, fleet.logs)
            if CHROMIUM is not None:
                await look(urls[0], tmp_path / "page.png")
            seen = await asyncio.to_thread(fleetctl, fleet, "top", "--once")
            over.set()
        print(seen)
        assert "prefill 1/1 ready   decode 1/1 ready   2 routers" in seen
        assert "standard" in seen
        assert len(seen.splitlines()) <= 24

    asyncio.run(main())
    told = json.loads(fleetctl(fleet, "top", "--json"))
    assert {one["router"]["id"] for one in told["routers"]} == set(fleet.http)
    assert watched_until_interrupted(fleet) == 0
    bundle = tmp_path / "report.tar.gz"
    fleetctl(fleet, "doctor", "--output", str(bundle))
    with tarfile.open(bundle) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {
        "routers/router-0/live.json",
        "routers/router-1/metrics.txt",
        "workers/decode-0/metrics.txt",
    } <= names
    fleet.processes["decode-0"].kill()
    found = json.loads(fleetctl(fleet, "doctor", "--no-bundle", "--json", code=1))
    wrong = {check["name"]: check for check in found["checks"] if check["fine"] is False}
    assert "decode" in wrong["workers"]["said"]
    assert found["bundle"] is None
