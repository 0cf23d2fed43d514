"""The HTTP server leaves: accepts no more, finishes what runs, and within a limit."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest


def test_what_runs_is_finished(serve: Any, says: Any, text: Any) -> None:
    go = asyncio.Event()
    tokens = text._encode("Hello there", False)

    async def main() -> None:
        async with serve(lambda request: [tokens[0], go, *tokens[1:], 1]) as site:
            asked = asyncio.create_task(site.chat())
            async with asyncio.timeout(20):
                while not site.spine.runs:
                    await asyncio.sleep(0)
            leaving = asyncio.create_task(site.server.stop(30))
            async with asyncio.timeout(20):
                while True:
                    try:
                        async with httpx.AsyncClient() as other:
                            await other.get(f"http://127.0.0.1:{site.port}/health")
                    except httpx.TransportError:
                        break
            assert not leaving.done()
            go.set()
            response = await asked
            assert response.json()["choices"][0]["message"]["content"] == "Hello there"
            await leaving

    asyncio.run(main())


@pytest.mark.parametrize("hurry", [False, True])
def test_what_does_not_end_is_ended(serve: Any, text: Any, events: Any, hurry: bool) -> None:
    never = asyncio.Event()
    tokens = text._encode("Hello", False)

    async def main() -> None:
        async with serve(lambda request: [*tokens, never]) as site:
            asked = asyncio.create_task(site.chat(stream=True))
            async with asyncio.timeout(20):
                while not site.spine.runs:
                    await asyncio.sleep(0)
            hurrying = asyncio.Event()
            leaving = asyncio.create_task(site.server.stop(600 if hurry else 0.1, hurrying))
            if hurry:
                hurrying.set()
            response = await asked
            last = events(response.text)[-1]
            assert "stopped this request" in last["error"]["message"]
            await leaving

    asyncio.run(main())
