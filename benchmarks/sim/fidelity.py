"""The simulator against the fleet it simulates: one workload on real processes and in virtual time.

`python -m benchmarks.sim.fidelity`: one prefill and one decode worker of the demo model. The workload comes
in blocks; before and after each block requests of known size tell how long steps take, so that a machine
that changes its pace is followed. What was seen of a block is compared with what the simulator makes of the
same arrivals. Run it where nothing else runs: `drift` in its lines says how much the pace changed.

Objectives are set by a rule before anything is compared: twice what the longest prompt takes alone, and twice
a token's time alone (an "SLO scale" of 2, as DistServe calls it); `scales` has others.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import urlparse

from benchmarks.load.client import Heard, stream
from benchmarks.load.fleet import fleet, prompts
from benchmarks.report import emit
from engine.build import choose_device, choose_dtype
from fleet.goodput import Outcome, attains, percentile
from fleet.objectives import Objectives
from fleet.workload import Amount, Arrivals, Conversation, Kind, Piece, Shape, Turn, drawn
from fleetctl.sim.devices import MODELS
from fleetctl.sim.play import simulate
from fleetctl.sim.speed import Measured, Sample, Work, fit
from fleetctl.sim.words import Beside, Setup

ANSWER = 24
LENGTHS = (48, 144, 288, 448)
TOGETHER = (2, 4)
STREAMS, LONG_ANSWER = 3, 160
"""Of the sequences beside which prompts are computed."""
LEAD_S = 20.0
"""In which the simulated fleet learns what the real one knows by then: how fast it is."""
SCALE = 2.0
SCALES = (1.25, 1.5, 2.0, 3.0, 4.0)
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


@dataclass
class Calibration:
    """What requests of known size took."""

    samples: list[Sample] = field(default_factory=list)
    first_s: dict[int, list[float]] = field(default_factory=dict)
    """TTFT alone, by tokens of the prompt."""
    token_s: list[float] = field(default_factory=list)
    """Gaps of a sequence alone."""
    slowed_prompt: list[float] = field(default_factory=list)
    """Factors beside a running sequence on the other worker."""
    slowed_decode: list[float] = field(default_factory=list)
    """Factors while the other worker computes a prompt."""

    def __add__(self, other: Calibration) -> Calibration:
        first_s = {
            tokens: self.first_s.get(tokens, []) + other.first_s.get(tokens, [])
            for tokens in {*self.first_s, *other.first_s}
        }
        return Calibration(
            self.samples + other.samples,
            first_s,
            self.token_s + other.token_s,
            self.slowed_prompt + other.slowed_prompt,
            self.slowed_decode + other.slowed_decode,
        )

    def speed(self) -> Measured:
        return fit(self.samples)

    def beside(self) -> Beside:
        """A machine that is not alone may seem to get faster; two processes never make each other so."""
        return Beside(
            max(1.0, statistics.median(self.slowed_prompt)), max(1.0, statistics.median(self.slowed_decode))
        )


async def warm_up(server: Server) -> None:
    """Each shape once: what a first product of its size takes is no step's time."""
    for length in LENGTHS:
        await server.ask(length, 4)
    for count in TOGETHER:
        await asyncio.gather(*(server.ask(LENGTHS[1], 8) for _ in range(count)))


