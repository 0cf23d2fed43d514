"""Routes beside the answers: models, health, readiness, version, metrics, the OpenAPI page."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


def test_ready_says_why_not(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok")) as site:
            assert (await site.client.get("/ready")).status_code == 200
            site.spine.not_ready = "no decode worker"
            response = await site.client.get("/ready")
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "no decode worker"
            site.spine.not_ready = None
            site.ingress.draining = True
            assert (await site.client.get("/ready")).status_code == 503
            assert (await site.client.get("/health")).json() == {"status": "ok"}
            assert (await site.client.get("/version")).json() == {"version": "1.2.3"}

    asyncio.run(main())


def test_models(serve: Any, says: Any, model: str) -> None:
    async def main() -> None:
        async with serve(says("ok"), context=100) as site:
            body = (await site.client.get("/v1/models")).json()
            assert body["object"] == "list"
            assert [(entry["id"], entry["max_model_len"]) for entry in body["data"]] == [(model, 100)]
            assert (await site.client.get(f"/v1/models/{model}")).json() == body["data"][0]
            missing = await site.client.get("/v1/models/none")
            assert missing.status_code == 404
            assert missing.json()["error"]["code"] == "model_not_found"

    asyncio.run(main())


def test_metrics(serve: Any, says: Any) -> None:
    def samples(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }

    go = asyncio.Event()

    async def main() -> None:
        async with serve(says("Hello there, fox")) as site:
            await site.chat(stream=True)
            await site.complete(max_tokens=2)
            await site.chat(n=0)
            response = await site.client.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            seen = samples(response.text)

            def ended(route: str, outcome: str) -> float:
                return seen["pdfleet_http_requests_total", (("outcome", outcome), ("route", route))]

            assert ended("/v1/chat/completions", "stop") == 1
            assert ended("/v1/completions", "length") == 1
            assert ended("/v1/chat/completions", "BadRequest") == 1
            assert seen["pdfleet_http_requests_running", ()] == 0
            for route, count in (("/v1/chat/completions", 2), ("/v1/completions", 1)):
                assert seen["pdfleet_http_requests_received_total", (("route", route),)] == count
                assert seen["pdfleet_http_request_seconds_count", (("route", route),)] == count
            assert "process_resident_memory_bytes" in response.text
        async with serve(lambda request: [go, 1]) as site:
            asked = asyncio.create_task(site.chat())
            async with asyncio.timeout(20):
                while not site.spine.runs:
                    await asyncio.sleep(0)
            assert samples((await site.client.get("/metrics")).text)["pdfleet_http_requests_running", ()] == 1
            go.set()
            await asked

    asyncio.run(main())


def test_the_openapi_page_knows_all_routes(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok")) as site:
            document = (await site.client.get("/openapi.json")).json()
            assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"} <= set(
                document["paths"]
            )
            schema = document["components"]["schemas"]["ChatBody"]
            assert {"messages", "temperature", "stop"} <= set(schema["properties"])
            assert (await site.client.get("/docs")).status_code == 200

    asyncio.run(main())
