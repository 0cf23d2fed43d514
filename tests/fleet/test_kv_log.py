"""A worker's KV table is the fold of its events, whatever they are, and its digest is that of the table."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.events import BlocksDropped, BlocksStored, Cleared, KvDigest, KvEvent, Tier
from fleet.ids import Incarnation, WorkerId
from fleet.kv_log import KvLog

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


def fold(steps: list[list[KvEvent]]) -> set[int]:
    """The same table, worked out in the plainest way: a set of (name, tier)."""
    held: set[tuple[int, Tier]] = set()
    for event in (event for step in steps for event in step):
        if isinstance(event, BlocksStored):
            held |= {(name, event.tier) for name in event.hashes}
        elif isinstance(event, BlocksDropped):
            held -= {(name, event.tier) for name in event.hashes}
        else:
            held.clear()
    return {name for name, _ in held}


@FEW
@given(st.lists(st.lists(EVENTS, max_size=4), max_size=12))
def test_table_and_digest_are_the_fold_of_the_events(steps: list[list[KvEvent]]) -> None:
    kv = log()
    told = [message for message in (kv.record(step) for step in steps) if message is not None]
    names = fold(steps)
    xor = 0
    for name in names:
        xor ^= name
    kv.validate(names)
    assert kv.digest() == KvDigest(len(told), len(names), xor)
    snapshot = kv.snapshot()
    assert (set(snapshot.hashes), len(snapshot.hashes)) == (names, len(names))
    assert snapshot.sequence == len(told)
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
    assert kv.snapshot().hashes == (7,)
    kv.record([BlocksDropped((7,), Tier.HOST)])
    assert kv.snapshot().hashes == ()


def test_a_table_that_is_not_the_cache_is_noticed() -> None:
    kv = log()
    kv.record([BlocksStored((1, 2))])
    with pytest.raises(AssertionError, match="1 blocks not told of, 1 told and gone"):
        kv.validate([1, 3])
