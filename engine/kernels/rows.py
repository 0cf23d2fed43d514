"""Norm, rotary positions and gated activations in Triton: each reads its rows once and writes them once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(
    x, weight, residual, out, x_row, x_head, r_row, r_head, heads, epsilon, offset,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    row, head = line // heads, line % heads
    dims = tl.arange(0, WIDTH)
    real = dims < DIM
    values = tl.load(x + row * x_row + head * x_head + dims, mask=real, other=0.0).to(tl.float32)
    if ADD:
        at = residual + row * r_row + head * r_head + dims
        values += tl.load(at, mask=real, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(at, rounded, mask=real)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / DIM + epsilon)
    scales = tl.load(weight + dims, mask=real, other=0.0).to(tl.float32) + offset
    tl.store(out + line * DIM + dims, (values * scale * scales).to(out.dtype.element_ty), mask=real)


@triton.jit
def _rotary(
    heads_at, cosine, sine, h_row, h_head, c_row, s_row, heads,
    HALF: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, WIDTH)
    real = (head < heads)[:, None] & (dims < HALF)[None, :]
    at = heads_at + row * h_row + head[:, None] * h_head + dims[None, :]
    first = tl.load(at, mask=real, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=real, other=0.0).to(tl.float32)
    turn = tl.load(cosine + row * c_row + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    side = tl.load(sine + row * s_row + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    tl.store(at, (first * turn - second * side).to(heads_at.dtype.element_ty), mask=real)
    tl.store(at + HALF, (second * turn + first * side).to(heads_at.dtype.element_ty), mask=real)


@triton.jit
def _gated(gate_up, out, g_row, inner, WIDTH: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = dims < inner
    gate = tl.load(gate_up + row * g_row + dims, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * g_row + inner + dims, mask=real, other=0.0).to(tl.float32)
    if GELU:
        # gelu in its tanh form is gate * sigmoid(2 * inside).
        inside = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-2.0 * inside))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    tl.store(out + row * inner + dims, (gate * up).to(out.dtype.element_ty), mask=real)


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor:
    """As `reference.rms_norm`, of `[rows, dim]` or `[rows, heads, dim]`, its last dimension side by side."""
    dim = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    _wants_side_by_side(x, weight, *([] if residual is None else [residual]))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    added = x if residual is None else residual
    if out.numel():
        width = triton.next_power_of_2(dim)
        _rms_norm[(x.shape[0] * heads,)](
            x, weight, added, out,
            x.stride(0), x.stride(1) if x.dim() == 3 else 0,
            added.stride(0), added.stride(1) if added.dim() == 3 else 0,
            heads, epsilon, offset,
            DIM=dim, WIDTH=width, ADD=residual is not None, num_warps=max(1, min(16, width // 512)),
        )  # fmt: skip
    return out


def rotary(heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """As `reference.rotary`, in place."""
    rows, count, dim = heads.shape
    half = cosine.shape[1]
    if 2 * half > dim or sine.shape != cosine.shape or cosine.shape[0] != rows:
        raise ValueError(
            f"cosines {tuple(cosine.shape)} and sines {tuple(sine.shape)} "
            f"do not fit heads {tuple(heads.shape)}"
        )
    _wants_side_by_side(heads, cosine, sine)
    width = triton.next_power_of_2(half)
    together = max(1, min(triton.next_power_of_2(count), 2048 // width))
    if rows:
        _rotary[(rows, triton.cdiv(count, together))](
            heads, cosine, sine, heads.stride(0), heads.stride(1), cosine.stride(0), sine.stride(0), count,
            HALF=half, WIDTH=width, HEADS=together, num_warps=4,
        )  # fmt: skip


def swiglu(gate_up: Tensor) -> Tensor:
    """As `reference.swiglu`."""
    return _activate(gate_up, gelu=False)


def geglu(gate_up: Tensor) -> Tensor:
    """As `reference.geglu`."""
    return _activate(gate_up, gelu=True)


def _activate(gate_up: Tensor, *, gelu: bool) -> Tensor:
    rows, both = gate_up.shape
    inner = both // 2
    _wants_side_by_side(gate_up)
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    width = min(1024, triton.next_power_of_2(inner))
    if rows:
        _gated[(rows, triton.cdiv(inner, width))](
            gate_up, out, gate_up.stride(0), inner, WIDTH=width, GELU=gelu, num_warps=4
        )
    return out


def _wants_side_by_side(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.stride(-1) != 1:
            raise ValueError(f"the last dimension of {tuple(tensor.shape)} must lie side by side")
