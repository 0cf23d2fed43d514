"""Finds the fastest shapes of the attention kernels on this machine's GPU, and writes them to be kept.

`python -m benchmarks.gpu.tune [--minutes 5]`: writes `engine/kernels/tuned/DEVICE.json`; commit it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu.attention import world
from benchmarks.gpu.timing import device_of, median, name_of, seconds

HEADS = ((128, 4), (64, 4), (128, 8), (256, 4), (64, 3))
"""(dim, group) of common models, the most common first: time may run out."""


def candidates(kernel: str, dim: int) -> Iterator[dict[str, int]]:
    tiles = [tile for tile in (32, 64, 128, 256) if 2048 <= tile * dim <= 16384]
    if kernel == "decode":
        for tile, warps, stages in itertools.product(tiles, (2, 4, 8), (3, 5, 7)):
            yield {"tile": tile, "warps": warps, "stages": stages}
        return
    for rows, tile, warps, stages in itertools.product((64, 128), tiles, (4, 8), (2, 3, 5)):
        if rows // warps >= 16:
            yield {"rows": rows, "tile": tile, "warps": warps, "stages": stages}


def work(kernel: str, dim: int, group: int, device: torch.device) -> Callable[[dict[str, int]], None]:
    from engine.kernels.attention import Split, chunk_attention, decode_attention, plan_split

    kv_heads, block = 8, 16
    seqs, tokens = (64, 4096) if kernel == "decode" else (1, 8192)
    pool, tables = world(device, seqs, tokens, kv_heads, dim, block)
    lengths = torch.full((seqs,), tokens, dtype=torch.int32, device=device)
    rows = seqs if kernel == "decode" else tokens
    query = torch.randn(rows, kv_heads * group, dim, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(query)
    scale = dim**-0.5
    if kernel == "chunk":
        starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        return lambda shape: void(
            chunk_attention(query, pool, 0, tables, starts, lengths, scale, out=out, shape=shape)
        )
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    parts, span = plan_split([tokens] * seqs, kv_heads, processors=processors)
    split = Split(parts, torch.tensor([span, tables.shape[1]], dtype=torch.int32, device=device))
    return lambda shape: void(
        decode_attention(query, pool, 0, tables, lengths, scale, split=split, out=out, shape=shape)
    )


def void(_: object) -> None:
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.tune")
    parser.add_argument("--minutes", type=float, default=5.0, help="then what was found is written")
    options = parser.parse_args(argv)
    device = device_of(dry=False)
    from engine.kernels.tuning import file_of, read

    path = file_of(name_of(device))
    table = read(path)
    until = time.monotonic() + 60 * options.minutes
    for (dim, group), kernel in itertools.product(HEADS, ("decode", "chunk")):
        run = work(kernel, dim, group, device)
        best: tuple[float, dict[str, int]] | None = None
        for shape in candidates(kernel, dim):
            if time.monotonic() > until:
                break
            try:
                took = median(seconds(partial(run, shape), device, 10))
            except Exception as error:  # noqa: BLE001 - a shape that a device cannot run is not the fastest
                print(f"{kernel} {dim} {group} {shape}: {type(error).__name__}", file=sys.stderr)
                continue
            if best is None or took < best[0]:
                best = (took, shape)
                print(f"{kernel} dim={dim} group={group} {shape}: {took * 1e6:.0f} us", flush=True)
        if best is not None:
            table[f"{kernel}/dim={dim}/group={group}"] = best[1]
    path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
