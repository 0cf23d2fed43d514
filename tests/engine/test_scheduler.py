"""The scheduler, step by step, with a runner that draws what it is told: order, fairness, blocks, ends."""

from __future__ import annotations

import itertools
import sys
import zlib
from collections import deque
from dataclasses import dataclass, field
from types import FrameType

import msgspec
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine import policy
from engine.scheduler import Plan, Scheduler
from engine.sequence import Sequence
from engine.settings import EngineSettings
from engine.words import Batch, BatchResult, Finished, Held, NewSequence, Ready, Reservation, StepReport
from fleet.block_hash import BlockHash, HashKeys, block_hashes
from fleet.errors import BadRequest, Internal, Overloaded, Unavailable
from fleet.request import FinishReason, Sampling

SIZE = 4
KEYS = HashKeys(model="m", block_size=SIZE)


def new(
    id: str,
    prompt: int | tuple[int, ...],
    max_tokens: int = 4,
    *,
    generated: tuple[int, ...] = (),
    priority: int = 0,
    hold: bool = False,
    fill: bool = False,
    keys: HashKeys = KEYS,
    stop: tuple[int, ...] = (),
    min_tokens: int = 0,
    lend: bool = False,
) -> NewSequence:
    """A prompt given as a length is one that nothing shares a beginning with."""
    if isinstance(prompt, int):
        prompt = tuple(zlib.crc32(id.encode()) // 2 + i for i in range(prompt))
    sampling = Sampling(max_tokens, min_tokens=min_tokens, stop_token_ids=stop)
    return NewSequence(id, prompt, sampling, keys, generated, priority, hold, fill, lend=lend)


@dataclass
class Steps:
    """Drives a scheduler and keeps what it said."""

    scheduler: Scheduler
    token: int = 7
    drawn: dict[str, int] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    finished: dict[str, Finished] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    ready: dict[str, list[Ready]] = field(default_factory=dict)
    reservations: dict[str, Reservation] = field(default_factory=dict)
    steps: int = 0
    last: dict[str, int] = field(default_factory=dict)
    """Step of each sequence's newest token."""

    def take(self, report: StepReport) -> None:
        self.started += report.started
        for drawn in report.drawn:
            self.drawn[drawn.id] = self.drawn.get(drawn.id, 0) + 1
            self.last[drawn.id] = self.steps
        for end in report.finished:
            assert end.id not in self.finished, "ended twice"
            self.finished[end.id] = end
        self.held.update({held.id: held for held in report.held})
        for ready in report.ready:
            self.ready.setdefault(ready.id, []).append(ready)
        self.reservations.update({r.id: r for r in self.scheduler.take_reservations()})

    def plan(self) -> Plan:
        plan = self.scheduler.plan()
        self.scheduler.validate()
        self.take(plan.report)
        return plan

    def answer(self, batch: Batch) -> None:
        tokens = tuple(self.token if chunk.draw else None for chunk in batch.chunks)
        self.take(self.scheduler.apply(BatchResult(tokens)))
        self.scheduler.validate()

    def step(self) -> Plan:
        plan = self.plan()
        if plan.batch.chunks:
            self.steps += 1
            self.answer(plan.batch)
        return plan

    def ahead(self) -> list[int]:
        """Until idle, a second step in flight wherever one can be planned: how many were in each time."""
        flights: deque[Batch] = deque()
        counts: list[int] = []
        while self.scheduler.has_work or flights:
            while len(flights) < 2 and (batch := self.plan().batch).chunks:
                flights.append(batch)
            counts.append(len(flights))
            self.answer(flights.popleft())
        self.plan()
        self.scheduler.validate(idle=True)
        return counts

    def until_idle(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            assert self.step().batch.chunks or not self.scheduler.has_work, "work, but nothing was scheduled"
        self.plan()
        self.scheduler.validate(idle=True)


def make(blocks: int = 64, *, max_tokens: int = 1 << 20, **overrides: object) -> Steps:
    values = {"max_batch": 8, "max_step_tokens": 32, **overrides}
    return Steps(
        Scheduler(
            blocks=blocks,
            block_size=SIZE,
            max_tokens=max_tokens,
            settings=EngineSettings(**values),  # type: ignore[arg-type]
        )
    )


def lengths(plan: Plan) -> list[int]:
    return [len(chunk.tokens) for chunk in plan.batch.chunks]


# The shape of a step.


def test_a_prompt_is_computed_in_chunks_under_the_budget_and_then_decodes() -> None:
    steps = make()
    steps.scheduler.add(new("a", 70, 3))
    plans = [steps.step() for _ in range(5)]
    assert [lengths(plan) for plan in plans] == [[32], [32], [6], [1], [1]]
    assert [chunk.draw for plan in plans for chunk in plan.batch.chunks] == [False, False, True, True, True]
    assert [chunk.start for plan in plans for chunk in plan.batch.chunks] == [0, 32, 64, 70, 71]
    assert steps.started == ["a"]
    assert steps.finished["a"] == Finished("a", FinishReason.LENGTH, 70, 3, 0)
    steps.until_idle()


def test_decodes_come_first_and_prompts_fill_the_rest() -> None:
    steps = make()
    for id in "abc":
        steps.scheduler.add(new(id, 2, 20))
    steps.step()
    steps.scheduler.add(new("long", 100))
    assert lengths(steps.step()) == [1, 1, 1, 29]
    steps.until_idle()


def test_a_batch_holds_max_batch_sequences_and_slots_stay_with_them() -> None:
    steps = make(max_batch=3)
    for id in "abcde":
        steps.scheduler.add(new(id, 2, 6))
    seen: dict[int, set[int]] = {}
    while steps.scheduler.has_work:
        plan = steps.step()
        assert len(plan.batch.chunks) <= 3
        slots = [chunk.slot for chunk in plan.batch.chunks]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= {0, 1, 2}
        for chunk in plan.batch.chunks:
            seen.setdefault(chunk.blocks[0], set()).add(chunk.slot)
    assert len(steps.finished) == 5
    assert all(len(slots) == 1 for slots in seen.values())


def test_a_block_table_is_built_again_only_when_it_grows() -> None:
    steps = make()
    steps.scheduler.add(new("a", 5, 20))
    tables = [steps.step().batch.chunks[0].blocks for _ in range(12)]
    assert len({id(table) for table in tables}) == len(set(tables)) == 3


def test_history_is_given_only_where_penalties_need_it() -> None:
    steps = make()
    plain = new("plain", (1, 2))
    punished = NewSequence("punished", (3, 4), Sampling(4, presence_penalty=0.5), KEYS)
    steps.scheduler.add(plain)
    steps.scheduler.add(punished)
    steps.step()
    histories = [chunk.history for chunk in steps.step().batch.chunks]
    assert sorted(histories) == [(), (3, 4, 7)]


# Ends.


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(0, (FinishReason.STOP, 1)), (2, (FinishReason.STOP, 3)), (9, (FinishReason.LENGTH, 5))],
)
def test_stop_tokens_end_after_min_tokens_and_length_at_max_tokens(
    min_tokens: int, expected: tuple[FinishReason, int]
) -> None:
    steps = make()
    steps.scheduler.add(new("a", 3, 5, stop=(7,), min_tokens=min_tokens))
    steps.until_idle()
    end = steps.finished["a"]
    assert (end.finish, end.completion_tokens) == expected


