"""A real fleet's figures against what its clients measured: counts exact, percentiles within a bucket."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from processes import Fleet, Plan, Watcher, all_up, servers, until
from prometheus_client.parser import text_string_to_metric_families
from servers import free_ports

from fleet.goodput import percentile

pytestmark = pytest.mark.live

MODEL = "latency:base=30"
COUNT, TOKENS = 40, 16
LEAVERS = 8
AT_ONCE = 5


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("metrics")
    flags = {"router": ["--http.vllm-names", "--http.access-log"], "decode": ["--metrics.vllm-names"]}
    plan = Plan(MODEL, prefill=1, decode=1, routers=1, flags=flags)
    with servers(folder) as (etcd, nats):
        fleet = Fleet(folder, plan, etcd, nats)

        async def up() -> None:
            watcher = Watcher(fleet)
            try:
                await all_up(fleet, watcher)
            finally:
                await watcher.close()

        try:
            fleet.start()
            asyncio.run(up())
            yield fleet
        finally:
            fleet.stop()


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass
class Page:
    """What one process told at one moment."""

    samples: Samples
    kinds: dict[str, str]

    @classmethod
    async def of(cls, client: httpx.AsyncClient, url: str) -> Page:
        answer = await client.get(url)
        assert answer.status_code == 200, answer.text
        return cls.read(answer.text)

    @classmethod
    def read(cls, text: str) -> Page:
        samples: Samples = {}
        kinds: dict[str, str] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in samples, f"{key} twice"
                samples[key] = sample.value
                kinds[sample.name] = family.type
        return cls(samples, kinds)

    def total(self, name: str, **labels: str) -> float:
        wanted = labels.items()
        return sum(
            n for (told, key), n in self.samples.items() if told == name and wanted <= dict(key).items()
        )

    def buckets(self, name: str) -> tuple[list[float], list[float]]:
        """Bounds, and how many are not above each, of all series together."""
        found: dict[float, float] = {}
        for (told, key), number in self.samples.items():
            if told == f"{name}_bucket":
                bound = float(dict(key)["le"])
                found[bound] = found.get(bound, 0.0) + number
        bounds = sorted(found)
        return bounds, [found[bound] for bound in bounds]

    def follows(self, before: Page) -> None:
        """Nothing fell that may only grow; buckets count up; nothing is negative."""
        for key, number in self.samples.items():
            name = key[0]
            assert number >= 0, f"{key} is {number}"
            if self.kinds[name] in ("counter", "histogram") and not name.endswith("_created"):
                assert number >= before.samples.get(key, 0.0), f"{key} fell"
        for name in {name.removesuffix("_bucket") for name, _ in self.samples if name.endswith("_bucket")}:
            counts = self.buckets(name)[1]
            assert all(a <= b for a, b in pairwise(counts)), f"{name} is not cumulative"


@dataclass
class Seen:
    """What one client saw of its answer."""

    sent: float
    end: str = ""
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    closed: float = 0.0


async def ask(client: httpx.AsyncClient, model: str, number: int) -> Seen:
    loop = asyncio.get_running_loop()
    seen = Seen(loop.time())
    body: dict[str, Any] = {
        "model": model,
        "prompt": f"{number} things that everybody should know about the number {number} " * 6,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event
            if event.get("usage"):
                seen.tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                if choice["text"]:
                    seen.times.append(loop.time())
                seen.end = choice["finish_reason"] or seen.end
            if number < LEAVERS and len(seen.times) >= 3:
                seen.end = "cancelled"
                break
    seen.closed = loop.time()
    return seen


async def at_rest(client: httpx.AsyncClient) -> Page:
    """The router's page when nothing runs any more."""
    pages: list[Page] = []

    async def rests() -> bool:
        pages.append(await Page.of(client, "/metrics"))
        running = ("pdfleet_requests_in_flight", "pdfleet_http_requests_running")
        return all(pages[-1].total(name) == 0 for name in running)

    await until(rests, 30, lambda: "requests are left over")
    return pages[-1]


async def apart(client: httpx.AsyncClient, model: str) -> list[str]:
    """Asks a few times, and tells which percentiles of the router lie further than a bucket from those that
    its clients measured. Theirs hold all of the router's, so they are never in a bucket below."""
    before = await at_rest(client)
    room = asyncio.Semaphore(2)

    async def one(number: int) -> Seen:
        async with room:
            return await ask(client, model, LEAVERS + number)

    seen = await asyncio.gather(*(one(number) for number in range(12)))
    after = await at_rest(client)
    found = []
    for name, seconds in (
        ("pdfleet_time_to_first_token_seconds", [one.times[0] - one.sent for one in seen]),
        ("pdfleet_request_seconds", [one.closed - one.sent for one in seen]),
    ):
        bounds, counts = after.buckets(name)
        fresh = [now - then for now, then in zip(counts, before.buckets(name)[1], strict=True)]
        assert fresh[-1] == len(seen)
        for percent in (50, 90):
            told = bisect_left(fresh, fresh[-1] * percent / 100)
            measured = percentile(sorted(seconds), percent)
            place = bisect_left(bounds, measured)
            assert place >= told, f"{name} p{percent}: {measured} s, but the router says {bounds[told]} s"
            if place > told + 1:
                found.append(f"{name} p{percent}: {measured} s, of which the router knows {bounds[told]} s")
    return found


