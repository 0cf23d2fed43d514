"""Norms, rotary positions and activations by the C kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.native.library import native


class NativeOps:
    """An `engine.ops.Ops` for CPU tensors of one type, in one call each where torch takes several."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Raises `engine.native.library.Unusable`."""
        kernels = native(dtype)
        self._rms_norm = kernels.function("rms_norm", dtype)
        self._rotary = kernels.function("rotary", dtype)
        self._gated = kernels.function("gated", dtype)

    def rms_norm(
        self,
        rows: Tensor,
        weight: Tensor,
        epsilon: float,
        residual: Tensor | None = None,
        offset: float = 0.0,
    ) -> Tensor:
        out = torch.empty_like(rows)
        count, width = rows.shape
        self._rms_norm(
            rows.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            count,
            width,
            epsilon,
            offset,
        )
        return out

    def rotary(self, heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
        count, number, dim = heads.shape
        self._rotary(
            heads.data_ptr(),
            cosine.data_ptr(),
            sine.data_ptr(),
            count,
            number,
            dim,
            heads.stride(0),
            cosine.stride(0),
        )

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return self._activated(gate_up, 0)

    def geglu(self, gate_up: Tensor) -> Tensor:
        return self._activated(gate_up, 1)

    def _activated(self, gate_up: Tensor, gelu: int) -> Tensor:
        count, width = gate_up.shape
        out = gate_up.new_empty(count, width // 2)
        self._gated(gate_up.data_ptr(), out.data_ptr(), count, width // 2, gelu)
        return out
