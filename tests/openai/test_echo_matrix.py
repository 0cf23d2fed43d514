"""Echo, log-probabilities and hardly any tokens, in all combinations over a whole fleet: an answer or a 400,
and workers that live."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
from http_front import listening
from whole_fleet import MODEL, Box

from engine.latency_runner import LatencyModel


def test_all_combinations(tokenizer_json: str, events: Any) -> None:
    prompts = ["hello fox", [40, 41, 42], ["hi", "the lazy dog " * 60], [[40], [41, 42]], [250], "", [], [[]]]
    choices = (prompts, (False, True), (None, 0, 2), (0, 1, 5), (False, True), (None, 1))

    async def main() -> None:
        async with (
            Box(1, 1, latency=LatencyModel(base_s=0.001)) as box,
            listening(box, tokenizer_json) as (_, port),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
        ):
            some = asyncio.Semaphore(32)

            async def ask(case: tuple[Any, ...]) -> None:
                prompt, echo, logprobs, max_tokens, stream, prompt_logprobs = case
                body = {
                    "model": MODEL, "prompt": prompt, "echo": echo, "logprobs": logprobs, "seed": 1,
                    "max_tokens": max_tokens, "stream": stream, "prompt_logprobs": prompt_logprobs,
                }  # fmt: skip
                async with some:
                    response = await client.post("/v1/completions", json=body)
                refused = prompt in ("", [], [[]]) or (stream and prompt_logprobs is not None)
                refused |= max_tokens == 0 and not echo
                assert response.status_code == (400 if refused else 200), (body, response.text)
                if refused:
                    assert response.json()["error"]["message"]
                    return
                bodies = events(response.text)[:-1] if stream else [response.json()]
                rows: dict[int, list[Any]] = {}
                for choice in itertools.chain.from_iterable(body["choices"] for body in bodies):
                    rows.setdefault(choice["index"], []).append(choice)
                several = isinstance(prompt, list) and not isinstance(prompt[0], int)
                assert sorted(rows) == list(range(len(prompt) if several else 1))
                for parts in rows.values():
                    assert parts[-1]["finish_reason"] == "length"
                    logs = [part["logprobs"] for part in parts if part["logprobs"]]
                    assert bool(logs) == (logprobs is not None), json.dumps(body)
                    shown = sum(len(log["tokens"]) for log in logs)
                    if logs and not echo:
                        assert shown == max_tokens
                    elif logs:
                        assert shown > max_tokens
                        assert logs[0]["token_logprobs"][0] is None
                        assert all(
                            value < 0 for log in logs for value in log["token_logprobs"] if value is not None
                        )
                    if prompt_logprobs is not None:
                        assert parts[0]["prompt_logprobs"][0] is None
                if not stream:
                    usage = bodies[0]["usage"]
                    assert usage["completion_tokens"] == max_tokens * len(rows)

            await asyncio.gather(*map(ask, itertools.product(*choices)))
            assert (await client.get("/health")).status_code == 200
            assert all(worker.task and not worker.task.done() for worker in box.workers.values())

    asyncio.run(main())
