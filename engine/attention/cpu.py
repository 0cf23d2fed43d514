"""Attention on a CPU by the C kernels, over pages where they lie; prompts that they cannot do go to torch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.attention.gather import GatherAttention, GatherStep
from engine.attention.protocol import Look
from engine.kv_pool import KvPool
from engine.native.library import Step, Unusable, native
from engine.step_plan import StepPlan


@dataclass(slots=True)
class CpuStep:
    plan: StepPlan
    """Kept for as long as the kernels read what it holds."""
    step: Step
    gathered: GatherStep | None
    """Where prompts are computed in torch; None where there are none."""


class CpuAttention:
    """An `Attention` for float32 and bfloat16."""

    def __init__(self, pool: KvPool) -> None:
        """Raises `Unusable` where there are no kernels for this pool."""
        if pool.memory.device.type != "cpu":
            raise Unusable(f"for CPUs; the pool is on {pool.memory.device}")
        layout, dtype = pool.layout, pool.values.dtype
        kernels = native(dtype)
        self._pool, self._layout = pool, layout
        self._write = kernels.function("write_kv", dtype)
        self._decode = kernels.function("decode_attention", dtype)
        self._gather = GatherAttention(pool)
        tiled = (
            kernels.products
            and dtype == torch.bfloat16
            and layout.head_dim % 32 == 0
            and layout.head_dim <= 256
        )
        self._chunks = kernels.library.chunk_attention if tiled else None

    def prepare(self, plan: StepPlan) -> CpuStep:
        layout = self._layout
        step = Step(
            pool=self._pool.memory.data_ptr(),
            tables=plan.tables.ctypes.data,
            lengths=plan.lengths.ctypes.data,
            starts=plan.query_starts.ctypes.data,
            slots=plan.slots.ctypes.data,
            block_bytes=layout.block_bytes,
            layer_bytes=layout.block_bytes // layout.layers,
            width=plan.tables.shape[1],
            sequences=plan.sequences,
            decodes=plan.decodes,
            rows=len(plan.tokens),
            heads=0,
            kv_heads=layout.kv_heads,
            dim=layout.head_dim,
            block_size=layout.block_size,
        )
        gathered = None
        if plan.decodes < plan.sequences and self._chunks is None:
            gathered = replace(self._gather.prepare(plan), decodes=())
        return CpuStep(plan, step, gathered)

    def write(self, layer: int, keys_values: Tensor, prepared: CpuStep) -> None:
        self._write(ctypes.byref(prepared.step), layer, keys_values.data_ptr(), keys_values.stride(0))

    def attend(self, layer: int, queries: Tensor, prepared: CpuStep, look: Look) -> Tensor:
        step = prepared.step
        out = torch.empty(queries.shape, dtype=queries.dtype)
        step.heads = queries.shape[1]
        if step.decodes:
            self._call(self._decode, layer, queries, step, look, out)
        if prepared.gathered is not None:
            self._gather.attend_prompts(layer, queries, prepared.gathered, look, out)
        elif step.decodes < step.sequences:
            self._call(self._chunks, layer, queries, step, look, out)
        return out

    def _call(self, kernel: Any, layer: int, queries: Tensor, step: Step, look: Look, out: Tensor) -> None:
        failed = kernel(
            ctypes.byref(step),
            layer,
            queries.data_ptr(),
            queries.stride(0),
            out.data_ptr(),
            look.scale,
            look.window or 0,
            look.soft_cap or 0.0,
        )
        if failed:
            raise MemoryError("no memory for the scores of a step")
