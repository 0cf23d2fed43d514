"""Drawing tokens: each setting does what it says, and frequencies are the probabilities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import noise, sampler
from engine.words import Chunk
from fleet.request import Sampling, TokenLogprobs

GREEDY = Sampling(max_tokens=100, temperature=0)
WARM = Sampling(max_tokens=100, temperature=1.0)
CPU = torch.device("cpu")


def chunk(
    sampling: Sampling, position: int = 10, history: Sequence[int] = (), prompt_length: int = 0
) -> Chunk:
    """The chunk whose next token is drawn at `position`."""
    return Chunk(0, (1,), position - 1, (0,), True, sampling, tuple(history), prompt_length)


def draw(logits: Any, chunks: Sequence[Chunk]) -> list[int]:
    tokens, _ = sampler.draw(torch.as_tensor(logits, dtype=torch.float32).clone(), chunks)
    return tokens


def many(logits: Sequence[float], sampling: Sampling, count: int = 20_000) -> Counter[int]:
    """Draws at `count` positions."""
    drawn: Counter[int] = Counter()
    for start in range(0, count, 500):
        rows = torch.tensor([logits]).repeat(500, 1)
        drawn.update(draw(rows, [chunk(sampling, start + row + 1) for row in range(500)]))
    return drawn


def chi_square(drawn: Counter[int], weights: Sequence[float]) -> float:
    """Pearson's statistic in standard deviations above its mean; unlikely tokens are pooled."""
    total, count = sum(weights), sum(drawn.values())
    cells = [(drawn[token], count * weight / total) for token, weight in enumerate(weights)]
    large = [(seen, wanted) for seen, wanted in cells if wanted >= 10]
    rest = [(seen, wanted) for seen, wanted in cells if wanted < 10]
    if rest and sum(wanted for _, wanted in rest) > 1:
        large.append((sum(seen for seen, _ in rest), sum(wanted for _, wanted in rest)))
    degrees = len(large) - 1
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in large)
    return (statistic - degrees) / math.sqrt(2 * degrees)


def softmax(logits: Sequence[float]) -> list[float]:
    return torch.softmax(torch.tensor(logits, dtype=torch.float64), dim=0).tolist()


LOGITS = [3.0 * math.sin(1.7 * token) for token in range(60)]


def test_greedy_is_the_largest() -> None:
    assert draw([[0, 3, 1], [5, 3, 1]], [chunk(GREEDY), chunk(GREEDY)]) == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_are_the_probabilities(temperature: float) -> None:
    drawn = many(LOGITS, replace(WARM, temperature=temperature, seed=5))
    assert chi_square(drawn, softmax([value / temperature for value in LOGITS])) < 4


def test_frequencies_over_seeds_at_one_position() -> None:
    rows = torch.tensor([LOGITS]).repeat(20_000, 1)
    drawn = Counter(draw(rows, [chunk(replace(WARM, seed=seed), 7) for seed in range(20_000)]))
    assert chi_square(drawn, softmax(LOGITS)) < 4


def test_next_draws_do_not_depend_on_the_last() -> None:
    """Pairs of neighbouring positions are as frequent as independence says."""
    logits = LOGITS[:6]
    rows = torch.tensor([logits]).repeat(40_000, 1)
    tokens = draw(rows, [chunk(replace(WARM, seed=3), position + 1) for position in range(40_000)])
    pairs = Counter(6 * a + b for a, b in zip(tokens[::2], tokens[1::2], strict=True))
    weights = softmax(logits)
    assert chi_square(pairs, [a * b for a in weights for b in weights]) < 4


def test_top_k_leaves_the_k_likeliest_in_proportion() -> None:
    drawn = many(LOGITS, replace(WARM, top_k=5, seed=1))
    likely = sorted(range(60), key=lambda token: -LOGITS[token])[:5]
    assert set(drawn) == set(likely)
    weights = [weight if token in likely else 0.0 for token, weight in enumerate(softmax(LOGITS))]
    assert chi_square(drawn, weights) < 4


def test_top_p_leaves_the_smallest_set_that_reaches_p() -> None:
    weights = [0.4, 0.3, 0.2, 0.07, 0.03]
    logits = [math.log(weight) for weight in weights]
    drawn = many(logits, replace(WARM, top_p=0.75, seed=2))
    assert chi_square(drawn, [0.4, 0.3, 0.2, 0, 0]) < 4
    assert set(drawn) == {0, 1, 2}
    assert set(many(logits, replace(WARM, top_p=0.69), 1000)) == {0, 1}
    assert set(many(logits, replace(WARM, top_p=0.01), 1000)) == {0}


