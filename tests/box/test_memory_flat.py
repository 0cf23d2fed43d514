"""What a fleet holds does not grow with the requests it has served: everything that is kept has a bound."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from collections import Counter
from itertools import pairwise
from types import FrameType, FunctionType, ModuleType

import pytest
from whole_fleet import Box

import kv_transfer.lease
from engine.latency_runner import LatencyModel
from engine.settings import EngineSettings
from fleet.chassis import ChassisSettings
from fleet.request import Request, Sampling
from fleet.virtual_time import run
from router.settings import CostSettings, FlowSettings, IndexSettings, RouterSettings

KEPT = 64
"""Of whatever is remembered by number, so that all of it is full soon."""
SMALL = RouterSettings(
    cost=CostSettings(local_prefill_tokens=0, local_advantage=1e9),
    flow=FlowSettings(records=KEPT, sessions=KEPT),
    index=IndexSettings(max_blocks=4 * KEPT, max_hints=KEPT),
)
FAST = LatencyModel(base_s=0.002, per_prompt_token_s=1e-5, per_decode_s=1e-4)
PART = 400
"""Requests between two looks."""
NOT_HELD = (ModuleType, type, FunctionType, FrameType)
"""Lead everywhere, and belong to nobody."""


def census(*roots: object) -> tuple[Counter[str], int]:
    """Objects that can be reached, by kind, and their bytes."""
    seen, found, size = {id(root) for root in roots}, list(roots), 0
    kinds: Counter[str] = Counter()
    while found:
        one = found.pop()
        kinds[type(one).__qualname__] += 1
        size += sys.getsizeof(one)
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, NOT_HELD):
                seen.add(id(other))
                found.append(other)
    return kinds, size


def test_what_is_held_after_many_requests_is_what_was_held_after_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_transfer.lease, "REMEMBERED", KEPT)
    held: list[tuple[Counter[str], int]] = []

    async def main() -> None:
        chance = random.Random(5)
        async with Box(
            2, 2, blocks=KEPT, latency=FAST, router=SMALL,
            engine=EngineSettings(block_size=16, max_batch=16, max_step_tokens=128),
            chassis=ChassisSettings(event_backlog=KEPT),
        ) as box:  # fmt: skip

            async def client(number: int) -> None:
                prompt = [chance.randrange(1000) for _ in range(chance.randrange(1, 300))]
                request = box.request(prompt, Sampling(max_tokens=chance.randrange(1, 6)), number)
                answer = await box.ask(request)
                assert answer.error is None, answer.error
                await asyncio.sleep(0.2)

            async def clients(first: int) -> None:
                for number in range(first, PART, 4):
                    await client(number + len(held) * PART)

            for _ in range(4):
                await asyncio.gather(*(clients(first) for first in range(4)))
                # What is counted for the last minute is empty again.
                await asyncio.sleep(120.0)
                box.validate()
                gc.collect()
                held.append(census(*box.routers.values(), *box.workers.values()))

    run(main(), horizon_s=100_000)
    for (kinds, size), (later, later_size) in pairwise(held):
        # What an hour's goodput is summed up from grows with the hour, not with the requests.
        more = f"{later.total() - kinds.total()} objects more, {(later - kinds).most_common(5)}"
        assert later.total() - kinds.total() < PART / 2, more
        assert later_size - size < 100 * PART, f"{later_size - size} bytes more; {more}"


def test_a_request_that_is_over_is_freed_before_anybody_looks_for_cycles() -> None:
    """Its prompt may be long, and looking takes time from all the others."""

    def alive() -> int:
        # None is asked for its class: one of torch's warns then.
        return sum(type(one) is Request for one in gc.get_objects())

    async def main() -> int:
        async with Box(1, 1, latency=FAST) as box:
            gc.collect()
            gc.disable()
            try:
                before = alive()
                for number in range(40):
                    answer = await box.ask(box.request(range(100), Sampling(max_tokens=3), number))
                    assert answer.error is None
                return alive() - before
            finally:
                gc.enable()

    assert run(main(), horizon_s=600) < 8
