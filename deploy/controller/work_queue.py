"""Keys of what is to be looked at: each once, one at a time, later where it failed."""

from __future__ import annotations

import asyncio


class WorkQueue:
    """A key that is added while it is worked on comes again afterwards: no change is overlooked."""

    def __init__(self, first_s: float = 0.25, most_s: float = 60.0, soon_s: float = 2.0) -> None:
        """Seconds to wait after a first failure, at most, and where something has changed meanwhile."""
        self._first_s, self._most_s, self._soon_s = first_s, most_s, soon_s
        self._ready: dict[str, None] = {}
        """In order, each once."""
        self._working: set[str] = set()
        self._again: set[str] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._failures: dict[str, int] = {}
        self._wake = asyncio.Event()

    def add(self, key: str) -> None:
        if key in self._working:
            self._again.add(key)
            return
        self._ready[key] = None
        self._wake.set()

    def add_later(self, key: str, after_s: float) -> None:
        """The sooner of two times counts."""
        loop = asyncio.get_running_loop()
        timer, when = self._timers.get(key), loop.time() + after_s
        if timer is not None:
            if timer.when() <= when:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(when, self._due, key)

    def _due(self, key: str) -> None:
        self._timers.pop(key, None)
        self.add(key)

    async def next(self) -> str:
        """`done` has to follow."""
        while not self._ready:
            self._wake.clear()
            await self._wake.wait()
        key = next(iter(self._ready))
        del self._ready[key]
        self._working.add(key)
        return key

    def done(self, key: str, failed: bool, again_s: float) -> None:
        """`again_s`: when to look again in any case, where it went well."""
        self._working.discard(key)
        if failed:
            count = self._failures[key] = self._failures.get(key, 0) + 1
            wait_s = min(self._most_s, self._first_s * 2.0 ** min(count - 1, 30))
            if key in self._again:
                # What changed is seen soon, but not at once: a failing key must not spin.
                self._again.discard(key)
                wait_s = min(wait_s, self._soon_s)
            self.add_later(key, wait_s)
            return
        self._failures.pop(key, None)
        if key in self._again:
            self._again.discard(key)
            self.add(key)
        elif again_s > 0:
            self.add_later(key, again_s)

    @property
    def waiting(self) -> int:
        """Keys whose turn it is, and that nobody has taken yet."""
        return len(self._ready)

    def forget(self, key: str) -> None:
        """Its thing is gone."""
        self._failures.pop(key, None)
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
