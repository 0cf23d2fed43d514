"""The paged block pool and its prefix cache: who holds which block, which can be found by name. Pure.

A block is in exactly one of four states: free, cached (named, held by nobody, evictable), in use (held by
one or more sequences, named or not), quarantined (held by nobody, but a transfer may still write to it).

Whoever holds a named block also holds the named blocks before it in the chain, and gives them back from
the last to the first. Hence, in order of release, children lie before their parents: evicting the one
released longest ago always takes a leaf, and what is cached is closed under "the block before".
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleet.block_hash import BlockHash, short
from fleet.events import BlocksDropped, BlocksStored, KvEvent


@dataclass(slots=True)
class PoolCounts:
    """Totals since start, in blocks."""

    hits: int = 0
    evictions: int = 0
    duplicates: int = 0
    """Computed, but the cache had the same already: given back."""


class BlockPool:
    """`blocks` blocks, numbered from 0. All counts are in blocks."""

    def __init__(self, blocks: int, *, caching: bool = True) -> None:
        self.blocks = blocks
        self.caching = caching
        self.counts = PoolCounts()
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks
        self._names: list[BlockHash | None] = [None] * blocks
        self._by_name: dict[BlockHash, int] = {}
        self._parents: dict[BlockHash, BlockHash] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._quarantined: set[int] = set()
        self._events: list[tuple[bool, int]] = []

    @property
    def available(self) -> int:
        """Free, or evictable at once."""
        return len(self._free) + len(self._evictable)

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    def states(self) -> dict[str, int]:
        """Blocks by state; together all of them."""
        parts = {"free": len(self._free), "cached": len(self._evictable), "quarantined": self.quarantined}
        return parts | {"in_use": self.blocks - sum(parts.values())}

    def lookup(self, names: Sequence[BlockHash], limit: int, known: int = 0) -> int:
        """How many of the first `limit` names are cached, given that the first `known` are.

        A binary search, because the cached part of a chain has no holes.
        """
        low, high = known, min(limit, len(names))
        if low >= high or names[low] not in self._by_name:
            return low
        while low < high:
            middle = (low + high + 1) // 2
            if names[middle - 1] in self._by_name:
                low = middle
            else:
                high = middle - 1
        return low

    def acquire(self, names: Sequence[BlockHash]) -> list[int]:
        """The cached blocks of these names, held once more. The names before them must be held already."""
        taken = [self._by_name[name] for name in names]
        self.hold(taken)
        self.counts.hits += len(taken)
        return taken

    def cached_chain(self, names: Sequence[BlockHash]) -> list[int]:
        """The cached blocks of these names, from a sequence's first one on and as far as each follows the one
        before. Whoever gives the names may give any: nothing is taken for granted."""
        blocks: list[int] = []
        parent = b""
        for name in names:
            if self._parents.get(name) != parent:
                break
            blocks.append(self._by_name[name])
            parent = name
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Cached blocks, held once more, though not because they were found by a sequence that needs them.
        The blocks before them must be held already, or be among them."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._evictable[block]
            self._holders[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Blocks with nothing in them, held once; evicts as many as needed. `count` <= `available`."""
        if count > self.available:
            raise AssertionError(f"{count} blocks asked for, {self.available} available")
        while len(self._free) < count:
            self._evict()
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def register(self, block: int, name: BlockHash, parent: BlockHash) -> int:
        """The block is full and valid, and can be found from now on. Returns the block to use from now on.

        That is another one when the cache has the name already (two sequences computed the same at once):
        the caller then holds that copy, and its own is free.
        """
        if not self.caching:
            return block
        copy = self._by_name.get(name)
        if copy is None:
            self._by_name[name] = block
            self._names[block] = name
            self._parents[name] = parent
            self._events.append((True, short(name)))
            return block
        if copy != block:
            if self._holders[copy] == 0:
                del self._evictable[copy]
            self._holders[copy] += 1
            self.counts.duplicates += 1
            self.release((block,))
        return copy

    def release(self, blocks: Sequence[int]) -> None:
        """Gives up one hold of each; `blocks` in chain order. Named ones stay in the cache."""
        for block in reversed(blocks):
            holders = self._holders[block] - 1
            if holders < 0:
                raise AssertionError(f"block {block} is given back by somebody who does not hold it")
            self._holders[block] = holders
            if holders == 0:
                if self._names[block] is None:
                    self._free.append(block)
                else:
                    self._evictable[block] = None

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Takes unnamed blocks from their only holder; nobody gets them until `end_quarantine`."""
        for block in blocks:
            if self._holders[block] != 1 or self._names[block] is not None:
                raise AssertionError(f"block {block} is shared; only a private block can be quarantined")
            self._holders[block] = 0
            self._quarantined.add(block)

    def end_quarantine(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._quarantined.remove(block)
            self._free.append(block)

    def take_from_quarantine(self, blocks: Iterable[int]) -> None:
        """Nothing writes to them any more, and what is in them is wanted: held once, as if allocated."""
        for block in blocks:
            self._quarantined.remove(block)
            self._holders[block] = 1

    def cached(self) -> tuple[int, ...]:
        """`short()` names of all blocks that can be found."""
        return tuple(short(name) for name in self._by_name)

    def take_events(self) -> tuple[KvEvent, ...]:
        """Changes of `cached()` since the last call, in order."""
        if not self._events:
            return ()
        events: list[KvEvent] = []
        run: list[int] = []
        for position, (stored, name) in enumerate(self._events):
            run.append(name)
            if position + 1 == len(self._events) or self._events[position + 1][0] != stored:
                events.append(BlocksStored(tuple(run)) if stored else BlocksDropped(tuple(run)))
                run = []
        self._events.clear()
        return tuple(events)

    def validate(self, holders: Counter[int] | None = None) -> None:
        """AssertionError on any broken invariant; `holders`: holds a block, as the callers count them."""
        free, evictable, quarantined = set(self._free), set(self._evictable), self._quarantined
        in_use = {block for block, count in enumerate(self._holders) if count}
        assert len(free) == len(self._free), "a block is free twice"
        parts = (free, evictable, quarantined, in_use)
        assert sum(map(len, parts)) == self.blocks == len(set().union(*parts)), (
            "the parts overlap or miss a block"
        )
        assert all(self._names[block] is None for block in free | quarantined), "a free block has a name"
        assert self._by_name == {name: b for b, name in enumerate(self._names) if name is not None}
        assert self._by_name.keys() == self._parents.keys()
        order = {block: position for position, block in enumerate(self._evictable)}
        for name, block in self._by_name.items():
            parent = self._parents[name]
            assert not parent or parent in self._by_name, "a cached block has lost the block before it"
            if parent and self._holders[self._by_name[parent]] == 0:
                assert self._holders[block] == 0, "a block is held, the one before it is not"
                assert order[block] < order[self._by_name[parent]], (
                    "a block would be evicted after its parent"
                )
        if holders is not None:
            assert {b: n for b, n in holders.items() if n} == {b: self._holders[b] for b in in_use}, (
                "lost holds"
            )

    def _evict(self) -> None:
        block, _ = self._evictable.popitem(last=False)
        name = self._names[block]
        assert name is not None
        self._names[block] = None
        del self._by_name[name], self._parents[name]
        self._free.append(block)
        self._events.append((False, short(name)))
        self.counts.evictions += 1
