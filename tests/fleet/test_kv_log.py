"""A worker's KV table is the fold of its events, whatever they are, and its digest is that of the table."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.events import BlocksDropped, BlocksStored, Cleared, KvDigest, KvEvent, Tier
from fleet.ids import Incarnation, WorkerId
from fleet.kv_log import PART_BLOCKS, KvLog

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

NAMES = st.lists(st.integers(0, 12) | st.integers(0, 2**64 - 1), max_size=6).map(tuple)
TIERS = st.sampled_from(Tier)
EVENTS = st.one_of(
    st.builds(BlocksStored, NAMES, TIERS),
    st.builds(BlocksDropped, NAMES, TIERS),
    st.just(Cleared()),
)


def log() -> KvLog:
    return KvLog(WorkerId("decode-1"), Incarnation("a"))


def fold(steps: list[list[KvEvent]]) -> set[tuple[int, Tier]]:
    """The same table, worked out in the plainest way: a set of (name, tier)."""
    held: set[tuple[int, Tier]] = set()
    for event in (event for step in steps for event in step):
        if isinstance(event, BlocksStored):
            held |= {(name, event.tier) for name in event.hashes}
        elif isinstance(event, BlocksDropped):
            held -= {(name, event.tier) for name in event.hashes}
        else:
            held.clear()
    return held


def turned(name: int, tier: Tier) -> int:
    bits = f"{name:064b}"
    by = {Tier.DEVICE: 0, Tier.HOST: 21, Tier.DISK: 42}[tier]
    return int(bits[by:] + bits[:by], 2)


@FEW
@given(st.lists(st.lists(EVENTS, max_size=4), max_size=12), st.sampled_from([0, 3 * PART_BLOCKS]))
def test_table_and_digest_are_the_fold_of_the_events(steps: list[list[KvEvent]], blocks: int) -> None:
    kv = KvLog(WorkerId("decode-1"), Incarnation("a"), blocks)
    told = [message for message in (kv.record(step) for step in steps) if message is not None]
    held = fold(steps)
    xor = 0
    for name, tier in held:
        xor ^= turned(name, tier)
    kv.validate(name for name, _ in held)
    assert kv.digest() == KvDigest(len(told), len(held), xor)
    parts = [kv.snapshot(part) for part in range(kv.snapshot().parts)]
    assert len(parts) == max(1, blocks // PART_BLOCKS)
    shown: list[tuple[int, Tier]] = []
    for part in parts:
        for names, tier in zip((part.hashes, part.host, part.disk), Tier, strict=True):
            shown += [(name, tier) for name in names]
    assert sorted(shown) == sorted(held)
    assert {part.sequence for part in parts} == {len(told)}
    assert [message.sequence for message in told] == list(range(1, len(told) + 1))
    assert [list(message.events) for message in told] == [step for step in steps if step]


def test_a_step_without_changes_says_nothing_and_takes_no_number() -> None:
    kv = log()
    assert kv.record([]) is None
    first = kv.record([BlocksStored((1,))])
    assert kv.record([]) is None
    second = kv.record([BlocksStored((2,))])
    assert first is not None
    assert second is not None
    assert (first.sequence, second.sequence) == (1, 2)
    assert (second.worker, second.incarnation) == ("decode-1", "a")


def test_a_block_stored_twice_is_dropped_once_and_unknown_drops_change_nothing() -> None:
    kv = log()
    kv.record([BlocksStored((7, 7)), BlocksStored((7,)), BlocksDropped((9,))])
    assert kv.digest() == KvDigest(1, 1, 7)
    kv.record([BlocksDropped((7, 7))])
    assert kv.digest() == KvDigest(2, 0, 0)


def test_a_block_stays_while_one_tier_holds_it() -> None:
    kv = log()
    kv.record([BlocksStored((7,)), BlocksStored((7,), Tier.HOST), BlocksDropped((7,))])
    assert (kv.snapshot().hashes, kv.snapshot().host) == ((), (7,))
    kv.validate([7])
    kv.record([BlocksDropped((7,), Tier.HOST)])
    kv.validate([])


def test_a_block_that_moves_to_another_tier_changes_the_digest() -> None:
    kv = log()
    kv.record([BlocksStored((7, 8))])
    before = kv.digest()
    kv.record([BlocksDropped((7,)), BlocksStored((7,), Tier.HOST)])
    assert (kv.digest().blocks, before.blocks) == (2, 2)
    assert kv.digest().xor != before.xor


def test_a_part_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="part 1 of a snapshot of 1 parts"):
        log().snapshot(1)


def test_a_table_that_is_not_the_cache_is_noticed() -> None:
    kv = log()
    kv.record([BlocksStored((1, 2))])
    with pytest.raises(AssertionError, match="1 blocks not told of, 1 told and gone"):
        kv.validate([1, 3])
