"""The registry: small keys that everybody sees, some alive only while their owner is; etcd or memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fleet.registry.store import Condition, Entry

__all__ = ["Condition", "Election", "Entry", "Lease", "Registry", "View"]


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


class Election(Protocol):
    """Stands for leader of a key for as long as it is open: who put it first leads, until its lease ends."""

    @property
    def token(self) -> int | None:
        """The revision at which this one began to lead: a condition on the key's `created` by which a write
        of a leader that was deposed fails. None: it does not lead, or cannot be sure of it any more."""
        ...

    async def close(self) -> None:
        """Lets another lead at once."""
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

    async def entry(self, key: str) -> Entry | None:
        """With the revisions that a condition is made of. Raises `Unavailable`."""
        ...

    async def put_if(self, conditions: Sequence[Condition], puts: Mapping[str, bytes]) -> int | None:
        """All puts at once, if all conditions hold; the revision, or None: nothing was put. Raises
        `Unavailable` when the registry cannot be reached: it may have been put all the same."""
        ...

    async def elect(self, key: str, value: bytes, ttl_s: float) -> Election:
        """Never waits for the registry to be reachable."""
        ...

    async def delete(self, key: str) -> None: ...

    def watch(self, prefix: str) -> AsyncIterator[View]:
        """Endless. First item at once if reachable; survives outage, restart, loss of all data and
        compaction; a mass disappearance caused by an emptied registry is reported as such: see the
        implementation."""
        ...

    async def close(self) -> None: ...
