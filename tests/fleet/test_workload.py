"""Workloads: distributions of arrivals and lengths, what is shared, each format of trace, what is cut."""

from __future__ import annotations

import json
import math
from itertools import islice, pairwise, takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.workload import (
    Amount,
    Arrivals,
    Conversation,
    Kind,
    Piece,
    Shape,
    Turn,
    azure,
    drawn,
    mooncake,
    prefill_decode_log,
    trace,
)


def noise(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def until(arrivals: Arrivals, second: float, seed: int = 1) -> list[float]:
    return list(takewhile(lambda at: at < second, arrivals.times(noise(seed))))


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gaps_have_the_mean_and_the_variation_that_was_asked_for(cv: float) -> None:
    gaps = np.diff(list(islice(Arrivals.steady(20, cv).times(noise()), 40_000)))
    assert np.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(cv, rel=0.05, abs=1e-6)


def test_poisson_arrivals_are_poisson() -> None:
    """Counts of equal stretches have their mean as variance, and gaps are exponential."""
    times = np.array(until(Arrivals.steady(10), 4000))
    counts = np.bincount(times.astype(int), minlength=4000)
    assert np.var(counts) / np.mean(counts) == pytest.approx(1, rel=0.1)
    assert np.mean(np.diff(times) > 0.1) == pytest.approx(math.exp(-1), rel=0.05)


def test_an_even_beat_is_exact() -> None:
    assert until(Arrivals.steady(4, 0), 1.0) == pytest.approx([0.125, 0.375, 0.625, 0.875])


def test_a_ramp_has_its_rate_everywhere() -> None:
    times = until(Arrivals.ramp(0, 20, 100, 0), 130)
    for start, end in ((0, 50), (50, 100), (100, 130)):
        area = sum(min(20, 0.2 * (start + (step + 0.5) * (end - start) / 1000)) for step in range(1000))
        assert sum(start <= at < end for at in times) == pytest.approx(area * (end - start) / 1000, abs=1)


def test_a_rate_that_falls_to_nothing_ends() -> None:
    times = list(Arrivals(((0.0, 10.0), (10.0, 0.0)), 0).times(noise()))
    assert len(times) == 50
    assert times[-1] < 10


def test_steps_and_gaps_without_arrivals() -> None:
    times = until(Arrivals(((0.0, 5.0), (10.0, 5.0), (10.001, 0.0), (20.0, 0.0), (20.001, 50.0)), 0), 22)
    assert [sum(start <= at < start + 10 for at in times) for start in (0, 10.01)] == [50, 0]
    assert sum(at >= 20 for at in times) == pytest.approx(100, abs=1)


@given(
    st.lists(st.floats(0.0, 50.0), min_size=1, max_size=5),
    st.floats(0.0, 5.0),
    st.integers(0, 1000),
)
def test_time_goes_forward_whatever_the_rate(rates: list[float], cv: float, seed: int) -> None:
    points = tuple((float(second), rate) for second, rate in enumerate(rates))
    if not any(rate > 0.1 for rate in rates):
        return
    times = list(islice(Arrivals(points, cv).times(noise(seed)), 200))
    assert all(0 <= before <= after < math.inf for before, after in pairwise(times))


@pytest.mark.parametrize(
    "points", [(), ((1.0, 2.0),), ((0.0, 1.0), (0.0, 2.0)), ((0.0, 0.0),), ((0.0, -1.0),), ((0.0, math.inf),)]
)
def test_rates_that_cannot_be(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="rate"):
        Arrivals(points)


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("256", 256, 0),
        ("100..500", 300, 400 / math.sqrt(12)),
        ("normal:300,50", 300, 50),
        ("exponential:40", 40, 40),
        ("lognormal:200,0.5", 200 * math.exp(0.125), 200 * math.exp(0.125) * math.sqrt(math.exp(0.25) - 1)),
    ],
)
def test_amounts_have_their_moments(text: str, mean: float, deviation: float) -> None:
    amount = Amount.parse(text)
    chance = noise()
    drawn_values = [amount.draw(chance) for _ in range(20_000)]
    assert np.mean(drawn_values) == pytest.approx(mean, rel=0.03)
    assert np.std(drawn_values) == pytest.approx(deviation, rel=0.05)
    assert Amount.parse(str(amount)) == amount


