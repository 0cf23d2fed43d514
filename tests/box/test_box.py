"""The whole fleet in virtual time: right text, nothing left over, the same run twice."""

from __future__ import annotations

import asyncio
import re

from whole_fleet import Answer, Box, workload

from fleet.ids import RequestId
from fleet.request import FinishReason, Sampling
from fleet.virtual_time import run


async def serve(box: Box, count: int, seed: int) -> list[Answer]:
    async def client(number: int, at: float, prompt: list[int], sampling: Sampling) -> Answer:
        await asyncio.sleep(at)
        return await box.ask(box.request(prompt, sampling, number))

    rows = workload(count, seed)
    answers = await asyncio.gather(*(client(i, *row) for i, row in enumerate(rows)))
    for (_, prompt, sampling), answer in zip(rows, answers, strict=True):
        assert answer.error is None, answer.error
        assert answer.tokens == box.truth(box.request(prompt, sampling, 0)), answer.request
        assert answer.end is not None
        assert answer.end.finish is FinishReason.LENGTH
        assert answer.end.usage.completion_tokens == len(answer.tokens)
        assert answer.end.usage.prompt_tokens == len(prompt)
    return answers


def test_one_request_goes_through_both_pools() -> None:
    async def main() -> None:
        async with Box(1, 1) as box:
            request = box.request(range(100), Sampling(max_tokens=10, temperature=0.0), 1)
            answer = await box.ask(request)
            assert answer.tokens == box.truth(request)
            prefill, decode = (worker.load().counters for worker in box.workers.values())
            assert prefill["prompt_tokens"] == 100
            assert decode["pulled_tokens"] == 100
            assert decode["local_prefills"] == 0

    run(main(), horizon_s=60)


def test_two_thousand_requests_are_right_and_leave_nothing() -> None:
    async def main() -> tuple[float, int]:
        async with Box(2, 2) as box:
            answers = await serve(box, 2000, seed=7)
            return asyncio.get_running_loop().time(), sum(len(a.tokens) for a in answers)

    seconds, tokens = run(main(), horizon_s=3600)
    assert tokens > 20_000
    assert seconds < 3600


def test_two_runs_are_the_same_to_the_last_event() -> None:
    async def main() -> list[object]:
        async with Box(2, 2, blocks=400) as box:
            seen: list[object] = [(a.request, a.times) for a in await serve(box, 200, seed=11)]
            # Every choice with its reason and time, and all that each worker did and told.
            # Names of leases alone are drawn: nobody is to guess them.
            for number in range(200):
                record = str(box.router.explain(RequestId(f"r{number}")))
                seen.append(re.sub(r"lease \w+", "lease", record))
            seen += [(worker.load(), worker.chassis.snapshot()) for worker in box.workers.values()]
            return seen

    assert run(main()) == run(main())
