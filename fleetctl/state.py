"""The folder of one supervised fleet: its lock, its state file, its logs, and who of it still lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import msgspec

from fleet.errors import BadRequest, Unavailable
from fleetctl.words import ChildRecord, FleetState

MARK = "=== started"
"""Begins the line that the supervisor writes into a log before each start of its owner."""


def default_folder(fleet: str) -> Path:
    """`$XDG_STATE_HOME/pdfleet/FLEET`, or below `~/.local/state`."""
    if not fleet or not all(letter.isalnum() or letter in "-_" for letter in fleet):
        raise BadRequest(f"{fleet!r} is no name of a fleet: use letters, digits, '-' and '_'", param="fleet")
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "pdfleet" / fleet


class StateFolder:
    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.logs = self.path / "logs"
        self._file = self.path / "state.json"
        self._lock = self.path / "lock"

    def check(self) -> None:
        """Raises `Unavailable` where it cannot be made or written. Makes nothing."""
        there = next(one for one in (self.path, *self.path.parents) if one.exists())
        if not there.is_dir():
            raise self._unusable(f"{there} is no folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise self._unusable(f"{there} may not be written")

    def make(self) -> None:
        """Raises `Unavailable`."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(str(error)) from None

    def _unusable(self, why: str) -> Unavailable:
        return Unavailable(
            f"the fleet's state cannot be kept in {self.path}: {why}; name another folder with --state-dir"
        )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Held by the one supervisor of this fleet. Raises `Unavailable` naming the other one, or where its
        folder cannot be made.

        The system drops the lock with the process, however it dies; no stale lock can stay.
        """
        self.make()
        with self._lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                state = self.read()
                who = f"fleet {state.fleet!r} is up already" if state else "another `fleetctl up` runs"
                where = f" (pid {state.pid}, {state.router}/v1)" if state else ""
                raise Unavailable(
                    f"{who}{where}; see it with `fleetctl status`, end it with `fleetctl down`, "
                    "or give this one another name with --fleet"
                ) from None
            yield

    def held(self) -> bool:
        """Whether a supervisor holds the lock now."""
        try:
            with self._lock.open("r+") as file:  # "a" would make one
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def write(self, state: FleetState) -> None:
        """Whole or not at all: readers never see half a file."""
        new = self._file.with_suffix(".new")
        new.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2))
        new.replace(self._file)

    def read(self) -> FleetState | None:
        """None where there is none, or one of another version."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=FleetState)
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
            return None

    def remove(self) -> None:
        self._file.unlink(missing_ok=True)

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def open_log(self, name: str) -> FileIO:
        """To write at its end, unbuffered. Where there can be none, what is written is lost."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            return self.log(name).open("ab", buffering=0)
        except OSError:
            return Path(os.devnull).open("ab", buffering=0)

    def fresh_logs(self) -> None:
        """An empty folder for this run; the logs of the run before are kept once."""
        previous = self.path / "logs.previous"
        if self.logs.exists():
            shutil.rmtree(previous, ignore_errors=True)
            self.logs.rename(previous)
        self.logs.mkdir(parents=True)

    def bound_logs(self, most_bytes: int) -> None:
        """Copies a longer log to `NAME.log.1`, over the one before, and begins it anew. Its owner goes on
        writing to the same file, at its new end; what it says in the moment between is lost. Without room
        for a copy all of it is."""
        for path in self.logs.glob("*.log"):
            if path.stat().st_size > most_bytes:
                copy = path.with_suffix(".log.1")
                try:
                    shutil.copyfile(path, copy)
                except OSError:
                    copy.unlink(missing_ok=True)
                os.truncate(path, 0)

    def last_lines(self, name: str, count: int) -> list[str]:
        """Of the latest start of `name` only."""
        try:
            lines = self.log(name).read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        starts = [index for index, line in enumerate(lines) if line.startswith(MARK)]
        return lines[starts[-1] + 1 if starts else 0 :][-count:]

    def orphans(self) -> list[ChildRecord]:
        """What a supervisor that was killed left behind; those of one that lives while it does."""
        state = self.read()
        return [child for child in state.children if alive(child.pid, child.born)] if state else []

    def clear_orphans(self, limit_s: float = 5.0) -> list[ChildRecord]:
        """Ends the orphans; call with the lock held.

        Kills only a process that is proven to be the recorded one: same pid, same boot, same start.
        """
        orphans = self.orphans()
        for child in orphans:
            assert child.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        until = time.monotonic() + limit_s
        while any(alive(child.pid, child.born) for child in orphans):
            if time.monotonic() > until:
                names = ", ".join(f"{child.name} (pid {child.pid})" for child in orphans)
                raise Unavailable(f"processes of an earlier run do not end: {names}; end them by hand")
            time.sleep(0.02)
        self.remove()
        return orphans


def born(pid: int) -> str | None:
    """What tells a process from a later one with the same pid; None when it does not run.

    The boot, and the start in clock ticks since then: field 22 of proc_pid_stat(5).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else f"{boot[:8]}-{fields[19]}"


def alive(pid: int | None, identity: str | None) -> bool:
    return pid is not None and identity is not None and born(pid) == identity
