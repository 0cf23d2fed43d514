"""Attention by the Triton kernels over a step's plan is that of plain torch, and is chosen where it works."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from engine.attention.choose import choose_attention
from engine.attention.gather import GatherAttention
from engine.attention.protocol import Look
from engine.attention.triton import TritonAttention
from engine.kernels.tuning import INTERPRETED
from engine.kv_pool import KvPool
from engine.step_plan import plan_step
from engine.words import Chunk
from fleet.errors import BadRequest
from fleet.kv_layout import KvLayout
from fleet.request import Sampling

GREEDY = Sampling(max_tokens=9, temperature=0)
LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=16, block_size=4, dtype="float32")


def pool_of(device: torch.device, blocks: int = 60) -> KvPool:
    return KvPool(LAYOUT, torch.zeros(blocks, LAYOUT.block_bytes, dtype=torch.uint8, device=device))


def chunk(slot: int, start: int, tokens: int, blocks: range) -> Chunk:
    return Chunk(slot, (1,) * tokens, start, tuple(blocks), True, GREEDY)


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(0, 9, 1, range(3)), chunk(1, 30, 1, range(10, 20)), chunk(2, 0, 1, range(30, 31))],
        [chunk(0, 0, 7, range(3)), chunk(1, 13, 22, range(10, 20))],
        [chunk(0, 0, 7, range(3)), chunk(1, 22, 1, range(10, 20)), chunk(2, 5, 4, range(30, 33))],
    ],
    ids=["decodes", "prompts", "mixed"],
)
@pytest.mark.parametrize("look", [Look(0.25), Look(0.3, window=6, soft_cap=2.0)], ids=["all", "window"])
def test_a_step_is_that_of_the_reference(chunks: list[Chunk], look: Look, device: torch.device) -> None:
    found = []
    for backend in (TritonAttention, GatherAttention):
        chance = torch.Generator().manual_seed(1)
        pool = pool_of(device)
        pool.values.copy_(torch.randn(pool.values.shape, generator=chance))
        plan = plan_step(chunks, LAYOUT)
        attention: Any = backend(pool)
        prepared = attention.prepare(plan)
        qkv = torch.randn(len(plan.tokens), 10, 16, generator=chance).to(device)
        for layer in (0, 1):
            attention.write(layer, qkv[:, 6:], prepared)
            found.append(attention.attend(layer, qkv[:, :6].clone(), prepared, look))
        found.append(pool.values)
    for ours, wanted in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.skipif(not INTERPRETED, reason="on a CPU kernels need the interpreter")
def test_auto_leaves_the_interpreter_to_tests() -> None:
    pool = pool_of(torch.device("cpu"))
    assert not isinstance(choose_attention("auto", pool), TritonAttention)
    assert isinstance(choose_attention("triton", pool), TritonAttention)


def test_without_triton_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engine.attention.triton", None)
    with pytest.raises(BadRequest, match="triton is not installed"):
        choose_attention("triton", pool_of(torch.device("cpu")))
