"""A worker's own table of KV blocks, as the fold of the events it tells; numbers them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fleet.events import BlocksDropped, BlocksStored, Cleared, KvDigest, KvEvent, KvEvents, KvSnapshot, Tier
from fleet.ids import Incarnation, WorkerId

_BIT = {tier: 1 << place for place, tier in enumerate(Tier)}


@dataclass(slots=True)
class KvTable:
    """Names that can be hit, with the tiers that hold them. A name stays until its last tier drops it.

    Storing what is there and dropping what is not are no-ops, so that a table fed from a snapshot and
    then from events it already contains is still right.
    """

    tiers: dict[int, int] = field(default_factory=dict)
    """By 64-bit name of the block (`block_hash.short`), never 0: one bit a tier, see `_BIT`."""
    xor: int = 0
    """Of all names: equal sets have equal count and xor, different ones almost never."""

    def apply(self, event: KvEvent) -> None:
        match event:
            case BlocksStored(hashes, tier):
                for name in hashes:
                    held = self.tiers.get(name, 0)
                    self.tiers[name] = held | _BIT[tier]
                    if not held:
                        self.xor ^= name
            case BlocksDropped(hashes, tier):
                for name in hashes:
                    held = self.tiers.get(name, 0)
                    left = held & ~_BIT[tier]
                    if left:
                        self.tiers[name] = left
                    elif held:
                        del self.tiers[name]
                        self.xor ^= name
            case Cleared():
                self.tiers.clear()
                self.xor = 0

    def validate(self) -> None:
        """AssertionError when the running digest is not that of the table."""
        xor = 0
        for name, held in self.tiers.items():
            assert held, f"block {name:#x} is in the table and at no tier"
            xor ^= name
        assert xor == self.xor, f"digest {self.xor:#x} kept, {xor:#x} true"


class KvLog:
    """What one life of a worker has told of its blocks; `sequence` counts from 1, without gaps."""

    def __init__(self, worker: WorkerId, incarnation: Incarnation) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._sequence = 0
        self._table = KvTable()

    def record(self, events: Sequence[KvEvent]) -> KvEvents | None:
        """Takes one step's changes in and returns the message to publish; None when there are none."""
        if not events:
            return None
        for event in events:
            self._table.apply(event)
        self._sequence += 1
        return KvEvents(self._worker, self._incarnation, self._sequence, tuple(events))

    def snapshot(self) -> KvSnapshot:
        return KvSnapshot(self._worker, self._incarnation, self._sequence, tuple(self._table.tiers))

    def digest(self) -> KvDigest:
        return KvDigest(self._sequence, len(self._table.tiers), self._table.xor)

    def validate(self, names: Iterable[int] | None = None) -> None:
        """AssertionError when the digest is wrong or, with `names`, when the table is not that set."""
        self._table.validate()
        if names is not None:
            true, told = set(names), set(self._table.tiers)
            assert true == told, f"{len(true - told)} blocks not told of, {len(told - true)} told and gone"
