"""The script for a machine with a GPU runs, tiny and on a CPU, so that no time there is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(out: Path, *parts: str) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu/run.sh"), "--dry", *parts],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(out), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_every_part_measures_and_the_table_shows_it(tmp_path: Path) -> None:
    code, said = run(tmp_path)
    assert code == 0, said
    cases = {json.loads(line)["case"] for line in (tmp_path / "gpu.jsonl").read_text().splitlines()}
    assert cases == {
        "gpu/decode-attention",
        "gpu/chunk-attention",
        "gpu/decode-step",
        "gpu/engine-step",
        "gpu/prefill",
        "gpu/pair-prefill",
        "gpu/pair-handover",
        "gpu/pair-decode",
    }
    table = said[said.index("case  ") :]
    assert all(case in table for case in cases)
    pair = [line for line in (tmp_path / "gpu.jsonl").read_text().splitlines() if "same_text" in line]
    assert json.loads(pair[0])["settings"]["same_text"] is True


def test_a_part_that_fails_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "msgspec.py").write_text("raise ImportError('broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    code, said = run(tmp_path, "step", "chunk")
    assert code == 1
    assert "== step: FAILED with 1" in said
    assert "broken on purpose" in said
    assert "== chunk: ok" in said
    assert "failed: step" in said


def test_an_unknown_part_is_named(tmp_path: Path) -> None:
    code, said = run(tmp_path, "values!")
    assert code == 2
    assert "no part values!" in said
