"""The file of API keys: read when a router starts, and again whenever it has changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from pathlib import Path

from fleet.api_keys import ApiKey, check_classes, read_file

log = logging.getLogger(__name__)


class KeysFile:
    """One file, and keys `besides` that stay. Looked at every now and then: files that are mounted into
    containers tell nobody of a change."""

    def __init__(self, file: Path, classes: Collection[str], besides: tuple[ApiKey, ...] = ()) -> None:
        self._file = file
        self._classes = classes
        self._besides = besides
        self._seen = self._state()

    def read(self) -> tuple[ApiKey, ...]:
        """All keys. OSError: it cannot be read; ValueError: it is no file of keys. Neither shows it."""
        # Before the text: what changes in between is noticed at the next look.
        self._seen = self._state()
        keys = read_file(self._file.read_text("utf-8"))
        check_classes(keys, self._classes)
        return (*keys, *self._besides)

    async def follow(self, changed: Callable[[tuple[ApiKey, ...]], None], every_s: float) -> None:
        """Calls `changed` with the keys of each new version, for ever. One that is missing or broken is
        logged, once, and changes nothing."""
        while True:
            await asyncio.sleep(every_s)
            if self._state() == self._seen:
                continue
            try:
                keys = await asyncio.to_thread(self.read)
            except OSError as error:
                log.error("http.keys_file %s: %s; the keys stay as they were", self._file, error.strerror)
            except ValueError as error:
                log.error("http.keys_file %s: %s; the keys stay as they were", self._file, error)
            else:
                changed(keys)

    def _state(self) -> tuple[int, ...] | None:
        try:
            seen = self._file.stat()
        except OSError:
            return None
        return seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns
