"""The shapes kernels run in: by device, from files made by the tuning command, or good defaults.

Nothing is tried out while serving: `python -m benchmarks.gpu.tune` writes `tuned/DEVICE.json` on a machine
that has the device, and the file is kept.
"""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on any tensors, slowly."""

FOLDER = Path(__file__).parent / "tuned"

DEFAULTS: dict[str, dict[str, int]] = {
    "decode": {"tile": 64, "warps": 4, "stages": 5},
    "chunk": {"rows": 128, "tile": 64, "warps": 8, "stages": 5},
    "chunk_float32": {"rows": 16, "tile": 16, "warps": 4, "stages": 2},
}
"""For devices without a file, and heads of 128: sized for Hopper's registers and shared memory by what
`benchmarks.gpu.offline` tells (nothing spills, two tiles of keys and values are on their way). Of five stages
two go to tiles, as keys are found through a table that has to be read before. Float32 is multiplied without
tensor cores, from registers, of which large tiles want far more than there are."""

_INTERPRETER: dict[str, dict[str, int]] = {
    "decode": {"tile": 16, "warps": 1, "stages": 1},
    "chunk": {"rows": 16, "tile": 16, "warps": 1, "stages": 1},
    "chunk_float32": {"rows": 16, "tile": 16, "warps": 1, "stages": 1},
}
"""Small tiles, so that small shapes have several of them."""


def file_of(device_name: str) -> Path:
    """`NVIDIA H100 80GB HBM3` → `nvidia-h100-80gb-hbm3.json`."""
    return FOLDER / f"{re.sub('[^a-z0-9]+', '-', device_name.lower()).strip('-')}.json"


@functools.cache
def tuned(kernel: str, device: torch.device, *, dim: int, group: int) -> dict[str, int]:
    """The shape of a kernel for heads of `dim` numbers, `group` query heads to a KV head."""
    if INTERPRETED:
        return _INTERPRETER[kernel]
    table = _table(torch.cuda.get_device_name(device)) if device.type == "cuda" else {}
    return choose(table, kernel, dim, group)


def choose(table: dict[str, dict[str, int]], kernel: str, dim: int, group: int) -> dict[str, int]:
    """The nearest entry: of this dim and group, else of this dim, else the kernel's, else the default."""
    for key in (f"{kernel}/dim={dim}/group={group}", f"{kernel}/dim={dim}", kernel):
        if key in table:
            return {**DEFAULTS[kernel], **table[key]}
    default = DEFAULTS[kernel]
    # The same bytes a tile, whatever the width of heads.
    if dim > 128:
        return {**default, "tile": max(16, default["tile"] // 2)}
    return {**default, "tile": default["tile"] * 2} if dim <= 64 else default


@functools.cache
def _table(device_name: str) -> dict[str, dict[str, int]]:
    return read(file_of(device_name))


def read(path: Path) -> dict[str, dict[str, int]]:
    """A tuned file; empty where there is none. ValueError names what is wrong in it."""
    if not path.is_file():
        return {}
    table = json.loads(path.read_text(encoding="utf-8"))
    for key, shape in table.items():
        kernel = key.partition("/")[0]
        if kernel not in DEFAULTS:
            raise ValueError(f"{path}: no kernel {kernel!r}; there are {', '.join(DEFAULTS)}")
        unknown = sorted(set(shape) - set(DEFAULTS[kernel]))
        if unknown or not all(isinstance(value, int) and value > 0 for value in shape.values()):
            raise ValueError(f"{path}: {key} wants positive whole numbers {', '.join(DEFAULTS[kernel])}")
    return dict(table)
