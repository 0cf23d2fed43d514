"""A planner over a simulated fleet: the one that serves, with the supervisor's decisions, on another clock.

What stands in for processes: a start that takes its time, and a worker whose task ends when it has drained.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from fleet.errors import Unavailable
from fleet.member import MemberState, Role, WorkerCard, desired_key
from fleet.registry import View
from fleet.targets import Desired, Mode, format_desired, parse_desired
from fleet.virtual_time import Process
from fleetctl.picture import cards_in
from fleetctl.reconcile import answered, became, decide
from fleetctl.sim.fleet import SimFleet, SimWorker
from fleetctl.sim.words import Scaled, Scaling
from fleetctl.words import SERVERS, WORKERS, Action, Child, Kind, Phase, Policy, Start, Stop
from planner.decisions import DecisionsFile
from planner.etcd import EtcdActuator
from planner.run import Planner

_DRAIN_S = 60.0
_NEVER_S = 1e9
_LOOK_S = 1.0


class ScaledFleet:
    """Of one run. `ended` is told of each worker before it is forgotten."""

    def __init__(
        self, fleet: SimFleet, scaling: Scaling, desired: Desired, ended: Callable[[SimWorker], None]
    ) -> None:
        self._fleet = fleet
        self._scaling = scaling
        self._desired = replace(desired, mode=Mode.ACT, budget=scaling.budget)
        self._ended = ended
        self._registry = fleet.registry.registry()
        self._planner: Planner
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self._children: dict[str, Child] = {}
        self._cold: dict[str, asyncio.TimerHandle] = {}
        self._view = View({})
        self._moved = False
        self._read: bytes | None = None
        self._written: list[bytes] = []
        """By itself, and not read again yet."""
        self._over = False
        self._changed = asyncio.Event()
        self._made = 0
        self._turns = 0
        self._worker_s = 0.0
        self._wanted_s = [0.0, 0.0]
        self._counted_at = self._start
        self._counts: list[tuple[float, int, int, int]] = []
        self._policy = Policy(ready_limit_s=_NEVER_S, drain_limit_s=_NEVER_S, silent_limit_s=_NEVER_S)
        for id, worker in fleet.workers.items():
            self._children[str(id)] = Child(str(id), Kind(worker.role), Phase.READY, self._start)
            self._await_end(str(id), worker)
        self._note()

    async def run(self) -> None:
        """Until cancelled. Workers that end later than this are the fleet's to count."""
        scaling, fleet, registry = self._scaling, self._fleet, self._registry
        await registry.put(desired_key(fleet.name), format_desired(self._desired))
        file: DecisionsFile | None = None
        if scaling.decisions is not None:
            file = DecisionsFile(scaling.decisions, 1 << 40, scaling.planner)
        self._planner = planner = Planner(
            scaling.planner,
            fleet.name,
            fleet.registry.registry(),
            fleet.bus.bus(),
            name="planner-0",
            card=json.dumps({"id": "planner-0", "pid": 0}).encode(),
            lease_ttl_s=fleet.lease_ttl_s,
            keep=(lambda line: None) if file is None else file.keep,
        )
        wire = fleet.wire.wire("planner-0")
        planner.actuator = EtcdActuator(
            fleet.name, fleet.registry.registry(), wire, planner.observer.least_loaded, self._loop.time
        )
        planning = Process("planner-0").start(planner.run())
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow())
                tasks.create_task(self._reconcile())
                tasks.create_task(self._end_with(planning))
        finally:
            self._over = True
            for handle in self._cold.values():
                handle.cancel()
            planning.cancel()
            await asyncio.gather(planning, return_exceptions=True)
            await wire.close()
            if file is not None:
                file.close()

    @staticmethod
    async def _end_with(task: asyncio.Task[None]) -> None:
        await asyncio.wait({task})
        task.result()

    def scaled(self) -> Scaled:
        self._note()
        moves = [
            [new[role] - old[role] for old, new in pairwise(self._counts) if new[role] != old[role]]
            for role in (1, 2)
        ]
        turned = [sum(one * two < 0 for one, two in pairwise(each)) for each in moves]
        wanted = [row[1:3] for row in self._counts]
        plan = self._planner.plan
        return Scaled(
            tuple(self._counts),
            self._worker_s,
            sum(one != two for one, two in pairwise(wanted)),
            (turned[0], turned[1]),
            self._turns,
            plan.why if plan is not None else "",
            (self._wanted_s[0], self._wanted_s[1]),
        )

    # -- what is seen

    async def _follow(self) -> None:
        fleet = self._fleet
        async for view in self._registry.watch(f"/fleet/{fleet.name}/"):
            self._view = view
            data = view.values.get(desired_key(fleet.name))
            if data in self._written:
                del self._written[: self._written.index(data) + 1]
            elif data is not None and data != self._read and not self._moved:
                # What was seen before says nothing new: workers have changed their role since.
                self._desired = parse_desired(data)
            self._read = data
            for name, card in cards_in(view, fleet.name).items():
                self._take(name, card)
            await self._keep_desired()
            self._note()
            self._changed.set()

    def _take(self, name: str, card: WorkerCard) -> None:
        child = self._children.get(name)
        if child is None:
            return
        kind = Kind(card.turning or card.role)
        if child.kind is not kind and child.phase is not Phase.STOPPING:
            child = replace(child, kind=kind)
            self._desired, self._moved = self._desired.turned(kind), True
            self._turns += 1
        leaving = Phase.DRAINING if card.turning is None else Phase.TURNING
        phases = {MemberState.READY: Phase.READY, MemberState.DRAINING: leaving}
        if card.state in phases:
            child = became(child, phases[card.state], self._loop.time())
        self._children[name] = child

    async def _keep_desired(self) -> None:
        """The counts follow a worker that changes its role, as at a supervisor."""
        if self._moved:
            with contextlib.suppress(Unavailable):
                self._written.append(format_desired(self._desired))
                self._moved = False
                await self._registry.put(desired_key(self._fleet.name), self._written[-1])

    # -- what is done

    async def _reconcile(self) -> None:
        servers = [Child(str(kind), kind, Phase.READY, 0.0) for kind in (*SERVERS, Kind.ROUTER, Kind.PLANNER)]
        while True:
            self._changed.clear()
            now = self._loop.time()
            for name, worker in self._fleet.workers.items():
                if (child := self._children.get(str(name))) is not None and child.phase is Phase.READY:
                    report = worker.load()
                    self._children[str(name)] = answered(child, True, report.running + report.waiting, now)
            decision = decide(self._desired, [*servers, *self._children.values()], now, self._policy)
            for action in decision.actions:
                self._act(action, now)
            self._note()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if decision.actions else _LOOK_S):
                    if not decision.actions:
                        await self._changed.wait()

    def _act(self, action: Action, now: float) -> None:
        match action:
            case Start(kind, None, _) if kind in WORKERS:
                self._made += 1
                name = f"{kind}-x{self._made}"
                self._children[name] = Child(name, kind, Phase.STARTING, now)
                cold_s = self._scaling.cold_start_s
                self._cold[name] = self._loop.call_later(cold_s, self._begin, name)
            case Stop(name, _):
                if (handle := self._cold.pop(name, None)) is not None:
                    handle.cancel()
                    del self._children[name]
                    return
                self._children[name] = became(self._children[name], Phase.STOPPING, now)
                worker = next(one for id, one in self._fleet.workers.items() if str(id) == name)
                worker.process.call(worker.chassis.begin_drain, _DRAIN_S)
            case _:
                raise AssertionError(f"nothing here ends by itself: {action}")

    def _begin(self, name: str) -> None:
        del self._cold[name]
        worker = self._fleet.start(Role(self._children[name].kind), name)
        self._await_end(name, worker)

    def _await_end(self, name: str, worker: SimWorker) -> None:
        assert worker.task is not None
        worker.task.add_done_callback(lambda task: self._gone(name, worker))

    def _gone(self, name: str, worker: SimWorker) -> None:
        if self._over or self._fleet.workers.get(worker.id) is not worker:
            return
        self._ended(worker)
        del self._fleet.workers[worker.id]
        self._note()
        self._children.pop(name, None)
        self._changed.set()

    def _note(self) -> None:
        now = self._loop.time()
        there = len(self._children)
        if self._counts:
            _, *wanted, alive = self._counts[-1]
            self._worker_s += alive * (now - self._counted_at)
            for place, count in enumerate(wanted):
                self._wanted_s[place] += count * (now - self._counted_at)
        self._counted_at = now
        row = (self._desired.prefill, self._desired.decode, there)
        if not self._counts or self._counts[-1][1:] != row:
            self._counts.append((now - self._start, *row))
