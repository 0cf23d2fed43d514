"""Several routers before one fleet, in virtual time: what it costs that they do not see each other's choices.

Alone, apart (no NATS between routers, with and without `cost.herd_share`) and hearing each other: time to the
first token, and the longest queue of a prefill worker over the mean one. Prompts share nothing. The times are
virtual, so they are the same on any machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence

from benchmarks.report import emit
from engine.latency_runner import LatencyModel, LatencyRunner, ToyModel
from fleet.ids import RequestId
from fleet.member import Role
from fleet.request import Request, Sampling
from fleet.virtual_time import run, true_time
from fleetctl.sim.fleet import Answer, SimFleet
from kv_transfer.loopback import LoopbackHub
from router.settings import CostSettings, RouterSettings

WORKERS = 4
"""Of each role."""
LATENCY = LatencyModel(base_s=0.004, per_prompt_token_s=0.0002, per_decode_s=0.0004, per_context_token_s=1e-7)


def play(routers: int, rate: float, requests: int, apart: bool, herd: float) -> tuple[list[float], float]:
    """Milliseconds to each first token, and longest queue over mean queue."""
    cost = CostSettings(herd_share=herd, local_prefill_tokens=0, local_advantage=1e9)
    layout = LatencyRunner.layout_of(16)
    fleet = SimFleet(
        WORKERS,
        WORKERS,
        replica=lambda settings: (
            layout,
            lambda memory: LatencyRunner(memory, layout, LATENCY, ToyModel()),
        ),
        links=LoopbackHub(bytes_s=1e9, latency_s=0.0002, block_bytes=360 * 1024),
        router=RouterSettings(cost=cost),
        routers=routers,
    )

    async def main() -> tuple[list[float], float]:
        chance, queues = random.Random(1), list[list[int]]()
        async with fleet:
            names = list(fleet.routers)
            if apart:
                fleet.bus.lose = lambda subject: ".moves." in subject
            await asyncio.sleep(4.0)

            async def client(number: int, at: float, prompt: tuple[int, ...]) -> float:
                await asyncio.sleep(at)
                request = Request(RequestId(f"r{number}"), fleet.model_name, prompt, Sampling(max_tokens=8))
                answer, asked = Answer(request.id), true_time()
                await fleet.ask_over(names[number % len(names)], request, answer)
                assert answer.error is None, answer.error
                return 1000 * (answer.times[0] - asked)

            async def watch() -> None:
                while True:
                    await asyncio.sleep(0.05)
                    prefill = [worker for worker in fleet.workers.values() if worker.role is Role.PREFILL]
                    queues.append([worker.load().queued_tokens for worker in prefill])

            watching, at, clients = asyncio.create_task(watch()), 0.0, []
            for number in range(requests):
                at += chance.expovariate(rate)
                prompt = tuple(chance.randrange(1000) for _ in range(chance.randrange(200, 600)))
                clients.append(asyncio.create_task(client(number, at, prompt)))
            waits = await asyncio.gather(*clients)
            watching.cancel()
            return list(waits), sum(map(max, queues)) * WORKERS / sum(map(sum, queues))

    return run(main(), horizon_s=3600)


def main(argv: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few requests: numbers mean little")
    quick = parser.parse_args(argv).quick
    for routers in (2,) if quick else (1, 2, 8):
        for rate in (40.0,) if quick else (35.0, 45.0):
            for apart, herd in ((True, 0.0), (True, 0.25), (False, 0.25)):
                if routers == 1 and apart:
                    continue
                waits, imbalance = play(routers, rate, 60 if quick else 800, apart, herd)
                emit("sim_routers", "ms to first token", waits, routers=routers, rate=rate, apart=apart,
                     herd_share=herd, longest_over_mean_queue=round(imbalance, 2))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
