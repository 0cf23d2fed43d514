"""Log-probabilities of prompts come whole, once each, whatever happens to the workers that compute them."""

from __future__ import annotations

import asyncio
import random

from whole_fleet import Answer, Box

from engine.settings import EngineSettings
from fleet.request import Sampling
from fleet.virtual_time import run

PROMPTS = [[random.Random(n).randrange(1000) for _ in range(1 + 97 * n)] for n in range(10)]
SAMPLING = Sampling(max_tokens=250, temperature=0.0, prompt_logprobs=0)


async def ask_all(box: Box, kill: bool = False) -> list[Answer]:
    # One that shares a beginning with another is computed from its start, found in a cache or not.
    asked = [*PROMPTS, [*PROMPTS[-1][:400], 5, 6, 7]]
    requests = [box.request(prompt, SAMPLING, number) for number, prompt in enumerate(asked)]
    asking = [asyncio.create_task(box.ask(request)) for request in requests]
    if kill:
        await asyncio.sleep(0.12)
        await box.kill("prefill-0")
    answers = await asyncio.gather(*asking)
    for request, answer in zip(requests, answers, strict=True):
        assert answer.error is None, answer.error
        assert answer.tokens == box.truth(request)
        assert len(answer.scores) == len(request.prompt) - 1
    return list(answers)


def scores_of(box: Box, kill: bool = False) -> tuple[list[list[float]], dict[str, int]]:
    async def main() -> tuple[list[list[float]], dict[str, int]]:
        async with box:
            answers = await ask_all(box, kill)
            counters: dict[str, int] = dict(box.router.flow.counters)
            for worker in box.workers.values():
                for name, count in worker.engine.load().counters.items():
                    counters[name] = counters.get(name, 0) + count
        return [[score.logprob for score in answer.scores] for answer in answers], counters

    return run(main())


def engine(step: int) -> EngineSettings:
    return EngineSettings(block_size=16, max_batch=8, max_step_tokens=step)


def test_scores_are_the_same_whatever_happens() -> None:
    whole, _ = scores_of(Box(1, 1, engine=engine(8192)))
    chunked, counters = scores_of(Box(1, 1, engine=engine(64)))
    assert chunked == whole
    assert counters["steps"] > 60
    # So few tokens a step that prompts give way to decodes before they are computed.
    local, counters = scores_of(Box(0, 1, engine=engine(12), blocks=75))
    assert local == whole
    assert counters["preemptions"] > 0
    killed, counters = scores_of(Box(2, 1, engine=engine(64)), kill=True)
    assert killed == whole
    assert counters["failovers"] > 0
