"""Every backend of attention gives what the definition gives, over scattered blocks of old bytes."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.choose import choose_attention
from engine.attention.protocol import Look
from engine.kv_pool import KvPool
from engine.step_plan import StepPlan, plan_step
from engine.words import Chunk
from fleet.errors import BadRequest
from fleet.kv_layout import KvLayout
from fleet.request import Sampling

GREEDY = Sampling(max_tokens=1, temperature=0)
MIXED = [(0, 1), (17, 1), (40, 1), (130, 1), (5, 30), (0, 70), (33, 2)]
"""(tokens before, tokens now) of a step's sequences."""
SHAPES = [(9, 3, 64, 16), (4, 2, 8, 4), (4, 1, 16, 1), (32, 1, 128, 32), (6, 2, 96, 48), (2, 1, 256, 16)]
"""(heads, KV heads, head_dim, block_size)."""
LOOKS = [
    Look(0.15),
    Look(0.15, window=37),
    Look(0.3, soft_cap=5.0),
    Look(0.2, window=5, soft_cap=3.0),
    Look(0.2, window=1),
]


def backend(name: str, pool: KvPool) -> Any:
    try:
        return choose_attention(name, pool)
    except BadRequest as why:
        pytest.skip(str(why))


def scene(
    heads: int, kv_heads: int, dim: int, size: int, dtype: str, spec: Sequence[tuple[int, int]]
) -> tuple[KvPool, StepPlan, Tensor, Tensor, Tensor]:
    """A pool with KV of earlier steps and NaN elsewhere, a step, its heads, and the KV of all its sequences
    as `[2, kv_heads, tokens, dim]` one after the other."""
    generator = torch.Generator().manual_seed(dim * size)
    layout = KvLayout(layers=2, kv_heads=kv_heads, head_dim=dim, block_size=size, dtype=dtype)
    need = [layout.blocks_for(before + count) for before, count in spec]
    pool = KvPool(layout, torch.zeros(sum(need) + 1, layout.block_bytes, dtype=torch.uint8))
    pool.values.fill_(torch.nan)
    free = list(range(pool.blocks))
    random.Random(dim).shuffle(free)
    chunks = []
    for (before, count), blocks in zip(spec, need, strict=True):
        table, free = tuple(free[:blocks]), free[blocks:]
        chunks.append(Chunk(0, (1,) * count, before, table, True, GREEDY))
    plan = plan_step(chunks, layout)
    pool.clear(torch.from_numpy(plan.fresh))
    rows = torch.randn(len(plan.tokens), heads + 2 * kv_heads, dim, generator=generator)
    rows = rows.to(pool.values.dtype)
    known = []
    for index in range(plan.sequences):
        first, last = plan.query_starts[index : index + 2].tolist()
        tokens = int(plan.lengths[index])
        kv = torch.randn(2, kv_heads, tokens, dim, generator=generator).to(rows.dtype)
        kv[:, :, tokens - (last - first) :] = (
            rows[first:last, heads:].view(-1, 2, kv_heads, dim).permute(1, 2, 0, 3)
        )
        for place in range(0, tokens, size):
            part = kv[:, :, place : min(place + size, tokens - (last - first))]
            block = int(plan.tables[index, place // size])
            if part.shape[2]:
                pool.values[block, :, :, :, part.shape[2] :] = 0
                pool.values[block, 1, :, :, : part.shape[2]] = part
        known.append(kv)
    return pool, plan, rows, torch.cat(known, dim=2), torch.tensor([kv.shape[2] for kv in known])


def defined(plan: StepPlan, queries: Tensor, known: Tensor, look: Look) -> Tensor:
    """Row by row in float64."""
    out = torch.empty(queries.shape, dtype=torch.float64)
    shared = queries.shape[1] // known.shape[1]
    place = 0
    for index in range(plan.sequences):
        first, last = plan.query_starts[index : index + 2].tolist()
        length = int(plan.lengths[index])
        for row in range(first, last):
            end = length - (last - row) + 1
            begin = max(0, end - look.window) if look.window else 0
            keys, values = known[:, :, place + begin : place + end].double().repeat_interleave(shared, dim=1)
            scores = torch.einsum("hd,htd->ht", queries[row].double(), keys) * look.scale
            if look.soft_cap is not None:
                scores = look.soft_cap * torch.tanh(scores / look.soft_cap)
            out[row] = torch.einsum("ht,htd->hd", torch.softmax(scores, dim=-1), values)
        place += length
    return out


def check(
    name: str, shape: tuple[int, int, int, int], dtype: str, spec: Sequence[tuple[int, int]], look: Look
) -> None:
    heads = shape[0]
    pool, plan, rows, known, _ = scene(*shape, dtype, spec)
    attention = backend(name, pool)
    prepared = attention.prepare(plan)
    expected = defined(plan, rows[:, :heads], known, look)
    attention.write(1, rows[:, heads:], prepared)
    found = attention.attend(1, rows[:, :heads], prepared, look)
    assert found.is_contiguous()
    limit = 2e-5 if dtype == "float32" else 0.04
    torch.testing.assert_close(found.double(), expected, atol=limit, rtol=limit)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gather", "cpu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixed_steps_of_any_shape(name: str, shape: tuple[int, int, int, int], dtype: str) -> None:
    for look in LOOKS:
        check(name, shape, dtype, MIXED, look)


@pytest.mark.parametrize("name", ["gather", "cpu"])
def test_contexts_longer_than_what_is_looked_at_at_once(name: str) -> None:
    """The tiles look at 512 tokens at a time; a window may begin in any span, and hide whole ones."""
    spec = [(1030, 40), (600, 33), (1531, 1)]
    for window in (None, 3, 600, 1100):
        check(name, (3, 1, 64, 16), "bfloat16", spec, Look(0.125, window=window))


@pytest.mark.parametrize("name", ["gather", "cpu"])
def test_only_decodes_and_only_prompts(name: str) -> None:
    for spec in ([(15, 1), (16, 1), (31, 1)], [(0, 16), (0, 33)], [(0, 1)]):
        check(name, (4, 2, 32, 16), "bfloat16", spec, Look(0.2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gather", "cpu"])
@pytest.mark.parametrize("part", ["query", "key"])
def test_what_is_not_a_number_stays_so(name: str, part: str, dtype: str) -> None:
    """So that the sampler refuses it, rather than drawing a wrong token."""
    for look in (Look(0.15), Look(0.15, soft_cap=5.0)):
        pool, plan, rows, _, _ = scene(4, 2, 64, 16, dtype, [(17, 1), (40, 1), (3, 20)])
        attention = backend(name, pool)
        prepared = attention.prepare(plan)
        rows[:, 0 if part == "query" else 4, 3] = torch.nan
        attention.write(1, rows[:, 4:], prepared)
        found = attention.attend(1, rows[:, :4], prepared, look)
        assert found[:, 0].isnan().any(dim=1).all()
        assert found[:, 2:].isfinite().all()


def test_auto_says_which_backend_it_takes_and_why(caplog: pytest.LogCaptureFixture) -> None:
    pool = KvPool(KvLayout(1, 1, 8, 4, "float16"), torch.zeros(2, 128, dtype=torch.uint8))
    with caplog.at_level(logging.INFO):
        assert type(choose_attention("auto", pool)).__name__ == "GatherAttention"
    assert "attention: gather (plain torch" in caplog.text
    assert "cpu: no kernels for torch.float16" in caplog.text
    with pytest.raises(
        BadRequest, match=r"attention 'cpu' does not work here: cpu: no kernels for torch\.float16"
    ):
        choose_attention("cpu", pool)
    with pytest.raises(BadRequest, match="attention 'flash' is not one of auto, "):
        choose_attention("flash", pool)
