"""/v1/completions: prompts in all their forms, echo, and the older layout."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai.types import Completion


def test_prompts_in_all_forms(serve: Any, says: Any, text: Any) -> None:
    hello = text._encode("Hello there", False)
    forms = [
        ("Hello there", [hello]),
        (["Hello there", "fox"], [hello, text._encode("fox", False)]),
        (["fox"], [text._encode("fox", False)]),
        (hello, [hello]),
        ([hello, [5, 6]], [hello, [5, 6]]),
        ([[5]], [[5]]),
    ]

    async def main() -> None:
        async with serve(says("ok")) as site:
            for prompt, tokens in forms:
                before = len(site.spine.runs)
                response = await site.complete(prompt=prompt)
                assert response.status_code == 200, response.text
                answer = Completion.model_validate(response.json())
                assert [choice.text for choice in answer.choices] == ["ok"] * len(tokens)
                assert [list(run.request.prompt) for run in site.spine.runs[before:]] == tokens
                assert answer.usage is not None
                assert answer.usage.prompt_tokens == sum(map(len, tokens))

    asyncio.run(main())


REFUSED = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [[[1]]]}, "prompt[0][0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [400_000]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["x"] * 1_000_000}, "prompt"),
    ({"prompt": ["x"] * 65, "n": 2}, "n"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"best_of": 10**6}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
]


def test_what_cannot_be_done_is_refused(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok")) as site:
            for fields, param in REFUSED:
                response = await site.complete(**fields)
                assert response.status_code == 400, (fields, response.text)
                assert response.json()["error"]["param"] == param, (fields, response.text)
            assert not site.spine.runs
            assert (await site.complete(n=2, best_of=2)).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_echo(serve: Any, says: Any, events: Any, text: Any, stream: bool) -> None:
    async def main() -> None:
        async with serve(says(" there")) as site:
            for prompt in ("Hello", text._encode("Hello", False)):
                for max_tokens, expected, finish in ((None, "Hello there", "stop"), (0, "Hello", "length")):
                    response = await site.complete(
                        prompt=prompt, echo=True, max_tokens=max_tokens, stream=stream
                    )
                    assert response.status_code == 200, response.text
                    if stream:
                        choices = [chunk["choices"][0] for chunk in events(response.text)[:-1]]
                        shown = "".join(choice["text"] for choice in choices)
                        ended = choices[-1]["finish_reason"]
                    else:
                        body = response.json()
                        shown, ended = body["choices"][0]["text"], body["choices"][0]["finish_reason"]
                        assert body["usage"]["completion_tokens"] == (0 if max_tokens == 0 else 4 - 2)
                    assert (shown, ended) == (expected, finish)
            assert (await site.client.get("/health")).status_code == 200

    asyncio.run(main())


def test_a_prompt_that_ends_inside_a_character_is_not_repeated(serve: Any, text: Any) -> None:
    pieces = text.vocabulary.pieces
    prompt = [*text._encode("the secret fox ", False), *(pieces.index(bytes([b])) for b in "中".encode()[:2])]
    rest = [pieces.index(bytes(["中".encode()[2]])), 1]

    async def main() -> None:
        async with serve(lambda request: rest) as site:
            answer = (await site.complete(prompt=prompt)).json()["choices"][0]["text"]
            assert answer == "中"
            echoed = (await site.complete(prompt=prompt, echo=True)).json()["choices"][0]["text"]
            assert echoed == "the secret fox 中"

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_in_the_older_layout(serve: Any, says: Any, events: Any, stream: bool) -> None:
    async def main() -> None:
        async with serve(says("Hello é")) as site:
            response = await site.complete(logprobs=2, stream=stream)
            bodies = events(response.text)[:-1] if stream else [response.json()]
            parts = [body["choices"][0]["logprobs"] or {} for body in bodies]
            tokens = [token for part in parts for token in part.get("tokens", [])]
            offsets = [offset for part in parts for offset in part.get("text_offset", [])]
            assert tokens[-2:] == ["bytes:\\xc3", "bytes:\\xa9"]
            assert "".join(tokens[:-2]) == "Hello "
            assert offsets == [0, 5, 6, 6]
            top = [entry for part in parts for entry in part.get("top_logprobs", [])]
            assert all(len(entry) == 2 for entry in top)
            logprobs = [value for part in parts for value in part.get("token_logprobs", [])]
            assert logprobs == [-0.5] * 4

    asyncio.run(main())
