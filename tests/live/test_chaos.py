"""A whole fleet of processes while random ones are killed, frozen and drained: the small share for every run.

The large one is `python -m benchmarks live-soak`. `CHAOS_SEED` repeats a seed that a failed run printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import pytest
from chaos import CalmOracle, Chaos, LatencyOracle, Load, Result, Trouble
from processes import Plan, running

pytestmark = pytest.mark.live

# A request waits for a worker instead of failing at once, and its silent worker is found sooner.
ROUTER = ("--flow.worker-wait-s", "60", "--flow.resume-wait-s", "60", "--wire.heartbeat-s", "1")
WORKER = ("--wire.heartbeat-s", "1", "--chassis.drain-limit-s", "10")
FLAGS = {"router": ROUTER, "prefill": WORKER, "decode": WORKER}


def seed() -> int:
    return int(os.environ.get("CHAOS_SEED") or secrets.randbelow(1_000_000))


def show(result: Result) -> None:
    print(json.dumps(result.line()))
    assert not result.wrong, "\n".join([f"seed {result.seed}", *result.wrong[:20]])


def test_hundreds_of_requests_through_kills_and_freezes_have_their_text(tmp_path: Path) -> None:
    async def main() -> None:
        chosen = seed()
        print(f"seed {chosen}")
        async with running(tmp_path, Plan("latency:base=10", 2, 2, 2, FLAGS)) as (fleet, watcher):
            chaos = Chaos(
                fleet,
                watcher,
                LatencyOracle(chosen, tokens=80),
                Load(requests=500, seconds=0, rate=12.0),
                Trouble(every_s=2.0, freeze_s=6.0, most=20, spared=frozenset({"router-0"})),
                chosen,
            )
            result = await chaos.run()
        show(result)
        assert result.ended == 500
        assert result.pulls > 50

    asyncio.run(main())


@dataclass(frozen=True, slots=True)
class Share:
    """Of the real model's test: as much of it as two cores do in about a minute, or, by `CHAOS_LONG=1`, the
    whole in ten."""

    requests: int
    rate: float
    tokens: int
    kinds: int
    prompt_words: int
    faults: int
    every_s: float


SHARE = Share(30, 1.5, tokens=24, kinds=6, prompt_words=0, faults=7, every_s=3.0)
if os.environ.get("CHAOS_LONG"):
    SHARE = Share(500, 2.0, tokens=8, kinds=24, prompt_words=60, faults=40, every_s=9.0)


@pytest.mark.model
def test_a_real_model_says_the_same_through_kills_and_freezes(tmp_path: Path) -> None:
    async def main() -> None:
        chosen = seed()
        print(f"seed {chosen}")
        # In bfloat16, which some processors have, a greedy answer may change with the batch it is in.
        engine = ("--engine.kv-memory-bytes", str(96 << 20), "--engine.dtype", "float32")
        flags = {"router": ROUTER, "prefill": (*WORKER, *engine), "decode": (*WORKER, *engine)}
        async with running(tmp_path, Plan("smollm2", 1, 2, 1, flags)) as (fleet, watcher):
            oracle = CalmOracle("smollm2-135m-instruct", SHARE.tokens, SHARE.kinds, SHARE.prompt_words)
            await oracle.learn(fleet.address("router-0"))
            chaos = Chaos(
                fleet,
                watcher,
                oracle,
                # On a machine that is busy they wait for each other before they ask, not while.
                Load(requests=SHARE.requests, seconds=0, rate=SHARE.rate, most=12, limit_s=300.0),
                Trouble(
                    every_s=SHARE.every_s, freeze_s=4.0, most=SHARE.faults, spared=frozenset({"router-0"})
                ),
                chosen,
            )
            result = await chaos.run()
        show(result)
        assert result.ended == SHARE.requests

    asyncio.run(main())
