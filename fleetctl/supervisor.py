"""Keeps one machine's fleet as wanted: starts, watches, restarts, drains and ends its processes.

The decisions are `fleetctl.reconcile`; here are the processes, the watch and the clock. Every process
is started in exec form in a session of its own: SIGTERM reaches exactly it, and Ctrl-C in the terminal
only the supervisor. If the supervisor dies, the kernel ends them all (`fleetctl/child.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fleet.card_codec import decode_card
from fleet.errors import BadRequest, FleetError, Unavailable
from fleet.events import LoadReport
from fleet.ids import new_worker_id
from fleet.member import MemberState, WorkerCard, desired_key, workers_prefix
from fleet.registry import Condition, Registry, View
from fleet.targets import Desired, Mode, decision_key, format_desired, parse_decision, parse_desired
from fleet.wire import Wire
from fleetctl import child as exec_shim
from fleetctl.connect import connected
from fleetctl.picture import registered_planners, registered_routers
from fleetctl.reconcile import (
    answered,
    became,
    decide,
    exited,
    failing,
    settled,
    started,
)
from fleetctl.servers import etcd_flags, find_binary, free_ports, http_status, nats_flags, nats_serves
from fleetctl.state import MARK, StateFolder, born
from fleetctl.words import (
    SERVERS,
    WORKERS,
    Action,
    Child,
    ChildRecord,
    Closing,
    FleetPicture,
    FleetState,
    Forget,
    Kill,
    Kind,
    Phase,
    Policy,
    RouterRow,
    ServerRow,
    Start,
    Stop,
    WorkerRow,
)

log = logging.getLogger(__name__)

LAST_LINES = 15
"""Of a failed child's log, shown with the error."""


def default_commands() -> dict[Kind, tuple[str, ...]]:
    """How each process is started, before its flags. `-P`: modules of the folder one happens to stand
    in must not take the place of ours."""
    python = (sys.executable, "-P", "-m")
    return {
        Kind.ETCD: (find_binary("etcd"),),
        Kind.NATS: (find_binary("nats-server"),),
        Kind.ROUTER: (*python, "router"),
        Kind.PLANNER: (*python, "planner"),
        Kind.PREFILL: (*python, "prefill_worker"),
        Kind.DECODE: (*python, "decode_worker"),
    }


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What `up` was asked for."""

    fleet: str
    host: str
    port: int
    """Of the router; a real one, never 0."""
    model: str
    """Folder of the model's files, or the latency model's name."""
    model_name: str
    desired: Desired
    commands: Mapping[Kind, tuple[str, ...]]
    flags: Mapping[Kind, tuple[str, ...]] = field(default_factory=dict)
    """Further settings for the processes of a kind."""
    policy: Policy = field(default_factory=Policy)
    look_s: float = 1.0
    """Between looks at the children, seconds; shorter while one is starting."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One line of what happens, and why."""

    name: str
    what: str
    why: str


class StartFailed(FleetError):
    """The fleet never came up. The message names the child and ends with its last log lines."""


