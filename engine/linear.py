"""Matrices of a model, each laid out once for the fastest products that the device has."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.native.arena import Arena
from engine.native.library import Native, Unusable, native
from fleet.errors import BadRequest

WEIGHTS = ("auto", "int8")

_PACKED_FOR = 8
"""Rows oneDNN lays the weights out for. Laid out for 1 row, batches of 2 to 8 take up to twice the time;
for 8, neither one row nor long prompts lose anything measurable."""


class Linear(Protocol):
    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        """Rows `[n, in]`, contiguous, times the matrix `[out, in]` plus its bias: `[n, out]`; `wide` in
        float32, where the product has it not rounded."""
        ...


class Linears:
    """Makes all matrices of one model."""

    def __init__(self, weights: str = "auto") -> None:
        """`weights` is one of `WEIGHTS`."""
        if weights not in WEIGHTS:
            raise BadRequest(f"weights {weights!r} is not one of {', '.join(WEIGHTS)}")
        self._int8 = weights == "int8"
        self._arena = Arena()

    def make(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Of `[out, in]`. BadRequest where int8 is asked for and the device has no products for it."""
        if self._int8 and weight.device.type != "cpu":
            raise BadRequest("weights 'int8' is for CPUs; on other devices use 'auto'")
        tiles = _tiles(weight)
        if tiles is not None and weight.shape[1] % (64 if self._int8 else 32) == 0:
            if self._int8:
                return TiledInt8(tiles, self._arena, weight, bias)
            return Tiled(tiles, self._arena, weight, bias)
        # torch's kernel for bfloat16 is wrong, or crashes, where the inner size is no multiple of 32.
        if self._int8 and weight.shape[1] % 32 == 0:
            return PlainInt8(weight, bias)
        return Packed(weight, bias) if _can_pack(weight) else Plain(weight, bias)


class Plain:
    """Anything, anywhere."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        product = torch.nn.functional.linear(rows, self._weight, self._bias)
        return product.float() if wide else product


class Packed:
    """In oneDNN's own layout, for the types that it has kernels for."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR)

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return product.float() if wide else product


class Tiled:
    """bfloat16 in the order in which the C kernels read it."""

    def __init__(self, kernels: Native, arena: Arena, weight: Tensor, bias: Tensor | None) -> None:
        weight = weight.contiguous()
        self._out, self._in = weight.shape
        self._bias = None if bias is None else bias.float()
        self._bias_at = None if self._bias is None else self._bias.data_ptr()
        self._weight = arena.take(weight.numel() * 2)
        self._weight_at = self._weight.data_ptr()
        self._product = kernels.library.product_bf16
        kernels.library.pack_bf16(weight.data_ptr(), self._weight_at, self._out, self._in)

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        count = rows.shape[0]
        out = torch.empty(count, self._out, dtype=torch.float32 if wide else torch.bfloat16)
        self._product(
            rows.data_ptr(),
            self._weight_at,
            self._bias_at,
            out.data_ptr(),
            wide,
            count,
            self._out,
            self._in,
        )
        return out


class TiledInt8:
    """The same in int8 with a scale for each output; rows take part with 15 bits, so that what is lost is
    lost in the weights."""

    def __init__(self, kernels: Native, arena: Arena, weight: Tensor, bias: Tensor | None) -> None:
        self._out, self._in = weight.shape
        self._bias = None if bias is None else bias.float()
        self._bias_at = None if self._bias is None else self._bias.data_ptr()
        quantized, self._scales = _quantized(weight)
        self._totals = quantized.sum(dim=1, dtype=torch.int32)
        self._scales_at, self._totals_at = self._scales.data_ptr(), self._totals.data_ptr()
        self._weight = arena.take(weight.numel())
        self._weight_at = self._weight.data_ptr()
        self._product = kernels.library.product_int8
        kernels.library.pack_int8(quantized.data_ptr(), self._weight_at, self._out, self._in)

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        count = rows.shape[0]
        out = torch.empty(count, self._out, dtype=torch.float32 if wide else torch.bfloat16)
        failed = self._product(
            rows.data_ptr(),
            self._weight_at,
            self._scales_at,
            self._totals_at,
            self._bias_at,
            out.data_ptr(),
            wide,
            count,
            self._out,
            self._in,
        )
        if failed:
            raise MemoryError("no memory for the rows of a product")
        return out


class PlainInt8:
    """int8 by torch's own kernel, for processors and types that the tiles are not for."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        self._weight, scales = _quantized(weight)
        self._scales = scales.to(weight.dtype)

    def __call__(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int8pack_mm(rows, self._weight, self._scales)
        if self._bias is not None:
            product = product.add_(self._bias)
        return product.float() if wide else product


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 `[out, in]`, and what each output's numbers are to be multiplied by, float32 `[out]`."""
    wide = weight.float()
    scales = wide.abs().amax(dim=1).div_(127.0).clamp_(min=torch.finfo(torch.float32).tiny)
    return (wide / scales.unsqueeze(1)).round_().to(torch.int8), scales


def _tiles(weight: Tensor) -> Native | None:
    out, inner = weight.shape
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or out % 32 or inner % 32:
        return None
    try:
        kernels = native(weight.dtype)
    except Unusable:
        return None
    return kernels if kernels.products else None


def _can_pack(weight: Tensor) -> bool:
    """On CPU, where oneDNN has kernels for the type; these operators are not public API."""
    ops = torch.ops.mkldnn
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if not all(hasattr(ops, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