def test_the_figures_are_what_clients_measured(fleet: Fleet) -> None:
    host, port = fleet.address("router-0")

    async def main() -> None:
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            listed = (await client.get("/fleet/targets")).json()
            assert sorted(one["labels"]["worker"] for one in listed) == ["decode-0", "prefill-0"]
            urls = ["/metrics", *(f"http://{one['targets'][0]}/metrics" for one in listed)]
            first = {url: await Page.of(client, url) for url in urls}
            looks: list[tuple[str, str]] = []
            """Read later: what that takes, clients here would measure."""

            async def look(until_done: asyncio.Event) -> None:
                while not until_done.is_set():
                    for url in urls:
                        looks.append((url, (await client.get(url)).text))
                    await asyncio.sleep(0.1)

            done, room = asyncio.Event(), asyncio.Semaphore(AT_ONCE)

            async def one(number: int) -> Seen:
                async with room:
                    return await ask(client, model, number)

            looking = asyncio.create_task(look(done))
            seen = await asyncio.gather(*(one(number) for number in range(COUNT)))
            missing = await client.post("/v1/completions", json={"model": "nobody's", "prompt": "x"})
            assert missing.status_code == 404
            page = await at_rest(client)
            done.set()
            await looking
            assert len(looks) >= 5 * len(urls)
            pages = dict(first)
            for url, text in looks:
                seen_there = Page.read(text)
                seen_there.follows(pages[url])
                pages[url] = seen_there
            finished = [one for one in seen if one.end == "length"]
            assert (len(finished), sum(one.end == "cancelled" for one in seen)) == (COUNT - LEAVERS, LEAVERS)
            # Each request once, by how it ended, on both sides.
            assert page.total("pdfleet_requests_received_total") == COUNT
            assert page.total("pdfleet_requests_ended_total", end="length") == COUNT - LEAVERS
            assert page.total("pdfleet_requests_ended_total", end="cancelled") == LEAVERS
            assert page.total("pdfleet_requests_ended_total") == COUNT
            assert page.total("pdfleet_requests_judged_total") == COUNT
            http = "pdfleet_http_requests"
            assert page.total(f"{http}_total", outcome="cancelled") == LEAVERS
            assert page.total(f"{http}_total", outcome="ModelNotFound") == 1
            assert page.total(f"{http}_received_total") == page.total(f"{http}_total") == COUNT + 1
            assert {dict(key).get("model") for _, key in page.samples} <= {None, model}
            # The access log says the same, a line each.
            said = fleet.processes["router-0"].log.read_text().splitlines()
            lines = [json.loads(line) for line in said if line.startswith('{"time"')]
            ends = Counter(line["outcome"] for line in lines)
            assert ends == {"length": COUNT - LEAVERS, "cancelled": LEAVERS, "ModelNotFound": 1}
            # Tokens: whole answers exactly; of those that were left at least what their clients read.
            drawn, exact = page.total("pdfleet_generation_tokens_total"), sum(one.tokens for one in finished)
            assert exact == len(finished) * TOKENS
            assert exact + 3 * LEAVERS <= drawn < exact + TOKENS * LEAVERS
            assert page.total("pdfleet_inter_token_seconds_count") == drawn - COUNT
            assert page.total("pdfleet_time_to_first_token_seconds_count") == COUNT
            assert page.total("pdfleet_request_seconds_count") == len(finished)
            # Durations, as their clients measured them. What those wait for before the router knows of them
            # is not its own; on a machine that others use that may be long, so not every time counts.
            tries = []
            while tries[-1:] != [[]] and len(tries) < 5:
                tries.append(await apart(client, model))
            assert tries[-1] == [], tries
            # Workers: every job had its last word, steps and hits add up over the fleet.
            for url in urls[1:]:
                told_there = await Page.of(client, url)
                told_there.follows(pages[url])
                received = told_there.total("pdfleet_worker_jobs_received_total")
                assert received == told_there.total("pdfleet_worker_jobs_ended_total") > 0
                assert told_there.total("pdfleet_worker_blocks", state="in_use") == 0
                steps = told_there.total("pdfleet_worker_steps_total")
                assert told_there.total("pdfleet_worker_step_seconds_count") == steps > 0
            # vLLM's names, where they were asked for.
            assert page.total("vllm:generation_tokens_total", model_name=model) == drawn
            assert page.total("vllm:request_success_total", finished_reason="abort") == LEAVERS
            decode = next(one["targets"][0] for one in listed if one["labels"]["role"] == "decode")
            told_there = await Page.of(client, f"http://{decode}/metrics")
            assert told_there.total("vllm:kv_cache_usage_perc", model_name=model) < 1
            assert told_there.samples[("vllm:num_requests_running", (("model_name", model),))] == 0

    asyncio.run(main())


