"""The state folder: one supervisor at a time, whole files, and no process killed by mistake."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.errors import BadRequest, Unavailable
from fleetctl.state import MARK, StateFolder, alive, born, default_folder
from fleetctl.words import ChildRecord, FleetState, Kind, Phase


def state(*children: ChildRecord) -> FleetState:
    identity = born(os.getpid())
    assert identity is not None
    addresses = ("127.0.0.1:1", "nats://n", "http://r")
    return FleetState("blue", os.getpid(), identity, "m", *addresses, True, children)


def record(pid: int, identity: str | None) -> ChildRecord:
    return ChildRecord("decode-a", Kind.DECODE, Phase.READY, pid, identity, 0, "log", "")


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    assert folder.read() is None
    written = state(record(1, "x-1"))
    folder.write(written)
    assert folder.read() == written
    (tmp_path / "state.json").write_text('{"fleet": ')
    assert folder.read() is None


def test_a_second_supervisor_is_told_of_the_first(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    assert not folder.held()
    with folder.locked():
        folder.write(state())
        assert StateFolder(tmp_path).held()
        with pytest.raises(Unavailable, match=r"'blue' is up already.*http://r/v1.*fleetctl down"):
            StateFolder(tmp_path).locked().__enter__()
    assert not folder.held()
    with StateFolder(tmp_path).locked():
        pass


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = StateFolder(tmp_path / "file" / "blue")
    for tried in (folder.check, folder.make, folder.locked().__enter__):
        with pytest.raises(Unavailable, match=r"kept in .*file/blue: .*--state-dir"):
            tried()
    StateFolder(tmp_path / "new" / "blue").check()
    assert not (tmp_path / "new").exists()


def test_orphans_are_ended(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    folder = StateFolder(tmp_path)
    folder.write(state(record(sleeper.pid, born(sleeper.pid))))
    assert [orphan.pid for orphan in folder.clear_orphans()] == [sleeper.pid]
    assert sleeper.wait() == -9
    assert folder.read() is None


def test_another_process_with_a_recorded_pid_is_left_alone(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    folder = StateFolder(tmp_path)
    folder.write(state(record(sleeper.pid, "an-earlier-start"), record(sleeper.pid, None)))
    assert folder.clear_orphans() == []
    assert sleeper.poll() is None


def test_a_process_is_known_by_its_start(sleeper: subprocess.Popen[bytes]) -> None:
    identity = born(sleeper.pid)
    assert identity is not None
    assert identity != born(os.getpid())
    assert alive(sleeper.pid, identity)
    sleeper.kill()
    # Not reaped yet: a zombie is no process to wait for, nor one to kill.
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not alive(sleeper.pid, identity)


def test_only_lines_of_the_last_start_are_shown(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.fresh_logs()
    folder.log("decode-a").write_text(f"{MARK} one\nold\n{MARK} two\nnew\nnewer\n")
    assert folder.last_lines("decode-a", 10) == ["new", "newer"]
    assert folder.last_lines("decode-a", 1) == ["newer"]
    assert folder.last_lines("nobody", 10) == []


def test_logs_of_the_run_before_are_kept_once(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    for text in ("first", "second"):
        folder.fresh_logs()
        assert list(folder.logs.iterdir()) == []
        folder.log("router").write_text(text)
    folder.fresh_logs()
    assert (tmp_path / "logs.previous" / "router.log").read_text() == "second"


def test_a_log_is_bounded_while_its_owner_writes_on(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.fresh_logs()
    with folder.log("router").open("ab", buffering=0) as owner:
        for turn in range(3):
            owner.write(b"long\n" * 100)
            folder.bound_logs(400)
            owner.write(b"turn %d\n" % turn)
            assert folder.last_lines("router", 9) == [f"turn {turn}"]
            folder.bound_logs(400)
    assert folder.log("router").read_text() == "turn 2\n", "a short one is left alone"
    assert sorted(path.name for path in folder.logs.iterdir()) == ["router.log", "router.log.1"]
    assert folder.logs.joinpath("router.log.1").read_text().startswith("turn 1\nlong\n")


def test_without_room_logs_are_bounded_all_the_same_and_nobody_waits_for_one(
    tmp_path: Path,
) -> None:
    folder = StateFolder(tmp_path)
    folder.fresh_logs()
    folder.log("router").write_bytes(b"long\n" * 100)
    folder.logs.joinpath("router.log.1").symlink_to("/dev/full")
    folder.bound_logs(400)
    assert folder.log("router").read_bytes() == b""
    shutil.rmtree(folder.logs)
    with folder.open_log("router") as owner:
        owner.write(b"made anew\n")
    assert folder.last_lines("router", 9) == ["made anew"]
    shutil.rmtree(folder.logs)
    folder.logs.write_text("no folder")
    with folder.open_log("router") as owner:
        assert owner.write(b"lost\n") == 5


def test_the_default_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert default_folder("blue") == Path("/somewhere/pdfleet/blue")
    for name in ("", "../blue", "a/b", "a b"):
        with pytest.raises(BadRequest, match="no name of a fleet"):
            default_folder(name)
