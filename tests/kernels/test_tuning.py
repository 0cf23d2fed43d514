"""Shapes of kernels: the nearest entry of a device's file, and what is said of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.kernels.tuning import DEFAULTS, FOLDER, choose, file_of, read


def test_the_nearest_entry_counts() -> None:
    table = {
        "decode": {"tile": 32},
        "decode/dim=128": {"tile": 64, "warps": 2},
        "decode/dim=128/group=4": {"tile": 128, "stages": 7},
    }
    assert choose(table, "decode", 128, 4) == {"tile": 128, "warps": 4, "stages": 7}
    assert choose(table, "decode", 128, 8) == {"tile": 64, "warps": 2, "stages": 5}
    assert choose(table, "decode", 64, 4)["tile"] == 32
    assert choose(table, "chunk", 128, 4) == DEFAULTS["chunk"]


def test_without_a_file_tiles_are_of_the_same_bytes() -> None:
    for kernel in ("decode", "chunk"):
        tiles = {dim: choose({}, kernel, dim, 4)["tile"] * dim for dim in (64, 128, 256)}
        assert len(set(tiles.values())) == 1


def test_files_are_found_by_the_device_and_checked(tmp_path: Path) -> None:
    assert file_of("NVIDIA H100 80GB HBM3").name == "nvidia-h100-80gb-hbm3.json"
    assert read(tmp_path / "none.json") == {}
    path = tmp_path / "some.json"
    for wrong, said in (
        ({"decod": {}}, "no kernel 'decod'"),
        ({"decode": {"rows": 4}}, "decode wants positive whole numbers tile, warps, stages"),
        ({"chunk/dim=64": {"tile": 0}}, "chunk/dim=64 wants positive"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=said):
            read(path)


def test_files_that_are_kept_are_right() -> None:
    for path in FOLDER.glob("*.json"):
        assert read(path)
