"""Attention kernels against what the device can do: decodes against its copies, chunks against its products.

`python -m benchmarks.gpu.attention decode|chunk [--dry]`: one JSON line a case.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import torch

from benchmarks.gpu.timing import copy_rate, device_of, median, name_of, product_rate, seconds
from benchmarks.report import emit

DECODE_TARGET, CHUNK_TARGET = 0.8, 0.5


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.attention")
    parser.add_argument("kernel", choices=("decode", "chunk"))
    parser.add_argument("--dry", action="store_true", help="tiny, on a CPU, in Triton's interpreter")
    options = parser.parse_args(argv)
    device = device_of(options.dry)
    (decode if options.kernel == "decode" else chunk)(device, options.dry)
    return 0


def world(
    device: torch.device, seqs: int, tokens: int, kv_heads: int, dim: int, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A random pool of one layer, and tables whose blocks lie anywhere in it."""
    width = -(-tokens // block)
    shape = (seqs * width, 1, 2, kv_heads, block, dim)
    pool = torch.randn(shape, device=device, dtype=torch.bfloat16)
    tables = torch.randperm(seqs * width, device=device).view(seqs, width).int()
    return pool, tables


def decode(device: torch.device, dry: bool) -> None:
    from engine.kernels.attention import Split, decode_attention, plan_split

    processors = 4 if dry else torch.cuda.get_device_properties(device).multi_processor_count
    limit = copy_rate(device, 1 << (16 if dry else 32))
    sizes = [(2, 48, 2, 2, 16, 16)] if dry else [
        (64, 4096, 8, 4, 128, 16), (64, 4096, 8, 4, 128, 64), (64, 4096, 8, 4, 64, 16),
        (1, 131072, 8, 4, 128, 16), (256, 1024, 8, 4, 128, 16),
    ]  # fmt: skip
    for seqs, tokens, kv_heads, group, dim, block in sizes:
        pool, tables = world(device, seqs, tokens, kv_heads, dim, block)
        lengths = torch.full((seqs,), tokens, dtype=torch.int32, device=device)
        query = torch.randn(seqs, kv_heads * group, dim, device=device, dtype=torch.bfloat16)
        parts, span = plan_split([tokens] * seqs, kv_heads, processors=processors, tile=16 if dry else 128)
        split = Split(parts, torch.tensor([span, tables.shape[1]], dtype=torch.int32, device=device))
        out = torch.empty_like(query)
        run = partial(decode_attention, query, pool, 0, tables, lengths, dim**-0.5, split=split, out=out)
        samples = seconds(run, device, 2 if dry else 50)
        moved = 2 * seqs * tokens * kv_heads * dim * 2
        emit(
            "gpu/decode-attention", "GB/s", [moved / sample / 1e9 for sample in samples],
            batch=seqs, context=tokens, kv_heads=kv_heads, group=group, dim=dim, block=block, parts=parts,
            limit=limit / 1e9, limit_is="copy, bytes read and written", target=DECODE_TARGET,
            device=name_of(device), ratio=moved / median(samples) / limit,
        )  # fmt: skip
        del pool, run


def chunk(device: torch.device, dry: bool) -> None:
    from engine.kernels.attention import chunk_attention

    limit = product_rate(device, 64 if dry else 8192)
    # Sequences, tokens computed, tokens before them, KV heads, query heads of one, width, tokens a block.
    sizes = [(1, 20, 12, 1, 2, 16, 16)] if dry else [
        (1, 8192, 0, 8, 4, 128, 16), (1, 8192, 0, 8, 4, 128, 64), (1, 2048, 6144, 8, 4, 128, 16),
        (16, 512, 512, 8, 4, 128, 16), (1, 8192, 0, 8, 4, 64, 16),
    ]  # fmt: skip
    for seqs, count, before, kv_heads, group, dim, block in sizes:
        tokens = count + before
        pool, tables = world(device, seqs, tokens, kv_heads, dim, block)
        lengths = torch.full((seqs,), tokens, dtype=torch.int32, device=device)
        starts = torch.arange(seqs + 1, dtype=torch.int32, device=device) * count
        query = torch.randn(seqs * count, kv_heads * group, dim, device=device, dtype=torch.bfloat16)
        out = torch.empty_like(query)
        run = partial(chunk_attention, query, pool, 0, tables, starts, lengths, dim**-0.5, out=out)
        samples = seconds(run, device, 1 if dry else 20)
        # Two products of 2 operations, over the keys that each row sees.
        seen = count * before + count * (count + 1) / 2
        work = 4 * seqs * kv_heads * group * dim * seen
        emit(
            "gpu/chunk-attention", "TFLOP/s", [work / sample / 1e12 for sample in samples],
            sequences=seqs, tokens=count, before=before, kv_heads=kv_heads, group=group, dim=dim, block=block,
            limit=limit / 1e12, limit_is="bfloat16 product of 8192 squared", target=CHUNK_TARGET,
            device=name_of(device), ratio=work / median(samples) / limit,
        )  # fmt: skip
        del pool, run


if __name__ == "__main__":
    sys.exit(main())
