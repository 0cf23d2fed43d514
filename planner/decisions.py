"""The file of decisions: lines are added; when it is full it is kept once, and begun anew."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from fleet.errors import BadRequest
from planner.decide import State
from planner.memory import remembered
from planner.record import Line, encode_line
from planner.words import PlannerSettings

log = logging.getLogger(__name__)

LEAST_BYTES = 1 << 16
"""Of a file that is worth beginning anew."""
_TAIL_BYTES = 1 << 16


class DecisionsFile:
    """`keep` takes lines. It holds only whole ones, whatever happened to who wrote it before: half a line at
    its end is taken away. A file that is begun anew, or goes on after a gap, says what had been learnt by
    then, so that it can be decided again by itself.

    While nothing can be written, lines wait in memory, `most_waiting` bytes of them: no disk is no reason to
    stop deciding.
    """

    def __init__(
        self, path: Path, most_bytes: int, settings: PlannerSettings, most_waiting: int = 4 << 20
    ) -> None:
        """BadRequest: another planner writes it, or it cannot be written."""
        self.state: Callable[[], State] | None = None
        """What was learnt up to the line that is kept, of who writes."""
        self._path = path
        self._most = most_bytes
        self._most_waiting = most_waiting
        self._settings = settings
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._lost = 0
        self._failing = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
        except OSError as error:
            raise BadRequest(f"decisions cannot be written to {path}: {error.strerror}") from None
        with contextlib.suppress(OSError):  # A full disk may refuse even this; a pipe cannot be cut.
            self._cut_half_a_line()

    def keep(self, line: bytes) -> None:
        """Does not fail: the log says so once, and once when it is well again."""
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        try:
            if self._lost:
                # This line too was decided by what was learnt in the gap.
                self._forget()
                self._write(self._beginning(self._lost))
                log.warning("%s is written again; %d lines are not in it", self._path, self._lost)
                self._lost, self._failing = 0, False
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting_bytes -= len(self._waiting.popleft())
            if self._failing:
                log.info("%s is written again; no line is missing", self._path)
            self._failing = False
            if os.fstat(self._file).st_size >= self._most:
                self._begin_anew()
        except OSError as error:
            if not self._failing:
                log.warning("%s cannot be written: %s; lines wait in memory", self._path, error)
            self._failing = True
            if self._waiting_bytes > self._most_waiting:
                self._forget()

    def _forget(self) -> None:
        self._lost += len(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0

    def close(self) -> None:
        os.close(self._file)

    def _open(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise BadRequest(
                f"{self._path} is written by another planner; give each one a file of its own (--decisions)"
            ) from None
        except OSError:
            log.debug("%s cannot be locked", self._path)
        return file

    def _cut_half_a_line(self) -> None:
        size = end = os.fstat(self._file).st_size
        while end:
            begin = max(0, end - _TAIL_BYTES)
            at = os.pread(self._file, end - begin, begin).rfind(b"\n")
            if at >= 0:
                end = begin + at + 1
                break
            end = begin
        if end != size:
            os.ftruncate(self._file, end)

    def _write(self, line: bytes) -> None:
        """Whole, or not at all. OSError: not."""
        done = os.write(self._file, line)
        if done != len(line):
            os.ftruncate(self._file, os.fstat(self._file).st_size - done)
            raise OSError(f"only {done} of {len(line)} bytes have room")

    def _beginning(self, lost: int = 0) -> bytes:
        memory = None if self.state is None else remembered(self.state())
        return encode_line(Line(0.0, self._settings, memory=memory, lost=lost))

    def _begin_anew(self) -> None:
        self._path.replace(self._path.with_name(self._path.name + ".1"))
        before, self._file = self._file, self._open()
        os.close(before)
        self._write(self._beginning())
