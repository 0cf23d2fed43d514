"""What the planner decides over hours, on a coarse model of a fleet: the failures of others' autoscalers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fluid_fleet import SPEED, FluidFleet

from fleet.targets import Mode
from planner.decide import State, decide
from planner.words import Ages, Asked, Observation, Plan, PlannerSettings, PoolSeen, WorkerSeen

HOUR = 3600.0
SETTINGS = PlannerSettings(budget=32)


def steady(rate: float, **given: object) -> FluidFleet:
    return FluidFleet(SETTINGS, lambda now: rate, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0.5, 5.0, 12.0])
def test_a_steady_load_has_at_most_two_reversals_an_hour(rate: float) -> None:
    """F101: two workers at 0.7 become one at 1.4 become two."""
    fleet = steady(rate).start_with(3, 2).run(2.5 * HOUR)
    for role in (0, 1):
        assert fleet.reversals(role) <= 2, fleet.counts
        assert fleet.reversals(role, after=1.5 * HOUR) == 0
    settled = {row[1:] for row in fleet.counts if row[0] > 2 * HOUR}
    assert len(settled) <= 2, settled
    assert fleet.attainment >= 0.95


def test_nobody_leaves_where_those_who_stay_could_not_bear_it() -> None:
    # 0.7 of two workers' time is 1.4 workers' work.
    fleet = steady(0.7 * 2 * SPEED / 2000.0).start_with(2, 2).run(2 * HOUR)
    assert min(row[1] for row in fleet.counts) >= 2


def test_missing_demand_for_an_hour_changes_nothing_down_and_little_up() -> None:
    """F099: the metrics are away, and after a cool-down everything is scaled to zero."""
    lost = replace(SETTINGS, scale_to_zero=True, idle_s=60.0)
    fleet = FluidFleet(lost, lambda now: 10.0).start_with(5, 5).run(600.0)
    before = dict(fleet.wanted)
    for ages in (Ages(0.0, None, 0.3), Ages(0.0, 900.0, 0.3), Ages(None, 0.5, 0.3), Ages(0.0, 0.5, 400.0)):
        fleet.ages = lambda now, ages=ages: ages  # type: ignore[misc]
        fleet.rate = lambda now: 0.0
        fleet.run(HOUR)
        assert fleet.wanted == before
        assert "missing" in fleet.plans[-1][1].why
    fleet.ages = lambda now: Ages(0.0, None, 0.3)
    fleet.rate = lambda now: 100.0
    fleet.run(HOUR)
    for role, count in before.items():
        assert before[role] <= fleet.wanted[role] <= count + max(1, count // 4)


def test_slow_first_steps_of_new_workers_do_not_call_for_more_of_them() -> None:
    """F103."""

    def rate(now: float) -> float:
        return 6.0 if now < HOUR else 8.0

    usual = FluidFleet(SETTINGS, rate).start_with(3, 2).run(2 * HOUR)
    slow = FluidFleet(SETTINGS, rate, slow_first_s=40.0).start_with(3, 2).run(2 * HOUR)
    late = max(row[1] for row in slow.counts if row[0] > HOUR)
    assert late <= max(row[1] for row in usual.counts if row[0] > HOUR) + 1
    assert late <= math.ceil(8.0 * 2000 / SPEED) + 3


def test_two_planners_share_nothing() -> None:
    """F108: two scalers, one state."""
    one, other = steady(1.0, seed=1).start_with(3, 3), steady(12.0, seed=2).start_with(3, 3)
    alone, alone_too = steady(1.0, seed=1).start_with(3, 3), steady(12.0, seed=2).start_with(3, 3)
    for _ in range(720):
        one.tick()
        other.tick()
    alone.run(HOUR)
    alone_too.run(HOUR)
    assert one.counts == alone.counts
    assert other.counts == alone_too.counts
    assert one.wanted != other.wanted


def test_pools_of_opposite_load_each_get_their_own() -> None:
    prompts = steady(4.0, prompt=lambda now: 6000.0, answer=lambda now: 20.0).start_with(2, 2).run(HOUR)
    answers = steady(4.0, prompt=lambda now: 200.0, answer=lambda now: 900.0).start_with(2, 2).run(HOUR)
    assert prompts.wanted["prefill"] > 2 * prompts.wanted["decode"]
    assert answers.wanted["decode"] > 2 * answers.wanted["prefill"]


def test_a_shift_from_long_prompts_to_long_answers_turns_workers() -> None:
    def given(turns: bool) -> FluidFleet:
        return FluidFleet(
            replace(SETTINGS, turns=turns),
            lambda now: 5.0,
            prompt=lambda now: 4000.0 if now < HOUR else 400.0,
            answer=lambda now: 60.0 if now < HOUR else 700.0,
            budget=8,
        ).start_with(5, 1)

    fleet = given(True).run(2 * HOUR)
    early = next(row for row in fleet.counts if row[0] >= HOUR - 10)
    assert early[1] > early[2]
    assert fleet.wanted["decode"] > fleet.wanted["prefill"]
    turned = [plan.turns for now, plan in fleet.plans if plan.turns]
    assert turned
    assert {role for turns in turned for role in turns} == {"decode"}
    without = given(False).run(2 * HOUR)
    assert not any(plan.turns for _, plan in without.plans)
    assert fleet.attainment >= without.attainment


def test_one_look_alone_turns_nobody() -> None:
    """Who has only begun knows of one moment, which is not enough to take a worker away by."""
    fleet = steady(5.0, prompt=lambda now: 4000.0, answer=lambda now: 60.0).start_with(2, 5).run(600.0)
    known = next(now for now, plan in fleet.plans if plan.needs)
    turned = next(now for now, plan in fleet.plans if plan.turns)
    assert turned >= known + SETTINGS.turn_settle_s


def changes(fleet: FluidFleet, since: float) -> list[tuple[float, Plan]]:
    """Plans that changed the counts, and how long after."""
    plans = [(now, plan) for now, plan in fleet.plans if now > since]
    before = [next(row[1:] for row in fleet.counts if row[0] > since)]
    found = []
    for now, plan in plans:
        if (plan.prefill, plan.decode) != before[-1]:
            found.append((now - since, plan))
            before.append((plan.prefill, plan.decode))
    return found


def test_who_turns_takes_the_place_of_a_start_under_way() -> None:
    """Answers are long first, so that a decode worker is started; half a minute later prompts are short."""
    fleet = FluidFleet(
        SETTINGS,
        lambda now: 5.0,
        prompt=lambda now: 4000.0 if now < HOUR + 30 else 400.0,
        answer=lambda now: 60.0 if now < HOUR else 900.0,
    ).start_with(5, 1)
    fleet.run(HOUR + 80)
    (began, start), (turned, turn), *later = changes(fleet, HOUR)
    assert (start.prefill, start.decode, start.turns) == (5, 2, ())
    # Two prompts' worth of observations later one turns, long before the start is over, which is given up.
    assert turned < began + fleet.cold_start_s - 30
    assert turned <= 40
    assert (turn.prefill, turn.decode, turn.turns) == (4, 2, ("decode",))
    assert all(plan.turns for _, plan in later)
    assert len(fleet.workers) == fleet.wanted["prefill"] + fleet.wanted["decode"] == 6


def test_a_start_that_is_needless_now_keeps_nobody_from_turning() -> None:
    """A prefill worker is under way when prompts become short and answers long."""
    fleet = FluidFleet(
        SETTINGS,
        lambda now: 5.0 if now < HOUR - 30 else 7.0,
        prompt=lambda now: 4000.0 if now < HOUR else 400.0,
        answer=lambda now: 60.0 if now < HOUR else 700.0,
    ).start_with(5, 1)
    fleet.run(HOUR)
    assert fleet.wanted["prefill"] == 6
    assert sum(worker.ready_at > fleet.now for worker in fleet.workers) == 1
    fleet.run(30.0)
    turned, turn = changes(fleet, HOUR)[0]
    assert turned <= 25
    # That one is given up, and one of those who serve changes its role.
    assert (turn.prefill, turn.decode, turn.turns) == (4, 2, ("decode",))


def test_who_waits_for_workers_that_start_calls_for_no_more_of_them() -> None:
    for seed in range(3):
        fleet = FluidFleet(SETTINGS, lambda now: 4.0 if now < HOUR else 16.0, seed=seed).start_with(2, 1)
        fleet.run(HOUR + 600)
        # Four workers' work. What piles up during a cold start is done by those who come then.
        assert max(row[1] for row in fleet.counts if row[0] > HOUR) <= 6
        assert next(late for late, plan in changes(fleet, HOUR) if plan.prefill >= 5) <= 15


def test_what_clearly_falls_is_waited_for_one_cold_start_only() -> None:
    fleet = FluidFleet(SETTINGS, lambda now: 16.0 if now < HOUR else 4.0).start_with(6, 3)
    fleet.run(HOUR + 120)
    fell = changes(fleet, HOUR)
    assert fell[0][0] >= fleet.cold_start_s
    assert fell[-1][0] <= fleet.cold_start_s + 60
    assert fleet.wanted == {"prefill": 2, "decode": 1}


def test_workers_that_never_become_ready_do_not_become_more_and_more() -> None:
    settings = replace(SETTINGS, ready_limit_s=200.0)
    fleet = FluidFleet(settings, lambda now: 12.0 if now < 600 else 30.0, never_ready=True)
    fleet.start_with(2, 2).run(600.0)
    stuck = dict(fleet.wanted)
    fleet.run(HOUR)
    assert fleet.wanted["prefill"] == stuck["prefill"]
    assert "have not become ready" in fleet.plans[-1][1].why


def test_the_budget_goes_to_where_it_serves_most() -> None:
    fleet = steady(20.0, budget=6).start_with(3, 3).run(HOUR)
    assert sum(fleet.wanted.values()) == 6
    assert fleet.wanted["prefill"] > fleet.wanted["decode"]
    assert "the budget is 6" in fleet.plans[-1][1].why


def test_a_smaller_budget_is_obeyed_at_once() -> None:
    fleet = steady(12.0).start_with(6, 4).run(600.0)
    fleet.budget = 5
    plan = fleet.tick()
    assert plan.prefill + plan.decode <= 5


def test_an_idle_fleet_goes_to_zero_and_comes_back_for_who_waits() -> None:
    settings = replace(SETTINGS, scale_to_zero=True, idle_s=300.0)
    fleet = FluidFleet(settings, lambda now: 2.0 if now < 600 or now > 4000 else 0.0).start_with(1, 1)
    fleet.run(3900.0)
    assert fleet.wanted == {"prefill": 0, "decode": 0}
    went = next(now for now, plan in fleet.plans if plan.decode == 0)
    assert went >= 600 + 300
    fleet.run(200.0)
    assert fleet.wanted["decode"] >= 1
    back = next(plan for now, plan in fleet.plans if now > 4000 and plan.decode > 0)
    assert "wait and nobody serves" in back.why


def test_without_being_allowed_an_idle_fleet_keeps_its_least() -> None:
    fleet = FluidFleet(SETTINGS, lambda now: 2.0 if now < 600 else 0.0).start_with(4, 4).run(3 * HOUR)
    assert fleet.wanted == {"prefill": 1, "decode": 1}


def test_an_operator_s_counts_are_left_alone() -> None:
    fleet = steady(12.0, mode=Mode.OFF).start_with(1, 1)
    plan = fleet.run(600.0).plans[-1][1]
    assert (plan.prefill, plan.decode) == (1, 1)
    assert "operator" in plan.why
    advised = steady(12.0, mode=Mode.ADVISE).start_with(1, 1).run(600.0)
    assert advised.plans[-1][1].prefill > 1
    assert advised.wanted == {"prefill": 1, "decode": 1}


def test_a_small_load_would_do_with_aggregated_workers() -> None:
    fleet = steady(0.3).start_with(1, 1).run(HOUR)
    assert fleet.plans[-1][1].advice == "1 aggregated workers would do instead of 2"


def test_a_ramp_is_served_in_time_and_forecasts_help() -> None:
    def rate(now: float) -> float:
        return 2.0 + 14.0 * min(1.0, max(0.0, (now - 600) / 900))

    fleet = FluidFleet(SETTINGS, rate).start_with(2, 1).run(2000.0)
    blind = FluidFleet(replace(SETTINGS, forecast=False), rate).start_with(2, 1).run(2000.0)
    assert fleet.attainment >= 0.95

    def when(one: FluidFleet, prefill: int) -> float:
        return next(row[0] for row in one.counts if row[1] >= prefill)

    assert when(fleet, 4) <= when(blind, 4)


def test_the_second_day_is_known_from_the_first() -> None:
    settings = replace(SETTINGS, season_s=2 * HOUR)

    def rate(now: float) -> float:
        # Half an hour of rush in every two hours, which begins within two minutes.
        return 2.0 + 10.0 * min(1.0, max(0.0, 1 - abs((now % (2 * HOUR)) - HOUR) / 900 * 1.0) * 7.5)

    fleet = FluidFleet(settings, rate).start_with(2, 1).run(6 * HOUR)
    forget = FluidFleet(replace(settings, forecast=False), rate).start_with(2, 1).run(6 * HOUR)

    def rises(one: FluidFleet, day: int) -> float:
        begin = day * 2 * HOUR
        return next(row[0] for row in one.counts if row[0] > begin + 900 and row[1] >= 4) - begin

    assert rises(fleet, 2) < rises(forget, 2)


def test_nothing_measured_yet_changes_nothing() -> None:
    state = State(SETTINGS)
    pools = PoolSeen(3, 3), PoolSeen(2, 2)
    workers = (WorkerSeen("p", "prefill", 100.0, True), WorkerSeen("d", "decode", 100.0, True))
    for tick in range(200):
        asked = Asked(5.0, 40, 80_000, 1.6e8, 40, 80_000, 0, 4000)
        seen = Observation(Mode.ACT, None, *pools, asked, Ages(0.0, 0.1, 0.1), workers)
        plan = decide(seen, state, 5.0 * tick)
        assert (plan.prefill, plan.decode) == (3, 2)
        assert "shown its speed" in plan.why


def test_a_pool_that_grew_just_before_does_not_keep_what_has_clearly_become_needless() -> None:
    fleet = FluidFleet(SETTINGS, lambda now: 12.0 if HOUR <= now < HOUR + 150 else 3.0).start_with(2, 1)
    fleet.run(HOUR + 300)
    rose = max(late for late, plan in changes(fleet, HOUR) if late < 150)
    fell = min(late for late, plan in changes(fleet, HOUR) if late > 150)
    assert fell - rose < SETTINGS.settle_s
    assert fell <= 150 + 100


def two_bursts(seed: int) -> FluidFleet:
    """An hour of little, twice five minutes of five times as much, and fifteen minutes between them."""

    def rate(now: float) -> float:
        return 16.0 if HOUR <= now < HOUR + 300 or HOUR + 1200 <= now < HOUR + 1500 else 3.0

    return FluidFleet(SETTINGS, rate, seed=seed).start_with(2, 1)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_fall_that_is_taken_back_in_several_steps_was_wrong_once(seed: int) -> None:
    fleet = two_bursts(seed).run(HOUR + 1500)
    rises = [plan for late, plan in changes(fleet, HOUR + 1195) if plan.prefill > 2]
    assert len(rises) >= 3
    # That it is over is found out, and twice a cold start was waited for.
    fleet.run(30 + 2 * fleet.cold_start_s)
    assert sum(fleet.wanted.values()) <= 4


@pytest.mark.parametrize("seed", [0, 1])
def test_a_trial_that_a_burst_ends_makes_nobody_stay_longer_after_it(seed: int) -> None:
    fleet = two_bursts(seed).run(HOUR)
    assert any("are tried" in plan.why for _, plan in fleet.plans)
    fleet.run(300 + 30 + fleet.cold_start_s)
    assert fleet.wanted == {"prefill": 2, "decode": 1}
