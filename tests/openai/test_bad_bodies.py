"""Tens of thousands of requests that nobody should send, on every route: always a 4xx with an error object,
or an honest 200; and the process lives."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from typing import Any
from urllib.parse import quote

CASES = 20_000
"""Bodies sent straight to the application, over all routes that take one."""
SOCKETS = 1_200
"""Of the same kind, over connections."""

VALUES: list[Any] = [
    None, True, False, 0, -1, 1.5, 10**30, -(10**30), "", "x", "\ud83d\ude00", "\u0000", [], {}, [[]], [None],
    {"a": {}}, ["a", 1], [{"type": "text"}], "x" * 3000, [1] * 500, {"type": "json_schema"}, 1e308, "null",
    {"type": "function", "name": "f"}, [{"type": "function"}], "required", {"type": "object"}, "[", -5e-324,
]  # fmt: skip

KEYS = ["x", "tools", "tool_choice", "guided_json", "n", "stop", "model", "", "input", "prompt", "stream",
        "response_format", "prompt_logprobs", "echo", "$ref", "messages", "max_tokens"]  # fmt: skip

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "tiny/model-1",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 1, "stop": ["a"], "stream": False,
        "logprobs": True, "top_logprobs": 1, "logit_bias": {"3": 1}, "seed": 1, "user": "u",
        "stream_options": None, "response_format": {"type": "text"}, "tools": [TOOL], "stop_token_ids": [3],
    },
    "/v1/completions": {
        "model": "tiny/model-1", "prompt": ["hi", "there"], "max_tokens": 3, "temperature": 0.5, "n": 1,
        "stop": "a", "stream": False, "logprobs": 1, "echo": True, "logit_bias": {"3": 1}, "best_of": 1,
        "suffix": None, "min_tokens": 1, "top_k": 2, "min_p": 0.1, "repetition_penalty": 1.1,
    },
    "/v1/responses": {
        "model": "tiny/model-1", "instructions": "be brief", "max_output_tokens": 3, "stream": False,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "metadata": {"a": "b"},
        "text": {"format": {"type": "text"}}, "store": False, "temperature": 0.5,
    },
    "/tokenize": {"model": "tiny/model-1", "prompt": "hi", "add_special_tokens": True},
    "/detokenize": {"model": "tiny/model-1", "tokens": [5, 6, 7]},
    "/v1/embeddings": {"model": "tiny/model-1", "input": ["hi"]},
}  # fmt: skip
"""A body for each route; embeddings are refused whatever is in it."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def mutated(good: dict[str, Any], draw: random.Random) -> bytes:
    body = json.loads(json.dumps(good))
    for _ in range(draw.randint(1, 3)):
        path = draw.choice(places(body))
        holder = body
        for key in path[:-1]:
            holder = holder[key]
        kind = draw.randrange(3)
        if kind == 0:
            del holder[path[-1]]
        elif kind == 1 or not isinstance(holder, dict):
            holder[path[-1]] = copy.deepcopy(draw.choice(VALUES))
        else:
            holder[draw.choice(KEYS)] = copy.deepcopy(draw.choice(VALUES))
        if not places(body):
            break
    data = json.dumps(body, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    match draw.randrange(8):
        case 0:
            at = draw.randrange(len(data) + 1)
            data = data[:at] + draw.randbytes(draw.randint(1, 4)) + data[at:]
        case 1:
            data = data[: draw.randrange(len(data) + 1)]
        case 2:
            data = draw.randbytes(draw.randint(0, 200))
        case _:
            pass
    return data


async def call(
    app: Any, method: str, path: str, body: bytes = b"", kind: bytes = b"application/json", query: bytes = b""
) -> tuple[int, bytes]:
    """Status and body of one request straight to the application; the body in one piece or two."""
    pieces = [body] if len(body) % 2 else [body[: len(body) // 2], body[len(body) // 2 :]]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}
        return await asyncio.Event().wait()  # type: ignore[return-value]  # the client stays

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": quote(path).encode(), "query_string": query, "root_path": "",
        "headers": [(b"host", b"x"), (b"content-type", kind), (b"content-length", b"%d" % len(body))],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    assert not sent[-1].get("more_body"), "the response has no end"
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


async def send(site: Any, route: str, body: bytes) -> tuple[int, bytes]:
    """The same over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(
        f"POST {route} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), answer


def judge(status: int, answer: bytes, what: Any) -> None:
    if status == 200:
        return
    assert 400 <= status < 500, (what, status, answer)
    error = json.loads(answer)["error"]
    assert set(error) == {"message", "type", "param", "code"}, (what, answer)
    assert error["message"], what


def test_mutated_bodies_on_every_route(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("Hello there")) as site:
            site.ingress.models["tiny/model-1"].context = 4096  # room for what is told of tools
            assert set(GOOD) == set(site.ingress._routes), "a route without a body here"
            for number, (route, good) in enumerate(GOOD.items()):
                draw = random.Random(route)
                whole = json.dumps(good).encode()
                fine = 400 if route == "/v1/embeddings" else 200
                assert (await call(site.ingress, "POST", route, whole))[0] == fine
                statuses: dict[int, int] = {}
                # The two that carry the load have the most to get wrong.
                share = CASES * (3 if number < 2 else 1) // (len(GOOD) + 4)
                for _ in range(share // 50 + 1):
                    bodies = [mutated(good, draw) for _ in range(50)]
                    kinds = [b"application/json" if draw.random() < 0.97 else b"text/plain" for _ in bodies]
                    answers = await asyncio.gather(
                        *(
                            call(site.ingress, "POST", route, *pair)
                            for pair in zip(bodies, kinds, strict=True)
                        )
                    )
                    for body, (status, answer) in zip(bodies, answers, strict=True):
                        statuses[status] = statuses.get(status, 0) + 1
                        judge(status, answer, (route, body))
                assert statuses[400] > share // 10
                assert statuses[415] > 0
                assert statuses.get(200, 0) > (0 if fine == 200 else -1)
                assert (await call(site.ingress, "POST", route, whole))[0] == fine

    asyncio.run(main())


def test_mutated_bodies_over_connections(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("Hello there")) as site:
            draw = random.Random(1)
            for _ in range(SOCKETS // 40):
                asked = [draw.choice(list(GOOD)) for _ in range(40)]
                bodies = [mutated(GOOD[route], draw) for route in asked]
                answers = await asyncio.gather(*map(send, [site] * 40, asked, bodies))
                for route, body, (status, answer) in zip(asked, bodies, answers, strict=True):
                    judge(status, answer, (route, body))
            assert (await site.chat()).status_code == 200

    asyncio.run(main())


def test_bytes_that_are_no_request(serve: Any, says: Any) -> None:
    """Refused in the way of HTTP, or cut off; what comes after on other connections is served."""
    heads = [b"", b"GET / HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"]

    async def main() -> None:
        async with serve(says("Hello there"), header_timeout_s=0.5, body_timeout_s=0.5) as site:
            draw = random.Random(2)

            async def garbage() -> None:
                reader, writer = await site.raw(draw.choice(heads) + draw.randbytes(draw.randint(1, 300)))
                writer.write_eof()
                try:
                    answer = await reader.read()
                except ConnectionError:
                    return
                assert answer == b"" or 400 <= int(answer.split()[1]) < 500, answer

            for _ in range(10):
                await asyncio.gather(*(garbage() for _ in range(20)))
            assert (await site.chat()).status_code == 200

    asyncio.run(main())


METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"]
STRANGE = ["/", "//", "/v1", "/v1/", "/V1/models", "/v1/../v1/models", "/v1/models/../../etc/passwd",
           "/docs/x", "/v1/models/\x00", "/v1/models/" + "a" * 5000, "/v1/chat/completions/", "/é", "/%",
           "/%2e%2e/%2e%2e/etc", "/v1/models/..%2f..%2fetc%2fpasswd", "/invocations", "/server_info",
           "/metrics/x"]  # fmt: skip


def test_every_method_on_every_path(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("Hello there")) as site:
            document = json.loads((await call(site.ingress, "GET", "/openapi.json"))[1])
            assert set(GOOD) <= set(document["paths"]), "a route that the OpenAPI page lacks"
            paths = [path.replace("{model}", "gpt-9") for path in document["paths"]]
            paths += [*STRANGE, "/openapi.json", "/docs", "/redoc"]
            draw = random.Random(3)
            for path in paths:
                for method in METHODS:
                    for body in (b"", b"{}", draw.randbytes(50)):
                        query = quote(draw.randbytes(20)).encode()
                        status, answer = await call(site.ingress, method, path, body, query=query)
                        if method != "HEAD":
                            judge(status, answer, (method, path, body))
                        assert 200 <= status < 500, (method, path, status)

    asyncio.run(main())
