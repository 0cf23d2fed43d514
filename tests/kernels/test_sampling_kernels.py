"""The device draws the tokens that `engine.sampler` draws: greedy, by temperature, cut, among ties."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from engine import noise, sampler
from engine.kernels import reference
from engine.kernels.sampling import draw_tokens
from engine.kernels.tuning import INTERPRETED
from engine.words import Chunk
from fleet.request import Sampling

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""The interpreter's numpy warns of infinities; a device does not."""

VOCABULARIES = (7, 300) if INTERPRETED else (7, 500, 49152, 128256)


def columns(chunks: list[Chunk], device: torch.device) -> tuple[Tensor, ...]:
    samplings = [chunk.sampling for chunk in chunks]
    least = [math.log(s.min_p) if s.min_p else -math.inf for s in samplings]
    return (
        torch.tensor([s.temperature for s in samplings], device=device),
        torch.tensor([s.top_k for s in samplings], dtype=torch.int32, device=device),
        torch.tensor([s.top_p for s in samplings], device=device),
        torch.tensor(least, device=device),
        noise.keys([(chunk.sampling.seed, chunk.start + len(chunk.tokens)) for chunk in chunks], device),
    )


def chunk(number: int, **asked: float) -> Chunk:
    return Chunk(number, (1,), 10 + number, (0,), True, Sampling(8, seed=number * 77, **asked))  # type: ignore[arg-type]


ASKED: list[dict[str, float]] = [
    {"temperature": heat, "top_k": k, "top_p": p, "min_p": least}
    for heat, k, p, least in product((0.0, 0.3, 1.0, 2.0), (0, 1, 4, 10**6), (1.0, 0.9, 0.2), (0.0, 0.1))
]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("spread", [0.5, 6.0])
def test_tokens_are_those_of_the_sampler(vocabulary: int, spread: float, device: torch.device) -> None:
    asked = ASKED[::7] if INTERPRETED else ASKED
    chunks = [chunk(number, **one) for number, one in enumerate(asked)]
    chance = torch.Generator().manual_seed(vocabulary)
    logits = spread * torch.randn(len(chunks), vocabulary, generator=chance)
    given = columns(chunks, device)
    tokens, best, sums = draw_tokens(logits.to(device), *given)
    wanted, _ = sampler.draw(logits.clone(), chunks)
    assert tokens.tolist() == wanted
    again, most, total = reference.draw_tokens(logits.to(device), *given)
    assert again.tolist() == wanted
    torch.testing.assert_close(best, most)
    torch.testing.assert_close(sums, total)


def test_all_tokens_of_the_value_at_the_cut_stay(device: torch.device) -> None:
    logits = torch.zeros(12, 12)
    logits[:, ::2] = 1.0
    chunks = [chunk(number, top_k=2 + number % 4, top_p=(1.0, 0.5)[number % 2]) for number in range(12)]
    tokens = draw_tokens(logits.to(device), *columns(chunks, device))[0].tolist()
    assert tokens == sampler.draw(logits.clone(), chunks)[0]
    assert {token % 2 for token in tokens} == {0}
    assert len(set(tokens)) > 3


def test_forbidden_tokens_are_never_drawn(device: torch.device) -> None:
    logits = torch.randn(10, 300, generator=torch.Generator().manual_seed(1))
    logits[:, torch.arange(300) % 100 != 5] = -torch.inf
    chunks = [chunk(number, top_k=(0, 9)[number % 2], temperature=3.0) for number in range(10)]
    tokens = draw_tokens(logits.to(device), *columns(chunks, device))[0].tolist()
    assert tokens == sampler.draw(logits.clone(), chunks)[0]
    assert set(tokens) <= {5, 105, 205}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_told(bad: float, device: torch.device) -> None:
    logits = torch.zeros(3, 100)
    logits[1, 70] = bad
    best = draw_tokens(logits.to(device), *columns([chunk(i) for i in range(3)], device))[1]
    assert torch.isfinite(best).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="float32"):
        draw_tokens(logits.half(), *columns([chunk(0)], device))


def test_what_no_row_asks_for_is_left_out(device: torch.device) -> None:
    logits = torch.randn(4, 90, generator=torch.Generator().manual_seed(3)).to(device)
    greedy = columns([chunk(i, temperature=0.0) for i in range(4)], device)
    assert draw_tokens(logits, *greedy, random=False)[0].tolist() == logits.argmax(dim=-1).tolist()
    warm = columns([chunk(i) for i in range(4)], device)
    assert torch.equal(draw_tokens(logits, *warm, cut=False)[0], draw_tokens(logits, *warm)[0])


def test_noise_is_that_of_the_engine_where_it_matters_most(device: torch.device) -> None:
    """Equal logits: the noise alone decides, and its largest values come of uniforms next to 1."""
    vocabulary = 2000 if INTERPRETED else 128256
    chunks = [chunk(number) for number in range(6 if INTERPRETED else 64)]
    logits = torch.zeros(len(chunks), vocabulary)
    tokens = draw_tokens(logits.to(device), *columns(chunks, device))[0].tolist()
    assert tokens == sampler.draw(logits, chunks)[0]


def test_the_sampler_says_the_same_by_kernels(device: torch.device) -> None:
    """With log-probabilities, a bias, a penalty and an end that is put off, which come before the draw."""
    chunks = [
        chunk(0, temperature=0.0, logprobs=3),
        chunk(1, top_k=5),
        Chunk(2, (1,), 10, (0,), True, Sampling(8, seed=5, logit_bias=((7, 4.0),), min_p=0.05)),
        Chunk(3, (1,), 10, (0,), True, Sampling(8, min_tokens=5, stop_token_ids=(3,)), prompt_length=9),
        Chunk(4, (4,), 1, (0,), True, Sampling(8, repetition_penalty=1.5), history=(9, 4), prompt_length=1),
    ]
    logits = torch.randn(5, 200, generator=torch.Generator().manual_seed(4))
    found, probabilities = sampler.draw(logits.to(device), chunks, kernels=True)
    wanted, expected = sampler.draw(logits.clone(), chunks)
    assert found == wanted
    assert [p and p.logprob for p in probabilities] == pytest.approx([p and p.logprob for p in expected])
    bad = logits.clone()
    bad[3, 0] = math.nan
    with pytest.raises(ValueError, match=r"not finite numbers, in rows \[3\]"):
        sampler.draw(bad.to(device), chunks, kernels=True)
