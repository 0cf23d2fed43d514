"""`fleetctl plan`: what the work alone needs is what one works out by hand, the search finds the fewest
workers that pass, and the whole says which way is better and why."""

from __future__ import annotations

import io
import json
import math
from itertools import pairwise

import pytest
from click.testing import CliRunner
from rich.console import Console

from fleet.objectives import Objectives
from fleet.workload import Amount, Arrivals, Conversation, Kind, Piece, Shape, Turn, drawn
from fleetctl.__main__ import main
from fleetctl.bench.plan import Plan, Source
from fleetctl.sim.advice import advise, arrangements, crossing, nothing, promising
from fleetctl.sim.estimate import FULL, Demand, Device, apart, together
from fleetctl.sim.plan_report import as_dict, table
from fleetctl.sim.planning import Planning, Wanted
from fleetctl.sim.search import Search, Trial
from fleetctl.sim.search import Shape as Workers
from fleetctl.sim.speed import Measured

FAST = Measured(
    prompt_base_s=0.01, per_prompt_token_s=1e-4, per_pair_s=0.0, decode_base_s=0.01, per_decode_s=1e-4
)
DEVICE = Device(FAST, kv_tokens=20_000, max_batch=64)
LIMITS = Objectives(ttft_ms=400, tpot_ms=15)


def evenly(rate: float, count: int, prompt: int, output: int) -> list[Conversation]:
    return [Conversation(n / rate, (Turn((Piece(f"{n}", prompt),), output),)) for n in range(count)]


def demand(rate: float, prompt: int = 1000, output: int = 101) -> Demand:
    return Demand.of(evenly(rate, 50, prompt, output), lambda name: LIMITS)


def test_a_demand_is_told_by_what_was_asked_before() -> None:
    def asked(at_s: float, *pieces: tuple[str, int]) -> Conversation:
        return Conversation(at_s, (Turn(tuple(Piece(*one) for one in pieces), 10),))

    found = Demand.of(
        [
            asked(0.0, ("system", 100), ("a", 50)),
            asked(1.0, ("system", 100), ("b", 50)),
            # The same beginning, cut off: not the same tokens as far as blocks go.
            asked(2.0, ("system", 60), ("c", 90)),
            # All of it was asked before; its last token is computed all the same.
            asked(4.0, ("system", 100), ("a", 50)),
        ],
        lambda name: LIMITS,
    )
    assert [need.cached for need in found.needs] == [0, 100, 0, 149]
    assert found.rate == pytest.approx(3 / 4)
    assert found.cached_share == pytest.approx(249 / 600)
    with pytest.raises(ValueError, match="too few"):
        Demand.of([asked(0.0, ("a", 5))], lambda name: LIMITS)


def test_workers_of_each_side_are_what_one_works_out_by_hand() -> None:
    load = demand(rate=30)
    # 1,000 tokens in steps of 512: 2 x 10 ms and 100 ms. 15 ms a token hold 50 sequences, KV 19 of 1,050.5.
    assert DEVICE.batch(load) == 19
    prefill_s = load.rate * (2 * 0.01 + 0.1)
    decode_s = load.rate * 100 * (0.01 + 19e-4) / 19
    expected = (math.ceil(prefill_s / FULL), math.ceil(decode_s / FULL))
    assert apart(load, DEVICE, 512, load.rate) == expected == (4, 2)


def test_aggregated_workers_bear_what_both_sides_do_and_their_tokens_take_longer() -> None:
    load = demand(rate=30)
    found, split = together(load, DEVICE, 512, load.rate), apart(load, DEVICE, 512, load.rate)
    assert found is not None
    assert split is not None
    # A token takes 15 ms, and a step with a piece of a prompt 61: few such steps are allowed.
    assert found > sum(split)
    # Where tokens may take longer, one base for a step of both makes up for it.
    patient = Demand.of(evenly(30, 50, 1000, 101), lambda name: Objectives(ttft_ms=400, tpot_ms=60))
    few = together(patient, DEVICE, 512, 30.0)
    assert few is not None
    assert few <= sum(apart(patient, DEVICE, 512, 30.0) or ())
    # More at twice the rate, never fewer.
    assert (together(load, DEVICE, 512, 2 * load.rate) or 0) >= found
    tight = Demand.of(evenly(30, 50, 1000, 101), lambda name: Objectives(ttft_ms=400, tpot_ms=9))
    assert together(tight, DEVICE, 512, 30.0) is apart(tight, DEVICE, 512, 30.0) is None