def test_the_longest_sequence_of_the_model_ends_with_length() -> None:
    steps = make(max_tokens=10)
    steps.scheduler.add(new("a", 6, 100))
    steps.until_idle()
    assert (steps.finished["a"].finish, steps.drawn["a"]) == (FinishReason.LENGTH, 4)


def test_tokens_generated_before_count_and_are_not_said_again() -> None:
    steps = make()
    steps.scheduler.add(new("a", 6, 5, generated=(7, 7, 7)))
    plan = steps.step()
    assert plan.batch.chunks[0].tokens[-3:] == (7, 7, 7)
    assert plan.batch.chunks[0].prompt_length == 6
    steps.until_idle()
    assert steps.drawn["a"] == 2
    assert steps.finished["a"].completion_tokens == 5


def test_a_token_that_the_model_has_not_is_refused_before_it_ends_the_step_of_others() -> None:
    settings = EngineSettings(block_size=4)
    scheduler = Scheduler(blocks=4, block_size=4, max_tokens=12, settings=settings, vocabulary=100)
    scheduler.add(new("a", (99, 0)))
    with pytest.raises(BadRequest, match="there is no token 100 in this model; ids go from 0 to 99"):
        scheduler.add(new("b", (1, 100, 2)))
    with pytest.raises(BadRequest, match="there is no token 103"):
        scheduler.add(new("c", (1,), 5, generated=(103,)))


def test_what_can_never_run_is_refused_with_a_reason() -> None:
    steps = make(blocks=4, max_tokens=12, max_waiting=1)
    add = steps.scheduler.add
    with pytest.raises(
        BadRequest, match="the prompt has 12 tokens; this model and worker take at most 11"
    ) as error:
        add(new("a", 12))
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(BadRequest, match="empty"):
        add(new("a", 0))
    with pytest.raises(BadRequest, match="max_tokens"):
        add(new("a", 1, 2, generated=(7, 7)))
    with pytest.raises(BadRequest, match="token ids"):
        add(new("a", (-1,)))
    with pytest.raises(BadRequest, match="block size 16"):
        add(new("a", 1, keys=HashKeys("m", 16)))
    add(new("a", 1))
    with pytest.raises(BadRequest, match="ids must differ"):
        add(new("a", 1))
    with pytest.raises(Overloaded, match="max_waiting"):
        add(new("b", 1))
    steps.until_idle()


def test_a_sequence_that_outgrows_the_whole_pool_fails_and_the_next_one_is_served() -> None:
    steps = make(blocks=4)
    steps.scheduler.add(new("a", 12, 1000))
    steps.until_idle()
    end = steps.finished["a"]
    assert (end.finish, end.error, steps.drawn["a"]) == (FinishReason.FAILED, "Overloaded", 5)
    assert "17 tokens" in end.message
    steps.scheduler.add(new("b", 12, 4))
    steps.until_idle()
    assert steps.finished["b"].finish is FinishReason.LENGTH


def test_a_failed_step_ends_its_sequences_and_no_others() -> None:
    steps = make(max_batch=2)
    for id in "abc":
        steps.scheduler.add(new(id, 3))
    assert len(steps.plan().batch.chunks) == 2
    steps.take(steps.scheduler.fail(Unavailable("device lost")))
    assert {(e.id, e.finish, e.error, e.message) for e in steps.finished.values()} == {
        (id, FinishReason.FAILED, "Unavailable", "device lost") for id in "ab"
    }
    steps.until_idle()
    assert steps.finished["c"].finish is FinishReason.LENGTH
    assert steps.scheduler.counters.runner_failures == 1


def test_a_result_that_does_not_fit_the_batch_changes_nothing() -> None:
    steps = make()
    steps.scheduler.add(new("a", 3))
    steps.plan()
    with pytest.raises(Internal, match="answered 2 of 1"):
        steps.scheduler.apply(BatchResult((7, 7)))
    with pytest.raises(Internal, match="drew no token"):
        steps.scheduler.apply(BatchResult((None,)))
    steps.take(steps.scheduler.fail(Internal("bad result")))
    steps.until_idle()


# Cancelling.


@pytest.mark.parametrize("steps_before", range(6))
def test_cancel_in_any_phase_gives_all_blocks_back_within_a_step(steps_before: int) -> None:
    steps = make()
    steps.scheduler.add(new("a", 70, 100))
    for _ in range(steps_before):
        steps.step()
    assert steps.scheduler.cancel("a")
    assert not steps.scheduler.cancel("a")
    steps.plan()
    assert steps.finished["a"].finish is FinishReason.CANCELLED
    steps.scheduler.validate(idle=True)


def test_blocks_of_the_step_in_flight_are_nobodys_until_it_ends() -> None:
    steps = make(blocks=4)
    steps.scheduler.add(new("a", 15, 1))
    batch = steps.plan().batch
    assert steps.scheduler.cancel("a")
    steps.scheduler.add(new("fill", 9, fill=True, generated=(7,)))
    assert not steps.scheduler.take_reservations()
    assert not steps.finished
    steps.answer(batch)
    assert steps.finished["a"].finish is FinishReason.CANCELLED
    assert "a" not in steps.drawn
    steps.plan()
    assert "fill" in steps.reservations
    steps.scheduler.filled("fill", 9)
    steps.until_idle()


# The prefix cache.


def test_a_second_turn_computes_only_what_is_new_generated_tokens_included() -> None:
    steps = make()
    steps.scheduler.add(new("one", tuple(range(10)), 7))
    steps.until_idle()
    steps.scheduler.add(new("two", (*range(10), *[7] * 7, 50, 51)))
    assert [(c.start, len(c.tokens)) for c in steps.step().batch.chunks] == [(16, 3)]
    steps.until_idle()
    assert steps.finished["two"].cached_tokens == 16
    assert steps.scheduler.counters.cached_tokens == 16


def test_a_prompt_that_is_all_cached_still_computes_its_last_token() -> None:
    steps = make()
    for id in ("cold", "warm"):
        steps.scheduler.add(new(id, tuple(range(8)), 1))
        plan = steps.step()
    assert [(c.start, len(c.tokens), c.draw) for c in plan.batch.chunks] == [(4, 4, True)]
    assert steps.finished["warm"].cached_tokens == 4


def test_equal_prompts_at_once_are_computed_once_but_for_a_chunk() -> None:
    steps = make(max_step_tokens=16, short_prompt_share=0.25)
    prompt = tuple(range(100))
    for id in "abcd":
        steps.scheduler.add(new(id, prompt, 2))
    steps.until_idle()
    assert steps.scheduler.counters.computed_tokens < 100 + 4 * 16
    assert len(steps.finished) == 4


