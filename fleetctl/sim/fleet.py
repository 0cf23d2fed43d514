"""A whole fleet in one process: the real router, services, engines, schedulers, leases; on any clock.

In virtual time only the device (a `replica`) and the cables (memory implementations of wire, bus, registry
and transfer) are not those of production. This is the one place where all rooms meet; tests build on it.

Each worker and router is a `Process`: it has a clock of its own, can be stopped between any two of its steps,
and killed there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from decode_worker.service import DecodeService
from engine.loop import Constrain, Engine
from engine.runner import Runner
from engine.settings import EngineSettings
from fleet.bus.memory import MemoryHub as BusHub
from fleet.chassis import Chassis, ChassisSettings
from fleet.errors import FleetError
from fleet.events import LoadReport
from fleet.handoff import CancelReason
from fleet.ids import Incarnation, RequestId, WorkerId
from fleet.kv_layout import KvLayout
from fleet.member import MemberState, Role, WorkerCard
from fleet.registry.memory import MemoryHub as RegistryHub
from fleet.request import Request, Sampling, TokenLogprobs
from fleet.roles import Roles
from fleet.stages import Timeline
from fleet.virtual_time import Process, VirtualTimeLoop, first_of
from fleet.wire.memory import MemoryHub as WireHub
from fleet.wire.session import WireSettings
from kv_transfer.loopback import LoopbackHub
from kv_transfer.region import Region
from kv_transfer.settings import TransferSettings
from kv_transfer.transfer import Transfer
from prefill_worker.service import PrefillService
from router.run import RunEnd, Terms
from router.settings import RouterSettings
from router.watcher import Router, routers_prefix

Memory = NDArray[np.uint8]
Replica = Callable[[EngineSettings], tuple[KvLayout, Callable[[Memory], Runner]]]
"""Settings → layout of the pool, and the runner over its memory."""


@dataclass(slots=True)
class Answer:
    """What a client of the fleet was given."""

    request: RequestId
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt, where asked for."""
    end: RunEnd | None = None
    ends: int = 0
    """Last words: one, unless the client left or its router was lost."""
    error: FleetError | None = None
    lost: bool = False
    """Its router was killed: the connection broke."""
    timeline: Timeline | None = None