def test_bounds_hold() -> None:
    amount = Amount.parse("lognormal:200,2@16..2000")
    chance = noise()
    values = [amount.draw(chance) for _ in range(5000)]
    assert (min(values), max(values)) == (16, 2000)
    assert Amount.parse("exponential:0.001").count(chance) == 1
    assert Amount.parse(str(amount)) == amount


@pytest.mark.parametrize(
    "text", ["", "x", "normal:3", "normal:3,4,5", "uniform:5,1", "what:3", "-4", "5@9..1", "1..x", "inf"]
)
def test_amounts_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Amount.parse(text)


def test_equal_seeds_are_equal_and_others_share_no_text() -> None:
    kinds = [Kind(Amount.parse("10..900"), Amount.parse("exponential:50"), turns=Amount.parse("1..4"))]
    one, same, other = (list(islice(drawn(Arrivals.steady(3), kinds, seed), 50)) for seed in (7, 7, 8))
    assert one == same
    keys = [{piece.key for c in run for turn in c.turns for piece in turn.adds} for run in (one, other)]
    assert not keys[0] & keys[1]


def test_another_rate_asks_the_same_at_other_times() -> None:
    kinds = [Kind(Amount.parse("10..900"))]
    slow, fast = (list(islice(drawn(Arrivals.steady(rate), kinds, 7), 50)) for rate in (1, 10))
    assert [c.turns for c in slow] == [c.turns for c in fast]
    assert slow[-1].at_s == pytest.approx(10 * fast[-1].at_s)