@pytest.mark.parametrize(
    "other", [HashKeys("m2", SIZE), HashKeys("m", SIZE, adapter="x"), HashKeys("m", SIZE, salt="x")]
)
def test_another_model_adapter_or_tenant_finds_nothing(other: HashKeys) -> None:
    steps = make()
    cached = {}
    for id, keys in (("a", KEYS), ("b", other), ("c", other)):
        steps.scheduler.add(new(id, tuple(range(9)), 1, keys=keys))
        steps.until_idle()
        cached[id] = steps.finished[id].cached_tokens
    assert cached == {"a": 0, "b": 0, "c": 8}


def test_without_the_cache_nothing_is_found() -> None:
    steps = make(prefix_cache=False)
    for id in "ab":
        steps.scheduler.add(new(id, tuple(range(20)), 6))
        steps.until_idle()
    assert steps.finished["b"].cached_tokens == 0
    assert steps.scheduler.pool.cached() == ()


# Order, fairness, preemption.


def test_larger_priorities_run_first_then_the_oldest() -> None:
    steps = make(max_batch=1)
    for id, priority in (("a", 0), ("b", 0), ("c", 5)):
        steps.scheduler.add(new(id, 3, 2, priority=priority))
    steps.until_idle()
    assert steps.started == ["c", "a", "b"]


def test_a_preempted_sequence_resumes_before_those_never_started() -> None:
    queue = [
        Sequence.of(new(id, 2, priority=p), n)
        for n, (id, p) in enumerate([("old", 0), ("new", 0), ("vip", 1)])
    ]
    queue[1].preemptions = 1
    assert [s.id for s in sorted(queue, key=policy.turn)] == ["vip", "new", "old"]


def test_the_youngest_of_the_lowest_priority_gives_way_and_the_reason_is_kept() -> None:
    running = [
        Sequence.of(new(id, 2, priority=p), n) for n, (id, p) in enumerate([("a", 1), ("b", 0), ("c", 0)])
    ]
    chosen = policy.victim(running, needed=2, available=1)
    assert chosen.sequence.id == "c"
    assert chosen.why == "preempt c: youngest of priority 0; 2 blocks needed, 1 available"


@pytest.mark.parametrize("prompts", list(itertools.product(range(1, 9), repeat=2)))
def test_need_is_counted_in_blocks_and_nobody_is_preempted_without_need(prompts: tuple[int, int]) -> None:
    # A third sequence, so that the pool is full for every way in which lengths lie over block borders.
    for blocks in (3, 4, 5, 6):
        steps = make(blocks=blocks)
        for id, length in zip("abc", (*prompts, 3), strict=True):
            steps.scheduler.add(new(id, length, 4))
        while steps.scheduler.has_work:
            needed = sum(len(s.tokens) > len(s.blocks) * SIZE for s in steps.scheduler._running.values())
            short = max(0, needed - steps.scheduler.pool.available)
            before = steps.scheduler.counters.preemptions
            assert steps.step().batch.chunks
            assert steps.scheduler.counters.preemptions - before <= short
        steps.plan()
        assert all(end.finish is FinishReason.LENGTH for end in steps.finished.values())
        steps.scheduler.validate(idle=True)


def test_preempted_requests_are_not_starved_and_preemptions_are_few() -> None:
    steps = make(blocks=12, max_batch=6)
    count = 120
    for n in range(count):
        steps.scheduler.add(new(f"r{n}", 3 + n % 9, 12))
        for _ in range(2):
            steps.step()
    preempted = steps.scheduler.counters.preemptions
    steps.until_idle()
    assert preempted > 0, "the case is not the one meant"
    assert len(steps.finished) == count
    assert all(end.finish is FinishReason.LENGTH for end in steps.finished.values())
    assert steps.scheduler.counters.preemptions < count
    assert max(int(id[1:]) - place for place, id in enumerate(steps.started)) < 6, (
        "overtaken by more than a batch"
    )


def test_a_pool_too_small_for_the_batch_does_not_thrash() -> None:
    steps = make(blocks=12, max_batch=6)
    for n in range(60):
        steps.scheduler.add(new(f"r{n}", 3 + n % 9, 12))
    each: dict[str, int] = {}
    while steps.scheduler.has_work:
        for why in steps.step().why:
            assert why.startswith("preempt ")
            each[why.split()[1]] = each.get(why.split()[1], 0) + 1
    assert 0 < sum(each.values()) < 40, "without spare blocks it is 52"
    assert max(each.values()) <= 3


def test_every_small_case_ends_and_every_step_makes_progress() -> None:
    """All mixes of up to three requests over 2–4 blocks: no cycle without a token computed."""
    shapes = [(1, 9), (3, 2), (4, 5), (5, 12), (8, 1)]
    for blocks, count in itertools.product((2, 3, 4), (1, 2, 3)):
        for mix in itertools.product(shapes, repeat=count):
            steps = make(blocks=blocks, max_batch=3, max_step_tokens=4, max_tokens=20)
            for n, (prompt, max_tokens) in enumerate(mix):
                if prompt <= blocks * SIZE:
                    steps.scheduler.add(new(f"r{n}", prompt, max_tokens, priority=n % 2))
            for _ in range(400):
                before = steps.scheduler.counters.computed_tokens
                if not steps.scheduler.has_work:
                    break
                plan = steps.scheduler.plan()
                steps.take(plan.report)
                if plan.batch.chunks:
                    steps.take(
                        steps.scheduler.apply(
                            BatchResult(tuple(7 if c.draw else None for c in plan.batch.chunks))
                        )
                    )
                    assert steps.scheduler.counters.computed_tokens > before
                else:
                    assert not steps.scheduler.has_work
            steps.plan()
            steps.scheduler.validate(idle=True)


def test_a_long_prompt_starves_neither_decodes_nor_short_prompts_nor_is_starved() -> None:
    steps = make(blocks=20_000, max_batch=32, max_step_tokens=512)
    steps.scheduler.add(new("decode", 10, 10_000))
    steps.step()
    steps.scheduler.add(new("long", 50_000, 1))
    arrived: dict[str, int] = {}
    while "long" not in steps.finished:
        before = steps.drawn["decode"]
        if steps.steps % 3 == 0:
            id = f"short{steps.steps}"
            arrived[id] = steps.steps
            steps.scheduler.add(new(id, 101, 1))
        plan = steps.scheduler.plan()
        steps.take(plan.report)
        steps.steps += 1
        steps.take(
            steps.scheduler.apply(
                BatchResult(tuple(7 if chunk.draw else None for chunk in plan.batch.chunks))
            )
        )
        assert steps.drawn["decode"] == before + 1, "a decode missed a step"
    waited = [steps.last[id] - step for id, step in arrived.items() if id in steps.last]
    assert len(waited) >= len(arrived) - 1
    assert max(waited) <= 2
    alone = 50_000 / 511
    assert steps.last["long"] <= alone / (1 - 0.25) + 3
    steps.scheduler.cancel("decode")
    steps.until_idle()


