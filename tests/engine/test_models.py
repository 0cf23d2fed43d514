"""Each architecture computes what `transformers` does: alone, in chunks, mixed, and from a cached prefix."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.torch_runner import TorchRunner
from fleet.request import Sampling

VOCABULARY = 160
SEEN = Sampling(max_tokens=1 << 20, temperature=0, logprobs=VOCABULARY)
VARIANTS = [
    "mistral",
    "qwen2-late-window",
    "qwen3",
    "qwen3-windows",
    "gemma3",
    "smollm3",
    "smollm3-windows",
    "phi3",
    "phi3-longrope",
    "mixtral",
    "qwen3-moe",
    "qwen3-moe-normalised",
    "linear",
    "dynamic",
    "yarn",
    "yarn-magnitude",
]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(3, VOCABULARY), k=length)


def load(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def reference(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities `[tokens, vocabulary]`."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0], dim=-1)


def seen(sequence: Any) -> torch.Tensor:
    """All log-probabilities at each drawn position, `[drawn, vocabulary]`."""
    table = torch.full((len(sequence.drawn), VOCABULARY), torch.nan)
    for row, found in zip(table, sequence.logprobs, strict=True):
        for token, value in found.top:
            row[token] = value
    return table


def check(model: Any, sequence: Any) -> None:
    tokens = sequence.prompt + sequence.drawn
    expected = reference(model, tokens)[len(sequence.prompt) - 1 : -1]
    torch.testing.assert_close(seen(sequence), expected, atol=2e-3, rtol=1e-3)
    assert sequence.drawn == expected.argmax(dim=-1).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_architecture_is_the_reference(
    variant: str, small_model: Callable[[str], Path], small_runner: Callable[..., TorchRunner], drive: Any
) -> None:
    model = load(small_model(variant))
    driver = drive(small_runner(variant))
    together = [driver.add(prompt(length), 6, SEEN) for length in (1, 16, 60)]
    driver.run(together, 6)
    chunked = [driver.add(prompt(length, 1), 6, SEEN) for length in (40, 90)]
    driver.run(chunked, 6, chunk=17)
    longer = together[2].prompt + together[2].drawn + prompt(9)
    warm = driver.add(longer, 6, SEEN, after=together[2], shared=48)
    driver.run([warm], 6)
    for sequence in (*together, *chunked, warm):
        check(model, sequence)
