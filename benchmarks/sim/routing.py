"""Ways to choose workers, on one workload at the rate at which the best of them attains about 95 %; and how
much more routers, who see each other's choices late, lose.

`python -m benchmarks.sim.routing [--case NAME | --trace FILE]`; admission is off, so that nothing but the
choice differs. A share of some hundred requests moves by percents with the seed: what several seeds drew is
played and counted together.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks.sim.cases import ROOFLINE, play_all
from fleet.objectives import Objectives
from fleet.workload import Amount, Arrivals, Conversation, Kind, Shape, drawn, trace
from fleetctl.bench.play import trace_lines
from fleetctl.sim.play import simulate
from fleetctl.sim.policies import Policy
from fleetctl.sim.report import report
from fleetctl.sim.words import Setup

OWN = Amount.parse("lognormal:300,0.6@32..4000")
ANSWER = Amount.parse("lognormal:30,0.6@4..200")
CASES: Mapping[str, Kind] = {
    # Of a prompt's tokens about a sixth is shared.
    "few hits": Kind(prompt=Amount.parse("lognormal:5000,0.4@500..20000"), output=ANSWER,
                     prefix_tokens=1024, prefixes=20),
    # 95 %, and 120 thousand tokens of beginnings: a worker has room for 150 thousand.
    "fits one worker": Kind(prompt=OWN, output=ANSWER, prefix_tokens=6016, prefixes=20),
    # 95 %, and 240 thousand tokens of beginnings: as many as both prefill workers have room for, just.
    "fits the pool": Kind(prompt=OWN, output=ANSWER, prefix_tokens=6016, prefixes=40),
}  # fmt: skip
SETUP = Setup(
    speed=ROOFLINE,
    kv_bytes=ROOFLINE.model.kv_bytes,
    kv_tokens=150_000,
    prefill=2,
    decode=2,
    admission="off",
    objectives={"standard": Objectives(ttft_ms=1000, tpot_ms=25)},
)
"""Small, so that caches are full within some hundred requests."""
FIRST_RATE = 4.0
STEP = 1.5
TARGET = 0.95


TRACE_SETUP = replace(
    SETUP,
    kv_tokens=ROOFLINE.kv_tokens(),
    prefill=4,
    decode=4,
    objectives={"standard": Objectives(ttft_ms=2000, tpot_ms=25)},
)
"""For prompts as long as those of traces."""


def workload(kind: Kind, rate: float, requests: int, seed: int = 1) -> Iterator[Conversation]:
    return Shape(conversations=requests).of(drawn(Arrivals.steady(rate), [kind], seed))


def compare(
    setup: Setup,
    workloads: Callable[[], Sequence[Iterator[Conversation]]],
    routers: Sequence[int],
    **told: object,
) -> None:
    for policy in Policy:
        play_all("sim/routing", replace(setup, policy=policy), workloads(), **told)
    for number in routers:
        play_all("sim/routing", replace(setup, routers=number), workloads(), **told)


def settled(setup: Setup, rate: float, requests: int) -> Setup:
    """The first fifth fills the caches."""
    return replace(setup, warm_up_s=requests / rate / 5)


def rate_of(kind: Kind, requests: int) -> float:
    """The highest rate, in steps of a half, at which precise routing attains the target."""
    rate = FIRST_RATE
    while True:
        setup = settled(SETUP, rate * STEP, requests)
        found = report(setup, simulate(setup, workload(kind, rate * STEP, requests)))
        if found["all"]["attainment"] < TARGET:
            return rate
        rate *= STEP


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few requests: numbers mean little")
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--trace", help="a trace's beginning instead of the cases, at --rate times its speed")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rate", type=float, help="instead of searching for it")
    parser.add_argument("--routers", type=int, action="append", help="counts beside 1; default: 2 and 8")
    options = parser.parse_args(argv)
    requests, seeds = (60, 1) if options.quick else (options.requests, options.seeds)
    routers = options.routers or [2, 8]
    if options.trace:
        speed = options.rate or 1.0
        shape = Shape(speed=speed, conversations=requests)
        compare(
            TRACE_SETUP,
            lambda: [shape.of(trace(trace_lines(options.trace), seed=1))],
            routers, mix="trace", rate=speed,
        )  # fmt: skip
        return 0
    for name in options.case or (list(CASES)[:1] if options.quick else CASES):
        kind = CASES[name]
        rate = options.rate or (FIRST_RATE if options.quick else rate_of(kind, requests))
        compare(
            settled(SETUP, rate, requests),
            lambda kind=kind, rate=rate: [workload(kind, rate, requests, 1 + n) for n in range(seeds)],
            routers, mix=name, rate=rate,
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
