"""Two tenants over one fleet: the cache of one is never hit by the other, however equal their prompts are."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from whole_fleet import MODEL, Box

from fleet import virtual_time
from fleet.api_keys import ApiKey, digest
from router.openai.asgi import Ingress
from router.openai.settings import HttpSettings
from router.text.tokenizer import ModelText

KEYS = {"one": "acme", "two": "acme", "three": "zeta"}


def test_the_same_prompt_is_cached_within_a_tenant_only() -> None:
    async def main() -> None:
        async with Box(prefill=1, decode=1) as box:
            ingress = Ingress(
                box.router.flow,
                {MODEL: ModelText.of_bytes()},
                HttpSettings(),
                keys=[ApiKey(sha256=digest(key), tenant=tenant) for key, tenant in KEYS.items()],
            )

            async def cached(key: str, **more: Any) -> int:
                body = {"model": MODEL, "prompt": "The same long prompt. " * 20, "max_tokens": 4, **more}
                async with httpx.AsyncClient(
                    transport=httpx.ASGITransport(ingress),
                    base_url="http://box",  # type: ignore[arg-type]
                ) as client:
                    response = await client.post(
                        "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}
                    )
                assert response.status_code == 200, response.text
                await asyncio.sleep(1.0)  # in virtual time: events reach the router
                usage = response.json()["usage"]
                assert usage["prompt_tokens"] == 440
                return int(usage["prompt_tokens_details"]["cached_tokens"])

            assert await cached("one") == 0
            same = await cached("one")
            assert same >= 400
            assert await cached("two") == same
            # Another tenant finds nothing, whatever it claims to be; then its own.
            assert await cached("three", cache_salt="acme", salt="acme", user="acme", tenant="acme") == 0
            assert await cached("three") == same
            assert await cached("one") == same

    virtual_time.run(main())
