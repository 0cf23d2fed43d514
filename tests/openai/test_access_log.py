"""The access log: a line a request, with what became of it and why; nothing of what was said."""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
from typing import Any

import httpx
from http_front import listening
from whole_fleet import MODEL, Box

from router.openai.access_log import AccessLog
from router.openai.asgi import Ingress
from router.settings import CostSettings, RouterSettings

SPLIT = RouterSettings(cost=CostSettings(local_prefill_tokens=0, local_advantage=1e9))


class Page(io.BytesIO):
    """Stays readable when it is closed."""

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]


async def settled(ingress: Ingress) -> None:
    async with asyncio.timeout(20):
        while ingress.exchanges:
            await asyncio.sleep(0.001)


def test_each_request_has_its_line(tokenizer_json: str) -> None:
    page = Page()

    async def main() -> None:
        async with Box(1, 1, router=SPLIT) as box, listening(box, tokenizer_json) as (ingress, port):
            written = AccessLog(page)
            ingress.finished.append(written.tell)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                body = {"model": MODEL, "prompt": "secret words " * 9, "max_tokens": 5, "ignore_eos": True}
                name = {"x-request-id": "mine-1", "x-slo-class": "interactive"}
                await client.post("/v1/completions", json=body, headers=name)
                await client.post("/v1/completions", json={**body, "n": 2, "stream": True})
                await client.post("/v1/completions", json={**body, "model": "nobody's"})
                async with client.stream(
                    "POST", "/v1/completions", json={**body, "max_tokens": 900, "stream": True}
                ) as answer:
                    async for _ in answer.aiter_bytes():
                        break
            await settled(ingress)
            written.close()

    asyncio.run(main())
    assert b"secret" not in page.getvalue()
    whole, two, unknown, left = page.lines()
    assert (whole["id"], whole["class"], whole["status"], whole["outcome"]) == (
        "mine-1", "interactive", 200, "length",
    )  # fmt: skip
    assert (whole["model"], whole["completion_tokens"], whole["stream"]) == (MODEL, 5, False)
    assert whole["prompt_tokens"] > 9
    (answer,) = whole["answers"]
    assert answer["workers"] == ["prefill-0", "decode-0"]
    assert answer["attained"] is True
    assert 0 < answer["ttft_s"] <= whole["seconds"]
    assert {"accepted", "prefill_sent", "first_token", "pull_ended", "ended"} <= answer["stages"].keys()
    assert [reason.split()[0] for reason in answer["reasons"]][:1] == ["prefilling"]
    assert (len(two["answers"]), two["completion_tokens"], two["stream"]) == (2, 10, True)
    assert (unknown["status"], unknown["outcome"], "answers" in unknown) == (404, "ModelNotFound", False)
    assert (left["outcome"], left["answers"][0]["end"]) == ("cancelled", "cancelled")
    assert 0 < left["completion_tokens"] < 900


def test_a_reader_that_does_not_read_holds_up_nothing() -> None:
    """A full pipe blocks who writes to it: that is the log's thread, and no other."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as stream:
        written = AccessLog(stream)
        finished = _Anything()
        for _ in range(20_000):
            written.tell(finished)  # type: ignore[arg-type]
        assert written.lost > 1000
        (told,) = written.families()
        assert told.series == {(): written.lost}
        emptied = threading.Thread(target=_read_all, args=(reading,))
        emptied.start()
        written.close(20)
    emptied.join()


def _read_all(reading: int) -> None:
    with os.fdopen(reading, "rb") as stream:
        while stream.read(1 << 16):
            pass


class _Anything:
    """A request that was refused at once."""

    id, route, status, outcome, began, ended, job, records = (
        "r",
        "/v1/x",
        429,
        "Overloaded",
        0.0,
        0.1,
        None,
        None,
    )

    class terms:
        tenant, slo_class = "acme", "batch"
