"""KV goes to where it is needed: a prompt's beginning comes from whoever caches it, or is computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from test_early_handoff import Device, devices
from whole_fleet import Answer, Box

from engine.settings import EngineSettings
from fleet.ids import RequestId, WorkerId
from fleet.request import Sampling
from fleet.virtual_time import run
from kv_transfer.loopback import Damage
from kv_transfer.settings import TransferSettings
from router.settings import AdmissionMode, AdmissionSettings, CostSettings, RouterSettings

COST = CostSettings(local_prefill_tokens=0, local_advantage=1e9)
ROUTER = RouterSettings(cost=COST, admission=AdmissionSettings(AdmissionMode.OFF))
STEPS = EngineSettings(block_size=16, max_batch=16, max_step_tokens=128)
"""A prompt of 1,000 tokens takes 8 steps, 0.24 s."""
FIRST = range(1000)
ANSWER = Sampling(max_tokens=20, temperature=1.0, seed=3)
HELD = 1008
"""Of the first turn's 1,019 tokens with KV, those in full blocks."""


def counter(box: Box, name: str) -> int:
    return sum(worker.load().counters.get(name, 0) for worker in box.workers.values())


def of(box: Box, worker: str, name: str) -> int:
    return box.workers[WorkerId(worker)].load().counters[name]


def right(box: Box, answer: Answer, prompt: list[int]) -> None:
    assert answer.error is None, answer.error
    assert answer.tokens == box.truth(box.request(prompt, ANSWER, 0))
    assert answer.ends == 1


def why(box: Box, answer: Answer) -> str:
    record = box.router.flow.records.get(answer.request)
    assert record is not None
    return "; ".join(step.why for step in record.transitions)


MUCH = RequestId("much")


def overload(box: Box, worker: str) -> None:
    """As far as the router knows, it has a long queue."""
    box.router.roster.sent(WorkerId(worker), MUCH, 100_000, 0)


@asynccontextmanager
async def second_turn(
    prefill: int, decode: int, busy: str, **settings: object
) -> AsyncIterator[tuple[Box, list[int]]]:
    """A fleet of which `busy` alone served a first turn, and is busy now; the second turn's prompt."""
    given = {"engine": STEPS, "router": ROUTER, **settings}
    async with Box(prefill, decode, **given) as box:  # type: ignore[arg-type]
        role, _, number = busy.partition("-")
        count = prefill if role == "prefill" else decode
        others = [f"{role}-{n}" for n in range(count) if n != int(number)]
        for other in others:
            await box.kill(other)
        first = await box.ask(box.request(FIRST, ANSWER, 1))
        assert first.error is None
        kind = box.workers[WorkerId(busy)].role
        for other in others:
            box.start(kind, other)
        await box.until(box.ready)
        await asyncio.sleep(0.5)
        overload(box, busy)
        yield box, [*FIRST, *first.tokens, *range(2000, 2060)]
        for standing in box.router.roster.workers():
            box.router.roster.settle(standing.id, MUCH)


def test_a_second_turn_goes_elsewhere_and_its_blocks_with_it() -> None:
    """Prefill to prefill, and decode to prefill to decode."""
    waits = {}

    async def main(advantage: float) -> None:
        router = replace(ROUTER, cost=replace(COST, borrow_advantage=advantage))
        async with second_turn(2, 1, "prefill-0", router=router) as (box, prompt):
            # The decode worker has more of it than the prefill worker: what it has generated too.
            begun = asyncio.get_running_loop().time()
            answer = await box.ask(box.request(prompt, ANSWER, 2))
            right(box, answer, prompt)
            waits[advantage] = answer.times[0] - begun
            assert answer.end is not None
            if not advantage:
                assert of(box, "prefill-1", "computed_tokens") == len(prompt)
                assert answer.end.usage.cached_tokens == counter(box, "borrows") == 0
                return
            assert "borrows 63 blocks of decode-0 in" in why(box, answer)
            assert of(box, "prefill-1", "computed_tokens") == len(prompt) - HELD
            assert of(box, "prefill-1", "borrowed_tokens") == HELD
            assert of(box, "decode-0", "loaned_blocks") == HELD // 16
            assert answer.end.usage.cached_tokens == HELD
            assert counter(box, "borrows_failed") == counter(box, "pulls_recomputed") == 0
            assert box.router.flow.counters["borrows"] == 1

    for advantage in (2.0, 0.0):
        run(main(advantage), horizon_s=60)
    assert waits[2.0] < 0.5 * waits[0.0]


