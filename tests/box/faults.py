"""Fault schedules: what happens to a whole fleet, drawn from a seed, played in virtual time, and judged.

A seed gives a fleet, its clients and what befalls it: at drawn times or with the k-th message of some link,
so that faults fall between any two steps. Whatever was drawn, every client must have fared as `_judge` says,
and the fleet be whole again as `_whole_again` and `_nothing_runs` say. The same seed plays the same way,
message by message: see `Outcome.trace`.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from whole_fleet import MODEL, Answer, Box, BoxRouter, BoxWorker

from engine.bounds import GrammarSettings
from engine.grammar import Grammars, Matcher, Vocabulary
from engine.latency_runner import LatencyModel, ToyModel, reference_tokens
from engine.settings import EngineSettings
from fleet.chassis import ChassisSettings
from fleet.errors import BadRequest, DeadlineExceeded, Overloaded, Unavailable
from fleet.handoff import DecodeJob
from fleet.ids import RequestId, WorkerId
from fleet.member import MemberState, Role
from fleet.registry.store import StoreAway
from fleet.request import Constraint, ConstraintKind, FinishReason, Request, Sampling
from fleet.virtual_time import outside, run, true_time
from fleet.wire.memory import Direction, Spoilt
from fleet.wire.session import WireSettings
from kv_transfer.loopback import Damage
from kv_transfer.settings import TransferSettings
from router.settings import CostSettings, FlowSettings, RouterSettings, WatchSettings

FAR = {"to worker": 60, "to router": 120, "bus": 60, "registry": 20, "kv": 30}
"""Links, and with how late a message of each a fault may come."""
NEAR = {"tokens": 25, "to worker": 12, "to router": 40, "kv": 15}
"""The same, of the messages of one worker; `tokens`: those to routers while it decodes."""
SAFE_WORKER, SAFE_ROUTER = "decode-0", "router"
"""Spared by everything in a schedule that is `safe`: with them alone every request can be served."""
LATENCY = LatencyModel(base_s=0.03, per_prompt_token_s=0.001, per_decode_s=0.001, per_context_token_s=1e-6)
DEADLINE_S = 25.0
ROOMY, TIGHT, OUTGROWN = 160, 26, 12
"""Blocks of 4 tokens each; the longest sequence that must finish has 60 + 40 tokens."""
LONG = 200
"""Tokens asked for by clients that will leave: whoever goes on working for them is seen to."""
HEAL_LIMIT_S = 90.0
"""Virtual seconds after which a healed fleet must be idle, whole and proven."""
SETTLED_S = 0.5
"""Within so many seconds after all clients are gone nobody works for them any more, where nothing held a
message up."""
FAIR = (Unavailable, Overloaded, DeadlineExceeded)
"""What a client may be told in bad times; anything else is a defect."""
SILENT = ("freeze of a worker", "freeze of a router", "session", "crash of a router")
"""Faults by which a message may come late, or never, though both ends live."""
UNTOLD = {("kv", "slow"), ("kv partition", "")}
"""Beside those, by which a lease may run out: its reader cannot renew it, or say that it is done."""
END = 1001
VOCABULARY = Vocabulary(
    (*(bytes([token]) if token < 128 else b"" for token in range(END)), b""), (END,), END + 1
)
"""Of ASCII; above it tokens that prompts hold and nothing writes."""
CONSTRAINTS = (
    Constraint(ConstraintKind.REGEX, r"([a-f]{4}-){2,20}[0-9]{3}"),
    Constraint(ConstraintKind.GRAMMAR, 'root ::= "yes" | "no" | "perhaps"'),
)


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    who: tuple[str, ...]
    lasts: float
    """Seconds until it is undone."""
    at: float = 0.0
    """Seconds after the fleet is up; or, with `link`, the earliest."""
    link: str = ""
    """With the `count`-th message of this link, if it comes to that."""
    of: str = ""
    """Only messages from or to this worker count."""
    after: float = 0.0
    """Seconds after that message was sent."""
    count: int = 0
    detail: str = ""
    amount: float = 0.0


@dataclass(frozen=True, slots=True)
class Client:
    at: float
    router: str
    request: Request
    stop_after: int | None = None
    """Leaves after so many tokens."""
    vanish_after: float | None = None
    """Its connection breaks after so many seconds."""


@dataclass(frozen=True, slots=True)
class Schedule:
    seed: int
    prefill: int
    decode: int
    routers: int
    blocks: int
    bytes_s: float
    """Of the links that KV takes: a block of 360 KiB in 2 or in 20 ms."""
    engine: EngineSettings
    transfer: TransferSettings
    cost: CostSettings
    rough: bool
    """Nothing but leases and quarantine keep wrong KV out: no checksums, slow links, short leases."""
    clocks: dict[str, float]
    clients: tuple[Client, ...]
    faults: tuple[Fault, ...]
    safe: bool
    """One decode worker and one router are spared, and have room: what is asked there must finish."""
    outgrows: bool = False
    """A pool is smaller than some sequence will be."""
    borrows: bool = False
    """Workers bring from any other what it caches."""
    rush: bool = False
    """More comes at once than there is room for; pools are looked at all the while."""

    @property
    def workers(self) -> tuple[str, ...]:
        return (
            *(f"prefill-{n}" for n in range(self.prefill)),
            *(f"decode-{n}" for n in range(self.decode)),
        )

    @property
    def router_names(self) -> tuple[str, ...]:
        return ("router", *(f"router-{n}" for n in range(1, self.routers)))


# -- drawing


def draw(seed: int) -> Schedule:
    chance = random.Random(seed)
    prefill, decode = chance.choice([(1, 1), (1, 2), (1, 2), (2, 2), (0, 2), (2, 1)])
    routers = chance.choice([1, 1, 1, 2])
    safe = chance.random() < 0.5
    rough = chance.random() < 0.3
    memory = chance.choice(
        ["roomy", "tight", "tight"] if rough else ["roomy", "roomy", "roomy", "tight", "tight", "outgrows"]
    )
    longest = chance.choice([24, 60])
    blocks = {"roomy": ROOMY, "tight": TIGHT, "outgrows": OUTGROWN}[memory]
    outgrows = memory == "outgrows" and longest == 60
    busy = chance.random() < 0.1
    max_batch = chance.choice([2, 4, 8])
    engine = EngineSettings(
        block_size=4,
        max_batch=max_batch,
        max_step_tokens=max_batch + chance.choice([4, 8, 16]),
        max_waiting=2 if busy and not safe else 64,
        short_prompt_share=chance.choice([0.0, 0.25]),
        prefix_cache=chance.random() < 0.9,
    )
    cost = (
        CostSettings() if chance.random() < 0.3 else CostSettings(local_prefill_tokens=0, local_advantage=1e9)
    )
    # A draw of its own, so that the seeds from before play as they did but for this.
    borrowing = random.Random(seed ^ 0xB0220)
    if borrows := borrowing.random() < 0.5:
        # Whatever is cached elsewhere is brought, and any queue is a reason to go elsewhere.
        cost = replace(cost, borrow_s=0.0, borrow_advantage=1e-9, tie_s=0.0, tie_share=0.0)
    transfer = TransferSettings(
        lease_s=0.6 if rough else chance.choice([2.0, 2.0, 0.6]),
        connect_s=1.0,
        checksum=not rough,
        borrow_limit_s=2.0 if borrows else 0.0,
    )
    if random.Random(seed ^ 0x0E11A).random() < 0.4:
        engine = replace(engine, overlap="on")
    schedule = Schedule(
        seed, prefill, decode, routers, blocks, 2e7 if rough else 2e8, engine, transfer, cost, rough,
        {}, (), (), safe=safe and not outgrows, outgrows=outgrows, borrows=borrows,
    )  # fmt: skip
    clocks = {}
    if chance.random() < 0.4:
        for name in (*schedule.workers, *schedule.router_names):
            clocks[name] = chance.choice([0.0, 60.0, -60.0, chance.uniform(-1e5, 1e5)])
    clients = _clients(schedule, chance, longest, busy)
    if borrows:
        clients = _with_second_turns(clients, borrowing, longest)
    # A draw of its own, like the one before.
    rushing = random.Random(seed ^ 0x25054)
    if rush := rough and memory == "tight" and rushing.random() < 0.5:
        clients = _with_a_rush(clients, rushing, schedule.router_names)
        engine = replace(engine, max_batch=8, max_step_tokens=14, prefix_cache=True)
        schedule = replace(schedule, engine=engine, rush=True)
    schedule = replace(schedule, clocks=clocks, clients=clients)
    count = chance.choice([0, 1, 1, 2, 2, 3, 4, 5])
    faults = tuple(fault for _ in range(count) for fault in _faults(schedule, chance))
    if rush:
        faults += tuple(_leaves_while_it_pulls(schedule, rushing) for _ in range(4))
    return replace(schedule, faults=faults)


def _clients(schedule: Schedule, chance: random.Random, longest: int, busy: bool) -> tuple[Client, ...]:
    roots = [
        tuple(chance.randrange(1000) for _ in range(chance.randrange(4, longest // 2 + 1))) for _ in range(2)
    ]
    clients = []
    for number in range(chance.randrange(12, 24) if busy else chance.randrange(3, 8)):
        head = chance.choice(roots) if chance.random() < 0.5 else ()
        tail = tuple(
            chance.randrange(1000) for _ in range(chance.randrange(1, max(2, longest - len(head) + 1)))
        )
        leaves, vanishes = chance.random() < 0.1, chance.random() < 0.1
        long = (leaves or vanishes) and schedule.blocks == ROOMY
        some, many = chance.randrange(1, 25), chance.randrange(8, 41)
        sampling = Sampling(
            max_tokens=LONG if long else chance.choice([1, 2, some, some, many, many]),
            temperature=chance.choice([0.0, 1.0]),
            seed=chance.randrange(1 << 32),
            stop_token_ids=tuple(range(32, 40)) if not long and chance.random() < 0.3 else (),
            min_tokens=chance.choice([0, 0, 0, 6]),
        )
        request = Request(
            RequestId(f"r{number}"),
            MODEL,
            head + tail,
            sampling,
            salt=chance.choice(["", "", "tenant"]),
            priority=chance.choice([0, 0, 0, 1]),
            deadline_s=DEADLINE_S if chance.random() < 0.9 else chance.uniform(0.02, 2.0),
            constraint=chance.choice(CONSTRAINTS) if chance.random() < 0.2 and not long else None,
        )
        clients.append(
            Client(
                at=chance.uniform(0.0, 0.1 if busy else 0.4 if schedule.rough else 1.0),
                router=chance.choice(schedule.router_names),
                request=request,
                stop_after=chance.randrange(1, 20) if leaves else None,
                vanish_after=chance.uniform(0.0, 1.0) if vanishes else None,
            )
        )
    return tuple(clients)


def _with_second_turns(
    clients: tuple[Client, ...], chance: random.Random, longest: int
) -> tuple[Client, ...]:
    """Some come back later with what they were answered, often at another worker and several at once."""
    turns = []
    for number, client in enumerate(clients):
        first = client.request
        known = (*first.prompt, *reference_tokens(first.prompt, first.sampling, model=ToyModel()))
        for again in range(chance.choice([0, 1, 1, 2])):
            prompt = (*known, *(chance.randrange(1000) for _ in range(chance.randrange(1, 8))))
            if len(prompt) <= longest:
                request = replace(first, id=RequestId(f"r{number}.{again}"), prompt=prompt)
                turns.append(replace(client, at=client.at + chance.uniform(0.3, 2.5), request=request))
    return (*clients, *turns)


def _with_a_rush(
    clients: tuple[Client, ...], chance: random.Random, routers: Sequence[str]
) -> tuple[Client, ...]:
    """More comes at once than there is room for: some begin like one that was there before, and leave while
    their KV is on its way; others wait for their place."""
    at = chance.uniform(1.0, 2.0)
    root = tuple(chance.randrange(1000) for _ in range(chance.randrange(12, 30)))
    rush = []

    def comes(number: int, at: float, prompt: tuple[int, ...], vanish_after: float | None) -> None:
        request = Request(
            RequestId(f"rush{number}"), MODEL, prompt, Sampling(max_tokens=chance.randrange(1, 9)),
            deadline_s=DEADLINE_S,
        )  # fmt: skip
        rush.append(Client(at, chance.choice(routers), request, vanish_after=vanish_after))

    comes(0, at - 0.6, root, None)
    for number in range(1, 9):
        begins_alike = number % 2 == 1
        head = root if begins_alike else ()
        tail = tuple(chance.randrange(1000) for _ in range(60 - len(head)))
        leaves = chance.uniform(0.0, 0.7) if begins_alike else None
        comes(number, at + chance.uniform(0.0, 0.2), head + tail, leaves)
    return (*clients, *rush)


def _leaves_while_it_pulls(schedule: Schedule, chance: random.Random) -> Fault:
    who = (chance.choice(schedule.clients).request.id,)
    decode = f"decode-{chance.randrange(schedule.decode)}"
    return Fault("vanish", who, lasts=0.01, at=0.0, link="kv", of=decode, count=chance.randrange(8, 40))


def _faults(schedule: Schedule, chance: random.Random) -> Iterator[Fault]:
    """One fault; or the two halves of one, such as a worker lost and brought back."""
    workers, routers = schedule.workers, schedule.router_names
    if schedule.safe:
        workers = tuple(name for name in workers if name != SAFE_WORKER)
        routers = tuple(name for name in routers if name != SAFE_ROUTER)
    weights = [kind.rough if schedule.rough else kind.weight for kind in KINDS.values()]
    kind, weight = chance.choices(list(KINDS.items()), weights)[0]
    who: tuple[str, ...] = ()
    match weight.target:
        case "worker":
            # Those that decode have the more to lose.
            decoders = tuple(name for name in workers if name.startswith("decode"))
            who = (chance.choice(workers + decoders),) if workers else ()
        case "prefill":
            sources = [name for name in schedule.workers if schedule.borrows or name.startswith("prefill")]
            who = (chance.choice(sources),) if sources else ()
        case "process":
            # What lies between a process and the control plane never stops it from serving.
            victims = (*workers, *schedule.router_names)
            who = (chance.choice(victims),)
        case "router":
            who = (chance.choice(routers),) if routers else ()
        case "session":
            pairs = [
                (router, worker)
                for router in schedule.router_names
                for worker in schedule.workers
                if not (schedule.safe and (router, worker) == (SAFE_ROUTER, SAFE_WORKER))
            ]
            who = chance.choice(pairs) if pairs else ()
        case "client":
            who = (chance.choice(schedule.clients).request.id,)
        case "kv pair":
            pairs = [
                (reader, source)
                for reader in schedule.workers
                for source in schedule.workers
                if (schedule.borrows and reader != source)
                or (reader.startswith("decode") and source.startswith("prefill"))
            ]
            who = chance.choice(pairs) if pairs else ()
    if weight.target != "fleet" and not who:
        return
    fault = Fault(
        kind,
        who,
        lasts=chance.choice([0.01, 0.1, 0.5, 1.0, 2.0, 3.5, 6.0]),
        at=chance.uniform(0.0, 2.0),
        detail=chance.choice(details) if (details := _details(schedule, kind)) else "",
        amount=chance.random(),
    )
    where, near = chance.random(), [name for name in who if name in schedule.workers]
    if weight.target == "client":
        near = [name for name in schedule.workers if name.startswith("decode")]
    if where < 0.6 and near:
        # In the middle of its own work: between two tokens of a stream, two parts of a prompt or of its KV.
        link = chance.choice(["kv" if schedule.rough else "tokens", *NEAR])
        fault = replace(
            fault, at=0.0, link=link, of=chance.choice(near), count=chance.randrange(1, NEAR[link]),
            after=chance.choice([0.0, 0.0, 0.01, 0.1]),
        )  # fmt: skip
    elif where < 0.75:
        link = chance.choice(list(FAR))
        fault = replace(fault, at=0.0, link=link, count=chance.randrange(1, FAR[link]))
    yield fault


def _details(schedule: Schedule, kind: str) -> tuple[str, ...]:
    """Without checksums nothing could notice damage on the way."""
    unseen = {damage.value for damage in Damage} if kind == "kv" and schedule.rough else set[str]()
    return tuple(detail for detail in KINDS[kind].details if detail not in unseen)


# -- what can happen


class Play:
    """One schedule as it is played."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.chance = random.Random(schedule.seed ^ 0x5EED)
        self.trace: list[tuple[object, ...]] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.undoing: dict[object, tuple[asyncio.TimerHandle, Callable[[], None]]] = {}
        self.struck: Counter[str] = Counter()
        self.problems: list[str] = []
        self.open = False
        """Whether faults may strike."""
        self.scaled = 0
        self.asking: dict[str, asyncio.Task[None]] = {}
        """By request, what its client waits for."""
        self.vanished: set[str] = set()
        self.happened: set[tuple[str, str]] = set()
        """Kinds of faults that struck, with their details."""
        self.bus_fates: dict[object, Callable[[str], tuple[float, ...]]] = {}
        self.box = Box(
            schedule.prefill,
            schedule.decode,
            blocks=schedule.blocks,
            engine=schedule.engine,
            router=RouterSettings(
                cost=schedule.cost,
                flow=FlowSettings(
                    resume_wait_s=10.0, first_token_timeout_s=6.0, token_timeout_s=4.0, max_failovers=8
                ),
                watch=WatchSettings(
                    load_s=1.0, snapshot_timeout_s=1.0, open_timeout_s=1.0, retry_max_s=1.0, tick_s=0.4
                ),
            ),
            transfer=schedule.transfer,
            latency=LATENCY,
            routers=schedule.routers,
            wire=WireSettings(heartbeat_s=0.5, connect_s=1.0),
            chassis=ChassisSettings(report_s=0.5, drain_limit_s=3.0),
            lease_ttl_s=2.0,
            pull_limit_s=1.5,
            clocks=lambda name: schedule.clocks.get(name, 0.0),
            constrain=self.constrain,
        )
        self.box.hub.bytes_s = schedule.bytes_s
        self.triggers: dict[tuple[str, str, int], list[Fault]] = {}
        for fault in schedule.faults:
            if fault.link:
                self.triggers.setdefault((fault.link, fault.of, fault.count), []).append(fault)

    async def constrain(self, constraint: Constraint, generated: Sequence[int]) -> Matcher:
        """As if it took its time to compile."""
        await asyncio.sleep(self.chance.choice([0.0, 0.05]))
        return await _grammars().matcher(constraint, generated)

    # Taps: every message is traced, and may bring a fault with it.

    def tap(self) -> None:
        box = self.box

        def wire(router: str, address: str, direction: Direction, size: int) -> None:
            worker = _worker_at(address)
            self.message(direction.value, (worker,), router, address, size)
            if direction is Direction.TO_ROUTER and self.decodes(worker):
                self.count("tokens", worker)

        def bus(subject: str, size: int) -> None:
            self.message("bus", (), subject, size)

        def registry() -> None:
            self.message("registry", ())

        def kv(reader: str, source: str, what: str) -> None:
            self.message("kv", (_worker_at(reader), _worker_at(source)), reader, source, what)

        def late(subject: str) -> tuple[float, ...]:
            fates = list(self.bus_fates.values())
            return fates[-1](subject) if fates else (0.0,)

        box.wire.tap, box.bus.tap, box.registry.tap, box.hub.tap = wire, bus, registry, kv
        box.bus.late = late

    def message(self, link: str, workers: Sequence[str], *what: object) -> None:
        self.trace.append((true_time(), link, *what))
        if not self.open:
            return
        for of in ("", *workers):
            self.count(link, of)

    def count(self, link: str, of: str) -> None:
        self.counts[link, of] += 1
        for fault in self.triggers.get((link, of, self.counts[link, of]), ()):
            if fault.after:
                outside(asyncio.get_running_loop().call_later, fault.after, self.strike, fault)
            else:
                outside(self.strike, fault)

    def decodes(self, name: str) -> bool:
        worker = self.worker(name) if self.open else None
        return worker is not None and any(isinstance(one.job, DecodeJob) for one in worker.chassis.streams)

    def strike(self, fault: Fault) -> None:
        if not self.open:
            return
        undo = KINDS[fault.kind].strike(self, fault)
        self.trace.append((true_time(), "fault", fault.kind, fault.who, undo is not None))
        if undo is None:
            return
        self.struck[fault.kind] += 1
        self.happened.add((fault.kind, fault.detail))
        key = object()

        def heal() -> None:
            self.undoing.pop(key)
            self.trace.append((true_time(), "healed", fault.kind, fault.who))
            undo()

        self.undoing[key] = (asyncio.get_running_loop().call_later(fault.lasts, heal), undo)

    def heal(self) -> None:
        """Everything that still lasts ends now, and nothing more strikes."""
        self.open = False
        while self.undoing:
            for key in list(self.undoing):
                timer, undo = self.undoing.pop(key)
                timer.cancel()
                undo()
        self.box.registry.up = True
        for one in (*self.box.workers.values(), *self.box.routers.values()):
            assert not one.process.stopped, one.process.name

    def worker(self, name: str) -> BoxWorker | None:
        """If it lives and runs."""
        worker = self.box.workers.get(WorkerId(name))
        return worker if worker is not None and hasattr(worker, "service") else None

    def strangers(self) -> list[str]:
        """Workers that were here for a while."""
        names = (f"{role}-{10 + number}" for number in range(1, self.scaled + 1) for role in Role)
        return [name for name in names if WorkerId(name) not in self.box.workers]

    def process(self, name: str) -> BoxWorker | BoxRouter | None:
        return self.box.routers.get(name) or self.worker(name)


