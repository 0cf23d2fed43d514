"""The dashboard's routes, and the page in a real browser: headless Chromium, where one is installed."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from crowd import Crowd

from fleet.api_keys import ApiKey, digest
from fleet.member import Role
from router.openai.dashboard.routes import MAX_VIEWERS
from router.openai.server import HttpServer

ACME, ADMIN = (f"sk-pdfleet-{name * 8}" for name in ("acme", "boss"))
KEYS = [
    ApiKey(sha256=digest(ACME), tenant="acme"),
    ApiKey(sha256=digest(ADMIN), tenant="ops", admin=True),
]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: make chromium")
LIMIT_S = 60.0
"""Nothing here takes so long; beyond, the test fails."""


@dataclass
class Site:
    crowd: Crowd
    server: HttpServer
    client: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"


@asynccontextmanager
async def site(crowd: Crowd, keys: list[ApiKey]) -> AsyncIterator[Site]:
    server = await crowd.serve(keys)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=LIMIT_S) as client:
            yield Site(crowd, server, client)
    finally:
        await server.stop(5)


def play(
    body: Callable[[Site], Coroutine[Any, Any, None]],
    crowd: Crowd | None = None,
    keys: list[ApiKey] | None = None,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), site(crowd or Crowd(6), keys or []) as made:
            await body(made)

    asyncio.run(main())


async def news(lines: AsyncIterator[str]) -> tuple[str, Any]:
    """The next event and its data."""
    name = ""
    async for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        if line.startswith("data: "):
            return name, json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream has ended")


def test_news_are_a_snapshot_and_then_what_changes() -> None:
    async def body(site: Site) -> None:
        site.crowd.report()
        async with site.client.stream("GET", "/fleet/live/events") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = stream.aiter_lines()
            kind, whole = await news(lines)
            assert (kind, len(whole["workers"])) == ("whole", 6)
            assert whole["worker_fields"][0] == "id"
            now = (await site.client.get("/fleet/live")).json()
            assert now["workers"] == whole["workers"]
            site.crowd.finish("batch", asyncio.get_running_loop().time())
            site.crowd.report(1 / 6)
            changed: dict[str, Any] = {}
            while "classes" not in changed:
                kind, changed = await news(lines)
                assert kind == "change"
            assert len(changed["workers"]) == 1
            assert "router" not in changed

    play(body)


def test_lookers_on_are_bounded_and_leave_when_the_router_does() -> None:
    async def body(site: Site) -> None:
        streams = [site.client.stream("GET", "/fleet/live/events") for _ in range(MAX_VIEWERS)]
        try:
            lines = [(await stream.__aenter__()).aiter_lines() for stream in streams]
            await asyncio.gather(*map(news, lines))
            refused = await site.client.get("/fleet/live/events")
            assert refused.status_code == 429
            await streams.pop().__aexit__(None, None, None)
            while (response := await first_status(site)) != 200:
                assert response == 429
            await site.server.stop(5)
            for rest in lines[:-1]:
                async for _ in rest:
                    pass
        finally:
            for stream in streams:
                await stream.__aexit__(None, None, None)

    play(body)


def test_lookers_on_who_come_at_once_are_bounded_too() -> None:
    async def body(site: Site) -> None:
        over, statuses = asyncio.Event(), list[int]()

        async def look() -> None:
            async with site.client.stream("GET", "/fleet/live/events") as stream:
                statuses.append(stream.status_code)
                await over.wait()

        looking = [asyncio.create_task(look()) for _ in range(2 * MAX_VIEWERS)]
        while len(statuses) < len(looking):
            await asyncio.sleep(0.005)
        over.set()
        await asyncio.gather(*looking)
        assert sorted(statuses) == [200] * MAX_VIEWERS + [429] * MAX_VIEWERS

    play(body)


async def first_status(site: Site) -> int:
    async with site.client.stream("GET", "/fleet/live/events") as stream:
        return stream.status_code


def test_with_keys_only_an_admin_sees_the_fleet() -> None:
    async def body(site: Site) -> None:
        for path in ("/fleet/live", "/fleet/live/events"):
            for headers in ({}, {"authorization": f"Bearer {ACME}"}):
                assert (await site.client.get(path, headers=headers)).status_code == 401
        seen = await site.client.get("/fleet/live", headers={"authorization": f"Bearer {ADMIN}"})
        assert seen.status_code == 200
        assert (await site.client.get("/dashboard")).status_code == 200, "the page itself holds nothing"

    play(body, keys=KEYS)


def test_the_page_may_run_its_own_script_and_nothing_else() -> None:
    async def body(site: Site) -> None:
        response = await site.client.get("/dashboard")
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        assert "connect-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert not re.findall(r"innerHTML|insertAdjacent|document\.write|eval\(|localStorage", response.text)
        assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", response.text), "all is in one file"

    play(body)


# -- in a browser


@asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield opened
        finally:
            await opened.close()


@asynccontextmanager
async def page(site: Site, width: int = 1280) -> AsyncIterator[Any]:
    """The dashboard, opened; at the end it must not have complained."""
    complaints: list[str] = []
    async with browser() as opened:
        made = await opened.new_page(viewport={"width": width, "height": 800})
        made.on("pageerror", lambda error: complaints.append(str(error)))
        made.on("console", lambda said: complaints.append(said.text) if "Policy" in said.text else None)
        await made.goto(f"{site.url}/dashboard")
        yield made
    assert complaints == []


async def eventually(shown: Any, expression: str) -> None:
    """Polled from here: the page's policy forbids what playwright would have it evaluate by itself."""
    while not await shown.evaluate(expression):
        await asyncio.sleep(0.05)


