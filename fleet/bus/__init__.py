"""The bus: messages to whoever listens, at most once, in order from one sender; NATS or memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from msgspec import Struct


class BusMessage(Struct, frozen=True):
    subject: str
    data: bytes


class Subscription(Protocol):
    """Messages of one subject pattern (`*` is one word, `>` the rest). Bounded: the oldest are dropped
    when the reader is too slow, and counted, never raised at the reader."""

    def __aiter__(self) -> AsyncIterator[BusMessage]: ...

    @property
    def dropped(self) -> int: ...

    async def close(self) -> None: ...


class Bus(Protocol):
    """Publishing never waits for a broker and never fails because one is away."""

    async def publish(self, subject: str, data: bytes) -> None: ...

    async def subscribe(self, subject: str) -> Subscription: ...

    @property
    def connected(self) -> bool: ...

    async def close(self) -> None: ...
