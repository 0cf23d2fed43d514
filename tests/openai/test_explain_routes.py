"""Why a request went where it went, over HTTP: by any of its ids, listed, and followed as it happens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from http_front import listening
from whole_fleet import MODEL, Box

from fleet.api_keys import ApiKey, digest
from fleet.ids import RequestId
from router.openai.asgi import Ingress
from router.openai.callers import ANYBODY
from router.openai.explain import Explained
from router.openai.settings import HttpSettings
from router.record import HandoffRecord, HandoffState, Records
from router.settings import CostSettings, FlowSettings, RouterSettings

ACME, ZETA, ADMIN = (f"sk-pdfleet-{name * 8}" for name in ("acme", "zeta", "boss"))
KEYS = [
    ApiKey(sha256=digest(ACME), tenant="acme", slo_class="batch"),
    ApiKey(sha256=digest(ZETA), tenant="zeta"),
    ApiKey(sha256=digest(ADMIN), tenant="ops", admin=True),
]
REMOTE = RouterSettings(cost=CostSettings(local_prefill_tokens=0, local_advantage=1e9))


@dataclass
class Site:
    client: httpx.AsyncClient
    ingress: Ingress
    box: Box

    async def ask(self, key: str = "", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": "the quick brown fox " * 20, "max_tokens": 6, **fields}
        return await self.client.post("/v1/completions", json=body, headers=self.bearer(key))

    async def get(self, path: str, key: str = "", **parameters: Any) -> httpx.Response:
        return await self.client.get(path, headers=self.bearer(key), params=parameters)

    async def explained(self, id: str, key: str = "") -> list[dict[str, Any]]:
        response = await self.get(f"/fleet/requests/{id}", key)
        assert response.status_code == 200, response.text
        assert response.json()["router"] == "router"
        found: list[dict[str, Any]] = response.json()["requests"]
        return found

    @staticmethod
    def bearer(key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"} if key else {}

    async def news(self, path: str, key: str = "", **parameters: Any) -> AsyncIterator[dict[str, Any]]:
        stream = self.client.stream("GET", path, headers=self.bearer(key), params=parameters)
        async with stream as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))


@asynccontextmanager
async def site(
    tokenizer_json: str, keys: list[ApiKey] | None = None, router: RouterSettings = REMOTE
) -> AsyncIterator[Site]:
    async with (
        Box(1, 2, router=router) as box,
        listening(box, tokenizer_json, keys or ()) as (ingress, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        yield Site(client, ingress, box)


def play(
    tokenizer_json: str, body: Callable[[Site], Coroutine[Any, Any, None]], keys: list[ApiKey] | None = None
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), site(tokenizer_json, keys) as made:
            await body(made)

    asyncio.run(main())


def test_any_id_that_a_client_is_shown_finds_the_whole_story(tokenizer_json: str) -> None:
    async def body(site: Site) -> None:
        answer = await site.ask()
        (record,) = await site.explained(answer.headers["x-request-id"])
        assert record["id"] == answer.headers["x-request-id"]
        assert [record] == await site.explained(answer.json()["id"]), "by the id in the answer"
        assert [record] == await site.explained(record["request"])
        assert (record["state"], record["class"], record["tenant"]) == ("done", "standard", "")
        assert record["outcome"]["attained"] is True
        assert record["admission"][0]["verdict"] == "admitted"
        assert {"accepted", "prefill_sent", "first_token", "pull_ended", "ended"} <= set(record["stages"])
        states = [step["state"] for step in record["transitions"]]
        assert states == ["reserved", "prefilling", "ready", "pulling", "done"]
        prefill, decode = (record["transitions"][n] for n in (1, 3))
        assert [c["worker"] for c in prefill["considered"]["best"]] == ["prefill-0"]
        assert prefill["considered"]["others"] == 2, "decode workers that could not win"
        assert {c["worker"] for c in decode["considered"]["best"]} == {"decode-0", "decode-1"}
        for step in (prefill, decode):
            assert step["why"]
            for candidate in step["considered"]["best"]:
                parts = ("queue_s", "compute_s", "transfer_s", "decode_s")
                assert abs(sum(candidate[part] for part in parts) - candidate["seconds"]) < 1e-5

    play(tokenizer_json, body)


@pytest.mark.parametrize("room", [1, 3])
def test_one_answer_of_several_that_fails_takes_the_others_with_it_and_no_client_is_blamed(
    tokenizer_json: str, room: int
) -> None:
    """Those that began before it, and those that begin after it."""

    async def main() -> None:
        narrow = RouterSettings(flow=FlowSettings(max_requests=room))
        async with asyncio.timeout(60), site(tokenizer_json, router=narrow) as made:
            answer = await made.ask(n=4)
            assert answer.status_code == 429, answer.text
            records = await made.explained(answer.headers["x-request-id"])
            assert [record["state"] for record in records] == ["failed"] * len(records)
            assert {record["outcome"]["why"] for record in records} == {"rejected"}
            counters = made.box.router.flow.counters
            assert (counters["cancelled"], counters["failed_Overloaded"]) == (0, len(records))
            assert len(records) == 4
            assert (await made.ask(n=room)).status_code == 200, "nothing of it is left"

    asyncio.run(main())


def test_every_answer_has_an_id_in_its_header(tokenizer_json: str) -> None:
    """Whole and streamed, on all routes, also an error; one that a client chose is kept."""

    async def body(site: Site) -> None:
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        told = {"model": MODEL, "input": "hi", "max_output_tokens": 3}
        asked: list[tuple[str, dict[str, Any], int, int]] = [
            ("/v1/completions", {"model": MODEL, "prompt": "hi", "max_tokens": 3, "n": 2}, 200, 2),
            ("/v1/chat/completions", chat, 200, 1),
            ("/v1/chat/completions", {**chat, "stream": True}, 200, 1),
            ("/v1/responses", told, 200, 1),
            ("/v1/responses", {**told, "stream": True}, 200, 1),
            ("/v1/chat/completions", {**chat, "model": "none"}, 404, 0),
            ("/v1/chat/completions", {**chat, "max_tokens": -1}, 400, 0),
            ("/tokenize", {"model": MODEL, "prompt": "hi"}, 200, 0),
            ("/nothing", {}, 404, 0),
        ]
        for number, (route, body, status, runs) in enumerate(asked):
            for given in ({}, {"x-request-id": f"mine-{number}"}):
                response = await site.client.post(route, json=body, headers=given)
                assert response.status_code == status, (route, response.text)
                id = response.headers["x-request-id"]
                assert id == given.get("x-request-id", id)
                if runs:
                    records = await site.explained(id)
                    assert len(records) == runs, route
                    assert {record["id"] for record in records} == {id}
        for route in ("/health", "/v1/models", "/metrics", "/fleet/requests"):
            assert (await site.get(route)).headers["x-request-id"]

    play(tokenizer_json, body)


def test_a_tenant_sees_its_own_and_an_admin_key_all(tokenizer_json: str) -> None:
    async def body(site: Site) -> None:
        ids = {key: (await site.ask(key)).headers["x-request-id"] for key in (ACME, ZETA)}
        for key, seen in ((ACME, [ACME]), (ZETA, [ZETA]), (ADMIN, [ZETA, ACME])):
            listed = (await site.get("/fleet/requests", key)).json()["requests"]
            assert [row["id"] for row in listed] == [ids[of] for of in seen]
            for of, id in ids.items():
                response = await site.get(f"/fleet/requests/{id}", key)
                assert response.status_code == (200 if of in seen else 404)
                events = await site.get(f"/fleet/requests/{id}/events", key)
                assert events.status_code == response.status_code
        (record,) = await site.explained(ids[ACME], ADMIN)
        assert (record["tenant"], record["class"]) == ("acme", "batch")
        nobody = await site.get(f"/fleet/requests/{ids[ACME]}")
        assert nobody.status_code == 401
        unknown = await site.get("/fleet/requests/none", ADMIN)
        assert "setting flow.records" in unknown.json()["error"]["message"]

    play(tokenizer_json, body, KEYS)


def test_slow_ones_are_listed_slowest_first_and_lists_are_bounded(tokenizer_json: str) -> None:
    async def body(site: Site) -> None:
        for tokens in (1, 60, 20):
            await site.ask(max_tokens=tokens)
        rows = (await site.get("/fleet/requests")).json()["requests"]
        assert len(rows) == 3
        assert all(row["workers"] and row["attained"] for row in rows)
        slow = (await site.get("/fleet/requests", slow=min(row["seconds"] for row in rows) + 1e-6)).json()
        seconds = [row["seconds"] for row in slow["requests"]]
        assert seconds == sorted((row["seconds"] for row in rows), reverse=True)[:2]
        assert len((await site.get("/fleet/requests", limit=1)).json()["requests"]) == 1
        assert (await site.get("/fleet/requests", model="another")).json()["requests"] == []
        assert (await site.get("/fleet/requests", **{"class": "batch"})).json()["requests"] == []
        for wrong in ({"limit": 0}, {"limit": "x"}, {"slow": -1}, {"slow": "nan"}):
            response = await site.get("/fleet/requests", **wrong)
            assert response.status_code == 400, wrong
            assert response.json()["error"]["param"] in wrong

    play(tokenizer_json, body)


def test_a_request_is_followed_from_its_beginning_to_its_end(tokenizer_json: str) -> None:
    async def body(site: Site) -> None:
        asking = asyncio.create_task(
            site.client.post(
                "/v1/completions",
                json={"model": MODEL, "prompt": "on and on", "max_tokens": 150},
                headers={"x-request-id": "long"},
            )
        )
        while (await site.get("/fleet/requests/long")).status_code == 404:
            await asyncio.sleep(0.005)
        assert not asking.done()
        while not (slow := (await site.get("/fleet/requests", slow=0.05)).json()["requests"]):
            await asyncio.sleep(0.005)
        assert [row["id"] for row in slow] == ["long"], "what runs is slow, too"
        live = [event async for event in site.news("/fleet/requests/long/events")]
        assert asking.done() or (await asking).status_code == 200
        after = [event async for event in site.news("/fleet/requests/long/events")]
        assert live == after, "who comes late is told the same"
        assert [event["event"] for event in live] == ["step"] * (len(live) - 1) + ["end"]
        assert live[0]["state"] == "reserved"
        assert live[-1]["outcome"]["end"] == "finished"
        assert {event["id"] for event in live} == {"long"}
        await asking

    play(tokenizer_json, body)


def test_all_new_requests_are_followed_those_of_a_class_alone_and_only_so_many_follow(
    tokenizer_json: str,
) -> None:
    async def body(site: Site) -> None:
        seen: dict[str, list[dict[str, Any]]] = {}
        most = HttpSettings().max_followers

        async def follow(name: str, key: str, **of: Any) -> None:
            seen[name] = [event async for event in site.news("/fleet/events", key, **of)]

        follows = [
            asyncio.create_task(follow("batch", ADMIN, **{"class": "batch"})),
            asyncio.create_task(follow("zeta", ZETA)),
            *(asyncio.create_task(follow(f"more {n}", ADMIN)) for n in range(most - 2)),
        ]
        while len(site.box.router.flow.records.followers) < most:
            await asyncio.sleep(0.005)
        refused = await site.get("/fleet/events", ADMIN)
        assert refused.status_code == 429
        assert "(setting http.max_followers)" in refused.json()["error"]["message"]
        acme = (await site.ask(ACME)).headers["x-request-id"]
        zeta = (await site.ask(ZETA)).headers["x-request-id"]
        site.ingress.draining = True  # A router that leaves sends its followers away.
        await asyncio.gather(*follows)
        assert {event["id"] for event in seen["batch"]} == {acme}
        assert {event["id"] for event in seen["zeta"]} == {zeta}
        assert {event["id"] for event in seen["more 0"]} == {acme, zeta}
        assert not site.box.router.flow.records.followers

    play(tokenizer_json, body, KEYS)


def test_many_who_want_to_follow_at_once_get_no_more_seats_and_leave_some_to_operators(
    tokenizer_json: str,
) -> None:
    async def body(site: Site) -> None:
        most = HttpSettings().max_followers

        async def status(key: str) -> int:
            async with site.client.stream("GET", "/fleet/events", headers=site.bearer(key)) as response:
                statuses.append(response.status_code)
                while response.status_code == 200 and not over.is_set():
                    await over.wait()
                return response.status_code

        over, statuses = asyncio.Event(), list[int]()
        asked = []
        for key, allowed in ((ACME, most // 2), (ADMIN, most // 2)):
            already = len(statuses)
            asked += [asyncio.create_task(status(key)) for _ in range(2 * most)]
            while len(statuses) < already + 2 * most:
                await asyncio.sleep(0.005)
            assert sorted(statuses[already:]) == [200] * allowed + [429] * (2 * most - allowed)
        over.set()
        await asyncio.gather(*asked)
        # All seats are free again once the router has noticed.
        while (await site.get("/fleet/events", ACME, seconds=0)).status_code != 200:
            await asyncio.sleep(0.005)

    play(tokenizer_json, body, KEYS)


def test_an_id_that_looks_like_an_answers_is_found_as_the_client_chose_it(tokenizer_json: str) -> None:
    async def body(site: Site) -> None:
        headers = {"x-request-id": "chatcmpl-mine"}
        body = {"model": MODEL, "prompt": "the fox", "max_tokens": 2}
        answer = await site.client.post("/v1/completions", json=body, headers=headers)
        assert answer.headers["x-request-id"] == "chatcmpl-mine"
        (record,) = await site.explained("chatcmpl-mine")
        assert [record] == await site.explained(answer.json()["id"])

    play(tokenizer_json, body)


def test_a_follower_who_reads_too_slowly_is_told_how_much_it_missed() -> None:
    async def main() -> None:
        records = Records(10)
        explained = Explained(records)
        news = explained.follow(lambda record: True, [], lambda: False, 1.0)
        assert await anext(news) == b": ping\n\n"
        for number in range(1500):
            record = HandoffRecord(RequestId(f"r{number}"), "m", 10, 0.0)
            records.open(record)
            record.move(HandoffState.RESERVED, 0.0, "taken on")
        told = [event async for event in news]
        assert json.loads(told[0].removeprefix(b"data: ")) == {"event": "missed", "count": 1500 - 1024}
        assert b'"r1499"' in told[1024]

    asyncio.run(main())


def test_ids_are_forgotten_with_their_records_and_one_that_is_used_again_keeps_the_newest() -> None:
    records = Records(3)
    explained = Explained(records)
    caller = ANYBODY.__class__(admin=True)
    for number in range(40):
        record = HandoffRecord(RequestId(f"r{number}"), "m", 10, 0.0)
        records.open(record)
        explained.began("same" if number % 2 else f"id{number}", (record.request,))
    assert [record.request for record in explained.find("same", caller)][-1] == "r39"
    assert len(explained.find("same", caller)) == 16
    assert explained.describe(explained.find("id38", caller)[0], 0.0)["id"] == "id38"
    assert explained.describe(explained.find("r0", caller)[0], 0.0)["id"] == "r0", "its own name is left"
