"""The one definition of goodput: who attains, who counts, and figures that are right within their bound."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.goodput import End, Histogram, Outcome, Rolling, Tally, attains, percentile, summarize
from fleet.objectives import CLASSES, Objectives
from fleet.stages import Stage, Timeline

HELD = Objectives(ttft_ms=1000, tpot_ms=100, e2e_ms=5000)


def outcome(end: End = End.FINISHED, *times: float, ended: float | None = None) -> Outcome:
    return Outcome(end, ended if ended is not None else times[-1], times)


@pytest.mark.parametrize(
    ("of", "attained", "missed"),
    [
        (outcome(End.FINISHED, 0.5, 0.6, 0.7), True, ()),
        (outcome(End.FINISHED, 1.0, 1.1), True, ()),
        (outcome(End.FINISHED, 1.001, 1.1), False, ("ttft",)),
        (outcome(End.FINISHED, 0.5, 0.7), False, ("tpot",)),
        (outcome(End.FINISHED, 2.0, 3.0), False, ("ttft", "tpot")),
        (outcome(End.FINISHED, 0.5, 0.6, ended=5.5), False, ("e2e",)),
        # One token has no TPOT: judged by the rest.
        (outcome(End.FINISHED, 0.5, ended=0.5), True, ()),
        (outcome(End.FINISHED, 1.5, ended=1.5), False, ("ttft",)),
        # Errors, refusals and time-outs count against, whatever was met.
        (outcome(End.FAILED, 0.5, 0.6), False, ("failed",)),
        (outcome(End.REJECTED, ended=0.001), False, ("rejected",)),
        (outcome(End.TIMED_OUT, ended=9.0), False, ("timed_out", "ttft", "e2e")),
        # The client's own error is nobody's.
        (outcome(End.INVALID, ended=0.0), None, ()),
        (outcome(End.INVALID, ended=100.0), None, ()),
        # Cancelled: on neither side, unless it had missed something by then.
        (outcome(End.CANCELLED, ended=0.9), None, ()),
        (outcome(End.CANCELLED, ended=1.1), False, ("ttft",)),
        (outcome(End.CANCELLED, 0.5, ended=0.55), None, ()),
        (outcome(End.CANCELLED, 1.2, ended=1.2), False, ("ttft",)),
        (outcome(End.CANCELLED, 0.5, 0.55, 0.6, ended=0.65), None, ()),
        (outcome(End.CANCELLED, 0.5, 0.8, ended=0.8), False, ("tpot",)),
        # It left because the second token did not come.
        (outcome(End.CANCELLED, 0.5, ended=0.65), False, ("tpot",)),
        (outcome(End.CANCELLED, 0.1, 0.15, ended=6.0), False, ("tpot", "e2e")),
    ],
)
def test_who_attains(of: Outcome, attained: bool | None, missed: tuple[str, ...]) -> None:
    verdict = attains(of, HELD)
    assert (verdict.attained, verdict.missed) == (attained, missed)
    for name in missed:
        assert name.replace("_", " ") in verdict.why


def test_what_is_not_promised_is_not_judged() -> None:
    assert attains(outcome(End.FINISHED, 100.0, 900.0), Objectives()).attained
    assert attains(outcome(End.CANCELLED, ended=900.0), Objectives()).attained is None


def test_a_class_may_bound_its_gaps_where_another_bounds_their_mean() -> None:
    smooth = [0.1 + 0.05 * n for n in range(22)]
    stalled = [*smooth[:10], *(at + 0.9 for at in smooth[10:])]
    mean, gaps = Objectives(tpot_ms=100), Objectives(itl_ms=100, itl_percentile=95)
    assert attains(outcome(End.FINISHED, *stalled), mean).attained
    assert attains(outcome(End.FINISHED, *stalled), gaps).attained, "one of 21 gaps is beyond the 95th"
    every = attains(outcome(End.FINISHED, *stalled), replace(gaps, itl_percentile=100))
    assert every.missed == ("itl",)
    assert every.why == "itl 950 ms > 100 ms"
    assert attains(outcome(End.FINISHED, 0.1), replace(gaps, itl_percentile=100)).attained


def test_what_was_never_reached_is_absent() -> None:
    timeline = Timeline(50.0)
    timeline.mark(Stage.TOKENIZED, 50.25)
    made = Outcome.of(timeline, (), End.FAILED, 51.0)
    assert (made.ttft_s, made.tpot_s, made.e2e_s, made.gaps, made.ended_s) == (None, None, None, [], 1.0)
    assert made.as_dict() == {"end": "failed", "tokens": 0, "stages": {"tokenized": 0.25}}
    figures = summarize([made], HELD, 10.0)
    assert (figures.ttft, figures.tpot, figures.itl, figures.e2e) == (None, None, None, None)
    assert (figures.attainment, figures.goodput) == (0.0, 0.0)
    empty = summarize([], HELD, 0.0)
    assert (empty.attainment, empty.goodput, empty.burn_rate(0.95)) == (None, None, None)


def test_goodput_counts_attaining_requests_a_second() -> None:
    good, late = outcome(End.FINISHED, 0.5, 0.6), outcome(End.FINISHED, 3.0, 3.05)
    gone, bad = outcome(End.CANCELLED, ended=0.1), outcome(End.INVALID, ended=0.0)
    figures = summarize([good] * 6 + [late, late] + [gone, bad, bad], HELD, 3.0)
    assert (figures.attained, figures.missed, figures.uncounted) == (6, 2, 3)
    assert figures.goodput == 2.0
    assert figures.attainment == 0.75
    assert figures.burn_rate(0.95) == pytest.approx(5.0)
    assert figures.reasons == {"ttft": 2}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 9e4), min_size=1, max_size=200), st.sampled_from([1, 50, 90, 99, 100]))
def test_percentiles_are_within_their_error(samples: list[float], percent: float) -> None:
    halves = Histogram(), Histogram()
    for sample in samples[::2]:
        halves[0].add(sample)
    halves[1].add_all(samples[1::2])
    halves[0].merge(halves[1])
    told = halves[0].percentile(percent)
    assert told == pytest.approx(percentile(sorted(samples), percent), rel=0.026, abs=3e-6)


def test_a_histogram_stays_small_whatever_comes() -> None:
    made, chance = Histogram(), random.Random(1)
    for _ in range(20_000):
        made.add(10 ** chance.uniform(-12, 5))
    made.add(0.0)
    assert len(made.counts) <= 430
    assert Histogram().percentile(50) is None


def test_windows_forget_and_burn_rates_tell_a_spike_from_a_fire() -> None:
    good, late = outcome(End.FINISHED, 0.5), outcome(End.FINISHED, 3.0)
    rolling = Rolling(0.0)
    assert rolling.figures(300, 0.0).goodput is None
    for second in range(0, 20_000, 2):
        rolling.add(good, attains(good, HELD), float(second))
    assert rolling.figures(300, 20_000.0).goodput == pytest.approx(0.5, rel=0.05)
    for second in range(20_000, 20_060, 2):
        rolling.add(late, attains(late, HELD), float(second))
    now = 20_060.0
    rates = rolling.burn_rates(0.95, now)
    assert rates[300.0] == pytest.approx(0.2 / 0.05, rel=0.1)
    assert rates[21_600.0] is not None
    assert rates[21_600.0] < 0.1
    assert rolling.burning(0.95, now) is None, "a minute of it is no fire"
    for second in range(20_060, 26_000, 2):
        rolling.add(late, attains(late, HELD), float(second))
    why = rolling.burning(0.95, 26_000.0)
    assert why is not None
    assert "over 5 min" in why
    for window_s, counts in rolling.counts(26_000.0).items():
        whole = rolling.figures(window_s, 26_000.0)
        assert (counts.attained, counts.missed) == (whole.attained, whole.missed)
        assert counts.burn_rate(0.95) == whole.burn_rate(0.95)
    # Ten minutes of times, six hours of counts; a day later nothing.
    assert rolling.figures(300, 26_000.0).ttft is not None
    assert sum(1 for _, tally in rolling._slots if tally.ttft.total) <= 62
    assert len(rolling._slots) <= 2161
    assert rolling.figures(21_600, 110_000.0).attainment is None


def test_when_all_miss_somebody_is_called_however_low_the_target() -> None:
    late = outcome(End.FINISHED, 3.0)
    rolling = Rolling(0.0)
    for second in range(0, 4000, 2):
        rolling.add(late, attains(late, HELD), float(second))
    for target in (0.5, 0.9, 0.95, 0.999):
        assert rolling.burning(target, 4000.0) is not None, target


def test_tallies_add_up() -> None:
    one, other, whole = Tally(), Tally(), Tally()
    for n in range(50):
        made = outcome(End.FINISHED, 0.02 * (n + 1), 0.02 * (n + 1) + 0.05, ended=2.0)
        for tally in (whole, one if n % 2 else other):
            tally.add(made, attains(made, HELD))
    one.merge(other)
    assert one.figures(1.0) == whole.figures(1.0)


def test_the_classes_by_default_are_ordered_and_only_batch_gives_way() -> None:
    assert list(CLASSES) == ["interactive", "standard", "batch"]
    assert [made.priority for made in CLASSES.values()] == [1, 0, -1]
    assert [made.sheddable for made in CLASSES.values()] == [False, False, True]


def test_a_request_may_only_tighten() -> None:
    made = Objectives(ttft_ms=100).tightened(ttft_ms=500, e2e_ms=900)
    assert (made.ttft_ms, made.e2e_ms) == (100, 900)
    assert Objectives(ttft_ms=100).tightened(ttft_ms=50).ttft_ms == 50


@pytest.mark.parametrize(
    "wrong",
    [{"ttft_ms": 0}, {"tpot_ms": -1}, {"e2e_ms": float("inf")}, {"itl_percentile": 0}, {"weight": 0},
     {"priority": 101}],
)  # fmt: skip
def test_objectives_that_can_never_be_meant_are_errors(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        Objectives(**wrong)  # type: ignore[arg-type]
