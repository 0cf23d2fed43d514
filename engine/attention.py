"""Attention over a paged KV pool: the plan of a step, made once in numpy, and its run in plain torch.

Paged attention after Kwon et al., 2023. A block holds all layers of some tokens, heads outermost inside a
layer (`KvLayout`). Each layer gathers the pages it reads into one buffer that is kept from step to step,
a few sequences at a time, so that what was gathered is still in the processor's cache when it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.weights import torch_dtype
from engine.words import Chunk
from fleet.kv_layout import KvLayout

_GROUP_BYTES = 4 << 20
"""Most KV of one layer that decodes gather at a time: small enough for a second or third level cache."""

_QUERY_ROWS = 128
"""Prompt tokens whose scores are computed at a time; more would waste work above the diagonal."""

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one token each, as rows `[first, first + count)` of the step."""

    first: int
    count: int
    pages: Tensor
    """Of layer 0: `[2 * count * kv_heads * pages]`, K then V, padded with a sequence's own first page."""
    bias: Tensor
    """`[count * kv_heads, 1, tokens]`: 0 where a token is, -inf after the last."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """One sequence's run of tokens, as rows `[first, first + count)` of the step."""

    first: int
    count: int
    start: int
    """Tokens before it, whose KV is there."""
    pages: Tensor
    """Of layer 0: `[2 * kv_heads * pages]`, K then V."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that the layers of one step need to know, on the device. Rows: decodes first, then prompts."""

    tokens: Tensor
    positions: Tensor
    writes: Tensor
    """Of layer 0: rows of the pool, `[tokens * 2 * kv_heads]`, in the order token, K or V, head."""
    fresh: Tensor
    """Blocks whose first token is written in this step."""
    decodes: tuple[DecodeGroup, ...]
    prompts: tuple[PromptChunk, ...]
    draws: Tensor
    """Rows that draw, in the order of the batch's chunks."""
    scores: Tensor
    """Rows whose next token is known and scored (`Chunk.targets`), in the order of the batch's chunks."""


