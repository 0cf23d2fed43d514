"""A worker of the whole fleet takes another role under load, in virtual time: nothing is lost of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from test_faults import REMOTE, clients
from whole_fleet import LATENCY, Box, BoxWorker, Memory

from engine.latency_runner import LatencyRunner
from engine.runner import Runner
from engine.settings import EngineSettings
from engine.words import Batch, BatchResult
from fleet.chassis import ChassisSettings
from fleet.errors import BadRequest, Unavailable
from fleet.ids import WorkerId
from fleet.kv_layout import KvLayout
from fleet.member import MemberState, Role
from fleet.request import Sampling
from fleet.virtual_time import run


def worker_of(box: Box, name: str) -> BoxWorker:
    return box.workers[WorkerId(name)]


async def ask_role(box: Box, name: str, role: Role, limit_s: float = 60.0) -> MemberState:
    """As an operator does: over the wire."""
    return await box.wire.wire("operator").take_role(worker_of(box, name).address, role, limit_s, 5.0)


def has_role(box: Box, name: str, role: Role) -> bool:
    """The worker and the router's picture of it agree."""
    standing = box.router.roster.get(WorkerId(name))
    return worker_of(box, name).chassis.card.role is role and (
        standing is not None and standing.usable and standing.card.role is role
    )


async def turn(box: Box, name: str, role: Role, limit_s: float = 60.0) -> None:
    assert await ask_role(box, name, role, limit_s) is MemberState.DRAINING
    await box.until(lambda: has_role(box, name, role))


@pytest.mark.parametrize(("name", "role"), [("prefill-1", Role.DECODE), ("decode-1", Role.PREFILL)])
def test_a_role_changed_under_load_and_back_loses_nothing(name: str, role: Role) -> None:
    async def main() -> None:
        async with Box(2, 2, router=REMOTE) as box:
            asked = await clients(box, 150, seed=21)
            await asyncio.sleep(0.5)
            life = worker_of(box, name).incarnation
            links = dict(box.router.links)
            own = Role(name.partition("-")[0])
            await turn(box, name, role)
            assert not all(client.done() for client in asked), "no load to change under"
            await turn(box, name, own)
            for answer in await asyncio.gather(*asked):
                assert answer.error is None, (answer.request, answer.error)
            assert worker_of(box, name).incarnation == life
            assert box.router.links == links, "sessions stay"
            assert box.router.flow.counters["failovers"] == 0, "everything ended where it ran"

    run(main(), horizon_s=3600)


def test_twenty_changes_under_load_lose_nothing_and_leave_nothing() -> None:
    async def main() -> None:
        async with Box(2, 2, router=REMOTE) as box:
            asked = await clients(box, 300, seed=22)
            for number in range(10):
                name = ("prefill-1", "decode-1")[number % 2]
                other = (Role.DECODE, Role.PREFILL)[number % 2]
                await turn(box, name, other)
                await turn(box, name, Role(name.partition("-")[0]))
            for answer in await asyncio.gather(*asked):
                assert answer.error is None, (answer.request, answer.error)
            # Nobody lost count of any block over it.
            await box.until(lambda: all(router.proven() for router in box.routers.values()))

    run(main(), horizon_s=3600)


def test_what_was_cached_before_is_hit_after() -> None:
    async def main() -> None:
        async with Box(1, 1, router=REMOTE) as box:
            first = box.request(range(400), Sampling(max_tokens=4), 1)
            await box.ask(first)
            events = worker_of(box, "prefill-0").chassis.snapshot().sequence
            await turn(box, "prefill-0", Role.DECODE)
            await box.kill("decode-0")
            assert box.router.index.blocks(WorkerId("prefill-0")) == 400 // 16
            again = box.request((*range(400), 7, 8, 9), Sampling(max_tokens=4), 2)
            answer = await box.ask(again)
            assert answer.error is None
            assert answer.tokens == box.truth(again)
            assert answer.end is not None
            assert answer.end.usage.cached_tokens == 400
            assert worker_of(box, "prefill-0").chassis.snapshot().sequence >= events, "numbered on"

    run(main(), horizon_s=600)


