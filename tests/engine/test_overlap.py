"""A step planned while one runs says what one after the other says: a real model, every way to draw."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.loop import Engine
from engine.settings import EngineSettings
from engine.sparing import OutOfMemory, Sparing, joined
from engine.torch_runner import TorchRunner
from engine.words import Batch, BatchResult, Drawn, Finished, NewSequence, StepReport
from fleet.block_hash import HashKeys
from fleet.request import FinishReason, Sampling, TokenLogprobs

GREEDY = Sampling(24, temperature=0.0)
WARM = Sampling(24, temperature=1.0, seed=7)
EACH = {
    "greedy": GREEDY,
    "warm": WARM,
    "cut": replace(WARM, top_k=20, top_p=0.9, min_p=0.01),
    "likeliest": replace(GREEDY, logprobs=3, prompt_logprobs=1),
    "stops": replace(WARM, stop_token_ids=tuple(range(3, 40))),
    "stops late": replace(WARM, seed=3, stop_token_ids=tuple(range(3, 80)), min_tokens=9),
    "biased": replace(WARM, logit_bias=((5, 4.0), (7, -100.0))),
    "one": replace(GREEDY, max_tokens=1),
}
PENALISED = {"punished": replace(WARM, presence_penalty=1.0, repetition_penalty=1.3, max_tokens=9)}

Answer = tuple[list[int], list[TokenLogprobs | None], FinishReason]


def served(runner: TorchRunner, asked: dict[str, Sampling], overlap: str) -> tuple[dict[str, Answer], int]:
    """What an engine answers, all at once; and how many tokens were computed in vain."""
    drawn: dict[str, list[Drawn]] = {}
    ends: dict[str, FinishReason] = {}
    done = asyncio.Event()

    def hear(report: StepReport) -> None:
        for one in report.drawn:
            drawn.setdefault(one.id, []).append(one)
        for end in report.finished:
            assert isinstance(end, Finished)
            ends[end.id] = end.finish
        if len(ends) == len(asked):
            done.set()

    async def main() -> int:
        size = runner.layout.block_size
        settings = EngineSettings(block_size=size, max_batch=6, max_step_tokens=30, overlap=overlap)
        engine = Engine(runner, settings, hear)
        running = asyncio.create_task(engine.run())
        for number, (id, sampling) in enumerate(asked.items()):
            prompt = tuple(3 + (7 * number + i) % 150 for i in range(4 + 9 * number))
            engine.add(NewSequence(id, prompt, sampling, HashKeys("m", size)))
        await done.wait()
        engine.validate(idle=True)
        running.cancel()
        await asyncio.wait({running})
        return engine.load().counters["discarded_tokens"]

    wasted = asyncio.run(main())
    return {
        id: ([one.token for one in drawn[id]], [one.logprobs for one in drawn[id]], ends[id]) for id in asked
    }, wasted


@pytest.mark.parametrize("asked", [EACH, {**EACH, **PENALISED}], ids=["ahead", "beside one that waits"])
def test_text_is_the_same_with_a_second_step_in_flight(
    asked: dict[str, Sampling], small_runner: Callable[..., TorchRunner]
) -> None:
    runner = small_runner()
    apart, none = served(runner, asked, "off")
    ahead, wasted = served(runner, asked, "on")
    assert none == 0
    if "punished" not in asked:
        assert wasted > 0, "somebody stopped with a step behind it"
    for id, (tokens, logprobs, finish) in apart.items():
        assert ahead[id][0] == tokens, id
        assert ahead[id][2] is finish
        for one, other in zip(logprobs, ahead[id][1], strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert other.logprob == pytest.approx(one.logprob, abs=1e-4)
    assert {apart["stops"][2], apart["stops late"][2]} == {FinishReason.STOP}
    assert len(apart["stops late"][0]) > 9


@pytest.mark.parametrize("room", [10**6, 2])
def test_carried_tokens_are_those_that_were_drawn_in_parts_too(
    room: int, small_runner: Callable[..., TorchRunner], drive: Any, carry: Any
) -> None:
    runner = small_runner()

    def scarce(batch: Batch) -> Any:
        if sum(len(chunk.tokens) for chunk in batch.chunks) > room:
            raise OutOfMemory("none left")
        return runner._launch(batch)

    sparing = Sparing(scarce)

    def step(batch: Batch) -> BatchResult:
        return joined(batch, [(part, one.result()) for part, one in sparing.run(batch)])

    texts = []
    carrying = carry(runner, step)
    for driver in (drive(carrying), drive(small_runner())):
        sequences = [driver.add(range(3, 3 + length), 9, sampling) for length, sampling in
                     ((5, GREEDY), (20, WARM), (11, replace(WARM, seed=9)))]  # fmt: skip
        texts.append(driver.run(sequences, 7))
    assert texts[0] == texts[1]
    assert carrying.carried == 3 * 6