def test_a_mix_has_its_shares() -> None:
    kinds = [Kind(share=3, service_class="interactive"), Kind(share=1, service_class="batch")]
    names = [one.service_class for one in islice(drawn(Arrivals.steady(1), kinds, 1), 8000)]
    assert names.count("batch") / len(names) == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": Amount("constant", 1e15)},
        {"output": Amount.parse("lognormal:200,90")},
        {"prefix_tokens": 10**12},
    ],
)
def test_kinds_that_would_take_all_memory(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .* tokens is possible"):
        Kind(**wrong)


def test_a_wide_distribution_is_possible_within_bounds() -> None:
    kind = Kind(Amount.parse("lognormal:200,900@1..4000"))
    prompts = [one.prompt_tokens(0) for one in islice(drawn(Arrivals.steady(3), [kind], 1), 20)]
    assert {min(prompts), max(prompts)} == {1, 4000}


def test_popular_prefixes_are_popular() -> None:
    kind = Kind(Amount("constant", 10), prefix_tokens=100, prefixes=8, popularity=1.0)
    firsts = [c.turns[0].adds[0] for c in islice(drawn(Arrivals.steady(1), [kind], 1), 8000)]
    counts = sorted((firsts.count(piece) for piece in set(firsts)), reverse=True)
    total = sum(1 / rank for rank in range(1, 9))
    assert len(counts) == 8
    assert counts == pytest.approx([8000 / rank / total for rank in range(1, 9)], rel=0.15)
    assert all(piece.tokens == 100 for piece in firsts)


def test_a_conversation_repeats_what_was_said() -> None:
    kind = Kind(Amount("constant", 10), Amount("constant", 7), turns=Amount("constant", 3), prefix_tokens=100)
    talk = next(drawn(Arrivals.steady(1), [kind], 1))
    assert [turn.think_s > 0 for turn in talk.turns] == [False, True, True]
    assert [talk.prompt_tokens(turn) for turn in range(3)] == [110, 127, 144]
    for turn in range(3):
        assert sum(piece.tokens for piece in talk.prompt(turn)) == talk.prompt_tokens(turn)
    assert talk.prompt(2)[: len(talk.prompt(1))] == talk.prompt(1)


def mooncake_line(ms: int, tokens: int, output: int, ids: list[int]) -> str:
    return json.dumps({"timestamp": ms, "input_length": tokens, "output_length": output, "hash_ids": ids})


def test_mooncake_blocks_are_shared_and_bins_are_spread() -> None:
    lines = [
        *(mooncake_line(0, 1200, 5, [1, 2, number]) for number in (3, 4, 5)),
        *(mooncake_line(3000, 513, 9, [1, number]) for number in (6, 7)),
        "",
        mooncake_line(60_000, 20, 0, [8]),
    ]
    one = list(mooncake(lines, 1))
    assert one == list(trace(lines, 1))
    assert len(one) == 6
    times = [c.at_s for c in one]
    assert times == sorted(times)
    assert len(set(times)) == 6
    assert all(0 <= at < 3 for at in times[:3])
    assert all(3 <= at < 6 for at in times[3:5])
    assert times[5] == 60
    assert {type(at) for at in times} == {float}
    assert [c.prompt_tokens(0) for c in one] == [1200] * 3 + [513] * 2 + [20]
    assert [piece.tokens for piece in one[0].turns[0].adds] == [512, 512, 176]
    assert one[0].turns[0].adds[:2] == one[1].turns[0].adds[:2]
    assert one[0].turns[0].adds[0] == one[3].turns[0].adds[0]
    assert one[5].turns[0].output_tokens == 1
    # Another seed is other text: nothing is found in a cache of the run before.
    assert next(mooncake(lines, 2)).turns[0].adds[0] != one[0].turns[0].adds[0]


def test_a_mooncake_row_without_blocks_shares_nothing() -> None:
    rows = list(mooncake([mooncake_line(0, 30, 5, []), mooncake_line(9, 30, 5, [])]))
    assert [c.prompt_tokens(0) for c in rows] == [30, 30]
    assert rows[0].turns[0].adds != rows[1].turns[0].adds


def test_the_prefill_decode_log_has_classes_and_a_rest_of_its_own() -> None:
    rows = [
        {"ts": 0, "il": 2100, "ol": 0, "bh": ["11", "22"], "priority": 70},
        {"ts": 56, "il": 93, "ol": 12, "bh": [], "priority": 50},
        {"ts": 156, "il": 2100, "ol": 3, "bh": ["11", "22"], "priority": 70},
    ]
    one, two, three = prefill_decode_log([json.dumps(row) for row in rows])
    assert [one.service_class, two.service_class] == ["priority-70", "priority-50"]
    assert [piece.tokens for piece in one.turns[0].adds] == [1024, 1024, 52]
    assert [piece.tokens for piece in two.turns[0].adds] == [93]
    assert one.turns[0].adds[:2] == three.turns[0].adds[:2]
    assert one.turns[0].adds[2] != three.turns[0].adds[2]
    assert (one.turns[0].output_tokens, two.turns[0].output_tokens) == (1, 12)
    assert [c.at_s for c in (one, two, three)] == [0, 0.056, 0.156]
    assert next(trace([json.dumps(rows[0])])) == one


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_azure_rows_are_lengths_and_times(end: str) -> None:
    lines = [
        f"TIMESTAMP,ContextTokens,GeneratedTokens{end}",
        f"2023-11-16 18:15:46.6805900,374,44{end}",
        f"2023-11-16 18:15:50.9951690,396,109{end}",
    ]
    one, two = trace(lines)
    assert (one.at_s, two.at_s) == (0, pytest.approx(4.314579))
    assert (one.prompt_tokens(0), one.turns[0].output_tokens) == (374, 44)
    assert one.turns[0].adds[0].key != two.turns[0].adds[0].key
    assert list(azure(lines)) == [one, two]
    assert list(trace(["\ufeff" + lines[0], *lines[1:]])) == [one, two]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "unknown trace"),
        (["a,b"], "unknown trace"),
        (['{"hash_ids": [1]'], "line 1"),
        (['{"bh": []}'], "line 1 of the trace: without ts, il, ol"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,3"], "line 2"),
        ([mooncake_line(5000, 3, 3, [1]), mooncake_line(0, 3, 3, [1])], "back in time"),
        ([mooncake_line(0, 3, 3, [1]), mooncake_line(0, 10**18, 3, [1])], "line 2 .* input_length is 10"),
        ([mooncake_line(0, 3, -3, [1])], "line 1 .* output_length is -3"),
        ([mooncake_line(1_700_000_000_000, 3, 3, [1])], "line 1 .* ms since the trace began"),
        (['{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}'], "timestamp is nan"),
        (
            ['{"timestamp": 0, "input_length": "9", "output_length": 1, "hash_ids": []}'],
            "input_length is '9'",
        ),
        (['{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": 7}'], "hash_ids is no list"),
        (['{"ts": 0, "il": null, "ol": 1, "bh": []}'], "line 1 .* il is None"),
        (
            ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,3,-1"],
            "line 2 .* GeneratedTokens",
        ),
        (
            [
                "TIMESTAMP,ContextTokens,GeneratedTokens",
                "2023-11-16 18:15:46,3,1",
                "2023-11-16 18:15:45+00:00,3,1",
            ],
            "line 3",
        ),
    ],
)
def test_a_broken_trace_says_where(lines: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        list(trace(lines))


def talks(count: int, apart_s: float = 1.0, turns: int = 1) -> list[Conversation]:
    return [
        Conversation(
            number * apart_s,
            tuple(Turn((Piece(f"{number}.{turn}", 100),), 50, float(turn > 0)) for turn in range(turns)),
            "priority-50",
        )
        for number in range(count)
    ]


def test_time_is_scaled_cut_and_skipped() -> None:
    assert [c.at_s for c in Shape(speed=2).of(talks(4))] == [0, 0.5, 1, 1.5]
    assert [c.at_s for c in Shape(skip_s=2).of(talks(4))] == [0, 1]
    assert [c.at_s for c in Shape(speed=2, skip_s=1, duration_s=1).of(talks(9))] == [0, 0.5, 1]
    assert len(list(Shape(conversations=3).of(talks(9)))) == 3
    assert len(list(Shape().of(talks(9)))) == 9


def test_lengths_are_scaled_and_cut() -> None:
    scaled = next(Shape(length_scale=0.1).of(talks(1)))
    assert (scaled.prompt_tokens(0), scaled.turns[0].output_tokens) == (10, 5)
    cut = next(Shape(prompt_limit=30, output_limit=4).of(talks(1)))
    assert (cut.prompt_tokens(0), cut.turns[0].output_tokens) == (30, 4)
    assert cut.turns[0].adds[0].key == "0.0"


def test_a_cut_prompt_keeps_its_shared_beginning() -> None:
    talk = Conversation(0, (Turn((Piece("shared", 50), Piece("own", 50)), 5),))
    assert next(Shape(prompt_limit=70).of([talk])).turns[0].adds == (Piece("shared", 50), Piece("own", 20))
    assert next(Shape(prompt_limit=50).of([talk])).turns[0].adds == (Piece("shared", 50),)


def test_turns_beyond_the_longest_prompt_are_left_out() -> None:
    # 100, then 100 + 50 + 100, then 400 tokens.
    for limit, turns in ((1000, 3), (400, 3), (399, 2), (250, 2), (249, 1)):
        assert len(next(Shape(prompt_limit=limit).of(talks(1, turns=3))).turns) == turns


def test_classes_are_named_anew() -> None:
    shape = Shape(classes={"priority-50": "standard"})
    assert next(shape.of(talks(1))).service_class == "standard"


@pytest.mark.parametrize(
    "wrong", [{"speed": 0}, {"length_scale": -1}, {"prompt_limit": 0}, {"output_limit": 0}]
)
def test_shapes_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"above 0|at least 1"):
        Shape(**wrong)  # type: ignore[arg-type]
