"""What the torch runner computes is what `transformers` computes, however the work is cut and mixed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity import SEEN, check, load, prompt, reference

from engine.build import build_runner
from engine.loop import Engine
from engine.settings import EngineSettings
from engine.torch_runner import TorchRunner
from engine.words import Finished, NewSequence, StepReport
from fleet.block_hash import HashKeys
from fleet.model_files import resolve
from fleet.request import Sampling

GREEDY = Sampling(max_tokens=1 << 20, temperature=0)


def test_prompts_longer_than_a_block_of_scores(
    small_model: Callable[[str], Path], small_runner: Callable[..., TorchRunner], drive: Any
) -> None:
    driver = drive(small_runner())
    model = load(small_model("smollm"))
    whole, cut = (driver.add(prompt(700), 3, SEEN) for _ in range(2))
    driver.run([whole], 3)
    driver.run([cut], 3, chunk=200)
    check(model, whole)
    check(model, cut)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    chunk=st.integers(1, 70),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_mixed_batches_of_chunks_and_decodes(
    lengths: list[int],
    chunk: int,
    block_size: int,
    small_model: Callable[[str], Path],
    small_runner: Callable[..., TorchRunner],
    drive: Any,
) -> None:
    driver = drive(small_runner(block_size=block_size))
    model = load(small_model("smollm"))
    sequences = [driver.add(prompt(length, seed), 4, SEEN) for seed, length in enumerate(lengths)]
    driver.run(sequences, 4, chunk)
    for sequence in sequences:
        check(model, sequence)


def test_more_decodes_than_one_gather_holds(
    small_model: Callable[[str], Path], small_runner: Callable[..., TorchRunner], drive: Any
) -> None:
    # Blocks of 1,024 tokens make a page of 256 KiB, so that 16 sequences fill a group.
    driver = drive(small_runner(block_size=1024, kv_memory_bytes=40 << 20))
    sequences = [driver.add(prompt(1 + seed % 7, seed), 3, SEEN) for seed in range(40)]
    driver.run(sequences, 3)
    model = load(small_model("smollm"))
    for sequence in sequences:
        check(model, sequence)


def test_a_cached_prefix_gives_what_a_cold_prompt_gives(
    small_model: Callable[[str], Path], small_runner: Callable[..., TorchRunner], drive: Any
) -> None:
    driver = drive(small_runner())
    first = driver.add(prompt(50), 4, SEEN)
    driver.run([first], 4)
    longer = first.prompt + first.drawn + prompt(9)
    warm = driver.add(longer, 4, SEEN, after=first, shared=48)
    driver.run([warm], 4)
    assert warm.blocks[:3] == first.blocks[:3]
    check(load(small_model("smollm")), warm)


def test_old_bytes_in_the_pool_change_nothing(
    small_model: Callable[[str], Path], small_runner: Callable[..., TorchRunner], drive: Any
) -> None:
    """Freed blocks keep what was in them; even NaN there must not reach a sequence that takes them next."""
    runner = small_runner()
    runner._pool.values.fill_(torch.nan)
    driver = drive(runner)
    sequences = [driver.add(prompt(length), 20, SEEN) for length in (3, 17, 40)]
    driver.run(sequences, 20, chunk=11)
    model = load(small_model("smollm"))
    for sequence in sequences:
        check(model, sequence)


def test_a_step_in_which_nothing_is_drawn(small_runner: Callable[..., TorchRunner], drive: Any) -> None:
    driver = drive(small_runner())
    sequence = driver.add(prompt(30), 1)
    driver.step([sequence], chunk=10)
    assert sequence.drawn == []
    driver.run([sequence], 1)
    assert len(sequence.drawn) == 1


def test_a_seeded_draw_is_the_same_alone_in_a_batch_in_chunks_and_after_a_move(
    small_runner: Callable[..., TorchRunner], drive: Any
) -> None:
    warm = Sampling(max_tokens=99, temperature=0.8, seed=7)
    kinds = [warm, replace(warm, top_p=0.9, seed=8), replace(warm, top_k=20, min_p=0.01, seed=-9)]

    def sequences(driver: Any) -> list[Any]:
        return [driver.add(prompt(20, seed), 12, kinds[seed % 3]) for seed in range(6)]

    driver = drive(small_runner())
    together = driver.run(sequences(driver), 12)
    chunked = driver.run(sequences(driver), 12, chunk=7)
    alone = [driver.run([sequence], 12)[0] for sequence in sequences(driver)]
    assert together == chunked == alone
    assert len({tuple(drawn) for drawn in together}) == 6
    # Another runner that is told the first five tokens draws the other seven.
    elsewhere = drive(small_runner(block_size=8), seed=1)
    moved = sequences(elsewhere)
    for sequence, drawn in zip(moved, together, strict=True):
        sequence.drawn = drawn[:5]
        sequence.logprobs = [None] * 5
    assert elsewhere.run(moved, 12) == together


def test_through_the_engine_preempted_and_from_its_prefix_cache(
    small_model: Callable[[str], Path], small_runner: Callable[..., TorchRunner]
) -> None:
    """A pool of 24 blocks for sequences that want 41: some are preempted, and the second round finds KV."""
    runner = small_runner(kv_memory_bytes=24 * 6144)
    model = load(small_model("smollm"))
    prompts = [prompt(length, length) for length in (90, 40, 75, 33, 64, 100)]
    expected = []
    for tokens in prompts:
        answer: list[int] = []
        for _ in range(24):
            answer.append(int(reference(model, tokens + answer)[-1].argmax()))
        expected.append(answer)
    drawn: dict[str, list[int]] = {}
    finished: dict[str, Finished] = {}

    async def serve() -> None:
        done = asyncio.Event()

        def hear(report: StepReport) -> None:
            for token in report.drawn:
                drawn.setdefault(token.id, []).append(token.token)
            finished.update({end.id: end for end in report.finished})
            if len(finished) % len(prompts) == 0 and report.finished:
                done.set()

        settings = EngineSettings(kv_memory_bytes=24 * 6144, max_batch=8, max_step_tokens=48)
        engine = Engine(runner, settings, hear)
        running = asyncio.create_task(engine.run())
        keys = HashKeys(engine.fingerprint.digest(), runner.layout.block_size)
        for turn in "ab":
            done.clear()
            for number, tokens in enumerate(prompts):
                sampling = Sampling(max_tokens=24, temperature=0)
                engine.add(NewSequence(f"{turn}{number}", tuple(tokens), sampling, keys))
            await asyncio.wait_for(done.wait(), 60)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        engine.validate(idle=True)
        assert engine.load().counters["preemptions"] > 0
        await runner.close()

    asyncio.run(serve())
    for turn in "ab":
        assert [drawn[f"{turn}{number}"] for number in range(len(prompts))] == expected
    assert sum(finished[f"b{number}"].cached_tokens for number in range(len(prompts))) > 0


# The demo model -------------------------------------------------------------------------------------------

TEXTS = [
    "Hi!",
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5, 6,",
    "Water boils at 100 degrees because",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the largest planet?\nA:",
    "Les élèves français étudient à l'école, 日本語も少し。",
    "SELECT name, price FROM products WHERE",
    "The three primary colours are red,",
    "In 1969, Neil Armstrong",
]
STORY = (
    "The lighthouse keeper walked down to the harbour each morning at 6:45, counted the {n} boats and wrote "
    "their names into a ledger. On day {n} of the winter a stranger asked him why he kept count at all. "
)
LONG = [40, 75, 128, 129, 200, 256, 333, 512, 777, 1500]


@pytest.fixture(scope="module")
def demo_folder() -> Path:
    return resolve("smollm2").folder


@pytest.fixture(scope="module")
def demo_prompts(demo_folder: Path) -> list[list[int]]:
    """22 prompts of 1 to 1,500 tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_folder)
    story = tokenizer("".join(STORY.format(n=n) for n in range(60)))["input_ids"]
    short = [tokenizer(text)["input_ids"] for text in TEXTS]
    return short + [story[17 * n : 17 * n + length] for n, length in enumerate(LONG)]


