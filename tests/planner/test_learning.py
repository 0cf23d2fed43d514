"""What the planner learns of workers and of demand, and what queueing theory makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from fleet.targets import Mode
from planner.capacity import Capacity
from planner.forecast import Forecast, Mean
from planner.needs import Load, Needs
from planner.queueing import aggregated_workers, decode_workers, prefill_workers
from planner.words import Ages, Asked, ClassSeen, Observation, PlannerSettings, PoolSeen, WorkerSeen


def prefill(speed: float, ready_s: float = 100.0, worked: bool = True) -> WorkerSeen:
    return WorkerSeen("p", "prefill", ready_s, worked, prefill_tokens_s=speed)


def decode(batch: float, step_s: float, ready_s: float = 100.0) -> WorkerSeen:
    return WorkerSeen(
        "d", "decode", ready_s, True, decode_step_s=step_s, decode_batch=batch, kv_tokens=10_000
    )


def test_cold_idle_and_odd_speeds_are_not_learnt() -> None:
    capacity = Capacity(warm_up_s=20.0)
    for _ in range(50):
        capacity.learn(prefill(10.0, ready_s=5.0))
        capacity.learn(prefill(10.0, worked=False))
    assert capacity.prefill_tokens_s is None
    for place in range(60):
        capacity.learn(prefill(10.0 if place % 7 == 6 else 1000.0 + place))
    assert capacity.prefill_tokens_s == pytest.approx(1045, abs=20)


def test_a_world_that_has_changed_is_believed_in_the_end() -> None:
    capacity = Capacity(warm_up_s=0.0)
    for _ in range(100):
        capacity.learn(prefill(1000.0))
    for _ in range(39):
        capacity.learn(prefill(100.0))
    assert capacity.prefill_tokens_s == pytest.approx(1000)
    capacity.learn(prefill(100.0))
    assert capacity.prefill_tokens_s == pytest.approx(100)


def test_a_decode_worker_sustains_what_steps_memory_and_experience_allow() -> None:
    capacity = Capacity(warm_up_s=0.0)
    noise = np.random.default_rng(1)
    for batch in noise.uniform(1, 40, 300):
        capacity.learn(decode(float(batch), 0.01 + 0.001 * float(batch) * float(noise.uniform(0.95, 1.05))))
    found = capacity.decode(0.05, tokens=100)
    assert found is not None
    assert found.batch == pytest.approx(40, rel=0.1)
    assert found.step_s == pytest.approx(0.05, rel=0.02)
    assert capacity.decode(10.0, tokens=1).limited_by.startswith("2 times")  # type: ignore[union-attr]
    assert capacity.decode(10.0, tokens=1000).batch == pytest.approx(9)  # type: ignore[union-attr]
    assert capacity.decode(1e-6, tokens=1).batch == 1.0  # type: ignore[union-attr]


def test_of_single_sequences_it_is_not_concluded_that_a_few_are_slow() -> None:
    capacity = Capacity(warm_up_s=0.0)
    for _ in range(20):
        capacity.learn(decode(1.0, 0.033))
    found = capacity.decode(0.081, tokens=100)
    assert found is not None
    # That is how far is looked; half of a step of one was taken to be that one's, so that four were too many.
    assert found.batch == 16


def test_a_trend_is_seen_and_noise_is_none() -> None:
    noise = np.random.default_rng(3)
    steady, ramp = Forecast(86_400.0), Forecast(86_400.0)
    false = 0
    for tick in range(1, 1000):
        now = 5.0 * tick
        steady.add(int(noise.poisson(10)), 5.0, now)
        false += steady.trend > 0
        if tick <= 120:
            ramp.add(int(noise.poisson(5 * (2 + 0.02 * now))), 5.0, now)
    assert false < 30
    assert ramp.trend == pytest.approx(0.02, rel=0.4)
    level, ahead = ramp.level, ramp.at(60.0)
    assert level is not None
    assert ahead is not None
    assert ahead == pytest.approx(2 + 0.02 * 660, rel=0.2)
    assert ahead > level
    assert Forecast(60.0).at(10.0) is None


def test_a_slow_rise_after_a_quiet_time_is_not_averaged_away() -> None:
    """Half a request a second for four minutes, then more little by little."""
    shares = []
    for seed in range(10):
        forecast, noise = Forecast(86_400.0), np.random.default_rng(seed)
        for tick in range(1, 81):
            rate = 0.5 + max(0.0, 5.0 * tick - 240.0) / 120
            forecast.add(int(noise.poisson(5 * rate)), 5.0, 5.0 * tick)
        shares.append((forecast.at(60.0) or 0.0) / rate)
    assert np.mean(shares) >= 0.85
    assert min(shares) >= 0.65


def test_a_rise_that_begins_after_quiet_minutes_is_foreseen_while_it_is_young() -> None:
    """Of such a time no line is one: it has a bend."""
    foreseen = []
    for seed in range(12):
        noise, rising = np.random.default_rng(seed), Forecast(86_400.0)
        for tick in range(1, 73):
            now = 5.0 * tick
            rising.add(float(noise.poisson(5.0 * (0.5 + max(0.0, now - 240.0) / 120))), 5.0, now)
        foreseen.append(rising.at(65.0) or 0.0)
    # It is 1.5 a second by then, and 2.0 when a worker that is wanted now serves.
    assert np.mean(foreseen) > 1.5


def needs(
    ticks: int,
    arrived: int,
    prompt: int,
    answer: int,
    *,
    step: tuple[float, float] = (0.01, 0.001),
    waiting: int = 0,
    wanted: int = 2,
) -> Needs:
    """Of the same asked for so many times five seconds, and nothing before; steps take so long, and each
    sequence in them. So many wait at routers while prefill workers have room, and so many decode workers are
    there or under way, of which another one would serve in a minute."""
    capacity, load = Capacity(warm_up_s=0.0), Load(PlannerSettings())
    for batch in np.linspace(1.0, 20.0, 100):
        capacity.learn(prefill(1000.0))
        capacity.learn(
            WorkerSeen("d", "decode", 100.0, True, 0, 0, 0, None, step[0] + step[1] * batch, batch)
        )
    asked = Asked(
        5.0, arrived, arrived * prompt, float(arrived) * prompt * prompt, arrived, arrived * prompt, 0,
        arrived * answer, 0, waiting, waiting * prompt, 0, 0,
        {"standard": ClassSeen(5000.0, 90.0, arrived, arrived, 0, 0, 0)},
    )  # fmt: skip
    pools = PoolSeen(2, 2, 0, 0, 0.0), PoolSeen(wanted, 1, wanted - 1, 0, 0.0)
    workers = (WorkerSeen("d", "decode", 100.0, True, running=10),)
    seen = Observation(Mode.ACT, 20, *pools, asked, Ages(0.0, 0.0, 0.0), workers)
    for tick in range(1, ticks + 1):
        load.add(seen, 5.0 * tick)
    found = load.needs(seen, capacity, 60.0)
    assert isinstance(found, Needs)
    return found


def test_of_what_is_known_of_few_as_many_are_had_as_there_may_likely_be() -> None:
    young, old = needs(4, 12, 1000, 10), needs(60, 12, 1000, 10)
    assert (young.prefill, old.prefill) == (4, 3)


def test_a_decode_worker_is_not_taken_to_hold_what_no_router_gives_it() -> None:
    """Of the simulator's workers: at 1.5 requests a second one of them lets 7.5 % miss, two let 1.8 %."""
    assert needs(60, 8, 800, 75, step=(0.03, 0.003)).decode == 2