def _worker_at(address: str) -> str:
    """Of `name:life`, or `loopback:name/incarnation`."""
    return address.removeprefix("loopback:").partition("/")[0].partition(":")[0]


@cache
def _grammars() -> Grammars:
    """All compiled, before virtual time begins: it knows no threads."""
    made = Grammars(VOCABULARY, GrammarSettings())

    async def compile_all() -> None:
        for constraint in CONSTRAINTS:
            await made.matcher(constraint)

    with asyncio.Runner() as runner:
        runner.run(compile_all())
    return made


Undo = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Kind:
    target: str
    """`worker`, `prefill`, `router`, `process` (either), `client`, `session` (router, worker), `kv pair`
    (reader, source) or `fleet`."""
    strike: Callable[[Play, Fault], Undo | None]
    """Does it and returns what undoes it; None: it cannot happen now."""
    weight: float = 1.0
    details: tuple[str, ...] = ()
    rough: float = 1.0
    """Its weight in rough schedules."""


def nothing() -> None:
    """What needs no undoing."""


def _crash(play: Play, fault: Fault) -> Undo | None:
    (name,) = fault.who
    one = play.process(name)
    if one is None:
        return None
    play.box.crash(name)

    def restart() -> None:
        if isinstance(one, BoxRouter):
            play.box.start_router(name)
        else:
            play.box.start(one.role, name)

    return restart


