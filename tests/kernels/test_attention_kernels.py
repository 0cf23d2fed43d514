"""Paged attention of decodes and of prompt chunks equals plain torch, over shapes, types and strides."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import reference
from engine.kernels.attention import Split, chunk_attention, decode_attention, plan_split
from engine.kernels.tuning import INTERPRETED

Near = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Case:
    dim: int
    group: int
    kv_heads: int
    block_size: int
    dtype: torch.dtype
    window: int | None = None
    soft_cap: float | None = None

    def __str__(self) -> str:
        return "-".join(str(part).removeprefix("torch.") for part in vars(self).values())


SMALL = (
    Case(16, 3, 2, 16, torch.float32),
    Case(8, 4, 1, 5, torch.float32, window=9),
    Case(24, 1, 3, 8, torch.bfloat16, soft_cap=4.0),
    Case(64, 2, 1, 32, torch.bfloat16, window=17, soft_cap=30.0),
    Case(16, 18, 1, 1, torch.float16),
)
"""Heads of any size, groups that are no power of two and larger than a tile, blocks from one token on."""


def every() -> Iterator[Case]:
    yield from SMALL
    for dim, group, block, dtype in itertools.product(
        (64, 80, 128, 256), (1, 3, 4, 8), (16, 48, 64), (torch.bfloat16, torch.float16)
    ):
        yield Case(dim, group, 2, block, dtype)
    for window, cap in ((100, None), (None, 30.0), (300, 50.0)):
        for dtype in (torch.bfloat16, torch.float32):
            yield Case(128, 4, 2, 16, dtype, window, cap)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = every() if metafunc.config.getoption("--full", default=False) else SMALL
        metafunc.parametrize("case", list(cases), ids=str)


def world(case: Case, lengths: list[int], device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A pool of three layers and tables into it, blocks scattered; what no sequence owns is NaN."""
    chance = torch.Generator().manual_seed(seed)
    need = [-(-length // case.block_size) for length in lengths]
    blocks = sum(need) + 3
    shape = (blocks, 3, 2, case.kv_heads, case.block_size, case.dim)
    pool = torch.randn(shape, generator=chance).to(case.dtype)
    order = torch.randperm(blocks, generator=chance).tolist()
    tables = torch.zeros(len(lengths), max(*need, 1) + 2, dtype=torch.int32)
    for row, (count, length) in enumerate(zip(need, lengths, strict=True)):
        own, order = order[:count], order[count:]
        tables[row] = own[0] if own else 0
        tables[row, :count] = torch.tensor(own, dtype=torch.int32)
        if length % case.block_size:
            pool[own[-1], :, :, :, length % case.block_size :] = torch.nan
    pool[order] = torch.nan
    pool[:, ::2] = torch.nan
    return pool.to(device), tables.to(device)


def queries_of(case: Case, rows: int, device: torch.device, seed: int = 1) -> Tensor:
    """A part of wider rows, as a model's queries are of the product with keys and values."""
    chance = torch.Generator().manual_seed(seed)
    heads = case.group * case.kv_heads
    wide = torch.randn(rows, heads + 2 * case.kv_heads, case.dim, generator=chance).to(case.dtype)
    return wide.to(device)[:, :heads]


def ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("parts", [1, 3])
def test_decode_attention(case: Case, parts: int, device: torch.device, near: Near) -> None:
    given = [1, 50, 33, 16, 0] if INTERPRETED else [1, 4000, 33, 16, 0, 1025]
    pool, tables = world(case, given, device)
    query = queries_of(case, len(given), device)
    look = (case.dim**-0.5, case.window, case.soft_cap)
    lengths = ints(given, device)
    wanted = reference.decode_attention(query, pool, 1, tables, lengths, *look)
    seen = min(max(given), case.window or 1 << 30)
    split = Split(parts, ints([-(-seen // parts), tables.stride(0)], device))
    found = decode_attention(query, pool, 1, tables, lengths, *look, split=split)
    near(found, wanted)
    assert not found[4].any(), "padding"


def test_chunk_attention(case: Case, device: torch.device, near: Near) -> None:
    # Whole prompts, ends of prompts whose beginning is cached, decodes among them; one has no row.
    counts, given = [1, 35, 7, 0, 20], [40, 35, 7, 5, 51]
    if not INTERPRETED:
        counts, given = [1, 700, 129, 0, 128, 64], [900, 700, 129, 5, 2000, 64]
    pool, tables = world(case, given, device)
    starts = ints([0, *itertools.accumulate(counts)], device)
    query = queries_of(case, sum(counts), device)
    look = (case.dim**-0.5, case.window, case.soft_cap)
    lengths = ints(given, device)
    wanted = reference.chunk_attention(query, pool, 1, tables, starts, lengths, *look)
    near(chunk_attention(query, pool, 1, tables, starts, lengths, *look), wanted)


def test_a_graph_reads_sizes_where_they_lie(device: torch.device, near: Near) -> None:
    case = SMALL[0]
    pool, tables = world(case, [60, 20], device)
    query, lengths = queries_of(case, 2, device), ints([60, 20], device)
    wanted = reference.decode_attention(query, pool, 1, tables, lengths, 0.25)
    sizes, room = ints([0, 0], device), torch.zeros(100, dtype=torch.int32, device=device)
    for tokens, width in ((60, 6), (16, 9), (32, 4)):
        sizes.copy_(ints([tokens, width], device))
        for row, table in enumerate(tables):
            room[row * width : row * width + 4] = table[:4]
        found = decode_attention(query, pool, 1, room.view(2, -1), lengths, 0.25, split=Split(4, sizes))
        near(found, wanted)


@given(
    st.lists(st.integers(0, 200_000), min_size=1, max_size=300),
    st.integers(1, 32),
    st.integers(1, 160),
    st.one_of(st.none(), st.integers(1, 5000)),
    st.one_of(st.none(), st.integers(1, 64)),
)
def test_a_split_reaches_the_end_of_every_context(
    lengths: list[int], kv_heads: int, processors: int, window: int | None, bound: int | None
) -> None:
    parts, span = plan_split(lengths, kv_heads, processors=processors, window=window, parts=bound)
    longest = max(min(length, window) if window else length for length in lengths)
    assert parts * span >= longest
    assert 1 <= parts <= (bound or 64)
    assert span % 128 == 0


def test_few_decodes_are_split_and_many_are_not() -> None:
    parts, span = plan_split([8192], 8, processors=132)
    assert parts > 16, "one sequence has to fill the device"
    assert parts * span >= 8192
    assert plan_split([300] * 64, 8, processors=132) == (1, 384)
    assert plan_split([4096] * 512, 8, processors=132)[0] == 1


def test_wrong_arguments_are_named(device: torch.device) -> None:
    case = SMALL[0]
    pool, tables = world(case, [5], device)
    query, lengths = queries_of(case, 1, device), ints([5], device)
    with pytest.raises(ValueError, match=r"queries are torch\.bfloat16, the KV pool is torch\.float32"):
        decode_attention(query.bfloat16(), pool, 1, tables, lengths, 1.0)
    with pytest.raises(ValueError, match="5 query heads are not a multiple of 2 KV heads"):
        decode_attention(query[:, :5], pool, 1, tables, lengths, 1.0)
