"""A whole fleet in one process: the real router, services, engines, schedulers, leases.

By default in virtual time: only the device (a latency model whose tokens depend on all KV before them) and
the cables (memory implementations of wire, bus, registry and transfer) are not those of production. Another
`replica` brings a real model, `links=None` the real transports.

Each worker and router is a `Process`: it has a clock of its own, can be stopped between any two of its steps,
and killed there. `faults.py` draws what happens to them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from decode_worker.service import DecodeService
from engine.latency_runner import LatencyModel, LatencyRunner, ToyModel, reference_tokens
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
from fleet.virtual_time import Process, true_time
from fleet.wire.memory import MemoryHub as WireHub
from fleet.wire.session import WireSettings
from kv_transfer.loopback import LoopbackHub
from kv_transfer.region import Region
from kv_transfer.settings import TransferSettings
from kv_transfer.transfer import Transfer
from prefill_worker.service import PrefillService
from router.run import RunEnd
from router.settings import RouterSettings
from router.watcher import Router, routers_prefix

Memory = NDArray[np.uint8]
Replica = Callable[[EngineSettings], tuple[KvLayout, Callable[[Memory], Runner]]]
"""Settings → layout of the pool, and the runner over its memory."""

MODEL = "toy"
LATENCY = LatencyModel(base_s=0.004, per_prompt_token_s=0.0002, per_decode_s=0.0004, per_context_token_s=1e-7)


@dataclass(slots=True)
class Answer:
    """What a client of the box was given."""

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


class BoxWorker:
    """One worker process: killed by stopping it for good and cutting its cables."""

    def __init__(self, box: Box, role: Role, name: str, life: int) -> None:
        self.box = box
        self.role = role
        self.id = WorkerId(name)
        self.incarnation = Incarnation(f"{name}.{life}")
        self.address = f"{name}:{life}"
        self.process = Process(name, box.clocks(name))
        self.registry, self.bus = box.registry.registry(), box.bus.bus()
        self.task: asyncio.Task[None] | None = None
        self.engine: Engine
        self.transfer: Transfer
        self.chassis: Chassis
        self.service: Roles

    async def run(self) -> None:
        box, settings = self.box, self.box.engine
        layout, make = box.replica(settings)
        region = Region.allocate(box.blocks, layout.block_bytes)
        runner = make(region.array)
        roles = Roles(self.role)
        self.engine = Engine(runner, settings, roles.stepped, box.constrain)
        self.chassis = Chassis("box", box.chassis, self.registry, self.bus)
        async with AsyncExitStack() as stack:
            self.transfer = await Transfer.start(
                worker=self.id,
                incarnation=self.incarnation,
                fingerprint=runner.fingerprint.digest(),
                region=region,
                settings=box.transfer,
                on_end=roles.lease_ended,
                loopback=box.links,
            )
            stack.push_async_callback(runner.close)
            stack.push_async_callback(self.transfer.close)
            decode = DecodeService(self.chassis, self.engine, self.transfer, pull_limit_s=box.pull_limit_s)
            small = max(settings.max_batch + 1, settings.max_step_tokens // 4)
            smaller = replace(settings, max_step_tokens=small)
            prefill = PrefillService(self.chassis, self.engine, self.transfer)
            roles.add(Role.PREFILL, prefill, partial(self.engine.retune, settings))
            roles.add(Role.DECODE, decode, partial(self.engine.retune, smaller))
            self.service = roles
            server = box.wire.serve(self.chassis, self.address)
            stack.push_async_callback(server.close, 0.0)
            card = WorkerCard(
                id=self.id,
                incarnation=self.incarnation,
                role=self.role,
                state=MemberState.STARTING,
                address=self.address,
                sessions=self.address,
                transfer=self.transfer.address,
                model=MODEL,
                fingerprint=runner.fingerprint,
                blocks=box.blocks,
                max_tokens=runner.max_tokens,
                version="box",
                pid=0,
                host="box",
            )
            engine = asyncio.create_task(self.engine.run())
            try:
                turns = {role: turn for role, turn in roles.turns.items() if role in box.turns}
                await self.chassis.run(card, roles, box.lease_ttl_s, turns)
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


class BoxRouter:
    """One router process, and the clients that are connected to it."""

    def __init__(self, box: Box, name: str, life: int) -> None:
        self.box = box
        self.name = name
        self.process = Process(name, box.clocks(name))
        self.registry, self.bus = box.registry.registry(), box.bus.bus()
        self.wire = box.wire.wire(name)
        incarnation = Incarnation(f"{name}-{life}")
        self.router = Router(
            box.settings, "box", self.registry, self.bus, self.wire, name=name, life=incarnation
        )
        self.killed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task = self.process.start(self.run())

    async def run(self) -> None:
        lease = await self.registry.lease(self.box.lease_ttl_s)
        card = msgspec.json.encode({"id": self.name, "life": self.router.life})
        await lease.put(routers_prefix("box") + self.name, card)
        try:
            await self.router.run()
        finally:
            await lease.close()

    def knows_all(self) -> bool:
        """Every worker that is up is known in its present life, and none else."""
        lives = {worker.incarnation for worker in self.box.workers.values()}
        standings = self.router.roster.workers()
        return lives == {one.card.incarnation for one in standings} and all(one.usable for one in standings)

    def proven(self) -> bool:
        """What it believes of every worker's blocks is what that worker holds."""
        index = self.router.index
        return not index.unproven() and all(
            index.holds(worker.id) == set(worker.engine.cached()) for worker in self.box.workers.values()
        )

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
            others = [key for key, sent in worker.others.items() if not sent.missed]
            assert not others, f"{self.name} counts {others} at {worker.id}, which are over"
        for link in self.router.links.values():
            assert len(link) == 0, f"{self.name} has streams at {link.card.id}"
        self.router.index.validate()


