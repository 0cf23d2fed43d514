"""The small operations between a model's products: what a model asks of them, and their plain torch form."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Ops(Protocol):
    """One set a device. Rows are contiguous unless said otherwise."""

    def rms_norm(
        self,
        rows: Tensor,
        weight: Tensor,
        epsilon: float,
        residual: Tensor | None = None,
        offset: float = 0.0,
    ) -> Tensor:
        """Of `[n, width]` (Zhang and Sennrich, 2019). With `residual`, of the same shape: `rows` is added to
        it in place first, and the sum is what is normalised. `weight + offset` scales."""
        ...

    def rotary(self, heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
        """Turns `[n, heads, head_dim]`, whose rows may be strided, in place; the pairs are
        (i, i + head_dim / 2). `cosine` and `sine`: `[n, head_dim / 2]`, of the positions."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half, of `[n, 2 * width]` (Shazeer, 2020). `gate_up` may be changed."""
        ...

    def geglu(self, gate_up: Tensor) -> Tensor:
        """The same with GELU in its tanh form."""
        ...


class TorchOps:
    """An `Ops` on any device."""

    def rms_norm(
        self,
        rows: Tensor,
        weight: Tensor,
        epsilon: float,
        residual: Tensor | None = None,
        offset: float = 0.0,
    ) -> Tensor:
        if residual is not None:
            rows = residual.add_(rows)
        if offset:
            # In float32: a narrow type would round a small weight away beside the offset.
            wide = torch.nn.functional.rms_norm(
                rows.float(), rows.shape[-1:], weight.float() + offset, epsilon
            )
            return wide.to(rows.dtype)
        return torch.nn.functional.rms_norm(rows, rows.shape[-1:], weight, epsilon)

    def rotary(self, heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
        cosine, sine = cosine.unsqueeze(1), sine.unsqueeze(1)
        first, second = heads.chunk(2, dim=-1)
        turned = (first * cosine).addcmul_(second, sine, value=-1)
        second.mul_(cosine).addcmul_(first, sine)
        first.copy_(turned)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)

    def geglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)


def choose_ops(dtype: torch.dtype, device: torch.device, attention: str = "auto") -> Ops:
    """The fastest that work on this device; Triton's where that is asked for by name for attention."""
    if attention == "triton" or device.type == "cuda":
        try:
            from engine.kernels.ops import TritonOps

            return TritonOps()
        except ImportError:
            pass  # likewise
    if device.type == "cpu":
        from engine.native.library import Unusable
        from engine.native.ops import NativeOps

        try:
            return NativeOps(dtype)
        except Unusable:
            pass  # attention, which wants the same kernels, has said why
    return TorchOps()
