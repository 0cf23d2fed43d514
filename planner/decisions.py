"""The file of decisions: lines are added; when it is full it is kept once, and begun anew."""

from __future__ import annotations

from pathlib import Path

from planner.record import Line, encode_line
from planner.words import PlannerSettings


class DecisionsFile:
    """`keep` takes lines. A file that is begun anew has no beginning of what was learnt: it begins with the
    settings, and replays from there as a planner that has just started would."""

    def __init__(self, path: Path, most_bytes: int, settings: PlannerSettings) -> None:
        self._path = path
        self._most = most_bytes
        self._settings = settings
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def keep(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        if self._file.tell() >= self._most:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._path.open("ab")
            self._file.write(encode_line(Line(0.0, self._settings)))

    def close(self) -> None:
        self._file.close()
