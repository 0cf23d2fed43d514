"""Attention by Triton kernels over the pages: for Hopper and later, and in Triton's interpreter for tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.protocol import Look
from engine.kernels.attention import Split, chunk_attention, decode_attention, plan_split
from engine.kernels.cache import write_kv
from engine.kernels.tuning import INTERPRETED
from engine.kv_pool import KvPool
from engine.staging import Staging
from engine.step_plan import StepPlan

_INTERPRETED_AS = 4
"""Multiprocessors that the interpreter is planned for."""


@dataclass(frozen=True, slots=True)
class TritonStep:
    """A step on the device. Decodes are the first rows and sequences; then come prompts."""

    slots: Tensor
    lengths: Tensor
    tables: Tensor
    decodes: int
    split: Split
    """Of the decodes."""
    prompt_starts: Tensor
    """int32 `[prompts + 1]`: rows after the decodes at which prompts begin, counted from there."""


class TritonAttention:
    """An `Attention`. ValueError where the kernels cannot run over this pool."""

    def __init__(self, pool: KvPool) -> None:
        if pool.memory.device.type != "cuda" and not INTERPRETED:
            raise ValueError(f"Triton's kernels run on CUDA devices; the KV pool is on {pool.memory.device}")
        if pool.memory.device.type == "cuda":
            capability = torch.cuda.get_device_capability(pool.memory.device)
            if capability < (8, 0):
                raise ValueError(
                    f"Triton's kernels want an Ampere GPU or a later one; this one is {capability}"
                )
        self._values, self._layout = pool.values, pool.layout
        self.device = pool.memory.device
        self.capturable = self.device.type == "cuda"
        """Whether steps can be captured as CUDA graphs."""
        self._staging = Staging(self.device)
        self.processors: int = (
            torch.cuda.get_device_properties(pool.memory.device).multi_processor_count
            if pool.memory.device.type == "cuda"
            else _INTERPRETED_AS
        )

    def prepare(self, plan: StepPlan) -> TritonStep:
        decodes, heads = plan.decodes, self._layout.kv_heads
        lengths = plan.lengths[:decodes].tolist()
        parts, span = plan_split(lengths, heads, processors=self.processors, tile=self.tile)
        starts = plan.query_starts[decodes:] - np.int32(decodes)
        sizes = np.asarray([span, plan.tables.shape[1]], dtype=np.int32)
        slots, on_device, tables, split, prompts = self._staging.upload(
            plan.slots, plan.lengths, plan.tables, sizes, starts
        )
        return TritonStep(slots, on_device, tables, decodes, Split(parts, split), prompts)

    @property
    def tile(self) -> int:
        """Of what parts of a split are multiples."""
        return 16 if INTERPRETED else 128

    def write(self, layer: int, keys_values: Tensor, prepared: TritonStep) -> None:
        write_kv(self._values, layer, keys_values, prepared.slots)

    def attend(self, layer: int, queries: Tensor, prepared: TritonStep, look: Look) -> Tensor:
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        count, kind = prepared.decodes, (look.scale, look.window, look.soft_cap)
        if count:
            decode_attention(
                queries[:count],
                self._values,
                layer,
                prepared.tables[:count],
                prepared.lengths[:count],
                *kind,
                split=prepared.split,
                out=out[:count],
            )
        if count < len(prepared.lengths):
            chunk_attention(
                queries[count:],
                self._values,
                layer,
                prepared.tables[count:],
                prepared.prompt_starts,
                prepared.lengths[count:],
                *kind,
                out=out[count:],
            )
        return out
