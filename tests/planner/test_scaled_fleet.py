"""The planner in closed loop with the router, the workers and the supervisor's decisions, in virtual time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, takewhile
from pathlib import Path

from click.testing import CliRunner

from fleet.goodput import End
from fleet.objectives import Objectives
from fleet.workload import Amount, Arrivals, Conversation, Kind, drawn
from fleetctl.__main__ import main
from fleetctl.sim.play import simulate
from fleetctl.sim.report import report
from fleetctl.sim.speed import Measured
from fleetctl.sim.words import Scaling, Setup
from planner.__main__ import replayed
from planner.words import PlannerSettings

SLOW = Measured(prompt_base_s=0.1, per_prompt_token_s=4e-3, decode_base_s=0.08, per_decode_s=0.024)
"""Few requests keep such workers busy."""
PLANNER = PlannerSettings(
    budget=10, interval_s=2.0, cold_start_s=10.0, warm_up_s=4.0, settle_s=40.0, turn_settle_s=6.0
)
"""Quicker than usual, as is everything here."""
SETUP = Setup(
    SLOW,
    kv_bytes=1e5,
    kv_tokens=50_000,
    prefill=2,
    decode=1,
    objectives={"standard": Objectives(ttft_ms=10_000, tpot_ms=240)},
    step_tokens=1024,
    decode_step_tokens=128,
    max_batch=32,
    scaling=Scaling(PLANNER, None, 10.0),
    validate=True,
)


def asked(
    points: list[tuple[float, float]], seconds: float, prompt: str = "400", output: str = "20", seed: int = 1
) -> Iterator[Conversation]:
    kinds = [Kind(prompt=Amount.parse(prompt), output=Amount.parse(output))]
    return takewhile(lambda one: one.at_s < seconds, drawn(Arrivals(tuple(points)), kinds, seed))


def later(conversations: Iterator[Conversation], seconds: float) -> Iterator[Conversation]:
    return (replace(one, at_s=one.at_s + seconds) for one in conversations)


def test_a_ramp_up_and_down_is_followed_and_no_request_is_lost() -> None:
    workload = asked([(0.0, 0.3), (40.0, 0.3), (120.0, 1.25), (160.0, 1.25), (170.0, 0.15)], 300.0)
    played = simulate(SETUP, workload)
    assert {one.outcome.end for one in played.asked if one.outcome} == {End.FINISHED}
    said = report(SETUP, played)
    assert said["all"]["attainment"] >= 0.95
    scaled = said["scaling"]
    most = max(row[1] + row[2] for row in scaled["counts"])
    assert most >= 5
    assert sum(scaled["counts"][-1][1:3]) < most
    # Whoever was started or stopped was counted all the time that it was there.
    assert 3 * 300 / 3600 < scaled["worker_hours"] < most * 340 / 3600


def test_from_long_prompts_to_long_answers_workers_change_their_role() -> None:
    setup = replace(SETUP, prefill=4, decode=1, scaling=Scaling(PLANNER, 5, 10.0))
    workload = chain(
        asked([(0.0, 0.6)], 100.0, prompt="900", output="5"),
        later(asked([(0.0, 0.6)], 160.0, prompt="100", output="100", seed=2), 100.0),
    )
    played = simulate(setup, workload)
    assert {one.outcome.end for one in played.asked if one.outcome} == {End.FINISHED}
    assert played.scaled is not None
    assert played.scaled.turns >= 1
    begin, end = played.scaled.counts[0], played.scaled.counts[-1]
    assert begin[1] > begin[2]
    assert end[2] > end[1]
    assert all(row[1] + row[2] <= 5 for row in played.scaled.counts)


def test_to_zero_and_back_while_requests_wait_at_the_router(tmp_path: Path) -> None:
    settings = replace(PLANNER, scale_to_zero=True, idle_s=30.0)
    file = tmp_path / "decisions.jsonl"
    setup = replace(SETUP, prefill=1, scaling=Scaling(settings, None, 10.0, file))
    workload = chain(asked([(0.0, 0.7)], 30.0), later(asked([(0.0, 0.7)], 40.0, seed=2), 120.0))
    played = simulate(setup, workload)
    assert {one.outcome.end for one in played.asked if one.outcome} == {End.FINISHED}
    assert played.scaled is not None
    assert any(row[1:] == (0, 0, 0) for row in played.scaled.counts)
    # The first to come again waited for a cold start.
    first = next(one for one in played.asked if one.at_s >= 120.0)
    assert first.outcome is not None
    assert first.outcome.ttft_s is not None
    assert 10.0 < first.outcome.ttft_s < 16.0
    # And every decision of it comes out the same again.
    assert replayed(str(file)) == 0
    assert len(file.read_text().splitlines()) > 50
    assert "data is missing" not in file.read_text(), "nothing is decided before anything was heard"


def test_a_simulation_with_a_planner_finds_the_same_twice() -> None:
    workload = list(asked([(0.0, 0.5), (60.0, 1.25)], 70.0))
    one, other = (report(SETUP, simulate(SETUP, iter(workload))) for _ in range(2))
    del one["cpu_s"], other["cpu_s"]
    assert one == other
    assert one["scaling"]["changes"] > 0


def test_the_command_takes_a_planner() -> None:
    common = ["sim", "--json", "--rate", "2", "--duration", "10", "--gpu", "a100"]
    done = CliRunner().invoke(
        main, [*common, "--planner", "--budget", "3", "--cold-start", "5", "--planner-set", "settle_s=30"]
    )
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["settings"]["scaling"]["budget"] == 3
    assert said["settings"]["scaling"]["planner"]["settle_s"] == 30
    assert said["scaling"]["worker_hours"] > 0
    for wrong, names in (
        (["--budget", "3"], "--planner"),
        (["--planner", "--planner-set", "settle_s"], "NAME=VALUE"),
        (["--planner", "--planner-set", "setle-s=3"], "setle"),
    ):
        done = CliRunner().invoke(main, [*common, *wrong])
        assert done.exit_code == 1
        assert names in done.stdout
