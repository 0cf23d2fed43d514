"""The lease table: which blocks are promised to whom, until when, and when each promise ends. Pure.

A lease ends exactly once, and only when no read touches its blocks any more. It is revoked first, by
release or by expiry: from then on new reads and renewals are refused. Expiry is a heap ordered by the
actual end (renewals push a new entry, old ones are skipped), so a renewed lease never hides a dead one.

An open lease grows while its blocks are still being computed, and has no clock: whoever opened it seals it
when all are there, or releases it.
"""

from __future__ import annotations

import heapq
import math
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
    blocks: list[int]
    generations: list[int]
    expires: float
    """Infinite while it is open."""
    number: int
    """Order of grants: decides between equal ends, so that runs on a virtual clock are alike."""
    reads: int = 0
    revoked: str = ""

    @property
    def open(self) -> bool:
        return self.expires == math.inf


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
        if not duration_s > 0:
            raise ValueError(f"a lease must last more than 0 seconds, not {duration_s}")
        self.open(lease, blocks)
        self.seal(lease, now, duration_s)

    def open(self, lease: LeaseId, blocks: Sequence[int]) -> None:
        """Like `grant`, of blocks to which others will be added, and without a clock until sealed."""
        if lease in self._leases or lease in self._past:
            raise ValueError(f"lease {lease} was granted before")
        if not blocks:
            raise ValueError("a lease needs at least one block")
        _check(blocks)
        self._granted += 1
        entry = self._leases[lease] = _Lease([], [], math.inf, self._granted)
        self._pin(entry, blocks)

    def grows(self, lease: LeaseId) -> bool:
        """Whether it can be extended: one that is sealed, or was released and is still read, cannot."""
        entry = self._leases.get(lease)
        return entry is not None and entry.open

    def extend(self, lease: LeaseId, blocks: Sequence[int]) -> None:
        """Adds blocks at the next positions. ValueError when it is not open, or a block is bad or there."""
        entry = self._leases.get(lease)
        if entry is None or not entry.open or entry.revoked:
            raise ValueError(f"lease {lease} is not open")
        _check([*entry.blocks, *blocks])
        self._pin(entry, blocks)

    def seal(self, lease: LeaseId, now: float, duration_s: float) -> None:
        """All blocks are there: from now on it lasts while it is renewed. Nothing when it is not open."""
        entry = self._leases.get(lease)
        if entry is not None and entry.open:
            entry.expires = now + duration_s
            heapq.heappush(self._heap, (entry.expires, entry.number, lease))

    def _pin(self, entry: _Lease, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._pins[block] = self._pins.get(block, 0) + 1
            entry.generations.append(self._generations.get(block, 0))
        entry.blocks += blocks

    def ready(self, lease: LeaseId, now: float) -> tuple[int, bool]:
        """How many blocks it has, and whether more are to come. LeaseExpired when it does not stand."""
        entry = self._standing(lease, now)
        return len(entry.blocks), entry.open

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
        if entry.open:
            return duration_s  # At least: its clock has not started.
        if now + duration_s > entry.expires:
            entry.expires = now + duration_s
            heapq.heappush(self._heap, (entry.expires, entry.number, lease))
        return entry.expires - now

    def check(self, lease: LeaseId, now: float) -> None:
        """LeaseExpired when it does not stand."""
        self._standing(lease, now)

    def begin_read(self, lease: LeaseId, positions: Sequence[int], now: float) -> tuple[int, ...]:
        """Blocks at `positions` of the lease, pinned until `end_read`. LeaseExpired, or IndexError where
        there is no block, or none yet."""
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
        """Revoke; the end at once, or None when reads hold it (or it is over already). One that is open and
        read is to be sealed before: its clock bounds how long those reads may last."""
        entry = self._leases.get(lease)
        if entry is None:
            return None
        assert not (entry.open and entry.reads), f"lease {lease} is open and read; seal it first"
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
        return Ended(lease, tuple(entry.blocks), entry.revoked)

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
            assert not (entry.open and entry.revoked), f"lease {lease} is revoked and open"
            overdue = entry.revoked and entry.reads
            assert overdue or entry.open or (entry.expires, entry.number, lease) in scheduled, (
                f"lease {lease} would never expire"
            )
            self._check_generations(lease, entry)
            for block in entry.blocks:
                pins[block] = pins.get(block, 0) + 1
        assert pins == self._pins, "pinned blocks are not those of the leases"


def _check(blocks: Sequence[int]) -> None:
    if min(blocks, default=0) < 0 or len(set(blocks)) != len(blocks):
        raise ValueError("blocks of a lease must be distinct and not negative")