def _freeze(play: Play, fault: Fault) -> Undo | None:
    (name,) = fault.who
    one = play.process(name)
    if one is None or one.process.stopped:
        return None
    one.process.stop()

    def resume() -> None:
        if one not in play.box.dead:
            one.process.resume()

    def bury() -> None:
        """It never comes back: whoever looks after it kills it, and starts another."""
        if one not in play.box.dead and one.process.stopped:
            play.box.crash(name)
            if isinstance(one, BoxRouter):
                play.box.start_router(name)
            else:
                play.box.start(one.role, name)

    return bury if fault.detail == "for ever" else resume


def _vanish(play: Play, fault: Fault) -> Undo | None:
    """The connection of a client breaks: of one that is served where the fault is, if there is one."""
    waiting = {name: asking for name, asking in play.asking.items() if not asking.done()}
    if not waiting:
        return None
    worker = play.worker(fault.of)
    there = [stream.job.request.id for stream in worker.chassis.streams] if worker is not None else []
    name = next((name for name in (*there, *fault.who) if name in waiting), min(waiting))
    waiting[name].cancel()
    play.vanished.add(name)
    return nothing


def _drain(play: Play, fault: Fault) -> Undo | None:
    """A worker is asked to leave; another takes its place afterwards."""
    worker = play.worker(fault.who[0])
    if worker is None or worker.process.stopped or worker.chassis.card.state is not MemberState.READY:
        return None
    worker.process.call(worker.chassis.begin_drain, 0.0 if fault.detail == "at once" else 3.0)

    def left(task: asyncio.Task[None]) -> None:
        if play.box.workers.get(worker.id) is worker:
            del play.box.workers[worker.id]
            outside(play.box.start, worker.role, worker.id)

    assert worker.task is not None
    worker.task.add_done_callback(left)
    return nothing


