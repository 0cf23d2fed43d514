"""Nothing that a client sends makes a series: models, paths, headers, users; each request counts once."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


def series(page: str) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_what_clients_send_makes_no_series(serve: Any, says: Any) -> None:
    async def main() -> None:
        draw = random.Random(2)

        def word() -> str:
            return "".join(draw.choice("abcdefgh") for _ in range(12))

        async with serve(says("ok")) as site:

            async def ask() -> None:
                await site.chat(model=word(), user=word())
                await site.complete(model=word(), metadata={word(): word()})
                await site.complete(**{word(): 1})
                await site.complete(max_tokens=-draw.randrange(9))
                await site.client.post(f"/v1/{word()}", content=word().encode())
                headers = {word(): word(), "x-slo-class": word()}
                await site.client.request("PUT", "/v1/completions", headers=headers)
                body = json.dumps({"model": "tiny/model-1", "prompt": "x"}).encode()
                await site.client.post("/v1/completions", content=body, headers={"content-type": word()})
                await site.chat(stream=True, user=word())

            await ask()
            before = series((await site.client.get("/metrics")).text)
            for _ in range(20):
                await ask()
            page = (await site.client.get("/metrics")).text
            assert series(page) == before
            metrics = site.ingress.metrics
            # FastAPI's own routes are none of these; each of the others is there once, by how it ended.
            assert sum(metrics.received.values()) == sum(metrics.requests.values()) == 21 * 7
            assert "tiny/model-1" not in page, "the ingress alone tells nothing by model"

    asyncio.run(main())
