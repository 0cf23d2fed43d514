"""One worker fewer than the model asks for: when that is tried and given up, and that it does not flap."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from fluid_fleet import SPEED, FluidFleet

from fleet.targets import Mode
from planner.words import PlannerSettings

HOUR = 3600.0
SETTINGS = PlannerSettings(budget=32)


def three(workers: float, **given: object) -> FluidFleet:
    """Prefill workers, asked for the work of so many, and enough decode workers."""
    rate = workers * SPEED / 2000.0
    return FluidFleet(SETTINGS, lambda now: rate, **given).start_with(3, 2)  # type: ignore[arg-type]


def prefill(fleet: FluidFleet) -> list[tuple[float, int]]:
    """When there were how many from then on."""
    rows = [fleet.counts[0], *(two for one, two in pairwise(fleet.counts) if one[1] != two[1])]
    return [row[:2] for row in rows]


def test_where_nobody_misses_one_fewer_is_tried_and_kept() -> None:
    # The model and its headroom ask for three of them, all of the time.
    fleet = three(1.5).run(HOUR)
    without = three(1.5)
    without.state.settings = without.settings = replace(SETTINGS, trials=False)
    without.state.trials.settings = without.settings
    assert min(count for _, count in prefill(without.run(HOUR))) == 3
    assert [count for _, count in prefill(fleet)] == [3, 2]
    assert fleet.attainment >= 0.99
    tried = next(plan.why for _, plan in fleet.plans if "are tried, as" in plan.why)
    assert tried.split("; ")[-1].startswith("2 prefill are tried, as 100.0% of")
    assert any("2 prefill do: 100.0% of" in plan.why for _, plan in fleet.plans)


class Missing(FluidFleet):
    """Two prefill workers let a tenth of the requests miss, whatever the fluid says."""

    share = 0.1

    def observation(self, asked, step_s):  # type: ignore[no-untyped-def]
        seen = super().observation(asked, step_s)
        if self.wanted["prefill"] > 2:
            return seen
        one = asked.classes["standard"]
        late = round(one.arrived * self.share)
        told = replace(one, attained=one.arrived - late, missed=late, missed_ttft=late)
        return replace(seen, asked=replace(seen.asked, classes={"standard": told}))


def test_what_was_tried_in_vain_is_not_tried_again_for_its_time() -> None:
    fleet = Missing(SETTINGS, lambda now: 1.5 * SPEED / 2000.0).start_with(3, 2)
    fleet.run(2.5 * HOUR)
    (_, three), (fell, two), (rose, again), *later = prefill(fleet)
    assert (three, two, again) == (3, 2, 3)
    # A tenth that misses is found out at once.
    assert rose - fell < 120
    assert any("2 prefill were tried, and too many requests missed" in plan.why for _, plan in fleet.plans)
    assert later[0][0] - rose >= SETTINGS.trial_again_s
    assert len(later) <= 2


def test_at_clearly_less_load_it_is_tried_again_sooner() -> None:
    rate = 1.55 * SPEED / 2000.0
    fleet = Missing(SETTINGS, lambda now: rate if now < 1800 else 0.7 * rate)
    fleet.start_with(3, 2)
    fleet.share = 0.3
    fleet.run(1800.0)
    assert fleet.wanted["prefill"] == 3
    fleet.share = 0.0
    fleet.run(2400.0)
    assert fleet.wanted["prefill"] == 2


def test_nothing_is_tried_with_few_requests_nor_done_where_it_only_advises() -> None:
    few = FluidFleet(SETTINGS, lambda now: 0.02, prompt=lambda now: 1.5 * SPEED / 0.02).start_with(3, 2)
    few.run(1200.0)
    assert not any("tried" in plan.why for _, plan in few.plans)
    advised = three(1.5, mode=Mode.ADVISE).run(1800.0)
    assert advised.wanted["prefill"] == 3
    assert any(plan.prefill == 2 for _, plan in advised.plans)


def test_more_load_ends_a_trial_before_requests_miss() -> None:
    rate = 1.5 * SPEED / 2000.0
    fleet = FluidFleet(SETTINGS, lambda now: rate * (1 + max(0.0, (now - 1800) / 900))).start_with(3, 2)
    fleet.run(1800.0)
    assert fleet.wanted["prefill"] == 2
    fleet.run(900.0)
    assert fleet.wanted["prefill"] >= 4
    assert fleet.attainment >= 0.97


@pytest.mark.parametrize("work", [0.4, 0.8, 1.3, 1.6, 2.4, 3.3, 4.7])
def test_no_level_of_load_brings_more_than_two_reversals_an_hour(work: float) -> None:
    """In workers' work."""
    fleet = three(work, seed=1).run(1.75 * HOUR)
    for role in (1, 2):
        moves = [
            (two[0], two[role] - one[role])
            for one, two in pairwise(fleet.counts)
            if one[role] != two[role] and two[0] > 0.25 * HOUR
        ]
        turned = [now for (_, one), (now, two) in pairwise(moves) if one * two < 0]
        for begin in turned:
            assert sum(begin <= now < begin + HOUR for now in turned) <= 2, fleet.counts
    assert fleet.attainment >= 0.95


def when_tried(fleet: FluidFleet) -> float:
    return next(now for now, plan in fleet.plans if "prefill are tried, as" in plan.why)


def test_a_trial_waits_until_a_rise_within_a_cold_start_is_unlikely_enough() -> None:
    """Half a rise in so long, in 65 s, and of n workers one's part of what comes is no more than may miss."""
    two = FluidFleet(SETTINGS, lambda now: 0.7 * SPEED / 2000.0).start_with(2, 1).run(600.0)
    five = FluidFleet(SETTINGS, lambda now: 2.8 * SPEED / 2000.0).start_with(5, 2).run(600.0)
    assert 0.5 * 65 / 2 / (1 - SETTINGS.target) <= when_tried(two) <= 500
    # Of so many it is soon less than that, and they must only have been enough for long.
    assert SETTINGS.settle_s <= when_tried(five) <= 250


def test_where_more_was_asked_at_once_before_it_is_tried_later() -> None:
    def rate(now: float) -> float:
        burst = now < 1200 and 100 <= now % 600 < 300
        return (2.1 if burst else 0.7) * SPEED / 2000.0

    fleet = FluidFleet(SETTINGS, rate).start_with(2, 1).run(1500.0)
    assert not any("prefill are tried, as" in plan.why for _, plan in fleet.plans)
