"""What the supervisor decides, in plain values."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import BadRequest
from fleet.targets import Desired, format_desired, parse_desired
from fleetctl.reconcile import (
    COUNTED,
    answered,
    back_off_s,
    became,
    decide,
    exited,
    failing,
    settled,
    started,
    victims,
)
from fleetctl.words import (
    SERVERS,
    WORKERS,
    Child,
    Closing,
    Forget,
    Kill,
    Kind,
    Phase,
    Policy,
    Start,
    Stop,
)

POLICY = Policy()


def child(name: str, phase: Phase = Phase.READY, since: float = 0.0, **more: object) -> Child:
    kind = Kind(name.partition("-")[0])
    pid = None if phase is Phase.CRASHED else 1000 + len(name)
    return replace(Child(name, kind, phase, since, pid), **more)  # type: ignore[arg-type]


BASE = [child("etcd"), child("nats"), child("router")]


def acts(desired: Desired, children: list[Child], now: float = 100.0, closing: Closing = Closing.NO) -> list:
    return list(decide(desired, children, now, POLICY, closing).actions)


def test_servers_start_before_those_that_need_them() -> None:
    desired = Desired(1, 1)
    first = acts(desired, [])
    assert [action.kind for action in first] == [Kind.ETCD, Kind.NATS]
    half = [child("etcd"), child("nats", Phase.STARTING, since=100.0)]
    assert acts(desired, half) == []
    both = acts(desired, [child("etcd"), child("nats")])
    assert [action.kind for action in both] == [Kind.ROUTER, Kind.PREFILL, Kind.DECODE]
    assert both[1].why == "0 prefill, 1 wanted"


def test_nothing_to_do_where_all_is_as_wanted() -> None:
    children = [*BASE, child("prefill-a"), child("decode-a")]
    decision = decide(Desired(1, 1), children, 100.0, POLICY)
    assert decision.actions == ()
    assert decision.wake_at is None
    assert settled(Desired(1, 1), children)
    assert not settled(Desired(1, 2), children)


def test_scale_down_reaches_exactly_the_least_loaded() -> None:
    busy, calm, idle = child("decode-a", load=9), child("decode-b", load=2), child("decode-c", load=0)
    actions = acts(Desired(1, 2), [*BASE, child("prefill-a", load=0), busy, calm, idle])
    assert actions == [Stop("decode-c", "3 decode, 2 wanted; this one is the least loaded, 0 requests")]
    assert [stop.name for stop in acts(Desired(1, 1), [*BASE, child("prefill-a"), busy, calm, idle])] == [
        "decode-c",
        "decode-b",
    ]


def test_where_others_tell_their_load_one_that_does_not_is_new_or_frozen_and_goes_first() -> None:
    old, young = child("decode-a", since=1.0), child("decode-b", since=50.0)
    known = child("decode-c", since=2.0, load=40)
    assert [one for one, _ in victims([old, young, known], 3)] == [young, old, known]
    (chosen, why) = victims([old, young], 1)[0]
    assert chosen is young
    assert "youngest" in why


def test_those_that_serve_nobody_go_first() -> None:
    crashed = child("decode-a", Phase.CRASHED, retry_at=500.0)
    starting = child("decode-b", Phase.STARTING, since=99.0)
    ready = child("decode-c", load=0)
    actions = acts(Desired(0, 1), [*BASE, ready, starting, crashed])
    assert [type(action) for action in actions] == [Forget, Stop]
    assert {action.name for action in actions} == {"decode-a", "decode-b"}


def test_a_frozen_one_goes_before_those_that_serve() -> None:
    frozen = child("decode-a", silent_since=98.0)
    busy, unasked = child("decode-b", load=4), child("decode-c")
    assert acts(Desired(0, 2), [*BASE, busy, unasked, frozen]) == [
        Stop("decode-a", "3 decode, 2 wanted; this one shows no sign of life")
    ]
    starting, crashed = child("decode-d", Phase.STARTING), child("decode-e", Phase.CRASHED)
    order = [one.name for one, _ in victims([starting, busy, frozen, crashed, unasked], 5)]
    assert order == ["decode-e", "decode-a", "decode-d", "decode-c", "decode-b"]


def test_pools_are_decided_apart() -> None:
    children = [*BASE, child("prefill-a", load=0), child("prefill-b", load=5), child("decode-a")]
    actions = acts(Desired(1, 3), children)
    assert [action.name for action in actions if isinstance(action, Stop)] == ["prefill-a"]
    assert [action.kind for action in actions if isinstance(action, Start)] == [Kind.DECODE, Kind.DECODE]


def test_a_worker_drained_by_an_operator_is_replaced_while_it_leaves() -> None:
    leaving = became(child("decode-a"), Phase.DRAINING, 90.0)
    (action,) = acts(Desired(0, 1), [*BASE, leaving])
    assert action == Start(Kind.DECODE, None, "0 decode, 1 leaving, 1 wanted")
    # It takes its own time, by the operator's limit, and its slot is done with when it is gone.
    assert acts(Desired(0, 1), [*BASE, leaving, child("decode-b")], now=10_000.0) == []
    assert exited(leaving, 0, 120.0, POLICY, 0.0)[0] is None


def test_one_that_takes_another_role_is_counted_there_at_once() -> None:
    assert Desired(2, 1).turned(Kind.DECODE) == Desired(1, 2)
    assert Desired(1, 2).turned(Kind.PREFILL) == Desired(2, 1)
    turning = replace(became(child("prefill-b"), Phase.TURNING, 90.0), kind=Kind.DECODE)
    children = [*BASE, child("prefill-a"), turning, child("decode-a")]
    assert acts(Desired(1, 2), children) == []
    assert not settled(Desired(1, 2), children)
    # It may take as long as it needs, while it lives.
    assert decide(Desired(1, 2), children, 10_000.0, POLICY).wake_at is None
    silent = [*BASE, child("prefill-a"), answered(turning, False, None, 100.0), child("decode-a")]
    (kill,) = acts(Desired(1, 2), silent, now=130.0)
    assert kill == Kill("prefill-b", "frozen: shows no sign of life for 30 s")
    # After a crash it starts in the new role, under its name.
    slot, why = exited(turning, -9, 100.0, POLICY, 1.0)
    assert slot is not None
    assert why == "ended, SIGKILL; starts again in 0.5 s"
    (start,) = acts(Desired(1, 2), [*BASE, child("prefill-a"), slot, child("decode-a")], now=101.0)
    assert start == Start(Kind.DECODE, "prefill-b", "again, after 1 failure")
    # Told to leave over it, it leaves.
    assert exited(became(turning, Phase.STOPPING, 95.0), 0, 100.0, POLICY, 0.0)[0] is None


def test_one_that_was_told_to_stop_is_waited_for_and_then_killed() -> None:
    stopping = became(child("decode-a"), Phase.STOPPING, 100.0)
    children = [*BASE, child("decode-b"), stopping]
    early = decide(Desired(0, 1), children, 101.0, POLICY)
    assert early.actions == ()
    assert early.wake_at == 100.0 + POLICY.drain_limit_s
    (kill,) = acts(Desired(0, 1), children, now=100.0 + POLICY.drain_limit_s)
    assert kill == Kill("decode-a", "still running 75 s after SIGTERM")
    killed = [replace(one, killed=one is stopping) for one in children]
    assert acts(Desired(0, 1), killed, now=10_000.0) == []


def test_late_signs_of_life_do_not_bring_back_one_that_stops() -> None:
    stopping = became(child("decode-a"), Phase.STOPPING, 100.0)
    assert became(stopping, Phase.READY, 101.0) is stopping
    assert became(stopping, Phase.DRAINING, 101.0) is stopping


def test_a_crash_is_started_again_under_the_same_name_after_its_back_off() -> None:
    slot, why = exited(child("decode-a", since=0.0), -9, 100.0, POLICY, 1.0)
    assert slot is not None
    assert why == "ended, SIGKILL; starts again in 0.5 s"
    early = decide(Desired(0, 1), [*BASE, slot], 100.1, POLICY)
    assert early.actions == ()
    assert early.wake_at == 100.5
    (start,) = acts(Desired(0, 1), [*BASE, slot], now=100.5)
    assert start == Start(Kind.DECODE, "decode-a", "again, after 1 failure")


def test_the_back_off_grows_is_capped_and_forgotten_after_a_good_run() -> None:
    one, pauses, now = child("decode-a", Phase.STARTING, since=0.0), [], 0.0
    for _ in range(12):
        slot, _ = exited(became(one, Phase.READY, now), 1, now + 1.0, POLICY, 1.0)
        assert slot is not None
        pauses.append(slot.retry_at - (now + 1.0))
        now = slot.retry_at
        one = started(slot, 7, now)
    assert pauses[:4] == pytest.approx([0.5, 1.0, 2.0, 4.0])
    assert pauses[-1] == pytest.approx(POLICY.back_off_most_s)
    slot, _ = exited(became(one, Phase.READY, now), 1, now + POLICY.well_s, POLICY, 1.0)
    assert slot is not None
    assert slot.failures == 1


@given(st.integers(1, 10_000), st.floats(0.0, 1.0, exclude_max=True))
def test_the_back_off_stays_between_half_and_whole(failures: int, jitter: float) -> None:
    pause = back_off_s(failures, POLICY, jitter)
    assert POLICY.back_off_s / 2 <= pause <= POLICY.back_off_most_s


def test_one_that_never_becomes_ready_is_an_error_after_some_attempts() -> None:
    one = child("prefill-a", Phase.STARTING)
    for attempt in range(POLICY.attempts):
        assert failing(one, POLICY) is None
        slot, why = exited(one, 1, attempt + 0.5, POLICY, 0.0)
        assert slot is not None
        assert "before it was ready, exit code 1" in why
        one = started(slot, 7, attempt + 1.0) if attempt < POLICY.attempts - 1 else slot
    assert failing(one, POLICY) == "prefill-a did not become ready, after 3 failures"
    assert failing(became(started(one, 8, 9.0), Phase.READY, 10.0), POLICY) is None


def test_refused_settings_are_not_tried_again_and_again() -> None:
    slot, _ = exited(child("prefill-a", Phase.STARTING), 2, 1.0, POLICY, 0.0)
    assert slot is not None
    assert failing(slot, POLICY) is not None


def test_one_that_takes_too_long_to_start_is_killed_and_an_error_at_once() -> None:
    slow = child("prefill-a", Phase.STARTING, since=0.0)
    (kill,) = acts(Desired(1, 0), [*BASE, slow], now=POLICY.ready_limit_s)
    assert kill == Kill("prefill-a", "not ready after 180 s")
    slot, _ = exited(replace(slow, killed=True), -9, 181.0, POLICY, 0.0)
    assert slot is not None
    assert failing(slot, POLICY) is not None


def test_one_that_started_slowly_is_not_frozen_when_it_is_ready() -> None:
    slow = answered(started(child("decode-a"), 7, 0.0), alive=False, load=None, now=1.0)
    ready = became(slow, Phase.READY, 40.0)
    assert acts(Desired(1, 1), [*BASE, child("prefill-a"), ready], now=40.0) == []
    silent = answered(ready, alive=False, load=None, now=50.0)
    (kill,) = acts(Desired(1, 1), [*BASE, child("prefill-a"), silent], now=80.0)
    assert isinstance(kill, Kill)


def test_a_frozen_worker_is_killed_and_one_that_was_only_slow_is_not() -> None:
    silent = answered(child("decode-a"), alive=False, load=None, now=10.0)
    still = answered(silent, alive=False, load=None, now=30.0)
    assert still.silent_since == 10.0
    assert acts(Desired(0, 1), [*BASE, still], now=39.0) == []
    (kill,) = acts(Desired(0, 1), [*BASE, still], now=40.0)
    assert kill == Kill("decode-a", "frozen: shows no sign of life for 30 s")
    back = answered(still, alive=True, load=3, now=39.0)
    assert acts(Desired(0, 1), [*BASE, back], now=400.0) == []


def test_the_fleet_goes_down_in_order() -> None:
    children = [*BASE, child("prefill-a"), child("decode-a"), child("decode-b", Phase.CRASHED)]
    order: list[set[str]] = []
    while children:
        actions = acts(Desired(1, 2), children, closing=Closing.ORDERLY)
        assert not any(isinstance(action, Start) for action in actions)
        stopped = {action.name for action in actions if isinstance(action, Stop)}
        order.append(stopped)
        gone = {action.name for action in actions}
        children = [one for one in children if one.name not in gone]
    assert order == [{"router"}, {"prefill-a", "decode-a"}, {"nats"}, {"etcd"}]


def test_the_next_in_order_waits_for_the_last_of_the_one_before() -> None:
    children = [*BASE, child("prefill-a"), child("decode-a")]
    children[2] = became(children[2], Phase.STOPPING, 100.0)
    assert acts(Desired(1, 1), children, closing=Closing.ORDERLY) == []
    hurried = acts(Desired(1, 1), children, now=100.0, closing=Closing.HURRIED)
    assert {action.name for action in hurried} == {"etcd", "nats", "prefill-a", "decode-a"}
    late = acts(Desired(1, 1), children, now=100.0 + POLICY.hurry_limit_s, closing=Closing.HURRIED)
    assert Kill("router", "still running 3 s after SIGTERM") in late


def test_a_crash_while_going_down_is_not_started_again() -> None:
    assert exited(child("nats"), 1, 5.0, POLICY, 0.0, Closing.ORDERLY)[0] is None


def test_desired_counts_survive_the_way_to_etcd() -> None:
    assert parse_desired(format_desired(Desired(2, 3))) == Desired(2, 3)


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (b"", "form"),
        (b"[1, 2]", "form"),
        (b'{"prefill": 1}', "decode"),
        (b'{"prefill": 1, "decode": -1}', "decode=-1"),
        (b'{"prefill": 1, "decode": 100000}', "decode=100000"),
        (b'{"prefill": 1, "decode": 1.5}', "form"),
        (b'{"prefill": 1, "decode": 1, "encode": 1}', "encode"),
    ],
)
def test_bad_counts_say_what_is_wrong(data: bytes, names: str) -> None:
    with pytest.raises(BadRequest, match=names):
        parse_desired(data)


PHASES = st.sampled_from(list(Phase))


@st.composite
def fleets(draw: st.DrawFn) -> list[Child]:
    children = []
    for kind in Kind:
        for index in range(draw(st.integers(0, 4 if kind in WORKERS else 1))):
            name = f"{kind}-{index}" if kind in WORKERS else str(kind)
            load = draw(st.none() | st.integers(0, 9))
            since = draw(st.floats(-300.0, 100.0))
            retry = draw(st.floats(90.0, 110.0))
            children.append(child(name, draw(PHASES), since, load=load, retry_at=retry))
    return children


@given(fleets(), st.integers(0, 4), st.integers(0, 4))
def test_whatever_the_state_each_child_is_told_one_thing_and_counts_come_right(
    children: list[Child], prefill: int, decode: int
) -> None:
    desired = Desired(prefill, decode)
    actions = acts(desired, children)
    named = [action.name for action in actions if not isinstance(action, Kill) and action.name is not None]
    assert len(named) == len(set(named))
    ready = {one.kind for one in children if one.phase is Phase.READY}
    for kind in WORKERS:
        have = sum(one.kind is kind and one.phase in COUNTED for one in children)
        mine = {one.name for one in children if one.kind is kind}
        let_go = sum(isinstance(action, Stop | Forget) and action.name in mine for action in actions)
        added = sum(
            isinstance(action, Start) and action.kind is kind and action.name is None for action in actions
        )
        assert let_go == max(0, have - desired.of(kind))
        if set(SERVERS) <= ready:
            assert added == max(0, desired.of(kind) - have)
        else:
            assert added == 0