def test_top_p_counts_what_top_k_left() -> None:
    logits = [math.log(weight) for weight in (0.4, 0.3, 0.2, 0.07, 0.03)]
    # Of the first two, 0.4 / 0.7 = 0.57 reaches a half; of all, 0.4 does not.
    assert set(many(logits, replace(WARM, top_k=2, top_p=0.5), 1000)) == {0}
    assert set(many(logits, replace(WARM, top_p=0.5), 1000)) == {0, 1}


def test_top_p_reaches_beyond_the_first_list() -> None:
    """A flat distribution over 5,000 tokens: 0.9 of it is far more than the list looked at first."""
    logits = [0.0001 * -token for token in range(5000)]
    weights = softmax(logits)
    reached, kept = 0.0, 0
    while reached < 0.9:
        reached += weights[kept]
        kept += 1
    drawn = many(logits, replace(WARM, top_p=0.9, seed=4), 4000)
    assert kept - 200 < max(drawn) < kept
    assert len(drawn) > 2000


def test_equal_logits_at_the_cut_all_stay() -> None:
    drawn = many([2.0, 1.0, 1.0, 1.0, 0.0], replace(WARM, top_k=2, seed=6), 2000)
    assert set(drawn) == {0, 1, 2, 3}
    assert len(many([1.0] * 2000, replace(WARM, top_k=1), 500)) > 400


def test_min_p_leaves_what_is_likely_beside_the_likeliest() -> None:
    logits = [math.log(weight) for weight in (0.5, 0.3, 0.15, 0.05)]
    assert set(many(logits, replace(WARM, min_p=0.2), 2000)) == {0, 1, 2}
    assert set(many(logits, replace(WARM, min_p=0.2, top_k=2), 2000)) == {0, 1}


def test_bias_moves_greedy_and_forbids() -> None:
    logits = [[1.0, 2.0, 3.0]]
    assert draw(logits, [chunk(replace(GREEDY, logit_bias=((0, 5.0),)))]) == [0]
    assert draw(logits, [chunk(replace(GREEDY, logit_bias=((2, -100.0),)))]) == [1]


def test_what_is_said_of_tokens_that_the_model_has_not_means_nothing() -> None:
    """As of a tokenizer with more tokens than the model: it must not end the step of everybody."""
    setting = replace(GREEDY, logit_bias=((3, 9.0), (-1, 9.0), (0, 5.0)), min_tokens=3, stop_token_ids=(7,))
    assert draw([[1.0, 2.0, 3.0]] * 2, [chunk(setting), chunk(GREEDY)]) == [0, 2]


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-39, 1e-46, 1e-300])
def test_next_to_no_temperature_is_none(temperature: float) -> None:
    for setting in (Sampling(1, temperature), Sampling(1, temperature, top_k=2)):
        assert draw([[0.0, 1.0, 5.0, 2.0]] * 2, [chunk(setting), chunk(GREEDY)]) == [2, 2]


def test_stop_tokens_wait_for_the_minimum_length() -> None:
    setting = replace(GREEDY, min_tokens=3, stop_token_ids=(2, 1))
    logits = [[1.0, 2.0, 3.0]] * 3
    made = [chunk(setting, position, prompt_length=10) for position in (10, 12, 13)]
    assert draw(logits, made) == [0, 0, 2]


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    history = [2, 2, 2, 1, 1, 0]
    logits = [[1.0, 1.9, 3.0]]
    frequent = replace(GREEDY, frequency_penalty=1.0)
    assert draw(logits, [chunk(frequent, 6, history, prompt_length=3)]) == [2]
    assert draw(logits, [chunk(frequent, 6, history, prompt_length=0)]) == [0]
    present = replace(GREEDY, presence_penalty=1.5)
    assert draw([[1.0, 1.9, 3.0]], [chunk(present, 6, history, prompt_length=0)]) == [2]
    assert draw([[1.0, 1.9, 1.0]], [chunk(present, 6, [1, 1], prompt_length=0)]) == [0]


def test_repetition_counts_the_prompt_too_and_works_below_zero() -> None:
    setting = replace(GREEDY, repetition_penalty=2.0)
    assert draw([[1.0, 1.5, 0.0]], [chunk(setting, 6, [1], prompt_length=1)]) == [0]
    assert draw([[-1.0, -0.9, -9.0]], [chunk(setting, 6, [1], prompt_length=1)]) == [0]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([LOGITS, LOGITS, LOGITS])
    expected = torch.log_softmax(logits[0].double(), dim=0)
    setting = replace(WARM, temperature=0.3, logit_bias=((5, 90.0),), logprobs=3)
    drawn, found = sampler.draw(
        logits.clone(), [chunk(setting), chunk(GREEDY), chunk(replace(GREEDY, logprobs=0))]
    )
    best = expected.topk(3)
    first = found[0]
    assert isinstance(first, TokenLogprobs)
    assert drawn[0] == 5
    assert first.logprob == pytest.approx(float(expected[5]), abs=1e-5)
    assert [token for token, _ in first.top] == best.indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert found[1] is None
    assert found[2] == TokenLogprobs(pytest.approx(float(best.values[0]), abs=1e-5), ())


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error_not_a_token(broken: float) -> None:
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        draw([[0, 3, 1], [5, broken, 1]], [chunk(GREEDY), chunk(GREEDY)])


