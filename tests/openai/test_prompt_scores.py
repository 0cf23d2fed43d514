"""Log-probabilities of the prompt: echoed in the older layout, and as a list of their own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 8])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_echo_with_logprobs(
    serve: Any, says: Any, events: Any, text: Any, stream: bool, max_tokens: int, as_tokens: bool
) -> None:
    prompt = text._encode("Hello é fox", False)

    async def main() -> None:
        async with serve(says(" there")) as site:
            response = await site.complete(
                prompt=prompt if as_tokens else "Hello é fox",
                echo=True,
                logprobs=2,
                max_tokens=max_tokens,
                stream=stream,
            )
            assert response.status_code == 200, response.text
            bodies = events(response.text)[:-1] if stream else [response.json()]
            choices = [body["choices"][0] for body in bodies]
            whole = "".join(choice["text"] for choice in choices)
            assert whole == "Hello é fox" + (" there" if max_tokens else "")
            assert choices[-1]["finish_reason"] == ("stop" if max_tokens else "length")
            logs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            joined = {name: [item for log in logs for item in log[name]] for name in logs[0]}
            answer = len(text._encode(" there", False)) if max_tokens else 0
            assert joined["token_logprobs"] == [
                None, *(-0.25 * k for k in range(1, len(prompt))), *[-0.5] * answer
            ]  # fmt: skip
            assert joined["top_logprobs"][0] is None
            assert all(len(top) == 2 for top in joined["top_logprobs"][1:])
            offsets = joined["text_offset"]
            assert len(offsets) == len(joined["tokens"]) == len(prompt) + answer
            assert offsets == sorted(offsets)
            for token, start in zip(joined["tokens"], offsets, strict=True):
                assert token.startswith("bytes:") or whole.startswith(token, start)
            if not stream:
                assert bodies[0]["usage"]["completion_tokens"] == (answer + 1 if max_tokens else 0)

    asyncio.run(main())


def test_a_list_of_their_own(serve: Any, says: Any, text: Any) -> None:
    async def main() -> None:
        async with serve(says("ok")) as site:
            response = await site.complete(prompt="Hello fox", prompt_logprobs=1)
            tokens = text._encode("Hello fox", False)
            listed = response.json()["choices"][0]["prompt_logprobs"]
            assert listed[0] is None
            for k, (token, entry) in enumerate(zip(tokens[1:], listed[1:], strict=True), 1):
                piece = text.vocabulary.piece(token).decode()
                assert entry[str(token)] == {"logprob": -0.25 * k, "rank": None, "decoded_token": piece}
                assert entry["0"]["rank"] == 1
            chat = (await site.chat(prompt_logprobs=0)).json()
            assert chat["prompt_logprobs"][0] is None
            assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])
            plain = (await site.chat()).json()
            assert "prompt_logprobs" not in plain

    asyncio.run(main())


def test_what_is_refused(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok")) as site:
            for fields in (
                {"prompt_logprobs": 21},
                {"prompt_logprobs": -1},
                {"prompt_logprobs": 1, "stream": True},
            ):
                for ask in (site.chat, site.complete):
                    response = await ask(**fields)
                    assert response.status_code == 400, response.text
                    assert response.json()["error"]["param"] == "prompt_logprobs"

    asyncio.run(main())
