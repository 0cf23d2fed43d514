"""Every way to draw, through router, workers and engine, on a small random model: prefilled elsewhere and
locally, beside plain requests whose text must not change."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from whole_fleet import Answer, Box, Memory

from engine.build import build_runner, plan_pool
from engine.runner import Runner
from engine.settings import EngineSettings
from fleet.kv_layout import KvLayout
from fleet.request import FinishReason, Sampling
from kv_transfer.settings import TransferSettings
from router.settings import CostSettings, RouterSettings

REMOTE = RouterSettings(cost=CostSettings(local_prefill_tokens=0, local_advantage=1e9))
LOCAL = RouterSettings(cost=CostSettings(local_prefill_tokens=1 << 20, local_advantage=0.0))
PATHS = pytest.mark.parametrize("router", [REMOTE, LOCAL], ids=["remote", "local"])

VOCABULARY = 160
END = 2
PROMPTS = [[random.Random(n).randrange(3, VOCABULARY) for _ in range(5 + 23 * n)] for n in range(4)]
COUNTS = ((-1, -1), (0, 0), (3, 5), (-1, 2), (4, -1))
"""Log-probabilities asked for: of the answer, of the prompt."""
GREEDY = Sampling(max_tokens=12, temperature=0.0)
WARM = Sampling(max_tokens=12, temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random Llama, and its folder."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    torch.manual_seed(1)
    network = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, values in network.named_parameters():
            values.normal_(1.0 if "norm" in name else 0.0, 0.3)
    folder = tmp_path_factory.mktemp("network")
    network.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return network.eval(), folder


MakeBox = Callable[[RouterSettings], Box]
Ask = Callable[..., list[Answer]]


@pytest.fixture
def make_box(network: tuple[Any, Path]) -> MakeBox:
    def replica(settings: EngineSettings) -> tuple[KvLayout, Callable[[Memory], Runner]]:
        layout, _ = plan_pool(network[1], settings)
        return layout, lambda memory: build_runner(network[1], settings, memory)

    def make(router: RouterSettings) -> Box:
        return Box(
            0 if router is LOCAL else 1,
            1,
            blocks=96,
            # Few tokens a step, so that prompts come in chunks and share steps with others' decodes.
            engine=EngineSettings(
                block_size=16, max_batch=16, max_step_tokens=40, dtype="float32", device="cpu"
            ),
            router=router,
            transfer=TransferSettings(transport="shm"),
            replica=replica,
            real_links=True,
        )

    return make


@pytest.fixture
def ask(make_box: MakeBox) -> Ask:
    """Answers to (prompt, sampling) pairs, all at once, of a fleet of their own."""

    async def main(
        router: RouterSettings, asked: Sequence[tuple[list[int], Sampling]], times: int
    ) -> list[Answer]:
        answers: list[Answer] = []
        async with make_box(router) as box:
            for turn in range(times):
                requests = [
                    box.request(prompt, sampling, number + 1000 * turn)
                    for number, (prompt, sampling) in enumerate(asked)
                ]
                answers += await asyncio.gather(*(box.ask(request) for request in requests))
        for answer in answers:
            assert answer.error is None, answer.error
        return answers

    def run(router: RouterSettings, asked: Any, times: int = 1) -> list[Answer]:
        return asyncio.run(main(router, asked, times))

    return run


def plain(network: Any, prompt: list[int], count: int) -> list[int]:
    """What the reference implementation says, greedily."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return list(out[0, len(prompt) :].tolist())