def test_decode_workers_bring_of_each_other() -> None:
    async def main() -> None:
        async with second_turn(0, 2, "decode-0") as (box, prompt):
            answer = await box.ask(box.request(prompt, ANSWER, 2))
            right(box, answer, prompt)
            assert "borrows 63 blocks of decode-0 in" in why(box, answer)
            assert of(box, "decode-1", "borrowed_tokens") == HELD
            assert of(box, "decode-1", "computed_tokens") == len(prompt) - HELD + len(answer.tokens) - 1
            # And from then on it has them itself.
            before = counter(box, "borrows")
            right(box, await box.ask(box.request(prompt, ANSWER, 3)), prompt)
            assert counter(box, "borrows") == before

    run(main(), horizon_s=60)


def test_prefill_workers_bring_of_each_other() -> None:
    async def main() -> None:
        async with second_turn(2, 1, "prefill-0") as (box, _):
            await box.kill("decode-0")
            box.start(box.workers[WorkerId("prefill-0")].role.DECODE, "decode-0")
            await box.until(box.ready)
            await asyncio.sleep(0.5)
            overload(box, "prefill-0")
            prompt = [*FIRST, *range(500, 900)]
            answer = await box.ask(box.request(prompt, ANSWER, 2))
            right(box, answer, prompt)
            assert "borrows 62 blocks of prefill-0 in" in why(box, answer)
            assert of(box, "prefill-1", "computed_tokens") == len(prompt) - 992
            assert counter(box, "early_reservations") == 1, "the rest takes several steps: it is lent early"

    run(main(), horizon_s=60)


def test_tenants_do_not_share() -> None:
    async def main() -> None:
        async with second_turn(2, 1, "prefill-0") as (box, prompt):
            other = replace(box.request(prompt, ANSWER, 2), salt="another tenant")
            answer = await box.ask(other)
            right(box, answer, prompt)
            assert counter(box, "borrows") == counter(box, "loans") == counter(box, "loans_empty") == 0
            assert of(box, "prefill-1", "computed_tokens") == len(prompt)

    run(main(), horizon_s=60)


def test_a_prompt_that_is_scored_is_computed() -> None:
    async def main() -> None:
        async with second_turn(2, 1, "prefill-0") as (box, prompt):
            answer = await box.ask(box.request(prompt, replace(ANSWER, prompt_logprobs=0), 2))
            assert answer.error is None
            assert counter(box, "borrows") == 0
            assert of(box, "prefill-1", "computed_tokens") == len(prompt)

    run(main(), horizon_s=60)


@pytest.mark.parametrize("how", list(Damage))
def test_blocks_that_are_not_what_was_promised_are_computed(how: Damage) -> None:
    async def main() -> None:
        async with second_turn(2, 1, "prefill-0") as (box, prompt):
            box.hub.corrupt(box.workers[WorkerId("decode-0")].transfer.address, 1, how)
            answer = await box.ask(box.request(prompt, ANSWER, 2))
            right(box, answer, prompt)
            assert counter(box, "checksum_mismatches") == counter(box, "borrows_failed") == 1
            assert of(box, "prefill-1", "borrowed_tokens") == 0
            assert of(box, "prefill-1", "computed_tokens") == len(prompt)

    run(main(), horizon_s=60)


def test_what_came_before_it_broke_is_kept() -> None:
    """A long beginning comes in parts."""

    async def main() -> None:
        steps = replace(STEPS, block_size=4)
        async with second_turn(2, 1, "prefill-0", engine=steps, blocks=4096) as (box, prompt):
            source = box.workers[WorkerId("decode-0")].transfer.address
            asked = asyncio.create_task(box.ask(box.request(prompt, ANSWER, 2)))
            await box.until(lambda: of(box, "prefill-1", "pulls") == 2)
            box.hub.corrupt(source)
            answer = await asked
            right(box, answer, prompt)
            assert of(box, "prefill-1", "borrowed_tokens") == 2 * 64 * 4
            assert of(box, "prefill-1", "computed_tokens") == len(prompt) - 2 * 64 * 4

    run(main(), horizon_s=60)


def test_blocks_that_are_gone_by_then_are_computed() -> None:
    """Evicted after the router has looked."""

    async def main() -> None:
        async with second_turn(2, 1, "prefill-0", blocks=160) as (box, prompt):
            asked = asyncio.create_task(box.ask(box.request(prompt, ANSWER, 2)))
            pool = box.workers[WorkerId("decode-0")].engine._scheduler.pool
            pool.release(pool.allocate(pool.available))  # All that can be evicted is.
            answer = await asked
            right(box, answer, prompt)
            assert of(box, "decode-0", "loans_empty") == counter(box, "borrows_failed") == 1
            assert of(box, "prefill-1", "computed_tokens") == len(prompt)

    run(main(), horizon_s=60)


def test_a_worker_lends_no_more_than_its_share() -> None:
    async def main() -> None:
        steps = replace(STEPS, lend_share=0.25)
        async with second_turn(2, 1, "prefill-0", engine=steps, blocks=160) as (box, prompt):
            answer = await box.ask(box.request(prompt, ANSWER, 2))
            right(box, answer, prompt)
            assert of(box, "decode-0", "loaned_blocks") == 40
            assert of(box, "prefill-1", "borrowed_tokens") == 640
            assert counter(box, "borrows_failed") == 1

    run(main(), horizon_s=60)


