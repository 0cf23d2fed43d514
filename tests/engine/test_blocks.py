"""The block pool: no block is ever lost, shared by mistake, or found under a name it does not deserve."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockPool
from fleet.block_hash import BlockHash, HashKeys, block_hashes, short
from fleet.events import BlocksDropped, BlocksStored, KvEvent

KEYS = HashKeys(model="m", block_size=1)


def names_of(*tokens: int) -> list[BlockHash]:
    return block_hashes(tokens, KEYS)


def compute(pool: BlockPool, names: list[BlockHash]) -> list[int]:
    """A sequence that finds what is cached and computes the rest."""
    hits = pool.lookup(names, len(names))
    blocks = pool.acquire(names[:hits])
    blocks += pool.allocate(len(names) - hits)
    for position in range(hits, len(names)):
        parent = names[position - 1] if position else b""
        blocks[position] = pool.register(blocks[position], names[position], parent)
    return blocks


def fold(cached: set[int], events: tuple[KvEvent, ...]) -> None:
    for event in events:
        if isinstance(event, BlocksStored):
            assert cached.isdisjoint(event.hashes), "stored twice"
            cached.update(event.hashes)
        else:
            assert isinstance(event, BlocksDropped)
            assert cached.issuperset(event.hashes), "dropped, but never stored"
            cached.difference_update(event.hashes)


def test_a_released_prefix_is_found_again_by_forks() -> None:
    pool = BlockPool(8)
    first = compute(pool, names_of(1, 2, 3))
    pool.release(first)
    fork = names_of(1, 2, 9)
    assert pool.lookup(fork, 3) == 2
    assert compute(pool, fork)[:2] == first[:2]
    assert pool.available == 8 - 3


def test_eviction_takes_the_leaf_released_longest_ago_and_never_a_parent_first() -> None:
    pool = BlockPool(6)
    old, new = names_of(1, 2, 3), names_of(7, 8, 9)
    pool.release(compute(pool, old))
    pool.release(compute(pool, new))
    for left in (2, 1, 0):
        pool.allocate(1)
        assert pool.lookup(old, 3) == left
        assert pool.lookup(new, 3) == 3


def test_use_makes_a_prefix_young_again() -> None:
    pool = BlockPool(4)
    old, new = names_of(1, 2), names_of(7, 8)
    pool.release(compute(pool, old))
    pool.release(compute(pool, new))
    pool.release(compute(pool, old))
    pool.allocate(2)
    assert pool.lookup(old, 2) == 2
    assert pool.lookup(new, 2) == 0


def test_a_block_in_use_is_never_evicted() -> None:
    pool = BlockPool(3)
    pool.release(compute(pool, names_of(1, 2)))
    held = pool.acquire(names_of(1, 2))
    assert pool.available == 1
    with pytest.raises(AssertionError, match="2 blocks asked for, 1 available"):
        pool.allocate(2)
    assert set(pool.allocate(1)).isdisjoint(held)


def test_the_same_prefix_computed_twice_at_once_ends_as_one_copy() -> None:
    pool = BlockPool(4)
    names = names_of(1, 2)
    one, two = pool.allocate(2), pool.allocate(2)
    for position, name in enumerate(names):
        parent = names[position - 1] if position else b""
        assert pool.register(one[position], name, parent) == one[position]
        two[position] = pool.register(two[position], name, parent)
    assert two == one
    pool.validate(Counter(one + two))
    assert pool.available == 2
    pool.release(one)
    assert pool.available == 2, "the other still holds them"
    pool.release(two)
    assert pool.available == 4
    assert pool.take_events() == (BlocksStored(tuple(map(short, names))),)


def test_giving_back_twice_is_an_error_and_harms_nobody() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="does not hold it"):
        pool.release(blocks)
    pool.validate(Counter())


def test_quarantined_blocks_go_to_nobody() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.quarantine(blocks)
    assert pool.available == 1
    with pytest.raises(AssertionError):
        pool.allocate(2)
    pool.validate(Counter())
    pool.end_quarantine(blocks)
    assert pool.available == 3


def test_without_caching_nothing_is_found_or_told() -> None:
    pool = BlockPool(2, caching=False)
    pool.release(compute(pool, names_of(1, 2)))
    assert pool.lookup(names_of(1, 2), 2) == 0
    assert pool.cached() == pool.take_events() == ()


def test_all_32_bytes_of_a_name_are_compared() -> None:
    pool = BlockPool(2)
    name = names_of(1)[0]
    alike = name[:31] + bytes([name[31] ^ 1])
    assert short(alike) == short(name)
    pool.release([pool.register(pool.allocate(1)[0], name, b"")])
    assert pool.lookup([alike], 1) == 0


@dataclass
class Holder:
    """A sequence of the shadow model: the tokens it is about, and its block table."""

    tokens: tuple[int, ...]
    blocks: list[int]
    named: int
    names: list[BlockHash] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a shadow model that remembers what was written to each block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.content: dict[int, tuple[int, ...]] = {}
        self.holders: list[Holder] = []
        self.quarantine: list[list[int]] = []
        self.told: set[int] = set()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple), limit=st.integers(0, 5))
    def start(self, tokens: tuple[int, ...], limit: int) -> None:
        names = names_of(*tokens)
        hits = self.pool.lookup(names, limit)
        assert hits <= limit
        blocks = self.pool.acquire(names[:hits])
        for position, block in enumerate(blocks):
            assert self.content[block] == tokens[: position + 1], "found, but holds something else"
        if self.pool.available < len(tokens) - hits:
            self.pool.release(blocks)
            return
        self.holders.append(Holder(tokens, blocks + self.pool.allocate(len(tokens) - hits), hits, names))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def compute_a_block(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        at = holder.named
        if at < len(holder.blocks):
            self.content[holder.blocks[at]] = holder.tokens[: at + 1]
            parent = holder.names[at - 1] if at else b""
            holder.blocks[at] = self.pool.register(holder.blocks[at], holder.names[at], parent)
            holder.named += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.pool.release(holder.blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def end_while_a_transfer_writes(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.pool.quarantine(holder.blocks[holder.named :])
        self.quarantine.append(holder.blocks[holder.named :])
        self.pool.release(holder.blocks[: holder.named])

    @precondition(lambda self: self.quarantine)
    @rule()
    def end_quarantine(self) -> None:
        self.pool.end_quarantine(self.quarantine.pop())

    @rule()
    def listen(self) -> None:
        fold(self.told, self.pool.take_events())
        assert self.told == set(self.pool.cached())

    @invariant()
    def sound(self) -> None:
        self.pool.validate(Counter(block for holder in self.holders for block in holder.blocks))
        written = [block for holder in self.holders for block in holder.blocks[: holder.named]]
        for holder in self.holders:
            for position, block in enumerate(holder.blocks[: holder.named]):
                assert self.content[block] == holder.tokens[: position + 1], "somebody else wrote here"
            for block in holder.blocks[holder.named :]:
                assert block not in written, "a private block is another's named one"

    def teardown(self) -> None:
        for holder in self.holders:
            self.pool.release(holder.blocks)
        for blocks in self.quarantine:
            self.pool.end_quarantine(blocks)
        self.pool.validate(Counter())
        assert self.pool.available == 7


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