async def calibrated(server: Server, repeats: int) -> Calibration:
    made = Calibration()
    for _ in range(repeats):
        for length in LENGTHS:
            heard = await server.ask(length, ANSWER)
            size, first_s = heard.usage["prompt_tokens"], heard.ttft
            assert first_s is not None, heard.error
            made.first_s.setdefault(length, []).append(first_s)
            made.samples.append(Sample(Work(size, size * (size + 1) // 2), first_s))
            # Not the first gap: it holds the hand-off, which the simulator has itself.
            gap = statistics.median(heard.gaps[1:])
            made.token_s.append(gap)
            made.samples.append(Sample(Work(decodes=1, context=size + ANSWER // 2), gap))
        for count in TOGETHER:
            group = await asyncio.gather(*(server.ask(LENGTHS[1], 2 * ANSWER) for _ in range(count)))
            # While all run, and no prompt is computed any more.
            begin = max(one.tokens[1] for one in group)
            end = min(one.tokens[-1] for one in group)
            gaps = [b - a for one in group for a, b in pairwise(one.tokens) if a >= begin and b <= end]
            if gaps:
                context = count * (LENGTHS[1] + ANSWER)
                made.samples.append(Sample(Work(decodes=count, context=context), statistics.median(gaps)))
        await _beside(server, made)
    return made


async def _beside(server: Server, made: Calibration) -> None:
    """Running sequences on the decode worker, and prompts on the other for about half of the time."""
    running = [asyncio.create_task(server.ask(LENGTHS[1], LONG_ANSWER)) for _ in range(STREAMS)]
    length, alone = LENGTHS[-2], statistics.median(made.first_s[LENGTHS[-2]])
    await asyncio.sleep(3 * STREAMS * statistics.median(made.first_s[LENGTHS[1]]))
    others = []
    while not any(task.done() for task in running):
        others.append(await server.ask(length, 1))
        await asyncio.sleep(alone)
    streams = [heard.tokens for heard in await asyncio.gather(*running)]
    begin = max(tokens[1] for tokens in streams)
    end = min(tokens[-1] for tokens in streams)
    spans = [
        (one.started, one.tokens[0])
        for one in others
        if one.tokens and begin < one.started and one.tokens[0] < end
    ]
    inside: list[float] = []
    outside: list[float] = []
    for tokens in streams:
        for before, after in pairwise(tokens):
            if begin <= before and after <= end:
                crossed = [span for span in spans if before < span[1] and span[0] < after]
                if not crossed:
                    outside.append(after - before)
                elif crossed[0][0] <= before and after <= crossed[0][1]:
                    inside.append(after - before)
    if spans and inside and outside:
        made.slowed_decode.append(statistics.median(inside) / statistics.median(outside))
        made.slowed_prompt.append(statistics.median(end - begin for begin, end in spans) / alone)


async def played(server: Server, block: Sequence[Conversation]) -> list[Outcome]:
    loop = asyncio.get_running_loop()
    start, first_s, tasks = loop.time(), block[0].at_s, []
    for one in block:
        await asyncio.sleep(max(0.0, start + one.at_s - first_s - loop.time()))
        turn = one.turns[0]
        tasks.append(asyncio.create_task(server.ask(turn.added_tokens, turn.output_tokens)))
    return [heard.outcome for heard in await asyncio.gather(*tasks)]


def simulated(block: Sequence[Conversation], calibration: Calibration, kv_bytes: float) -> list[Outcome]:
    setup = Setup(
        speed=calibration.speed(),
        kv_bytes=kv_bytes,
        kv_tokens=int((1 << 30) / kv_bytes),
        block_size=16,
        max_batch=32,
        step_tokens=512,
        decode_step_tokens=128,
        local_bytes_s=5e9,
        beside=calibration.beside(),
    )
    step_s = LEAD_S / (2 * len(LENGTHS))
    lead = [
        Conversation(number * step_s, (Turn((Piece(f"lead {number}", length),), 2),))
        for number, length in enumerate(LENGTHS * 2)
    ]
    shift = LEAD_S + 5 - block[0].at_s
    shifted = [Conversation(one.at_s + shift, one.turns) for one in block]
    return [one.outcome for one in simulate(setup, [*lead, *shifted]).asked[len(lead) :] if one.outcome]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few requests: numbers mean little")
    parser.add_argument("--requests", type=int, default=180)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument(
        "--busy", type=float, default=0.5, help="share of the prefill worker's time that is asked for"
    )
    options = parser.parse_args(argv)
    blocks, requests = (1, 8) if options.quick else (options.blocks, options.requests)
    kind = Kind(prompt=Amount.parse(f"{LENGTHS[0]}..{LENGTHS[-1]}"), output=Amount.parse(f"{ANSWER}"))
    calibrations: list[Calibration] = []
    real: list[list[Outcome]] = []
    work: list[list[Conversation]] = []

    async def measured(server: Server) -> None:
        await warm_up(server)
        calibrations.append(await calibrated(server, 1 if options.quick else 2))
        for number in range(blocks):
            mean_s = statistics.mean(map(statistics.median, calibrations[0].first_s.values()))
            arrivals = Arrivals.steady(options.busy / mean_s)
            shape = Shape(conversations=requests // blocks)
            work.append(list(shape.of(drawn(arrivals, [kind], seed=number + 1))))
            real.append(await played(server, work[-1]))
            calibrations.append(await calibrated(server, 1 if options.quick else 2))

    with fleet(1, 1, []) as (url, model):
        load = os.getloadavg()[0]
        asyncio.run(measured(Server(url, model)))
    wide = choose_dtype("auto", choose_device("cpu")) == "float32"
    kv_bytes = MODELS["smollm2-135m"].kv_bytes * (2 if wide else 1)
    made = [
        simulated(block, before + after, kv_bytes)
        for block, (before, after) in zip(work, pairwise(calibrations), strict=True)
    ]
    told(
        [one for block in real for one in block],
        [one for block in made for one in block],
        calibrations,
        sum(block[-1].at_s - block[0].at_s for block in work),
        load,
    )
    return 0


def told(
    real: list[Outcome], made: list[Outcome], calibrations: Sequence[Calibration], seconds: float, load: float
) -> None:
    whole = sum(calibrations[1:], calibrations[0])
    longest_s = statistics.median(whole.first_s[LENGTHS[-1]])
    token_s = statistics.median(whole.token_s)
    paces = [statistics.median(one.token_s) for one in calibrations]
    about = {"load": round(load, 2), "drift": round(max(paces) / min(paces), 3), "target": TARGET}
    for name in ("ttft", "tpot"):
        pairs = [
            sorted(value for one in outcomes if (value := getattr(one, f"{name}_s")) is not None)
            for outcomes in (real, made)
        ]
        was, is_said = map(statistics.median, pairs)
        emit(
            f"sim/fidelity-{name}", "s", pairs[0], simulated_p50=round(is_said, 5),
            simulated_p90=round(percentile(pairs[1], 90), 5), off=round(is_said / was - 1, 4), **about,
        )  # fmt: skip

    def attained(outcomes: Sequence[Outcome], scale: float) -> int:
        limits = Objectives(ttft_ms=scale * 1e3 * longest_s, tpot_ms=scale * 1e3 * token_s)
        return sum(attains(one, limits).attained is True for one in outcomes)

    counts = {scale: (attained(real, scale), attained(made, scale)) for scale in SCALES}
    was, is_said = counts[SCALE]
    emit(
        "sim/fidelity-goodput", "requests/s", [was / seconds], simulated=round(is_said / seconds, 4),
        attained=[was, is_said], of=len(real), off=round(is_said / max(1, was) - 1, 4),
        objectives_ms=[round(SCALE * 1e3 * longest_s), round(SCALE * 1e3 * token_s)],
        scales={str(scale): list(pair) for scale, pair in counts.items()},
        speed=whole.speed().as_dict(), beside=[whole.beside().prompt, whole.beside().decode], **about,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
