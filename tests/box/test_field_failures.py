"""Kinds of failure that others met in the field, on the whole fleet: each ends in time, with right text."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from test_faults import REMOTE
from whole_fleet import LATENCY, Answer, Box, BoxWorker

from decode_worker.settings import DecodeWorkerSettings
from engine.settings import EngineSettings
from fleet.block_hash import HashKeys, block_hashes, short
from fleet.errors import Internal, Overloaded
from fleet.ids import RequestId, WorkerId
from fleet.request import FinishReason, Request, Sampling
from fleet.settings import SettingsError, load
from fleet.virtual_time import run
from kv_transfer.loopback import Damage
from kv_transfer.settings import TransferSettings
from prefill_worker.settings import PrefillWorkerSettings
from router.settings import CostSettings, RouterSettings

BORROWING = RouterSettings(
    cost=CostSettings(
        local_prefill_tokens=0,
        local_advantage=1e9,
        borrow_s=0.0,
        borrow_advantage=1e-9,
        tie_s=0.0,
        tie_share=0.0,
    )
)
"""Whatever another worker caches is asked for."""
SMALL = EngineSettings(block_size=4, max_batch=8, max_step_tokens=40)


def worker_of(box: Box, name: str) -> BoxWorker:
    return box.workers[WorkerId(name)]


def counters_of(box: Box, name: str) -> dict[str, int]:
    return worker_of(box, name).load().counters


async def right(box: Box, request: Request) -> Answer:
    answer = await box.ask(request)
    assert answer.error is None, answer.error
    assert answer.tokens == box.truth(request), request.id
    return answer


def test_kv_whose_lease_expired_and_whose_blocks_others_have_is_computed_again() -> None:
    """The ticket waits for longer than the lease stands; by then the blocks hold other prompts."""

    async def main() -> None:
        transfer = TransferSettings(lease_s=1.0, connect_s=30.0)
        async with Box(
            1, 1, blocks=40, engine=SMALL, router=REMOTE, transfer=transfer, pull_limit_s=8.0
        ) as box:
            source, reader = worker_of(box, "prefill-0"), worker_of(box, "decode-0")
            box.hub.part(reader.transfer.address, source.transfer.address)
            first = asyncio.create_task(right(box, box.request(range(30), Sampling(max_tokens=9), 1)))
            await box.until(lambda: counters_of(box, "prefill-0")["leases_expired"] == 1)
            evicted = counters_of(box, "prefill-0")["block_evictions"]
            # One token each: they need no decode worker, and drive the first one's blocks out.
            for number in range(2, 8):
                prompt = range(100 * number, 100 * number + 36)
                await right(box, box.request(prompt, Sampling(max_tokens=1), number))
            assert counters_of(box, "prefill-0")["block_evictions"] > evicted
            assert not first.done() or first.result().tokens
            box.hub.heal(reader.transfer.address, source.transfer.address)
            await first
            assert counters_of(box, "decode-0")["pulls_recomputed"] == 1
            assert counters_of(box, "decode-0")["pulled_tokens"] == 0

    run(main(), horizon_s=600)


@pytest.mark.parametrize("how", list(Damage))
def test_kv_that_is_not_what_was_promised_is_computed_again_and_counted(how: Damage) -> None:
    async def main() -> None:
        async with Box(1, 1, blocks=80, engine=SMALL, router=REMOTE) as box:
            # What lies in the reader's blocks before is of other prompts.
            for number in range(4):
                prompt = range(50 * number, 50 * number + 48)
                await right(box, box.request(prompt, Sampling(max_tokens=4), number))
            before = counters_of(box, "decode-0")
            box.hub.corrupt(worker_of(box, "prefill-0").transfer.address, how=how)
            await right(box, box.request(range(900, 937), Sampling(max_tokens=12), 9))
            after = counters_of(box, "decode-0")
            assert box.hub.damaged == 1
            for name in ("checksum_mismatches", "pulls_recomputed"):
                assert after[name] - before[name] == 1, name

    run(main(), horizon_s=600)


@pytest.mark.parametrize("hook", ["connect", "read", "ready", "renew", "leave"])
def test_a_transfer_that_raises_anything_at_all_ends_no_more_than_its_request(hook: str) -> None:
    async def main() -> None:
        async with Box(1, 1, engine=SMALL, router=REMOTE, transfer=TransferSettings(lease_s=1.0)) as box:
            left = [1]

            def tap(reader: str, source: str, what: str) -> None:
                if what == hook and left:
                    left.pop()
                    raise ZeroDivisionError(hook)

            box.hub.tap = tap
            outcomes = await asyncio.gather(
                *(
                    box.ask(box.request(range(number, number + 150), Sampling(max_tokens=6), number))
                    for number in range(6)
                )
            )
            assert sum(isinstance(answer.error, Internal) for answer in outcomes) <= 1
            for number, answer in enumerate(outcomes):
                request = box.request(range(number, number + 150), Sampling(max_tokens=6), number)
                assert answer.ends == 1
                assert answer.error is None or isinstance(answer.error, Internal), answer.error
                if answer.error is None:
                    assert answer.tokens == box.truth(request)
            box.hub.tap = lambda reader, source, what: None
            await right(box, box.request(range(700, 760), Sampling(max_tokens=6), 99))

    run(main(), horizon_s=600)


@pytest.mark.parametrize("ahead", [-60.0, 60.0, 1e6])
def test_clocks_that_disagree_neither_lengthen_nor_shorten_a_lease(ahead: float) -> None:
    """Durations cross the wire, and each owner's clock decides."""

    async def main() -> None:
        clocks = {"prefill-0": ahead, "decode-0": -ahead / 3}
        async with Box(
            1, 1, engine=SMALL, router=REMOTE, transfer=TransferSettings(lease_s=1.0),
            clocks=lambda name: clocks.get(name, 0.0),
        ) as box:  # fmt: skip
            source, reader = worker_of(box, "prefill-0"), worker_of(box, "decode-0")
            await right(box, box.request(range(120), Sampling(max_tokens=9), 1))
            # Slow, but within what renewals keep.
            box.hub.delay(source.transfer.address, 0.2)
            await right(box, box.request(range(200, 320), Sampling(max_tokens=9), 2))
            box.hub.delay(source.transfer.address, 0.0)
            assert counters_of(box, "decode-0")["pulls_recomputed"] == 0
            assert counters_of(box, "prefill-0")["leases_expired"] == 0
            box.hub.part(reader.transfer.address, source.transfer.address)
            asked = asyncio.create_task(right(box, box.request(range(400, 520), Sampling(max_tokens=9), 3)))
            await box.until(lambda: source.transfer.leases == 1)
            granted = asyncio.get_running_loop().time()
            await box.until(lambda: source.transfer.leases == 0)
            assert asyncio.get_running_loop().time() - granted < 1.5
            box.hub.heal(reader.transfer.address, source.transfer.address)
            await asked

    run(main(), horizon_s=600)