def test_a_lease_outlives_the_change_and_may_be_pulled_by_its_own_worker() -> None:
    async def main() -> None:
        async with Box(1, 1, router=REMOTE) as box:
            source = worker_of(box, "prefill-0")
            # The decode worker is never told: the KV waits under its lease.
            box.wire.partition("router", worker_of(box, "decode-0").address)
            request = box.request(range(300), Sampling(max_tokens=30), 1)
            asked = asyncio.create_task(box.ask(request))
            await box.until(lambda: source.transfer.leases == 1)
            await turn(box, "prefill-0", Role.DECODE)
            assert source.transfer.leases == 1
            assert not source.service.idle()
            await box.kill("decode-0")
            answer = await asked
            assert answer.error is None
            assert answer.tokens == box.truth(request)
            assert source.load().counters["local_prefills"] == 0, "its own lease was found again"

    run(main(), horizon_s=600)


@pytest.mark.parametrize("limit_s", [0.0, 0.2])
def test_at_the_limit_the_rest_goes_on_elsewhere(limit_s: float) -> None:
    async def main() -> None:
        async with Box(1, 2) as box:
            requests = [box.request(range(n, n + 100), Sampling(max_tokens=400), n) for n in range(8)]
            asked = [asyncio.create_task(box.ask(request)) for request in requests]
            await box.until(lambda: worker_of(box, "decode-0").load().running > 0)
            before = asyncio.get_running_loop().time()
            await turn(box, "decode-0", Role.PREFILL, limit_s)
            assert asyncio.get_running_loop().time() - before < limit_s + 1.0
            for request, answer in zip(requests, await asyncio.gather(*asked), strict=True):
                assert answer.error is None, answer.error
                assert answer.tokens == box.truth(request)
            assert box.router.flow.counters["failovers"] > 0

    run(main(), horizon_s=3600)


def test_a_second_wish_has_a_clear_outcome() -> None:
    async def main() -> None:
        async with Box(2, 2) as box:
            name = "decode-1"
            worker = worker_of(box, name)
            assert await ask_role(box, name, Role.DECODE) is MemberState.READY, "it is one already"
            request = box.request(range(50), Sampling(max_tokens=200), 1)
            worker_of(box, "decode-0").chassis.begin_turn(Role.PREFILL, 60.0)
            await box.until(lambda: has_role(box, "decode-0", Role.PREFILL))
            asked = asyncio.create_task(box.ask(request))
            await box.until(lambda: worker.load().running == 1)
            # Twice the same: one change.
            assert await ask_role(box, name, Role.PREFILL) is MemberState.DRAINING
            assert await ask_role(box, name, Role.PREFILL) is MemberState.DRAINING
            assert worker.chassis.card.turning is Role.PREFILL
            # Back to what it is: called off, and what runs never knew.
            assert await ask_role(box, name, Role.DECODE) is MemberState.READY
            assert worker.chassis.card.turning is None
            await box.until(lambda: has_role(box, name, Role.DECODE))
            # A drain ends in leaving, whatever was asked before; then no role is taken any more.
            assert await ask_role(box, name, Role.PREFILL) is MemberState.DRAINING
            box.workers.pop(worker.id)
            operator = box.wire.wire("operator")
            assert await operator.drain(worker.address, 60.0, 5.0) is MemberState.DRAINING
            assert worker.chassis.card.turning is None
            for role in Role:
                with pytest.raises(Unavailable, match="is leaving"):
                    await operator.take_role(worker.address, role, 60.0, 5.0)
            assert worker.task is not None
            await worker.task
            assert (await asked).tokens == box.truth(request), "it left after its last token"

    run(main(), horizon_s=600)


def test_a_role_that_is_not_installed_is_refused_and_changes_nothing() -> None:
    async def main() -> None:
        async with Box(1, 1, turns=()) as box:
            chassis = worker_of(box, "decode-0").chassis
            with pytest.raises(BadRequest, match="decode-0 cannot be a prefill worker"):
                await ask_role(box, "decode-0", Role.PREFILL)
            assert chassis.card.state is MemberState.READY

    run(main(), horizon_s=60)


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.3])
def test_killed_in_the_middle_of_a_change_costs_latency_only(after_s: float) -> None:
    async def main() -> None:
        async with Box(2, 2, router=REMOTE) as box:
            asked = await clients(box, 120, seed=23)
            await asyncio.sleep(0.4)
            await ask_role(box, "prefill-1", Role.DECODE)
            await ask_role(box, "decode-1", Role.PREFILL)
            await asyncio.sleep(after_s)
            for name in ("prefill-1", "decode-1"):
                await box.kill(name)
            # Whoever supervises starts them in the new role.
            box.start(Role.DECODE, "prefill-1")
            box.start(Role.PREFILL, "decode-1")
            for answer in await asyncio.gather(*asked):
                assert answer.error is None, (answer.request, answer.error)
            assert has_role(box, "prefill-1", Role.DECODE)

    run(main(), horizon_s=3600)