def _turn(play: Play, fault: Fault) -> Undo | None:
    """A worker takes the other role, and its own again."""
    worker = play.worker(fault.who[0])
    if worker is None or worker.process.stopped or worker.chassis.card.state is not MemberState.READY:
        return None
    other = Role.DECODE if worker.role is Role.PREFILL else Role.PREFILL
    limit_s = 0.0 if fault.detail == "at once" else 3.0
    worker.process.call(worker.chassis.begin_turn, other, limit_s)

    def back() -> None:
        if worker not in play.box.dead:
            with suppress(Unavailable):  # it leaves
                worker.process.call(worker.chassis.begin_turn, worker.role, limit_s)

    return back


def _grow(play: Play, fault: Fault) -> Undo | None:
    """A worker more, which leaves again: scaled up, then down."""
    role = Role(fault.detail)
    play.scaled += 1
    worker = play.box.start(role, f"{role}-{10 + play.scaled}")

    def leave() -> None:
        if not hasattr(worker, "service") or worker.chassis._card is None:
            asyncio.get_running_loop().call_later(0.1, leave)
            return
        worker.process.call(worker.chassis.begin_drain, 3.0)
        assert worker.task is not None
        worker.task.add_done_callback(lambda task: play.box.workers.pop(worker.id, None))

    return leave