class SimWorker:
    """One worker process: killed by stopping it for good and cutting its cables."""

    def __init__(self, fleet: SimFleet, role: Role, name: str, life: int) -> None:
        self.fleet = fleet
        self.role = role
        self.id = WorkerId(name)
        self.incarnation = Incarnation(f"{name}.{life}")
        self.address = f"{name}:{life}"
        self.process = Process(name, fleet.clocks(name))
        self.registry, self.bus = fleet.registry.registry(), fleet.bus.bus()
        self.task: asyncio.Task[None] | None = None
        self.runner: Runner
        self.engine: Engine
        self.transfer: Transfer
        self.chassis: Chassis
        self.service: Roles

    async def run(self) -> None:
        fleet, settings = self.fleet, self.fleet.engine_of(self.role)
        layout, make = fleet.replica(settings)
        if fleet.links is None:
            region = Region.allocate(fleet.blocks, layout.block_bytes)
        else:
            # Nobody maps it: a thousand workers need no descriptor each.
            region = Region(np.zeros((fleet.blocks, layout.block_bytes), np.uint8), -1)
        self.runner = runner = make(region.array)
        roles = Roles(self.role)
        self.engine = Engine(runner, settings, roles.stepped, fleet.constrain)
        self.chassis = Chassis(fleet.name, fleet.chassis, self.registry, self.bus)
        async with AsyncExitStack() as stack:
            self.transfer = await Transfer.start(
                worker=self.id,
                incarnation=self.incarnation,
                fingerprint=runner.fingerprint.digest(),
                region=region,
                settings=fleet.transfer,
                on_end=roles.lease_ended,
                loopback=fleet.links,
            )
            stack.push_async_callback(runner.close)
            stack.push_async_callback(self.transfer.close)
            decode = DecodeService(self.chassis, self.engine, self.transfer, pull_limit_s=fleet.pull_limit_s)
            wide = fleet.engine
            small = max(wide.max_batch + 1, wide.max_step_tokens // 4)
            smaller = fleet.decode_engine or replace(wide, max_step_tokens=small)
            prefill = PrefillService(self.chassis, self.engine, self.transfer)
            roles.add(Role.PREFILL, prefill, partial(self.engine.retune, wide))
            roles.add(Role.DECODE, decode, partial(self.engine.retune, smaller))
            self.service = roles
            server = fleet.wire.serve(self.chassis, self.address)
            stack.push_async_callback(server.close, 0.0)
            card = WorkerCard(
                id=self.id,
                incarnation=self.incarnation,
                role=self.role,
                state=MemberState.STARTING,
                address=self.address,
                sessions=self.address,
                transfer=self.transfer.address,
                model=fleet.model_name,
                fingerprint=runner.fingerprint,
                blocks=fleet.blocks,
                max_tokens=runner.max_tokens,
                version="sim",
                pid=0,
                host=fleet.host_of(str(self.id)),
            )
            engine = asyncio.create_task(self.engine.run())
            try:
                turns = {role: turn for role, turn in roles.turns.items() if role in fleet.turns}
                await self.chassis.run(card, roles, fleet.lease_ttl_s, turns)
            finally:
                engine.cancel()
                await asyncio.gather(engine, return_exceptions=True)

    def load(self) -> LoadReport:
        return self.process.call(self.chassis.status)

    def validate(self) -> None:
        """Idle means idle: every block back, no stream, no lease, and the published table is the true one."""
        self.engine.validate(idle=True)
        self.transfer.validate(idle=True)
        assert not list(self.chassis.streams)
        assert self.service.idle()
        parts = range(self.chassis.snapshot().parts)
        told = {name for part in parts for name in self.chassis.snapshot(part).hashes}
        assert told == set(self.engine.cached())


class SimRouter:
    """One router process, and the clients that are connected to it."""

    def __init__(self, fleet: SimFleet, name: str, life: int) -> None:
        self.fleet = fleet
        self.name = name
        self.process = Process(name, fleet.clocks(name))
        self.registry, self.bus = fleet.registry.registry(), fleet.bus.bus()
        self.wire = fleet.wire.wire(name)
        incarnation = Incarnation(f"{name}-{life}")
        self.router = Router(
            fleet.settings, fleet.name, self.registry, self.bus, self.wire, name=name, life=incarnation
        )
        fleet.choose(self.router)
        self.killed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task = self.process.start(self.run())

    async def run(self) -> None:
        lease = await self.registry.lease(self.fleet.lease_ttl_s)
        card = msgspec.json.encode({"id": self.name, "life": self.router.life})
        await lease.put(routers_prefix(self.fleet.name) + self.name, card)
        try:
            await self.router.run()
        finally:
            await lease.close()

    def knows_all(self) -> bool:
        """Every worker that is up is known in its present life, and none else."""
        lives = {worker.incarnation for worker in self.fleet.workers.values()}
        standings = self.router.roster.workers()
        return lives == {one.card.incarnation for one in standings} and all(one.usable for one in standings)

    def proven(self) -> bool:
        """What it believes of every worker's blocks is what that worker holds."""
        index = self.router.index
        return not index.unproven() and all(
            index.holds(worker.id) == set(worker.engine.cached()) for worker in self.fleet.workers.values()
        )

    def sent_by_others(self) -> list[RequestId]:
        """Requests that it counts as under way from other routers."""
        workers = self.router.roster.workers()
        return [request for one in workers for (_, request), sent in one.others.items() if not sent.missed]

    def validate(self) -> None:
        """Nothing is left of any request, and each had one end."""
        flow = self.router.flow
        assert len(flow.admission) == 0
        assert flow.records.running == ()
        assert all(record.ended for record in flow.records.ended)
        ends = ("finished_", "failed_", "cancelled")
        ended = sum(count for name, count in flow.counters.items() if name.startswith(ends))
        assert ended == flow.counters["requests"], dict(flow.counters)
        for worker in self.router.roster.workers():
            assert not worker.sent, f"{self.name} counts requests at {worker.id} that are over"
            assert not worker.kept, f"{self.name} counts KV at {worker.id} that nobody waits for"
        assert not self.sent_by_others(), f"{self.name} counts {self.sent_by_others()}, which are over"
        for link in self.router.links.values():
            assert len(link) == 0, f"{self.name} has streams at {link.card.id}"
        self.router.index.validate()


class SimFleet:
    """`async with SimFleet(...) as fleet`: up and ready; leaves everything stopped and checked."""

    name = "sim"
    model_name = "sim"

    def __init__(
        self,
        prefill: int = 2,
        decode: int = 2,
        *,
        replica: Replica,
        links: LoopbackHub | None,
        blocks: int = 2048,
        engine: EngineSettings | None = None,
        decode_engine: EngineSettings | None = None,
        router: RouterSettings | None = None,
        transfer: TransferSettings | None = None,
        turns: Collection[Role] = tuple(Role),
        constrain: Constrain | None = None,
        routers: int = 1,
        wire: WireSettings | None = None,
        plain_wire: bool = False,
        chassis: ChassisSettings | None = None,
        lease_ttl_s: float = 5.0,
        pull_limit_s: float = 5.0,
        clocks: Callable[[str], float] = lambda name: 0.0,
        host_of: Callable[[str], str] = lambda worker: "one",
        choose: Callable[[Router], None] = lambda router: None,
    ) -> None:
        """`links`: None takes the real transports. `decode_engine`: of workers that begin as decode workers;
        None: as the others'. `plain_wire`: words go from process to process as they are, not as bytes.
        `clocks`: seconds by which the clock of a worker or router of this name is ahead. `choose` may give a
        router, before it runs, another way to choose workers."""
        self.constrain = constrain
        self.turns = turns
        """Roles that workers can take later."""
        self.chassis = chassis or ChassisSettings()
        self.lease_ttl_s = lease_ttl_s
        self.pull_limit_s = pull_limit_s
        self.clocks = clocks
        self.host_of = host_of
        self.choose = choose
        self.counts = {Role.PREFILL: prefill, Role.DECODE: decode}
        self.blocks = blocks
        self.engine = engine or EngineSettings(block_size=16, max_batch=32, max_step_tokens=512)
        self.decode_engine = decode_engine
        self.settings = router or RouterSettings()
        self.transfer = transfer or TransferSettings()
        self.registry = RegistryHub(delay_s=0.001)
        self.bus = BusHub(delay_s=0.0005)
        self.wire = WireHub(wire, to_worker_s=0.0002, to_router_s=0.0002, plain=plain_wire)
        self.replica = replica
        self.links = links
        self.workers: dict[WorkerId, SimWorker] = {}
        self.routers: dict[str, SimRouter] = {}
        self.dead: list[SimWorker | SimRouter] = []
        self.lives = 0
        self.router_names = ["router", *(f"router-{number}" for number in range(1, routers))]

    @property
    def router(self) -> Router:
        """The first one."""
        return self.routers["router"].router

    def engine_of(self, role: Role) -> EngineSettings:
        """Of a worker that begins with this role."""
        return self.decode_engine or self.engine if role is Role.DECODE else self.engine

    @asynccontextmanager
    async def up(self, validate: bool = True) -> AsyncIterator[SimFleet]:
        """As `async with` itself; not to `validate` saves its time where that is not the point."""
        try:
            await self.__aenter__()
            yield self
            if validate:
                await self.rest()
                self.validate()
        finally:
            await self.close()

    async def __aenter__(self) -> SimFleet:
        for role, count in self.counts.items():
            for number in range(count):
                self.start(role, f"{role}-{number}")
        for name in self.router_names:
            self.start_router(name)
        await self.until(self.ready)
        return self

    def ready(self) -> bool:
        """Every router could serve, and knows all workers."""
        return all(
            router.router.flow.ready() is None and router.knows_all() for router in self.routers.values()
        )

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            await self.rest()
            self.validate()
        await self.close()

    async def close(self) -> None:
        """Ends all processes; a living one that ended by a defect is raised."""
        for corpse in self.dead:
            corpse.process.resume()
        living: list[SimWorker | SimRouter] = [*self.routers.values(), *self.workers.values()]
        tasks = [one.task for one in (*living, *self.dead) if one.task is not None]
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends[: len(living)]:
            if isinstance(end, Exception):
                raise end

    @property
    def hub(self) -> LoopbackHub:
        """Where KV is torn, delayed and lost on demand."""
        assert self.links is not None
        return self.links

    def start(self, role: Role, name: str) -> SimWorker:
        """A worker process starts (again, under the same name: another incarnation)."""
        self.lives += 1
        worker = SimWorker(self, role, name, self.lives)
        worker.task = worker.process.start(worker.run())
        self.workers[worker.id] = worker
        return worker

    def start_router(self, name: str) -> SimRouter:
        self.lives += 1
        router = self.routers[name] = SimRouter(self, name, self.lives)
        return router

    def crash(self, name: str) -> None:
        """SIGKILL, between two steps of the process: no goodbye; its cables break, its registry lease runs
        out by itself. In virtual time only."""
        one: SimWorker | SimRouter
        if name in self.routers:
            one = router = self.routers.pop(name)
            self.wire.cut(name)
            router.killed.set_result(None)
        else:
            one = worker = self.workers.pop(WorkerId(name))
            self.wire.kill(worker.address)
            if hasattr(worker, "transfer"):
                self.hub.die(worker.transfer.address)
        one.registry.cut = True
        one.bus.cut = True
        one.process.stop()
        self.dead.append(one)

    async def kill(self, name: str) -> None:
        """The same; returns when those at the other ends of its cables have noticed."""
        self.crash(name)
        await asyncio.sleep(0.001)

    async def until(self, true: object, limit_s: float = 120.0) -> None:
        """Waits in virtual time until a condition holds."""
        assert callable(true)
        async with asyncio.timeout(limit_s):
            while not true():
                await asyncio.sleep(0.01)

    async def rest(self) -> None:
        """Waits until every worker says that it is idle."""
        await self.until(lambda: all(worker.service.idle() for worker in self.workers.values()))
        await asyncio.sleep(1.0)

    def validate(self) -> None:
        for worker in self.workers.values():
            worker.process.call(worker.validate)
        for router in self.routers.values():
            router.process.call(router.validate)

    def request(
        self, prompt: Sequence[int], sampling: Sampling, number: int, deadline_s: float = 600.0
    ) -> Request:
        id = RequestId(f"r{number}")
        return Request(id, self.model_name, tuple(prompt), sampling, deadline_s=deadline_s)

    async def ask(self, request: Request, *, stop_after: int | None = None) -> Answer:
        """One client: reads to the end, or leaves after `stop_after` tokens."""
        answer = Answer(request.id)
        await self._serve(self.router, request, answer, stop_after, None)
        return answer

    async def ask_over(
        self,
        name: str,
        request: Request,
        answer: Answer,
        stop_after: int | None = None,
        terms: Terms | None = None,
    ) -> None:
        """The same as a client of the router of that name, whose work for it is done in its own process.
        Cancelled: the client vanishes, which the router sees as soon as it runs."""
        router = self.routers[name]
        serving = router.process.start(self._serve(router.router, request, answer, stop_after, terms))
        try:
            await first_of(serving, router.killed)
        except asyncio.CancelledError:
            serving.cancel()
            raise
        if serving.done():
            serving.result()
        else:
            answer.lost = True

    async def _serve(
        self, router: Router, request: Request, answer: Answer, stop_after: int | None, terms: Terms | None
    ) -> None:
        """What an ingress does."""
        loop = asyncio.get_running_loop()
        clock = loop.true_time if isinstance(loop, VirtualTimeLoop) else loop.time
        answer.timeline = Timeline(loop.time())
        run = router.flow.start(request, answer.timeline, terms)
        tokens, logprobs, times = answer.tokens, answer.logprobs, answer.times
        try:
            async for event in run:
                if isinstance(event, RunEnd):
                    answer.end = event
                    answer.ends += 1
                    continue
                assert not answer.ends, "a token after the end"
                tokens.append(event.token)
                logprobs.append(event.logprobs)
                if event.prompt_logprobs:
                    answer.scores += event.prompt_logprobs
                times.append(clock())
                if stop_after is not None and len(tokens) >= stop_after:
                    break
        except FleetError as error:
            answer.error = error
            answer.ends += 1
        finally:
            await run.stop(CancelReason.CLIENT)
