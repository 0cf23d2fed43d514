"""The C kernels: what is none of them is told, and what a process has no leave for is not used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MADE = 'while [ "$1" != -o ]; do [ "$1" = --version ] && exit; shift; done; echo kernels > "$2"'
"""Of a compiler that compiles."""

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@needs_compiler
def test_what_is_no_library_of_kernels_is_told(tmp_path: Path) -> None:
    """In a process of its own, as what was loaded stays."""
    script = """
from engine.native.library import Unusable, native
try:
    native()
except Unusable as why:
    print(why)
"""
    other = tmp_path / "compiler"
    other.write_text(f"#!/bin/sh\n{MADE}\n")
    other.chmod(0o755)
    for made, said in ((str(other), "file too short"), ("cc -Dhighest=lowest", "undefined symbol: highest")):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "CC": made, "PDFLEET_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "the kernels cannot be loaded: " in done.stdout
        assert said in done.stdout


TILES = """
import ctypes, torch
class Stack(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))
memory = ctypes.create_string_buffer(6144)
ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 6144)), None)
from engine.attention.cpu import CpuAttention
from engine.attention.protocol import Look
from engine.kv_pool import KvPool
from engine.native.library import native
from engine.step_plan import plan_step
from engine.words import Chunk
from fleet.kv_layout import KvLayout
from fleet.request import Sampling
layout = KvLayout(1, 1, 64, 16, "bfloat16")
attention = CpuAttention(KvPool(layout, torch.zeros(1, layout.block_bytes, dtype=torch.uint8)))
prepared = attention.prepare(plan_step([Chunk(0, (1,), 0, (0,), True, Sampling(1))], layout))
rows = torch.ones(1, 4, 64, dtype=torch.bfloat16)
attention.write(0, rows[:, 2:], prepared)
print(native().amx, attention.attend(0, rows[:, :2], prepared, Look(0.1)).sum().item())
"""


@needs_compiler
def test_without_leave_to_use_matrix_tiles_nothing_uses_them() -> None:
    """Linux refuses it to a process with a small signal stack; a tile instruction would then end it."""
    done = subprocess.run([sys.executable, "-c", TILES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "128.0"]