def _bus(play: Play, fault: Fault) -> Undo | None:
    chance, share = random.Random(play.schedule.seed + len(play.trace)), 0.2 + 0.8 * fault.amount
    hub = play.box.bus

    def fate(subject: str) -> tuple[float, ...]:
        if chance.random() > share:
            return (0.0,)
        match fault.detail:
            case "lose":
                return ()
            case "late":
                return (chance.uniform(0.0, 2.0),)
            case _:
                return (0.0, chance.uniform(0.0, 1.5))

    if fault.detail == "away":
        if not hub.up:
            return None
        hub.up = False
        return lambda: setattr(hub, "up", True)
    key = object()
    play.bus_fates[key] = fate
    return lambda: play.bus_fates.pop(key) and None


def _bus_cut(play: Play, fault: Fault) -> Undo | None:
    one = play.process(fault.who[0])
    if one is None or one.bus.mute or one.bus.deaf:
        return None
    one.bus.mute, one.bus.deaf = fault.detail != "deaf", fault.detail != "mute"

    def heal() -> None:
        if one not in play.box.dead:
            one.bus.cut = False

    return heal


def _registry(play: Play, fault: Fault) -> Undo | None:
    hub = play.box.registry
    match fault.detail:
        case "away":
            if not hub.up:
                return None
            hub.up = False
            return lambda: setattr(hub, "up", True)
        case "restarted empty":
            hub.wipe()
        case "all leases revoked":
            hub.revoke_all()
        case "compacted":
            hub.compact()
        case "watches break":
            hub.break_watches(StoreAway("the stream broke"))
        case "lists late":
            hub.list_s = 0.2 + fault.amount * 4.0
            hub.break_watches(StoreAway("the stream broke"))
            return lambda: setattr(hub, "list_s", 0.0)
        case "slow":
            hub.delay_s = 0.2 + fault.amount
            return lambda: setattr(hub, "delay_s", 0.001)
    return nothing


