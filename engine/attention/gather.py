"""Attention in plain torch on any device: the reference of the other backends, and what is left without them.

Each layer gathers the pages it reads into one buffer that is kept from step to step, a few sequences at a
time, so that what was gathered is still in the processor's cache when it is used. A page is one head's part
of a block (`KvLayout`: heads outermost).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.protocol import Look
from engine.kv_pool import KvPool
from engine.step_plan import StepPlan

_GROUP_BYTES = 4 << 20
"""Most KV of one layer that decodes gather at a time: small enough for a second or third level cache."""

_QUERY_ROWS = 128
"""Prompt tokens whose scores are computed at a time; more would waste work above the diagonal."""


@dataclass(slots=True)
class DecodeGroup:
    """Sequences with one token each, as rows `[first, first + count)` of the step."""

    first: int
    count: int
    pages: Tensor
    """Of layer 0: `[2 * count * kv_heads * pages]`, K then V, padded with a sequence's own first page."""
    lengths: Tensor
    """`[count]`."""
    biases: dict[int | None, Tensor] = field(default_factory=dict)
    """By window `[count * kv_heads, 1, tokens]`: 0 where a token is seen, -inf elsewhere."""


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
class GatherStep:
    writes: Tensor
    """Of layer 0: rows of the pool, `[tokens * 2 * kv_heads]`, in the order token, K or V, head."""
    decodes: tuple[DecodeGroup, ...]
    prompts: tuple[PromptChunk, ...]


