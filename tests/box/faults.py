"""What can happen to a whole fleet, and how each kind of it strikes and is undone."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from schedules import CONSTRAINTS, LATENCY, VOCABULARY, Fault, Schedule
from whole_fleet import Box, BoxRouter, BoxWorker

from engine.bounds import GrammarSettings
from engine.grammar import Grammars, Matcher
from fleet.chassis import ChassisSettings
from fleet.errors import Unavailable
from fleet.handoff import DecodeJob
from fleet.ids import WorkerId
from fleet.member import MemberState, Role
from fleet.registry.store import StoreAway
from fleet.request import Constraint
from fleet.virtual_time import outside, true_time
from fleet.wire.memory import Direction, Spoilt
from fleet.wire.session import WireSettings
from kv_transfer.loopback import Damage
from router.settings import FlowSettings, RouterSettings, WatchSettings


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
        return await grammars().matcher(constraint, generated)

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
def grammars() -> Grammars:
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
