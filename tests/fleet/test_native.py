"""C is compiled once and never taken from where others write; else it is said why not."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fleet import native
from fleet.native import Source, Unusable
from fleet.native import build as build_source

MADE = 'while [ "$1" != -o ]; do [ "$1" = --version ] && exit; shift; done; echo kernels > "$2"'
"""Of a compiler that compiles."""


LIMIT_S = 120.0


def build(limit_s: float = LIMIT_S) -> Path:
    return build_source(Source("kernels", Path(__file__).with_name("kernels.c"), "it is faster", limit_s))


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
        (r"printf 'error: \377\200\n' >&2; exit 1", "error: "),
        ("exit 0", "it wrote no file"),
        ('while [ "$1" != --version ]; do echo on and on; done', "says more than a compiler would"),
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
    with pytest.raises(Unusable, match=r"no C compiler .*; with one, it is faster"):
        build()
    monkeypatch.setenv("PDFLEET_NATIVE", "0")
    with pytest.raises(Unusable, match="switched off by PDFLEET_NATIVE=0"):
        build()


@pytest.mark.parametrize("when", ["compiling", "asked for its version"])
def test_a_compiler_that_hangs_is_ended_with_what_it_started(
    when: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the front end waits for a compiler proper that holds its output open."""
    started = tmp_path / "started"
    os.mkfifo(started)
    held = os.open(started, os.O_RDONLY | os.O_NONBLOCK)
    version = '[ "$1" = --version ] && exit; ' if when == "compiling" else ""
    monkeypatch.setenv(
        "CC", compiler(tmp_path, f"{version}(echo > {started}; exec sleep 1000 9> {started}) & wait")
    )
    limit_s = 0.3 if when == "compiling" else LIMIT_S
    if when != "compiling":
        monkeypatch.setattr(native, "_VERSION_LIMIT_S", 0.3)
    with pytest.raises(Unusable, match=r"did not end within 0\.3 s"):
        build(limit_s)
    assert os.listdir(cache) == []
    os.set_blocking(held, True)
    while os.read(held, 100):  # until nobody holds it
        pass
    os.close(held)


def test_a_file_that_lost_its_end_or_was_changed_is_made_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading one that lost its end would end the process with SIGBUS."""
    monkeypatch.setenv("CC", compiler(tmp_path, MADE))
    path = build()
    whole = path.read_bytes()
    elsewhere = tmp_path / "elsewhere"
    for broken in (b"", whole[:-1], whole[:4], b"K" + whole[1:]):
        path.write_bytes(broken)
        assert build() == path
        assert path.read_bytes() == whole
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert build() == path
    assert not path.is_symlink()


def test_a_compiler_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compiler(tmp_path, MADE)
    monkeypatch.setenv("CC", plain)
    first = build()
    monkeypatch.setenv("CC", f"{plain} -mtune=generic")
    assert build() != first
    monkeypatch.setenv("CC", "'cc")
    with pytest.raises(Unusable, match="is no command: No closing quotation"):
        build()
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    with pytest.raises(Unusable, match="none cannot be run: "):
        build()


def test_a_folder_of_another_user_is_not_used_and_an_open_one_is_closed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, MADE))
    cache.mkdir()
    cache.chmod(0o777)
    build()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    owner = cache.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(Unusable, match=f"belongs to user {owner}, .* PDFLEET_CACHE names another"):
        build()


def test_what_killed_processes_left_is_removed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, MADE))
    old, new = cache / "making-old", cache / "making-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "kernels.so").write_bytes(b"half")
    os.utime(old, (0, 0))
    path = build()
    assert sorted(os.listdir(cache)) == sorted([path.name, new.name])


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PDFLEET_CACHE")
    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(Unusable, match=r"no folder .* home directory.* PDFLEET_CACHE names one"):
        build()