class Supervisor:
    """One fleet from first start to last exit. `notice` is called for everything it does."""

    def __init__(self, plan: FleetPlan, folder: StateFolder, notice: Callable[[Notice], None]) -> None:
        self.plan = plan
        self.desired = plan.desired
        self.served = False
        """Whether the fleet was ready once."""
        self.ready = False
        """Whether a request could be served at the last look."""
        self._folder = folder
        self._notice = notice
        etcd_port, self._peer_port, nats_port = free_ports(3)
        self._etcd = ("127.0.0.1", etcd_port)
        self._nats = ("127.0.0.1", nats_port)
        self._children: dict[str, Child] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._born: dict[str, str | None] = {}
        self._notes: dict[str, str] = {}
        self._view = View({}, live=False)
        self._cards: dict[str, WorkerCard] = {}
        """The last one each worker showed."""
        self._registered: set[str] = set()
        """Workers whose card stands now."""
        self._desired_read: bytes | None = None
        self._desired_own: list[bytes] = []
        """Counts that were written here and are not read back yet."""
        self._desired_moved = False
        """Whether the counts in etcd are to follow a change of role."""
        self._written: FleetState | None = None
        self._reports: dict[str, LoadReport] = {}
        self._router_scheme = "http"
        """By the card of the router, which alone knows all its settings."""
        self._router_status: int | None = None
        self._planners: frozenset[int] = frozenset()
        """Pids of the planners that show themselves."""
        self._unserved_since: float | None = None
        self._closing = Closing.NO
        self._failure: StartFailed | None = None
        self._changed = asyncio.Event()
        self._tasks: asyncio.TaskGroup

    @property
    def url(self) -> str:
        host = _reachable(self.plan.host)
        host = f"[{host}]" if ":" in host else host
        return f"{self._router_scheme}://{host}:{self.plan.port}"

    @property
    def etcd(self) -> str:
        return f"{self._etcd[0]}:{self._etcd[1]}"

    @property
    def nats(self) -> str:
        return f"nats://{self._nats[0]}:{self._nats[1]}"

    @property
    def closing(self) -> Closing:
        return self._closing

    def close(self) -> None:
        """Drains and ends everything in order; called again, hurries, and passes the hurry on."""
        again = self._closing is not Closing.NO
        self._closing = Closing.HURRIED if again else Closing.ORDERLY
        now = asyncio.get_running_loop().time()
        for name, child in self._children.items():
            if again and child.phase is Phase.STOPPING:
                self._children[name] = replace(child, since=now)
                self._terminate(name)
        self._changed.set()

    async def run(self) -> None:
        """Until it was closed and the last child is gone. Raises `StartFailed`. Call with the lock held."""
        self._prepare()
        try:
            async with connected(self.etcd) as (registry, wire), asyncio.TaskGroup() as self._tasks:
                beside = [
                    self._tasks.create_task(self._watch(registry)),
                    self._tasks.create_task(self._look_again(registry, wire)),
                ]
                await self._reconcile()
                for task in beside:
                    task.cancel()
        finally:
            for process in self._processes.values():
                if process.returncode is None:
                    _kill_group(process)
            self._folder.remove()
        if self._failure is not None:
            raise self._failure

    def _prepare(self) -> None:
        self._folder.fresh_logs()
        for orphan in self._folder.clear_orphans():
            self._say(orphan.name, "ended", f"left over from an earlier run, pid {orphan.pid}")
        # Cards of an earlier life would be leased anew by a restarted etcd, and look alive.
        shutil.rmtree(self._folder.path / "etcd", ignore_errors=True)

    # -- the loop

    async def _reconcile(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            self._changed.clear()
            decision = decide(
                self.desired, list(self._children.values()), clock(), self.plan.policy, self._closing
            )
            for action in decision.actions:
                await self._act(action, clock())
            self._judge(clock())
            self._write()
            if self._closing is not Closing.NO and not self._children:
                return
            if decision.actions:
                continue
            wait_s = None if decision.wake_at is None else max(0.0, decision.wake_at - clock())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    async def _act(self, action: Action, now: float) -> None:
        if not isinstance(action, Start) and action.name not in self._children:
            return  # it ended while an action before this one was taken
        match action:
            case Start(kind, name, why):
                await self._start(kind, name, why)
            case Stop(name, why):
                self._say(name, "stop", why)
                self._children[name] = became(self._children[name], Phase.STOPPING, now)
                self._terminate(name)
            case Kill(name, why):
                self._say(name, "kill", why)
                self._children[name] = replace(self._children[name], killed=True)
                if self._processes[name].returncode is None:
                    _kill_group(self._processes[name])
            case Forget(name, why):
                self._say(name, "forget", why)
                self._drop(name)

    def _terminate(self, name: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._processes[name].send_signal(signal.SIGTERM)

    async def _start(self, kind: Kind, name: str | None, why: str) -> None:
        clock = asyncio.get_running_loop().time
        again = name is not None
        if name is None:
            name = new_worker_id(kind) if kind in WORKERS else str(kind)
        child = self._children[name] if again else Child(name, kind, Phase.STARTING, clock())
        command = [*self.plan.commands[kind], *self._flags(kind, name), *self.plan.flags.get(kind, ())]
        shim = [sys.executable, "-I", "-S", str(Path(exec_shim.__file__)), str(os.getpid())]
        try:
            with self._folder.open_log(name) as output:
                with contextlib.suppress(OSError):  # The disk is full: who starts again is worth more.
                    output.write(f"{MARK} {time.strftime('%F %T')}: {' '.join(command)}\n".encode())
                process = await asyncio.create_subprocess_exec(
                    *shim,
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=_environment(kind),
                    start_new_session=True,
                )
        except OSError as error:
            # No more processes or memory for now: the same as a crash, and tried again like one.
            self._say(name, "crash", f"cannot be started: {error}")
            self._after_exit(replace(child, phase=Phase.STARTING), 1)
            return
        self._say(name, "start", f"{why}; pid {process.pid}")
        self._children[name] = started(child, process.pid, clock())
        self._processes[name] = process
        self._born[name] = born(process.pid)
        self._tasks.create_task(self._attend(name, process))

    def _flags(self, kind: Kind, name: str) -> list[str]:
        if kind is Kind.ETCD:
            return etcd_flags(self._etcd[1], self._peer_port, self._folder.path / "etcd")
        if kind is Kind.NATS:
            return nats_flags(self._nats[1])
        control = ["--control.fleet", self.plan.fleet]
        control += ["--control.etcd", self.etcd, "--control.nats", self.nats]
        model = ["--model", self.plan.model, "--served-model-name", self.plan.model_name]
        if kind is Kind.ROUTER:
            bind = ["--control.bind", self.plan.host, "--control.advertise", _reachable(self.plan.host)]
            return [*control, *bind, "--http.port", str(self.plan.port), *model]
        if kind is Kind.PLANNER:
            return [*control, "--decisions", str(self._folder.path / "decisions.jsonl")]
        others = self.plan.flags.get(Kind.DECODE if kind is Kind.PREFILL else Kind.PREFILL)
        other_role = ["--other-role", shlex.join(others)] if others else []
        return [*control, *model, "--worker-id", name, *other_role]

    async def _attend(self, name: str, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        self._after_exit(self._children[name], code)

    def _after_exit(self, child: Child, code: int) -> None:
        now = asyncio.get_running_loop().time()
        slot, why = exited(child, code, now, self.plan.policy, random.random(), self._closing)
        self._say(child.name, "gone" if slot is None else "crash", why)
        if slot is None:
            self._drop(child.name)
        else:
            self._children[child.name] = slot
            self._reports.pop(child.name, None)
        if child.kind is Kind.ROUTER:
            self._router_status = None
        self._changed.set()

    def _drop(self, name: str) -> None:
        for table in (self._children, self._processes, self._born, self._notes, self._reports, self._cards):
            table.pop(name, None)

    def _judge(self, now: float) -> None:
        """Notices the moment of readiness, or that it will never come."""
        if self._closing is not Closing.NO:
            self.ready = False
            return
        all_ready = settled(self.desired, list(self._children.values()))
        serves = self._router_status == 200
        self.ready = serves and (all_ready or self.served)
        if self.served:
            return
        if all_ready and serves:
            self.served = True
            self._say("fleet", "ready", f"{self.url}/v1")
            return
        for child in self._children.values():
            if (why := failing(child, self.plan.policy)) is not None:
                self._fail(child.name, why)
                return
        if not all_ready:
            self._unserved_since = None
        elif self._unserved_since is None:
            self._unserved_since = now
        elif now - self._unserved_since > self.plan.policy.ready_limit_s:
            answer = "nothing" if self._router_status is None else str(self._router_status)
            self._fail("router", f"all processes run, but the router's /ready answers {answer}")

    def _fail(self, name: str, why: str) -> None:
        self._say(name, "failed", why)
        lines = self._folder.last_lines(name, LAST_LINES) or ["(it wrote nothing)"]
        self._failure = StartFailed(
            "\n".join(
                [f"{why}. The last lines of {self._folder.log(name)}:", *(f"    {line}" for line in lines)]
            )
        )
        self._closing = Closing.HURRIED
        self._changed.set()

    # -- what is seen

    async def _watch(self, registry: Registry) -> None:
        async for view in registry.watch(f"/fleet/{self.plan.fleet}/"):
            self._view = view
            self._read_desired(view)
            self._read_cards(view)
            if self._desired_moved:
                await self._keep_desired(registry)
            self._read_router(view)
            self._planners = registered_planners(view, self.plan.fleet)
            self._changed.set()

    def _read_desired(self, view: View) -> None:
        data = view.values.get(desired_key(self.plan.fleet))
        if data is None or data == self._desired_read:
            return  # not written yet, or lost with etcd's data: what was wanted last still is
        self._desired_read = data
        if data in self._desired_own:
            # Its own word comes back, when it may already want something else.
            del self._desired_own[: self._desired_own.index(data) + 1]
            return
        self._desired_own.clear()
        try:
            desired = parse_desired(data)
        except BadRequest as error:
            self._say_once("desired", "ignored", error.message)
            return
        if desired != self.desired:
            self._say("desired", "changed", _wanted(desired))
            self.desired = desired

    def _read_cards(self, view: View) -> None:
        now = asyncio.get_running_loop().time()
        prefix = workers_prefix(self.plan.fleet)
        self._registered = set()
        for key, data in view.values.items():
            if not key.startswith(prefix):
                continue
            try:
                card = decode_card(data, key)
            except ValueError as error:
                self._say_once(key.removeprefix(prefix), "ignored", str(error))
                continue
            self._cards[card.id] = card
            self._registered.add(card.id)
            child = self._children.get(card.id)
            # A card of the life before says nothing about this one.
            if child is None or child.pid != card.pid:
                continue
            leaving = Phase.DRAINING if card.turning is None else Phase.TURNING
            phases = {MemberState.READY: Phase.READY, MemberState.DRAINING: leaving}
            if card.state in phases:
                child = self._turn(child, Kind(card.turning or card.role))
                self._enter(child, phases[card.state], now)

    def _read_router(self, view: View) -> None:
        router = self._children.get("router")
        for _, url, pid in registered_routers(view, self.plan.fleet):
            if router is not None and router.pid == pid:
                self._router_scheme = urlsplit(url).scheme

    def _turn(self, child: Child, kind: Kind) -> Child:
        """The wanted counts move with the role of a worker, in one step with what is counted: nothing is
        started or stopped for it. After a crash it starts in the new role."""
        if child.kind is kind or child.phase is Phase.STOPPING:
            return child
        turned = self._children[child.name] = replace(child, kind=kind)
        self.desired, self._desired_moved = self.desired.turned(kind), True
        wanted = _wanted(self.desired)
        self._say(child.name, "role", f"{child.kind} → {kind}; wanted from now on: {wanted}")
        self._changed.set()
        return turned

    def _enter(self, child: Child, phase: Phase, now: float) -> None:
        after = became(child, phase, now)
        if after is not child:
            self._children[child.name] = after
            took = f"after {now - child.since:.1f} s" if phase is Phase.READY else "told to by an operator"
            if phase is Phase.TURNING:
                took = f"drains, then it is a {child.kind} worker"
            self._say(child.name, str(phase), took)
            self._changed.set()

    async def _look_again(self, registry: Registry, wire: Wire) -> None:
        while True:
            await self._look(registry, wire)
            with contextlib.suppress(OSError):  # A full disk is no reason to end a fleet.
                self._folder.bound_logs(self.plan.policy.log_bytes)
            hurry = any(child.phase is not Phase.READY for child in self._children.values())
            await asyncio.sleep(min(0.2, self.plan.look_s) if hurry or not self.ready else self.plan.look_s)

    async def _look(self, registry: Registry, wire: Wire) -> None:
        looks: list[Coroutine[Any, Any, None]] = [
            self._look_at(child, wire) for child in self._children.values() if child.pid is not None
        ]
        await asyncio.gather(*looks, self._keep_desired(registry))
        self._changed.set()

    async def _keep_desired(self, registry: Registry) -> None:
        """Writes the counts where they are missing, at first and after etcd lost its data, or have moved."""
        key, data = desired_key(self.plan.fleet), format_desired(self.desired)
        if self._view.live and (self._desired_moved or key not in self._view.values):
            if data not in self._desired_own:
                self._desired_own.append(data)
            with contextlib.suppress(Unavailable):
                entry = await registry.entry(key)
                if entry is not None and entry.value not in (self._desired_read, *self._desired_own):
                    self._desired_moved = False  # An operator or the planner was sooner: about to be read.
                    return
                condition = Condition(key, modified=0 if entry is None else entry.modified)
                if await registry.put_if([condition], {key: data}) is not None:
                    self._desired_moved = self._desired_moved and data != format_desired(self.desired)

    async def _look_at(self, child: Child, wire: Wire) -> None:
        load: int | None = None
        if child.kind in WORKERS:
            card = self._cards.get(child.name)
            report = await self._report(card, wire) if card and card.pid == child.pid else None
            load = None if report is None else report.running + report.waiting
            # A frozen worker answers nothing and its card goes with its lease; the card alone may be
            # missing because etcd is.
            alive = report is not None or child.name in self._registered or not self._view.live
        elif child.kind is Kind.ETCD:
            alive = await http_status(f"http://{self.etcd}/health", 2.0) == 200
        elif child.kind is Kind.NATS:
            alive = await nats_serves(*self._nats, 2.0)
        elif child.kind is Kind.PLANNER:
            starting = child.phase is Phase.STARTING
            alive = child.pid in self._planners or (not self._view.live and not starting)
        else:
            self._router_status = await http_status(f"{self.url}/ready", 2.0)
            alive = self._router_status is not None
        now = asyncio.get_running_loop().time()
        current = self._children.get(child.name)
        if current is None or current.pid != child.pid:
            return
        self._children[child.name] = current = answered(current, alive, load, now)
        if alive and child.kind not in WORKERS and current.phase is Phase.STARTING:
            self._enter(current, Phase.READY, now)

    async def _report(self, card: WorkerCard, wire: Wire) -> LoadReport | None:
        try:
            report = await wire.status(card.address, 2.0)
        except FleetError:
            self._reports.pop(card.id, None)
            return None
        self._reports[card.id] = report
        return report

    # -- what is told

    def _say(self, name: str, what: str, why: str) -> None:
        self._notes[name] = f"{what}: {why}"
        log.info("%s %s: %s", name, what, why)
        self._notice(Notice(name, what, why))

    def _say_once(self, name: str, what: str, why: str) -> None:
        """For what stays wrong: a view comes with every change of any key."""
        if self._notes.get(name) != f"{what}: {why}":
            self._say(name, what, why)

    def _write(self) -> None:
        state = FleetState(
            fleet=self.plan.fleet,
            pid=os.getpid(),
            born=born(os.getpid()) or "",
            model=self.plan.model_name,
            etcd=self.etcd,
            nats=self.nats,
            router=self.url,
            ready=self.ready,
            children=tuple(
                ChildRecord(
                    name=child.name,
                    kind=child.kind,
                    phase=child.phase,
                    pid=child.pid,
                    born=self._born.get(child.name),
                    restarts=child.restarts,
                    log=str(self._folder.log(child.name)),
                    note=self._notes.get(child.name, ""),
                )
                for child in self._children.values()
            ),
        )
        if state == self._written:
            return
        try:
            self._folder.write(state)
        except OSError as error:
            # A full disk is no reason to end a fleet. Who reads meanwhile sees how it was; tried again soon.
            self._say_once("state", "old", f"{self._folder.path}: {error}")
        else:
            self._notes.pop("state", None)
            self._written = state

    def picture(self) -> FleetPicture:
        """The fleet as last seen, for the live view."""
        children = list(self._children.values())
        workers = tuple(
            self._row(child)
            for child in sorted(children, key=lambda one: (one.kind is not Kind.PREFILL, one.name))
            if child.kind in WORKERS
        )
        router = self._children.get("router")
        state = "away" if router is None else router.phase.value
        if router is not None and router.phase is Phase.READY and self._router_status != 200:
            state = "no worker ready"
        servers = [self._children.get(str(kind)) for kind in SERVERS]
        key = decision_key(self.plan.fleet)
        rows = [
            ServerRow(address, child.phase if child else "away", child.pid if child else None)
            for child, address in zip(servers, (self.etcd, self.nats), strict=True)
        ]
        return FleetPicture(
            fleet=self.plan.fleet,
            model=self.plan.model_name,
            workers=workers,
            routers=(RouterRow("router", self.url, state, router.pid if router else None),),
            desired=self.desired,
            etcd=rows[0],
            nats=rows[1],
            supervisor=os.getpid(),
            decision=parse_decision(said) if (said := self._view.values.get(key)) is not None else None,
        )

    def _row(self, child: Child) -> WorkerRow:
        report = self._reports.get(child.name) if child.phase is not Phase.CRASHED else None
        card = self._cards.get(child.name)
        row = WorkerRow(
            id=child.name,
            role=child.kind,
            state=child.phase,
            pid=child.pid,
            address=card.address if card else None,
            sessions=card.sessions if card else None,
            restarts=child.restarts,
            note=self._notes.get(child.name, ""),
        )
        if report is None:
            return row
        return replace(
            row,
            running=report.running,
            waiting=report.waiting,
            queued_tokens=report.queued_tokens,
            blocks_free=report.blocks_free,
            blocks_total=report.blocks_total,
            counters=report.counters,
        )


def _wanted(desired: Desired) -> str:
    mode = "" if desired.mode is Mode.OFF else f" ({desired.mode})"
    return f"prefill={desired.prefill} decode={desired.decode}{mode}"


def _environment(kind: Kind) -> dict[str, str]:
    # Etcd and NATS are our own and given by flags: what names another fleet's must not reach them.
    others = ("PDFLEET_CONTROL_ETCD", "PDFLEET_CONTROL_NATS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    if kind in WORKERS:
        # Several workers share the cores; what the user set stays.
        env.setdefault("OMP_NUM_THREADS", "1")
        # Weights and KV on huge pages: fewer misses while a decode step reads all of them.
        env.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    env.setdefault("PYTHONUNBUFFERED", "1")
    return env


def _reachable(host: str) -> str:
    """Where a router that listens on every interface is found from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _kill_group(process: asyncio.subprocess.Process) -> None:
    # Each child leads a group of its own, so that this can never reach another one.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