class GatherAttention:
    """An `Attention`."""

    def __init__(self, pool: KvPool) -> None:
        layout = pool.layout
        self._layout, self._device = layout, pool.memory.device
        self._rows = pool.values.view(-1, layout.head_dim)
        self._pages = pool.values.view(-1, layout.block_size * layout.head_dim)
        self._kept = self._rows.new_empty(0)
        rows = torch.arange(_QUERY_ROWS, device=self._device)
        self._above = rows > rows.unsqueeze(1)

    def prepare(self, plan: StepPlan) -> GatherStep:
        layout = self._layout
        size, heads = layout.block_size, layout.kv_heads
        block_pages = layout.layers * 2 * heads
        blocks, offsets = np.divmod(plan.slots, size)
        writes = (blocks[:, None] * block_pages + np.arange(2 * heads)) * size + offsets[:, None]
        widths = -(-plan.lengths.astype(np.int64) // size)
        bytes_per_page = layout.block_bytes // layout.layers
        decodes: list[DecodeGroup] = []
        first = 0
        while first < plan.decodes:
            last = first + 1
            while last < plan.decodes:
                if (last + 1 - first) * int(widths[last]) * bytes_per_page > _GROUP_BYTES:
                    break
                last += 1
            table = plan.tables[first:last, : int(widths[last - 1])].astype(np.int64)
            pages = table[None, :, None, :] * block_pages + (
                np.arange(2)[:, None, None, None] * heads + np.arange(heads)[:, None]
            )
            lengths = self._tensor(plan.lengths[first:last])
            decodes.append(DecodeGroup(first, last - first, self._tensor(pages.ravel()), lengths))
            first = last
        prompts: list[PromptChunk] = []
        starts, ends = plan.query_starts.tolist(), plan.lengths.tolist()
        for index in range(plan.decodes, plan.sequences):
            count = starts[index + 1] - starts[index]
            table = plan.tables[index, : int(widths[index])].astype(np.int64)
            pages = table * block_pages + np.arange(2 * heads)[:, None]
            prompts.append(
                PromptChunk(starts[index], count, ends[index] - count, self._tensor(pages.ravel()))
            )
        return GatherStep(self._tensor(writes.ravel()), tuple(decodes), tuple(prompts))

    def write(self, layer: int, keys_values: Tensor, prepared: GatherStep) -> None:
        offset = layer * 2 * self._layout.kv_heads * self._layout.block_size
        rows = keys_values.reshape(-1, self._layout.head_dim)
        self._rows[offset:].index_copy_(0, prepared.writes, rows)

    def attend(self, layer: int, queries: Tensor, prepared: GatherStep, look: Look) -> Tensor:
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for group in prepared.decodes:
            self._decode(layer, group, queries, out, look)
        self.attend_prompts(layer, queries, prepared, look, out)
        return out

    def attend_prompts(
        self, layer: int, queries: Tensor, prepared: GatherStep, look: Look, out: Tensor
    ) -> None:
        """Of the sequences with more than one row only, to their rows of `out`."""
        for chunk in prepared.prompts:
            self._prompt(layer, chunk, queries, out, look)

    def _tensor(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def _gather(self, layer: int, pages: Tensor) -> Tensor:
        """The pages of a layer, `[pages, block_size * head_dim]`, in the kept buffer."""
        width = self._pages.shape[1]
        need = len(pages) * width
        if self._kept.numel() < need:
            self._kept = self._pages.new_empty(need + need // 4)
        out = self._kept[:need].view(-1, width)
        return torch.index_select(self._pages[layer * 2 * self._layout.kv_heads :], 0, pages, out=out)

    def _bias(self, group: DecodeGroup, tokens: int, window: int | None) -> Tensor:
        if window not in group.biases:
            place = torch.arange(tokens, device=self._device)
            lengths = group.lengths.unsqueeze(1)
            hidden = place >= lengths
            if window is not None:
                hidden |= place < lengths - window
            bias = torch.zeros(hidden.shape, dtype=self._rows.dtype, device=self._device)
            bias = bias.masked_fill_(hidden, -torch.inf).unsqueeze(1)
            group.biases[window] = bias.repeat_interleave(self._layout.kv_heads, dim=0)
        return group.biases[window]

    def _decode(self, layer: int, group: DecodeGroup, queries: Tensor, out: Tensor, look: Look) -> None:
        kv_heads, dim = self._layout.kv_heads, self._layout.head_dim
        rows = group.count * kv_heads
        keys, values = self._gather(layer, group.pages).view(2, rows, -1, dim)
        part = slice(group.first, group.first + group.count)
        query = (queries[part] * look.scale).view(rows, -1, dim)
        bias = self._bias(group, keys.shape[1], look.window)
        if look.soft_cap is None:
            scores = torch.baddbmm(bias, query, keys.transpose(1, 2))
        else:
            scores = _capped(torch.bmm(query, keys.transpose(1, 2)), look.soft_cap).add_(bias)
        out[part] = torch.bmm(torch.softmax(scores, dim=-1), values).view(group.count, -1, dim)

    def _prompt(self, layer: int, chunk: PromptChunk, queries: Tensor, out: Tensor, look: Look) -> None:
        kv_heads, dim = self._layout.kv_heads, self._layout.head_dim
        keys, values = self._gather(layer, chunk.pages).view(2, kv_heads, -1, dim)
        shared = queries.shape[1] // kv_heads
        for row in range(0, chunk.count, _QUERY_ROWS):
            count = min(_QUERY_ROWS, chunk.count - row)
            before, seen = chunk.start + row, chunk.start + row + count
            least = 0 if look.window is None else max(0, before + 1 - look.window)
            part = slice(chunk.first + row, chunk.first + row + count)
            query = (queries[part] * look.scale).view(count, kv_heads, shared, dim).permute(1, 2, 0, 3)
            query = query.reshape(kv_heads, shared * count, dim)
            scores = torch.bmm(query, keys[:, least:seen].transpose(1, 2))
            if look.soft_cap is not None:
                scores = _capped(scores, look.soft_cap)
            of_rows = scores.view(kv_heads, shared, count, seen - least)
            of_rows[..., before - least :].masked_fill_(self._above[:count, :count], -torch.inf)
            if look.window is not None:
                row_places = torch.arange(before, seen, device=self._device).unsqueeze(1)
                places = torch.arange(least, seen, device=self._device)
                of_rows.masked_fill_(places <= row_places - look.window, -torch.inf)
            mixed = torch.bmm(torch.softmax(scores, dim=-1), values[:, least:seen])
            out[part].view(count, kv_heads, shared, dim).copy_(
                mixed.view(kv_heads, shared, count, dim).permute(2, 0, 1, 3)
            )


def _capped(scores: Tensor, cap: float) -> Tensor:
    return scores.div_(cap).tanh_().mul_(cap)