def test_a_flood_of_short_prompts_does_not_starve_a_long_one() -> None:
    steps = make(blocks=4000, max_batch=32, max_step_tokens=64, short_prompt_share=0.25)
    steps.scheduler.add(new("long", 3000, 1))
    while "long" not in steps.finished:
        for n in range(2):
            steps.scheduler.add(new(f"short{steps.steps}.{n}", 30, 1))
        steps.step()
    assert steps.steps <= 3000 / (64 * 0.75) + 2
    assert sum(id.startswith("short") for id in steps.finished) > steps.steps / 3
    steps.until_idle()


def test_a_short_prompt_passes_long_ones_that_wait() -> None:
    steps = make(blocks=2000, max_step_tokens=64)
    for id in ("long1", "long2"):
        steps.scheduler.add(new(id, 1000, 1))
    steps.step()
    steps.scheduler.add(new("short", 10, 1))
    steps.step()
    assert "short" in steps.finished
    steps.until_idle()


# Holding and filling.


def test_a_held_sequence_keeps_its_blocks_until_released_and_is_in_the_cache() -> None:
    steps = make(blocks=8)
    prompt = tuple(range(11))
    steps.scheduler.add(new("p", prompt, 50, hold=True))
    steps.step()
    held = steps.held["p"]
    assert (len(held.blocks), held.tokens, held.finish, steps.drawn["p"]) == (3, 11, None, 1)
    assert not steps.finished
    assert not steps.scheduler.cancel("p"), "it has had its last word"
    assert steps.scheduler.pool.available == 5
    steps.scheduler.add(new("q", prompt, 1, hold=True))
    steps.step()
    assert steps.held["q"].finish is FinishReason.LENGTH
    assert steps.held["q"].cached_tokens == 8
    assert steps.held["q"].blocks[:2] == held.blocks[:2]
    for id in ("p", "p", "q", "unknown"):
        steps.scheduler.release(id)
    steps.scheduler.validate(idle=True)


def test_a_reservation_covers_all_but_the_last_token_and_runs_when_filled() -> None:
    steps = make()
    prompt = tuple(range(10))
    steps.scheduler.add(new("warm", prompt, 1))
    steps.until_idle()
    steps.scheduler.add(new("f", prompt, 5, generated=(7, 7, 7), fill=True))
    (granted,) = steps.scheduler.take_reservations()
    assert (len(granted.blocks), granted.cached, granted.tokens) == (3, 2, 12)
    assert not steps.step().batch.chunks
    steps.scheduler.filled("f", 12)
    assert [(c.start, c.tokens) for c in steps.step().batch.chunks] == [(12, (7,))]
    steps.until_idle()
    end = steps.finished["f"]
    assert (end.completion_tokens, end.cached_tokens, steps.drawn["f"]) == (5, 8, 2)
    assert steps.scheduler.counters.filled_tokens == 4


@pytest.mark.parametrize("tokens", [0, 8, 9, 12])
def test_what_was_not_filled_is_computed(tokens: int) -> None:
    steps = make()
    steps.scheduler.add(new("f", 10, 5, generated=(7, 7, 7), fill=True))
    steps.scheduler.filled("f", tokens)
    (chunk,) = steps.step().batch.chunks
    assert (chunk.start, chunk.start + len(chunk.tokens), chunk.draw) == (tokens, 13, True)
    steps.until_idle()


def test_filled_blocks_are_in_the_cache_at_once() -> None:
    steps = make()
    prompt = tuple(range(12))
    steps.scheduler.add(new("f", prompt, 5, generated=(7,), fill=True))
    assert steps.scheduler.pool.cached() == ()
    steps.scheduler.filled("f", 12)
    assert len(steps.scheduler.pool.cached()) == 3
    steps.scheduler.add(new("g", prompt, 2))
    assert [len(chunk.tokens) for chunk in steps.step().batch.chunks] == [1, 4]
    steps.until_idle()


def test_a_cancelled_reservation_is_in_quarantine_until_filled_is_called() -> None:
    steps = make(blocks=4)
    steps.scheduler.add(new("f", 15, 5, generated=(7,), fill=True))
    assert steps.scheduler.cancel("f")
    assert steps.scheduler.pool.available == 0
    steps.scheduler.add(new("b", 3, 1))
    assert not steps.step().batch.chunks
    assert steps.finished["f"].finish is FinishReason.CANCELLED
    steps.scheduler.filled("f", 0)
    assert steps.scheduler.pool.cached() == ()
    steps.until_idle()
    with pytest.raises(ValueError, match="not a reservation"):
        steps.scheduler.filled("f", 15)


@pytest.mark.parametrize(("came", "kept"), [(15, 3), (11, 2), (3, 0), (0, 0)])
def test_what_came_for_a_cancelled_reservation_is_cached(came: int, kept: int) -> None:
    steps = make(blocks=8)
    prompt = tuple(range(15))
    steps.scheduler.add(new("f", prompt, 5, fill=True))
    assert steps.scheduler.cancel("f")
    steps.scheduler.filled("f", came)
    steps.scheduler.validate()
    assert len(steps.scheduler.pool.cached()) == kept
    steps.scheduler.add(new("again", prompt, 1))
    steps.until_idle()
    assert steps.finished["again"].cached_tokens == kept * SIZE
    assert steps.scheduler.counters.computed_tokens == 15 - kept * SIZE


@pytest.mark.parametrize("evicted", [False, True])
def test_what_came_after_a_cached_beginning_is_kept_with_it_only(evicted: bool) -> None:
    steps = make(blocks=5)
    prompt = tuple(range(15))
    steps.scheduler.add(new("before", prompt[:9], 1))
    steps.until_idle()
    steps.scheduler.add(new("f", prompt, 5, fill=True))
    steps.plan()
    assert steps.reservations["f"].cached == 2
    assert steps.scheduler.cancel("f")
    if evicted:
        steps.scheduler.add(new("other", 9, 1))
        while steps.scheduler.has_work:
            steps.step()
        assert steps.finished["other"].cached_tokens == 0
    steps.scheduler.filled("f", 15)
    steps.until_idle()
    steps.scheduler.add(new("again", prompt, 1))
    steps.until_idle()
    assert steps.finished["again"].cached_tokens == (0 if evicted else 12)


def test_what_came_twice_is_kept_once() -> None:
    steps = make(blocks=16)
    prompt = tuple(range(15))
    for id in ("f", "g"):
        steps.scheduler.add(new(id, prompt, 5, fill=True))
        assert steps.scheduler.cancel(id)
    for id in ("f", "g"):
        steps.scheduler.filled(id, 15)
    assert len(steps.scheduler.pool.cached()) == 3
    steps.until_idle()


