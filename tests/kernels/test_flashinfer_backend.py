"""What FlashInfer is handed, read as its documentation says, gives the reference's numbers."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.choose import choose_attention
from engine.attention.gather import GatherAttention
from engine.attention.protocol import Look
from engine.kernels import reference
from engine.kv_pool import KvPool
from engine.step_plan import plan_step
from engine.words import Chunk
from fleet.errors import BadRequest
from fleet.kv_layout import KvLayout
from fleet.request import Sampling

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=16, block_size=4, dtype="float32")


class Wrapper:
    """FlashInfer's `BatchPrefillWithPagedKVCacheWrapper`, by its documentation, in plain torch."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert layout == "HND"

    def plan(
        self, starts: Tensor, page_starts: Tensor, pages: Tensor, last: Tensor,
        heads: int, kv_heads: int, dim: int, page_size: int, **look: Any,
    ) -> None:  # fmt: skip
        assert (heads, kv_heads, dim, page_size) == (6, 2, 16, 4)
        assert look["causal"]
        self._look, self._starts = look, starts
        counts = (page_starts[1:] - page_starts[:-1]).tolist()
        self._lengths = (page_starts[1:] - page_starts[:-1] - 1) * page_size + last
        self._tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, count, first in zip(self._tables, counts, page_starts.tolist(), strict=False):
            row[:count] = pages[first : first + count]

    def run(self, queries: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = kv
        left = self._look["window_left"]
        return reference.chunk_attention(
            queries, torch.stack((keys, values), dim=1).unsqueeze(1), 0, self._tables, self._starts,
            self._lengths, self._look["sm_scale"], None if left < 0 else left + 1,
            self._look["logits_soft_cap"],
        )  # fmt: skip


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)


@pytest.mark.usefixtures("installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in computes on a CPU")
def test_a_step_is_that_of_the_reference() -> None:
    greedy = Sampling(9, temperature=0)
    chunks = [
        Chunk(0, (1,) * 7, 0, tuple(range(3)), True, greedy),
        Chunk(1, (1,), 22, tuple(range(10, 20)), True, greedy),
        Chunk(2, (1,) * 4, 4, tuple(range(30, 33)), True, greedy),
    ]
    found: list[list[Tensor]] = []
    for name in ("flashinfer", "gather"):
        chance = torch.Generator().manual_seed(1)
        pool = KvPool(LAYOUT, torch.zeros(60, LAYOUT.block_bytes, dtype=torch.uint8))
        pool.values.copy_(torch.randn(pool.values.shape, generator=chance))
        attention = choose_attention(name, pool)
        assert isinstance(attention, GatherAttention) == (name == "gather")
        prepared = attention.prepare(plan_step(chunks, LAYOUT))
        qkv = torch.randn(12, 10, 16, generator=chance)
        found.append([])
        for layer, look in ((0, Look(0.25)), (1, Look(0.3, window=6, soft_cap=2.0)), (1, Look(0.25))):
            attention.write(layer, qkv[:, 6:], prepared)
            found[-1].append(attention.attend(layer, qkv[:, :6].clone(), prepared, look))
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=1e-4)


def test_without_it_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    pool = KvPool(LAYOUT, torch.zeros(6, LAYOUT.block_bytes, dtype=torch.uint8))
    with pytest.raises(BadRequest, match="flashinfer is not installed"):
        choose_attention("flashinfer", pool)
