"""The official `openai` package against the ingress."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from fleet.errors import WorkerLost


def client(site: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{site.port}/v1", api_key="none", max_retries=0, timeout=30
    )


def test_answers_streams_and_models(serve: Any, says: Any, model: str) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]

    async def main() -> None:
        async with serve(says("Hello 😀 there, fox")) as site, client(site) as api:
            whole = await api.chat.completions.create(model=model, messages=messages)
            assert whole.choices[0].message.content == "Hello 😀 there, fox"
            stream = await api.chat.completions.create(
                model=model, messages=messages, stream=True, stream_options={"include_usage": True}
            )
            text, usage = "", None
            async for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                usage = chunk.usage or usage
            assert text == whole.choices[0].message.content
            assert usage == whole.usage
            older = await api.completions.create(model=model, prompt="hi", echo=True)
            assert older.choices[0].text == "hiHello 😀 there, fox"
            pieces = [
                chunk.choices[0].text
                async for chunk in await api.completions.create(model=model, prompt="hi", stream=True)
            ]
            assert "".join(pieces) == "Hello 😀 there, fox"
            listed = await api.models.list()
            assert [entry.id for entry in listed.data] == [model]
            assert (await api.models.retrieve(model)).id == model

    asyncio.run(main())


def test_errors_come_as_their_classes(serve: Any, says: Any, text: Any, model: str) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]

    async def main() -> None:
        async with serve(says("ok")) as site, client(site) as api:
            with pytest.raises(openai.NotFoundError) as missing:
                await api.chat.completions.create(model="gpt-9", messages=messages)
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as bad:
                await api.chat.completions.create(model=model, messages=messages, temperature=9)
            assert bad.value.param == "temperature"
        tokens = text._encode("Hello there", False)
        async with serve(lambda request: [*tokens, WorkerLost("gone")]) as site, client(site) as api:
            stream = await api.chat.completions.create(model=model, messages=messages, stream=True)
            seen: list[str] = []

            async def read() -> None:
                async for chunk in stream:
                    seen.append(chunk.choices[0].delta.content or "")

            with pytest.raises(openai.APIError, match="gone"):
                await read()
            assert "".join(seen) == "Hello there"

    asyncio.run(main())