def test_of_a_long_prompt_that_came_twice_the_block_table_is_made_once() -> None:
    """And not anew for each of its blocks, each time as long as all of them."""
    steps = make(blocks=2100)
    prompt = tuple(range(1000 * SIZE))
    for id in "ab":
        steps.scheduler.add(new(id, prompt, 5, generated=(1,), fill=True))
    steps.scheduler.filled("a", len(prompt))
    made = 0

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal made
        made += event == "call" and frame.f_code is Sequence.blocks_changed.__code__

    sys.setprofile(watch)
    try:
        steps.scheduler.filled("b", len(prompt))
    finally:
        sys.setprofile(None)
    steps.scheduler.validate()
    assert made == 1


def test_more_than_was_reserved_cannot_be_filled() -> None:
    steps = make()
    steps.scheduler.add(new("f", 5, 5, generated=(7,), fill=True))
    with pytest.raises(ValueError, match="at most 5"):
        steps.scheduler.filled("f", 6)
    steps.scheduler.filled("f", 5)
    steps.until_idle()


def test_reservations_wait_their_turn() -> None:
    steps = make(blocks=4)
    steps.scheduler.add(new("a", 12, 3))
    steps.step()
    steps.scheduler.add(new("f", 12, 5, generated=(7,), fill=True))
    steps.scheduler.add(new("late", 1, 1))
    for _ in range(2):
        assert "late" not in steps.started, "it took a block that an earlier one waits for"
        steps.step()
    steps.step()
    assert "f" in steps.reservations
    steps.scheduler.filled("f", 12)
    steps.until_idle()


def test_a_runner_in_need_waits_for_reserved_blocks_and_then_takes_them() -> None:
    """The only running sequence needs a block, all others are being filled: neither dies."""
    steps = make(blocks=4)
    steps.scheduler.add(new("a", 7, 9))
    steps.step()
    steps.scheduler.add(new("f", 4, 6, generated=(7,), fill=True))
    while (plan := steps.step()).batch.chunks:
        pass
    assert plan.why == ("stall a: no block is available, and nobody runs who could give way",)
    assert (steps.drawn["a"], steps.finished) == (6, {})
    steps.scheduler.add(new("late", 1, 1))
    assert not steps.step().batch.chunks, "a newcomer must not take what the stalled one needs"
    steps.scheduler.filled("f", 4)
    assert steps.step().why == ("preempt f: youngest of priority 0; 2 blocks needed, 0 available",)
    steps.until_idle()
    assert {end.finish for end in steps.finished.values()} == {FinishReason.LENGTH}
    assert steps.drawn["f"] == 5


def test_an_unfilled_reservation_in_need_of_one_more_block_waits_for_it() -> None:
    steps = make(blocks=4)
    steps.scheduler.add(new("held", 4, hold=True))
    steps.step()
    steps.scheduler.add(new("f", 12, 3, generated=(7,), fill=True))
    steps.scheduler.filled("f", 0)
    assert not steps.step().batch.chunks, "there is no block for its last token"
    steps.scheduler.release("held")
    steps.scheduler.add(new("late", 3, 2, generated=(7,), fill=True))
    assert not steps.scheduler.take_reservations(), "a newcomer must not take what the stalled one needs"
    for _ in range(4):
        steps.step()
    assert steps.drawn["f"] == 2
    steps.scheduler.filled("late", 3)
    steps.until_idle()
    assert set(steps.finished) == {"f", "late"}


# Blocks lent before their prompt is whole.


def test_blocks_are_told_as_soon_as_they_never_change_and_those_of_the_last_step_with_the_end() -> None:
    steps = make()
    steps.scheduler.add(new("p", 74, 50, hold=True, lend=True))
    for _ in range(3):
        steps.step()
    held = steps.held["p"]
    told = [ready.blocks for ready in steps.ready["p"]]
    assert [len(blocks) for blocks in told] == [8, 16], "64 tokens of 74 in two steps; the third is the last"
    assert all(blocks == held.blocks[: len(blocks)] for blocks in told)
    steps.scheduler.release("p")
    steps.scheduler.validate(idle=True)


def test_prompts_of_one_step_and_those_that_are_not_to_be_lent_tell_nothing() -> None:
    steps = make()
    steps.scheduler.add(new("short", 30, 5, hold=True, lend=True))
    steps.step()
    steps.scheduler.add(new("kept", 70, 5, hold=True))
    for _ in range(3):
        steps.step()
    assert set(steps.held) == {"short", "kept"}
    assert not steps.ready
    for id in steps.held:
        steps.scheduler.release(id)
    steps.until_idle()


def test_blocks_found_in_the_cache_are_told_with_the_first_computed_ones() -> None:
    steps = make()
    prompt = tuple(range(80))
    steps.scheduler.add(new("warm", prompt[:20], 1))
    steps.until_idle()
    steps.scheduler.add(new("p", prompt, 5, hold=True, lend=True))
    steps.step()
    assert [len(ready.blocks) for ready in steps.ready["p"]] == [13]  # 5 found, 32 of 60 tokens computed
    steps.scheduler.cancel("p")
    steps.scheduler.release("p")
    steps.until_idle()


def test_two_that_compute_the_same_never_swap_a_block_that_was_told() -> None:
    steps = make(max_step_tokens=16)
    prompt = tuple(range(64))
    for id in ("a", "b"):
        steps.scheduler.add(new(id, prompt, 5, hold=True, lend=True))
    while len(steps.held) < 2:
        steps.step()
    for id, held in steps.held.items():
        assert steps.ready[id]
        for ready in steps.ready[id]:
            assert ready.blocks == held.blocks[: len(ready.blocks)]
        steps.scheduler.release(id)
    steps.until_idle()


@pytest.mark.parametrize("end", ["cancel", "cancel in flight", "failure"])
def test_what_was_lent_stays_until_it_is_released_however_the_sequence_ends(end: str) -> None:
    steps = make(blocks=24)
    steps.scheduler.add(new("p", 90, 5, hold=True, lend=True))
    steps.step()
    if end == "cancel":
        assert steps.scheduler.cancel("p")
    plan = steps.plan()
    if end == "cancel in flight":
        assert steps.scheduler.cancel("p")
        steps.answer(plan.batch)
    elif end == "failure":
        steps.take(steps.scheduler.fail(Internal("broken")))
    steps.plan()
    assert steps.finished["p"].finish is (FinishReason.FAILED if end == "failure" else FinishReason.CANCELLED)
    assert not steps.scheduler.has_work
    assert steps.scheduler.pool.available == 1, "a reader may still read the others"
    assert not steps.scheduler.cancel("p"), "it has had its last word"
    steps.scheduler.release("p")
    steps.until_idle()


def test_a_loan_that_ends_before_its_prompt_costs_the_prompt_nothing() -> None:
    steps = make()
    steps.scheduler.add(new("p", 90, 5, hold=True, lend=True))
    steps.step()
    steps.scheduler.release("p")
    steps.step()
    assert len(steps.ready["p"]) == 1, "nobody reads it: not told again"
    steps.step()
    assert steps.held["p"].tokens == 90
    steps.scheduler.release("p")
    steps.scheduler.add(new("q", 90, 5, hold=True, lend=True))
    steps.step()
    steps.scheduler.release("q")
    steps.scheduler.cancel("q")
    steps.until_idle()