@in_browser
def test_the_page_shows_classes_workers_and_the_story_of_a_request() -> None:
    hostile = "<img src=x onerror=alert(1)>"

    async def body(site: Site) -> None:
        site.crowd.report()
        site.crowd.finish("interactive", asyncio.get_running_loop().time(), ttft_s=3.0, id=hostile)
        async with page(site) as shown:
            await shown.wait_for_selector("#link.good")
            card = shown.locator('[data-class="interactive"]')
            assert "1 of 1 missed: ttft 1×" in await card.inner_text()
            assert await shown.locator("tbody tr").count() == 6
            row = shown.locator(".request")
            assert hostile in await row.inner_text(), "shown as it is, and not taken for a picture"
            assert await shown.locator("img").count() == 0
            await row.click()
            story = shown.locator(".story")
            await story.get_by_text("ttft 3000 ms > 2000 ms").wait_for()
            assert f"{site.crowd.cards[1].id}: why it was pulling" in await story.inner_text()
            await eventually(shown, "past.length >= 3")
            assert await story.count() == 1, "it stays while the rest goes on"

    play(body)


@in_browser
@pytest.mark.parametrize("workers", [0, 1000])
def test_it_fits_a_phone_whether_there_is_nobody_or_a_thousand(workers: int) -> None:
    async def body(site: Site) -> None:
        site.crowd.report()
        async with page(site, width=390) as shown:
            await shown.wait_for_selector("#link.good")
            assert await shown.evaluate("document.documentElement.scrollWidth") == 390
            elements = await shown.evaluate("document.querySelectorAll('*').length")
            assert elements < 600, "a thousand workers are a picture, not a thousand elements"
            if workers:
                await shown.locator("canvas").last.hover(position={"x": 5, "y": 5})
                assert (
                    f"{names[Role.DECODE]}-1 on here: ready" in await shown.locator(".pick").last.inner_text()
                )
            else:
                assert "No worker is there" in await shown.locator("#alarm").inner_text()

    names = {Role.DECODE: "a-decode-worker-whose-name-is-long-and-has-no-space"}
    play(body, Crowd(workers, names=names))


@in_browser
def test_it_can_be_used_by_keys_and_by_ear() -> None:
    """Each of many workers is reached by arrow keys, and what is announced is not announced again."""

    async def body(site: Site) -> None:
        site.crowd.report()
        async with page(site) as shown:
            await shown.wait_for_selector("#link.good")
            await shown.evaluate(
                "for (const id of ['link', 'alarm']) new MutationObserver(() => { window.again = id })"
                ".observe(document.getElementById(id), { childList: true, subtree: true })"
            )
            canvas, told = shown.locator("canvas").first, shown.locator(".pick").first
            await canvas.focus()
            await canvas.press("ArrowRight")
            first = await told.inner_text()
            await canvas.press("ArrowDown")
            assert " on here: ready" in first
            assert await told.inner_text() != first
            await canvas.press("ArrowUp")
            assert await told.inner_text() == first
            await eventually(shown, "past.length >= 3")
            assert await shown.evaluate("window.again === undefined")

    play(body, Crowd(200))


@in_browser
def test_rows_of_workers_fit_a_narrow_phone() -> None:
    async def body(site: Site) -> None:
        site.crowd.report()
        async with page(site, width=360) as shown:
            await shown.wait_for_selector("#link.good")
            assert await shown.locator("#pools td.name").count() == 6
            assert await shown.evaluate("document.documentElement.scrollWidth") == 360

    names = {Role.PREFILL: "a-prefill-worker-whose-name-is-long-and-has-no-space"}
    play(body, Crowd(6, names=names))


@in_browser
def test_a_key_is_asked_for_and_a_router_that_is_gone_is_said_to_be() -> None:
    async def main() -> None:
        crowd = Crowd(6)
        async with asyncio.timeout(LIMIT_S), site(crowd, KEYS) as made, page(made) as shown:
            for key, why in ((ACME, "not an admin's"), ("wrong", "not known")):
                await shown.locator("#key-text").fill(key)
                await shown.locator("#key button").click()
                await shown.locator("#key-why", has_text=why).wait_for()
            await shown.locator("#key-text").fill(ADMIN)
            await shown.locator("#key button").click()
            await shown.wait_for_selector("#link.good")
            assert await shown.evaluate("[localStorage.length, document.cookie]") == [0, ""]
            port = made.server.port
            await made.server.stop(5)
            await shown.wait_for_selector("#link.bad")
            assert "trying again" in await shown.locator("#link").inner_text()
            again = await crowd.serve(KEYS, port)
            try:
                await shown.wait_for_selector("#link.good")
            finally:
                await again.stop(5)

    asyncio.run(main())
