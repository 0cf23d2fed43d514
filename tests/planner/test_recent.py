"""A mean of late: steady over noise, new at once where something has changed, along a line where one is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from planner.recent import Recent

STEP_S = 5.0


def counted(rate: Callable[[float], float], seconds: float, seed: int) -> list[tuple[float, Recent]]:
    """Of what comes by chance at that rate, after each observation: seconds, and what was made of it."""
    recent, noise, found = Recent(300.0, 8.0, counts=True), np.random.default_rng(seed), []
    now = 0.0
    while now < seconds:
        now += STEP_S
        recent.add(now, STEP_S, float(noise.poisson(rate(now) * STEP_S)))
        copy = Recent(300.0, 8.0, counts=True)
        copy.__dict__.update(vars(recent) | {"_rows": recent._rows.copy()})
        found.append((now, copy))
    return found


def values(told: list[tuple[float, Recent]], since: float) -> list[float]:
    return [one.value or 0.0 for now, one in told if now >= since]


@pytest.mark.parametrize("rate", [1.5, 12.0])
def test_noise_is_no_change_and_leaves_the_mean_steady(rate: float) -> None:
    changes, steady = 0, []
    for seed in range(3):
        told = counted(lambda now: rate, 7200.0, seed)
        times = sorted({one.changed_at for _, one in told if one.changed_at > 0})
        changes += sum(later - one > 60.0 for one, later in pairwise([-100.0, *times]))
        steady += values(told, 300.0)
    # Six hours, looked at every five seconds.
    assert changes <= 3
    # Of 300 s of 1.5 a second the deviation is 5 %; a mean of 45 s has 12 %.
    assert np.std(steady) / rate < 0.2 / np.sqrt(rate)


@pytest.mark.parametrize(("before", "after"), [(0.7, 2.0), (2.0, 0.7)])
def test_a_step_is_found_within_seconds(before: float, after: float) -> None:
    late, ends = [], []
    for seed in range(8):
        told = counted(lambda now: before if now <= 300.0 else after, 420.0, seed)
        now, found = next((now, one) for now, one in told if one.changed_at > 300.0)
        late.append(now - 300.0)
        assert found.fell == (after < before)
        ends.append(told[-1][1].value or 0.0)
    assert max(late) <= 30.0
    assert np.median(ends) == pytest.approx(after, rel=0.15)


def test_a_ramp_is_a_line_and_followed_to_its_end() -> None:
    ends, trends = [], []
    for seed in range(6):
        told = counted(lambda now: 2.0 + 0.02 * now, 300.0, seed)
        ends.append(told[-1][1].value or 0.0)
        trends.append(told[-1][1].trend)
    assert np.mean(ends) == pytest.approx(8.0, rel=0.1)
    assert 0.01 < np.mean(trends) < 0.025


def test_arrivals_in_clumps_are_not_taken_for_changes() -> None:
    """As of a trace that tells times in bins: all of 20 s come at once."""
    recent, noise = Recent(300.0, 8.0, counts=True), np.random.default_rng(1)
    changes = set()
    for tick in range(1, 2000):
        count = noise.poisson(40.0) if tick % 4 == 0 else 0
        recent.add(STEP_S * tick, STEP_S, float(count))
        if tick > 200:
            changes.add(recent.changed_at)
    assert len(changes) <= 4
    assert recent.value == pytest.approx(2.0, rel=0.25)


def test_of_lengths_a_few_others_of_a_kind_are_a_change_and_a_long_one_is_none() -> None:
    recent = Recent(120.0, 8.0, counts=False)
    for tick in range(1, 60):
        recent.add(STEP_S * tick, 6.0, 6 * 2500.0, 6 * 2500.0**2)
    assert recent.value == pytest.approx(2500.0)
    for tick in (60, 61):
        recent.add(STEP_S * tick, 6.0, 6 * 300.0, 6 * 300.0**2)
    assert recent.value == pytest.approx(300.0)
    assert recent.fell
    noise = np.random.default_rng(2)
    wide, changes = Recent(120.0, 8.0, counts=False), set()
    for tick in range(1, 1500):
        lengths = noise.lognormal(np.log(800), 0.6, noise.poisson(7.5))
        wide.add(STEP_S * tick, float(len(lengths)), float(lengths.sum()), float((lengths**2).sum()))
        changes.add(wide.changed_at)
    assert len(changes) <= 2
    assert wide.scv == pytest.approx(np.exp(0.36) - 1, abs=0.25)
