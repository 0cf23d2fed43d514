"""/tokenize, /detokenize, /v1/embeddings, and an OpenAPI page that says what is served."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from fleet.api_keys import ApiKey, digest

MODEL = "tiny/model-1"


def test_tokens_there_and_back(serve: Any, says: Any, text: Any) -> None:
    async def main() -> None:
        async with serve(says("ok")) as site:
            for words in ("Hello there", "", "😀 fox", "<|im_end|>"):
                body = (await site.client.post("/tokenize", json={"model": MODEL, "prompt": words})).json()
                assert body == {
                    "count": len(body["tokens"]), "max_model_len": 256, "tokens": text._encode(words, True),
                    "token_strs": None,
                }  # fmt: skip
                back = await site.client.post("/detokenize", json={"tokens": body["tokens"]})
                assert back.json() == {"prompt": words}
            shown = await site.client.post("/tokenize", json={"prompt": "Hello", "return_token_strs": True})
            assert "".join(shown.json()["token_strs"]) == "Hello"
            messages = [{"role": "user", "content": "hi"}]
            chat = (await site.client.post("/tokenize", json={"messages": messages})).json()
            assert (await site.chat(messages=messages)).status_code == 200
            assert tuple(chat["tokens"]) == site.spine.runs[-1].request.prompt
            assert chat["count"] == len(chat["tokens"])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}] * 3}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [10**12]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * 101}, "tokens"),
        ("/v1/embeddings", {"model": MODEL, "input": "x"}, "model"),
        ("/v1/embeddings", {"input": "x"}, "model"),
    ],
    ids=str,
)
def test_what_is_refused(serve: Any, says: Any, route: str, body: Any, param: str) -> None:
    async def main() -> None:
        async with serve(says("ok"), max_messages=2, max_prompt_tokens=100) as site:
            response = await site.client.post(route, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
            for path in ("/tokenize", "/detokenize", "/v1/embeddings", "/v1/responses"):
                kind = {"content-type": "application/json"}
                for wrong in (b"", b"[]", b"{", b"\xff"):
                    refused = await site.client.post(path, content=wrong, headers=kind)
                    assert refused.status_code == 400
                assert (await site.client.get(path)).status_code == 405
                assert (await site.client.post(path, content=b"{}")).status_code == 415
            unknown = {"model": "other", "prompt": "x", "tokens": [], "input": "x"}
            assert (await site.client.post(route, json=unknown)).status_code == 404

    asyncio.run(main())


def test_embeddings_say_that_there_are_none(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok")) as site:
            api = openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{site.port}/v1", api_key="none", max_retries=0
            )
            async with api:
                with pytest.raises(openai.BadRequestError, match="no embeddings"):
                    await api.embeddings.create(model=MODEL, input="x")

    asyncio.run(main())


def test_the_openapi_page_tells_the_truth(serve: Any, says: Any) -> None:
    """Every route that is described answers, and every route that answers is described."""

    async def main() -> None:
        async with serve(says("ok")) as site:
            document = (await site.client.get("/openapi.json")).json()
            assert "security" not in document
            described = {
                (method.upper(), path) for path, methods in document["paths"].items() for method in methods
            }
            served = {("POST", path) for path in site.ingress._routes} | {
                (method, route.path.replace(":path", ""))
                for route in site.ingress._app.routes
                if getattr(route, "include_in_schema", False)
                for method in route.methods
            }
            assert described == served
            for method, path in described:
                if path.startswith("/fleet/"):
                    continue  # of a whole router, which is not here: each has tests of its own
                response = await site.client.request(method, path.replace("{model}", MODEL))
                assert response.status_code in ((200,) if method == "GET" else (415,)), path
            for operations in document["paths"].values():
                for operation in operations.values():
                    assert "422" not in operation["responses"]
                    assert operation["responses"]["default"]
            names = document["components"]["schemas"]
            references = set(_references(document))
            assert {name.rpartition("/")[2] for name in references} <= set(names)
            assert {"ChatBody", "CompletionBody", "ResponsesBody", "TokenizeBody"} <= set(names)
            assert (await site.client.get("/docs")).status_code == 200
        keys = [ApiKey(sha256=digest("k" * 20), tenant="a")]
        async with serve(says("ok"), keys=keys) as site:
            headers = {"authorization": "Bearer " + "k" * 20}
            document = (await site.client.get("/openapi.json", headers=headers)).json()
            assert document["security"] == [{"key": []}]
            assert document["paths"]["/health"]["get"]["security"] == []
            assert "security" not in document["paths"]["/v1/models"]["get"]

    asyncio.run(main())


def _references(value: Any) -> Any:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)
