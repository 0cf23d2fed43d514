"""The simulator against the fleet it simulates: one workload on real processes and in virtual time.

`python -m benchmarks.sim.fidelity`: one prefill and one decode worker of the demo model. Single requests of
several lengths, and a few at once, tell how long steps take; then requests come at a low rate, and what was
seen of them is compared with what the simulator makes of the same arrivals. A busy machine is not the same
one for both halves: run it on a quiet one.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from urllib.parse import urlparse

from benchmarks.load.client import Heard, stream
from benchmarks.load.fleet import fleet, prompts
from benchmarks.report import emit
from fleet.goodput import Outcome, summarize
from fleet.objectives import Objectives
from fleet.workload import Amount, Arrivals, Conversation, Kind, Shape, drawn
from fleetctl.sim.devices import MODELS
from fleetctl.sim.play import simulate
from fleetctl.sim.speed import Measured, Sample, Work, fit
from fleetctl.sim.words import Setup

ANSWER = 24
LENGTHS = (48, 144, 288, 448)
TOGETHER = 3
TARGET = 0.15
"""Most by which the simulator may be off."""


class Server:
    def __init__(self, url: str, model: str) -> None:
        place = urlparse(url)
        self.host, self.port = place.hostname or "127.0.0.1", place.port or 80
        self.model = model
        self.asked = 0

    async def ask(self, tokens: int, answer: int) -> Heard:
        self.asked += 1
        text = prompts(1, tokens, self.asked)[0]
        body = {
            "model": self.model,
            "prompt": text,
            "max_tokens": answer,
            "ignore_eos": True,
            "temperature": 0,
        }
        return await stream(self.host, self.port, "/v1/completions", body)


async def calibrated(server: Server, repeats: int) -> tuple[Measured, float, float]:
    """How long steps take here; and median TTFT and TPOT of what was asked for it."""
    samples: list[Sample] = []
    alone: list[Heard] = []
    await server.ask(LENGTHS[0], 4)
    for _ in range(repeats):
        for length in LENGTHS:
            heard = await server.ask(length, ANSWER)
            alone.append(heard)
            size = heard.usage["prompt_tokens"]
            assert heard.ttft is not None
            assert heard.tpot is not None
            samples.append(Sample(Work(size, size * (size + 1) // 2), heard.ttft))
            samples.append(Sample(Work(decodes=1, context=size + ANSWER // 2), heard.tpot))
        group = await asyncio.gather(*(server.ask(LENGTHS[1], ANSWER) for _ in range(TOGETHER)))
        gap = statistics.median([gap for heard in group for gap in heard.gaps[ANSWER // 3 :]])
        context = TOGETHER * (LENGTHS[1] + ANSWER // 2)
        samples.append(Sample(Work(decodes=TOGETHER, context=context), gap))
    ttft = statistics.median([heard.ttft or 0.0 for heard in alone])
    return fit(samples), ttft, statistics.median([heard.tpot or 0.0 for heard in alone])


async def played(server: Server, workload: Sequence[Conversation]) -> list[Outcome]:
    loop = asyncio.get_running_loop()
    start, tasks = loop.time(), []
    for one in workload:
        await asyncio.sleep(max(0.0, start + one.at_s - loop.time()))
        turn = one.turns[0]
        tasks.append(asyncio.create_task(server.ask(turn.added_tokens, turn.output_tokens)))
    return [heard.outcome for heard in await asyncio.gather(*tasks)]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few requests: numbers mean little")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument(
        "--busy", type=float, default=0.3, help="share of the prefill worker's time asked for"
    )
    options = parser.parse_args(argv)
    kind = Kind(prompt=Amount.parse("48..448"), output=Amount.parse(f"{ANSWER}"))
    with fleet(1, 1, []) as (url, model):
        server = Server(url, model)
        speed, ttft_s, tpot_s = asyncio.run(calibrated(server, 1 if options.quick else 3))
        arrivals = Arrivals.steady(options.busy / ttft_s)
        shape = Shape(conversations=6 if options.quick else options.requests)
        workload = list(shape.of(drawn(arrivals, [kind], seed=1)))
        real = asyncio.run(played(server, workload))
    objectives = Objectives(ttft_ms=2e3 * ttft_s, tpot_ms=1.5e3 * tpot_s)
    setup = Setup(
        speed=speed,
        # float32 on this kind of machine.
        kv_bytes=2 * MODELS["smollm2-135m"].kv_bytes,
        kv_tokens=23_000,
        block_size=16,
        max_batch=32,
        step_tokens=512,
        decode_step_tokens=128,
        local_bytes_s=5e9,
        objectives={"standard": objectives},
    )
    simulated = [one.outcome for one in simulate(setup, workload).asked if one.outcome is not None]
    seconds = workload[-1].at_s - workload[0].at_s
    for name in ("ttft", "tpot"):
        pairs = [
            [value for one in outcomes if (value := getattr(one, f"{name}_s")) is not None]
            for outcomes in (real, simulated)
        ]
        was, is_said = map(statistics.median, pairs)
        emit(
            f"sim/fidelity-{name}", "s", pairs[0], simulated_p50=round(is_said, 5),
            off=round(is_said / was - 1, 4), target=TARGET,
        )  # fmt: skip
    goods = [summarize(outcomes, objectives, seconds) for outcomes in (real, simulated)]
    emit(
        "sim/fidelity-goodput", "requests/s", [goods[0].goodput or 0.0],
        simulated=goods[1].goodput, attained=[goods[0].attained, goods[1].attained], of=len(real),
        off=round(goods[1].attained / max(1, goods[0].attained) - 1, 4), target=TARGET,
        objectives_ms=[round(objectives.ttft_ms or 0), round(objectives.tpot_ms or 0)],
        speed=speed.as_dict(),
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
