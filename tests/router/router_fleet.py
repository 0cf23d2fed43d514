"""A router and scripted workers on memory plumbing, in virtual time; shared by the tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from scripted_worker import Script, ScriptedWorker, answer, card

from fleet import virtual_time
from fleet.bus.memory import MemoryHub as BusHub
from fleet.card_codec import encode_card
from fleet.errors import FleetError
from fleet.events import kv_subject, load_subject
from fleet.handoff import CancelReason
from fleet.ids import WorkerId
from fleet.member import Role, WorkerCard, worker_key
from fleet.registry.memory import MemoryHub as RegistryHub
from fleet.request import Request
from fleet.stages import Timeline
from fleet.wire.codec import encode_kv_events, encode_load_report
from fleet.wire.memory import MemoryHub as WireHub
from fleet.wire.session import WireSettings
from router.run import RunEnd, RunToken, Terms
from router.settings import CostSettings, RouterSettings
from router.watcher import Router

T = TypeVar("T")

REMOTE = RouterSettings(cost=CostSettings(local_prefill_tokens=0, local_advantage=1e9))
"""Prompts go to prefill workers while there are any."""


@dataclass
class Fleet:
    """A router and scripted workers on memory plumbing."""

    settings: RouterSettings = REMOTE
    wire: WireHub = field(default_factory=lambda: WireHub(WireSettings(heartbeat_s=0.5)))
    registry: RegistryHub = field(default_factory=RegistryHub)
    bus: BusHub = field(default_factory=BusHub)
    workers: dict[WorkerId, ScriptedWorker] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    reporting: dict[WorkerId, asyncio.Task[None]] = field(default_factory=dict)

    async def start(self) -> Fleet:
        self.bus_of_router = self.bus.bus()
        self.router = Router(
            self.settings, "f", self.registry.registry(), self.bus_of_router, self.wire.wire()
        )
        self.router_task = asyncio.create_task(self.router.run())
        return self

    async def restart_router(self) -> None:
        self.router_task.cancel()
        await asyncio.gather(self.router_task, return_exceptions=True)
        await self.start()

    async def add(
        self, of: WorkerCard, script: Script | None = None, worker: ScriptedWorker | None = None
    ) -> ScriptedWorker:
        worker = worker or ScriptedWorker(of, script)
        bus = self.bus.bus()

        async def tell() -> None:
            while True:
                await bus.publish(load_subject("f", of.id), encode_load_report(worker.status()))
                await asyncio.sleep(0.25)

        def publish(events: Any) -> None:
            self.tasks.append(
                asyncio.create_task(bus.publish(kv_subject("f", of.id), encode_kv_events(events)))
            )

        worker.publish = publish
        worker.die = lambda: self.kill(of.id)
        self.wire.serve(worker, of.address)
        self.workers[of.id] = worker
        self.reporting[of.id] = asyncio.create_task(tell())
        self.registry.put(worker_key("f", of.id), encode_card(of), 0)
        return worker

    def kill(self, worker: WorkerId) -> None:
        """As SIGKILL: the registry does not know yet."""
        self.wire.kill(self.workers[worker].card.address)
        self.reporting[worker].cancel()

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not what():
                await asyncio.sleep(0.01)

    async def settle(self) -> None:
        """Longer than anything is under way, shorter than any limit."""
        await asyncio.sleep(2.0)

    def check_idle(self) -> None:
        """Nothing is left of any request, on any process."""
        flow = self.router.flow
        assert len(flow.admission) == 0
        assert flow.records.running == ()
        assert all(record.ended for record in flow.records.ended)
        ends = sum(
            n for name, n in flow.counters.items() if name.startswith(("finished_", "failed_", "canc"))
        )
        assert ends == flow.counters["requests"]
        for worker in self.router.roster.workers():
            assert not worker.sent
        for link in self.router.links.values():
            assert len(link) == 0
        for worker in self.workers.values():
            if worker.card.id in self.router.links:
                assert not worker.running, f"{worker.card.id} still works"
                assert not worker.leases, f"{worker.card.id} still holds leases"
        self.router.index.validate()

    async def stop(self) -> None:
        tasks = [self.router_task, *self.tasks, *self.reporting.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def in_fleet(
    body: Callable[[Fleet], Coroutine[Any, Any, T]],
    *,
    prefill: tuple[Script, ...] | None = None,
    decode: tuple[Script, ...] | None = None,
    settings: RouterSettings = REMOTE,
) -> T:
    # Made here: tests change a worker's script while it plays.
    prefill_scripts = (Script(),) if prefill is None else prefill
    decode_scripts = (Script(),) if decode is None else decode

    async def whole() -> T:
        fleet = await Fleet(settings).start()
        try:
            for n, script in enumerate(prefill_scripts, 1):
                await fleet.add(card(f"p{n}", Role.PREFILL), script)
            for n, script in enumerate(decode_scripts, 1):
                await fleet.add(card(f"d{n}"), script)
            await fleet.until(
                lambda: (
                    sum(w.usable and w.report is not None for w in fleet.router.roster.workers())
                    == len(prefill_scripts) + len(decode_scripts)
                )
            )
            return await body(fleet)
        finally:
            await fleet.stop()

    return virtual_time.run(whole(), horizon_s=3600)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    ends: list[RunEnd] = field(default_factory=list)
    error: FleetError | None = None
    timeline: Timeline = field(default_factory=lambda: Timeline(0.0))

    @property
    def end(self) -> RunEnd:
        assert self.error is None, self.error
        (end,) = self.ends
        return end


async def ask(
    fleet: Fleet,
    of: Request,
    *,
    stop_after: int | None = None,
    reason: CancelReason = CancelReason.CLIENT,
    terms: Terms | None = None,
) -> Answer:
    got = Answer(timeline=Timeline(asyncio.get_running_loop().time()))
    run = fleet.router.flow.start(of, got.timeline, terms)
    try:
        async for event in run:
            match event:
                case RunToken(token):
                    assert not got.ends
                    got.tokens.append(token)
                    if len(got.tokens) == stop_after:
                        await run.stop(reason)
                case RunEnd():
                    got.ends.append(event)
    except FleetError as error:
        got.error = error
    finally:
        await run.stop(CancelReason.CLIENT)
    assert got.tokens == [answer(n) for n in range(len(got.tokens))], "a token was lost or repeated"
    assert (got.error is None) == (len(got.ends) == 1), "one end"
    return got


async def ask_and_settle(fleet: Fleet, of: Request, **how: Any) -> Answer:
    got = await ask(fleet, of, **how)
    await fleet.settle()
    fleet.check_idle()
    return got
