"""The C kernels touch no byte beyond what they are given, at odd sizes too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.native.library import Unusable, native

HERE = Path(__file__).parent


def test_kernels_stay_within_their_buffers() -> None:
    """`guarded_kernels.py --full` is the whole matrix, by hand."""
    try:
        native()
    except Unusable as why:
        pytest.skip(str(why))
    done = subprocess.run(
        [sys.executable, str(HERE / "guarded_kernels.py")],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all within bounds\n"
