"""The planner over a simulated fleet against the best fleet of fixed size, in hindsight, and without parts.

Each case is played with the planner (cold start 60 s), without role changes, without forecasts, without
trials, and on fixed fleets: from one that may be enough, up until it attains 95 %, by the pool that missed
most, or down until nothing can be taken without attaining less. Where none of up to 16 workers attains that,
the one counts that attains most. Of several seeds each has a best fleet of its own. `--trace FILE` is a case
of its own: on the workers of `--workers roofline`, or of `--workers slow`, which few requests keep busy
(`--speed` below 1).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

from benchmarks.report import emit
from benchmarks.sim.cases import ROOFLINE
from fleet.objectives import Objectives
from fleet.workload import Amount, Arrivals, Conversation, Kind, Shape, drawn, trace
from fleetctl.bench.play import trace_lines
from fleetctl.sim.play import simulate
from fleetctl.sim.report import report
from fleetctl.sim.speed import Measured
from fleetctl.sim.words import Scaling, Setup
from planner.words import PlannerSettings

TARGET = 0.95
SLOW = Measured(prompt_base_s=0.05, per_prompt_token_s=1e-3, decode_base_s=0.03, per_decode_s=0.003)
"""Few requests keep such a worker busy, so that hours of a fleet can be simulated in minutes."""
PROMPT, ANSWER = Amount.parse("lognormal:800,0.6@50..4000"), Amount.parse("lognormal:80,0.6@5..400")
COLD_START_S = 60.0
MOST_FIXED = 16
"""Workers, of a case that is not played `--times` as large."""
PLANNER = PlannerSettings(budget=24, cold_start_s=COLD_START_S)


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked, and what a planner begins with."""

    arrivals: Callable[[], Iterator[Conversation]]
    begin: tuple[int, int]
    enough: tuple[int, int]
    """A fixed fleet to look for the best one from."""


def _asked(
    points: Sequence[tuple[float, float]],
    seconds: float,
    seed: int,
    prompt: Amount = PROMPT,
    output: Amount = ANSWER,
) -> Iterator[Conversation]:
    found = drawn(Arrivals(tuple(points)), [Kind(prompt=prompt, output=output)], seed)
    return takewhile(lambda one: one.at_s < seconds, found)


def _shift(minutes: float, times: int, seed: int) -> Iterator[Conversation]:
    """Long prompts and short answers, then the opposite."""
    half = minutes * 30
    prompts, answers = (Amount.parse("2500"), Amount.parse("25")), (Amount.parse("300"), Amount.parse("350"))
    yield from _asked([(0.0, 1.2 * times)], half, seed, *prompts)
    for one in _asked([(0.0, 1.2 * times)], half, seed + 1, *answers):
        yield replace(one, at_s=one.at_s + half)


def _points(minutes: float, times: int) -> dict[str, list[tuple[float, float]]]:
    """Requests a second, from when to when; a day in so many minutes has one part in six of the most at
    night."""
    seconds = minutes * 60
    third = seconds / 3
    found = {
        "steady": [(0.0, 1.5)],
        "ramp": [(0.0, 0.5), (third, 0.5), (2 * third, 2.5)],
        "burst": [(0.0, 0.7), (third, 0.7), (third + 5, 2.0), (2 * third, 2.0), (2 * third + 5, 0.7)],
        "day": [(seconds * step / 24, 1.4 - 1.0 * math.cos(2 * math.pi * step / 24)) for step in range(25)],
    }
    return {name: [(at_s, rate * times) for at_s, rate in points] for name, points in found.items()}


def cases(minutes: float, seed: int, times: int = 1) -> dict[str, Case]:
    """`times` as many requests, and workers to begin with."""
    fleets = {"steady": ((3, 2), (2, 2)), "ramp": ((1, 1), (3, 2)), "burst": ((2, 1), (3, 2))}
    fleets["day"] = ((1, 1), (3, 2))
    fleets["shift"] = ((5, 1), (5, 4))
    points = _points(minutes, times)
    found: dict[str, Case] = {}
    for name, (begin, enough) in fleets.items():
        asked = partial(_shift, minutes, times, seed)
        if name in points:
            asked = partial(_asked, points[name], minutes * 60, seed)
        many = [(prefill * times, decode * times) for prefill, decode in (begin, enough)]
        found[name] = Case(asked, *many)
    return found


def setup(prefill: int, decode: int, scaling: Scaling | None = None) -> Setup:
    return Setup(
        SLOW,
        kv_bytes=1e5,
        kv_tokens=100_000,
        prefill=prefill,
        decode=decode,
        objectives={"standard": Objectives(ttft_ms=5000, tpot_ms=90)},
        step_tokens=2048,
        decode_step_tokens=256,
        max_batch=64,
        scaling=scaling,
    )


def traced(prefill: int, decode: int, scaling: Scaling | None = None) -> Setup:
    return Setup(
        ROOFLINE,
        kv_bytes=ROOFLINE.model.kv_bytes,
        kv_tokens=ROOFLINE.kv_tokens(),
        prefill=prefill,
        decode=decode,
        objectives={"standard": Objectives(ttft_ms=2000, tpot_ms=25)},
        scaling=scaling,
    )