NEW = 16


@pytest.fixture(scope="module")
def expected(demo_folder: Path, demo_prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens by `transformers` in float32."""
    model = load(demo_folder)
    answers = []
    with torch.inference_mode():
        for tokens in demo_prompts:
            output = model.generate(
                torch.tensor([tokens]),
                attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
            )
            answers.append(output[0, len(tokens) :].tolist())
    return answers


@pytest.fixture(scope="module")
def demo_runner(demo_folder: Path) -> TorchRunner:
    settings = EngineSettings(dtype="float32", device="cpu", kv_memory_bytes=1 << 29)
    runner = build_runner(demo_folder, settings)
    assert isinstance(runner, TorchRunner)
    return runner


@pytest.mark.model
def test_demo_model_greedy_tokens_are_the_reference_in_chunks_and_mixed_batches(
    demo_runner: TorchRunner, demo_prompts: list[list[int]], expected: list[list[int]], drive: Any
) -> None:
    driver = drive(demo_runner)
    sequences = [driver.add(tokens, NEW) for tokens in demo_prompts]
    assert driver.run(sequences, NEW, chunk=150) == expected


@pytest.mark.model
def test_demo_model_alone_and_from_a_cached_prefix(
    demo_runner: TorchRunner, demo_prompts: list[list[int]], expected: list[list[int]], drive: Any
) -> None:
    driver = drive(demo_runner, seed=3)
    for tokens, answer in list(zip(demo_prompts, expected, strict=True))[::5]:
        alone = driver.add(tokens, NEW)
        assert driver.run([alone], NEW) == [answer]
        cached = driver.add(tokens, NEW, after=alone, shared=(len(tokens) - 1) // 16 * 16)
        assert driver.run([cached], NEW) == [answer]


@pytest.mark.model
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_demo_model_in_bfloat16_chooses_what_the_reference_is_sure_of(
    weights: str,
    demo_folder: Path,
    demo_prompts: list[list[int]],
    expected: list[list[int]],
    drive: Any,
) -> None:
    """Told the reference's tokens, it draws the same next one wherever the reference prefers it clearly: by
    0.3 in bfloat16, by 1.0 with int8 weights; and its logits are near."""
    model = load(demo_folder)
    settings = EngineSettings(dtype="bfloat16", device="cpu", kv_memory_bytes=1 << 27, weights=weights)
    driver = drive(build_runner(demo_folder, settings))
    sure = 0.3 if weights == "auto" else 1.0
    best = replace(GREEDY, logprobs=5)
    compared, difference = 0, []
    for tokens, answer in list(zip(demo_prompts, expected, strict=True))[::4]:
        sequence = driver.add(tokens, NEW, best)
        told = reference(model, tokens + answer)[len(tokens) - 1 : -1]
        top = told.topk(2, dim=-1).values
        margins = (top[:, 0] - top[:, 1]).tolist()
        for place, (token, margin) in enumerate(zip(answer, margins, strict=True)):
            driver.step([sequence])
            if margin > sure:
                compared += 1
                assert sequence.drawn[-1] == token, (place, margin)
            difference += [
                abs(value - float(told[place, other])) for other, value in sequence.logprobs[-1].top
            ]
            sequence.drawn[-1] = token
    assert compared > 50
    assert sum(difference) / len(difference) < (0.05 if weights == "auto" else 0.2)
