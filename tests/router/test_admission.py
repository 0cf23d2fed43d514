"""Admission: room, order, shares, refusals; and that a higher load never lets in what a lower one refused."""

from __future__ import annotations

import heapq
import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scripted_worker import request

from fleet.ids import RequestId
from fleet.objectives import Objectives
from router.admission import Act, Admission, Decision, _Entry, _Lane
from router.forecast import Forecast, Ratio
from router.run import Terms
from router.settings import AdmissionMode, AdmissionSettings, FlowSettings

ROOM = Forecast(
    ahead_s=0.0, work_s=0.1, tpot_s=0.01, sequences=0, tokens=1000, rate=10_000.0, elsewhere=False
)
FULL = replace(ROOM, ahead_s=0.75)
HIGH = Objectives(ttft_ms=1000, tpot_ms=50, priority=1)
LOW = Objectives(ttft_ms=60_000, priority=-1, sheddable=True)


def terms(objectives: Objectives = HIGH, tenant: str = "a", weight: float = 1.0) -> Terms:
    return Terms("low" if objectives.sheddable else "high", objectives, tenant, weight)


class Desk:
    """Admission with a clock, and requests by number."""

    def __init__(self, **settings: object) -> None:
        self.admission = Admission(FlowSettings(), AdmissionSettings(**settings))  # type: ignore[arg-type]
        self.now = 0.0
        self.count = 0
        self.refused: list[str] = []

    def arrive(
        self, of: Terms | None = None, forecast: Forecast = FULL, *, id: str = "", tokens: int = 8
    ) -> Decision:
        self.count += 1
        made = request(id or f"r{self.count}", max_tokens=tokens)
        self.admission.enter(made, self.now)
        decision, refused = self.admission.arrive(made, of or terms(), forecast, self.now, self.now)
        if refused is not None:
            self.refused.append(refused[0])
        if decision.act is Act.REFUSE:
            self.admission.leave(made.id)
        return decision

    def next(self, forecast: Forecast | None = ROOM) -> str | None:
        """Who goes now; after those who waited in vain were refused."""
        self.refused += [id for id, _ in self.admission.expired(self.now)]
        head = self.admission.head("m", self.now)
        if head is None or self.admission.offer(head, forecast, self.now).act is not Act.ADMIT:
            return None
        return head

    def drain(self) -> list[str]:
        order = []
        while (head := self.next()) is not None:
            order.append(head)
        return order


def test_with_room_a_request_goes_at_once_and_without_it_waits() -> None:
    desk = Desk()
    admitted = desk.arrive(forecast=ROOM)
    assert admitted.act is Act.ADMIT
    assert admitted.why == "room: 0 ms of prompts ahead, 0 sequences"
    assert admitted.ttft_s == pytest.approx(0.1)
    assert admitted.tpot_s == pytest.approx(0.01)
    queued = desk.arrive(forecast=FULL)
    assert queued.act is Act.QUEUE
    assert queued.why == "0.75 s of prompts are queued at its worker, more than 0.25 s"
    # Room for one more does not let it pass those who wait.
    assert desk.arrive(forecast=ROOM).act is Act.QUEUE
    assert desk.next(FULL) is None
    assert desk.drain() == ["r2", "r3"]


@given(
    st.floats(0, 0.25), st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 3.99), st.integers(1, 10**6),
    st.sampled_from([HIGH, LOW, Objectives()]), st.booleans(),
)  # fmt: skip
def test_with_free_capacity_no_request_waits_or_is_refused_whatever_is_promised(
    ahead_s: float, work_s: float, tpot_s: float, sequences: float, tokens: int, of: Objectives, local: bool
) -> None:
    desk = Desk()
    free = Forecast(ahead_s, work_s, tpot_s, sequences, tokens, 1000.0, local)
    assert desk.arrive(terms(of), free).act is Act.ADMIT


