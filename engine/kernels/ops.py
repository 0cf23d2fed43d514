"""The small operations of a model by Triton kernels: an `engine.ops.Ops` for CUDA devices."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.rows import geglu, rms_norm, rotary, swiglu


class TritonOps:
    """As `engine.ops.TorchOps`, each in one launch."""

    def rms_norm(
        self,
        rows: Tensor,
        weight: Tensor,
        epsilon: float,
        residual: Tensor | None = None,
        offset: float = 0.0,
    ) -> Tensor:
        return rms_norm(rows, weight, epsilon, residual, offset)

    def rotary(self, heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
        rotary(heads, cosine, sine)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)

    def geglu(self, gate_up: Tensor) -> Tensor:
        return geglu(gate_up)
