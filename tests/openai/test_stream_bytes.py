"""Streams, byte by byte."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from fleet.errors import Overloaded, Unavailable, WorkerLost

CHUNK = (
    'data: {"id":"chatcmpl-ID","created":0,"model":"tiny/model-1","object":"chat.completion.chunk","choices":'
)
GOLDEN_CHAT = (
    "".join(
        f'{CHUNK}[{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}}}]}}\n\n'
        for delta, finish in (
            ('{"role":"assistant","content":""}', "null"),
            ('{"content":"Hello"}', "null"),
            ('{"content":"\\""}', "null"),
            ('{"content":"\\n"}', "null"),
            ('{"content":"é"}', "null"),
            ("{}", '"stop"'),
        )
    )
    + "data: [DONE]\n\n"
)
GOLDEN_COMPLETION = (
    'data: {"id":"cmpl-ID","object":"text_completion","created":0,"model":"tiny/model-1","choices":'
    '[{"index":0,"text":"Hello","logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    'data: {"id":"cmpl-ID","object":"text_completion","created":0,"model":"tiny/model-1","choices":'
    '[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}],"usage":null}\n\n'
    'data: {"id":"cmpl-ID","object":"text_completion","created":0,"model":"tiny/model-1","choices":[],'
    '"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3,'
    '"prompt_tokens_details":{"cached_tokens":1}}}\n\n'
    "data: [DONE]\n\n"
)


def neutral(body: str) -> str:
    return re.sub(r'"created":\d+', '"created":0', re.sub(r"cmpl-[0-9a-f]{24}", "cmpl-ID", body))


def test_golden_chat_stream(serve: Any, text: Any) -> None:
    tokens = [text.vocabulary.pieces.index(piece) for piece in (b"Hello", b'"', b"\n", b"\xc3", b"\xa9")]

    async def main() -> None:
        async with serve(lambda request: [*tokens, 1]) as site:
            response = await site.chat(stream=True)
            assert response.status_code == 200
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert neutral(response.text) == GOLDEN_CHAT

    asyncio.run(main())


def test_tokens_that_are_there_together_are_written_together(serve: Any, text: Any) -> None:
    """Each in its own frame, all in one chunk; and none waits for one that is not there yet."""
    tokens = [text.vocabulary.pieces.index(piece) for piece in (b"a", b"b", b"c", b"d")]

    async def main() -> None:
        more = asyncio.Event()
        async with serve(lambda request: [*tokens[:3], more, tokens[3], 1]) as site:
            body = b'{"model":"tiny/model-1","messages":[{"role":"user","content":"hi"}],"stream":true}'
            reader, _ = await site.raw(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % len(body) + body
            )
            await reader.readuntil(b"\r\n\r\n")
            chunks = [await chunk(reader)]
            more.set()
            while chunks[-1]:
                chunks.append(await chunk(reader))
            frames = [chunk.count(b"data: ") for chunk in chunks]
            assert frames == [4, 3, 0]

    asyncio.run(main())


async def chunk(reader: asyncio.StreamReader) -> bytes:
    size = int(await reader.readline(), 16)
    return (await reader.readexactly(size + 2))[:-2]


def test_golden_completion_stream_with_usage(serve: Any, text: Any) -> None:
    (hello,) = text._encode("Hello", False)

    async def main() -> None:
        async with serve(lambda request: [hello] * 9) as site:
            response = await site.complete(stream=True, max_tokens=1, stream_options={"include_usage": True})
            assert neutral(response.text) == GOLDEN_COMPLETION

    asyncio.run(main())


@pytest.mark.parametrize("max_tokens", [1, 2, 10])
@pytest.mark.parametrize("route", ["chat", "complete"])
def test_streamed_equals_whole(serve: Any, says: Any, events: Any, route: str, max_tokens: int) -> None:
    async def main() -> None:
        async with serve(says("Hello 😀 the fox, ünï")) as site:
            ask = getattr(site, route)
            whole = (await ask(max_tokens=max_tokens)).json()["choices"][0]
            chunks = events((await ask(max_tokens=max_tokens, stream=True)).text)
            assert chunks.pop() == "[DONE]"
            choices = [chunk["choices"][0] for chunk in chunks]
            keys = {tuple(sorted(choice)) for choice in choices}
            assert len(keys) == 1
            if route == "chat":
                pieces = [choice["delta"].get("content", "") for choice in choices]
                assert "".join(pieces) == whole["message"]["content"]
                assert choices[0]["delta"] == {"role": "assistant", "content": ""}
                assert choices[-1]["delta"] == {}
            else:
                assert "".join(choice["text"] for choice in choices) == whole["text"]
                assert choices[-1]["text"] == ""
            finishes = [choice["finish_reason"] for choice in choices]
            assert finishes == [None] * (len(finishes) - 1) + [whole["finish_reason"]]

    asyncio.run(main())


@pytest.mark.parametrize("options", ["absent", None, {}, {"include_usage": False}, {"include_usage": True}])
def test_usage_only_when_asked_for(serve: Any, says: Any, events: Any, options: Any) -> None:
    async def main() -> None:
        async with serve(says("Hello there")) as site:
            extra = {} if options == "absent" else {"stream_options": options}
            chunks = events((await site.chat(stream=True, **extra)).text)[:-1]
            if options != {"include_usage": True}:
                assert not any("usage" in chunk for chunk in chunks)
                return
            *others, last = chunks
            assert all(chunk["usage"] is None for chunk in others)
            assert last["choices"] == []
            usage = last["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            refused = await site.chat(stream_options={"include_usage": True})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "stream_options"

    asyncio.run(main())


@pytest.mark.parametrize("route", ["chat", "complete"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_fault_at_any_token(serve: Any, text: Any, events: Any, route: str, stream: bool, at: int) -> None:
    tokens = text._encode("Hello there the quick brown fox", False)[:at]
    assert len(tokens) == at

    async def main() -> None:
        fault = WorkerLost("the worker is gone")
        async with serve(lambda request: [*tokens, fault]) as site:
            response = await getattr(site, route)(stream=stream)
            if not stream or at == 0:
                assert response.status_code == 503
                error = response.json()["error"]
            else:
                assert response.status_code == 200
                *chunks, last = events(response.text)
                assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
                assert set(last) == {"error"}
                error = last["error"]
                assert "[DONE]" not in response.text
            assert error == {
                "message": "the worker is gone",
                "type": "service_unavailable",
                "param": None,
                "code": None,
            }
            ((_, outcome),) = site.ingress.metrics.requests
            assert outcome == "WorkerLost"

    asyncio.run(main())


def test_a_defect_behind_the_ingress_is_a_500_that_tells_nothing(serve: Any, caplog: Any) -> None:
    async def main() -> None:
        async with serve(lambda request: [ZeroDivisionError("secret detail")]) as site:
            response = await site.chat()
            assert response.status_code == 500
            assert "secret" not in response.text
            assert response.json()["error"]["type"] == "server_error"

    asyncio.run(main())
    assert "secret detail" in caplog.text


def test_overload_says_when_to_come_back(serve: Any) -> None:
    async def main() -> None:
        async with serve(lambda request: [Overloaded("too much", retry_after_s=2.5)]) as site:
            response = await site.chat(stream=True)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "3"

    asyncio.run(main())


@pytest.mark.parametrize("error", [Unavailable("no worker is there"), WorkerLost("it is gone")])
def test_so_does_a_fleet_without_workers(serve: Any, error: Unavailable) -> None:
    """They are started again in a while: who is told nothing comes back too soon, and gives up."""

    async def main() -> None:
        async with serve(lambda request: [error]) as site:
            for stream in (False, True):
                response = await site.chat(stream=stream)
                assert (response.status_code, response.headers["retry-after"]) == (503, "10")

    asyncio.run(main())


def test_a_long_wait_gets_comments_and_then_still_an_honest_end(serve: Any, text: Any, events: Any) -> None:
    go = asyncio.Event()

    async def main() -> None:
        async with serve(lambda request: [go, Unavailable("nobody left")], ping_s=0.05) as site:
            async with site.client.stream("POST", "/v1/chat/completions", json={
                "model": "tiny/model-1", "messages": [{"role": "user", "content": "x"}], "stream": True,
            }) as response:  # fmt: skip
                assert response.status_code == 200
                body = ""
                async for part in response.aiter_text():
                    body += part
                    if body.count(": ping\n\n") == 2:
                        go.set()
            assert events(body)[-1]["error"]["message"] == "nobody left"

    asyncio.run(main())
