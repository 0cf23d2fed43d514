"""A model's name is only ever looked up: whatever it looks like, no file is opened for it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

NAMES = [
    "../../etc/passwd", "/etc/passwd", "..", ".", "", " ", "tiny/../tiny/model-1", "tiny\\model-1",
    "tiny/model-1/", "TINY/MODEL-1", "tiny/model-1\u0000", "%2e%2e/x", "tiny%2fmodel-1", "a" * 100_000,
    "\u202e", "file:///etc/passwd", "http://127.0.0.1/x", "{{ 7 * 7 }}", "$(id)", "tiny/model-1\n",
]  # fmt: skip

_opened: list[str] = []
_watching = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event in ("open", "os.listdir", "subprocess.Popen", "os.system"):
        _opened.append(f"{event} {arguments[0]!r}")


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:20]))
def test_unknown_names(serve: Any, says: Any, name: str) -> None:
    async def main() -> None:
        global _watching
        async with serve(says("ok")) as site:
            routes = {
                "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
                "/v1/completions": {"prompt": "x"},
                "/v1/responses": {"input": "x"},
                "/v1/embeddings": {"input": "x"},
            }
            for route, body in routes.items():
                _watching = True
                response = await site.client.post(route, json={"model": name, **body})
                _watching = False
                assert response.status_code == 404
                error = response.json()["error"]
                assert error["code"] == "model_not_found"
                assert len(error["message"]) < 500
            assert not site.spine.runs

    _opened.clear()
    asyncio.run(main())
    assert not _opened


sys.addaudithook(_hook)
