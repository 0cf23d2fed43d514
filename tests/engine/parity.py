"""What `transformers` says of tiny models, and what a runner said, side by side."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from fleet.request import Sampling

VOCABULARY = 160
"""Of `small_model`."""
SEEN = Sampling(max_tokens=1 << 20, temperature=0, logprobs=VOCABULARY)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(3, VOCABULARY), k=length)


def load(folder: Path, attention: str = "eager") -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
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
