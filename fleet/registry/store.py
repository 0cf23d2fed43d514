"""What the registry needs of a key-value store with leases and watches; etcd has it, and so has memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class StoreAway(Exception):
    """The store did not answer, or not with what was asked; the call may have happened all the same."""


class LeaseGone(Exception):
    """The store does not know this lease: it expired, was revoked, or the store lost its data."""


class Compacted(Exception):
    """The history from the asked revision on is not kept any more."""


@dataclass(frozen=True, slots=True)
class Change:
    key: str
    value: bytes | None
    """None: deleted."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Those of one moment together, and the store's revision after them."""

    revision: int
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """All keys below a prefix as they were at `revision`."""

    values: dict[str, bytes]
    revision: int
    """Grows with every change, in one life of the store's data."""
    cluster: int
    """Another number is another store."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key, and the store's revisions at which it came to be and was changed last."""

    value: bytes
    created: int
    modified: int


@dataclass(frozen=True, slots=True)
class Condition:
    """What must hold of a key for a write to happen. 0: that there is no such key."""

    key: str
    created: int | None = None
    modified: int | None = None


class Store(Protocol):
    """Every call may raise `StoreAway`, may take for ever, and may be cancelled."""

    async def grant(self, ttl_s: float) -> tuple[int, float]:
        """A new lease and the seconds it was granted for."""
        ...

    async def keep_alive(self, lease: int) -> float:
        """Seconds it stands from now on. Raises `LeaseGone`."""
        ...

    async def attached(self, lease: int) -> frozenset[str]:
        """The keys that stand under the lease. Raises `LeaseGone`."""
        ...

    async def revoke(self, lease: int) -> None: ...

    async def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """Raises `LeaseGone`."""
        ...

    async def get(self, key: str) -> bytes | None: ...

    async def entry(self, key: str) -> Entry | None: ...

    async def put_if(
        self, conditions: Sequence[Condition], puts: Mapping[str, bytes], lease: int = 0
    ) -> int | None:
        """All puts at once, at the revision that is returned; None: a condition does not hold, and nothing
        was put. Raises `LeaseGone`."""
        ...

    async def delete(self, key: str) -> None: ...

    async def list(self, prefix: str) -> Listing: ...

    def watch(self, prefix: str, revision: int) -> AsyncGenerator[Changes, None]:
        """What happens from `revision` on. Never ends, and is never silently dead: raises `StoreAway` or
        `Compacted`."""
        ...

    async def renew(self) -> None:
        """The last call failed: go to the store another way, if there is one."""
        ...

    async def close(self) -> None: ...
