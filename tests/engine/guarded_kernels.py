"""Calls each C kernel with buffers that end at a page nobody may touch: one byte too far ends the process.

Run by test_guard_pages.py in a process of its own."""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import mmap
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.native.library import Step, native

PAGE = mmap.PAGESIZE
PROT_NONE = 0
LIBC = ctypes.CDLL(None, use_errno=True)
KEPT: list[mmap.mmap] = []
FLOAT, NARROW = torch.float32, torch.bfloat16


def guarded(values: Tensor) -> Tensor:
    """The same numbers, the last of them right before a page that cannot be read or written."""
    size = max(1, values.numel()) * values.element_size()
    memory = mmap.mmap(-1, -(-size // PAGE) * PAGE + PAGE)
    KEPT.append(memory)
    end = len(memory) - PAGE
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if LIBC.mprotect(ctypes.c_void_p(start + end), ctypes.c_size_t(PAGE), PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    count = max(1, values.numel())
    found = torch.frombuffer(memory, dtype=values.dtype, count=count, offset=end - size)[: values.numel()]
    return found.view(values.shape).copy_(values)


def randn(*shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    return guarded(torch.randn(shape).to(dtype))


def rows(counts: Sequence[int]) -> None:
    """Norms, rotary positions and activations."""
    for dtype, count, width in itertools.product((FLOAT, NARROW), counts, (1, 2, 15, 16, 17, 48, 576)):
        kernels = native(dtype)
        x, residual, weight = (
            randn(count, width, dtype=dtype),
            randn(count, width, dtype=dtype),
            randn(width, dtype=dtype),
        )
        out = guarded(torch.zeros(count, width, dtype=dtype))
        for kept in (None, residual.data_ptr()):
            kernels.function("rms_norm", dtype)(
                x.data_ptr(), kept, weight.data_ptr(), out.data_ptr(), count, width, 1e-5, 0.0
            )
        assert torch.isfinite(out).all()
        both = randn(count, 2 * width, dtype=dtype)
        for gelu in (0, 1):
            kernels.function("gated", dtype)(both.data_ptr(), out.data_ptr(), count, width, gelu)
        assert torch.isfinite(out).all()
        heads = randn(count, 3, 2 * width, dtype=dtype)
        angles = randn(count, width, dtype=dtype)
        kernels.function("rotary", dtype)(
            heads.data_ptr(), angles.data_ptr(), angles.data_ptr(), count, 3, 2 * width, 6 * width, width
        )
        assert torch.isfinite(heads).all()


def logits(counts: Sequence[int]) -> None:
    library = native().library
    for count, width in itertools.product(counts, (1, 15, 16, 17, 1000)):
        x = randn(count, width)
        most, place = guarded(torch.zeros(count)), guarded(torch.zeros(count, dtype=torch.int64))
        library.highest(x.data_ptr(), count, width, most.data_ptr(), place.data_ptr())
        for i in range(count):
            assert most[i] == x[i].max()
            drawn = library.draw(x[i:].data_ptr(), width, float(most[i]), 0.8, float("-inf"), 1, 2)
            assert 0 <= drawn < width


def products(counts: Sequence[int]) -> None:
    if not native().products:
        return
    library = native().library
    for out, inner in ((32, 64), (64, 576), (96, 128)):
        weight, bias = randn(out, inner, dtype=NARROW), randn(out)
        packed = guarded(torch.zeros(out, inner, dtype=NARROW))
        library.pack_bf16(weight.data_ptr(), packed.data_ptr(), out, inner)
        small = guarded((weight.float() * 20).clamp(-127, 127).to(torch.int8))
        packed8 = guarded(torch.zeros(out, inner, dtype=torch.int8))
        library.pack_int8(small.data_ptr(), packed8.data_ptr(), out, inner)
        scales, totals = guarded(torch.full((out,), 0.05)), guarded(small.sum(1, dtype=torch.int32))
        for count, wide, biased in itertools.product(counts, (0, 1), (0, 1)):
            x = randn(count, inner, dtype=NARROW)
            to = guarded(torch.zeros(count, out, dtype=FLOAT if wide else NARROW))
            added = bias.data_ptr() if biased else None
            expected = x.float() @ weight.float().T + (bias if biased else 0)
            library.product_bf16(
                x.data_ptr(), packed.data_ptr(), added, to.data_ptr(), wide, count, out, inner
            )
            assert torch.allclose(to.float(), expected, rtol=0.02, atol=0.1)
            assert not library.product_int8(
                x.data_ptr(), packed8.data_ptr(), scales.data_ptr(), totals.data_ptr(), added, to.data_ptr(),
                wide, count, out, inner,
            )  # fmt: skip
            assert torch.isfinite(to).all()


def steps(sizes: Sequence[int], dims: Sequence[int]) -> Iterator[tuple[torch.dtype, int, int, int, int]]:
    for dtype, size, dim, (heads, kv_heads) in itertools.product(
        (FLOAT, NARROW), sizes, dims, ((1, 1), (3, 1), (9, 3), (8, 1), (17, 1))
    ):
        yield dtype, size, dim, heads, kv_heads


def attention(sizes: Sequence[int], dims: Sequence[int], spec: Sequence[tuple[int, int]]) -> None:
    """`spec`: (tokens before, tokens now) of sequences, decodes first."""
    for dtype, size, dim, heads, kv_heads in steps(sizes, dims):
        kernels = native(dtype)
        chunks = kernels.products and dtype == NARROW and dim % 32 == 0 and dim <= 256
        sequences = [one for one in spec if one[1] == 1 or chunks]
        need = [-(-(before + now) // size) for before, now in sequences]
        pool = randn(sum(need), 2 * kv_heads, size, dim, dtype=dtype)
        tables = torch.zeros(len(need), max(need), dtype=torch.int32)
        first = 0
        for i, blocks in enumerate(need):
            tables[i, :blocks] = torch.arange(first, first + blocks)
            first += blocks
        count = sum(now for _, now in sequences)
        starts = torch.tensor([0, *itertools.accumulate(now for _, now in sequences)], dtype=torch.int32)
        lengths = torch.tensor([before + now for before, now in sequences], dtype=torch.int32)
        slots = torch.tensor(
            [
                int(tables[i, at // size]) * size + at % size
                for i, (before, now) in enumerate(sequences)
                for at in range(before, before + now)
            ]
        )
        held = [guarded(one) for one in (tables, lengths, starts, slots)]
        step = Step(
            pool.data_ptr(), *(one.data_ptr() for one in held),
            2 * kv_heads * size * dim * pool.element_size(), 2 * kv_heads * size * dim * pool.element_size(),
            max(need), len(need), sum(now == 1 for _, now in sequences), count, heads, kv_heads, dim, size,
        )  # fmt: skip
        kv, queries = randn(count, 2 * kv_heads, dim, dtype=dtype), randn(count, heads, dim, dtype=dtype)
        kernels.function("write_kv", dtype)(ctypes.byref(step), 0, kv.data_ptr(), 2 * kv_heads * dim)
        for window, cap in ((0, 0.0), (5, 0.0), (33, 3.0)):
            out = guarded(torch.full((count, heads, dim), torch.nan, dtype=dtype))
            given: tuple[Any, ...] = (queries.data_ptr(), heads * dim, out.data_ptr(), 0.2, window, cap)
            assert not kernels.function("decode_attention", dtype)(ctypes.byref(step), 0, *given)
            if chunks:
                assert not kernels.library.chunk_attention(ctypes.byref(step), 0, *given)
            assert torch.isfinite(out).all(), (dtype, size, dim, heads, window, cap)
        KEPT.clear()


SPEC = [(0, 1), (1, 1), (15, 1), (16, 1), (39, 1), (70, 1), (0, 2), (0, 33), (7, 31), (40, 5)]

if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    full = "--full" in sys.argv
    rows(range(41) if full else (1, 3, 16))
    logits(range(5) if full else (2,))
    products(range(41) if full else (0, 1, 4, 5, 15, 17, 33))
    sizes = (1, 3, 4, 8, 16, 17, 32, 64) if full else (3, 16)
    attention(sizes, (1, 8, 20, 32, 48, 64, 80, 96, 128, 160, 256) if full else (20, 64, 96), SPEC)
    print("all within bounds")
