"""The whole fleet under faults, in virtual time: every request ends, once, and with the right text."""

from __future__ import annotations

import asyncio

import pytest
from whole_fleet import Answer, Box, workload

from engine.settings import EngineSettings
from fleet.errors import Unavailable
from fleet.handoff import CancelReason
from fleet.member import MemberState, Role
from fleet.request import FinishReason, Sampling
from fleet.stages import Stage, Timeline
from fleet.virtual_time import run
from kv_transfer.settings import TransferSettings
from router.settings import CostSettings, RouterSettings

REMOTE = RouterSettings(cost=CostSettings(local_prefill_tokens=0, local_advantage=1e9))
"""Every prompt goes to the prefill pool while that has a worker."""


async def clients(box: Box, count: int, seed: int) -> list[asyncio.Task[Answer]]:
    async def client(number: int, at: float, prompt: list[int], sampling: Sampling) -> Answer:
        await asyncio.sleep(at)
        request = box.request(prompt, sampling, number)
        answer = await box.ask(request)
        if answer.error is None:
            assert answer.tokens == box.truth(request), answer.request
        return answer

    return [asyncio.create_task(client(i, *row)) for i, row in enumerate(workload(count, seed))]


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("at", [0.05, 0.5, 1.3])
def test_a_killed_worker_costs_latency_only(victim: str, at: float) -> None:
    async def main() -> None:
        async with Box(2, 2) as box:
            asked = await clients(box, 150, seed=3)
            await asyncio.sleep(at)
            await box.kill(victim)
            await asyncio.sleep(0.7)
            box.start(Role(victim.partition("-")[0]), victim)
            for answer in await asyncio.gather(*asked):
                assert answer.error is None, (answer.request, answer.error)

    run(main(), horizon_s=3600)


def test_a_stream_waits_for_room_when_its_worker_dies_and_the_other_is_full() -> None:
    async def main() -> None:
        engine = EngineSettings(block_size=16, max_batch=3, max_step_tokens=64, max_waiting=1)
        async with Box(0, 2, engine=engine) as box:
            requests = [
                box.request(range(20), Sampling(max_tokens=400, seed=number), number) for number in range(6)
            ]
            asked = []
            for request in requests:
                asked.append(asyncio.create_task(box.ask(request)))
                await asyncio.sleep(0.1)
            await box.kill("decode-0")
            for request, answer in zip(requests, await asyncio.gather(*asked), strict=True):
                assert answer.error is None, answer.error
                assert answer.tokens == box.truth(request)
            assert box.router.flow.counters["refusals"] > 0

    run(main(), horizon_s=600)


def test_no_prefill_worker_means_local_prefill() -> None:
    async def main() -> None:
        async with Box(1, 1, router=REMOTE) as box:
            await box.kill("prefill-0")
            request = box.request(range(300), Sampling(max_tokens=5), 1)
            answer = await box.ask(request)
            assert answer.error is None
            assert answer.tokens == box.truth(request)
            (decode,) = box.workers.values()
            assert decode.load().counters["local_prefills"] == 1

    run(main(), horizon_s=60)


def test_no_decode_worker_is_a_clear_error_at_once() -> None:
    async def main() -> None:
        async with Box(1, 1) as box:
            await box.kill("decode-0")
            start = asyncio.get_running_loop().time()
            answer = await box.ask(box.request(range(300), Sampling(max_tokens=5), 1))
            assert isinstance(answer.error, Unavailable)
            assert asyncio.get_running_loop().time() - start < 1.0

    run(main(), horizon_s=60)


@pytest.mark.parametrize("fault", ["corrupt", "drop", "slow"])
def test_kv_that_does_not_come_whole_is_computed_again(fault: str) -> None:
    async def main() -> None:
        async with Box(1, 1, router=REMOTE, transfer=TransferSettings(lease_s=2.0)) as box:
            source = box.workers["prefill-0"].transfer.address  # type: ignore[index]
            if fault == "corrupt":
                box.hub.corrupt(source)
            elif fault == "drop":
                box.hub.drop(source)
            else:
                box.hub.delay(source, 30.0)
            request = box.request(range(500), Sampling(max_tokens=20), 1)
            answer = await box.ask(request)
            assert answer.error is None
            assert answer.tokens == box.truth(request)
            decode = box.workers["decode-0"].load().counters  # type: ignore[index]
            assert decode["pulls_recomputed"] == 1
            if fault == "corrupt":
                assert decode["checksum_mismatches"] == 1
            if fault == "slow":
                await asyncio.sleep(120)

    run(main(), horizon_s=600)


def test_second_turn_moves_only_what_decode_lacks() -> None:
    async def main() -> None:
        async with Box(1, 1, router=REMOTE) as box:
            first = box.request(range(200), Sampling(max_tokens=40), 1)
            answer = await box.ask(first)
            prefill, decode = (box.workers[name] for name in ("prefill-0", "decode-0"))  # type: ignore[index]
            before = decode.load().counters
            assert before["pulled_tokens"] == 200
            prompt = [*first.prompt, *answer.tokens, *range(500, 550)]
            second = await box.ask(box.request(prompt, Sampling(max_tokens=5), 2))
            assert second.tokens == box.truth(box.request(prompt, Sampling(max_tokens=5), 2))
            after = decode.load().counters
            # Decode wrote the first answer itself: full blocks of prompt and answer are there (239 // 16).
            assert after["pull_hit_tokens"] - before["pull_hit_tokens"] == 224
            assert after["pulled_tokens"] - before["pulled_tokens"] == len(prompt) - 224
            # Prefill holds the first prompt's full blocks, and brings what follows from decode.
            assert second.end is not None
            assert second.end.usage.cached_tokens == 224
            assert prefill.load().counters["cached_tokens"] == 192
            assert prefill.load().counters["borrowed_tokens"] == 32

    run(main(), horizon_s=60)


