"""What the simulated experiments conclude from what was played."""

from __future__ import annotations

import pytest

from benchmarks.sim.disaggregation import crossings
from benchmarks.sim.fidelity import Calibration
from fleetctl.sim.speed import Sample, Work


def test_ways_cross_between_the_rates_at_which_the_better_one_changes() -> None:
    apart, aggregated = {1.0: 0.93, 2.0: 0.90, 3.0: 0.67}, {1.0: 0.88, 2.0: 0.84, 3.0: 0.76, 4.0: 0.5}
    # 6 % ahead, 9 % behind: two fifths of the way.
    assert crossings(apart, aggregated) == [2.4]
    assert crossings(aggregated, apart) == [2.4]
    assert crossings({1.0: 0.9, 2.0: 0.8}, aggregated) == [1.33]
    assert crossings({1.0: 0.9}, aggregated) == []


def test_calibrations_before_and_after_a_block_are_one() -> None:
    def calibration(pace: float) -> Calibration:
        samples = [Sample(Work(size, size * (size + 1) // 2), pace * 1e-3 * size) for size in (50, 400)]
        samples.append(Sample(Work(decodes=1, context=100), pace * 0.05))
        return Calibration(samples, {50: [pace * 0.05]}, [pace * 0.05], [pace], [0.9])

    both = calibration(1.0) + calibration(1.2)
    assert both.first_s == {50: [0.05, pytest.approx(0.06)]}
    # Of a machine that was at two paces, one between them.
    step_s = both.speed().step_s(Work(decodes=1, context=100))
    assert 0.05 < step_s < 0.06
    # Two processes never make each other faster, whatever a busy machine says.
    assert (both.beside().prompt, both.beside().decode) == (pytest.approx(1.1), 1.0)