ANY = st.builds(
    Sampling,
    max_tokens=st.just(100),
    min_tokens=st.integers(0, 20),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.1, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 7, 300, 2000]),
    min_p=st.sampled_from([0.0, 0.01, 1.0]),
    seed=st.integers(-(2**63), 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    logit_bias=st.sampled_from([(), ((3, 2.0), (4, -50.0))]),
    stop_token_ids=st.just((2,)),
    logprobs=st.sampled_from([-1, 0, 4]),
)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(ANY, min_size=2, max_size=5), seed=st.integers(0, 99))
def test_a_row_draws_the_same_whatever_stands_beside_it(rows: list[Sampling], seed: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (len(rows), 900))).float()
    # Halves, as a head in bfloat16 gives: many equal values.
    logits = (logits * 2).round() / 2
    chunks = [chunk(row, 30 + n, [3, 4, 5, 5], prompt_length=28) for n, row in enumerate(rows)]
    together, beside = sampler.draw(logits.clone(), chunks)
    for row, part in enumerate(chunks):
        alone, found = sampler.draw(logits[row : row + 1].clone(), [part])
        assert alone == [together[row]]
        assert found == [beside[row]]


def test_noise_is_a_function_of_seed_position_and_token_alone() -> None:
    tokens = torch.arange(1000, dtype=torch.int32)
    table = noise.gumbel(noise.keys([(1, 2), (3, 4)], CPU), tokens)
    alone = noise.gumbel(noise.keys([(3, 4)], CPU), tokens[500:600])
    torch.testing.assert_close(table[1:, 500:600], alone, atol=0, rtol=0)
    # Pinned: a worker of another version must draw the same.
    assert table[0, :3].tolist() == pytest.approx(PINNED, abs=1e-5)
    assert noise.keys([(-1, 0)], CPU).equal(noise.keys([(2**64 - 1, 0)], CPU))


PINNED = [-0.23277, -0.860708, -0.458802]


def test_noise_has_the_gumbel_distribution() -> None:
    """Kolmogorov's test against exp(-exp(-x)), along tokens, positions and seeds."""
    along_tokens = noise.gumbel(noise.keys([(5, 6)], CPU), torch.arange(50_000, dtype=torch.int32))
    one = torch.tensor([77], dtype=torch.int32)
    along_positions = noise.gumbel(noise.keys([(5, position) for position in range(50_000)], CPU), one)
    along_seeds = noise.gumbel(noise.keys([(seed, 9) for seed in range(50_000)], CPU), one)
    for sample in (along_tokens, along_positions, along_seeds):
        values = sample.flatten().double().sort().values
        assert bool(torch.isfinite(values).all())
        expected = torch.exp(-torch.exp(-values))
        ranks = torch.arange(1, len(values) + 1, dtype=torch.float64) / len(values)
        assert float((ranks - expected).abs().max()) * math.sqrt(len(values)) < 1.95  # p about 0.001


def test_a_draw_is_the_largest_logit_plus_its_noise_in_rows_of_any_width() -> None:
    """Whatever is left out because it could not win, or is computed elsewhere than in torch."""
    generator = torch.Generator().manual_seed(3)
    for width in (1, 15, 16, 1003, 20000):
        logits = torch.randn(24, width, generator=generator) * 4
        chunks = [
            Chunk(0, (1,), 5 + row, (0,), True, Sampling(max_tokens=1, temperature=heat, seed=row - 9))
            for row, heat in enumerate([0.2, 0.7, 1.0, 2.0] * 6)
        ]
        keys = noise.keys([(chunk.sampling.seed, chunk.start + 1) for chunk in chunks], logits.device)
        heat = torch.tensor([chunk.sampling.temperature for chunk in chunks]).unsqueeze(1)
        wanted = logits / heat + noise.gumbel(keys, torch.arange(width, dtype=torch.int32))
        drawn, _ = sampler.draw(logits.clone(), chunks)
        picked = wanted.gather(1, torch.tensor(drawn).unsqueeze(1))
        torch.testing.assert_close(picked, wanted.max(dim=1, keepdim=True).values, atol=1e-4, rtol=0)