def test_who_is_late_even_alone_is_known_before_anything_is_played() -> None:
    slow = demand(rate=1, prompt=8000)
    assert DEVICE.alone(slow, 512) == 0.0
    assert DEVICE.alone(demand(rate=1), 512) == 1.0
    made = arrangements(slow, {1: DEVICE}, 512)
    assert promising(made, 0.95, 64) == []
    assert "even where nobody else asks" in nothing(made, 0.95, 64)
    fine = arrangements(demand(rate=100), {1: DEVICE}, 512)
    assert "more than the 2 GPUs" in nothing(fine, 0.95, 2)


@pytest.mark.parametrize("need", [(1, 1), (3, 2), (7, 2), (2, 9), (12, 12)])
def test_the_search_finds_the_fewest_that_pass(need: tuple[int, int]) -> None:
    search, played = Search(Workers(2, 2), most=64), 0
    while (step := search.next()).shape is not None:
        shape, played = step.shape, played + 1
        assert step.why
        late = {"ttft": max(0, need[0] - shape.prefill) * 20, "tpot": max(0, need[1] - shape.decode) * 20}
        missed = sum(late.values())
        search.apply(Trial(shape, 1 - min(1.0, missed / 100), late))
    assert search.best is not None
    # Far below the estimate it does not look.
    assert search.best.shape == Workers(max(need[0], 2), max(need[1], 2))
    assert played < 20


def test_a_search_without_a_way_out_ends_and_says_so() -> None:
    search = Search(Workers(0, 2), most=6)
    while (step := search.next()).shape is not None:
        search.apply(Trial(step.shape, 0.1, {"ttft": 90}))
    assert search.best is None
    assert "not even 6 aggregated attains 95%" in step.why


def test_a_search_adds_to_the_other_side_where_more_of_the_one_that_misses_does_not_help() -> None:
    # With one decode worker, requests wait at the router for a place in its batch: TTFT is missed.
    search, played = Search(Workers(1, 1), most=256), 0
    while (step := search.next()).shape is not None:
        played += 1
        full = step.shape.decode < 2
        noise = (step.shape.prefill % 3) / 100
        search.apply(Trial(step.shape, 0.6 + noise if full else 1.0, {"ttft": 34} if full else {}))
    assert search.best is not None
    assert search.best.shape == Workers(1, 2)
    assert played < 10


def test_an_effort_bounds_what_is_simulated_and_says_so() -> None:
    whole, little = planned(rate=12), planned(rate=12, effort_s=1.0)
    assert little.spent_s < whole.spent_s <= 60
    # One of each way is always played.
    assert {one.arrangement.apart for one in little.founds if one.search.trials} == {True, False}
    said = as_dict(little)
    assert any("--effort 1" in one.get("unfinished", "") for one in said["searches"])
    assert "in the effort that was allowed" in said["why"]
    assert not any("unfinished" in one for one in as_dict(whole)["searches"])
    shown = Console(width=80, file=io.StringIO())
    with shown.capture() as text:
        shown.print(table(said | {"model": "m", "gpu": "g"}))
    assert "--effort 1" in text.get()


def test_long_answers_are_played_by_fewer_requests() -> None:
    kind = Kind(prompt=Amount.parse("500"), output=Amount.parse("2000"))
    source = Source(arrivals=Arrivals.steady(2.0), kinds=(kind,), seed=3)
    made = Planning(Plan(source, {}, Objectives()), (), {1: DEVICE}, 1e5, Wanted(step_tokens=512))
    assert len(made.played) == 100
    assert made.one_run.seconds(2) < 15


