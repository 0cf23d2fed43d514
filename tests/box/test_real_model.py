"""The demo model through 1 prefill + 1 decode says what it says alone, and what `transformers` says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from whole_fleet import Box, Memory

from engine.build import build_runner, plan_pool
from engine.runner import Runner
from engine.settings import EngineSettings
from fleet.ids import RequestId
from fleet.kv_layout import KvLayout
from fleet.model_files import resolve
from fleet.request import Sampling
from kv_transfer.settings import TransferSettings
from router.settings import CostSettings, RouterSettings

pytestmark = pytest.mark.model

NEW = 8
"""Tokens of each answer: one from prefill, the others from KV that was moved."""

LENGTHS = (5, 7, 15, 16, 17, 23, 31, 32, 33, 47, 64, 65, 90, 128, 129, 180, 250, 400, 700, 1500)

TEXTS = (
    "The river rises in the mountains and flows through three countries before it reaches the sea. ",
    "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n    return a * b\n\n",
    "In 1969, 2 men walked on the Moon; 12 had done so by 1972. Café, naïve, 日本語, Ελλάδα, 🙂. ",
    "Question: what is a cache? Answer: a place near at hand for what may be wanted again. ",
)

REMOTE = RouterSettings(cost=CostSettings(local_prefill_tokens=0, local_advantage=1e9))
LOCAL = RouterSettings(cost=CostSettings(local_prefill_tokens=1 << 20, local_advantage=0.0))


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve("smollm2").folder


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    chance = random.Random(1)
    found = []
    for number, length in enumerate(LENGTHS):
        text = "".join(chance.choice(TEXTS) for _ in range(length // 8 + 2))
        found.append(tokenizer.encode(f"{number}. {text}").ids[:length])
    # One that shares its beginning with a longer one, so that caches are hit on both sides.
    return [*found, [*found[-2][:500], *found[3]]]


@pytest.fixture(scope="module")
def reference(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=2
            )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def box_of(
    folder: Path,
    prefill: int,
    router: RouterSettings,
    blocks: int,
    transport: str,
    apart: bool = False,
    decode: int = 1,
) -> Box:
    settings = EngineSettings(
        block_size=16, max_batch=8, max_step_tokens=192, dtype="float32", device="cpu", threads=1
    )

    def replica(settings: EngineSettings) -> tuple[KvLayout, Callable[[Memory], Runner]]:
        layout, _ = plan_pool(folder, settings)
        return layout, lambda memory: build_runner(folder, settings, memory, apart=apart)

    return Box(
        prefill,
        decode,
        blocks=blocks,
        engine=settings,
        router=router,
        transfer=TransferSettings(transport=transport),
        replica=replica,
        real_links=True,
    )


async def ask_all(box: Box, prompts: list[list[int]], twice: bool = False) -> list[list[int]]:
    sampling = Sampling(max_tokens=NEW, temperature=0.0)
    answers = []
    for _ in range(2 if twice else 1):
        # All at once: batched, and chunked by the token budget of a step.
        asked = [
            box.ask(box.request(prompt, sampling, number + 1000 * len(answers)))
            for number, prompt in enumerate(prompts)
        ]
        for answer in await asyncio.gather(*asked):
            assert answer.error is None, answer.error
            answers.append(answer.tokens)
    return answers


@pytest.mark.parametrize("transport", ["ucx", "shm"])
def test_text_of_one_prefill_and_one_decode_is_the_reference(
    transport: str, folder: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    async def main() -> None:
        # The longest prompt alone takes 94 of 160 blocks: decode preempts and evicts.
        async with box_of(folder, 1, REMOTE, 160, transport) as box:
            assert await ask_all(box, prompts, twice=transport == "shm") == reference * (
                2 if transport == "shm" else 1
            )
            decode = box.workers["decode-0"].load().counters  # type: ignore[index]
            assert decode["local_prefills"] == 0
            assert decode["pulls_recomputed"] == 0
            assert decode["pulled_tokens"] > sum(LENGTHS) / 2

    asyncio.run(main())


def test_text_is_the_same_from_pools_in_a_device_of_their_own(
    folder: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    """On a CPU for want of a device: the same copies, between two memories of the host."""

    async def main() -> None:
        async with box_of(folder, 1, REMOTE, 160, "shm", apart=True) as box:
            assert await ask_all(box, prompts[:13], twice=True) == reference[:13] * 2
            decode = box.workers["decode-0"].load().counters  # type: ignore[index]
            assert decode["pulls"] > 13
            assert decode["local_prefills"] == 0

    asyncio.run(main())


@pytest.mark.parametrize(("transport", "apart"), [("shm", False), ("ucx", False), ("shm", True)])
def test_text_is_the_same_when_kv_goes_over_while_the_prompt_is_computed(
    transport: str, apart: bool, folder: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    async def main() -> None:
        async with box_of(folder, 1, REMOTE, 160, transport, apart=apart) as box:
            # One after another, of 3, 5 and 10 steps: something of them is pulled before the last step.
            numbers = [LENGTHS.index(length) for length in (400, 700, 1500)]
            for number in numbers:
                assert await ask_all(box, [prompts[number]]) == [reference[number]]
            decode = box.workers["decode-0"].load().counters  # type: ignore[index]
            assert decode["early_reservations"] == len(numbers)
            assert decode["pulled_early_blocks"] > 0
            assert decode["pulled_tokens"] == 400 + 700 + 1500
            assert decode["pulls_recomputed"] == 0

    asyncio.run(main())


@pytest.mark.parametrize(("transport", "apart"), [("shm", True), ("ucx", False)])
def test_text_is_the_same_when_a_beginning_comes_from_who_caches_it(
    transport: str, apart: bool, folder: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    async def main() -> None:
        async with box_of(folder, 0, LOCAL, 160, transport, apart, decode=2) as box:
            first = LENGTHS.index(700)
            assert await ask_all(box, [prompts[first]]) == [reference[first]]
            held, other = sorted(
                box.workers, key=lambda w: -box.workers[w].load().counters["computed_tokens"]
            )
            await box.until(lambda: box.router.index.blocks(held) >= 700 // 16)
            much = RequestId("much")
            # As far as the router knows, it has a long queue: the last prompt goes to the other one.
            box.router.roster.sent(held, much, 1_000_000, 0)
            assert await ask_all(box, prompts[-1:]) == reference[-1:]
            box.router.roster.settle(held, much)
            counters = box.workers[other].load().counters
            assert counters["borrowed_tokens"] == 496, "it shares 500 tokens with the first, 31 blocks"
            assert counters["computed_tokens"] == len(prompts[-1]) - 496 + NEW - 1

    asyncio.run(main())


def test_text_of_a_worker_that_prefills_for_itself_is_the_reference(
    folder: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    async def main() -> None:
        async with box_of(folder, 0, LOCAL, 160, "shm") as box:
            assert await ask_all(box, prompts) == reference
            decode = box.workers["decode-0"].load().counters  # type: ignore[index]
            assert decode["local_prefills"] == len(prompts)

    asyncio.run(main())
