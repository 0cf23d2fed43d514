"""The prefix index: equal to the workers' own tables, or known not to be."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from fleet.block_hash import HashKeys, PromptNames, block_hashes, short_names
from fleet.events import BlocksDropped, BlocksStored, Cleared, KvDigest, KvEvent, KvEvents, KvSnapshot, Tier
from fleet.ids import Incarnation, WorkerId
from fleet.kv_log import PART_BLOCKS, KvLog
from fleet.native import Unusable
from router.native.tables import NativeTables, load_library
from router.prefix_index import Outcome, PrefixIndex
from router.prefix_tables import PlainTables, Tables
from router.settings import IndexSettings

W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")


MADE_OF: list[Tables[Any]] = [PlainTables()]


@pytest.fixture(autouse=True, scope="module", params=["plain", "native"])
def _kind(request: pytest.FixtureRequest) -> None:
    """All tests here are run on both kinds of tables."""
    try:
        MADE_OF[0] = PlainTables() if request.param == "plain" else NativeTables(load_library())
    except Unusable as why:
        pytest.skip(str(why))


def index(**fields: float) -> PrefixIndex:
    return PrefixIndex(IndexSettings(**fields), MADE_OF[0])  # type: ignore[arg-type]


def log(worker: WorkerId = W1, life: int = 1) -> KvLog:
    return KvLog(worker, Incarnation(f"{worker}.{life}"))


def tell(to: PrefixIndex, of: KvLog, *events: KvEvent) -> Outcome:
    message = of.record(events)
    assert message is not None
    return to.apply(message)


def proven(*workers: WorkerId, **fields: float) -> tuple[PrefixIndex, list[KvLog]]:
    made, logs = index(**fields), [log(worker) for worker in workers]
    for worker, of in zip(workers, logs, strict=True):
        made.add_worker(worker, Incarnation(f"{worker}.1"))
        made.load_snapshot(of.snapshot())
    return made, logs


def test_match_counts_leading_blocks_of_each_worker() -> None:
    made, (one, two) = proven(W1, W2)
    tell(made, one, BlocksStored((1, 2, 3, 4)))
    tell(made, two, BlocksStored((1, 2)))
    assert made.match([1, 2, 3, 9], 0.0) == {W1: 3, W2: 2}
    assert made.match([9, 1], 0.0) == {}
    assert made.match([], 0.0) == {}
    tell(made, one, BlocksDropped((4, 3)))
    assert made.match([1, 2, 3, 4], 0.0) == {W1: 2, W2: 2}
    tell(made, one, Cleared())
    assert made.match([1, 2], 0.0) == {W2: 2}
    made.validate()


@given(st.lists(st.integers(0, 300), max_size=80), st.integers(1, 300))
def test_match_equals_a_plain_walk_for_any_depths(depths: list[int], length: int) -> None:
    workers = [WorkerId(f"w{n}") for n in range(len(depths))]
    made, logs = proven(*workers)
    for of, depth in zip(logs, depths, strict=True):
        if depth:
            tell(made, of, BlocksStored(tuple(range(1, depth + 1))))
    expected = {w: min(d, length) for w, d in zip(workers, depths, strict=True) if d}
    assert made.match(range(1, length + 1), 0.0) == expected


def test_a_removed_worker_leaves_nothing_behind() -> None:
    made, (one, two) = proven(W1, W2)
    tell(made, one, BlocksStored((1, 2, 3)))
    tell(made, two, BlocksStored((1,)))
    made.remove_worker(W1)
    assert made.match([1, 2, 3], 0.0) == {W2: 1}
    assert (made.blocks(W1), made.holds(W1)) == (0, frozenset())
    made.tidy(0.0)
    assert made.size == 1
    assert tell(made, one, BlocksStored((4,))) is Outcome.STRANGER
    made.validate()


def test_a_slot_is_not_given_to_another_worker_before_it_is_swept() -> None:
    made, (one,) = proven(W1)
    tell(made, one, BlocksStored(tuple(range(1, 101))))
    made.remove_worker(W1)
    made.tidy(0.0, budget=10)
    made.add_worker(W2, Incarnation("w2.1"))
    made.load_snapshot(log(W2).snapshot())
    assert made.match([1, 2, 3], 0.0) == {}
    for _ in range(20):
        made.tidy(0.0, budget=10)
        made.validate()
    assert made.size == 0


def test_removing_what_is_not_there_goes_on_with_the_rest() -> None:
    made, (one, two) = proven(W1, W2)
    tell(made, one, BlocksStored((1, 2)))
    tell(made, two, BlocksStored((1, 2)))
    tell(made, one, BlocksDropped((77, 2)))
    assert made.match([1, 2], 0.0) == {W1: 1, W2: 2}
    made.validate()


def test_a_gap_makes_a_worker_unproven_until_its_snapshot() -> None:
    made, (one, _) = proven(W1, W2)
    tell(made, one, BlocksStored((1, 2)))
    lost = one.record([BlocksDropped((2,))])
    assert lost is not None
    assert tell(made, one, BlocksStored((3,))) is Outcome.UNPROVEN
    assert made.unproven() == {W1: "event 3 came after event 1"}
    assert made.match([1, 2], 0.0) == {}
    assert made.apply(lost) is Outcome.WAITING
    snapshot = one.snapshot()
    assert tell(made, one, BlocksStored((4,))) is Outcome.WAITING
    assert made.load_snapshot(snapshot) is Outcome.APPLIED
    assert made.holds(W1) == {1, 3, 4}, "the snapshot, and the events after it"
    made.validate()


def test_a_router_that_starts_late_learns_all_and_children_of_what_it_missed() -> None:
    one, made = log(), index()
    one.record([BlocksStored((1,))])
    one.record([BlocksStored((2,))])
    made.add_worker(W1, Incarnation("w1.1"))
    assert tell(made, one, BlocksStored((3,))) is Outcome.WAITING
    made.load_snapshot(one.snapshot())
    tell(made, one, BlocksStored((4,)))
    assert made.match([1, 2, 3, 4], 0.0) == {W1: 4}


def test_duplicates_change_nothing() -> None:
    made, (one,) = proven(W1)
    first = one.record([BlocksStored((1,))])
    assert first is not None
    made.apply(first)
    tell(made, one, BlocksDropped((1,)))
    assert made.apply(first) is Outcome.OLD
    assert made.holds(W1) == frozenset()


def test_only_membership_says_which_life_is_the_present_one() -> None:
    made, (one,) = proven(W1)
    tell(made, one, BlocksStored((1, 2)))
    late = one.record([BlocksStored((3,))])
    assert late is not None
    again = log(life=2)
    assert tell(made, again, BlocksStored((9,))) is Outcome.STRANGER, "the registry has not told of it"
    assert made.load_snapshot(again.snapshot()) is Outcome.STRANGER
    assert made.match([1], 0.0) == {W1: 1}
    made.add_worker(W1, Incarnation("w1.2"))
    assert made.match([1], 0.0) == {}
    assert made.apply(late) is Outcome.STRANGER
    assert made.load_snapshot(one.snapshot()) is Outcome.STRANGER, "an answer of the old life"
    assert made.load_snapshot(again.snapshot()) is Outcome.APPLIED
    assert made.holds(W1) == {9}
    made.validate()


def test_a_dead_life_that_is_heard_late_keeps_no_later_one_unproven() -> None:
    """The worker was forgotten between, and so were its earlier lives."""
    made, (one,) = proven(W1)
    late = one.record([BlocksStored((3,))])
    assert late is not None
    made.remove_worker(W1)
    again = log(life=2)
    made.add_worker(W1, Incarnation("w1.2"))
    assert made.apply(late) is Outcome.STRANGER
    assert made.load_snapshot(again.snapshot()) is Outcome.APPLIED
    assert not made.unproven()


def test_a_gap_behind_the_snapshot_needs_another_one() -> None:
    one, made = log(), index()
    made.add_worker(W1, Incarnation("w1.1"))
    snapshot = one.snapshot()
    one.record([BlocksStored((1,))])
    tell(made, one, BlocksStored((2,)))
    assert made.load_snapshot(snapshot) is Outcome.UNPROVEN
    assert made.load_snapshot(one.snapshot()) is Outcome.APPLIED
    assert made.holds(W1) == {1, 2}
    made.validate()


def test_a_digest_that_differs_makes_the_worker_unproven() -> None:
    made, (one,) = proven(W1)
    tell(made, one, BlocksStored((1, 2)))
    life = Incarnation("w1.1")
    assert made.check(W1, life, one.digest()) is Outcome.APPLIED
    assert made.check(W1, Incarnation("w1.0"), KvDigest(1, 9, 9)) is Outcome.OLD
    assert made.check(W1, life, KvDigest(1, 2, 7)) is Outcome.UNPROVEN


def test_the_last_events_lost_are_noticed_though_nothing_follows_them() -> None:
    made, (one,) = proven(W1)
    life = Incarnation("w1.1")
    one.record([BlocksStored((1,))])
    assert made.check(W1, life, one.digest()) is Outcome.WAITING, "they may be on their way"
    assert made.check(W1, life, one.digest()) is Outcome.UNPROVEN
    made.load_snapshot(one.snapshot())
    assert made.holds(W1) == {1}


def test_unproven_workers_are_matched_by_what_was_sent_there_for_a_while() -> None:
    made = index(hint_s=100)
    made.add_worker(W1, Incarnation("w1.1"))
    made.add_worker(W2, Incarnation("w2.1"))
    made.sent(W1, [1, 2, 3], 0.0)
    assert made.match([1, 2, 9], 50.0) == {W1: 2}
    assert made.match([1, 2], 150.0) == {W1: 2}, "at least that long"
    assert made.match([1, 2], 350.0) == {}
    made.sent(W1, [1, 2, 3], 400.0)
    made.load_snapshot(log().snapshot())
    assert made.match([1, 2, 3], 401.0) == {}, "the worker says that it has nothing"
    made.doubt(W1, "a test")
    assert made.match([1, 2, 3], 402.0) == {}, "and what was sent before it said so counts no more"
    made.validate()


def test_a_worker_that_never_tells_of_what_it_is_sent_is_found_out() -> None:
    """It may hash otherwise, whatever it announced; nothing else would ever fail."""
    made, (one, two) = proven(W1, W2, told_s=10.0)
    for turn in range(3):
        assert not made.unfound()
        for worker, of, first in ((W1, one, 1000), (W2, two, 0)):
            made.sent(worker, [100 * turn, 100 * turn + 1], 20.0 * turn)
            tell(made, of, BlocksStored((first + 100 * turn, first + 100 * turn + 1)))
        made.tidy(20.0 * turn + 9.0)
        made.tidy(20.0 * turn + 11.0)
    assert made.unfound() == {W1}
    made.sent(W1, [1, 2], 70.0)
    tell(made, one, BlocksStored((1, 2)))
    assert not made.unfound(), "it has told"
    made.sent(W1, [1, 2, 3], 80.0)
    made.tidy(100.0)
    for turn in range(2):
        made.sent(W1, [7 + turn], 100.0 + 20 * turn)
        made.tidy(119.0 + 20 * turn)
    assert not made.unfound(), "what was there already was found"


def test_hints_are_bounded_and_never_pass_to_another_worker() -> None:
    made = index(max_hints=100)
    made.add_worker(W1, Incarnation("w1.1"))
    made.sent(W1, range(1, 40), 0.0)
    made.remove_worker(W1)
    made.add_worker(W2, Incarnation("w2.1"))
    assert made.match([1, 2], 1.0) == {}
    for start in range(0, 1000, 10):
        made.sent(W2, range(start, start + 10), 1.0)
    assert made.match(range(990, 1000), 1.0) == {W2: 10}
    assert made.match(range(10), 1.0) == {}, "the oldest are forgotten"


def test_beyond_the_cap_the_oldest_are_forgotten_and_counted() -> None:
    made, (one, two) = proven(W1, W2, max_blocks=160)
    tell(made, one, BlocksStored(tuple(range(1, 101))))
    tell(made, two, BlocksStored(tuple(range(50, 101))))
    assert (made.size, made.forgotten) == (151, 0)
    tell(made, two, BlocksStored(tuple(range(101, 111))))
    assert (made.size, made.forgotten) == (154, 7), "a sixteenth of the largest table"
    assert made.match([100], 0.0) == {W1: 1, W2: 1}
    assert made.holds(W1) == set(range(8, 101))
    tell(made, two, BlocksStored(tuple(range(200, 400))))
    assert made.size <= 160
    assert made.holds(W2) == set(range(400 - made.blocks(W2), 400)), "whatever comes at once"
    assert made.check(W1, Incarnation("w1.1"), one.digest()) is Outcome.APPLIED, "its digest cannot agree"
    tell(made, one, BlocksDropped((1, 100)))
    made.validate()


class Teller:
    """A worker for the tests below: its log, and the same table in the plainest way."""

    def __init__(self, worker: WorkerId, life: int = 1) -> None:
        self.worker = worker
        self.life = Incarnation(f"{worker}.{life}")
        self.log = KvLog(worker, self.life, 3 * PART_BLOCKS)
        self.truth: set[tuple[int, Tier]] = set()

    def step(self, chance: random.Random) -> KvEvents:
        event: KvEvent
        kind, tier = chance.random(), chance.choice(list(Tier))
        blocks = tuple(chance.choices(range(1, 30), k=chance.randint(1, 6)))
        if kind < 0.6:
            event = BlocksStored(blocks, tier)
            self.truth |= {(name, tier) for name in blocks}
        elif kind < 0.95:
            event = BlocksDropped(blocks, tier)
            self.truth -= {(name, tier) for name in blocks}
        else:
            event = Cleared()
            self.truth.clear()
        message = self.log.record([event])
        assert message is not None
        return message


def held(by: PrefixIndex, worker: WorkerId) -> set[tuple[int, Tier]]:
    return {(name, tier) for tier in Tier for name in by.holds(worker, tier)}


def load_all(to: PrefixIndex, of: KvLog) -> Outcome:
    """As the watcher does it, with nothing in between."""
    outcome = to.load_snapshot(of.snapshot())
    for part in range(1, of.snapshot().parts):
        outcome = to.load_snapshot(of.snapshot(part))
    while outcome is Outcome.WAITING:
        outcome = to.catch_up(of.snapshot().worker, 3)
    return outcome


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), budget=st.sampled_from([10, 1_000_000]))
def test_any_stream_with_losses_converges_to_the_workers_tables(seed: int, budget: int) -> None:
    """Lost, doubled and reordered messages, restarts, clears, tiers; parts of snapshots that come late, twice
    or never: a digest that agrees proves the table, and asking again always leads there."""
    chance = random.Random(seed)
    made = index(max_tail=4)
    lives = dict.fromkeys((W1, W2, W3), 1)
    tellers = {worker: Teller(worker) for worker in lives}
    under_way: list[KvEvents] = []
    answers: list[KvSnapshot] = []
    for worker, of in tellers.items():
        made.add_worker(worker, of.life)
    for _ in range(80):
        worker = chance.choice(list(lives))
        of, action = tellers[worker], chance.random()
        if action < 0.5:
            message = of.step(chance)
            if chance.random() > 0.1:
                under_way += [message] * (2 if chance.random() < 0.1 else 1)
            if chance.random() < 0.1:
                chance.shuffle(under_way)
        elif action < 0.7 and under_way:
            made.apply(under_way.pop(0))
        elif action < 0.77:
            answers.append(of.log.snapshot(chance.randrange(3)))
        elif action < 0.83 and answers:
            made.load_snapshot(answers.pop(chance.randrange(len(answers))))
        elif action < 0.86:
            load_all(made, of.log)
        elif action < 0.93:
            if made.check(worker, of.life, of.log.digest()) is Outcome.APPLIED:
                assert held(made, worker) == of.truth
        elif action < 0.96:
            lives[worker] += 1
            tellers[worker] = Teller(worker, lives[worker])
            if chance.random() < 0.7:
                made.add_worker(worker, tellers[worker].life)
        else:
            made.catch_up(worker, 2)
            made.tidy(0.0, budget)
        made.validate()
    for message in under_way:
        made.apply(message)
    for worker, of in tellers.items():
        made.add_worker(worker, of.life)
        for _ in range(2):
            made.check(worker, of.life, of.log.digest())
        if worker in made.unproven():
            assert load_all(made, of.log) is Outcome.APPLIED
        assert worker not in made.unproven()
        assert held(made, worker) == of.truth
        assert made.check(worker, of.life, of.log.digest()) is Outcome.APPLIED
    made.validate()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_parts_of_different_moments_and_the_events_between_them_are_the_whole_table(seed: int) -> None:
    """Nothing is lost here, so nothing may be doubted: neither an event nor a digest that was under way."""
    chance = random.Random(seed)
    made, of = index(), Teller(W1)
    made.add_worker(W1, of.life)
    under_way: list[KvEvents] = []
    for _ in range(chance.randrange(20)):
        of.step(chance)
    outcome = Outcome.WAITING
    for part in range(3):
        for _ in range(chance.randrange(6)):
            under_way.append(of.step(chance))
        for message in under_way[: chance.randrange(len(under_way) + 1)]:
            made.apply(message)
            under_way.remove(message)
        outcome = made.load_snapshot(of.log.snapshot(part))
        made.validate()
    while outcome is Outcome.WAITING:
        outcome = made.catch_up(W1, 2)
    assert outcome is Outcome.APPLIED
    for message in under_way:
        early = made.check(W1, of.life, KvDigest(message.sequence - 1, 0, 0))
        assert early is not Outcome.UNPROVEN, "of before the last part: the table is ahead of it"
        assert made.apply(message) in (Outcome.APPLIED, Outcome.OLD)
    assert held(made, W1) == of.truth
    assert made.check(W1, of.life, of.log.digest()) is Outcome.APPLIED


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), cap=st.integers(1, 60))
def test_the_cap_holds_after_every_message_and_nothing_is_made_up(seed: int, cap: int) -> None:
    chance = random.Random(seed)
    made = index(max_blocks=cap)
    tellers = [Teller(worker) for worker in (W1, W2, W3)]
    for of in tellers:
        made.add_worker(of.worker, of.life)
        load_all(made, of.log)
    for _ in range(60):
        of = chance.choice(tellers)
        made.apply(of.step(chance))
        made.validate()
        assert held(made, of.worker) <= of.truth
        assert made.check(of.worker, of.life, of.log.digest()) is Outcome.APPLIED
    kept, true = sum(len(held(made, of.worker)) for of in tellers), sum(len(of.truth) for of in tellers)
    assert made.size == kept
    assert kept + made.forgotten >= true


def test_tiers_are_known_apart_and_a_prefix_may_lie_over_several() -> None:
    made, (one, two) = proven(W1, W2)
    tell(made, one, BlocksStored((1, 2, 3, 4)))
    tell(made, one, BlocksDropped((4, 3)), BlocksStored((3, 4), Tier.HOST), BlocksStored((5,), Tier.DISK))
    tell(made, two, BlocksStored((1,)), BlocksStored((1, 2), Tier.DISK))
    prompt = [1, 2, 3, 4, 5, 6]
    assert made.match(prompt, 0.0) == {W1: 2, W2: 1}
    assert made.match(prompt, 0.0, Tier.HOST) == {W1: 4, W2: 1}
    assert made.match(prompt, 0.0, Tier.DISK) == {W1: 5, W2: 2}
    assert made.check(W1, Incarnation("w1.1"), one.digest()) is Outcome.APPLIED
    late = index()
    late.add_worker(W1, Incarnation("w1.1"))
    late.load_snapshot(one.snapshot())
    assert late.match(prompt, 0.0, Tier.DISK) == {W1: 5}, "snapshots tell tiers"
    tell(made, one, Cleared())
    assert made.match(prompt, 0.0, Tier.DISK) == {W2: 2}
    made.validate()


def test_a_snapshot_comes_in_parts_and_is_trusted_only_whole() -> None:
    of = KvLog(W1, Incarnation("w1.1"), 4 * PART_BLOCKS)
    of.record([BlocksStored(tuple(range(1, 41)))])
    made = index()
    made.add_worker(W1, Incarnation("w1.1"))
    assert made.load_snapshot(of.snapshot(0)) is Outcome.WAITING
    assert made.load_snapshot(of.snapshot(2)) is Outcome.OLD, "not the next one"
    assert made.load_snapshot(of.snapshot(1)) is Outcome.WAITING
    assert made.match([4, 8], 0.0) == {}
    assert made.load_snapshot(of.snapshot(2)) is Outcome.WAITING
    assert made.load_snapshot(of.snapshot(3)) is Outcome.APPLIED
    assert made.match([4, 8], 0.0) == {W1: 2}
    # Asked again in the middle of another one, it begins anew.
    made.doubt(W1, "a test")
    made.load_snapshot(of.snapshot(0))
    made.load_snapshot(of.snapshot(0))
    made.validate()
    for part in (1, 2, 3):
        made.load_snapshot(of.snapshot(part))
    assert made.holds(W1) == set(range(1, 41))
    made.validate()


def test_what_came_while_a_snapshot_was_loaded_is_taken_in_bit_by_bit() -> None:
    made, of = index(), log()
    made.add_worker(W1, Incarnation("w1.1"))
    for step in range(PART_BLOCKS // 100 + 1):
        tell(made, of, BlocksStored(tuple(range(100 * step + 1, 100 * step + 101))))
    assert made.load_snapshot(log().snapshot()) is Outcome.WAITING
    assert W1 in made.unproven()
    assert made.catch_up(W1) is Outcome.APPLIED
    assert made.check(W1, Incarnation("w1.1"), of.digest()) is Outcome.APPLIED
    assert made.catch_up(W1) is Outcome.OLD
    assert made.catch_up(W2) is Outcome.STRANGER


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 40))
def test_few_names_of_a_prompt_are_worked_out(depths: list[int], length: int) -> None:
    """The same answer from names on demand as from names that are known."""
    prompt = tuple(range(length * 4))
    keys = HashKeys("m", block_size=4)
    names = short_names(block_hashes(prompt, keys))
    workers = [WorkerId(f"w{n}") for n in range(len(depths))]
    made, logs = proven(*workers)
    for of, depth in zip(logs, depths, strict=True):
        if depth:
            tell(made, of, BlocksStored(tuple(names[:depth])))
    expected = {w: min(d, length) for w, d in zip(workers, depths, strict=True) if d}
    assert made.match(PromptNames(prompt, keys), 0.0) == made.match(names, 0.0) == expected


@given(st.integers(128, 700), st.integers(13, 60), st.randoms(use_true_random=False))
def test_of_long_prompts_at_many_workers_the_deepest_are_exact_and_no_depth_is_too_great(
    length: int, count: int, chance: random.Random
) -> None:
    """Where names are worked out as they are needed; depths lack less than a grain."""
    prompt, keys = tuple(range(length)), HashKeys("m", block_size=1)
    names = short_names(block_hashes(prompt, keys))
    depths = {WorkerId(f"w{n}"): chance.randint(1, length) for n in range(count)}
    made, logs = proven(*depths)
    for of, depth in zip(logs, depths.values(), strict=True):
        tell(made, of, BlocksStored(tuple(names[:depth])))
    assert made.match(names, 0.0) == depths
    found, most = made.match(PromptNames(prompt, keys), 0.0), max(depths.values())
    assert found.keys() == depths.keys()
    for worker, depth in depths.items():
        assert depth - max(8, length / 32) < found[worker] <= depth
        assert found[worker] == depth or depth < most


def test_pools_of_other_block_sizes_and_other_keys_never_match() -> None:
    """A block is named by all that makes it another one: what another tenant, adapter, model or pool of
    another block size holds is no hit."""
    prompt = tuple(range(64))
    keys = HashKeys("m", block_size=4, adapter="a", salt="s")
    made, (one, two) = proven(W1, W2)
    tell(made, one, BlocksStored(tuple(short_names(block_hashes(prompt, keys)))))
    tell(
        made,
        two,
        BlocksStored(tuple(short_names(block_hashes(prompt, structs.replace(keys, block_size=16))))),
    )
    assert made.match(PromptNames(prompt, keys), 0.0) == {W1: 16}
    assert made.match(PromptNames(prompt, structs.replace(keys, block_size=16)), 0.0) == {W2: 4}
    for other in ({"model": "n"}, {"adapter": "b"}, {"adapter": ""}, {"salt": "t"}, {"salt": ""}):
        assert made.match(PromptNames(prompt, structs.replace(keys, **other)), 0.0) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 64, 200])
def test_many_workers_may_lose_their_events_at_once(workers: int) -> None:
    ids = [WorkerId(f"w{n}") for n in range(workers)]
    made, logs = proven(*ids)
    for of in logs:
        tell(made, of, BlocksStored(tuple(range(1, 20))))
    for worker in ids:
        made.doubt(worker, "no load reports")
    assert made.match([1, 2], 0.0) == {}
    for of in logs:
        made.load_snapshot(of.snapshot())
    assert made.match([1, 2, 3], 0.0) == dict.fromkeys(ids, 3)
    made.tidy(0.0)
    made.tidy(0.0)
    made.validate()