def test_every_request_to_two_overfull_routers_gets_one_answer_in_time() -> None:
    async def main() -> None:
        engine = EngineSettings(block_size=4, max_batch=2, max_step_tokens=20, max_waiting=1)
        async with Box(1, 1, engine=engine, routers=2, latency=LATENCY) as box:
            answers: list[Answer] = []

            async def client(number: int) -> None:
                request = box.request(range(number, number + 20), Sampling(max_tokens=5), number, 20.0)
                answers.append(answer := Answer(request.id))
                await box.ask_over(box.router_names[number % 2], request, answer)
                if answer.error is None:
                    assert answer.tokens == box.truth(request)

            async with asyncio.timeout(21.0):
                await asyncio.gather(*(client(number) for number in range(500)))
            ends = Counter(type(answer.error).__name__ for answer in answers)
            assert all(answer.ends == 1 for answer in answers)
            assert ends["NoneType"] > 0
            assert ends["Overloaded"] > 100, ends

    run(main(), horizon_s=600)


def test_under_memory_pressure_waits_are_bounded_and_one_that_outgrows_fails_alone() -> None:
    async def main() -> None:
        # 26 blocks of 4 hold two of these sequences, and 8 run at once.
        async with Box(0, 1, blocks=26, engine=SMALL) as box:
            requests = [
                box.request(range(31 * number, 31 * number + 24), Sampling(max_tokens=24), number)
                for number in range(24)
            ]
            outgrows = box.request(range(5000, 5060), Sampling(max_tokens=400), 99)
            asked = [asyncio.create_task(box.ask(request)) for request in (*requests, outgrows)]
            *answers, last = await asyncio.gather(*asked)
            counters = counters_of(box, "decode-0")
            for request, answer in zip(requests, answers, strict=True):
                assert answer.error is None, answer.error
                assert answer.tokens == box.truth(request)
            assert counters["preemptions"] <= 3 * len(requests), "no thrash"
            assert counters["recomputed_tokens"] < counters["computed_tokens"] / 2
            # Nobody waits for his next token longer than a few others take from start to end.
            alone = answers[0].times[-1] - answers[0].times[0]
            gaps = [b - a for answer in answers for a, b in zip(answer.times, answer.times[1:], strict=False)]
            assert max(gaps) < 12 * alone
            assert last.ends == 1
            if last.error is None:
                assert last.end is not None
                assert last.end.finish is FinishReason.LENGTH
            else:
                assert isinstance(last.error, Overloaded)
            assert last.tokens == box.truth(outgrows)[: len(last.tokens)]

    run(main(), horizon_s=3600)


