"""Thousands of fault schedules: `faults.py` has what happens to a fleet, `playing.py` what must hold."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from drawing import draw
from faults import KINDS
from playing import play
from soak import how_to_replay

PORTIONS, EACH = 8, 250


@pytest.mark.parametrize("portion", range(PORTIONS))
def test_schedules(portion: int) -> None:
    wrong: list[str] = []
    ends: Counter[str] = Counter()
    struck: Counter[str] = Counter()
    damaged = mismatches = 0
    for seed in range(portion * EACH, (portion + 1) * EACH):
        outcome = play(draw(seed))
        if outcome.problems:
            wrong.append(f"seed {seed}: {outcome.problems[:3]}; {how_to_replay(seed)}")
        ends += outcome.ends
        struck += outcome.struck
        damaged += outcome.damaged
        mismatches += outcome.counters["checksum_mismatches"]
    assert not wrong, f"{len(wrong)} of {EACH} fail\n" + "\n".join(wrong)
    # Failing everything would hold every other promise: most of what is asked is answered.
    asked = ends.total() - ends["left"] - ends["router lost"] - ends["too long"]
    assert ends["finished"] / asked > 0.85, ends
    assert len(struck) == len(KINDS), f"never struck: {set(KINDS) - set(struck)}"
    assert mismatches > 0
    assert damaged >= mismatches


def test_a_seed_plays_the_same_twice() -> None:
    for seed in range(5000, 5020):
        first, second = play(draw(seed)), play(draw(seed))
        assert first.schedule == second.schedule
        assert first.trace
        assert first.digest() == second.digest(), seed


def test_a_seed_plays_the_same_in_every_process() -> None:
    """Whatever the hashes of strings, and so the order of sets, are there."""
    code = "from drawing import *; from playing import *; "
    code += "print([play(draw(seed)).digest() for seed in range(5100, 5115)])"
    told = set()
    for salt in ("1", "2"):
        room = Path(__file__).resolve().parent
        env = {**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": f"{room}:{room.parents[1]}"}
        told.add(
            subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True).stdout
        )
    assert len(told) == 1
