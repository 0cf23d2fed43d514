"""The latency runner computes exactly what its reference says, in the time its model says."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

from engine.latency_runner import LatencyModel, LatencyRunner, ToyModel, reference_tokens
from engine.runner import Runner
from engine.words import Batch, Chunk
from fleet.kv_layout import KvLayout
from fleet.request import Sampling

GREEDY = Sampling(max_tokens=20, temperature=0)
PROMPT = tuple(range(50, 71))


def chunk(tokens: tuple[int, ...], start: int, blocks: tuple[int, ...], sampling: Sampling = GREEDY) -> Chunk:
    return Chunk(0, tokens, start, blocks, True, sampling, prompt_length=len(PROMPT))


def step(runner: Runner, *chunks: Chunk) -> tuple[int | None, ...]:
    return asyncio.run(runner.run(Batch(chunks))).tokens


@pytest.mark.parametrize("cuts", [(21,), (1, 21), (4, 8, 12, 21), tuple(range(1, 22))])
def test_any_chunking_over_scattered_blocks_draws_the_reference(cuts: tuple[int, ...]) -> None:
    runner = LatencyRunner.with_own_memory(16, 4)
    table = (9, 2, 15, 0, 7, 3, 11, 4, 1, 5, 12)
    start, token = 0, None
    for end in cuts:
        (token,) = step(runner, chunk(PROMPT[start:end], start, table))
        start = end
    drawn = [token]
    while len(drawn) < 20:
        (token,) = step(runner, chunk((drawn[-1] or 0,), len(PROMPT) + len(drawn) - 1, table))
        drawn.append(token)
    assert drawn == reference_tokens(PROMPT, GREEDY)


def test_a_carried_token_is_the_one_drawn_last_in_its_slot() -> None:
    runner = LatencyRunner.with_own_memory(16, 4)
    table = (9, 2, 15, 0, 7, 3, 11, 4)
    wanted = reference_tokens(PROMPT, GREEDY)

    async def steps() -> list[int | None]:
        asked = [runner.run(Batch((chunk(PROMPT, 0, table),)))]
        for position in range(len(PROMPT), len(PROMPT) + 5):
            asked.append(runner.run(Batch((replace(chunk((0,), position, table), carried=True),))))
        return [result.tokens[0] for result in await asyncio.gather(*asked)]

    assert asyncio.run(steps()) == wanted[:6]


def test_kv_of_another_sequence_shows_as_another_text() -> None:
    runner = LatencyRunner.with_own_memory(8, 4)
    right = step(runner, chunk(PROMPT, 0, (0, 1, 2, 3, 4, 5)))
    assert right == tuple(reference_tokens(PROMPT, GREEDY, 1))
    runner.memory[5] ^= 1
    spoilt = step(runner, chunk((99,), 21, (0, 1, 2, 3, 4, 5)))
    assert spoilt != tuple(reference_tokens((*PROMPT, 99), GREEDY, 1))


def test_the_seed_counts_only_with_a_temperature() -> None:
    def text(seed: int, temperature: float) -> list[int]:
        return reference_tokens(PROMPT, Sampling(max_tokens=30, temperature=temperature, seed=seed))

    assert text(1, 0.0) == text(2, 0.0)
    assert text(1, 1.0) == text(1, 1.0) != text(2, 1.0)


def test_end_tokens_come_at_their_rate_and_not_before_min_tokens() -> None:
    model = ToyModel(end_token=2, end_rate=0.05)
    lengths = []
    for seed in range(300):
        sampling = Sampling(max_tokens=400, min_tokens=5, seed=seed, stop_token_ids=(2,))
        tokens = reference_tokens(PROMPT, sampling, model=model)
        assert 2 not in tokens[:-1]
        lengths.append(len(tokens))
    assert min(lengths) == 6
    assert 20 < np.mean(lengths) < 30


def test_a_step_takes_what_the_model_of_its_time_says() -> None:
    model = LatencyModel(base_s=1.0, per_prompt_token_s=0.1, per_decode_s=0.01, per_context_token_s=0.001)
    prompt, decode = chunk(PROMPT, 10, (0,) * 8), chunk((1,), 99, (0,) * 25)
    assert model.step_s(Batch((prompt, decode))) == pytest.approx(1.0 + 2.1 + 0.01 + (31 + 100) / 1000)


def test_logprobs_come_with_the_tokens_that_ask() -> None:
    runner = LatencyRunner.with_own_memory(8, 4)
    asking = chunk((1,), 0, (0,), Sampling(max_tokens=1, logprobs=3))
    result = asyncio.run(runner.run(Batch((asking, chunk((1,), 0, (1,))))))
    first, second = result.logprobs
    assert second is None
    assert first is not None
    assert first.top[0] == (result.tokens[0], first.logprob)
    assert len({token for token, _ in first.top}) == 3


def test_memory_that_does_not_fit_is_refused() -> None:
    layout = LatencyRunner.layout_of(4)
    with pytest.raises(ValueError, match=r"uint8 \[blocks, 32\]"):
        LatencyRunner(np.zeros((4, 33), np.uint8), layout)
    with pytest.raises(ValueError, match="contiguous"):
        LatencyRunner(np.zeros((8, 32), np.uint8)[::2], layout)
    with pytest.raises(ValueError, match="layout"):
        LatencyRunner(np.zeros((4, 32), np.uint8), KvLayout(2, 1, 4, 4, "uint8"))
