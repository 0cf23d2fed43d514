"""Whatever is observed: the budget holds, missing data reduces nothing, more load never needs fewer."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.targets import Mode
from planner.decide import State, decide
from planner.record import Line, encode_line, replay
from planner.words import Ages, Asked, ClassSeen, Observation, PlannerSettings, PoolSeen, WorkerSeen

SETTINGS = PlannerSettings(budget=20, settle_s=30.0, turn_settle_s=10.0, scale_to_zero=True, idle_s=30.0)
NOW = Ages(0.0, 0.5, 0.3)
MISSING = st.sampled_from(
    [
        Ages(None, 0.5, 0.3),
        Ages(0.0, None, 0.3),
        Ages(0.0, 0.5, 60.0),
        Ages(99.0, 99.0, 99.0),
        Ages(0.0, 61.0, None),
    ]
)


TRUSTED = st.just(NOW)


@st.composite
def pools(draw: st.DrawFn) -> PoolSeen:
    wanted = draw(st.integers(0, 12))
    # Few of them ready: each is a worker to be drawn.
    ready = draw(st.integers(0, min(4, wanted)))
    turning = draw(st.integers(0, wanted - ready))
    return PoolSeen(wanted, ready, wanted - ready, draw(st.integers(0, 2)), draw(st.floats(0, 900)), turning)


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    arrived = draw(st.integers(0, 200))
    prompt = draw(st.integers(1, 8000))
    ended = draw(st.integers(0, 200))
    missed = draw(st.integers(0, ended))
    waiting = draw(st.integers(0, 50))
    late = draw(st.integers(0, missed))
    classes = {"standard": ClassSeen(2000.0, 50.0, arrived, ended - missed, missed, late, missed - late)}
    return Asked(
        5.0, arrived, arrived * prompt, float(arrived) * prompt * prompt, ended, ended * prompt, 0,
        ended * draw(st.integers(1, 800)), 0, waiting, waiting * prompt, draw(st.integers(0, waiting)),
        waiting + draw(st.integers(0, 90)), classes,
    )  # fmt: skip


@st.composite
def observations(draw: st.DrawFn, ages: st.SearchStrategy[Ages] = TRUSTED) -> Observation:
    prefill, decode = draw(pools()), draw(pools())
    workers = [
        WorkerSeen(f"{role}-{number}", role, 500.0, True, draw(st.integers(0, 80)), draw(st.integers(0, 9)),
                   draw(st.integers(0, 90_000)), draw(st.floats(100, 20_000)), draw(st.floats(0.005, 0.3)),
                   draw(st.floats(1, 100)), 400_000)
        for role, pool in (("prefill", prefill), ("decode", decode))
        for number in range(pool.ready)
    ]  # fmt: skip
    mode = draw(st.sampled_from([Mode.ACT, Mode.ADVISE]))
    budget = draw(st.none() | st.integers(1, 24))
    return Observation(mode, budget, prefill, decode, draw(asked()), draw(ages), tuple(workers))


STORIES = st.lists(observations(TRUSTED | MISSING), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(STORIES)
def test_the_budget_is_never_exceeded_and_counts_are_counts(story: list[Observation]) -> None:
    state = State(SETTINGS)
    for tick, seen in enumerate(story):
        plan = decide(seen, state, 5.0 * tick)
        wanted = seen.prefill.wanted + seen.decode.wanted
        budget = SETTINGS.budget if seen.budget is None else seen.budget
        trusted = seen.ages == NOW
        assert plan.prefill + plan.decode <= (budget if trusted else max(budget, wanted))
        assert min(plan.prefill, plan.decode) >= 0
        assert plan.why
        if plan.turns:
            # One for one, and of those that are only starting some may be given up for it.
            (to,) = set(plan.turns)
            other = "decode" if to == "prefill" else "prefill"
            for role, moved in ((to, len(plan.turns)), (other, -len(plan.turns))):
                pool = seen.pool(role)
                given_up = pool.wanted + moved - plan.of(role)
                assert 0 <= given_up <= pool.starting - pool.turning
                assert pool.wanted + moved >= 0


@settings(max_examples=60, deadline=None)
@given(STORIES, observations(MISSING))
def test_missing_data_reduces_nothing(story: list[Observation], last: Observation) -> None:
    state = State(SETTINGS)
    for tick, seen in enumerate(story):
        decide(seen, state, 5.0 * tick)
    plan = decide(last, state, 5.0 * len(story))
    assert plan.prefill >= last.prefill.wanted
    assert plan.decode >= last.decode.wanted
    assert plan.prefill + plan.decode <= last.prefill.wanted + last.decode.wanted + 2


def grown(one: Asked, times: int) -> Asked:
    """As much as that of the same."""
    return replace(
        one,
        arrived=one.arrived * times,
        prompt_tokens=one.prompt_tokens * times,
        prompt_squares=one.prompt_squares * times,
        waiting=one.waiting * times,
        waiting_tokens=one.waiting_tokens * times,
        running=one.running * times,
    )


@settings(max_examples=60, deadline=None)
@given(STORIES, observations(), st.integers(2, 6))
def test_more_load_never_needs_fewer(story: list[Observation], last: Observation, times: int) -> None:
    last = replace(last, asked=replace(last.asked, classes={}))
    found = []
    for seen in (last, replace(last, asked=grown(last.asked, times))):
        state = State(SETTINGS)
        for tick, before in enumerate(story):
            decide(before, state, 5.0 * tick)
        found.append(decide(seen, state, 5.0 * len(story)).needs)
    if found[0] is not None and found[1] is not None:
        assert found[1][0] >= found[0][0]
        assert found[1][1] >= found[0][1]


@settings(max_examples=30, deadline=None)
@given(STORIES)
def test_what_was_logged_is_decided_again(story: list[Observation]) -> None:
    state = State(SETTINGS)
    lines = [encode_line(Line(0.0, SETTINGS))]
    for tick, seen in enumerate(story):
        at = 3.3 * tick
        lines.append(encode_line(Line(at, None, seen, decide(seen, state, at), leading=True)))
    again = list(replay(lines))
    assert len(again) == len(story)
    assert all(one.same for one in again)