def test_who_waits_for_a_place_that_is_under_way_calls_for_no_other_one() -> None:
    """Three workers would have begun with all of them before a fourth serves; one would not."""
    few = needs(60, 8, 800, 75, step=(0.03, 0.003), wanted=3)
    many = needs(60, 8, 800, 75, step=(0.03, 0.003), waiting=60, wanted=3)
    assert (few.decode, many.decode) == (2, 2)
    assert needs(60, 8, 800, 75, step=(0.03, 0.003), waiting=200, wanted=1).decode == 3


def test_a_mean_forgets_by_time_and_not_with_few() -> None:
    mean = Mean(30.0)
    mean.add(1000.0, 1.0, 5.0)
    for _ in range(50):
        mean.add(0.0, 0.0, 5.0)
    assert mean.value == 1000.0
    for _ in range(40):
        mean.add(500.0, 5.0, 5.0)
    assert mean.value == pytest.approx(100.0, rel=0.05)


@pytest.mark.parametrize("load", [0.2, 0.9, 2.5, 7.0, 20.0])
def test_prefill_workers_keep_the_wait_that_a_simulated_queue_has(load: float) -> None:
    """M/M/n, by drawing it."""
    servers = prefill_workers(load, 1.0, 1.0, wait_s=2.0, late=0.05, utilisation=0.95)
    noise = np.random.default_rng(5)

    def late(count: int) -> float:
        free = [0.0] * count
        at, waits = 0.0, 0
        for _ in range(6000):
            at += noise.exponential(1 / load)
            place = int(np.argmin(free))
            begin = max(at, free[place])
            waits += begin - at > 2.0
            free[place] = begin + noise.exponential(1.0)
        return waits / 6000

    assert late(servers) <= 0.08
    if servers > 2:
        assert late(servers - 2) > 0.02


def test_counts_grow_with_load_and_shrink_with_patience() -> None:
    counts = [prefill_workers(load / 4, 1.0, 1.0, 2.0, 0.025, 0.85) for load in range(80)]
    assert counts == sorted(counts)
    assert prefill_workers(3.0, 1.0, 1.0, 8.0, 0.025, 0.85) <= prefill_workers(
        3.0, 1.0, 1.0, 1.0, 0.025, 0.85
    )
    assert prefill_workers(3.0, 1.0, 1.0, -1.0, 0.025, 0.85) >= 7
    assert decode_workers(0.0, 10.0, 0.05) == 0
    assert decode_workers(100.0, 10.0, 0.05) == 12
    assert aggregated_workers(0.1, 2.0, 0.01, 0.001, 0.05, 0.85) == 1
    assert aggregated_workers(0.5, 1.0, 0.06, 0.001, 0.05, 0.85) is None