def planned(rate: float, **wanted: object) -> Planning:
    kind = Kind(prompt=Amount.parse("200..800"), output=Amount.parse("20..60"))
    source = Source(arrivals=Arrivals.steady(rate), kinds=(kind,), seed=3)
    plan = Plan(source, {}, Objectives(ttft_ms=300, tpot_ms=25))
    settings = Wanted(step_tokens=512, block_size=16, requests=60, most_gpus=32, **wanted)  # type: ignore[arg-type]
    made = Planning(plan, (), {1: DEVICE}, 1e5, settings)
    made.search()
    return made


def test_a_plan_passes_in_the_simulation_and_one_worker_fewer_does_not() -> None:
    planning = planned(rate=12)
    said = as_dict(planning)
    assert said == as_dict(planned(rate=12)), "the same flags find the same"
    best = said["plan"]
    assert best["attainment"] >= 0.95
    for search in said["searches"]:
        failed = [one for one in search["trials"] if one["attainment"] < 0.95]
        if "best" in search:
            assert all(one["gpus"] <= search["best"]["gpus"] for one in failed)
    ways = {one["apart"] for one in said["searches"] if "best" in one or one["trials"]}
    assert ways == {True, False}, "both ways were compared"
    assert "apart" in said["why"]
    assert "aggregated" in said["why"]
    assert best["gpus"] == min(one["best"]["gpus"] for one in said["searches"] if "best" in one)


def test_where_streams_must_not_stall_apart_is_better_and_the_crossing_is_told() -> None:
    load = demand(rate=8, prompt=1500, output=20)
    rows = crossing(load, {1: DEVICE}, 512)
    assert [row["rate"] for row in rows] == pytest.approx([1, 2, 4, 8, 16, 32, 64], rel=0.05)
    assert all(before["apart"] <= after["apart"] for before, after in pairwise(rows))
    # One aggregated worker is the least fleet there is: at a low rate nothing is smaller.
    assert rows[0]["aggregated"] == 1 < rows[0]["apart"]


def test_the_command_says_it_as_one_object_and_within_80_columns() -> None:
    flags = [
        "plan",
        "--rate",
        "6",
        "--prompt",
        "lognormal:2000,0.5@100..8000",
        "--output",
        "40",
        "--gpus",
        "1",
    ]
    flags += ["--cached", "0.5", "--requests", "40", "--seed", "1", "--slo", "ttft=800,tpot=25"]
    done = CliRunner().invoke(main, [*flags, "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert said["plan"]["gpus"] >= 1
    assert 0.2 < said["demand"]["cached_share"] < 0.6
    assert said["demand"]["prompt_tokens"] == pytest.approx(2000 * math.exp(0.125), rel=0.2)
    for rate in (0.0987, 0.987, 6.0, 123.4):
        said["crossing"] = [{**row, "rate": rate * 2**n} for n, row in enumerate(said["crossing"], -3)]
        console = Console(width=80, file=io.StringIO())
        with console.capture() as shown:
            console.print(table(said))
        assert "requests/s (work alone)" in shown.get()
        assert "…" not in shown.get(), "nothing is cut"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "bloom-176b", "--gpus", "1"], "--gpus"),
        (["--gpus", "1", "--gpus", "2", "--calibration", __file__], "one --gpus"),
        (["--cached", "0.5", "--prefix-tokens", "10"], "--prefix-tokens"),
        (["--gpu", "abacus"], "h100"),
    ],
)
def test_what_cannot_be_is_said_with_what_could(flags: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["plan", *flags, "--estimate"])
    assert done.exit_code == 1
    assert said in done.output


def test_an_estimate_alone_plays_nothing() -> None:
    flags = ["plan", "--rate", "20", "--prompt", "3000", "--seed", "1", "--slo", "ttft=1000,tpot=25"]
    done = CliRunner().invoke(main, [*flags, "--estimate", "--json"])
    said = json.loads(done.output)
    assert "searches" not in said
    assert "plan" not in said
    assert {one["gpus_per_worker"] for one in said["estimate"]} == {1, 2, 4, 8}


def test_nothing_attains_is_advice_too() -> None:
    assert advise([], 0.95).found is None
    workload = Shape(conversations=3).of(drawn(Arrivals.steady(1.0), [Kind()], seed=1))
    assert Demand.of(workload, lambda name: Objectives()).tpot_s == math.inf
