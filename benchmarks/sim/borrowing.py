"""Time to first token of a 4,096-token second turn: with its own cache, with borrowed KV, computed again.

The product in virtual time over a latency model: two prefill workers, a decode worker, nothing else running.
The first turn's worker is taken; or it has a long queue, and so the other is, with and without borrowing.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.report import emit
from engine.latency_runner import LatencyModel, LatencyRunner
from engine.runner import Runner
from engine.settings import EngineSettings
from fleet.ids import RequestId, WorkerId
from fleet.kv_layout import KvLayout
from fleet.request import Sampling
from fleet.virtual_time import run
from fleetctl.sim.fleet import Memory, SimFleet
from kv_transfer.loopback import LoopbackHub
from router.settings import CostSettings, RouterSettings, UnknownSettings

TURN, NEW = 4096, 192
"""Tokens of the second turn, and those of them that the first one, with its answer, did not have."""
ANSWER = 64
BLOCK_SIZE = 16
MACHINES = {
    "a core, 135M": (4_000, 720 << 10, 1e9),
    "a GPU, 8B, 100 Gbit/s": (12_000, 2 << 20, 10e9),
    "a GPU, 8B, 10 Gbit/s": (12_000, 2 << 20, 1e9),
}
"""Prompt tokens a second, bytes a block, bytes a second of a link."""
COST = CostSettings(local_prefill_tokens=0, local_advantage=1e9)


async def _second_turn(machine: str, way: str, seed: int) -> tuple[float, int]:
    tokens_s, block_bytes, bytes_s = MACHINES[machine]
    latency = LatencyModel(base_s=0.005, per_prompt_token_s=1 / tokens_s, per_decode_s=0.0005)

    def replica(settings: EngineSettings) -> tuple[KvLayout, Callable[[Memory], Runner]]:
        layout = LatencyRunner.layout_of(settings.block_size)
        return layout, lambda memory: LatencyRunner(memory, layout, latency)

    chance = random.Random(seed)
    links = LoopbackHub(bytes_s=bytes_s, latency_s=0.0002, block_bytes=block_bytes)
    # Blocks weigh on the links only: what routers suppose of a link fits what they see of blocks.
    seen = bytes_s * LatencyRunner.layout_of(BLOCK_SIZE).block_bytes / block_bytes
    router = RouterSettings(
        unknown=UnknownSettings(pull_bytes_s=seen),
        cost=replace(COST, borrow_advantage=0.0 if way == "computed" else 2.0),
    )
    fleet = SimFleet(
        2, 1, replica=replica, links=links, router=router,
        engine=EngineSettings(block_size=BLOCK_SIZE, max_step_tokens=512),
    )  # fmt: skip
    async with fleet.up(validate=False):
        history = [chance.randrange(1000) for _ in range(TURN - NEW - ANSWER)]
        first = await fleet.ask(fleet.request(history, Sampling(max_tokens=ANSWER), 1))
        await asyncio.sleep(1.0)
        turn = [*history, *first.tokens, *(chance.randrange(1000) for _ in range(NEW))]
        if way != "own cache":
            there = max(
                (name for name in fleet.workers if name.startswith("prefill")),
                key=lambda name: fleet.workers[name].load().counters["computed_tokens"],
            )
            fleet.router.roster.sent(WorkerId(there), RequestId("much"), 1_000_000, 0)
        begun = asyncio.get_running_loop().time()
        answer = await fleet.ask(fleet.request(turn, Sampling(max_tokens=8), 2))
        if answer.error is not None:
            raise answer.error
        moved = sum(worker.load().counters["borrowed_tokens"] for worker in fleet.workers.values())
        return (answer.times[0] - begun) * 1000, moved


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one machine")
    options = parser.parse_args(argv)
    for machine in list(MACHINES)[: 1 if options.quick else None]:
        for way in ("own cache", "borrowed", "computed"):
            ms, moved = run(_second_turn(machine, way, 1), horizon_s=600)
            emit(
                f"second turn on {machine}: {way}", "ms to first token", [ms],
                tokens=TURN, new=NEW, borrowed_tokens=moved, clock="virtual", device="latency model",
            )  # fmt: skip


if __name__ == "__main__":
    main()
