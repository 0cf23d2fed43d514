"""The C kernels beside this file, compiled once a machine by `fleet/native.py`."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from fleet.native import Source, Unusable, load

__all__ = ["Native", "Step", "Unusable", "native"]

KERNELS = Source(
    name="kernels",
    file=Path(__file__).with_name("kernels.c"),
    gain="decoding is several times faster",
    limit_s=120.0,  # It usually takes 3.
    flags=("-fno-math-errno", "-fno-trapping-math"),
    attempts=(("-fopenmp",), ()),  # Where there is no OpenMP to link with, they run in one thread.
)


class Step(Structure):
    """`Step` of common.h: the same fields in the same order. Whoever fills it keeps what it points to."""

    _fields_ = (
        ("pool", c_void_p),
        ("tables", c_void_p),
        ("lengths", c_void_p),
        ("starts", c_void_p),
        ("slots", c_void_p),
        ("block_bytes", c_int64),
        ("layer_bytes", c_int64),
        ("width", c_int32),
        ("sequences", c_int32),
        ("decodes", c_int32),
        ("rows", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("block_size", c_int32),
    )


_ATTENTION = (POINTER(Step), c_int32, c_void_p, c_int64, c_void_p, c_float, c_int32, c_float)
_SIGNATURES = {
    "rms_norm": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_float),
    "rotary": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int64),
    "gated": (c_void_p, c_void_p, c_int64, c_int64, c_int32),
    "write_kv": (POINTER(Step), c_int32, c_void_p, c_int64),
    "decode_attention": _ATTENTION,
}
"""Of functions there is one of for each type, by its suffix."""

_PRODUCT_SIGNATURES = {
    "chunk_attention": _ATTENTION,
    "pack_bf16": (c_void_p, c_void_p, c_int64, c_int64),
    "pack_int8": (c_void_p, c_void_p, c_int64, c_int64),
    "product_bf16": (c_void_p, c_void_p, c_void_p, c_void_p, c_int32, c_int64, c_int64, c_int64),
    "product_int8": (*(c_void_p,) * 6, c_int32, c_int64, c_int64, c_int64),
}
"""Of functions that are there only where the processor multiplies bfloat16."""

_FAIL = ("decode_attention", "chunk_attention", "product_int8")
"""These return 1 where they had no memory, else 0; the others nothing."""

_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class Native:
    """The loaded kernels. Addresses are checked by nobody: callers hold tensors of the right shape."""

    library: ctypes.CDLL
    products: bool
    """Whether there are products, and attention of prompts, in bfloat16."""
    amx: bool
    """Whether those use matrix tiles: the processor has them, and this process may use them."""

    def function(self, name: str, dtype: torch.dtype) -> ctypes._NamedFuncPointer:
        found: ctypes._NamedFuncPointer = getattr(self.library, f"{name}_{_SUFFIXES[dtype]}")
        return found


@functools.cache
def _attempt() -> Native | str:
    try:
        return _declare(load(KERNELS, ctypes.CDLL))
    except Unusable as why:
        return str(why)
    except AttributeError as error:
        return f"the kernels cannot be loaded: {error}"


def native(dtype: torch.dtype | None = None) -> Native:
    """The kernels, built at the first call in a process and a machine. Raises `Unusable`."""
    if dtype is not None and dtype not in _SUFFIXES:
        raise Unusable(f"no kernels for {dtype}")
    found = _attempt()
    if isinstance(found, str):
        raise Unusable(found)
    return found


def _declare(library: ctypes.CDLL) -> Native:
    for name, arguments in _SIGNATURES.items():
        for suffix in _SUFFIXES.values():
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, c_int32 if name in _FAIL else None
    library.highest.argtypes = (c_void_p, c_int64, c_int64, c_void_p, c_void_p)
    library.highest.restype = None
    library.draw.argtypes = (c_void_p, c_int64, c_float, c_float, c_float, c_int32, c_int32)
    library.draw.restype = c_int64
    for has in (library.has_products, library.has_amx):
        has.argtypes, has.restype = (), c_int32
    amx, products = bool(library.has_amx()), bool(library.has_products())
    for name, arguments in _PRODUCT_SIGNATURES.items() if products else ():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int32 if name in _FAIL else None
    return Native(library, products, amx)
