"""A whole fleet in one process: the real router, services, engines, schedulers, leases.

By default in virtual time: only the device (a latency model whose tokens depend on all KV before them) and
the cables (memory implementations of wire, bus, registry and transfer) are not those of production. Another
`replica` brings a real model, `links=None` the real transports.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

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
from fleet.stages import Timeline
from fleet.wire.memory import MemoryHub as WireHub
from kv_transfer.loopback import LoopbackHub
from kv_transfer.region import Region
from kv_transfer.settings import TransferSettings
from kv_transfer.transfer import Transfer
from prefill_worker.service import PrefillService
from router.run import RunEnd
from router.settings import RouterSettings
from router.watcher import Router

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
    error: FleetError | None = None
    timeline: Timeline | None = None


class BoxWorker:
    """One worker process, as a task: killed by cancelling it and cutting its cables."""

    def __init__(self, box: Box, role: Role, name: str, life: int) -> None:
        self.box = box
        self.role = role
        self.id = WorkerId(name)
        self.incarnation = Incarnation(f"{name}.{life}")
        self.address = f"{name}:{life}"
        self.task: asyncio.Task[None] | None = None
        self.engine: Engine
        self.transfer: Transfer
        self.chassis: Chassis
        self.service: PrefillService | DecodeService

    async def run(self) -> None:
        box, settings = self.box, self.box.engine
        layout, make = box.replica(settings)
        region = Region.allocate(box.blocks, layout.block_bytes)
        runner = make(region.array)
        self.engine = Engine(runner, settings, lambda report: self.service.stepped(report), box.constrain)
        self.registry, self.bus = box.registry.registry(), box.bus.bus()
        self.chassis = Chassis("box", ChassisSettings(), self.registry, self.bus)
        async with AsyncExitStack() as stack:
            self.transfer = await Transfer.start(
                worker=self.id,
                incarnation=self.incarnation,
                fingerprint=runner.fingerprint.digest(),
                region=region,
                settings=box.transfer,
                on_end=self._lease_ended,
                loopback=box.links,
            )
            stack.push_async_callback(runner.close)
            stack.push_async_callback(self.transfer.close)
            if self.role is Role.PREFILL:
                self.service = PrefillService(self.chassis, self.engine, self.transfer)
            else:
                self.service = DecodeService(self.chassis, self.engine, self.transfer, pull_limit_s=5.0)
            server = box.wire.serve(self.chassis, self.address)
            stack.push_async_callback(server.close, 0.0)
            card = WorkerCard(
                id=self.id,
                incarnation=self.incarnation,
                role=self.role,
                state=MemberState.STARTING,
                address=self.address,
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
                await self.chassis.run(card, self.service, lease_ttl_s=5.0)
            finally:
                engine.cancel()
                await asyncio.gather(engine, return_exceptions=True)

    def _lease_ended(self, lease: str, why: str) -> None:
        if isinstance(self.service, PrefillService):
            self.service.lease_ended(lease, why)  # type: ignore[arg-type]

    def load(self) -> LoadReport:
        return self.chassis.status()

    def validate(self) -> None:
        """Idle means idle: every block back, no stream, no lease, and the published table is the true one."""
        self.engine.validate(idle=True)
        self.transfer.validate(idle=True)
        assert not list(self.chassis.streams)
        assert self.service.idle()
        assert set(self.chassis.snapshot().hashes) == set(self.engine.cached())


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
        constrain: Constrain | None = None,
    ) -> None:
        self.constrain = constrain
        self.counts = {Role.PREFILL: prefill, Role.DECODE: decode}
        self.blocks = blocks
        self.engine = engine or EngineSettings(block_size=16, max_batch=32, max_step_tokens=512)
        self.settings = router or RouterSettings()
        self.transfer = transfer or TransferSettings()
        self.latency = latency
        self.model = model or ToyModel()
        self.registry = RegistryHub(delay_s=0.001)
        self.bus = BusHub(delay_s=0.0005)
        self.wire = WireHub(to_worker_s=0.0002, to_router_s=0.0002)
        self.replica = replica or self._toy
        self.links = (
            None if real_links else LoopbackHub(bytes_s=1e9, latency_s=0.0002, block_bytes=360 * 1024)
        )
        self.workers: dict[WorkerId, BoxWorker] = {}
        self.lives = 0
        self.router: Router
        self._router: asyncio.Task[None]

    def _toy(self, settings: EngineSettings) -> tuple[KvLayout, Callable[[Memory], Runner]]:
        layout = LatencyRunner.layout_of(settings.block_size)
        return layout, lambda memory: LatencyRunner(memory, layout, self.latency, self.model)

    async def __aenter__(self) -> Box:
        for role, count in self.counts.items():
            for number in range(count):
                self.start(role, f"{role}-{number}")
        self.router = Router(
            self.settings, "box", self.registry.registry(), self.bus.bus(), self.wire.wire("router")
        )
        self._router = asyncio.create_task(self.router.run())
        await self.until(lambda: self.router.flow.ready() is None and self._all_known())
        return self

    def _all_known(self) -> bool:
        return all(
            (standing := self.router.roster.get(worker)) is not None and standing.usable
            for worker in self.workers
        )

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            await self.rest()
            self.validate()
        tasks = [self._router, *(worker.task for worker in self.workers.values() if worker.task)]
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
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
        worker.task = asyncio.create_task(worker.run())
        self.workers[worker.id] = worker
        return worker

    async def kill(self, name: str) -> None:
        """SIGKILL: no goodbye; its cables break, its registry lease runs out by itself."""
        worker = self.workers.pop(WorkerId(name))
        worker.registry.cut = True
        worker.bus.cut = True
        self.wire.kill(worker.address)
        self.hub.die(worker.transfer.address)
        assert worker.task is not None
        worker.task.cancel()
        await asyncio.gather(worker.task, return_exceptions=True)

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
            worker.validate()
        assert len(self.router.flow.admission) == 0

    def request(
        self, prompt: Sequence[int], sampling: Sampling, number: int, deadline_s: float = 600.0
    ) -> Request:
        return Request(RequestId(f"r{number}"), MODEL, tuple(prompt), sampling, deadline_s=deadline_s)

    async def ask(self, request: Request, *, stop_after: int | None = None) -> Answer:
        """One client: reads to the end, or leaves after `stop_after` tokens."""
        loop = asyncio.get_running_loop()
        answer = Answer(request.id, timeline=Timeline(loop.time()))
        assert answer.timeline is not None
        run = self.router.flow.start(request, answer.timeline)
        try:
            async for event in run:
                if isinstance(event, RunEnd):
                    answer.end = event
                    break
                answer.tokens.append(event.token)
                answer.logprobs.append(event.logprobs)
                answer.scores += event.prompt_logprobs
                answer.times.append(loop.time())
                if stop_after is not None and len(answer.tokens) >= stop_after:
                    break
        except FleetError as error:
            answer.error = error
        finally:
            await run.stop(CancelReason.CLIENT)
        return answer

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
