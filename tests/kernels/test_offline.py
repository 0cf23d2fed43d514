"""The attention kernels compile for Hopper without one: on tensor cores, copies under way, no spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_attention_is_what_hopper_wants(tmp_path: Path) -> None:
    # A process of its own: whether kernels are interpreted is decided when they are imported.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.offline", "decode-split", "chunk"],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    found = {line["kernel"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert set(found) == {"_decode", "_combine", "_chunk"}
    for line in found.values():
        assert line["spills"] == 0, line
        assert line["shared"] <= 227 << 10, line
    assert found["_chunk"]["wgmma"] > 0
    assert found["_decode"]["mma"] > 0
    assert min(found[name]["async_copies"] for name in ("_decode", "_chunk")) > 0