class Box:
    """`async with Box(...) as box`: up and ready; leaves everything stopped and checked."""

    def __init__(
        self,
        prefill: int = 2,
        decode: int = 2,
        *,
        blocks: int = 2048,
        engine: EngineSettings | None = None,
        router: RouterSettings | None = None,
        transfer: TransferSettings | None = None,
        latency: LatencyModel = LATENCY,
        model: ToyModel | None = None,
        replica: Replica | None = None,
        real_links: bool = False,
        turns: Collection[Role] = tuple(Role),
        constrain: Constrain | None = None,
        routers: int = 1,
        wire: WireSettings | None = None,
        chassis: ChassisSettings | None = None,
        lease_ttl_s: float = 5.0,
        pull_limit_s: float = 5.0,
        clocks: Callable[[str], float] = lambda name: 0.0,
    ) -> None:
        """`clocks`: seconds by which the clock of a worker or router of this name is ahead."""
        self.constrain = constrain
        self.turns = turns
        """Roles that workers can take later."""
        self.chassis = chassis or ChassisSettings()
        self.lease_ttl_s = lease_ttl_s
        self.pull_limit_s = pull_limit_s
        self.clocks = clocks
        self.counts = {Role.PREFILL: prefill, Role.DECODE: decode}
        self.blocks = blocks
        self.engine = engine or EngineSettings(block_size=16, max_batch=32, max_step_tokens=512)
        self.settings = router or RouterSettings()
        self.transfer = transfer or TransferSettings()
        self.latency = latency
        self.model = model or ToyModel()
        self.registry = RegistryHub(delay_s=0.001)
        self.bus = BusHub(delay_s=0.0005)
        self.wire = WireHub(wire, to_worker_s=0.0002, to_router_s=0.0002)
        self.replica = replica or self._toy
        self.links = (
            None if real_links else LoopbackHub(bytes_s=1e9, latency_s=0.0002, block_bytes=360 * 1024)
        )
        self.workers: dict[WorkerId, BoxWorker] = {}
        self.routers: dict[str, BoxRouter] = {}
        self.dead: list[BoxWorker | BoxRouter] = []
        self.lives = 0
        self.router_names = ["router", *(f"router-{number}" for number in range(1, routers))]

    @property
    def router(self) -> Router:
        """The first one."""
        return self.routers["router"].router

    def _toy(self, settings: EngineSettings) -> tuple[KvLayout, Callable[[Memory], Runner]]:
        layout = LatencyRunner.layout_of(settings.block_size)
        return layout, lambda memory: LatencyRunner(memory, layout, self.latency, self.model)

    async def __aenter__(self) -> Box:
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
        living: list[BoxWorker | BoxRouter] = [*self.routers.values(), *self.workers.values()]
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

    def start(self, role: Role, name: str) -> BoxWorker:
        """A worker process starts (again, under the same name: another incarnation)."""
        self.lives += 1
        worker = BoxWorker(self, role, name, self.lives)
        worker.task = worker.process.start(worker.run())
        self.workers[worker.id] = worker
        return worker

    def start_router(self, name: str) -> BoxRouter:
        self.lives += 1
        router = self.routers[name] = BoxRouter(self, name, self.lives)
        return router

    def crash(self, name: str) -> None:
        """SIGKILL, between two steps of the process: no goodbye; its cables break, its registry lease runs
        out by itself. In virtual time only."""
        one: BoxWorker | BoxRouter
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
        return Request(RequestId(f"r{number}"), MODEL, tuple(prompt), sampling, deadline_s=deadline_s)

    async def ask(self, request: Request, *, stop_after: int | None = None) -> Answer:
        """One client: reads to the end, or leaves after `stop_after` tokens."""
        answer = Answer(request.id)
        await self._serve(self.router, request, answer, stop_after)
        return answer

    async def ask_over(
        self, name: str, request: Request, answer: Answer, stop_after: int | None = None
    ) -> None:
        """The same as a client of the router of that name, whose work for it is done in its own process.
        Cancelled: the client vanishes, which the router sees as soon as it runs."""
        router = self.routers[name]
        serving = router.process.start(self._serve(router.router, request, answer, stop_after))
        try:
            await asyncio.wait({serving, router.killed}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            serving.cancel()
            raise
        if serving.done():
            serving.result()
        else:
            answer.lost = True

    async def _serve(self, router: Router, request: Request, answer: Answer, stop_after: int | None) -> None:
        """What an ingress does."""
        answer.timeline = Timeline(asyncio.get_running_loop().time())
        run = router.flow.start(request, answer.timeline)
        try:
            async for event in run:
                if isinstance(event, RunEnd):
                    answer.end = event
                    answer.ends += 1
                    continue
                assert not answer.ends, "a token after the end"
                answer.tokens.append(event.token)
                answer.logprobs.append(event.logprobs)
                answer.scores += event.prompt_logprobs
                answer.times.append(true_time())
                if stop_after is not None and len(answer.tokens) >= stop_after:
                    break
        except FleetError as error:
            answer.error = error
            answer.ends += 1
        finally:
            await run.stop(CancelReason.CLIENT)

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
