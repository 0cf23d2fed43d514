"""The lease table: which blocks are promised to whom, until when, and when each promise ends. Pure.

A lease ends exactly once, and only when no read touches its blocks any more. It is revoked first, by
release or by expiry: from then on new reads and renewals are refused. Expiry is a heap ordered by the
actual end (renewals push a new entry, old ones are skipped), so a renewed lease never hides a dead one.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from fleet.errors import LeaseExpired
from fleet.ids import LeaseId

REMEMBERED = 1024
"""How many ended leases keep their reason, so that a late reader is told it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A lease is over and its blocks may be reused."""

    lease: LeaseId
    blocks: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep did: leases that ended, and revoked ones whose reads must now be aborted."""

    ended: tuple[Ended, ...]
    overdue: tuple[LeaseId, ...]


@dataclass(slots=True)
class _Lease:
    blocks: tuple[int, ...]
    generations: tuple[int, ...]
    expires: float
    number: int
    """Order of grants: decides between equal ends, so that runs on a virtual clock are alike."""
    reads: int = 0
    revoked: str = ""


class LeaseTable:
    """Times are seconds on the owner's monotonic clock, given as `now`."""

    def __init__(self) -> None:
        self._leases: dict[LeaseId, _Lease] = {}
        self._heap: list[tuple[float, int, LeaseId]] = []
        self._granted = 0
        self._pins: dict[int, int] = {}
        self._generations: dict[int, int] = {}
        self._past: OrderedDict[LeaseId, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease: LeaseId) -> bool:
        return lease in self._leases

    @property
    def pinned(self) -> int:
        """Blocks under at least one lease."""
        return len(self._pins)

    @property
    def reads(self) -> int:
        return sum(entry.reads for entry in self._leases.values())

    def grant(self, lease: LeaseId, blocks: Sequence[int], now: float, duration_s: float) -> None:
        """Pin `blocks`; several leases may pin the same block. ValueError for a bad or repeated one."""
        if lease in self._leases or lease in self._past:
            raise ValueError(f"lease {lease} was granted before")
        if not blocks:
            raise ValueError("a lease needs at least one block")
        if min(blocks) < 0 or len(set(blocks)) != len(blocks):
            raise ValueError("blocks of a lease must be distinct and not negative")
        if not duration_s > 0:
            raise ValueError(f"a lease must last more than 0 seconds, not {duration_s}")
        for block in blocks:
            self._pins[block] = self._pins.get(block, 0) + 1
        generations = tuple(self._generations.get(block, 0) for block in blocks)
        self._granted += 1
        self._leases[lease] = _Lease(tuple(blocks), generations, now + duration_s, self._granted)
        heapq.heappush(self._heap, (now + duration_s, self._granted, lease))

    def _standing(self, lease: LeaseId, now: float) -> _Lease:
        entry = self._leases.get(lease)
        if entry is None:
            why = self._past.get(lease, "unknown here")
            raise LeaseExpired(f"lease {lease} does not stand: {why}")
        if entry.revoked:
            raise LeaseExpired(f"lease {lease} does not stand: {entry.revoked}")
        if now >= entry.expires:
            raise LeaseExpired(f"lease {lease} does not stand: expired {now - entry.expires:.3f} s ago")
        return entry

    def renew(self, lease: LeaseId, now: float, duration_s: float) -> float:
        """Seconds the lease now has left; never shortened. LeaseExpired when it does not stand."""
        entry = self._standing(lease, now)
        if now + duration_s > entry.expires:
            entry.expires = now + duration_s
            heapq.heappush(self._heap, (entry.expires, entry.number, lease))
        return entry.expires - now

    def check(self, lease: LeaseId, now: float) -> None:
        """LeaseExpired when it does not stand."""
        self._standing(lease, now)

    def begin_read(self, lease: LeaseId, positions: Sequence[int], now: float) -> tuple[int, ...]:
        """Blocks at `positions` of the lease, pinned until `end_read`. LeaseExpired or IndexError."""
        entry = self._standing(lease, now)
        count = len(entry.blocks)
        for position in positions:
            if not 0 <= position < count:
                raise IndexError(f"position {position} is outside the {count} blocks of lease {lease}")
        self._check_generations(lease, entry)
        entry.reads += 1
        return tuple(entry.blocks[position] for position in positions)

    def end_read(self, lease: LeaseId, now: float) -> tuple[str, Ended | None]:
        """Why the lease no longer stands ("" when it stood to the last byte), and its end if that was due."""
        entry = self._leases[lease]
        assert entry.reads > 0, f"lease {lease} has no read to end"
        self._check_generations(lease, entry)
        entry.reads -= 1
        why = entry.revoked or ("expired" if now >= entry.expires else "")
        return why, self._end(lease, entry) if entry.revoked and not entry.reads else None

    def release(self, lease: LeaseId, why: str = "released") -> Ended | None:
        """Revoke; the end at once, or None when reads hold it (or it is over already)."""
        entry = self._leases.get(lease)
        if entry is None:
            return None
        entry.revoked = entry.revoked or why
        return None if entry.reads else self._end(lease, entry)

    def expire(self, now: float) -> Swept:
        """Revoke all that is past its end; those still read are overdue, also when released before."""
        ended: list[Ended] = []
        overdue: list[LeaseId] = []
        while self._heap and self._heap[0][0] <= now:
            expires, _, lease = heapq.heappop(self._heap)
            entry = self._leases.get(lease)
            if entry is None or entry.expires != expires:
                continue
            entry.revoked = entry.revoked or "expired"
            if entry.reads:
                overdue.append(lease)
            else:
                ended.append(self._end(lease, entry))
        return Swept(tuple(ended), tuple(overdue))

    def next_expiry(self) -> float | None:
        """When `expire` has something to do next."""
        while self._heap:
            expires, _, lease = self._heap[0]
            entry = self._leases.get(lease)
            if entry is not None and entry.expires == expires:
                return expires
            heapq.heappop(self._heap)
        return None

    def _end(self, lease: LeaseId, entry: _Lease) -> Ended:
        del self._leases[lease]
        self._past[lease] = entry.revoked
        if len(self._past) > REMEMBERED:
            self._past.popitem(last=False)
        for block in entry.blocks:
            self._pins[block] -= 1
            if not self._pins[block]:
                del self._pins[block]
                self._generations[block] = self._generations.get(block, 0) + 1
        return Ended(lease, entry.blocks, entry.revoked)

    def _check_generations(self, lease: LeaseId, entry: _Lease) -> None:
        for block, generation in zip(entry.blocks, entry.generations, strict=True):
            found = self._generations.get(block, 0)
            assert found == generation, (
                f"block {block} of lease {lease}: generation {found}, not {generation}"
            )

    def validate(self) -> None:
        """AssertionError on any broken invariant."""
        pins: dict[int, int] = {}
        scheduled = set(self._heap)
        for lease, entry in self._leases.items():
            assert entry.reads >= 0, f"lease {lease} has {entry.reads} reads"
            assert entry.reads or not entry.revoked, f"lease {lease} is revoked, unread and not ended"
            overdue = entry.revoked and entry.reads
            assert overdue or (entry.expires, entry.number, lease) in scheduled, (
                f"lease {lease} would never expire"
            )
            self._check_generations(lease, entry)
            for block in entry.blocks:
                pins[block] = pins.get(block, 0) + 1
        assert pins == self._pins, "pinned blocks are not those of the leases"
