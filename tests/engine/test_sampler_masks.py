"""Draws under a constraint: what the mask leaves, ends put off, and nothing for rows without one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from engine import sampler
from engine.bounds import GrammarSettings
from engine.grammar import Grammars, Matcher, Vocabulary
from engine.latency_runner import LatencyRunner
from engine.loop import Engine
from engine.settings import EngineSettings
from engine.words import Chunk, NewSequence, StepReport
from fleet.block_hash import HashKeys
from fleet.request import Constraint, ConstraintKind, FinishReason, Sampling

A, B, C, END, OTHER_END = 0, 1, 2, 3, 4
LETTERS = Vocabulary((b"a", b"b", b"c", b"", b"", b"ab"), (END,), 6)
GREEDY = Sampling(max_tokens=20, temperature=0.0)


def matcher(regex: str, generated: tuple[int, ...] = ()) -> Matcher:
    grammars = Grammars(LETTERS, GrammarSettings())
    return asyncio.run(grammars.matcher(Constraint(ConstraintKind.REGEX, regex), generated))


def chunk(sampling: Sampling, held_to: Matcher | None, made: int = 0) -> Chunk:
    return Chunk(0, (9,), 4 + made, (0,), True, sampling, prompt_length=5, matcher=held_to)


def draw(sampling: Sampling, held_to: Matcher | None, logits: list[float], made: int = 0) -> int | None:
    return sampler.draw(torch.tensor([logits]), [chunk(sampling, held_to, made)])[0][0]


WISHES = [9.0, 5.0, 4.0, 8.0, 7.0, 6.0]
"""`a`, the end, another end token, `ab`, `b`, `c`: in this order."""


def test_the_best_of_what_is_allowed_is_drawn() -> None:
    assert draw(GREEDY, None, WISHES) == A
    assert draw(GREEDY, matcher("[bc]+"), WISHES) == B
    assert draw(GREEDY, matcher("abc"), [0.0, 5.0, 4.0, 8.0, 7.0, 6.0]) == LETTERS.pieces.index(b"ab")
    assert draw(GREEDY, matcher("c"), WISHES) == C
    assert draw(GREEDY, matcher("a", (A,)), WISHES) == END


def test_random_draws_with_every_cut_stay_inside() -> None:
    for seed in range(50):
        for cuts in (
            {},
            {"top_k": 1},
            {"top_k": 3},
            {"top_p": 0.1},
            {"min_p": 0.9},
            {"top_k": 2, "top_p": 0.5},
        ):
            sampling = Sampling(max_tokens=9, temperature=2.0, seed=seed, **cuts)
            assert draw(sampling, matcher("[bc]"), WISHES) in (B, C)


def test_bias_moves_only_what_is_allowed() -> None:
    sampling = replace(GREEDY, logit_bias=((A, 100.0), (C, 50.0), (B, -100.0)))
    assert draw(sampling, matcher("[bc]"), WISHES) == C
    assert draw(replace(GREEDY, logit_bias=((B, -100.0),)), matcher("b"), WISHES) == B


def test_an_end_is_put_off_as_long_as_there_is_something_else() -> None:
    least = replace(GREEDY, min_tokens=5, stop_token_ids=(END,))
    wishes = [0.0, 1.0, 2.0, 50.0, 0.0, 0.0]
    assert draw(replace(least, min_tokens=0), matcher("b*", (B,)), wishes, made=1) == END
    assert draw(least, matcher("b*", (B,)), wishes, made=1) == B
    assert draw(least, matcher("b", (B,)), wishes, made=1) == END, "nothing may follow"
    unending = replace(GREEDY, ignore_eos=True)
    assert draw(unending, matcher("b*", (B,)), wishes, made=1) == B
    assert draw(unending, matcher("b", (B,)), wishes, made=1) == END
    # A stop token of the request's own that is the only way on.
    assert draw(replace(least, stop_token_ids=(C,)), matcher("bc", (B,)), wishes, made=1) == C
    for seed in range(30):
        warm = replace(least, temperature=2.0, seed=seed)
        assert draw(warm, matcher("b*", (B,)), wishes, made=1) == B


def test_rows_without_a_constraint_are_as_if_alone() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 6) * 3
    plain = [Sampling(max_tokens=9, temperature=1.0, seed=n, logprobs=2) for n in range(6)]
    alone, logprobs = sampler.draw(logits.clone(), [chunk(s, None) for s in plain])
    mixed = [chunk(s, matcher("[bc]+") if n % 2 else None) for n, s in enumerate(plain)]
    drawn, found = sampler.draw(logits.clone(), mixed)
    assert drawn[::2] == alone[::2]
    assert found[::2] == logprobs[::2]
    assert set(drawn[1::2]) <= {B, C}
    # Log-probabilities are those of the model, not of what was left to it.
    raw = torch.log_softmax(logits, dim=-1)
    for row in (1, 3, 5):
        token = drawn[row]
        assert token is not None
        assert found[row] is not None
        assert found[row].logprob == pytest.approx(float(raw[row, token]), abs=1e-5)
        assert found[row].top == logprobs[row].top  # type: ignore[union-attr]


def test_where_no_token_is_left_only_that_sequence_ends() -> None:
    """A vocabulary that cannot write what is demanded: `b`, then a letter it does not have."""
    stuck = matcher("bx", (B,))
    logits = torch.zeros(2, 6)
    assert sampler.draw(logits, [chunk(GREEDY, stuck), chunk(GREEDY, matcher("c"))])[0] == [None, C]

    async def main() -> None:
        ends: dict[str, tuple[FinishReason, str]] = {}
        whole = asyncio.Event()

        def sink(report: StepReport) -> None:
            ends.update({end.id: (end.finish, end.error) for end in report.finished})
            if len(ends) == 3:
                whole.set()

        grammars = Grammars(LETTERS, GrammarSettings())
        settings = EngineSettings(block_size=16, max_batch=4, max_step_tokens=64)
        engine = Engine(LatencyRunner.with_own_memory(64, 16), settings, sink, grammars.matcher)
        keys = HashKeys(engine.fingerprint.digest(), 16, "", "")
        running = asyncio.create_task(engine.run())
        for name, regex in (("stuck", "bx"), ("whole", "[bc]{3}"), ("long", "c*")):
            held_to = await engine.matcher(Constraint(ConstraintKind.REGEX, regex), ())
            sampling = replace(GREEDY, ignore_eos=name == "long")
            engine.add(NewSequence(name, (7, 8), sampling, keys, matcher=held_to))
        async with asyncio.timeout(30):
            await whole.wait()
        running.cancel()
        assert ends == {
            "stuck": (FinishReason.FAILED, "BadConstraint"),
            "whole": (FinishReason.STOP, ""),
            "long": (FinishReason.LENGTH, ""),
        }
        engine.validate(idle=True)

    asyncio.run(main())
