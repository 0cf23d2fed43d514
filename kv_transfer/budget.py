"""How much a reader asks of one source at a time."""

from __future__ import annotations

import asyncio
from collections import deque

from kv_transfer.messages import OPEN_READS


class Budget:
    """Bytes and requests in flight from one source, first come first served; one is always let through."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._open = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.users = 0

    def _fits(self, size: int) -> bool:
        room = self._open < OPEN_READS // 2 and self._used + size <= self._limit
        return room or not self._open

    async def take(self, size: int) -> None:
        if self._queue or not self._fits(size):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append((size, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.cancelled():
                    self._wake()  # skips it
                else:
                    self.give(size)
                raise
        else:
            self._count(size)

    def give(self, size: int) -> None:
        self._open -= 1
        self._used -= size
        self._wake()

    def _count(self, size: int) -> None:
        self._open += 1
        self._used += size

    def _wake(self) -> None:
        while self._queue:
            size, turn = self._queue[0]
            if not turn.cancelled():
                if not self._fits(size):
                    return
                self._count(size)
                turn.set_result(None)
            self._queue.popleft()
