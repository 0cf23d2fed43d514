"""The C kernels are compiled once and never taken from where others write; else it is said why not."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from engine.native.library import Unusable, build


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDFLEET_CACHE", str(tmp_path))
    monkeypatch.delenv("PDFLEET_NATIVE", raising=False)
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "native"


def compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_what_is_compiled_is_kept_unless_others_could_write_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    script = (
        f'echo "$@" >> {log}; while [ "$1" != -o ]; do [ "$1" = --version ] && exit; shift; done; : > "$2"'
    )
    monkeypatch.setenv("CC", compiler(tmp_path, script))
    path = build()
    assert path.parent == cache
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    asked = log.read_text().count("kernels.c")
    assert build() == path
    assert log.read_text().count("kernels.c") == asked
    path.chmod(0o722)
    assert build() == path
    assert log.read_text().count("kernels.c") == asked + 1
    assert os.listdir(cache) == [path.name]


def test_another_compiler_makes_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = 'while [ "$1" != -o ]; do [ "$1" = --version ] && exit; shift; done; : > "$2"'
    monkeypatch.setenv("CC", compiler(tmp_path, f'[ "$1" = --version ] && echo one; {made}'))
    first = build()
    monkeypatch.setenv("CC", compiler(tmp_path, f'[ "$1" = --version ] && echo two; {made}'))
    assert build() != first


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 3", "did not compile the kernels: it ended with 3"),
        ("echo 'a/kernels.c:3:1: error: no such thing' >&2; exit 1", r"kernels\.c:3:1: error: no such thing"),
    ],
)
def test_a_compiler_that_fails_is_quoted(
    script: str, said: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, script))
    with pytest.raises(Unusable, match=said):
        build()
    assert os.listdir(cache) == []


def test_without_a_compiler_and_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unusable, match="no C compiler"):
        build()
    monkeypatch.setenv("PDFLEET_NATIVE", "0")
    with pytest.raises(Unusable, match="switched off by PDFLEET_NATIVE=0"):
        build()
