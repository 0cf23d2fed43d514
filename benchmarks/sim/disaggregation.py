"""Prefill and decode apart against aggregated workers, as many GPUs: at which rates which attains more.

`python -m benchmarks.sim.disaggregation --trace FILE` replays a trace; without one, long prompts are drawn.
All of Mooncake's conversations are `--requests 12031`, five minutes of CPU for each shape and rate.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from benchmarks.report import emit
from benchmarks.sim.cases import ROOFLINE, PublishedTimes, play
from fleet.objectives import Objectives
from fleet.workload import Amount, Arrivals, Conversation, Kind, Shape, drawn, trace
from fleetctl.bench.play import trace_lines
from fleetctl.sim.policies import Policy
from fleetctl.sim.speed import Speed
from fleetctl.sim.words import Setup

OBJECTIVES = Objectives(ttft_ms=2000, tpot_ms=25)
"""Those of the peers' published replay."""
LONG = Kind(
    prompt=Amount.parse("lognormal:6000,1.0@100..100000"),
    output=Amount.parse("lognormal:250,0.8@1..2000"),
    prefix_tokens=4096,
    prefixes=40,
    popularity=1.0,
)
"""Without a trace: about as Mooncake's conversations are."""
RATE = 3.4
"""Of that trace, a second."""


def workload(path: str | None, rate: float, requests: int, seed: int = 0) -> Iterator[Conversation]:
    """`rate` as a multiple of the trace's own."""
    if path is None:
        return Shape(conversations=requests).of(drawn(Arrivals.steady(RATE * rate), [LONG], seed))
    return Shape(speed=rate, conversations=requests).of(trace(trace_lines(path), seed))


def setup(prefill: int, decode: int, speed: Speed, kv_tokens: int, step_tokens: int, policy: Policy) -> Setup:
    return Setup(
        speed=speed,
        kv_bytes=ROOFLINE.model.kv_bytes,
        kv_tokens=kv_tokens,
        prefill=prefill,
        decode=decode,
        policy=policy,
        objectives={"standard": OBJECTIVES},
        decode_step_tokens=step_tokens,
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few requests: numbers mean little")
    parser.add_argument("--trace")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--rate", type=float, action="append", help="multiples of the trace's own rate")
    parser.add_argument("--shape", action="append", help="PREFILL+DECODE, such as 4+4; 0+8 is aggregated")
    parser.add_argument("--step-tokens", type=int, default=1024, help="of decode and aggregated workers")
    parser.add_argument("--times", choices=["roofline", "published"], default="roofline")
    parser.add_argument("--policy", type=Policy, default=Policy.PRECISE)
    options = parser.parse_args(argv)
    speed: Speed = ROOFLINE if options.times == "roofline" else PublishedTimes()
    kv_tokens = ROOFLINE.kv_tokens() if options.times == "roofline" else PublishedTimes().kv_tokens
    rates = options.rate or ([1.0] if options.quick else [0.5, 1.0, 2.0, 3.0, 4.0])
    found: dict[str, dict[float, float]] = {}
    for rate in rates:
        for shape in options.shape or ["0+8", "2+6", "4+4"]:
            prefill, decode = map(int, shape.split("+"))
            said = play(
                "sim/disaggregation",
                setup(prefill, decode, speed, kv_tokens, options.step_tokens, options.policy),
                workload(options.trace, rate, 40 if options.quick else options.requests),
                times=options.times,
                trace=options.trace is not None,
                rate=rate,
            )
            found.setdefault(shape, {})[rate] = said["all"]["attainment"]
    aggregated = next((shape for shape in found if shape.startswith("0+")), None)
    for shape, shares in found.items():
        if aggregated is None or shape == aggregated:
            continue
        if crossed := crossings(shares, found[aggregated]):
            about = {"shape": shape, "against": aggregated, "trace": options.trace is not None}
            emit("sim/disaggregation-crossing", "times the rate", crossed, **about)
    return 0


def crossings(shares: Mapping[float, float], others: Mapping[float, float]) -> list[float]:
    """Rates at which one begins or ends to attain more than the other, on lines between those played."""
    gains = [(rate, shares[rate] - others[rate]) for rate in sorted({*shares} & {*others})]
    return [
        round(low + (high - low) * before / (before - after), 2)
        for (low, before), (high, after) in pairwise(gains)
        if before * after < 0
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