def scores(network: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities after each token, `[tokens, vocabulary]`."""
    with torch.inference_mode():
        return torch.log_softmax(network(torch.tensor([tokens])).logits[0].float(), dim=-1)


def repeats(tokens: list[int]) -> int:
    return len(tokens) - len(set(tokens))


@PATHS
def test_each_way_to_draw_beside_plain_requests(
    router: RouterSettings, ask: Ask, network: tuple[Any, Path]
) -> None:
    prompt = PROMPTS[2]
    said = plain(network[0], prompt, 12)
    first = scores(network[0], prompt)[-1]
    ranked = first.argsort(descending=True).tolist()
    ways: dict[str, Sampling] = {
        "warm": WARM,
        "warm again": WARM,
        "another seed": replace(WARM, seed=8),
        "top_k 1": replace(WARM, top_k=1),
        "tiny top_p": replace(WARM, top_p=1e-6),
        "min_p 1": replace(WARM, min_p=1.0),
        "top_k 3": replace(WARM, top_k=3, max_tokens=1),
        "bias": replace(GREEDY, logit_bias=((99, 100.0),)),
        "bias warm": replace(WARM, logit_bias=((99, 100.0),)),
        "forbidden": replace(GREEDY, logit_bias=tuple((token, -100.0) for token in set(said))),
        "presence": replace(GREEDY, presence_penalty=2.0),
        "frequency": replace(GREEDY, frequency_penalty=2.0, logit_bias=((99, 8.0),)),
        "no frequency": replace(GREEDY, logit_bias=((99, 8.0),)),
        "repetition": replace(GREEDY, repetition_penalty=10.0),
        "stop": replace(GREEDY, stop_token_ids=(said[4],)),
        "stop later": replace(GREEDY, stop_token_ids=(said[4],), min_tokens=8),
        "one": replace(GREEDY, max_tokens=1),
        "logprobs": replace(GREEDY, logprobs=3),
        "all": replace(WARM, top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.5,
                       repetition_penalty=1.1, logit_bias=((5, 1.0),), stop_token_ids=(3,), min_tokens=2,
                       logprobs=2, prompt_logprobs=1),
    }  # fmt: skip
    asked = [(prompt, sampling) for sampling in ways.values()]
    others = [(other, GREEDY) for other in PROMPTS] + [(other, WARM) for other in PROMPTS]
    alone = ask(router, others)
    answers = ask(router, asked + others)
    for apart, beside in zip(alone, answers[len(asked) :], strict=True):
        assert apart.tokens == beside.tokens
    for answer, other in zip(alone, PROMPTS, strict=False):
        assert answer.tokens == plain(network[0], other, 12)
    tokens = {name: answer.tokens for name, answer in zip(ways, answers, strict=False)}
    ends = {name: answer.end for name, answer in zip(ways, answers, strict=False)}
    assert tokens["warm"] == tokens["warm again"] != tokens["another seed"]
    assert tokens["top_k 1"] == tokens["tiny top_p"] == tokens["min_p 1"] == said
    assert tokens["top_k 3"][0] in ranked[:3]
    assert tokens["bias"] == tokens["bias warm"] == [99] * 12
    assert not set(tokens["forbidden"]) & set(said)
    assert repeats(tokens["presence"]) <= repeats(said)
    assert tokens["frequency"].count(99) < tokens["no frequency"].count(99)
    assert not set(tokens["repetition"]) & set(prompt)
    assert tokens["stop"] == said[: said.index(said[4]) + 1]
    assert ends["stop"] is not None
    assert ends["stop"].finish is FinishReason.STOP
    assert len(tokens["stop later"]) >= 8
    assert said[4] not in tokens["stop later"][:8]
    assert tokens["one"] == said[:1]
    assert ends["one"] is not None
    assert ends["one"].finish is FinishReason.LENGTH
    assert tokens["logprobs"] == said


def test_seeded_text_is_the_same_wherever_it_is_made(ask: Ask) -> None:
    """And the second time, from the prefix cache; and each of many answers to one prompt is another one."""
    asked = [(prompt, replace(WARM, seed=seed)) for prompt in PROMPTS for seed in range(3)]
    remote = [answer.tokens for answer in ask(REMOTE, asked, times=2)]
    local = [answer.tokens for answer in ask(LOCAL, asked)]
    assert remote == local * 2
    assert len({tuple(tokens) for tokens in local}) == len(local)


@PATHS
def test_logprobs_of_prompt_and_answer_are_those_of_the_reference(
    router: RouterSettings, network: tuple[Any, Path], make_box: MakeBox
) -> None:
    async def main() -> list[Answer]:
        found = []
        async with make_box(router) as box:
            for turn in range(2):  # The second time all of it is in the prefix cache.
                answers = []
                for number, prompt in enumerate([*PROMPTS, [7]]):
                    for kind, counts in enumerate(COUNTS):
                        sampling = replace(GREEDY, logprobs=counts[0], prompt_logprobs=counts[1])
                        request = box.request(prompt, sampling, 10_000 * turn + 100 * number + kind)
                        answers.append(box.ask(request))
                found += await asyncio.gather(*answers)
        return found

    kinds = [(prompt, counts) for prompt in [*PROMPTS, [7]] for counts in COUNTS] * 2
    for answer, (prompt, counts) in zip(asyncio.run(main()), kinds, strict=True):
        truth = scores(network[0], prompt + answer.tokens)
        rows = [(answer.scores, counts[1], truth[:-1], prompt[1:])]
        rows.append((answer.logprobs, counts[0], truth[len(prompt) - 1 :], answer.tokens))
        for got, count, values, tokens in rows:
            if count < 0:
                assert not any(got)
                continue
            assert len(got) == len(tokens)
            for at, (item, token) in enumerate(zip(got, tokens, strict=True)):
                assert item.logprob == pytest.approx(float(values[at, token]), abs=2e-4)
                best = values[at].topk(count)
                assert [value for _, value in item.top] == pytest.approx(best.values.tolist(), abs=2e-4)
                for other, value in item.top:
                    assert value == pytest.approx(float(values[at, other]), abs=2e-4)
