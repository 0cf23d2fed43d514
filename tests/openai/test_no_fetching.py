"""Nothing that a body names is ever fetched: the server opens no connection for a client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

IMAGE = {"type": "image_url", "image_url": {"url": "URL"}}
USER = {"role": "user", "content": "x"}
BODIES: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, 400),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "URL"}]}]},
        200,
    ),
    ("/v1/chat/completions", {"messages": [USER], "tools": [{"type": "mcp", "server_url": "URL"}]}, 400),
    ("/v1/chat/completions", {"messages": [USER], "web_search_options": {"url": "URL"}}, 400),
    ("/v1/chat/completions", {"messages": [USER], "documents": [{"url": "URL"}]}, 400),
    (
        "/v1/chat/completions",
        {"messages": [USER], "kv_transfer_params": {"remote_host": "127.0.0.1", "remote_port": "PORT"}},
        200,
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "URL"}]}]},
        400,
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "URL"}]}]},
        400,
    ),
    ("/v1/responses", {"input": "x", "tools": [{"type": "mcp", "server_url": "URL"}]}, 400),
    ("/v1/responses", {"input": "x", "prompt": {"id": "URL"}}, 400),
    ("/v1/completions", {"prompt": "URL"}, 200),
]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "[::ffff:127.0.0.1]"])
def test_no_address_in_a_body_is_connected_to(serve: Any, says: Any, host: str) -> None:
    async def main() -> None:
        seen: list[Any] = []
        listener = await asyncio.start_server(lambda reader, writer: seen.append(writer), "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]

        def filled(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: filled(inner) for key, inner in value.items()}
            if isinstance(value, list):
                return [filled(inner) for inner in value]
            return {"URL": f"http://{host}:{port}/x.png", "PORT": port}.get(value, value)

        async with serve(says("ok")) as site:
            for route, body, status in BODIES:
                answer = await site.client.post(route, json={"model": "tiny/model-1", **filled(body)})
                assert answer.status_code == status, (body, answer.text)
        assert not seen
        listener.close()
        await listener.wait_closed()

    asyncio.run(main())
