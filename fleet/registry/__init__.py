"""The registry: small keys that everybody sees, some alive only while their owner is; etcd or memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class View:
    """All keys below a prefix, as of now: each item of a watch is the whole picture after a change.

    `live` is False while the registry cannot be reached: the picture is then the last one known.
    `emptied` says that the keys that vanished with this item most likely did so because the registry
    lost them, not because their owners died. In any case a vanished key is a suspicion, no proof: a
    leader that stalls can revoke the leases of a healthy fleet. A member is gone when it does not answer.
    """

    values: dict[str, bytes]
    live: bool = True
    emptied: bool = False


class Lease(Protocol):
    """Keys that vanish when their owner does. Heals itself: lost, revoked or forgotten by an emptied
    registry, it is taken again and all keys are put again."""

    async def put(self, key: str, value: bytes) -> None:
        """Remembers and puts; returns at once with the registry away, and puts when it is back."""
        ...

    async def delete(self, key: str) -> None: ...

    @property
    def registered(self) -> bool:
        """Whether all keys are known to stand in the registry now."""
        ...

    async def close(self) -> None:
        """Revokes, so that the keys vanish at once."""
        ...


class Registry(Protocol):
    async def lease(self, ttl_s: float) -> Lease:
        """Never waits for the registry to be reachable."""
        ...

    async def put(self, key: str, value: bytes) -> None:
        """A key without an owner. Raises `Unavailable` when the registry cannot be reached."""
        ...

    async def get(self, key: str) -> bytes | None:
        """Raises `Unavailable` when the registry cannot be reached."""
        ...

    async def delete(self, key: str) -> None: ...

    def watch(self, prefix: str) -> AsyncIterator[View]:
        """Endless. First item at once if reachable; survives outage, restart, loss of all data and
        compaction; a mass disappearance caused by an emptied registry is reported as such: see the
        implementation."""
        ...

    async def close(self) -> None: ...