def _registry_cut(play: Play, fault: Fault) -> Undo | None:
    one = play.process(fault.who[0])
    if one is None or one.registry.cut or one.registry.unanswered:
        return None
    what = "unanswered" if fault.detail == "unanswered" else "cut"
    setattr(one.registry, what, True)

    def heal() -> None:
        if one not in play.box.dead:
            setattr(one.registry, what, False)

    return heal


def _session(play: Play, fault: Fault) -> Undo | None:
    router, name = fault.who
    worker, wire = play.worker(name), play.box.wire
    if worker is None:
        return None
    address = worker.address
    match fault.detail:
        case "break":
            wire.cut(router, address)
            return nothing
        case "slow":
            wire.slow(router, address, 0.3 * fault.amount)
            return lambda: wire.slow(router, address, 0.0)
    direction = {"to worker": Direction.TO_WORKER, "to router": Direction.TO_ROUTER}.get(fault.detail)
    wire.partition(router, address, direction)
    return lambda: wire.heal(router, address)


def _calls(play: Play, fault: Fault) -> Undo | None:
    worker = play.worker(fault.who[0])
    if worker is None:
        return None
    for _ in range(1 + int(3 * fault.amount)):
        play.box.wire.spoil(worker.address, Spoilt(fault.detail))
    return nothing


def _kv(play: Play, fault: Fault) -> Undo | None:
    worker = play.worker(fault.who[0])
    if worker is None:
        return None
    hub, address, reads = play.box.hub, worker.transfer.address, 1 + int(3 * fault.amount)
    match fault.detail:
        case "slow":
            hub.delay(address, fault.amount * 2.0)

            def usual() -> None:
                with suppress(KeyError):  # it is gone
                    hub.delay(address, 0.0)

            return usual
        case "drop":
            hub.drop(address, reads)
        case "break":
            hub.cut(address)
        case damage:
            hub.corrupt(address, reads, Damage(damage))
    return nothing


def _kv_part(play: Play, fault: Fault) -> Undo | None:
    reader, source = (play.worker(name) for name in fault.who)
    if reader is None or source is None:
        return None
    hub, pair = play.box.hub, (reader.transfer.address, source.transfer.address)
    hub.part(*pair)
    return lambda: hub.heal(*pair)


KINDS: dict[str, Kind] = {
    "crash of a worker": Kind("worker", _crash, 3.0),
    "crash of a router": Kind("router", _crash),
    "freeze of a worker": Kind("worker", _freeze, 3.0, ("", "", "for ever")),
    "freeze of a router": Kind("router", _freeze, 1.0, ("", "", "for ever")),
    "vanish": Kind("client", _vanish, 2.0, rough=6.0),
    "drain": Kind("worker", _drain, 2.0, ("", "at once")),
    "role": Kind("worker", _turn, 2.0, ("", "at once")),
    "scale": Kind("fleet", _grow, 1.0, ("prefill", "decode")),
    "bus": Kind("fleet", _bus, 2.0, ("lose", "late", "twice", "away")),
    "bus cut": Kind("process", _bus_cut, 1.0, ("mute", "deaf", "both")),
    "registry": Kind(
        "fleet",
        _registry,
        2.0,
        (
            "away", "restarted empty", "all leases revoked", "compacted", "watches break", "lists late",
            "slow",
        ),
    ),
    "registry cut": Kind("process", _registry_cut, 1.0, ("cut", "unanswered")),
    "session": Kind("session", _session, 4.0, ("break", "slow", "both", "to worker", "to router")),
    "calls": Kind("worker", _calls, 1.0, tuple(spoilt.value for spoilt in Spoilt)),
    "kv": Kind("prefill", _kv, 4.0, ("slow", "drop", "break", *(damage.value for damage in Damage))),
    "kv partition": Kind("kv pair", _kv_part, rough=8.0),
}  # fmt: skip


# -- playing