MONITORING = Path(__file__).parents[2] / "deploy/monitoring"
SELDOM = ("pdfleet_objectives_missed_total", "pdfleet_requests_failed_total")
"""What a fleet that does all it is asked for, in time, has no series of."""


@contextmanager
def prometheus(folder: Path, host: str, port: int) -> Iterator[str]:
    """Started with the settings of the tree, quicker, for this fleet; yields its URL."""
    settings = yaml.safe_load((MONITORING / "prometheus/prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": "250ms", "evaluation_interval": "500ms"}
    routers, workers = settings["scrape_configs"]
    routers["static_configs"] = [{"targets": [f"{host}:{port}"]}]
    (listed,) = workers["http_sd_configs"]
    assert listed["url"].endswith("/fleet/targets")
    listed |= {"url": f"http://{host}:{port}/fleet/targets", "refresh_interval": "1s"}
    rules = yaml.safe_load((MONITORING / "prometheus/rules.yml").read_text())
    for group in rules["groups"]:
        group["interval"] = "500ms"
    (folder / "rules.yml").write_text(yaml.safe_dump(rules))
    settings["rule_files"] = ["rules.yml"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    (own,) = free_ports(1)
    command = [
        "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{own}", "--log.level=warn",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{own}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (make prometheus)"
)
def test_prometheus_answers_every_expression_of_dashboards_and_rules(fleet: Fleet, tmp_path: Path) -> None:
    host, port = fleet.address("router-0")

    async def main(url: str) -> None:
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]

            async def query(expression: str) -> list[dict[str, Any]]:
                answer = await client.get(f"{url}/api/v1/query", params={"query": expression})
                assert answer.status_code == 200, f"{expression}: {answer.text}"
                found: list[dict[str, Any]] = answer.json()["data"]["result"]
                return found

            async def scraped() -> bool:
                try:
                    ready = await client.get(f"{url}/-/ready")
                except httpx.TransportError:
                    return False
                return ready.status_code == 200 and len(await query('up{job=~"pdfleet.*"} == 1')) == 3

            log = tmp_path / "prometheus.log"
            await until(scraped, 60, lambda: f"not scraped:\n{log.read_text()}")
            roles = {one["metric"].get("role") for one in await query("pdfleet_worker_blocks")}
            assert roles == {"prefill", "decode"}
            before = await Page.of(client, "/metrics")

            async def counted() -> bool:
                """Prometheus has all, twice at least, and rules have read it."""
                await asyncio.gather(*(ask(client, model, LEAVERS + number) for number in range(AT_ONCE)))
                seen = await query("sum(rate(pdfleet_requests_received_total[1m])) > 0")
                return bool(seen) and bool(await query("pdfleet:goodput:rate5m > 0"))

            await until(counted, 60, lambda: f"no rates:\n{log.read_text()}")
            after = (await Page.of(client, "/metrics")).total("pdfleet_requests_received_total")
            assert after > before.total("pdfleet_requests_received_total")

            async def current() -> bool:
                (told,) = await query("sum(pdfleet_requests_received_total)")
                return float(told["value"][1]) == after

            await until(current, 30, lambda: "Prometheus does not count as the router does")
            asked = 0
            for path in sorted((MONITORING / "dashboards").glob("*.json")):
                for panel in json.loads(path.read_text())["panels"]:
                    for target in panel.get("targets", ()):
                        shown = re.sub(r"\$(slo_class|worker)", ".*", target["expr"])
                        shown = shown.replace("$__rate_interval", "1m")
                        found = await query(shown)
                        seldom = any(name in shown for name in SELDOM)
                        assert found or seldom, f"{path.stem}: {panel['title']}: {shown}"
                        asked += 1
            assert asked > 60
            groups = (await client.get(f"{url}/api/v1/rules")).json()["data"]["groups"]
            healths = {
                rule["name"]: (rule["health"], rule.get("lastError")) for g in groups for rule in g["rules"]
            }
            assert {health for health, _ in healths.values()} == {"ok"}, healths
            alerts = (await client.get(f"{url}/api/v1/alerts")).json()["data"]["alerts"]
            assert [alert for alert in alerts if alert["state"] == "firing"] == [], (
                "an alert of a fleet in which nothing is wrong"
            )

    with prometheus(tmp_path, host, port) as url:
        asyncio.run(main(url))
