"""Bytes a client may send: bodies, headers, methods, media types; sizes and times."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

ROUTES = ("/v1/chat/completions", "/v1/completions")
GOOD = {
    "/v1/chat/completions": {"model": "tiny/model-1", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "tiny/model-1", "prompt": "hi"},
}


def is_error(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return str(error["message"])


@pytest.mark.parametrize("route", ROUTES)
def test_bodies_that_are_none(serve: Any, says: Any, route: str) -> None:
    whole = json.dumps(GOOD[route]).encode()
    bodies = [
        b"",
        b"[]",
        b"null",
        b"5",
        b'"text"',
        b"{",
        whole[:-1],
        whole + b"}",
        whole[:-1] + b',"user":"\xff"}',
        whole[:-1] + b',"user":"\\ud800"}',
        b"\xff\xfe" + whole,
        b"[" * 100_000,
        whole[:-1] + b',"x":' + b"[" * 100_000,
        whole[:-1] + b',"tools":' + b'{"a":' * 100_000,
        whole[:-1] + b',"temperature":NaN}',
        whole[:-1] + b',"temperature":1e999}',
        whole[:-1] + b',"seed":' + b"9" * 5000 + b"}",
    ]

    async def main() -> None:
        async with serve(says("ok")) as site:
            for body in bodies:
                response = await site.client.post(
                    route, content=body, headers={"content-type": "application/json"}
                )
                is_error(response, 400)
            assert (await site.client.post(route, json=GOOD[route])).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize("route", ROUTES)
def test_media_types_and_methods(serve: Any, says: Any, route: str) -> None:
    body = json.dumps(GOOD[route]).encode()

    async def main() -> None:
        async with serve(says("ok")) as site:
            for kind in (None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""):
                headers = {} if kind is None else {"content-type": kind}
                assert "application/json" in is_error(
                    await site.client.post(route, content=body, headers=headers), 415
                )
            for kind in ("application/json; charset=utf-8", "Application/JSON"):
                response = await site.client.post(route, content=body, headers={"content-type": kind})
                assert response.status_code == 200
            gzip = {"content-type": "application/json", "content-encoding": "gzip"}
            is_error(await site.client.post(route, content=body, headers=gzip), 415)
            for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
                response = await site.client.request(method, route)
                is_error(response, 405)
                assert response.headers["allow"] == "POST"
            assert (await site.client.head(route)).status_code == 405
            for path in ("/", "/v1", "/v2/chat/completions", "//v1/completions", route + "/", "/invocations"):
                is_error(await site.client.post(path, json=GOOD[route]), 404)
            is_error(await site.client.post("/health"), 405)

    asyncio.run(main())


def test_a_body_over_the_limit(serve: Any, says: Any) -> None:
    async def chunks(total: int) -> Any:
        for _ in range(total // 10_000):
            yield b"x" * 10_000

    async def main() -> None:
        async with serve(says("ok"), max_body_bytes=50_000) as site:
            kind = {"content-type": "application/json"}
            declared = await site.client.post(ROUTES[0], content=b"x" * 50_001, headers=kind)
            assert "http.max_body_bytes" in is_error(declared, 413)
            chunked = await site.client.post(ROUTES[0], content=chunks(10_000_000), headers=kind)
            assert "http.max_body_bytes" in is_error(chunked, 413)
            # What comes beyond a length header that lies is no HTTP: the connection is cut off.
            head = f"POST {ROUTES[0]} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            reader, writer = await site.raw(f"{head}content-length: 2\r\n\r\n{{}}".encode() + b"y" * 60_000)
            assert b"HTTP/1.1 200" not in await reader.read()
            writer.close()
            reader, writer = await site.raw(f"{head}content-length: 999999999999\r\n\r\n".encode())
            assert b"413" in await reader.readline()
            writer.close()
            # Health answers all the while.
            assert (await site.client.get("/health")).status_code == 200
            assert not site.spine.runs

    asyncio.run(main())


def test_slow_bodies_and_headers(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok"), body_timeout_s=0.2, header_timeout_s=0.2) as site:
            head = f"POST {ROUTES[0]} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            reader, writer = await site.raw(f"{head}content-length: 100\r\n\r\n{{".encode())
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 408")
            assert b"http.body_timeout_s" in answer
            writer.close()
            for part in (b"", head.encode()):
                reader, writer = await site.raw(part)
                answer = await reader.read()
                assert answer.startswith(b"HTTP/1.1 408")
                assert b"http.header_timeout_s" in answer
                writer.close()
            reader, writer = await site.raw(f"{head}content-length: 100\r\n\r\n{{".encode())
            writer.close()  # gone in the middle of its body
            assert (await site.chat()).status_code == 200

    asyncio.run(main())


def test_long_headers(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok"), max_header_bytes=4096) as site:
            for path in ("/health", ROUTES[0]):
                response = await site.client.post(path, headers={"x-long": "a" * 5000})
                assert "http.max_header_bytes" in is_error(response, 431)
            response = await site.client.get("/health?" + "a" * 5000)
            is_error(response, 431)
            # Headers that never end are cut off, however they are cut.
            reader, writer = await site.raw(b"GET /health HTTP/1.1\r\nx: ")
            answer = asyncio.create_task(reader.readline())
            while not answer.done():
                writer.write(b"a" * 10_000)
                await asyncio.sleep(0)
            assert (await answer).startswith(b"HTTP/1.1 431")
            writer.close()
            # A body that comes in one piece with its headers is none of them, however long it is.
            body = json.dumps(GOOD[ROUTES[0]]) + " " * 1_000_000
            head = f"POST {ROUTES[0]} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            reader, writer = await site.raw(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()
            reader, writer = await site.raw(b"\x16\x03\x01 no http\r\n\r\n")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400")
            assert b'"invalid_request_error"' in answer
            writer.close()

    asyncio.run(main())


def test_requests_at_the_same_time(serve: Any, says: Any) -> None:
    go = asyncio.Event()

    async def main() -> None:
        async with serve(lambda request: [go, 1], max_requests=2) as site:
            asked = [asyncio.create_task(site.chat()) for _ in range(2)]
            async with asyncio.timeout(20):
                while len(site.spine.runs) < 2:
                    await asyncio.sleep(0)
            refused = await site.chat()
            assert "http.max_requests" in is_error(refused, 429)
            assert refused.headers["retry-after"] == "1"
            go.set()
            assert [response.status_code for response in await asyncio.gather(*asked)] == [200, 200]
            assert (await site.chat()).status_code == 200

    asyncio.run(main())


def test_several_requests_on_one_connection(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok")) as site:
            body = json.dumps(GOOD[ROUTES[1]]).encode()
            one = (
                f"POST {ROUTES[1]} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            ).encode() + body
            reader, writer = await site.raw(one * 3)
            for _ in range(3):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                assert json.loads(await reader.readexactly(length))["choices"][0]["text"] == "ok"
            writer.close()

    asyncio.run(main())


def test_a_stream_over_http_1_0_has_no_chunks(serve: Any, says: Any, events: Any) -> None:
    """That version knows none: the end of the connection is the end of the body."""
    route = "/v1/completions"

    async def main() -> None:
        async with serve(says("Hello there, fox")) as site:
            for stream in (True, False):
                body = json.dumps({**GOOD[route], "stream": stream}).encode()
                reader, _ = await site.raw(
                    f"POST {route} HTTP/1.0\r\ncontent-type: application/json\r\n"
                    f"connection: keep-alive\r\ncontent-length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
                assert b" 200 " in head.split(b"\r\n")[0]
                assert b"transfer-encoding" not in head
                assert b"connection: close" in head
                if stream:
                    seen = events(answer.decode())
                    assert seen[-1] == "[DONE]"
                    assert "".join(e["choices"][0]["text"] for e in seen[:-1]) == "Hello there, fox"
                else:
                    assert b"content-length: %d\r\n" % len(answer) in head
                    assert json.loads(answer)["choices"][0]["text"] == "Hello there, fox"

    asyncio.run(main())


@pytest.mark.parametrize(
    "broken",
    [
        b"transfer-encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
        b"transfer-encoding: chunked\r\n\r\nx\r\n",
        b"transfer-encoding: chunked\r\n\r\n2\r\nabc\r\n",
        b"transfer-encoding: xchunked\r\n\r\n{}",
        b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", b"content-length: -1\r\n\r\n",
    ],
)  # fmt: skip
def test_a_body_whose_length_cannot_be_told_is_refused_in_words(serve: Any, says: Any, broken: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"

    async def main() -> None:
        async with serve(says("ok")) as site:
            reader, _ = await site.raw(head + broken)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400 "), answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
            assert not site.spine.runs

    asyncio.run(main())