def test_who_lends_never_gives_way_and_computes_on_while_all_others_do() -> None:
    steps = make(blocks=18, max_batch=4, max_step_tokens=8)
    steps.scheduler.add(new("old", 7, 40))
    steps.step()
    steps.scheduler.add(new("lent", 60, 5, hold=True, lend=True))
    while "lent" not in steps.held:
        assert steps.step().batch.chunks
    assert steps.scheduler.counters.preemptions > 0, "the older one gave way"
    assert steps.ready["lent"]
    steps.scheduler.release("lent")
    steps.until_idle()
    assert steps.finished["old"].completion_tokens == 40


def test_the_first_token_may_come_with_the_kv() -> None:
    steps = make()
    steps.scheduler.add(new("f", 12, 5, fill=True))
    (granted,) = steps.scheduler.take_reservations()
    assert (len(granted.blocks), granted.cached) == (3, 0)
    with pytest.raises(ValueError, match="at most 12"):
        steps.scheduler.filled("f", 13, (7,))
    with pytest.raises(ValueError, match="3 blocks were reserved"):
        steps.scheduler.filled("f", 12, (7, 7))
    steps.scheduler.filled("f", 12, (7,))
    assert [(c.start, c.tokens) for c in steps.step().batch.chunks] == [(12, (7,))]
    steps.until_idle()
    assert steps.finished["f"].completion_tokens == 5
    assert steps.drawn["f"] == 4


@dataclass
class Shadow:
    new: NewSequence
    cancelled: bool = False
    late: int = 0
    """Tokens drawn elsewhere that came when it was filled."""