def test_a_short_objective_allows_a_short_queue_at_the_worker_only() -> None:
    short = terms(Objectives(ttft_ms=200))
    assert Desk().arrive(short, replace(ROOM, ahead_s=0.06)).act is Act.QUEUE
    assert Desk().arrive(terms(), replace(ROOM, ahead_s=0.06)).act is Act.ADMIT


def test_a_prompt_that_needs_no_prefill_worker_does_not_wait_for_one() -> None:
    desk = Desk()
    desk.arrive(forecast=FULL)
    assert desk.arrive(forecast=replace(ROOM, elsewhere=True)).act is Act.ADMIT


def test_the_order_is_priority_then_who_must_start_first_and_the_late_come_last() -> None:
    desk = Desk()
    desk.arrive(terms(replace(HIGH, priority=0, ttft_ms=5000)), id="low")
    desk.arrive(terms(replace(HIGH, ttft_ms=3000)), id="patient")
    desk.arrive(terms(replace(HIGH, ttft_ms=2000)), id="urgent")
    desk.arrive(terms(replace(HIGH, ttft_ms=1000)), id="late")
    desk.now = 0.8
    assert desk.drain() == ["urgent", "patient", "late", "low"]
    assert desk.refused == []


@given(st.lists(st.integers(100, 8000), min_size=2, max_size=40))
def test_where_not_all_can_be_in_time_those_that_take_most_step_back(sizes: list[int]) -> None:
    """All came at once and were promised the same: as many are in time as of the cheapest could be."""
    desk = Desk()
    for number, tokens in enumerate(sizes):
        desk.arrive(forecast=replace(FULL, tokens=tokens), id=str(number))
    rate, latest = ROOM.rate, 0.9 * 1.0 - 0.25 - FULL.work_s
    costs, could, at = [size + 8 for size in sizes], 0, 0.0
    for cost in sorted(costs):
        could += at <= latest
        at += cost / rate
    served = in_time = 0
    while (head := desk.next()) is not None:
        served += 1
        in_time += desk.now <= latest
        desk.now += costs[int(head)] / rate
    assert served == len(sizes)
    assert in_time == could


def test_where_all_can_be_in_time_nobody_steps_back() -> None:
    desk = Desk()
    desk.arrive(terms(replace(HIGH, ttft_ms=2000)), replace(FULL, tokens=4000), id="long")
    for number in range(4):
        desk.arrive(terms(replace(HIGH, ttft_ms=3000)), id=f"short{number}")
    assert desk.drain()[0] == "long"


def test_other_tenants_take_no_more_of_the_time_than_they_wait_for() -> None:
    """Of each there is one short request: they do not make it one of twenty-one for as long as this tenant
    has requests, and all of its own can be in time."""
    desk = Desk()
    for number in range(20):
        desk.arrive(
            terms(replace(HIGH, ttft_ms=9000), f"t{number}"), replace(FULL, tokens=100), id=f"t{number}"
        )
    desk.arrive(terms(replace(HIGH, ttft_ms=2000)), replace(FULL, tokens=4000), id="long")
    for number in range(4):
        desk.arrive(terms(replace(HIGH, ttft_ms=3000)), id=f"short{number}")
    order = [id for id in desk.drain() if not id.startswith("t")]
    assert order == ["long", "short0", "short1", "short2", "short3"]


@pytest.mark.parametrize("newcomer", ["a", "b"])
def test_who_stepped_back_returns_when_what_was_before_it_has_gone_away(newcomer: str) -> None:
    """Behind a burst of higher priority, which then goes away, whoever comes since: its tenant or another."""
    desk = Desk()
    for number in range(20):
        desk.arrive(terms(replace(HIGH, ttft_ms=60_000)), replace(FULL, tokens=4000), id=f"burst{number}")
    low = replace(HIGH, priority=0)
    desk.arrive(terms(replace(low, ttft_ms=3000)), replace(FULL, tokens=4000), id="old")
    desk.next(FULL)
    for number in range(20):
        desk.admission.leave(RequestId(f"burst{number}"))
    for number in range(10):
        desk.arrive(terms(replace(low, ttft_ms=4000 + number), newcomer), id=f"new{number}")
    assert desk.drain()[0] == "old"