@pytest.mark.parametrize("borrow_limit_s", [0.0, 0.004, 2.0])
def test_it_takes_no_longer_than_is_set_or_than_to_compute_it(borrow_limit_s: float) -> None:
    async def main() -> None:
        links = TransferSettings(borrow_limit_s=borrow_limit_s)
        async with second_turn(2, 1, "prefill-0", transfer=links) as (box, prompt):
            box.hub.freeze(box.workers[WorkerId("decode-0")].transfer.address)
            # It is the link that does not work: what decodes brings of prefill is as ever.
            at = asyncio.get_running_loop().time()
            answer = await box.ask(box.request(prompt, ANSWER, 2))
            right(box, answer, prompt)
            speed = box.workers[WorkerId("prefill-0")].load().prefill_tokens_s
            assert speed is not None
            compute_s = len(prompt) / speed
            assert counter(box, "borrows") == bool(borrow_limit_s)
            # The other one has computed nothing yet: it goes by what the router expects of its like.
            assert answer.times[0] - at <= 1.1 * compute_s + min(borrow_limit_s, 1.1 * compute_s) + 0.05
            box.hub.thaw(box.workers[WorkerId("decode-0")].transfer.address)

    run(main(), horizon_s=60)


STAGES = ("connect", "borrow", "read", "leave")
"""Everything that a borrower says to its source."""


def at_stage(box: Box, stage: str, then: Callable[[], None]) -> None:
    """Does it as the first message of that kind between decode-1 and decode-0 is about to go."""
    reader, source = (box.workers[WorkerId(w)].transfer.address for w in ("decode-1", "decode-0"))
    done = []

    def tap(by: str, to: str, what: str) -> None:
        if (by, to, what) == (reader, source, stage) and not done:
            done.append(stage)
            asyncio.get_running_loop().call_soon(then)

    box.hub.tap = tap


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["kill", "freeze", "cut", "part"])
def test_a_source_that_is_lost_at_any_stage_costs_latency_only(stage: str, how: str) -> None:
    async def main() -> None:
        async with second_turn(0, 2, "decode-0", transfer=TransferSettings(lease_s=2.0)) as (box, prompt):
            process = box.workers[WorkerId("decode-0")].process
            reader, source = (box.workers[WorkerId(w)].transfer.address for w in ("decode-1", "decode-0"))
            at_stage(
                box,
                stage,
                {
                    "kill": lambda: box.crash("decode-0"),
                    "freeze": process.stop,
                    "cut": lambda: box.hub.cut(source),
                    "part": lambda: box.hub.part(reader, source),
                }[how],
            )
            answer = await box.ask(box.request(prompt, ANSWER, 2))
            right(box, answer, prompt)
            assert of(box, "decode-1", "borrows") == 1
            process.resume()
            box.hub.heal(reader, source)
            if how == "kill":
                box.start(box.workers[WorkerId("decode-1")].role, "decode-0")
            await box.until(box.ready)
            if stage == "borrow":
                await asyncio.sleep(2.5)  # What it lends when it is back ends by its own limit.

    run(main(), horizon_s=600)


@pytest.mark.parametrize("stage", [*STAGES, "later"])
def test_who_gives_up_at_any_stage_leaves_nothing(stage: str) -> None:
    async def main() -> None:
        async with second_turn(0, 2, "decode-0") as (box, prompt):
            asked = asyncio.create_task(box.ask(box.request(prompt, ANSWER, 2)))
            if stage != "later":
                at_stage(box, stage, lambda: asked.cancel() and None)
            else:
                asyncio.get_running_loop().call_later(0.03, asked.cancel)
            await asyncio.gather(asked, return_exceptions=True)
            assert asked.cancelled()
            # A loan whose borrower went before it was told ends by its own limit.
            await asyncio.sleep(2.5 if stage == "borrow" else 0.5)
            for worker in box.workers.values():
                worker.transfer.validate(idle=True)
                worker.engine.validate(idle=True)

    run(main(), horizon_s=600)


def test_pools_in_devices_lend_and_borrow() -> None:
    made: list[Device] = []

    async def main(broken: bool) -> None:
        async with second_turn(0, 2, "decode-0", replica=devices(made)) as (box, prompt):
            made[0].broken = broken
            answer = await box.ask(box.request(prompt, ANSWER, 2))
            right(box, answer, prompt)
            assert of(box, "decode-1", "borrowed_tokens") == (0 if broken else HELD)
            made[0].broken = False
            made.clear()

    for broken in (False, True):
        run(main(broken), horizon_s=60)
