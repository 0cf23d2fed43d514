"""What a subscriber reads from: bounded, the oldest messages make room and are counted."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from fleet.bus import BusMessage

LIMIT = 65_536
"""Messages that wait for a reader before the oldest go: tens of seconds of a large fleet's events."""


class Mailbox:
    """A `Subscription` for one reader; the bus puts messages in."""

    def __init__(self, subject: str, limit: int, left: Callable[[Mailbox], Awaitable[None]]) -> None:
        self.subject = subject
        self._limit = limit
        self._left = left
        self._waiting: deque[BusMessage] = deque()
        self._stirred = asyncio.Event()
        self._open = True
        self._dropped = 0

    @property
    def dropped(self) -> int:
        return self._dropped

    def drop(self, messages: int) -> None:
        """Counts messages known to be lost before they came here."""
        self._dropped += messages

    def add(self, message: BusMessage) -> None:
        if len(self._waiting) >= self._limit:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(message)
        self._stirred.set()

    async def __aiter__(self) -> AsyncIterator[BusMessage]:
        while self._open:
            while self._waiting and self._open:
                yield self._waiting.popleft()
            self._stirred.clear()
            if self._open:
                await self._stirred.wait()

    async def close(self) -> None:
        """Ends the reader's iteration; idempotent."""
        if self._open:
            self._open = False
            self._waiting.clear()
            self._stirred.set()
            await self._left(self)


def matches(pattern: str, subject: str) -> bool:
    """Whether a NATS subject pattern takes a subject: `*` is one word, a last `>` one or more."""
    wanted, words = pattern.split("."), subject.split(".")
    for i, want in enumerate(wanted):
        if want == ">":
            return len(words) > i
        if i >= len(words) or want not in ("*", words[i]):
            return False
    return len(wanted) == len(words)
