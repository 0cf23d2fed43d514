"""The whole fleet of the tests: the simulator's, over a tiny exact model whose tokens depend on all KV before
them, so that wrong KV shows as wrong text.

Another `replica` brings a real model, `real_links` the real transports. `drawing.py` draws what happens to
its processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from engine.latency_runner import LatencyModel, LatencyRunner, ToyModel, reference_tokens
from engine.runner import Runner
from engine.settings import EngineSettings
from fleet.kv_layout import KvLayout
from fleet.request import Request, Sampling
from fleetctl.sim.fleet import Answer, Memory, Replica, SimFleet
from fleetctl.sim.fleet import SimRouter as BoxRouter
from fleetctl.sim.fleet import SimWorker as BoxWorker
from kv_transfer.loopback import LoopbackHub

__all__ = ["LATENCY", "MODEL", "Answer", "Box", "BoxRouter", "BoxWorker", "Memory", "Replica", "workload"]

MODEL = "toy"
LATENCY = LatencyModel(base_s=0.004, per_prompt_token_s=0.0002, per_decode_s=0.0004, per_context_token_s=1e-7)


class Box(SimFleet):
    """`async with Box(...) as box`: up and ready; leaves everything stopped and checked."""

    name = "box"
    model_name = MODEL

    def __init__(
        self,
        prefill: int = 2,
        decode: int = 2,
        *,
        latency: LatencyModel = LATENCY,
        model: ToyModel | None = None,
        replica: Replica | None = None,
        real_links: bool = False,
        **settings: Any,
    ) -> None:
        """`settings`: see `SimFleet`."""
        self.latency = latency
        self.model = model or ToyModel()
        links = LoopbackHub(bytes_s=1e9, latency_s=0.0002, block_bytes=360 * 1024)
        super().__init__(
            prefill,
            decode,
            replica=replica or self._toy,
            links=None if real_links else links,
            **settings,
        )

    def _toy(self, settings: EngineSettings) -> tuple[KvLayout, Callable[[Memory], Runner]]:
        layout = LatencyRunner.layout_of(settings.block_size)
        return layout, lambda memory: LatencyRunner(memory, layout, self.latency, self.model)

    def truth(self, request: Request) -> list[int]:
        """What the answer must be, whoever computed it."""
        return reference_tokens(request.prompt, request.sampling, model=self.model)


def workload(
    count: int, seed: int, *, max_prompt: int = 1500, max_tokens: int = 60
) -> list[tuple[float, list[int], Sampling]]:
    """(arrival s, prompt, sampling) of `count` requests: some share long beginnings, some are short."""
    chance = random.Random(seed)
    roots = [
        [chance.randrange(1000) for _ in range(chance.randrange(16, max_prompt // 2))] for _ in range(12)
    ]
    rows, at = [], 0.0
    for _ in range(count):
        at += chance.expovariate(60.0)
        prompt = list(chance.choice(roots)) if chance.random() < 0.6 else []
        prompt += [
            chance.randrange(1000) for _ in range(1 + min(int(chance.expovariate(1 / 80)), max_prompt // 2))
        ]
        sampling = Sampling(
            max_tokens=chance.randrange(1, max_tokens),
            temperature=chance.choice([0.0, 1.0]),
            seed=chance.randrange(1 << 32),
        )
        rows.append((at, prompt, sampling))
    return rows
