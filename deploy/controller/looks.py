"""What pods say of themselves on their pages of metrics: load, and how many requests met their objectives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client.parser import text_string_to_metric_families

from deploy.controller.words import Judged
from fleet.errors import Unavailable

log = logging.getLogger(__name__)

LIMIT_S = 2.0
"""Longest a page may take: who does not answer by then has not said anything."""
_AT_ONCE = 32


class Looks(Protocol):
    async def loads(self, pages: Mapping[str, str]) -> dict[str, float]:
        """Pod → `HOST:PORT` in; pod → requests running and waiting out, of those that answered."""
        ...

    async def judged(self, pages: Sequence[str]) -> dict[str, Judged] | None:
        """Of routers, added up, by revision; None where one did not answer: a sum without it says something
        else."""
        ...


def load(page: str) -> float | None:
    found = [
        sample.value
        for family in text_string_to_metric_families(page)
        if family.name == "pdfleet_worker_sequences"
        for sample in family.samples
    ]
    return sum(found) if found else None


def judged(page: str) -> dict[str, Judged]:
    by: dict[str, Judged] = {}
    for family in text_string_to_metric_families(page):
        if family.name == "pdfleet_revision_requests_judged":
            for sample in family.samples:
                verdict = sample.labels.get("verdict", "")
                if sample.name.endswith("_total") and verdict in _COUNTS:
                    count = int(sample.value)
                    one = Judged(count if verdict == "attained" else 0, count)
                    by = together((by, {sample.labels.get("revision", ""): one}))
    return by


_COUNTS = ("attained", "missed")
"""Verdicts of requests that count: those that a client gave up say nothing of the fleet."""


class PageLooks:
    """Over HTTP."""

    async def loads(self, pages: Mapping[str, str]) -> dict[str, float]:
        from aiohttp import ClientSession

        found: dict[str, float] = {}
        gate = asyncio.Semaphore(_AT_ONCE)
        async with ClientSession() as session:

            async def look(pod: str, address: str) -> None:
                try:
                    async with gate:
                        value = load(await _read(session, f"http://{address}/metrics"))
                except Unavailable as error:
                    log.info("%s does not tell its load: %s", pod, error.message)
                    return
                if value is not None:
                    found[pod] = value

            await asyncio.gather(*(look(pod, address) for pod, address in pages.items()))
        return found

    async def judged(self, pages: Sequence[str]) -> dict[str, Judged] | None:
        from aiohttp import ClientSession

        if not pages:
            return None
        async with ClientSession() as session:
            try:
                texts = await asyncio.gather(*(_read(session, url) for url in pages))
            except Unavailable as error:
                log.info("attainment is not known: %s", error.message)
                return None
        return together(judged(text) for text in texts)


def together(parts: Iterable[Mapping[str, Judged]]) -> dict[str, Judged]:
    found: dict[str, Judged] = {}
    for part in parts:
        for name, one in part.items():
            found[name] = found.get(name, Judged(0, 0)) + one
    return found


async def _read(session: object, url: str) -> str:
    from aiohttp import ClientError, ClientSession, ClientTimeout

    assert isinstance(session, ClientSession)
    try:
        # A router's certificate names the host that clients know, not its pod.
        async with session.get(url, timeout=ClientTimeout(total=LIMIT_S), ssl=False) as response:
            if response.status != 200:
                raise Unavailable(f"{url} answers {response.status}")
            return await response.text()
    except (ClientError, TimeoutError, OSError) as error:
        raise Unavailable(f"{url}: {error!r}") from None