def test_a_router_with_an_old_picture_is_refused_and_takes_another() -> None:
    async def main() -> None:
        async with Box(2, 1, router=REMOTE) as box:
            box.registry.up = False  # The change of the card is not seen.
            assert await ask_role(box, "prefill-1", Role.DECODE) is MemberState.DRAINING
            chassis = worker_of(box, "prefill-1").chassis
            await box.until(lambda: chassis.card.role is Role.DECODE)
            await asyncio.sleep(1.0)
            for number in range(12):
                request = box.request(range(number, number + 200), Sampling(max_tokens=5), number)
                answer = await box.ask(request)
                assert answer.error is None, answer.error
                assert answer.tokens == box.truth(request)
            assert box.router.flow.counters["refusals"] > 0
            box.registry.up = True
            await box.until(lambda: has_role(box, "prefill-1", Role.DECODE))

    run(main(), horizon_s=600)


class HangingRunner(LatencyRunner):
    """A device whose steps never end from some moment on."""

    hangs = False

    async def run(self, batch: Batch) -> BatchResult:
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        return await super().run(batch)


def test_a_worker_whose_steps_do_not_end_says_so_is_avoided_and_gives_up() -> None:
    async def main() -> None:
        runners: list[HangingRunner] = []

        def replica(settings: EngineSettings) -> tuple[KvLayout, Callable[[Memory], Runner]]:
            layout = LatencyRunner.layout_of(settings.block_size)

            def make(memory: Memory) -> Runner:
                runners.append(HangingRunner(memory, layout, LATENCY))
                return runners[-1]

            return layout, make

        async with Box(1, 2, replica=replica, chassis=ChassisSettings(stalled_limit_s=5.0)) as box:
            names = ("decode-0", "decode-1")
            requests = [box.request(range(n, n + 50), Sampling(max_tokens=300), n) for n in range(8)]
            asked = [asyncio.create_task(box.ask(request)) for request in requests]
            await box.until(lambda: all(worker_of(box, name).load().running > 0 for name in names))
            victim = worker_of(box, "decode-0")
            runners[1].hangs = True  # They are made in the order in which the workers start.
            start = asyncio.get_running_loop().time()
            standing = box.router.roster.get(victim.id)
            assert standing is not None
            await box.until(lambda: not standing.usable)
            assert 5.0 <= asyncio.get_running_loop().time() - start <= 6.0
            assert victim.load().state == MemberState.STALLED
            assert victim.chassis.card.state is MemberState.READY
            before = victim.load().running + victim.load().waiting
            late = box.request(range(500, 600), Sampling(max_tokens=5), 99)
            assert (await box.ask(late)).tokens == box.truth(late)
            assert victim.load().running + victim.load().waiting == before, "new work goes elsewhere"
            why = await victim.chassis.stalled()
            assert 10.0 <= asyncio.get_running_loop().time() - start <= 11.0
            assert "no step has ended for 10 s" in why
            await box.kill("decode-0")
            box.start(Role.DECODE, "decode-0")
            for request, answer in zip(requests, await asyncio.gather(*asked), strict=True):
                assert answer.error is None, answer.error
                assert answer.tokens == box.truth(request)

    run(main(), horizon_s=600)


def test_work_that_waits_for_what_others_have_is_no_stall() -> None:
    async def main() -> None:
        settings = ChassisSettings(stalled_limit_s=5.0)
        async with Box(1, 1, blocks=40, router=REMOTE, chassis=settings) as box:
            # The decode pool is full with one long answer: prompts wait under leases, and others for those.
            requests = [box.request(range(n, n + 250), Sampling(max_tokens=300), n) for n in range(6)]
            asked = [asyncio.create_task(box.ask(request)) for request in requests]
            while not all(client.done() for client in asked):
                for worker in box.workers.values():
                    assert worker.load().state == MemberState.READY
                await asyncio.sleep(0.5)
            for request, answer in zip(requests, await asyncio.gather(*asked), strict=True):
                assert answer.error is None, answer.error
                assert answer.tokens == box.truth(request)

    run(main(), horizon_s=3600)
