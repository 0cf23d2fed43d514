"""A worker's own table of KV blocks, as the fold of the events it tells; numbers them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import islice, repeat
from operator import xor

from fleet.events import BlocksDropped, BlocksStored, Cleared, KvDigest, KvEvent, KvEvents, KvSnapshot, Tier
from fleet.ids import Incarnation, WorkerId

PART_BLOCKS = 2048
"""Blocks in one part of a snapshot, about: what a router takes in within a fraction of a millisecond."""
_PLACE = {tier: place for place, tier in enumerate(Tier)}
_NEAREST = next(iter(Tier))
_TURN = 21
"""Bits by which each tier's xor is turned before they are added up: a block that moves changes the sum."""


class KvTable:
    """Names that can be hit, by tier. Routers fold the same events into the same table.

    Storing what is there and dropping what is not are no-ops, so that a table fed from a snapshot and
    then from events it already contains is still right. Nothing here runs Python code block by block.
    """

    __slots__ = ("_xors", "held")

    def __init__(self) -> None:
        self.held: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        """Of each tier, in their order: 64-bit names (`block_hash.short`), the oldest first. Each stands
        for itself, so that taking some out tells which of them were there."""
        self._xors = [0] * len(self.held)

    def apply(self, event: KvEvent) -> int:
        """Returns by how many blocks the table has grown."""
        if isinstance(event, BlocksStored):
            return self.store(event.hashes, event.tier)
        if isinstance(event, BlocksDropped):
            return -self.drop(event.hashes, event.tier)
        return -self.clear()

    def store(self, names: Sequence[int], tier: Tier = Tier.DEVICE) -> int:
        """Returns how many are new."""
        place = 0 if tier is _NEAREST else _PLACE[tier]
        held = self.held[place]
        before = len(held)
        deque(map(held.setdefault, names, names), maxlen=0)
        new = len(held) - before
        # A dict keeps its order, so that those at its end are the new ones.
        told = names if new == len(names) else islice(reversed(held), new)
        self._xors[place] ^= reduce(xor, told, 0)
        return new

    def drop(self, names: Iterable[int], tier: Tier = Tier.DEVICE) -> int:
        """Returns how many were there."""
        place = 0 if tier is _NEAREST else _PLACE[tier]
        held = self.held[place]
        before = len(held)
        self._xors[place] ^= reduce(xor, map(held.pop, names, repeat(0)), 0)
        return before - len(held)

    def clear(self) -> int:
        """Returns how many were there. To free a large dict takes milliseconds: whoever has taken `held`
        before chooses when."""
        before = self.blocks
        self.held = tuple({} for _ in Tier)
        self._xors = [0] * len(self.held)
        return before

    def drop_oldest(self, tier: Tier, count: int) -> int:
        """At most `count`; returns how many there were."""
        return self.drop(list(islice(self.held[_PLACE[tier]], count)), tier)

    def at(self, tier: Tier) -> dict[int, int]:
        """Not to be changed."""
        return self.held[_PLACE[tier]]

    @property
    def blocks(self) -> int:
        """A block at two tiers counts twice."""
        return sum(map(len, self.held))

    @property
    def xor(self) -> int:
        """Of all names, those of lower tiers turned: equal tables have equal count and xor, different ones
        almost never."""
        sum = 0
        for place, part in enumerate(self._xors):
            turn = _TURN * place
            sum ^= (part << turn | part >> 64 - turn) & (1 << 64) - 1
        return sum

    def validate(self) -> None:
        """AssertionError when the running digest is not that of the table."""
        for tier, names, kept in zip(Tier, self.held, self._xors, strict=True):
            true = reduce(xor, names, 0)
            assert true == kept, f"digest {kept:#x} of {tier} kept, {true:#x} true"
            assert all(name == value for name, value in names.items())


class KvLog:
    """What one life of a worker has told of its blocks; `sequence` counts from 1, without gaps."""

    def __init__(self, worker: WorkerId, incarnation: Incarnation, blocks: int = 0) -> None:
        """`blocks`: most that there will be; it decides into how many parts a snapshot is cut."""
        self._worker = worker
        self._incarnation = incarnation
        self._sequence = 0
        self._tables = [KvTable() for _ in range(max(1, -(-blocks // PART_BLOCKS)))]
        """One for each part: a name belongs to the one of its remainder."""

    def record(self, events: Sequence[KvEvent]) -> KvEvents | None:
        """Takes one step's changes in and returns the message to publish; None when there are none."""
        if not events:
            return None
        for event in events:
            self._apply(event)
        self._sequence += 1
        return KvEvents(self._worker, self._incarnation, self._sequence, tuple(events))

    def _apply(self, event: KvEvent) -> None:
        if len(self._tables) == 1 or isinstance(event, Cleared):
            for table in self._tables:
                table.apply(event)
            return
        parts = len(self._tables)
        names: dict[int, list[int]] = {}
        for name in event.hashes:
            names.setdefault(name % parts, []).append(name)
        for part, some in names.items():
            table = self._tables[part]
            (table.store if isinstance(event, BlocksStored) else table.drop)(some, event.tier)

    def snapshot(self, part: int = 0) -> KvSnapshot:
        """One part of the table as it is now. ValueError when there are not so many.

        The parts of one reader need not be of one moment: with the events after the first part they come
        to the same table, since taking in again what is there changes nothing.
        """
        if not 0 <= part < len(self._tables):
            raise ValueError(f"part {part} of a snapshot of {len(self._tables)} parts")
        device, host, disk = map(tuple, self._tables[part].held)
        return KvSnapshot(
            self._worker, self._incarnation, self._sequence, device, host, disk, part, len(self._tables)
        )

    def digest(self) -> KvDigest:
        blocks = sum(table.blocks for table in self._tables)
        return KvDigest(self._sequence, blocks, reduce(xor, (table.xor for table in self._tables)))

    def validate(self, names: Iterable[int] | None = None) -> None:
        """AssertionError when the digest is wrong or, with `names`, when the table is not that set."""
        for table in self._tables:
            table.validate()
        if names is not None:
            true = set(names)
            told = {name for table in self._tables for held in table.held for name in held}
            assert true == told, f"{len(true - told)} blocks not told of, {len(told - true)} told and gone"