def test_clients_that_leave_at_any_token_free_everything() -> None:
    async def main() -> None:
        async with Box(2, 2, router=REMOTE) as box:
            rows = workload(120, seed=5)

            async def client(number: int, at: float, prompt: list[int], sampling: Sampling) -> None:
                await asyncio.sleep(at)
                request = box.request(prompt, Sampling(max_tokens=40), number)
                answer = await box.ask(request, stop_after=1 + number % 39)
                assert answer.tokens == box.truth(request)[: len(answer.tokens)]

            await asyncio.gather(*(client(i, *row) for i, row in enumerate(rows)))

    run(main(), horizon_s=600)


@pytest.mark.parametrize("after_s", [0.0, 0.0003, 0.002, 0.05, 0.12, 0.2])
def test_a_client_that_vanishes_in_any_phase_frees_everything(after_s: float) -> None:
    async def main() -> None:
        async with Box(1, 1, router=REMOTE) as box:
            request = box.request(range(1000), Sampling(max_tokens=100), 1)
            flow = box.router.flow.start(request, Timeline(asyncio.get_running_loop().time()))

            async def read() -> None:
                async for _ in flow:
                    pass

            reader = asyncio.create_task(read())
            await asyncio.sleep(after_s)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await flow.stop(CancelReason.CLIENT)

    run(main(), horizon_s=60)


def test_pools_nearly_full_finish_everything() -> None:
    async def main() -> None:
        engine = EngineSettings(block_size=16, max_batch=16, max_step_tokens=256)
        async with Box(1, 1, blocks=140, engine=engine) as box:
            asked = await clients(box, 60, seed=9)
            for answer in await asyncio.gather(*asked):
                assert answer.error is None, answer.error
                assert answer.end is not None
                assert answer.end.finish is FinishReason.LENGTH

    run(main(), horizon_s=3600)


def test_a_drained_worker_loses_nothing_and_leaves() -> None:
    async def main() -> None:
        async with Box(2, 2) as box:
            asked = await clients(box, 120, seed=13)
            await asyncio.sleep(0.6)
            for name in ("prefill-1", "decode-1"):
                worker = box.workers.pop(name)  # type: ignore[call-overload]
                assert worker.chassis.begin_drain(60.0) is MemberState.DRAINING
                assert worker.task is not None
                await worker.task
                worker.engine.validate(idle=True)
            for answer in await asyncio.gather(*asked):
                assert answer.error is None, answer.error

    run(main(), horizon_s=3600)


def test_bus_and_registry_away_cost_nothing_but_knowledge() -> None:
    async def main() -> None:
        async with Box(2, 2) as box:
            box.bus.up = False
            box.registry.up = False
            for answer in await asyncio.gather(*await clients(box, 100, seed=17)):
                assert answer.error is None, answer.error
            box.registry.wipe()
            box.bus.up = True
            box.registry.up = True
            for answer in await asyncio.gather(*await clients(box, 100, seed=19)):
                assert answer.error is None, answer.error
            await box.until(lambda: not box.router.index.unproven())

    run(main(), horizon_s=3600)


def test_timeline_has_every_stage_of_a_hand_off() -> None:
    async def main() -> None:
        async with Box(1, 1, router=REMOTE) as box:
            answer = await box.ask(box.request(range(600), Sampling(max_tokens=4), 1))
            assert answer.timeline is not None
            marks = answer.timeline.marks
            order = [
                Stage.PREFILL_SENT,
                Stage.PREFILL_STARTED,
                Stage.FIRST_TOKEN,
                Stage.DECODE_SENT,
                Stage.PULL_STARTED,
                Stage.PULL_ENDED,
                Stage.SECOND_TOKEN,
                Stage.ENDED,
            ]
            times = [marks[stage] for stage in order]
            assert times == sorted(times)

    run(main(), horizon_s=60)


def test_streams_go_on_when_the_last_decode_worker_is_lost_and_started_again() -> None:
    async def main() -> None:
        async with Box(1, 2) as box:
            requests = [box.request(range(n, n + 200), Sampling(max_tokens=400), n) for n in range(12)]
            asked = [asyncio.create_task(box.ask(request)) for request in requests]
            await asyncio.sleep(0.6)
            for name in ("decode-0", "decode-1"):
                await box.kill(name)
            assert not any(task.done() for task in asked)
            await asyncio.sleep(10.0)
            late = await box.ask(box.request(range(300), Sampling(max_tokens=5), 99))
            assert isinstance(late.error, Unavailable), "its client can come again, and is told at once"
            box.start(Role.DECODE, "decode-0")
            for request, answer in zip(requests, await asyncio.gather(*asked), strict=True):
                assert answer.error is None, (answer.request, answer.error)
                assert answer.tokens == box.truth(request)

    run(main(), horizon_s=3600)
