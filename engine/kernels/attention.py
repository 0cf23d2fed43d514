"""Attention over a paged KV pool in Triton: decodes split over long contexts, and runs of prompt tokens.

Online softmax over tiles of keys (Dao et al., 2022); decodes are split along the context and put together by
a second kernel (flash-decoding, Dao et al., 2023). The query heads of a KV head share one tile, so that its
keys and values are read once for all of them and are multiplied on tensor cores. What each function computes
is in `reference.py`, by the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.tuning import INTERPRETED, tuned

MAX_SPLITS = 64
"""Parts a context is split into at most: more would cost the second kernel more than they spare the first."""


@dataclass(frozen=True, slots=True)
class Split:
    """How decodes are split along their contexts."""

    parts: int
    """At most."""
    sizes: Tensor
    """int32 `[2]` on the device, so that a captured graph follows contexts as they grow: tokens a part, and
    entries from one sequence's block table to the next one's."""


@triton.jit
def _visit(
    acc, most, total, query, start, end, last, table, keys, values, to_block, to_token,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys: `[start, start + TILE)`, those before `end`, each row up to its position `last`."""
    places = start + tl.arange(0, TILE)
    there = places < end
    dims = tl.arange(0, WIDTH)
    block = tl.load(table + places // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    at = block * to_block + (places % BLOCK_SIZE) * to_token
    if MASKED or WIDTH != DIM:
        seen = there[:, None] & (dims < DIM)[None, :]
        key = tl.load(keys + at[:, None] + dims[None, :], mask=seen, other=0.0)
        value = tl.load(values + at[:, None] + dims[None, :], mask=seen, other=0.0)
    else:
        key = tl.load(keys + at[:, None] + dims[None, :])
        value = tl.load(values + at[:, None] + dims[None, :])
    if WIDE:
        key, value = key.to(tl.float32), value.to(tl.float32)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if SOFT_CAP > 0.0:
        # tanh by exp: exact enough, and without a library that the interpreter lacks.
        turned = 1.0 - 2.0 / (tl.exp(scores * (2.0 * SCALE / SOFT_CAP)) + 1.0)
        scores = turned * (SOFT_CAP * 1.4426950408889634)
    else:
        scores = scores * (SCALE * 1.4426950408889634)
    if MASKED:
        kept = there[None, :] & (places[None, :] <= last[:, None])
        if WINDOW > 0:
            kept = kept & (places[None, :] > last[:, None] - WINDOW)
        scores = tl.where(kept, scores, float("-inf"))
    highest = tl.maximum(most, tl.max(scores, 1))
    # A row that has seen nothing yet would give inf - inf.
    base = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
    shares = tl.exp2(scores - base[:, None])
    fade = tl.exp2(most - base)
    total = total * fade + tl.sum(shares, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(shares.to(value.dtype), value, acc, input_precision=PRECISION)
    return acc, highest, total


@triton.jit
def _decode(
    queries, keys, values, tables, lengths, sizes, out, sums,
    q_seq, q_head, to_block, to_head, to_token, to_table, heads,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one part of one sequence, for the query heads of one KV head."""
    part, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + seq)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    end = length
    if SPLIT:
        to_table = tl.load(sizes + 1)
    if PARTS > 1:
        span = tl.load(sizes)
        first = first + part * span
        end = tl.minimum(first + span, length)
        if first >= length:
            return
    rows, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    real = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    at = queries + seq * q_seq + (head * GROUP + rows)[:, None] * q_head + dims[None, :]
    query = tl.load(at, mask=real, other=0.0)
    if WIDE:
        query = query.to(tl.float32)
    acc = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    most = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    last = tl.full([ROWS], 0, dtype=tl.int32) + (length - 1)
    for start in tl.range(first, end, TILE, num_stages=STAGES):
        acc, most, total = _visit(
            acc, most, total, query, start, end, last,
            tables + seq * to_table, keys + head * to_head, values + head * to_head, to_block, to_token,
            DIM, WIDTH, TILE, BLOCK_SIZE, SCALE, 0, SOFT_CAP, True, WIDE, PRECISION,
        )  # fmt: skip
    # A row of padding has length 0: zeros, not 0 / 0.
    safe = tl.where(total == 0.0, 1.0, total)
    acc = acc / safe[:, None]
    line = (seq * heads + head * GROUP + rows) * PARTS + part
    tl.store(out + line[:, None] * DIM + dims[None, :], acc.to(out.dtype.element_ty), mask=real)
    if PARTS > 1:
        tl.store(sums + line, most + tl.log2(safe), mask=rows < GROUP)


@triton.jit
def _combine(
    partial, sums, lengths, sizes, out, heads,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Puts the parts of one head of one sequence together."""
    head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + seq)
    if WINDOW > 0:
        length = tl.minimum(length, WINDOW)
    parts, dims = tl.arange(0, LINES), tl.arange(0, WIDTH)
    there = parts * tl.load(sizes) < length
    line = (seq * heads + head) * PARTS + parts
    weight = tl.load(sums + line, mask=there, other=float("-inf"))
    most = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(most == float("-inf"), 0.0, most))
    real = there[:, None] & (dims < DIM)[None, :]
    values = tl.load(partial + line[:, None] * DIM + dims[None, :], mask=real, other=0.0)
    total = tl.sum(weight, 0)
    mixed = tl.sum(values * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + (seq * heads + head) * DIM + dims, mixed.to(out.dtype.element_ty), mask=dims < DIM)


@triton.jit
def _chunk(
    queries, keys, values, tables, starts, lengths, out, seqs,
    q_row, q_head, to_block, to_head, to_token, to_table, heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, STAGES: tl.constexpr,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of TOKENS tokens in a row of one sequence, for the query heads of one KV head."""
    # The last tiles see most keys: they go first, so that no long one is left alone at the end.
    tile, head = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(0)
    # The sequence of the tile: sequence i begins at the latest with tile starts[i] // TOKENS + i.
    low, high = 0, seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    seq = low
    begin = tl.load(starts + seq)
    count = tl.load(starts + seq + 1) - begin
    skipped = (tile - (begin // TOKENS + seq)) * TOKENS
    if skipped >= count:
        return
    length = tl.load(lengths + seq)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token = skipped + rows // GROUP
    inside = (rows < TOKENS * GROUP) & (token < count)
    real = inside[:, None] & (dims < DIM)[None, :]
    row = (begin + token).to(tl.int64)
    own = head * GROUP + rows % GROUP
    query = tl.load(
        queries + row[:, None] * q_row + own[:, None] * q_head + dims[None, :], mask=real, other=0.0
    )
    if WIDE:
        query = query.to(tl.float32)
    before = length - count + skipped
    last = before + rows // GROUP
    end = tl.minimum(before + TOKENS, length)
    acc = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    most = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    table = tables + tl.cast(seq, tl.int64) * to_table
    keys += head * to_head
    values += head * to_head
    # Three runs of tiles: at the edge of the window, seen whole by all rows, and at the diagonal.
    first, whole = 0, 0
    if WINDOW > 0:
        first = tl.maximum(before - WINDOW + 1, 0) // TILE * TILE
        whole = tl.maximum(end - WINDOW, 0)
        whole = tl.minimum((whole + TILE - 1) // TILE * TILE, end)
        for start in tl.range(first, whole, TILE, num_stages=STAGES):
            acc, most, total = _visit(
                acc, most, total, query, start, end, last, table, keys, values, to_block, to_token,
                DIM, WIDTH, TILE, BLOCK_SIZE, SCALE, WINDOW, SOFT_CAP, True, WIDE, PRECISION,
            )  # fmt: skip
        first = whole
    full = tl.maximum((before + 1) // TILE * TILE, first)
    for start in tl.range(first, full, TILE, num_stages=STAGES):
        acc, most, total = _visit(
            acc, most, total, query, start, end, last, table, keys, values, to_block, to_token,
            DIM, WIDTH, TILE, BLOCK_SIZE, SCALE, WINDOW, SOFT_CAP, False, WIDE, PRECISION,
        )  # fmt: skip
    for start in tl.range(full, end, TILE, num_stages=STAGES):
        acc, most, total = _visit(
            acc, most, total, query, start, end, last, table, keys, values, to_block, to_token,
            DIM, WIDTH, TILE, BLOCK_SIZE, SCALE, WINDOW, SOFT_CAP, True, WIDE, PRECISION,
        )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    at = out + (row * heads)[:, None] * DIM + own[:, None] * DIM + dims[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=real)


def decode_attention(
    queries: Tensor,
    pool: Tensor,
    layer: int,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    *,
    split: Split | None = None,
    out: Tensor | None = None,
    shape: dict[str, int] | None = None,
) -> Tensor:
    """Attention of one token a sequence, the last: `[seqs, heads, dim]`, as `reference.decode_attention`.

    `split`: from `plan_split`; without it, contexts stay whole. `out`: where to write, contiguous. `shape`:
    of the kernel, in place of the tuned one. Rows of length 0 give zeros.
    """
    seqs, heads, dim = queries.shape
    view = pool[:, layer]
    kv_heads, block_size = view.shape[2], view.shape[3]
    _check(queries, view, heads, kv_heads)
    group = heads // kv_heads
    width = max(16, triton.next_power_of_2(dim))
    shape = shape or tuned("decode", queries.device, dim=dim, group=group)
    out = torch.empty(seqs, heads, dim, dtype=queries.dtype, device=queries.device) if out is None else out
    parts = split.parts if split is not None else 1
    if parts > 1:
        target = torch.empty(seqs, heads, parts, dim, dtype=torch.float32, device=queries.device)
        sums = torch.empty(seqs, heads, parts, dtype=torch.float32, device=queries.device)
    else:
        target = sums = out
    sizes = split.sizes if split is not None else lengths
    _decode[(parts, kv_heads, seqs)](
        queries, view[:, 0], view[:, 1], tables, lengths, sizes, target, sums,
        queries.stride(0), queries.stride(1), view.stride(0), view.stride(2), view.stride(3),
        tables.stride(0), heads,
        SPLIT=split is not None, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)),
        DIM=dim, WIDTH=width, TILE=shape["tile"], BLOCK_SIZE=block_size, PARTS=parts, STAGES=shape["stages"],
        SCALE=scale, WINDOW=window or 0, SOFT_CAP=soft_cap or 0.0, **_products(queries),
        num_warps=shape["warps"],
    )  # fmt: skip
    if parts > 1:
        _combine[(heads, seqs)](
            target, sums, lengths, sizes, out, heads,
            DIM=dim, WIDTH=width, PARTS=parts, LINES=triton.next_power_of_2(parts), WINDOW=window or 0,
            num_warps=2,
        )  # fmt: skip
    return out


def chunk_attention(
    queries: Tensor,
    pool: Tensor,
    layer: int,
    tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    *,
    out: Tensor | None = None,
    shape: dict[str, int] | None = None,
) -> Tensor:
    """Causal attention of runs of tokens, each the last of its sequence: `[rows, heads, dim]`, as
    `reference.chunk_attention`. `query_starts`: int32 `[seqs + 1]`, rising."""
    rows, heads, dim = queries.shape
    seqs = lengths.shape[0]
    view = pool[:, layer]
    kv_heads, block_size = view.shape[2], view.shape[3]
    _check(queries, view, heads, kv_heads)
    group = heads // kv_heads
    kernel = "chunk_float32" if queries.dtype == torch.float32 else "chunk"
    shape = shape or tuned(kernel, queries.device, dim=dim, group=group)
    lines = max(shape["rows"], triton.next_power_of_2(group))
    tokens = lines // group
    out = torch.empty(rows, heads, dim, dtype=queries.dtype, device=queries.device) if out is None else out
    if not rows:
        return out
    # Enough tiles whatever the lengths: the host need not know them.
    tiles = rows // tokens + seqs
    _chunk[(kv_heads, tiles)](
        queries, view[:, 0], view[:, 1], tables, query_starts, lengths, out, seqs,
        queries.stride(0), queries.stride(1), view.stride(0), view.stride(2), view.stride(3),
        tables.stride(0), heads,
        GROUP=group, ROWS=lines, TOKENS=tokens, DIM=dim, WIDTH=max(16, triton.next_power_of_2(dim)),
        TILE=shape["tile"], BLOCK_SIZE=block_size, STAGES=shape["stages"],
        SCALE=scale, WINDOW=window or 0, SOFT_CAP=soft_cap or 0.0, **_products(queries),
        num_warps=shape["warps"],
    )  # fmt: skip
    return out


def plan_split(
    lengths: Sequence[int],
    kv_heads: int,
    *,
    processors: int,
    tile: int = 128,
    window: int | None = None,
    parts: int | None = None,
) -> tuple[int, int]:
    """(parts, span): how decodes of these lengths are best split over so many multiprocessors.

    Spans are multiples of `tile`, and short enough that programs fill the device about four times over: then
    the last wave wastes little. `parts`: a bound that is given, as that of a graph. Pure.
    """
    seen = [min(length, window) if window else length for length in lengths if length > 0]
    if not seen:
        return parts or 1, tile
    most = max(seen)
    if parts is None:
        parts = max(1, min(MAX_SPLITS, -(-most // (2 * tile))))
    wanted = max(1, 4 * processors // kv_heads)
    span = -(-sum(seen) // wanted)
    least = -(-most // parts)
    span = max(span, least, 2 * tile)
    span = -(-span // tile) * tile
    return min(parts, -(-most // span)), span


def _check(queries: Tensor, view: Tensor, heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    if queries.stride(2) != 1 or view.stride(4) != 1:
        raise ValueError("the numbers of a head must lie side by side")
    if queries.dtype != view.dtype:
        raise ValueError(f"queries are {queries.dtype}, the KV pool is {view.dtype}")


def _products(queries: Tensor) -> dict[str, Any]:
    """How tiles are multiplied. Float32 as it is, not in TF32; and the interpreter's products of narrow
    types are wrong, so that there they are widened."""
    return {"WIDE": INTERPRETED, "PRECISION": "ieee" if queries.dtype == torch.float32 else "tf32"}
