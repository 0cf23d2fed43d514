"""Attention by FlashInfer (Ye et al., 2025), where it is installed: asked for by name, on CUDA devices.

Its pages in the layout HND, `[pages, kv_heads, page_size, head_dim]`, are a layer's part of our blocks as
they lie. It plans on the host, once a step for each way in which layers look, and compiles kernels when it
first meets a shape. Decodes are prompts of one token to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.protocol import Look
from engine.kernels.cache import write_kv
from engine.kv_pool import KvPool
from engine.staging import Staging
from engine.step_plan import StepPlan

_WORKSPACE = 256 << 20
"""Bytes of a wrapper's room for partial results; more than its authors ask for."""


@dataclass(slots=True)
class FlashInferStep:
    slots: Tensor
    query_starts: Tensor
    page_starts: Tensor
    """int32 `[sequences + 1]`: places in `pages`."""
    pages: Tensor
    last_page: Tensor
    """int32 `[sequences]`: tokens in the last page of each."""
    planned: dict[Look, Any] = field(default_factory=dict)


class FlashInferAttention:
    """An `Attention`. ImportError where FlashInfer is not installed."""

    def __init__(self, pool: KvPool) -> None:
        import flashinfer  # type: ignore[import-not-found,unused-ignore]

        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._values, self._layout = pool.values, pool.layout
        self._device = pool.memory.device
        self._staging = Staging(self._device)
        self._kept: dict[Look, Any] = {}

    def prepare(self, plan: StepPlan) -> FlashInferStep:
        size = self._layout.block_size
        counts = -(-plan.lengths // np.int32(size))
        starts = np.zeros(plan.sequences + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        used = np.arange(plan.tables.shape[1]) < counts[:, None]
        last = (plan.lengths - (counts - 1) * np.int32(size)).astype(np.int32)
        arrays = (plan.slots, plan.query_starts, starts, plan.tables[used], last)
        slots, queries, pages, indices, ends = self._staging.upload(*arrays)
        return FlashInferStep(slots, queries, pages, indices, ends)

    def write(self, layer: int, keys_values: Tensor, prepared: FlashInferStep) -> None:
        write_kv(self._values, layer, keys_values, prepared.slots)

    def attend(self, layer: int, queries: Tensor, prepared: FlashInferStep, look: Look) -> Tensor:
        if look not in prepared.planned:
            prepared.planned[look] = self._plan(queries, prepared, look)
        pages = self._values[:, layer]
        out: Tensor = prepared.planned[look].run(queries.contiguous(), (pages[:, 0], pages[:, 1]))
        return out

    def _plan(self, queries: Tensor, prepared: FlashInferStep, look: Look) -> Any:
        if look not in self._kept:
            room = torch.empty(_WORKSPACE, dtype=torch.uint8, device=self._device)
            self._kept[look] = self._wrapper(room, "HND")
        wrapper = self._kept[look]
        wrapper.plan(
            prepared.query_starts,
            prepared.page_starts,
            prepared.pages,
            prepared.last_page,
            queries.shape[1],
            self._layout.kv_heads,
            self._layout.head_dim,
            self._layout.block_size,
            causal=True,
            sm_scale=look.scale,
            # How many tokens to the left of its own one sees; -1 is all.
            window_left=-1 if look.window is None else look.window - 1,
            logits_soft_cap=look.soft_cap,
            q_data_type=queries.dtype,
            kv_data_type=self._values.dtype,
        )
        return wrapper
