"""Clients that leave, or stop reading, at every stage: their runs end at once."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
import uvloop


def request_bytes(route: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": "hi"}]
    given = {"messages": messages} if route.endswith("chat/completions") else {"prompt": "hi"}
    body = json.dumps({"model": "tiny/model-1", **given, **fields}).encode()
    return (
        f"POST {route} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves(
    serve: Any, says: Any, text: Any, route: str, stream: bool, after: int, reset: bool
) -> None:
    never = asyncio.Event()
    tokens = text._encode("Hello there fox", False)[:after]

    async def main() -> None:
        async with serve(lambda request: [*tokens, never]) as site:
            reader, writer = await site.raw(request_bytes(route, stream=stream, n=2))
            if stream and after:
                async with asyncio.timeout(20):
                    seen = b""
                    while seen.count(b'"finish_reason":null') < 2:
                        seen += await reader.read(4096)
            else:
                async with asyncio.timeout(20):
                    while len(site.spine.runs) < 2:
                        await asyncio.sleep(0)
            if reset:
                linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
            else:
                writer.close()
            await site.spine.idle()
            assert all(run.reasons[0] == "client" for run in site.spine.runs)
            async with asyncio.timeout(20):
                while site.ingress.exchanges:
                    await asyncio.sleep(0)
            assert all(run.ended for run in site.spine.runs)
            assert site.ingress.metrics.requests == {(route, "cancelled"): 1}

    asyncio.run(main())


def test_clients_that_leave_in_the_middle_of_a_frame_disturb_nobody(serve: Any, text: Any) -> None:
    """On the loop that routers run on: it raises for what is written to a connection that is closed."""
    (word,) = text._encode(" the", False)
    complaints: list[dict[str, Any]] = []

    def endless(request: Any) -> Any:
        while True:
            yield word
            tick = asyncio.Event()
            asyncio.get_running_loop().call_soon(tick.set)
            yield tick

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with serve(endless, context=None) as site:
            site.ingress.models["tiny/model-1"].context = 10_000_000
            for _ in range(20):
                asked = [
                    await site.raw(request_bytes("/v1/completions", stream=True, ignore_eos=True))
                    for _ in range(4)
                ]
                async with asyncio.timeout(20):
                    await asyncio.gather(*(reader.readuntil(b"data: ") for reader, _ in asked))
                for _, writer in asked:
                    linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    writer.transport.abort()
                async with asyncio.timeout(20):
                    while site.ingress.exchanges:
                        await asyncio.sleep(0)

    uvloop.run(main())
    assert not complaints


def test_a_client_that_reads_no_more(serve: Any, text: Any) -> None:
    (word,) = text._encode(" the", False)

    def endless(request: Any) -> Any:
        while True:
            yield from [word] * 100
            tick = asyncio.Event()
            asyncio.get_running_loop().call_soon(tick.set)
            yield tick

    async def main() -> None:
        async with serve(endless, write_timeout_s=0.3, context=None) as site:
            site.ingress.models["tiny/model-1"].context = 10_000_000
            reader, writer = await site.raw(request_bytes("/v1/completions", stream=True, ignore_eos=True))
            writer.transport.pause_reading()
            async with asyncio.timeout(20):
                while not site.spine.runs:
                    await asyncio.sleep(0)
            await site.spine.idle()
            assert site.spine.runs[0].reasons[0] == "client"
            writer.transport.abort()
            del reader

    asyncio.run(main())


def test_leaving_many_times_at_random_points(serve: Any, text: Any) -> None:
    tokens = text._encode("Hello there the quick brown fox jumps over the lazy dog", False)

    def steps(request: Any) -> Any:
        for token in tokens:
            tick = asyncio.Event()
            asyncio.get_running_loop().call_soon(tick.set)
            yield tick
            yield token

    async def main() -> None:
        async with serve(steps) as site:

            async def leave(k: int) -> None:
                _, writer = await site.raw(request_bytes("/v1/completions", stream=k % 3 > 0))
                for _ in range(k % 23):
                    await asyncio.sleep(0)
                writer.transport.abort()

            for start in range(0, 200, 20):
                await asyncio.gather(*(leave(k) for k in range(start, start + 20)))
            async with asyncio.timeout(20):
                while site.ingress.exchanges:
                    await asyncio.sleep(0)
            assert (await site.complete()).status_code == 200

    asyncio.run(main())