def plan_step(chunks: Sequence[Chunk], layout: KvLayout, device: torch.device) -> StepPlan:
    """Lays out a step. Decodes are sorted by length, so that little of a group is padding."""
    size, heads = layout.block_size, layout.kv_heads
    order = sorted(range(len(chunks)), key=lambda i: (len(chunks[i].tokens) > 1, chunks[i].start))
    tables = [np.asarray(chunks[i].blocks, dtype=np.int64) for i in order]
    counts = [len(chunks[i].tokens) for i in order]
    firsts = np.concatenate(([0], np.cumsum(counts)))
    positions = np.concatenate(
        [np.arange(chunks[i].start, chunks[i].start + n) for i, n in zip(order, counts, strict=True)]
    )
    tokens = np.concatenate([np.asarray(chunks[i].tokens, dtype=np.int64) for i in order])
    blocks = np.concatenate(
        [table[positions[a:b] // size] for table, a, b in zip(tables, firsts, firsts[1:], strict=False)]
    )
    block_pages = layout.layers * 2 * heads
    offsets = positions % size
    writes = (blocks[:, None] * block_pages + np.arange(2 * heads)) * size + offsets[:, None]

    decodes: list[DecodeGroup] = []
    prompts: list[PromptChunk] = []
    singles = sum(count == 1 for count in counts)
    bytes_per_page = layout.block_bytes // layout.layers
    first = 0
    while first < singles:
        last = first + 1
        while last < singles:
            width = layout.blocks_for(int(positions[last]) + 1)
            if (last + 1 - first) * width * bytes_per_page > _GROUP_BYTES:
                break
            last += 1
        decodes.append(_group(first, tables[first:last], positions[first:last] + 1, layout, device))
        first = last
    for row, count, table in zip(firsts[singles:-1], counts[singles:], tables[singles:], strict=True):
        start = int(positions[row])
        pages = table[: layout.blocks_for(start + count)]
        of_heads = pages * block_pages + np.arange(2 * heads)[:, None]
        prompts.append(PromptChunk(int(row), count, start, _tensor(of_heads.ravel(), device)))
    first_of = {chunk: int(firsts[row]) for row, chunk in enumerate(order)}
    draws = [first_of[i] + len(chunk.tokens) - 1 for i, chunk in enumerate(chunks) if chunk.draw]
    scores = [first_of[i] + k for i, chunk in enumerate(chunks) for k in range(len(chunk.targets))]
    return StepPlan(
        tokens=_tensor(tokens, device),
        positions=_tensor(positions, device),
        writes=_tensor(writes.ravel(), device),
        fresh=_tensor(blocks[offsets == 0], device),
        decodes=tuple(decodes),
        prompts=tuple(prompts),
        draws=_tensor(np.asarray(draws, dtype=np.int64), device),
        scores=_tensor(np.asarray(scores, dtype=np.int64), device),
    )


def _group(
    first: int, tables: Sequence[Ints], lengths: Ints, layout: KvLayout, device: torch.device
) -> DecodeGroup:
    heads, size = layout.kv_heads, layout.block_size
    width = layout.blocks_for(int(lengths.max()))
    table = np.empty((len(tables), width), dtype=np.int64)
    for row, blocks, length in zip(table, tables, lengths, strict=True):
        used = layout.blocks_for(int(length))
        row[:used] = blocks[:used]
        row[used:] = blocks[0]
    pages = table[None, :, None, :] * (layout.layers * 2 * heads) + (
        np.arange(2)[:, None, None, None] * heads + np.arange(heads)[:, None]
    )
    past = np.arange(width * size) >= lengths[:, None]
    bias = torch.zeros(len(tables), 1, width * size, dtype=torch_dtype(layout.dtype))
    bias.masked_fill_(torch.from_numpy(past).unsqueeze(1), -torch.inf)
    bias = bias.repeat_interleave(heads, dim=0).to(device)
    return DecodeGroup(first, len(tables), _tensor(pages.ravel(), device), bias)


def _tensor(values: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


class KvPool:
    """The KV blocks of one replica, in memory given by others: `[blocks, block_bytes]`, uint8."""

    def __init__(self, layout: KvLayout, memory: Tensor) -> None:
        if memory.dtype != torch.uint8 or memory.shape[1:] != (layout.block_bytes,):
            raise ValueError(
                f"KV memory is {memory.dtype} {tuple(memory.shape)}; "
                f"wanted uint8 [blocks, {layout.block_bytes}]"
            )
        self.layout = layout
        self.memory = memory
        self.blocks = memory.shape[0]
        values = memory.view(-1).view(torch_dtype(layout.dtype))
        self._blocks = values.view(self.blocks, -1)
        self._rows = values.view(-1, layout.head_dim)
        self._pages = values.view(-1, layout.block_size * layout.head_dim)
        self._kept = values.new_empty(0)
        self._scale = layout.head_dim**-0.5
        rows = _QUERY_ROWS
        self._above = torch.ones(rows, rows, dtype=torch.bool, device=memory.device).triu_(1)

    def begin(self, plan: StepPlan) -> None:
        """Clears blocks that a sequence starts to fill, of all layers.

        The end of a part-full block is read too, and weighed with zero: zero times an old NaN is not zero.
        """
        if len(plan.fresh):
            self._blocks.index_fill_(0, plan.fresh, 0)

    def write(self, layer: int, kv: Tensor, plan: StepPlan) -> None:
        """Stores `[tokens, 2 * kv_heads, head_dim]`, K heads first."""
        offset = layer * 2 * self.layout.kv_heads * self.layout.block_size
        self._rows[offset:].index_copy_(0, plan.writes, kv.reshape(-1, self.layout.head_dim))

    def attend(self, layer: int, queries: Tensor, plan: StepPlan) -> Tensor:
        """Softmax attention of `[tokens, heads, head_dim]` over the KV before and of each token."""
        queries = queries * self._scale
        out = torch.empty_like(queries)
        for group in plan.decodes:
            self._decode(layer, group, queries, out)
        for chunk in plan.prompts:
            self._prompt(layer, chunk, queries, out)
        return out

    def _gather(self, layer: int, pages: Tensor) -> Tensor:
        """The pages of a layer, `[pages, block_size * head_dim]`, in the kept buffer."""
        width = self._pages.shape[1]
        need = len(pages) * width
        if self._kept.numel() < need:
            self._kept = self._pages.new_empty(need + need // 4)
        out = self._kept[:need].view(-1, width)
        return torch.index_select(self._pages[layer * 2 * self.layout.kv_heads :], 0, pages, out=out)

    def _decode(self, layer: int, group: DecodeGroup, queries: Tensor, out: Tensor) -> None:
        kv_heads, dim = self.layout.kv_heads, self.layout.head_dim
        rows = group.count * kv_heads
        keys, values = self._gather(layer, group.pages).view(2, rows, -1, dim)
        part = slice(group.first, group.first + group.count)
        query = queries[part].reshape(rows, -1, dim)
        scores = torch.baddbmm(group.bias, query, keys.transpose(1, 2))
        out[part] = torch.bmm(torch.softmax(scores, dim=-1), values).view(group.count, -1, dim)

    def _prompt(self, layer: int, chunk: PromptChunk, queries: Tensor, out: Tensor) -> None:
        kv_heads, dim = self.layout.kv_heads, self.layout.head_dim
        keys, values = self._gather(layer, chunk.pages).view(2, kv_heads, -1, dim)
        shared = queries.shape[1] // kv_heads
        for row in range(0, chunk.count, _QUERY_ROWS):
            count = min(_QUERY_ROWS, chunk.count - row)
            before, seen = chunk.start + row, chunk.start + row + count
            part = slice(chunk.first + row, chunk.first + row + count)
            query = queries[part].view(count, kv_heads, shared, dim).permute(1, 2, 0, 3)
            query = query.reshape(kv_heads, shared * count, dim)
            scores = torch.bmm(query, keys[:, :seen].transpose(1, 2))
            diagonal = scores.view(kv_heads, shared, count, seen)[..., before:]
            diagonal.masked_fill_(self._above[:count, :count], -torch.inf)
            mixed = torch.bmm(torch.softmax(scores, dim=-1), values[:, :seen])
            out[part].view(count, kv_heads, shared, dim).copy_(
                mixed.view(kv_heads, shared, count, dim).permute(2, 0, 1, 3)
            )