def test_those_that_become_late_one_by_one_do_not_have_all_looked_at_each_time() -> None:
    desk, count = Desk(), 1000
    for number in range(count):
        desk.arrive(terms(replace(HIGH, ttft_ms=1000 + 2 * number)), replace(FULL, tokens=10, rate=1e9))
    moved = 0

    def watch(frame: object, event: str, function: object) -> None:
        nonlocal moved
        moved += event == "c_call" and function is heapq.heappush

    sys.setprofile(watch)
    try:
        for _ in range(2 * count):
            desk.now += 0.001
            desk.admission.expired(desk.now)
    finally:
        sys.setprofile(None)
    assert count <= moved <= 100 * count


@pytest.mark.parametrize("tenants", [1, 16])
@pytest.mark.parametrize("happens", ["one comes", "one goes", "one leaves", "time passes"])
def test_of_two_thousand_who_wait_few_are_looked_at_each_time(happens: str, tenants: int) -> None:
    """Half of them cannot be in time. Counted in calls: all of them once are more than four thousand."""
    desk, calls, events = Desk(max_queued=4096), 0, 400

    def comes() -> None:
        of = terms(replace(HIGH, ttft_ms=20_000 + 37 * desk.count % 40_000), f"t{desk.count % tenants}")
        desk.arrive(of, replace(FULL, tokens=100 + 53 * desk.count % 400))

    def watch(frame: object, event: str, function: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for _ in range(2048):
        comes()
    desk.next(FULL)
    sys.setprofile(watch)
    try:
        for number in range(events):
            match happens:
                case "one comes":
                    comes()
                case "one leaves":
                    desk.admission.leave(RequestId(f"r{5 * number + 1}"))
                case "time passes":
                    desk.now += 0.01
            desk.next(ROOM if happens == "one goes" else FULL)
    finally:
        sys.setprofile(None)
    assert desk.refused == []
    assert desk.admission.queued >= 2048 - events
    assert calls <= 600 * events


def test_tenants_get_their_shares_whoever_asks_for_more() -> None:
    desk = Desk()
    for _ in range(90):
        desk.arrive(terms(tenant="greedy"), id=f"greedy{desk.count}")
    for _ in range(30):
        desk.arrive(terms(tenant="modest"), id=f"modest{desk.count}")
    first = Counter(name[:6] for name in desk.drain()[:60])
    assert first == {"greedy": 30, "modest": 30}


def test_shares_are_of_tokens_and_by_weight() -> None:
    desk = Desk()
    for _ in range(60):
        desk.arrive(terms(tenant="heavy", weight=3.0), replace(FULL, tokens=2000), id=f"heavy{desk.count}")
        desk.arrive(terms(tenant="light"), replace(FULL, tokens=1000), id=f"light{desk.count}")
    first = Counter(name[:5] for name in desk.drain()[:50])
    assert first["heavy"] == pytest.approx(30, abs=1), (
        "thrice the tokens are one and a half times the prompts"
    )


def test_idle_time_saves_up_no_credit() -> None:
    desk = Desk()
    for _ in range(100):
        desk.arrive(terms(tenant="busy"), ROOM)
    for _ in range(10):
        desk.arrive(terms(tenant="busy"), id=f"busy{desk.count}")
        desk.arrive(terms(tenant="new"), id=f"new{desk.count}")
    assert Counter(name[:3] for name in desk.drain()[:10]) == {"bus": 5, "new": 5}


def test_a_sheddable_request_that_would_be_late_is_refused_with_when_to_come_back() -> None:
    desk = Desk()
    for _ in range(20):
        desk.arrive(terms(), replace(FULL, tokens=10_000))
    soon = replace(LOW, ttft_ms=5000)
    decision = desk.arrive(terms(soon))
    assert decision.act is Act.REFUSE
    assert "it would be late (low is sheddable): 200160 tokens are ahead" in decision.why
    assert decision.retry_after_s == pytest.approx(20.0, rel=0.05), "200,160 tokens at 10,000 a second"
    assert decision.error().retry_after_s == decision.retry_after_s
    assert desk.arrive(terms(LOW)).act is Act.QUEUE, "a minute is enough"
    assert desk.arrive(terms(replace(soon, sheddable=False))).act is Act.QUEUE


def test_those_who_become_late_while_they_wait() -> None:
    desk = Desk()
    desk.arrive(terms(replace(LOW, ttft_ms=1000)), id="sheddable")
    desk.arrive(terms(replace(HIGH, ttft_ms=1000)), id="late")
    desk.now = 2.0
    assert desk.drain() == ["late"]
    assert desk.refused == ["sheddable"]


def test_nobody_waits_longer_than_the_limit() -> None:
    desk = Desk(max_wait_s=5.0)
    desk.arrive(terms(replace(HIGH, ttft_ms=None)))
    desk.now = 4.9
    assert desk.admission.expired(desk.now) == []
    desk.now = 5.0
    ((id, decision),) = desk.admission.expired(desk.now)
    assert id == "r1"
    assert decision.why == "it waited for 5 s (setting admission.max_wait_s)"
    assert decision.retry_after_s >= 1


def test_in_a_full_queue_the_late_give_way_then_the_youngest_of_the_lowest() -> None:
    patient = replace(HIGH, ttft_ms=50_000)
    desk = Desk(max_queued=3)
    desk.arrive(terms(replace(HIGH, ttft_ms=700)), id="late")
    desk.arrive(terms(LOW), id="old-batch")
    desk.arrive(terms(LOW), id="new-batch")
    desk.now = 1.0
    desk.admission.expired(desk.now)
    assert desk.arrive(terms(patient), id="a").act is Act.QUEUE
    assert desk.arrive(terms(patient), id="b").act is Act.QUEUE
    assert desk.arrive(terms(patient), id="c").act is Act.QUEUE
    assert desk.refused == ["late", "new-batch", "old-batch"]
    full = desk.arrive(terms(patient), id="d")
    assert (full.act, full.why) == (Act.REFUSE, "3 requests wait here (setting admission.max_queued)")
    assert desk.arrive(terms(LOW), id="e").act is Act.REFUSE
    assert desk.admission.queued == 3


def test_batch_is_not_let_in_where_it_would_break_what_others_were_promised() -> None:
    crowded = replace(ROOM, sequences=20, tpot_s=0.06)
    desk = Desk()
    assert desk.arrive(terms(LOW), crowded).act is Act.ADMIT, "nobody was promised anything"
    desk.arrive(terms(HIGH), ROOM, id="promised")
    held = desk.arrive(terms(LOW), crowded, id="held")
    assert held.why == "with 20 sequences a token would take 60 ms, more than 45 ms"
    desk.admission.leave(RequestId("promised"))
    assert desk.next(crowded) == "held"
    # A lower one's promise binds nobody above it.
    desk.arrive(terms(replace(LOW, tpot_ms=50)), ROOM)
    assert desk.arrive(terms(replace(HIGH, tpot_ms=100)), crowded).act is Act.ADMIT


def test_a_decode_worker_is_given_a_few_sequences_whatever_it_takes() -> None:
    slow = replace(ROOM, tpot_s=9.0)
    assert Desk().arrive(forecast=replace(slow, sequences=3.9)).act is Act.ADMIT
    assert Desk().arrive(forecast=replace(slow, sequences=4)).act is Act.QUEUE


def test_batch_is_never_starved() -> None:
    """A tenth of the tokens goes to what has waited for ten seconds, though high priority never runs out."""
    desk = Desk()
    batch, promised = replace(LOW, ttft_ms=None), replace(HIGH, ttft_ms=None)
    for n in range(3):
        desk.arrive(terms(batch), replace(FULL, tokens=5000), id=f"batch{n}")
    went: list[str] = []
    while sum(name.startswith("batch") for name in went) < 3:
        desk.now += 0.1
        desk.arrive(terms(promised), id=f"high{desk.count}")
        head = desk.next()
        assert head is not None
        went.append(head)
        assert len(went) < 1000
    at = [n for n, name in enumerate(went) if name.startswith("batch")]
    assert [went[n] for n in at] == ["batch0", "batch1", "batch2"]
    assert at[0] == pytest.approx(100 + 5008 / (0.1 * 1008), abs=2)
    assert at[2] - at[1] == pytest.approx(5008 / (0.1 * 1008), abs=2)


def test_an_old_one_regards_no_promise_any_more() -> None:
    crowded = replace(ROOM, sequences=20, tpot_s=0.06)
    desk = Desk(aging_s=1.0, aged_share=0.9)
    desk.arrive(terms(), ROOM)
    desk.arrive(terms(replace(LOW, ttft_ms=None)), crowded, id="batch")
    desk.now = 2.0
    for n in range(2):
        desk.arrive(terms(replace(HIGH, ttft_ms=None)), FULL, id=f"high{n}")
        assert desk.next() == f"high{n}"
    desk.arrive(terms(replace(HIGH, ttft_ms=None)), FULL, id="high")
    assert desk.next(crowded) == "batch"


@given(
    st.floats(0, 100), st.floats(0, 100), st.integers(0, 60), st.integers(0, 60),
    st.integers(1, 5000), st.sampled_from([HIGH, LOW, replace(LOW, ttft_ms=3000), replace(LOW, priority=1)]),
)  # fmt: skip
def test_what_is_refused_at_some_load_is_refused_at_any_higher_one(
    ahead: float, more_ahead: float, queued: int, more_queued: int, tokens: int, of: Objectives
) -> None:
    def outcome(ahead_s: float, waiting: int) -> Act:
        desk = Desk(max_queued=50)
        forecast = replace(FULL, ahead_s=ahead_s, tokens=tokens)
        for _ in range(waiting):
            desk.arrive(terms(replace(HIGH, ttft_ms=100_000)), replace(forecast, ahead_s=1.0))
        return desk.arrive(terms(of, tenant="b"), forecast).act

    less = outcome(ahead, queued)
    more = outcome(ahead + more_ahead, queued + more_queued)
    if less is Act.REFUSE:
        assert more is Act.REFUSE
    if more is Act.ADMIT:
        assert less is Act.ADMIT


@given(st.lists(st.tuples(st.sampled_from("anlx"), st.integers(0, 7)), max_size=60))
def test_whatever_happens_nothing_is_left_over(steps: list[tuple[str, int]]) -> None:
    desk = Desk(max_queued=5, max_wait_s=20.0)
    classes = [HIGH, LOW, replace(LOW, ttft_ms=2000), Objectives()]
    for step, n in steps:
        desk.now += 0.4
        match step:
            case "a":
                desk.arrive(terms(classes[n % 4], tenant="ab"[n % 2]), FULL if n < 6 else ROOM)
            case "n":
                desk.next(ROOM if n else None)
            case "l":
                desk.admission.leave(RequestId(f"r{desk.count - n}"))
            case _:
                desk.next(FULL)
        for id in desk.refused:
            desk.admission.leave(RequestId(id))
        desk.refused.clear()
    desk.drain()
    for n in range(desk.count + 1):
        desk.admission.leave(RequestId(f"r{n}"))
        desk.admission.leave(RequestId(f"r{n}"))
    admission = desk.admission
    assert (len(admission), admission.queued, admission.models()) == (0, 0, ())
    assert admission._entries == {}
    assert not any(admission._promised.values())
    for lane in admission._lanes.values():
        for level in lane.levels.values():
            assert (level.count, level.backlogs, len(level.oldest)) == (0, {}, 0)
            assert level.cost == pytest.approx(0.0)


def test_observing_changes_nothing_and_tells_what_it_would_have_done() -> None:
    desk = Desk(mode=AdmissionMode.OBSERVE)
    assert desk.arrive().act is Act.QUEUE
    assert desk.arrive(terms(replace(LOW, ttft_ms=50))).act is Act.REFUSE
    assert desk.admission.queued == 0
    assert desk.admission.head("m", 0.0) is None


def test_a_head_that_no_worker_can_take_goes_on_to_be_told_so() -> None:
    desk = Desk()
    desk.arrive()
    assert desk.next(None) == "r1"


def test_forecasts_are_corrected_by_what_came_to_pass() -> None:
    desk = Desk()
    for n in range(60):
        made = request(f"x{n}")
        desk.admission.first_token(made, ROOM, 0.2)
        desk.admission.answered(made, terms(), ROOM, 40, 0.02)
    decision = desk.arrive(forecast=ROOM, tokens=100)
    assert decision.ttft_s == pytest.approx(0.2, rel=0.1)
    assert decision.tpot_s == pytest.approx(0.02, rel=0.1)
    assert desk.admission.answer(request(max_tokens=100), terms()) == pytest.approx(40, rel=0.1)


def test_a_ratio_begins_at_one_and_outliers_move_it_little() -> None:
    ratio = Ratio()
    assert (ratio.likely(2.0), ratio.safe(2.0), ratio.error()) == (2.0, 2.0, None)
    ratio.learn(1.0, 1000.0)
    assert ratio.likely(1.0) < 1.2
    for _ in range(100):
        ratio.learn(1.0, 1.5)
    assert ratio.likely(1.0) == pytest.approx(1.5, rel=0.02)
    ratio.learn(1.0, 0.0)
    ratio.learn(1.0, 1000.0)
    assert ratio.likely(1.0) == pytest.approx(1.5, rel=0.05)
    error = ratio.error()
    assert error is not None
    assert error.p50 < 0.1


def test_the_safe_forecast_holds_nine_times_of_ten() -> None:
    ratio = Ratio()
    actual = [1.0 + 0.01 * (n * 37 % 100) for n in range(2000)]
    held = 0
    for n, seconds in enumerate(actual):
        held += n >= 1000 and seconds <= ratio.safe(1.0)
        ratio.learn(1.0, seconds)
    assert held == pytest.approx(900, abs=50)


def test_what_may_still_be_in_time_is_not_given_up() -> None:
    """Late by a safe forecast and not by a likely one: after those who are sure, before the lost ones."""
    desk = Desk()
    for n in range(200):
        desk.admission.first_token(request(f"x{n}"), ROOM, 0.1 * (0.5, 1.0, 2.0)[n % 3])
    # 0.6 s of its own work: likely 0.85 s with what may be queued before it, 1.7 s to be safe.
    long = replace(FULL, work_s=0.6)
    desk.arrive(terms(replace(HIGH, ttft_ms=100)), long, id="lost")
    desk.arrive(terms(replace(HIGH, ttft_ms=1000)), long, id="doubtful")
    desk.arrive(terms(replace(HIGH, ttft_ms=9000)), long, id="sure")
    sheddable = replace(HIGH, ttft_ms=1000, sheddable=True)
    assert desk.arrive(terms(sheddable), replace(long, tokens=1), id="kept").act is Act.REFUSE, (
        "10,000 tokens wait"
    )
    desk.now = 0.05
    assert desk.drain() == ["sure", "doubtful", "lost"]
    desk = Desk()
    for n in range(200):
        desk.admission.first_token(request(f"x{n}"), ROOM, 0.1 * (0.5, 1.0, 2.0)[n % 3])
    desk.arrive(terms(replace(sheddable, ttft_ms=1500)), long, id="kept")
    desk.now = 0.3
    assert desk.drain() == ["kept"]
    assert desk.refused == []


class Queue(RuleBasedStateMachine):
    """Whatever comes, goes, leaves and is learnt: nobody is forgotten, the order is the one that was
    promised, and nobody steps back who need not."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(max_queued=14, max_wait_s=90.0)
        self.queued: dict[str, _Entry] = {}
        self.running: list[str] = []
        self.given: dict[tuple[int, str], float] = {}
        """What each tenant has had of each level, as in start-time fair queueing."""
        self.virtual: dict[int, float] = {}

    @property
    def lane(self) -> _Lane:
        return self.desk.admission._lanes["m"]

    # -- what happens

    @rule(
        asked=st.lists(st.tuples(
            st.sampled_from([
                HIGH, replace(HIGH, ttft_ms=4000), replace(HIGH, ttft_ms=20_000, priority=0), LOW,
                replace(LOW, ttft_ms=5000), replace(LOW, sheddable=False), Objectives(weight=2.0),
            ]),
            st.sampled_from("aab"),
            st.sampled_from([100, 1000, 1001, 6000, 40_000]),
        ), min_size=1, max_size=6),
        rate=st.sampled_from([10_000.0, 10_000.0, 1000.0, 100_000.0]),
        now=st.sampled_from([FULL, FULL, FULL, FULL, ROOM]),
        after_s=st.sampled_from([0.0, 0.1, 0.9, 4.0, 11.0]),
    )  # fmt: skip
    def some_come(
        self, asked: list[tuple[Objectives, str, int]], rate: float, now: Forecast, after_s: float
    ) -> None:
        desk = self.desk
        desk.now += after_s
        self.look()
        for of, tenant, tokens in asked:
            asks = terms(of, tenant, 3.0 if tenant == "b" else 1.0)
            nobody = not desk.admission.queued
            decision = desk.arrive(asks, replace(now, tokens=tokens, rate=rate))
            id = f"r{desk.count}"
            assert (decision.act is Act.ADMIT) == (nobody and now is ROOM)
            if decision.act is Act.ADMIT:
                self.goes(id)
            elif decision.act is Act.QUEUE:
                self.queued[id] = desk.admission._entries[RequestId(id)]
            elif not of.sheddable:
                assert desk.admission.queued == 14, "refused with a place in the queue"
            self.look()
            if id in self.queued:
                self.nobody_steps_back_needlessly(asks)

    @precondition(lambda self: self.queued)
    @rule(turns=st.integers(0, 3), after_s=st.sampled_from([0.0, 0.1, 0.5, 3.0]))
    def there_is_room(self, turns: int, after_s: float) -> None:
        self.desk.now += after_s
        assert self.desk.next(FULL) is None
        self.look()
        for _ in range(turns):
            promised = self.next_ones()
            head = self.desk.next()
            assert (head in promised) if promised else head is None
            if head is not None:
                del self.queued[head]
                self.goes(head)
            self.look()

    @precondition(lambda self: self.queued)
    @rule(which=st.integers(0, 13))
    def one_that_waits_leaves(self, which: int) -> None:
        id = list(self.queued)[which % len(self.queued)]
        del self.queued[id]
        self.desk.admission.leave(RequestId(id))
        self.look()
        self.nobody_steps_back_needlessly()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def one_ends(self, which: int) -> None:
        self.desk.admission.leave(RequestId(self.running.pop(which % len(self.running))))
        self.look()

    @rule(seconds=st.sampled_from([0.02, 0.35, 2.0]))
    def a_first_token_comes(self, seconds: float) -> None:
        self.desk.admission.first_token(request("x"), ROOM, seconds)

    # -- what is promised

    def goes(self, id: str) -> None:
        entry = self.desk.admission._entries[RequestId(id)]
        of, tenant = entry.priority, entry.terms.tenant
        start = self.start(of, tenant)
        self.virtual[of] = start
        self.given[of, tenant] = start + entry.cost / entry.terms.weight / entry.terms.objectives.weight
        self.running.append(id)

    def start(self, of: int, tenant: str) -> float:
        return max(self.virtual.get(of, 0.0), self.given.get((of, tenant), 0.0))

    def look(self) -> None:
        """As the router does after whatever happened."""
        desk = self.desk
        desk.refused += [id for id, _ in desk.admission.expired(desk.now)]
        for id in desk.refused:
            entry = self.queued.pop(id)
            gave_way = len(self.queued) == 14
            assert entry.terms.objectives.sheddable or desk.now - entry.queued_at >= 90 or gave_way
            desk.admission.leave(RequestId(id))
        if desk.refused:
            desk.refused.clear()
            self.look()
            self.nobody_steps_back_needlessly()

    def next_ones(self) -> set[str]:
        """Who may be next: the first one, or who has waited for long behind a higher priority."""
        if not self.queued:
            return set()
        level = self.lane.levels[highest := max(entry.priority for entry in self.queued.values())]
        ranks: list[tuple[tuple[int, float], str]] = []
        for tenant, backlog in level.backlogs.items():
            ways = [
                [(at.latest_start, at.order, at) for *_, at in backlog.timely if at.queued],
                [(at.lost_at, at.order, at) for *_, at in backlog.doubtful if at.queued],
                [(0.0, place, at) for place, at in enumerate(backlog.late.values())],
            ]
            rank, way = next((rank, way) for rank, way in enumerate(ways) if way)
            ranks.append(((rank, self.start(highest, tenant)), min(way)[2].request.id))
        found: set[str] = {id for first, id in ranks if first == min(ranks)[0]}
        lower = [entry for entry in self.queued.values() if entry.priority < highest]
        oldest = min(lower, key=lambda entry: entry.order, default=None)
        if oldest is not None and self.desk.now - oldest.queued_at >= 10:
            found.add(oldest.request.id)
        return found

    @invariant()
    def nobody_is_forgotten(self) -> None:
        admission, now = self.desk.admission, self.desk.now
        assert admission.queued == len(self.queued)
        assert len(admission) == len(self.queued) + len(self.running)
        if not admission._lanes:
            return
        found: set[str] = set()
        assert list(self.lane.fifo.values()) == list(self.queued.values())
        for of, level in self.lane.levels.items():
            here = [at for at in self.queued.values() if at.priority == of]
            assert (level.count, list(level.oldest.values())) == (len(here), here)
            assert level.cost == pytest.approx(sum(at.cost for at in here), abs=1e-6)
            for tenant, backlog in level.backlogs.items():
                mine = [at for at in here if at.terms.tenant == tenant]
                assert backlog.count == len(mine)
                assert backlog.cost == pytest.approx(sum(at.cost for at in mine))
                timely, doubtful = (
                    [at for *_, at in heap if at.queued] for heap in (backlog.timely, backlog.doubtful)
                )
                late = list(backlog.late.values())
                assert sorted(at.order for at in timely + doubtful + late) == [at.order for at in mine]
                assert all(at.latest_start >= now for at in timely)
                assert all(at.lost_at >= now for at in doubtful)
                assert all(at.lost_at < now and not at.terms.objectives.sheddable for at in late)
                found |= {at.request.id for at in mine}
        assert found == set(self.queued)

    def nobody_steps_back_needlessly(self, of: Terms | None = None) -> None:
        """Of those just looked at, as one came or left: who is in time though all others go first."""
        if not 0 < len(self.queued) <= 7:
            return  # Not each time.
        before = 0.0
        for priority, level in self.lane.waiting():
            before += level.cost
            for tenant, backlog in level.backlogs.items():
                if of is None or (priority, tenant) == (of.objectives.priority, of.tenant):
                    for *_, entry in backlog.doubtful:
                        after = self.desk.now + before / self.lane.rate
                        assert not entry.queued or entry.latest_start <= after

    def teardown(self) -> None:
        waited = len(self.queued)
        went = self.desk.drain()
        assert sorted(went) == sorted(self.queued), "with room all go, each once"
        assert len(went) == waited
        for id in (*went, *self.running):
            self.desk.admission.leave(RequestId(id))
        assert (len(self.desk.admission), self.desk.admission._entries) == (0, {})


TestQueue = Queue.TestCase
TestQueue.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