Make = Callable[[int, int, Scaling | None], Setup]


def play(name: str, how: str, made: Setup, asked: Iterator[Conversation], **told: object) -> dict[str, Any]:
    played = simulate(made, asked)
    said = report(made, played)
    ttft = [one.outcome.ttft_s * 1e3 for one in played.asked if one.outcome and one.outcome.ttft_s]
    hours = (made.prefill + made.decode) * played.total_s / 3600
    scaled = said.get("scaling")
    found = {
        "attainment": said["all"].get("attainment"),
        "worker_hours": scaled["worker_hours"] if scaled else round(hours, 4),
        "requests": len(played.asked),
        "missed_by": said["all"].get("missed_by"),
        "scaling": scaled,
    }
    emit(
        f"sim/scaling/{name}", "ms to first token", ttft, how=how, prefill=made.prefill, decode=made.decode,
        cpu_s=said["cpu_s"], **found, **told,
    )  # fmt: skip
    return found


def best_fixed(name: str, case: Case, make: Make, most_fixed: int) -> dict[str, Any]:
    """The smallest fixed fleet that attains, among neighbours; the one that attains most where none does."""
    prefill, decode = case.enough
    best = play(name, "fixed", make(prefill, decode, None), case.arrivals())
    most = best | {"fleet": [prefill, decode]}
    shrinking = (best["attainment"] or 0) >= TARGET
    while (best["attainment"] or 0) < TARGET:
        if prefill + decode >= most_fixed:
            return most
        missed = best["missed_by"] or {}
        slow = missed.get("tpot", 0) > missed.get("ttft", 0)
        prefill, decode = (prefill, decode + 1) if slow else (prefill + 1, decode)
        best = play(name, "fixed", make(prefill, decode, None), case.arrivals())
        most = max(most, best | {"fleet": [prefill, decode]}, key=lambda one: one["attainment"] or 0)
    tried = {case.enough}
    while shrinking:
        shrinking = False
        for fewer in ((prefill - 1, decode), (prefill, decode - 1)):
            if min(fewer) < 1 or fewer in tried:
                continue
            tried.add(fewer)
            found = play(name, "fixed", make(*fewer, None), case.arrivals())
            if (found["attainment"] or 0) >= TARGET:
                (prefill, decode), best, shrinking = fewer, found, True
                break
    return best | {"fleet": [prefill, decode]}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two minutes of one case: numbers mean little")
    parser.add_argument("--case", action="append", help="steady, ramp, burst, day, shift")
    parser.add_argument("--minutes", type=float, default=30.0, help="of each case, of the fleet's time")
    parser.add_argument("--times", type=int, default=1, help="as many requests, and workers to begin with")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of the cases that are drawn")
    parser.add_argument("--without", action="store_true", help="also without role changes and so on")
    parser.add_argument("--no-fixed", action="store_true", help="no fleets of fixed size")
    parser.add_argument("--trace", help="of requests, played from its beginning")
    parser.add_argument("--speed", type=float, default=1.0, help="of the trace")
    parser.add_argument("--workers", choices=("roofline", "slow"), default="roofline", help="for the trace")
    parser.add_argument("--begin", type=int, nargs=2, help="workers; of a trace 1 1, if not told")
    parser.add_argument(
        "--enough", type=int, nargs=2, help="workers of the first fixed fleet; of a trace 6 6"
    )
    options = parser.parse_args(argv)
    minutes = 2.0 if options.quick else options.minutes
    chosen: list[tuple[str, Case, Make]]
    if options.trace:
        shape = Shape(speed=options.speed, duration_s=minutes * 60)
        case = Case(lambda: shape.of(trace(trace_lines(options.trace), 0)), (1, 1), (6, 6))
        chosen = [("trace", case, setup if options.workers == "slow" else traced)]
    else:
        names = options.case or (["steady"] if options.quick else list(cases(minutes, 1)))
        chosen = [
            (f"{name}/{seed}", cases(minutes, seed, options.times)[name], setup)
            for name in names
            for seed in options.seeds
        ]
    for name, found, make in chosen:
        begin, enough = options.begin or found.begin, options.enough or found.enough
        case = replace(found, begin=tuple(begin), enough=tuple(enough))
        planner = replace(PLANNER, budget=PLANNER.budget * options.times)
        kinds = {"planner": planner}
        if options.without:
            kinds["without role changes"] = replace(planner, turns=False)
            kinds["without forecasts"] = replace(planner, forecast=False)
            kinds["without trials"] = replace(planner, trials=False)
        fixed = None
        if not options.no_fixed and not options.quick:
            fixed = best_fixed(name, case, make, MOST_FIXED * options.times)
        for how, settings in kinds.items():
            scaling = Scaling(settings, None, COLD_START_S)
            ratio: dict[str, object] = {}
            if fixed is not None:
                ratio = {"best_fixed": fixed["fleet"], "fixed_hours": fixed["worker_hours"]}
            play(name, how, make(*case.begin, scaling), case.arrivals(), **ratio)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
