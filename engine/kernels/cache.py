"""KV into its pages, and whole blocks out of and into a pool, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_kv(
    pool, given, slots, to_block, to_kind, to_head, to_token, g_row, g_head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    at = pool + slot // BLOCK_SIZE * to_block + slot % BLOCK_SIZE * to_token
    head, dims = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    real = (head < 2 * KV_HEADS)[:, None] & (dims < DIM)[None, :]
    values = tl.load(given + row * g_row + head[:, None] * g_head + dims[None, :], mask=real, other=0.0)
    places = (head // KV_HEADS) * to_kind + (head % KV_HEADS) * to_head
    tl.store(at + places[:, None] + dims[None, :], values.to(pool.dtype.element_ty), mask=real)


@triton.jit
def _move_blocks(memory, blocks, other, words, m_row, o_row, WIDTH: tl.constexpr, INTO: tl.constexpr):
    """A part of one block; `words` a block."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = part < words
    block = tl.load(blocks + row).to(tl.int64)
    pool_at, other_at = memory + block * m_row + part, other + row * o_row + part
    if INTO:
        tl.store(pool_at, tl.load(other_at, mask=there), mask=there)
    else:
        tl.store(other_at, tl.load(pool_at, mask=there), mask=there)


def write_kv(pool: Tensor, layer: int, keys_values: Tensor, slots: Tensor) -> None:
    """As `reference.write_kv`."""
    view = pool[:, layer]
    kv_heads, block_size, dim = view.shape[2:]
    if keys_values.shape[1:] != (2 * kv_heads, dim) or keys_values.stride(2) != 1:
        raise ValueError(
            f"keys and values are {tuple(keys_values.shape)}; wanted [rows, {2 * kv_heads}, {dim}], "
            "the last side by side"
        )
    if len(slots):
        _write_kv[(len(slots),)](
            view, keys_values, slots,
            view.stride(0), view.stride(1), view.stride(2), view.stride(3),
            keys_values.stride(0), keys_values.stride(1),
            KV_HEADS=kv_heads, DIM=dim, BLOCK_SIZE=block_size,
            HEADS=triton.next_power_of_2(2 * kv_heads), WIDTH=triton.next_power_of_2(dim), num_warps=4,
        )  # fmt: skip


def gather_blocks(memory: Tensor, blocks: Tensor, out: Tensor) -> None:
    """As `reference.gather_blocks`; `out` may be pinned host memory where the device can write there."""
    _move(memory, blocks, out, into=False)


def scatter_blocks(memory: Tensor, blocks: Tensor, given: Tensor) -> None:
    """As `reference.scatter_blocks`."""
    _move(memory, blocks, given, into=True)


def _move(memory: Tensor, blocks: Tensor, other: Tensor, *, into: bool) -> None:
    if other.shape != (len(blocks), memory.shape[1]) or other.dtype != memory.dtype:
        raise ValueError(
            f"{len(blocks)} blocks of {memory.shape[1]} {memory.dtype}; "
            f"given {tuple(other.shape)} {other.dtype}"
        )
    if not len(blocks):
        return
    memory, other = _words(memory), _words(other)
    words = memory.shape[1]
    width = min(2048, triton.next_power_of_2(words))
    _move_blocks[(len(blocks), triton.cdiv(words, width))](
        memory, blocks, other, words, memory.stride(0), other.stride(0), WIDTH=width, INTO=into, num_warps=8
    )


def _words(memory: Tensor) -> Tensor:
    """The same bytes as the widest integers that they are a multiple of."""
    for dtype, size in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2)):
        whole = memory.shape[1] % size == 0 and memory.stride(0) % size == 0
        if memory.dtype == torch.uint8 and whole and memory.data_ptr() % size == 0:
            return memory.view(dtype)
    return memory
