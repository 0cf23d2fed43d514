"""Compiles the kernels for Hopper on a machine without a GPU, and says what they would take of one.

`python -m benchmarks.gpu.offline [NAME…]`: registers, spills, shared memory and tensor-core instructions of
each case, one JSON line each. Nothing runs: the functions are called as they are served, and each launch is
compiled only. Needs Triton's own assembler, no CUDA.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ARCH = 90


class _Hopper:
    """As much of a driver as compiling needs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self, name)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCH, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@contextmanager
def compiling() -> Iterator[list[Any]]:
    """Launches inside compile and are put in the list."""
    launched: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        launched.append(kernel)
        return kernel

    driver.set_active(_Hopper())
    JITFunction.run = compile_only
    try:
        yield launched
    finally:
        JITFunction.run = run
        driver._active = None


def resources(kernel: Any) -> dict[str, Any]:
    """Of a compiled kernel: registers a thread, bytes spilled, shared bytes, kinds of matrix instructions."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        used = subprocess.run(
            [cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        code = subprocess.run(
            [cuobjdump, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", used)}
    return {
        "kernel": kernel.metadata.name,
        "warps": kernel.metadata.num_warps,
        "registers": found.get("REG", 0),
        "stack": found.get("STACK", 0) + found.get("LOCAL", 0),
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "shared": kernel.metadata.shared,
        "wgmma": len(re.findall(r"\bHGMMA\b", code)),
        "mma": len(re.findall(r"\bHMMA\b", code)),
        "async_copies": len(re.findall(r"\bLDGSTS\b", code)),
        "wide_loads": len(re.findall(r"LDG\.E(?:\.\w+)*\.128", code)),
    }


def cases(
    dim: int = 128, group: int = 4, kv_heads: int = 8, block: int = 16
) -> dict[str, Callable[[], object]]:
    """What is served: calls of each kernel's function at the shapes of a model of 8B class."""
    from engine.kernels import attention, cache, rows, sampling

    bf16 = torch.bfloat16
    seqs, heads, width = 64, kv_heads * group, 256
    pool = torch.empty(64, 2, 2, kv_heads, block, dim, dtype=bf16)
    tables = torch.zeros(seqs, width, dtype=torch.int32)
    lengths = torch.ones(seqs, dtype=torch.int32)
    query = torch.empty(seqs, heads, dim, dtype=bf16)
    split = attention.Split(8, torch.tensor([512, width], dtype=torch.int32))
    starts = torch.arange(seqs + 1, dtype=torch.int32)
    scale = dim**-0.5
    hidden = torch.empty(seqs, 4096, dtype=bf16)
    norm = torch.empty(4096, dtype=bf16)
    table = torch.empty(seqs, dim // 2, dtype=bf16)
    kv = torch.empty(seqs, 2 * kv_heads, dim, dtype=bf16)
    slots = torch.zeros(seqs, dtype=torch.int64)
    memory = torch.empty(64, 1 << 16, dtype=torch.uint8)
    blocks = torch.zeros(8, dtype=torch.int32)
    logits = torch.empty(seqs, 128256)
    floats, ints = torch.ones(seqs), torch.zeros(seqs, dtype=torch.int32)
    keys = torch.zeros(seqs, 2, dtype=torch.int32)
    return {
        "decode": lambda: attention.decode_attention(query, pool, 0, tables, lengths, scale),
        "decode-split": lambda: attention.decode_attention(
            query, pool, 0, tables, lengths, scale, split=split
        ),
        "chunk": lambda: attention.chunk_attention(query, pool, 0, tables, starts, lengths, scale),
        "chunk-window": lambda: attention.chunk_attention(
            query, pool, 0, tables, starts, lengths, scale, 1024, 50.0
        ),
        "write_kv": lambda: cache.write_kv(pool, 0, kv, slots),
        "gather_blocks": lambda: cache.gather_blocks(
            memory, blocks, torch.empty(8, 1 << 16, dtype=torch.uint8)
        ),
        "rms_norm": lambda: rows.rms_norm(hidden, norm, 1e-5, torch.empty_like(hidden)),
        "rotary": lambda: rows.rotary(query, table, table),
        "swiglu": lambda: rows.swiglu(torch.empty(seqs, 28672, dtype=bf16)),
        "sampling": lambda: sampling.draw_tokens(logits, floats, ints, floats, floats, keys),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.offline", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--block", type=int, default=16)
    options = parser.parse_args(argv)
    known = cases(options.dim, options.group, block=options.block)
    for name in options.names or known:
        with compiling() as launched:
            known[name]()
        for kernel in launched:
            print(json.dumps({"case": name, **resources(kernel)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
