"""The lease table: ends exactly once, never under a read, in the order of actual expiry."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleet.errors import LeaseExpired
from fleet.ids import LeaseId
from kv_transfer.lease import LeaseTable


def lease(name: object) -> LeaseId:
    return LeaseId(str(name))


def test_renewing_the_first_lease_does_not_strand_the_later_ones() -> None:
    table = LeaseTable()
    for number in range(5):
        table.grant(lease(number), [number], now=0.0, duration_s=10.0)
    for now in (3.0, 6.0, 9.0):
        table.renew(lease(0), now, 10.0)
    swept = table.expire(10.0)
    assert {ended.lease for ended in swept.ended} == {lease(number) for number in range(1, 5)}
    assert all(ended.why == "expired" for ended in swept.ended)
    assert table.next_expiry() == 19.0
    assert table.pinned == 1
    table.validate()


def test_leases_of_one_end_expire_in_the_order_of_their_grants() -> None:
    table = LeaseTable()
    names = [lease(name) for name in ("zeta", "alpha", "mid")]
    for number, name in enumerate(names):
        table.grant(name, [number], 0.0, 5.0)
    assert [ended.lease for ended in table.expire(5.0).ended] == names


def test_a_read_holds_the_blocks_past_expiry_and_is_told() -> None:
    table = LeaseTable()
    table.grant(lease("a"), [3, 4], 0.0, 1.0)
    assert table.begin_read(lease("a"), [1, 0], 0.5) == (4, 3)
    swept = table.expire(1.0)
    assert swept.ended == ()
    assert swept.overdue == (lease("a"),)
    with pytest.raises(LeaseExpired, match="expired"):
        table.begin_read(lease("a"), [0], 1.0)
    assert table.pinned == 2
    why, ended = table.end_read(lease("a"), 1.1)
    assert why == "expired"
    assert ended is not None
    assert ended.blocks == (3, 4)
    assert table.pinned == 0
    table.validate()


def test_release_with_a_frozen_reader_becomes_overdue_at_expiry() -> None:
    table = LeaseTable()
    table.grant(lease("a"), [1], 0.0, 5.0)
    table.begin_read(lease("a"), [0], 1.0)
    assert table.release(lease("a")) is None
    table.validate()
    assert table.next_expiry() == 5.0
    assert table.expire(5.0).overdue == (lease("a"),)


def test_an_unswept_but_expired_lease_is_refused() -> None:
    table = LeaseTable()
    table.grant(lease("a"), [1], 0.0, 5.0)
    with pytest.raises(LeaseExpired, match="expired"):
        table.begin_read(lease("a"), [0], 5.0)
    with pytest.raises(LeaseExpired, match="expired"):
        table.renew(lease("a"), 5.0, 5.0)


def test_a_late_reader_is_told_why() -> None:
    table = LeaseTable()
    table.grant(lease("a"), [1], 0.0, 5.0)
    table.release(lease("a"), "released by decode")
    with pytest.raises(LeaseExpired, match="released by decode"):
        table.begin_read(lease("a"), [0], 1.0)
    with pytest.raises(LeaseExpired, match="unknown"):
        table.begin_read(lease("b"), [0], 1.0)


@pytest.mark.parametrize("blocks", [[], [1, 1], [-1]])
def test_blocks_are_checked(blocks: list[int]) -> None:
    with pytest.raises(ValueError, match=r"block"):
        LeaseTable().grant(lease("a"), blocks, 0.0, 5.0)


def test_positions_are_checked_before_anything_is_pinned() -> None:
    table = LeaseTable()
    table.grant(lease("a"), [7], 0.0, 5.0)
    for position in (1, -1):
        with pytest.raises(IndexError, match="outside the 1 blocks"):
            table.begin_read(lease("a"), [position], 0.0)
    assert table.reads == 0


def test_a_block_that_had_other_holders_under_its_lease_is_noticed() -> None:
    """No call brings that about; a defect of this table would, and is not to end in wrong text."""
    table = LeaseTable()
    table.grant(lease("a"), [7, 8], 0.0, 5.0)
    table.begin_read(lease("a"), [0], 1.0)
    table._generations[8] = 1
    wrong = "block 8 of lease a: generation 1, not 0"
    with pytest.raises(AssertionError, match=wrong):
        table.validate()
    with pytest.raises(AssertionError, match=wrong):
        table.begin_read(lease("a"), [0], 1.0)
    with pytest.raises(AssertionError, match=wrong):
        table.end_read(lease("a"), 1.0)


def test_a_block_has_another_generation_when_its_last_lease_is_over_and_no_sooner() -> None:
    table = LeaseTable()
    for name in ("a", "b"):
        table.grant(lease(name), [7], 0.0, 5.0)
    table.release(lease("a"))
    assert table._generations.get(7, 0) == 0, "the lease that shares it stands"
    table.release(lease("b"))
    assert table._generations[7] == 1
    table.grant(lease("c"), [7], 1.0, 5.0)
    table.validate()


def test_an_open_lease_grows_has_no_clock_and_gets_one_when_it_is_sealed() -> None:
    table = LeaseTable()
    table.open(lease("a"), [3])
    assert table.ready(lease("a"), 1e9) == (1, True)
    assert table.next_expiry() is None
    assert table.renew(lease("a"), 1e9, 5.0) == 5.0
    with pytest.raises(IndexError, match="outside the 1 blocks"):
        table.begin_read(lease("a"), [1], 1e9)
    table.extend(lease("a"), [8, 2])
    assert table.begin_read(lease("a"), [2, 0], 1e9) == (2, 3)
    table.validate()
    table.seal(lease("a"), 1e9, 5.0)
    table.seal(lease("a"), 2e9, 5.0)
    assert table.ready(lease("a"), 1e9) == (3, False)
    assert table.next_expiry() == 1e9 + 5.0
    assert table.expire(1e9 + 5.0).overdue == (lease("a"),)
    with pytest.raises(LeaseExpired):
        table.ready(lease("a"), 1e9 + 5.0)
    _, ended = table.end_read(lease("a"), 1e9 + 6.0)
    assert ended is not None
    assert ended.blocks == (3, 8, 2)
    table.validate()
    assert table.pinned == 0


def test_only_an_open_lease_grows_and_only_by_blocks_it_has_not() -> None:
    table = LeaseTable()
    table.open(lease("a"), [3])
    for blocks in ([3], [4, 4], [-1]):
        with pytest.raises(ValueError, match="distinct"):
            table.extend(lease("a"), blocks)
    table.extend(lease("a"), [])
    assert table.pinned == 1
    table.grant(lease("b"), [5], 0.0, 5.0)
    for name in ("b", "unknown"):
        with pytest.raises(ValueError, match="is not open"):
            table.extend(lease(name), [6])
    assert table.release(lease("a")) is not None
    with pytest.raises(ValueError, match="is not open"):
        table.extend(lease("a"), [6])
    with pytest.raises(ValueError, match="granted before"):
        table.open(lease("a"), [6])


class Leases(RuleBasedStateMachine):
    """Against the plain truth: a lease ends once, at its own time, when unread; a shared block stays."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.now = 0.0
        self.made = 0
        self.ends: dict[LeaseId, float] = {}
        self.blocks: dict[LeaseId, list[int]] = {}
        self.reads: dict[LeaseId, int] = {}
        self.revoked: set[LeaseId] = set()
        self.over: set[LeaseId] = set()

    def finish(self, name: LeaseId) -> None:
        assert name not in self.over, "ended twice"
        assert name in self.revoked
        assert not self.reads[name]
        self.over.add(name)
        del self.ends[name]

    @rule(blocks=st.sets(st.integers(0, 9), min_size=1), duration=st.floats(0.1, 10.0))
    def grant(self, blocks: set[int], duration: float) -> None:
        self.made += 1
        name = lease(self.made)
        self.table.grant(name, sorted(blocks), self.now, duration)
        self.ends[name] = self.now + duration
        self.blocks[name] = sorted(blocks)
        self.reads[name] = 0

    @rule(blocks=st.sets(st.integers(0, 9), min_size=1))
    def open(self, blocks: set[int]) -> None:
        self.made += 1
        name = lease(self.made)
        self.table.open(name, sorted(blocks))
        self.ends[name] = math.inf
        self.blocks[name] = sorted(blocks)
        self.reads[name] = 0

    def opened(self) -> list[LeaseId]:
        return sorted(name for name, end in self.ends.items() if end == math.inf)

    @precondition(opened)
    @rule(data=st.data(), block=st.integers(0, 9))
    def extend(self, data: st.DataObject, block: int) -> None:
        name = data.draw(st.sampled_from(self.opened()))
        if block in self.blocks[name]:
            with pytest.raises(ValueError, match="distinct"):
                self.table.extend(name, [block])
        else:
            self.table.extend(name, [block])
            self.blocks[name].append(block)
        assert self.table.ready(name, self.now) == (len(self.blocks[name]), True)

    @precondition(opened)
    @rule(data=st.data(), duration=st.floats(0.1, 10.0))
    def seal(self, data: st.DataObject, duration: float) -> None:
        name = data.draw(st.sampled_from(self.opened()))
        self.table.seal(name, self.now, duration)
        self.ends[name] = self.now + duration

    @precondition(lambda self: self.ends)
    @rule(data=st.data(), duration=st.floats(0.1, 10.0))
    def renew(self, data: st.DataObject, duration: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.ends)))
        if name in self.revoked or self.now >= self.ends[name]:
            with pytest.raises(LeaseExpired):
                self.table.renew(name, self.now, duration)
        elif self.ends[name] == math.inf:
            assert self.table.renew(name, self.now, duration) == duration
        else:
            self.ends[name] = max(self.ends[name], self.now + duration)
            assert self.table.renew(name, self.now, duration) == self.ends[name] - self.now

    @precondition(lambda self: self.ends)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.ends)))
        if name in self.revoked or self.now >= self.ends[name]:
            with pytest.raises(LeaseExpired):
                self.table.begin_read(name, [0], self.now)
        else:
            assert self.table.begin_read(name, [0], self.now) == (self.blocks[name][0],)
            self.reads[name] += 1

    @precondition(lambda self: any(self.reads.values()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, count in self.reads.items() if count)))
        self.reads[name] -= 1
        why, ended = self.table.end_read(name, self.now)
        assert bool(why) == (name in self.revoked or self.now >= self.ends[name])
        assert (ended is not None) == (name in self.revoked and not self.reads[name])
        if ended is not None:
            self.finish(name)

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = lease(data.draw(st.integers(1, self.made)))
        if name not in self.over:
            self.revoked.add(name)
            if self.ends[name] == math.inf:
                self.table.seal(name, self.now, 3.0)
                self.ends[name] = self.now + 3.0
        ended = self.table.release(name)
        if ended is not None:
            self.finish(name)

    @rule(seconds=st.floats(0.0, 6.0))
    def sweep(self, seconds: float) -> None:
        self.now += seconds
        due = {name for name, end in self.ends.items() if end <= self.now}
        swept = self.table.expire(self.now)
        self.revoked |= due
        for ended in swept.ended:
            self.finish(ended.lease)
        assert not any(not self.reads[name] for name in due if name not in self.over), "a dead lease was left"
        assert set(swept.overdue) <= due

    @invariant()
    def holds(self) -> None:
        self.table.validate()
        assert len(self.table) == len(self.ends)
        assert self.table.pinned == len({block for name in self.ends for block in self.blocks[name]})


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
