"""The table of what befell others in docs/testing.md names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_CASE = re.compile(r"\| (F\d{3}) \| [^|]+ \| ([^|]+) \|")
_NAME = re.compile(r"`([^`]+)`")


def test_every_case_names_tests_that_there_are() -> None:
    cases = _CASE.findall((ROOT / "docs" / "testing.md").read_text())
    assert len(cases) == len({number for number, _ in cases}) == 52
    for number, tests in cases:
        source = ""
        for name in _NAME.findall(tests):
            if name.endswith(".py"):
                file = ROOT / "tests" / name
                source = file.read_text() if file.exists() else ""
                assert source, f"{number}: tests/{name} is not there"
            else:
                assert f"def test_{name}(" in source, f"{number}: {name} is not there"