@dataclass(slots=True)
class Outcome:
    schedule: Schedule
    problems: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    """How clients fared: `finished`, `left`, `router lost`, or the name of an error."""
    struck: Counter[str] = field(default_factory=Counter)
    """Faults that could happen, by kind."""
    counters: Counter[str] = field(default_factory=Counter)
    """Of all workers and routers that lived to the end, added up."""
    damaged: int = 0
    """Reads of KV whose bytes were made to differ."""
    seconds: float = 0.0
    """Virtual."""
    trace: list[tuple[object, ...]] = field(default_factory=list)
    """Every message, fault, choice and token, with its time."""

    def digest(self) -> str:
        """Of the trace: equal for equal runs. Lease names alone are drawn, as nobody is to guess them."""
        text = "\n".join(map(repr, self.trace))
        return hashlib.blake2b(re.sub(r"lease \w+", "lease", text).encode(), digest_size=8).hexdigest()


@contextmanager
def _defects(problems: list[str]) -> Iterator[None]:
    """What is logged as an error is a defect; all below is switched off, for speed."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            why = f": {record.exc_info[1]!r}" if record.exc_info else ""
            problems.append(f"logged: {record.getMessage()}{why}")

    root, keep, before = logging.getLogger(), Keep(logging.ERROR), logging.root.manager.disable
    root.addHandler(keep)
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
        root.removeHandler(keep)


def play(schedule: Schedule) -> Outcome:
    """Never raises: whatever goes wrong is among the problems."""
    outcome = Outcome(schedule)
    if not _grammars.cache_info().currsize:
        _grammars()
        # What was loaded so far is no garbage: the collector need not look at it again and again.
        gc.freeze()
    with _defects(outcome.problems):
        try:
            run(_play(schedule, outcome), horizon_s=600.0)
        except Exception as error:  # noqa: BLE001 — a seed that fails must be named, whatever fails in it
            outcome.problems.append(f"{type(error).__name__}: {error}")
    return outcome


async def _play(schedule: Schedule, outcome: Outcome) -> None:
    loop = asyncio.get_running_loop()
    game = Play(schedule)
    box = game.box

    def unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        outcome.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    loop.set_exception_handler(unhandled)
    outcome.trace, outcome.struck = game.trace, game.struck
    game.problems = outcome.problems
    game.tap()
    await box.__aenter__()
    try:
        at_rest = _tasks(box)
        game.open = True
        for fault in schedule.faults:
            if not fault.link:
                loop.call_later(fault.at, game.strike, fault)
        asking = [asyncio.create_task(_client(game, client)) for client in schedule.clients]
        looking = [asyncio.create_task(_pools_are_sound(game, asking))] if schedule.rush else []
        longest = max((fault.lasts for fault in schedule.faults), default=0.0) + 2.0
        if schedule.seed % 4:
            # Nobody is left to notice more: saves most of the time. Else faults last as long as drawn.
            await asyncio.wait(asking, timeout=longest)
        else:
            await asyncio.sleep(longest)
        game.heal()
        answers = await asyncio.wait_for(asyncio.gather(*asking), DEADLINE_S + HEAL_LIMIT_S)
        await asyncio.gather(*looking)
        await _settled(game)
        for client, answer in zip(schedule.clients, answers, strict=True):
            outcome.ends[await _judge(game, client, answer)] += 1
        await _whole_again(game)
        for number, name in enumerate(box.routers):
            await _serves(box, name, number)
        await _whole_again(game)
        box.validate()
        _nothing_runs(box, at_rest, outcome.problems)
        for router in box.routers.values():
            outcome.counters.update(router.router.flow.counters)
            outcome.counters.update(router.router.counters)
            for record in router.router.flow.records.ended:
                game.trace.append((record.as_dict(),))
        for worker in box.workers.values():
            outcome.counters.update(worker.load().counters)
    finally:
        outcome.damaged = box.hub.damaged
        outcome.seconds = loop.time()
        if game.undoing:
            game.heal()
        await box.close()


async def _client(game: Play, client: Client) -> Answer:
    answer = Answer(client.request.id)
    await asyncio.sleep(client.at)
    if client.router not in game.box.routers:
        answer.lost = True  # nobody listens there
        return answer
    asked = true_time()
    asking = asyncio.create_task(game.box.ask_over(client.router, client.request, answer, client.stop_after))
    game.asking[client.request.id] = asking
    await asyncio.wait({asking}, timeout=client.vanish_after)
    asking.cancel()
    await asyncio.wait({asking})
    if not asking.cancelled():
        asking.result()
    late_s = true_time() - asked - client.request.deadline_s
    if late_s > 0.1 and not any(fault.kind == "freeze of a router" for fault in game.schedule.faults):
        game.problems.append(f"{client.request.id} ended {late_s:.1f} s after its deadline")
    game.trace.append((true_time(), "client", client.request.id, tuple(answer.tokens), tuple(answer.times)))
    return answer


# -- judging


async def _truth(game: Play, request: Request, count: int | None = None) -> list[int]:
    """What the answer must be, or its first `count` tokens."""
    constraint = request.constraint
    matcher = None if constraint is None else await _grammars().matcher(constraint)
    most = request.sampling.max_tokens if count is None else min(count, request.sampling.max_tokens)
    return reference_tokens(request.prompt, request.sampling, most, game.box.model, matcher)


async def _judge(game: Play, client: Client, answer: Answer) -> str:
    """How the client fared; what is wrong with it goes to the problems."""
    request, schedule, problems = client.request, game.schedule, game.problems
    room = schedule.blocks * schedule.engine.block_size + 1 - len(request.prompt)
    # Of one that did not come to its end no more than its tokens is looked at.
    count = None if answer.end is not None and answer.error is None else len(answer.tokens)
    if answer.end is not None and answer.end.finish is FinishReason.CANCELLED:
        count = len(answer.tokens)
    truth = (await _truth(game, request, count))[: max(0, room)]
    who = f"{request.id} at {client.router}"
    if answer.tokens != truth[: len(answer.tokens)]:
        problems.append(f"{who}: wrong text {answer.tokens}, not {truth}")
    if answer.lost:
        return "router lost"
    leaves = request.id in game.vanished or client.vanish_after is not None or client.stop_after is not None
    if not answer.ends and leaves:
        return "left"
    if answer.ends != 1:
        problems.append(f"{who}: {answer.ends} ends")
    if answer.error is not None:
        name = type(answer.error).__name__
        if room < 1 and isinstance(answer.error, BadRequest):
            return "too long"
        due = schedule.safe and client.router == SAFE_ROUTER and request.deadline_s == DEADLINE_S
        if due or not isinstance(answer.error, FAIR):
            problems.append(f"{who}: {name}: {answer.error}")
        return name
    assert answer.end is not None
    if answer.end.finish is FinishReason.CANCELLED:
        if not leaves:
            problems.append(f"{who}: cancelled by nobody")
        return "left"
    drawn, sampling = len(truth), request.sampling
    stop = truth[-1] == END or (truth[-1] in sampling.stop_token_ids and drawn > sampling.min_tokens)
    good = FinishReason.STOP if stop else FinishReason.LENGTH
    if answer.tokens != truth or answer.end.finish is not good:
        problems.append(f"{who}: {answer.end.finish} after {len(answer.tokens)} tokens of {len(truth)}")
    usage = answer.end.usage
    if (usage.prompt_tokens, usage.completion_tokens) != (len(request.prompt), len(truth)):
        problems.append(f"{who}: usage {usage}")
    return "finished"


def _tasks(box: Box) -> dict[str, Counter[str]]:
    """Names of what runs in each process, with counts."""
    return {
        one.process.name: Counter(str(task.get_coro().__qualname__) for task in one.process.tasks())
        for one in (*box.workers.values(), *box.routers.values())
    }


def _nothing_runs(box: Box, at_rest: dict[str, Counter[str]], problems: list[str]) -> None:
    for name, tasks in _tasks(box).items():
        if more := tasks - at_rest[name]:
            problems.append(f"still running in {name}: {dict(more)}")


async def _pools_are_sound(game: Play, asking: Sequence[asyncio.Task[Answer]]) -> None:
    """As long as anybody asks."""
    while not all(one.done() for one in asking):
        for worker in game.box.workers.values():
            if hasattr(worker, "service"):
                worker.engine.validate()
        await asyncio.sleep(0.1)


async def _settled(game: Play) -> None:
    """All clients are gone. Where no message was held up, nobody works for them any more, soon, and no lease
    had to run out: whoever was done with it has said so. A loan may: it ends as its borrower gives up."""
    kinds = {kind for kind, _ in game.happened}
    if kinds.isdisjoint(SILENT):
        await asyncio.sleep(SETTLED_S)
        for worker in game.box.workers.values():
            if not hasattr(worker, "service"):
                continue
            load = worker.load()
            if worker.service.busy() or load.streams:
                game.problems.append(f"{worker.id} still works: {load.running} run, streams {load.streams}")
            gone = load.counters["leases_expired"] - load.counters["loans_expired"]
            if gone and game.happened.isdisjoint(UNTOLD):
                game.problems.append(f"{worker.id}: {gone} leases ran out, as nobody said that he was done")
    for router in game.box.routers.values():
        failovers = router.router.flow.counters["failovers"]
        if failovers and not kinds - {"vanish"}:
            game.problems.append(f"{router.name}: {failovers} failovers, and there was no fault")


async def _whole_again(game: Play) -> None:
    """All is idle, everybody knows everybody, and every index is proven and true."""
    box, names = game.box, set(game.schedule.workers)

    def left() -> str:
        if (there := {str(name) for name in box.workers}) != names:
            return f"workers are {sorted(there)}"
        for worker in box.workers.values():
            if not hasattr(worker, "service") or not worker.service.idle():
                return f"{worker.id} is not idle"
            card = worker.chassis.card
            if (card.role, card.state) != (worker.role, MemberState.READY):
                return f"{worker.id} is {card.state}, a {card.role} worker"
        for router in box.routers.values():
            if not router.knows_all():
                return f"{router.name} does not know all workers"
            if strange := [name for name in game.strangers() if router.router.index.holds(WorkerId(name))]:
                return f"the index of {router.name} has blocks of {strange}, which are gone"
            if late := router.sent_by_others():
                # A message of a life that is over may come late; nobody counts it for long.
                return f"{router.name} counts {late} of other routers, which are over"
            if not router.proven():
                return (
                    f"the index of {router.name} is not the workers' table: {router.router.index.unproven()}"
                )
        return ""

    end = true_time() + HEAL_LIMIT_S
    while why := left():
        if true_time() > end:
            raise AssertionError(f"{HEAL_LIMIT_S:g} s after everything healed: {why}")
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)


async def _serves(box: Box, name: str, number: int) -> None:
    prompt = tuple(range(number, number + 9))
    request = Request(RequestId(f"after-{number}"), MODEL, prompt, Sampling(max_tokens=6), deadline_s=20.0)
    answer = Answer(request.id)
    await box.ask_over(name, request, answer)
    assert answer.error is None, f"healed, and {name} answers {answer.error!r}"
    assert answer.tokens == box.truth(request), f"healed, and {name} says the wrong thing"
