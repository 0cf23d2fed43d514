"""Plays a workload on a simulated fleet: clients, faults, and what the workers counted."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from fleet import virtual_time
from fleet.chassis import ChassisSettings
from fleet.errors import DeadlineExceeded, FleetError, Overloaded
from fleet.goodput import End, Outcome
from fleet.ids import RequestId, WorkerId
from fleet.member import Role
from fleet.request import Request, Sampling
from fleet.targets import Desired
from fleet.workload import Conversation, Piece
from fleetctl.sim.fleet import Answer, Memory, SimFleet, SimWorker
from fleetctl.sim.policies import install
from fleetctl.sim.runner import Host, TimedRunner, layout_of
from fleetctl.sim.scaling import ScaledFleet
from fleetctl.sim.words import Asked, Beside, Fault, Played, RoleFigures, Setup, times
from kv_transfer.loopback import LoopbackHub
from kv_transfer.settings import TransferSettings
from router.run import Terms
from router.settings import (
    AdmissionMode,
    AdmissionSettings,
    FlowSettings,
    IndexSettings,
    RouterSettings,
    UnknownSettings,
)

Progress = Callable[[int, int, float], None]
"""Called with (requests asked, requests ended, virtual seconds)."""


def simulate(
    setup: Setup,
    conversations: Iterable[Conversation],
    progress: Progress = lambda asked, ended, now: None,
) -> Played:
    """The same setup and conversations always bring the same. Raises `ValueError` for what cannot be."""
    began = time.process_time()
    # Nearly everything ends by its own count of references; looking for cycles in so many objects takes a
    # fifth of the time.
    gc.disable()
    try:
        player = virtual_time.run(_play(setup, conversations, progress))
    finally:
        gc.enable()
    return player.played(time.process_time() - began)


async def _play(setup: Setup, conversations: Iterable[Conversation], progress: Progress) -> _Player:
    async with _fleet(setup) as fleet:
        player = _Player(setup, fleet, progress)
        await player.run(conversations)
        return player


@asynccontextmanager
async def _fleet(setup: Setup) -> AsyncIterator[SimFleet]:
    block_bytes = round(setup.kv_bytes * setup.block_size)
    layout = layout_of(setup.block_size)
    hosts: dict[str, str] = {}

    def host_of(worker: str) -> str:
        """Workers fill host after host in the order in which they start."""
        return hosts.setdefault(worker, f"host-{len(hosts) // setup.workers_per_host}")

    links = LoopbackHub(
        bytes_s=setup.link_bytes_s,
        latency_s=setup.link_latency_s,
        block_bytes=block_bytes,
        host_of=lambda address: host_of(address.removeprefix("loopback:").partition("/")[0]),
        local_bytes_s=setup.local_bytes_s,
    )
    blocks = max(1, setup.kv_tokens // setup.block_size)

    alone = setup.beside == Beside()
    hosting: dict[str, Host] = {}

    def runner(memory: Memory) -> TimedRunner:
        host = None
        if not alone and (worker := virtual_time.current()) is not None:
            host = hosting.setdefault(host_of(worker.name), Host(setup.beside))
        return TimedRunner("sim", layout, blocks, setup.speed, setup.max_tokens, host)

    workers = setup.prefill + setup.decode
    fleet = SimFleet(
        setup.prefill,
        setup.decode,
        replica=lambda settings: (layout, runner),
        links=links,
        blocks=blocks,
        engine=setup.engine(setup.step_tokens),
        decode_engine=setup.engine(setup.decode_step_tokens),
        router=RouterSettings(
            # KV is weighed by the stand-in's bytes wherever a router sees it, so the guess is, too.
            unknown=UnknownSettings(pull_bytes_s=setup.link_bytes_s * layout.block_bytes / block_bytes),
            admission=AdmissionSettings(AdmissionMode(setup.admission), setup.default_class),
            flow=FlowSettings(max_requests=1 << 20),
            index=IndexSettings(max_blocks=max(4_000_000, 2 * workers * blocks)),
            objectives=setup.objectives,
        ),
        transfer=TransferSettings(checksum=False),
        plain_wire=True,
        chassis=ChassisSettings(),
        routers=setup.routers,
        host_of=host_of,
        choose=lambda router: install(setup.policy, router, setup.seed),
    )
    async with fleet.up(validate=setup.validate):
        yield fleet


class _Player:
    def __init__(self, setup: Setup, fleet: SimFleet, progress: Progress) -> None:
        self.setup = setup
        self.fleet = fleet
        self.progress = progress
        self.asked: list[Asked] = []
        self.ended = 0
        self.start = asyncio.get_running_loop().time()
        self.first_s = self.last_s = self.end_s = 0.0
        self.busy: dict[Role, defaultdict[int, float]] = {role: defaultdict(float) for role in Role}
        """Seconds of all workers together in which they computed, by the loop's whole seconds."""
        self.counters: dict[Role, Counter[str]] = {role: Counter() for role in Role}
        self.flows: Counter[str] = Counter()
        known = {*fleet.workers, *fleet.routers}
        for fault in setup.faults:
            if fault.process not in known:
                raise ValueError(f"no process {fault.process}; there are: {', '.join(sorted(known))}")
        self.scaling: ScaledFleet | None = None
        if setup.scaling is not None:
            wanted = Desired(setup.prefill, setup.decode)
            self.scaling = ScaledFleet(fleet, setup.scaling, wanted, self._count_worker)

    async def run(self, conversations: Iterable[Conversation]) -> None:
        loop = asyncio.get_running_loop()
        faults = [asyncio.create_task(self._fail(fault)) for fault in self.setup.faults]
        if self.scaling is not None:
            faults.append(asyncio.create_task(self.scaling.run()))
        try:
            async with asyncio.TaskGroup() as clients:
                for number, one in enumerate(conversations):
                    # Of numpy's own numbers the clock would be made of them, and all arithmetic slow.
                    await asyncio.sleep(max(0.0, self.start + float(one.at_s) - loop.time()))
                    clients.create_task(self._converse(number, one))
        finally:
            if self.scaling is not None and faults[-1].done():
                faults[-1].result()  # It ends by a defect only.
            for task in faults:
                task.cancel()
            await asyncio.gather(*faults, return_exceptions=True)
        if not self.asked:
            raise ValueError("the workload is empty")
        self.end_s = loop.time() - self.start
        self.scaled = None if self.scaling is None else self.scaling.scaled()
        self._count()

    async def _converse(self, number: int, conversation: Conversation) -> None:
        said: list[int] = []
        for place, turn in enumerate(conversation.turns):
            if place:
                await asyncio.sleep(float(turn.think_s))
            for piece in turn.adds:
                said += _tokens(piece)
            answer = await self._ask(number, place, conversation.service_class, said, turn.output_tokens)
            if answer.end is None:
                return  # who was refused does not go on
            said += answer.tokens

    async def _ask(
        self, number: int, turn: int, service_class: str, prompt: Sequence[int], output_tokens: int
    ) -> Answer:
        setup, loop = self.setup, asyncio.get_running_loop()
        name = service_class if service_class in setup.objectives else setup.default_class
        objectives = setup.objectives[name]
        start = loop.time()
        asked = Asked(len(self.asked), name, start - self.start, len(prompt), output_tokens)
        self.asked.append(asked)
        request = Request(
            RequestId(f"{number}.{turn}"),
            self.fleet.model_name,
            tuple(prompt),
            Sampling(max_tokens=output_tokens, temperature=0, seed=number, ignore_eos=True),
            priority=objectives.priority,
            deadline_s=setup.deadline_s,
        )
        answer = Answer(request.id)
        names = sorted(self.fleet.routers) or ["router"]
        await self.fleet.ask_over(names[number % len(names)], request, answer, terms=Terms(name, objectives))
        stages = answer.timeline.marks if answer.timeline is not None else {}
        asked.outcome = Outcome(_end(answer), loop.time() - start, times(answer.times, start), stages)
        if answer.end is not None:
            asked.cached_tokens = answer.end.usage.cached_tokens
        asked.output_tokens = len(answer.tokens)
        self.ended += 1
        self.progress(len(self.asked), self.ended, loop.time() - self.start)
        return answer

    async def _fail(self, fault: Fault) -> None:
        fleet = self.fleet
        await asyncio.sleep(fault.at_s)
        worker = fleet.workers.get(WorkerId(fault.process))
        one = worker or fleet.routers.get(fault.process)
        if one is None:
            return  # it is down already
        if fault.kind == "freeze":
            one.process.stop()
        else:
            if worker is not None:
                self._count_worker(worker)
            fleet.crash(fault.process)
        if math.isinf(fault.for_s):
            return
        await asyncio.sleep(fault.for_s)
        if fault.kind == "freeze":
            one.process.resume()
        elif worker is not None:
            fleet.start(worker.role, fault.process)
        else:
            fleet.start_router(fault.process)

    def _count(self) -> None:
        for worker in self.fleet.workers.values():
            self._count_worker(worker)
        for router in self.fleet.routers.values():
            self.flows.update(router.router.flow.counters)

    def _count_worker(self, worker: SimWorker) -> None:
        role = worker.role
        assert isinstance(worker.runner, TimedRunner)
        for second, busy_s in worker.runner.busy_by_second.items():
            self.busy[role][second] += busy_s
        self.counters[role].update(worker.load().counters)

    def played(self, cpu_s: float) -> Played:
        first = self.asked[0].at_s
        sending_s = self.asked[-1].at_s - first
        total_s = self.end_s - first
        counts: dict[Role, float] = {Role.PREFILL: self.setup.prefill, Role.DECODE: self.setup.decode}
        if self.scaled is not None:
            counts = {
                role: round(seconds / self.end_s, 3)
                for role, seconds in zip(counts, self.scaled.wanted_s, strict=True)
            }
        roles = {
            str(role): RoleFigures(
                count,
                self._busy_s(role, self.start + first, sending_s) / (count * sending_s) if sending_s else 0.0,
                tuple(
                    self._busy_s(role, self.start + first + second, 1.0) / count
                    for second in range(math.ceil(total_s))
                ),
                dict(self.counters[role]),
            )
            for role, count in counts.items()
            if count
        }
        return Played(self.asked, sending_s, total_s, roles, dict(self.flows), cpu_s, self.scaled)

    def _busy_s(self, role: Role, start: float, length_s: float) -> float:
        """Between two moments; of a second that is cut by one of them its share."""
        end, busy = start + length_s, self.busy[role]
        return sum(
            busy[second] * (min(end, second + 1) - max(start, second))
            for second in range(int(start), math.ceil(end))
        )


def _end(answer: Answer) -> End:
    error: FleetError | None = answer.error
    if answer.end is not None:
        return End.FINISHED
    if isinstance(error, Overloaded):
        return End.REJECTED
    if isinstance(error, DeadlineExceeded):
        return End.TIMED_OUT
    if error is not None and error.http_status < 500:
        return End.INVALID
    return End.FAILED


def _tokens(piece: Piece) -> Sequence[int]:
    """Of equal keys equal ones; a shorter piece is the beginning of a longer one. They mean nothing: the
    first one tells pieces apart, and the rest of all is the same, so that it is made once."""
    first = int.from_bytes(hashlib.blake2b(piece.key.encode(), digest_size=4).digest())
    while len(_REST) < piece.tokens:
        _REST.extend(range(len(_REST), 2 * len(_REST) + 1024))
    return (first, *_REST[: piece.tokens - 1]) if piece.tokens else ()


_REST: list[int] = []
