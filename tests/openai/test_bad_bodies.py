"""Thousands of bodies that nobody should send: always a 4xx with an error object, or an honest 200."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from typing import Any

COUNT = 2000
"""Bodies for each route."""

VALUES: list[Any] = [
    None, True, False, 0, -1, 1.5, 10**30, -(10**30), "", "x", "\ud83d\ude00", "\u0000", [], {}, [[]], [None],
    {"a": {}}, ["a", 1], [{"type": "text"}], "x" * 3000, [1] * 500, {"type": "json_schema"}, 1e308, "null",
]  # fmt: skip

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
        "stream_options": None, "response_format": {"type": "text"}, "tools": [], "stop_token_ids": [3],
    },
    "/v1/completions": {
        "model": "tiny/model-1", "prompt": ["hi", "there"], "max_tokens": 3, "temperature": 0.5, "n": 1,
        "stop": "a", "stream": False, "logprobs": 1, "echo": False, "logit_bias": {"3": 1}, "best_of": 1,
        "suffix": None, "min_tokens": 1, "top_k": 2, "min_p": 0.1, "repetition_penalty": 1.1,
    },
}  # fmt: skip


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
            holder[draw.choice(["x", "tools", "guided_json", "n", "stop", "model", ""])] = copy.deepcopy(
                draw.choice(VALUES)
            )
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


async def send(site: Any, route: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of one request on a connection of its own."""
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


def test_mutated_bodies(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("Hello there")) as site:
            for route, good in GOOD.items():
                draw = random.Random(route)
                assert (await site.client.post(route, json=good)).status_code == 200
                statuses: dict[int, int] = {}
                for _ in range(COUNT // 50):
                    bodies = [mutated(good, draw) for _ in range(50)]
                    answers = await asyncio.gather(*(send(site, route, body) for body in bodies))
                    for body, (status, answer) in zip(bodies, answers, strict=True):
                        statuses[status] = statuses.get(status, 0) + 1
                        if status == 200:
                            continue
                        assert 400 <= status < 500, (body, answer)
                        error = json.loads(answer)["error"]
                        assert set(error) == {"message", "type", "param", "code"}, body
                        assert error["message"], body
                assert statuses[400] > COUNT // 4
                assert statuses[200] > COUNT // 50
                assert (await site.client.post(route, json=good)).status_code == 200

    asyncio.run(main())