def test_a_late_write_of_a_request_that_was_given_up_lands_on_nobody() -> None:
    """The client leaves in the middle of a read; another takes what room there is, at once."""

    async def main() -> None:
        engine = EngineSettings(block_size=4, max_batch=8, max_step_tokens=128)
        near = RouterSettings(cost=CostSettings(local_prefill_tokens=12, local_advantage=1e9))
        async with Box(1, 1, blocks=40, engine=engine, router=near) as box:
            box.hub.bytes_s = 3e7  # a read of 15 blocks takes 0.18 s, less than its fence
            reading = asyncio.Event()
            box.hub.tap = lambda reader, source, what: reading.set() if what == "read" else None
            given_up = asyncio.create_task(box.ask(box.request(range(60), Sampling(max_tokens=9), 1)))
            await reading.wait()
            await asyncio.sleep(0.03)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            await asyncio.sleep(0.002)
            await asyncio.gather(
                *(
                    right(box, box.request(range(n, n + 8), Sampling(max_tokens=50), n))
                    for n in (200, 300, 400)
                )
            )
            assert counters_of(box, "decode-0")["local_prefills"] == 3

    run(main(), horizon_s=600)


@pytest.mark.parametrize("differs", ["adapter", "salt", "first token", "last token of a block"])
def test_what_differs_in_one_field_finds_nothing_in_any_cache(differs: str) -> None:
    """Not with the worker that holds the other, not with one that would bring it, not in the index."""

    async def main() -> None:
        async with Box(0, 2, engine=SMALL, router=BORROWING) as box:
            prompt = list(range(40))
            first = box.request(prompt, Sampling(max_tokens=2), 1)
            await right(box, first)
            match differs:
                case "adapter" | "salt":
                    other = replace(box.request(prompt, Sampling(max_tokens=2), 2), **{differs: "x"})
                    shared = 0
                case "first token":
                    other, shared = box.request([99, *prompt[1:]], Sampling(max_tokens=2), 2), 0
                case _:
                    changed = [*prompt[:7], 99, *prompt[8:]]
                    other, shared = box.request(changed, Sampling(max_tokens=2), 2), 4
            await asyncio.sleep(1.0)  # The index knows.
            answer = await right(box, other)
            assert answer.end is not None
            assert answer.end.usage.cached_tokens == shared
            assert (
                sum(counters_of(box, name)["borrowed_tokens"] for name in ("decode-0", "decode-1")) <= shared
            )
            again = await right(box, box.request(prompt, Sampling(max_tokens=2), 3))
            assert again.end is not None
            assert again.end.usage.cached_tokens >= 36

    run(main(), horizon_s=600)


def test_names_of_many_blocks_do_not_collide_nor_do_the_64_bits_that_routers_see() -> None:
    kinds = [HashKeys("m", 1, adapter, salt) for adapter in ("", "a") for salt in ("", "a")]
    names = {name for keys in kinds for token in range(1 << 15) for name in block_hashes((token,), keys)}
    assert len(names) == len({short(name) for name in names}) == 1 << 17


@pytest.mark.parametrize(
    "wish",
    ["engine.tensor-parallel=2", "engine.pipeline-parallel=2", "engine.tiers=host", "transfer.store=redis"],
)
@pytest.mark.parametrize("settings", [DecodeWorkerSettings, PrefillWorkerSettings])
def test_what_there_is_not_is_refused_by_name(settings: type, wish: str) -> None:
    """Neither pools over several devices nor stores outside of the workers: nobody is to believe in them."""
    with pytest.raises(SettingsError, match=wish.partition("=")[0]):
        load(settings, [f"--{wish}"], {})


@pytest.mark.parametrize("fault", ["part", "freeze", "corrupt"])
def test_a_cache_elsewhere_that_fails_in_any_way_is_a_miss(fault: str) -> None:
    """What others keep in a store beside the fleet, workers bring of each other; its loss costs time only."""

    async def main() -> None:
        async with Box(0, 2, engine=SMALL, router=BORROWING, transfer=TransferSettings(lease_s=2.0)) as box:
            prompt = list(range(120))
            await right(box, box.request(prompt, Sampling(max_tokens=2), 1))
            await asyncio.sleep(1.0)  # The index knows.
            holder = next(n for n in ("decode-0", "decode-1") if counters_of(box, n)["computed_tokens"])
            reader = "decode-1" if holder == "decode-0" else "decode-0"
            # As far as the router knows, the holder has a long queue.
            box.router.roster.sent(WorkerId(holder), RequestId("much"), 100_000, 0)
            address = worker_of(box, holder).transfer.address
            own = worker_of(box, reader).transfer.address
            getattr(box.hub, fault)(*((own, address) if fault == "part" else (address,)))
            at = asyncio.get_running_loop().time()
            answer = await right(box, box.request(prompt, Sampling(max_tokens=2), 2))
            assert counters_of(box, reader)["borrows"] == counters_of(box, reader)["borrows_failed"] == 1
            assert answer.end is not None
            assert answer.end.usage.cached_tokens == 0
            assert answer.times[0] - at < 2.5, "bounded by the limit of borrowing, and computing"
            box.hub.thaw(address)
            box.hub.heal(own, address)
            box.router.roster.settle(WorkerId(holder), RequestId("much"))

    run(main(), horizon_s=600)