class SchedulerMachine(RuleBasedStateMachine):
    """Everything in any order on a tiny pool, up to two steps in flight: nothing is lost, ended twice, stuck,
    or given to others while a step may read or write it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = make(blocks=6, max_batch=3, max_step_tokens=8, max_tokens=40)
        self.all: dict[str, Shadow] = {}
        self.to_fill: dict[str, Reservation] = {}
        self.batches: deque[Batch] = deque()
        """In flight."""
        self.lent: dict[str, tuple[int, ...]] = {}
        """Blocks that others may read."""

    def note(self, report: StepReport) -> None:
        self.steps.take(report)
        for ready in report.ready:
            before = self.lent.get(ready.id, ())
            assert ready.blocks[: len(before)] == before, "a block that was told is another one now"
            assert len(ready.blocks) > len(before)
            self.lent[ready.id] = ready.blocks

    def granted(self) -> None:
        self.to_fill.update({r.id: r for r in self.steps.scheduler.take_reservations()})
        self.to_fill.update(self.steps.reservations)
        self.steps.reservations.clear()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20).map(tuple),
        max_tokens=st.integers(3, 14),
        generated=st.integers(0, 2),
        priority=st.integers(0, 1),
        kind=st.sampled_from(["plain", "plain", "stop", "hold", "lend", "lend", "fill"]),
    )
    def add(self, prompt: tuple[int, ...], max_tokens: int, generated: int, priority: int, kind: str) -> None:
        id = f"r{len(self.all)}"
        item = new(
            id,
            prompt,
            max_tokens,
            generated=(7,) * generated,
            priority=priority,
            hold=kind in ("hold", "lend"),
            fill=kind == "fill",
            lend=kind == "lend",
            stop=(8,) if kind == "stop" else (),
        )
        self.all[id] = Shadow(item)
        self.steps.scheduler.add(item)
        self.granted()

    @precondition(lambda self: len(self.batches) < 2)
    @rule()
    def plan(self) -> None:
        preempted = self.steps.scheduler.counters.preemptions
        plan = self.steps.scheduler.plan()
        self.note(plan.report)
        self.granted()
        if self.batches:
            assert self.steps.scheduler.counters.preemptions == preempted, "somebody in flight gave way"
        if plan.batch.chunks:
            self.batches.append(plan.batch)
        lent = {block for blocks in self.lent.values() for block in blocks}
        for chunk in plan.batch.chunks:
            written = chunk.blocks[chunk.start // SIZE : -(-(chunk.start + len(chunk.tokens)) // SIZE)]
            assert not lent & set(written), "a block that others read is written to"
        outside = self.to_fill or self.unreleased() or self.steps.scheduler.pool.quarantined
        if not self.batches and not outside:
            assert not self.steps.scheduler.has_work, "work, but nothing was scheduled"

    @precondition(lambda self: self.batches)
    @rule(fails=st.sampled_from([False] * 9 + [True]), token=st.sampled_from([7, 7, 7, 8]))
    def end_step(self, fails: bool, token: int) -> None:
        batch = self.batches.popleft()
        if fails:
            self.note(self.steps.scheduler.fail(Internal("broken")))
        else:
            tokens = tuple(token if chunk.draw else None for chunk in batch.chunks)
            self.note(self.steps.scheduler.apply(BatchResult(tokens)))

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.all)))
        over = id in self.steps.finished or id in self.steps.held
        if self.steps.scheduler.cancel(id):
            assert not over
            assert not self.all[id].cancelled
            self.all[id].cancelled = True

    @precondition(lambda self: self.to_fill)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.to_fill)))
        granted = self.to_fill.pop(id)
        item = self.all[id].new
        late = () if item.generated or not data.draw(st.booleans()) else (7,)
        self.all[id].late = len(late)
        most = len(item.prompt) if late else granted.tokens
        self.steps.scheduler.filled(
            id, data.draw(st.integers(granted.cached * SIZE, most) | st.just(0)), late
        )

    def unreleased(self) -> list[str]:
        return sorted(id for id in {*self.steps.held, *self.lent} if id in self.steps.scheduler._sequences)

    @precondition(lambda self: self.unreleased())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.unreleased()))
        self.lent.pop(id, None)
        self.steps.scheduler.release(id)

    @invariant()
    def sound(self) -> None:
        scheduler = self.steps.scheduler
        scheduler.validate()
        lent = {block for blocks in self.lent.values() for block in blocks}
        filled = {block for granted in self.to_fill.values() for block in granted.blocks[granted.cached :]}
        for batch in self.batches:
            for chunk in batch.chunks:
                used = chunk.blocks[: -(-(chunk.start + len(chunk.tokens)) // SIZE)]
                written = set(used[chunk.start // SIZE :])
                assert all(scheduler.pool._holders[block] for block in used), "given away in flight"
                assert not written & lent, "a block that others read is written to"
                assert not set(used) & filled, "a block in flight is filled from elsewhere"
                for other in batch.chunks:
                    assert other is chunk or not written & set(other.blocks)

    def teardown(self) -> None:
        for _ in range(2000):
            while self.batches:
                self.end_step(False, 7)
            for id in list(self.to_fill):
                self.steps.scheduler.filled(id, self.to_fill.pop(id).tokens)
            for id in self.unreleased():
                self.lent.pop(id, None)
                self.steps.scheduler.release(id)
            self.plan()
            if not self.batches and not self.steps.scheduler.has_work and not self.to_fill:
                break
        self.steps.scheduler.validate(idle=True)
        for id, shadow in self.all.items():
            assert (id in self.steps.finished) != (id in self.steps.held), "not ended exactly once"
            end = self.steps.finished.get(id)
            if end is not None and end.finish is FinishReason.LENGTH:
                assert end.completion_tokens == min(
                    shadow.new.sampling.max_tokens, 40 - len(shadow.new.prompt)
                )
                elsewhere = len(shadow.new.generated) + shadow.late
                assert self.steps.drawn[id] == end.completion_tokens - elsewhere
            if end is not None and end.finish is FinishReason.CANCELLED:
                assert shadow.cancelled


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = hypothesis_settings(max_examples=80, stateful_step_count=40, deadline=None)


# Two steps in flight.


def starts(plan: Plan) -> list[tuple[int, tuple[int, ...], bool]]:
    return [(chunk.start, chunk.tokens, chunk.carried) for chunk in plan.batch.chunks]


def test_the_next_step_is_planned_before_the_tokens_of_this_one_are_known() -> None:
    steps = make()
    steps.scheduler.add(new("a", 40, 4))
    first, second = steps.plan(), steps.plan()
    assert [lengths(first), lengths(second)] == [[32], [8]], "a prompt goes on behind its own part"
    assert [chunk.draw for chunk in second.batch.chunks] == [True]
    steps.answer(first.batch)
    third = steps.plan()
    assert starts(third) == [(40, (0,), True)]
    steps.answer(second.batch)
    assert steps.drawn["a"] == 1
    fourth = steps.plan()
    assert starts(fourth) == [(41, (0,), True)]
    steps.answer(third.batch)
    assert steps.drawn["a"] == 2
    # What is known again is told again.
    steps.answer(fourth.batch)
    assert starts(steps.plan()) == [(42, (7,), False)]
    assert not steps.plan().batch.chunks, "the last one of four is being drawn"


@pytest.mark.parametrize("hold", [False, True])
def test_nothing_is_planned_behind_a_last_token(hold: bool) -> None:
    steps = make(max_tokens=20)
    steps.scheduler.add(new("a", 4, 5 if hold else 1, hold=hold))
    steps.scheduler.add(new("longest", 19, 5))
    steps.scheduler.add(new("b", 2, 5))
    batches = [steps.plan().batch]
    while len(batches) < 4:
        batches.append(steps.plan().batch)
        steps.answer(batches[-2])
    assert {chunk.start for chunk in batches[-1].chunks if chunk.carried} == {4}, "of b alone"
    assert steps.scheduler.counters.discarded_tokens == 0


def test_of_a_sequence_that_has_stopped_the_step_behind_brings_nothing() -> None:
    steps = make(blocks=8)
    steps.scheduler.add(new("a", 7, 20, stop=(7,), min_tokens=1))
    first, second = steps.plan(), steps.plan()
    steps.answer(first.batch)
    third = steps.plan()
    assert starts(third) == [(8, (0,), True)]
    steps.answer(second.batch)
    assert steps.finished["a"] == Finished("a", FinishReason.STOP, 7, 2, 0)
    cached = steps.scheduler.pool.cached()
    assert len(cached) == 2
    assert steps.scheduler.pool.available == 5, "what the last step may write to is nobody's yet"
    # The same id: it has had its last word.
    steps.scheduler.add(new("a", tuple(range(24)), 1, fill=True))
    assert not steps.scheduler.take_reservations()
    steps.answer(third.batch)
    assert steps.drawn["a"] == 2
    assert steps.scheduler.pool.cached() == cached
    assert steps.scheduler.counters.discarded_tokens == 1
    assert steps.scheduler.counters.computed_tokens == 8
    steps.plan()
    assert len(steps.reservations["a"].blocks) == 6


def test_a_cancelled_one_ends_with_the_first_of_two_steps() -> None:
    steps = make(blocks=8)
    for id in "ab":
        steps.scheduler.add(new(id, 5, 9))
    first, second = steps.plan(), steps.plan()
    assert steps.scheduler.cancel("a")
    steps.answer(first.batch)
    assert steps.finished["a"].finish is FinishReason.CANCELLED
    assert steps.scheduler.pool.available == 4, "the second may write to its blocks"
    steps.answer(second.batch)
    assert steps.drawn == {"b": 2}
    steps.until_idle()
    assert steps.drawn == {"b": 9}


def test_a_failed_step_costs_those_in_it_the_step_behind_too_and_no_others() -> None:
    steps = make()
    for id in "ab":
        steps.scheduler.add(new(id, 3))
    first = steps.plan()
    steps.scheduler.add(new("c", 3))
    second = steps.plan()
    assert len(first.batch.chunks) == 2
    assert len(second.batch.chunks) == 3
    steps.take(steps.scheduler.fail(Unavailable("device lost")))
    assert {end.id: end.finish for end in steps.finished.values()} == dict.fromkeys("ab", FinishReason.FAILED)
    steps.answer(second.batch)
    assert steps.drawn == {"c": 1}
    steps.until_idle()
    assert steps.finished["c"].finish is FinishReason.LENGTH


def test_nobody_gives_way_in_flight_and_who_lacks_a_block_waits_for_the_step_to_end() -> None:
    steps = make(blocks=5)
    steps.scheduler.add(new("a", 7, 9))
    steps.scheduler.add(new("b", 7, 9))
    first, second = steps.plan(), steps.plan()
    assert starts(second) == [(7, (0,), True)] * 2
    steps.answer(first.batch)
    assert not steps.plan().batch.chunks, "both need a block, and there is one"
    assert steps.scheduler.counters.preemptions == 0
    steps.answer(second.batch)
    assert len(steps.plan().batch.chunks) == 1
    assert steps.scheduler.counters.preemptions == 1


def test_a_block_that_the_cache_has_twice_stays_until_the_step_that_reads_it_has_ended() -> None:
    steps = make(blocks=8)
    prompt = tuple(range(4))
    steps.scheduler.add(new("a", prompt, 9))
    steps.scheduler.add(new("b", prompt, 9))
    first, second = steps.plan(), steps.plan()
    own = [chunk.blocks[0] for chunk in second.batch.chunks]
    assert len(set(own)) == 2, "computed twice at once"
    steps.answer(first.batch)
    assert steps.scheduler.pool.counts.duplicates == 1
    assert steps.scheduler.pool.available == 8 - 4
    steps.answer(second.batch)
    assert steps.scheduler.pool.available == 8 - 3
    assert len({chunk.blocks[0] for chunk in steps.plan().batch.chunks}) == 1


def test_what_was_lent_is_released_with_the_step_that_writes_behind_it() -> None:
    steps = make(blocks=24)
    steps.scheduler.add(new("p", 90, 5, hold=True, lend=True))
    first, second = steps.plan(), steps.plan()
    steps.answer(first.batch)
    assert steps.ready["p"]
    steps.scheduler.cancel("p")
    third = steps.plan()
    assert not third.batch.chunks
    steps.answer(second.batch)
    steps.scheduler.release("p")
    steps.until_idle()
    steps.scheduler.add(new("q", 90, 5, hold=True, lend=True))
    first, second = steps.plan(), steps.plan()
    steps.answer(first.batch)
    third = steps.plan()
    steps.scheduler.cancel("q")
    steps.answer(second.batch)
    steps.scheduler.release("q")
    steps.scheduler.validate()
    assert steps.scheduler.pool.available == 24 - 23, "the third step may still write"
    steps.answer(third.batch)
    steps.until_idle()


def test_equal_prompts_at_once_are_computed_once_with_two_steps_in_flight_too() -> None:
    steps = make(short_prompt_share=0.25)
    for id in "ab":
        steps.scheduler.add(new(id, tuple(range(100)), 2))
    assert 2 in steps.ahead()
    assert steps.scheduler.counters.computed_tokens < 100 + 2 * 32
    assert len(steps.finished) == 2


@pytest.mark.parametrize("kind", ["penalised", "constrained"])
def test_whose_next_draw_needs_the_last_token_keeps_all_at_one_step_at_a_time(kind: str) -> None:
    steps = make()
    plain = new("plain", (1, 2), 9)
    if kind == "penalised":
        needs = NewSequence("needs", (3, 4), Sampling(3, presence_penalty=0.5), KEYS)
    else:
        needs = msgspec.structs.replace(new("needs", (3, 4), 3), matcher=Anything())
    steps.scheduler.add(needs)
    steps.scheduler.add(plain)
    # Its last token is waited for by nobody, and behind the last one of all there is nothing.
    assert steps.ahead() == [1, 1, 2, 2, 2, 2, 2, 2, 1]


class Anything:
    """A constraint that allows all there is."""

    vocabulary = 64
    end_tokens = ()
    finished = False

    def fill(self, mask: object, row: int) -> None:
        raise AssertionError("nobody draws here")

    def accept(self, token: int) -> bool:
        return True


def chain(tokens: tuple[int, ...], keys: HashKeys = KEYS) -> list[BlockHash]:
    return block_hashes(tokens, keys)


def lender(blocks: int = 16, tokens: int = 24, **overrides: object) -> tuple[Steps, list[BlockHash]]:
    """With a sequence of so many tokens in its cache, and all of it free."""
    steps = make(blocks, **overrides)
    prompt = tuple(range(tokens))
    steps.scheduler.add(new("first", prompt, 1))
    steps.until_idle()
    return steps, chain(prompt)


def test_cached_blocks_are_lent_by_name_and_stay_until_taken_back() -> None:
    steps, names = lender(lend_share=0.5)
    blocks = steps.scheduler.lend("loan", names, 2)
    assert len(blocks) == 4, "six are cached, two the borrower has"
    assert steps.scheduler.pool.available == 10, "those two are kept as well: a chain has no holes"
    assert steps.scheduler.loans == 1
    with pytest.raises(ValueError, match="is a loan already"):
        steps.scheduler.lend("loan", names, 0)
    # Whoever needs the pool gets all the rest, and what is lent stays what it is.
    steps.scheduler.add(new("large", 36, 1))
    while steps.scheduler.has_work:
        steps.step()
    assert steps.scheduler.lend("same", names, 2) == blocks
    assert steps.scheduler.take_back("loan")
    assert not steps.scheduler.take_back("loan")
    assert steps.scheduler.pool.available == 10
    assert steps.scheduler.take_back("same")
    steps.scheduler.validate(idle=True)


@pytest.mark.parametrize(
    "asked",
    [
        chain(tuple(range(1, 25))),
        chain(tuple(range(24)), msgspec.structs.replace(KEYS, salt="another tenant")),
        chain(tuple(range(24)))[1:],
        [],
    ],
    ids=["other tokens", "other tenant", "not from the first on", "nothing"],
)
def test_nothing_is_lent_that_is_not_cached_by_that_name(asked: list[BlockHash]) -> None:
    steps, _ = lender()
    assert steps.scheduler.lend("loan", asked, 0) == ()
    assert steps.scheduler.lend("loan", asked, 7) == ()
    assert not steps.scheduler.loans


def test_names_in_another_order_or_with_holes_lend_the_part_that_is_a_chain() -> None:
    steps, names = lender(lend_share=0.9)
    for loan, asked in enumerate(([*names[:2], *names[3:]], [*names[:2], names[1]], [*names[:2], b"x" * 32])):
        assert len(steps.scheduler.lend(str(loan), [BlockHash(name) for name in asked], 0)) == 2
    steps.scheduler.validate()
    for loan in range(3):
        steps.scheduler.take_back(str(loan))
    steps.scheduler.validate(idle=True)


def test_loans_never_pin_more_than_their_share() -> None:
    steps, names = lender(lend_share=0.25)  # 4 of 16 blocks.
    assert len(steps.scheduler.lend("a", names, 0)) == 4
    assert len(steps.scheduler.lend("b", names, 1)) == 3, "the same blocks once more cost nothing"
    assert steps.scheduler.lend("c", names, 4) == (), "all that could be lent the borrower has"
    other = tuple(range(100, 108))
    steps.scheduler.add(new("other", other, 1))
    while steps.scheduler.has_work:
        steps.step()
    assert steps.scheduler.lend("d", chain(other), 0) == ()
    assert steps.scheduler.pool.available == 12
    for loan in "ab":
        steps.scheduler.take_back(loan)
    assert len(steps.scheduler.lend("d", chain(other), 0)) == 2
    steps.scheduler.take_back("d")
    steps.scheduler.validate(idle=True)
    assert lender(lend_share=0.0)[0].scheduler.lend("e", names, 0) == ()


def test_who_waits_for_blocks_that_are_lent_goes_on_when_they_are_back() -> None:
    steps, names = lender(lend_share=0.5)
    steps.scheduler.lend("loan", names, 0)
    assert not steps.scheduler.has_work
    steps.scheduler.add(new("whole", 60, 1))
    assert not steps.step().batch.chunks, "it needs 15 blocks of 16, and 6 are lent"
    assert steps.scheduler.others_have_blocks, "nobody is to blame that no step ends"
    steps.scheduler.take_back("loan")
    steps.until_idle()
    assert "whole" in steps.finished


def test_a_prefill_whose_beginning_is_brought_computes_the_rest_and_is_held() -> None:
    steps = make()
    steps.scheduler.add(new("p", 30, hold=True, fill=True, lend=True))
    steps.step()
    assert steps.reservations["p"].tokens == 29
    steps.scheduler.filled("p", 12)
    plan = steps.step()
    assert [(c.start, len(c.tokens), c.draw) for c in plan.batch.chunks] == [(12, 18, True)]
    assert steps.held["p"].tokens == 30
    assert steps.held["p"].cached_tokens == 12
    assert steps.scheduler.counters.filled_tokens == 12
    steps.scheduler.release("p")
    steps.until_idle()
