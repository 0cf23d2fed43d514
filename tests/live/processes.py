"""A fleet of real processes that tests kill, freeze and start again by name; nobody supervises it.

`fleetctl up` starts what is lost by itself; here whoever runs the experiment decides when that is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from servers import Etcd, Nats, free_ports

from fleet.card_codec import decode_card
from fleet.errors import FleetError
from fleet.events import LoadReport
from fleet.ids import WorkerId
from fleet.member import WorkerCard, worker_key
from fleet.registry.etcd_registry import EtcdRegistry
from fleet.wire.network import NetworkWire

FLEET = "chaos"


@dataclass
class Process:
    """One slot: a command that runs, or does not, or is frozen. `host` is a network namespace, or none."""

    name: str
    command: Sequence[str]
    log: Path
    host: str = ""
    nice: int = 0
    starts: int = 0
    said_before: int = 0
    """Bytes of the log that earlier lives wrote."""
    running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert not self.alive, f"{self.name} runs already"
        self.stopped()
        self.said_before = self.log.stat().st_size if self.log.exists() else 0
        within = ["ip", "netns", "exec", self.host] if self.host else []
        gently = ["nice", "-n", str(self.nice)] if self.nice else []
        with self.log.open("ab") as log:
            self.running = subprocess.Popen(
                [*within, *gently, *self.command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.starts += 1

    @property
    def alive(self) -> bool:
        return self.running is not None and self.running.poll() is None

    @property
    def pid(self) -> int:
        assert self.running is not None, f"{self.name} does not run"
        return self.running.pid

    def signal(self, number: int) -> None:
        if self.alive:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, frozen or not; idempotent."""
        self.signal(signal.SIGKILL)
        self.stopped()

    def stopped(self) -> int | None:
        """Waits for its end; the exit code, or None when it was not started."""
        if self.running is None:
            return None
        code = self.running.wait()
        self.running = None
        return code

    def since_start(self) -> str:
        """What this life logged."""
        return self.log.read_bytes()[self.said_before :].decode(errors="replace")

    def tail(self, lines: int = 30) -> str:
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@dataclass
class Plan:
    """What a fleet is made of. `flags` go to every process that knows them, by role."""

    model: str = "latency:base=10"
    prefill: int = 2
    decode: int = 2
    routers: int = 2
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By `router`, `prefill` and `decode`."""
    hosts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and address of a process by its name; the others share this process's own, on loopback."""
    nice: int = 0


class Fleet:
    """etcd, NATS, routers and workers, each in `processes` under its name: `router-0`, `decode-1`, …"""

    def __init__(self, folder: Path, plan: Plan, etcd: Etcd, nats: Nats) -> None:
        self.folder = folder
        self.plan = plan
        self.etcd = etcd
        self.nats = nats
        self.http = {f"router-{n}": port for n, port in enumerate(free_ports(plan.routers))}
        self.processes: dict[str, Process] = {}
        for name in self.http:
            self._add(name, "router")
        for role in ("prefill", "decode"):
            for number in range(getattr(plan, role)):
                self._add(f"{role}-{number}", role)

    def _add(self, name: str, role: str) -> None:
        host, bind = self.plan.hosts.get(name, ("", "127.0.0.1"))
        own = (
            ["--router-id", name, "--http.port", str(self.http[name])]
            if role == "router"
            else ["--worker-id", name, "--engine.kv-memory-bytes", str(1 << 20)]
        )
        module = "router" if role == "router" else f"{role}_worker"
        command = [
            *(sys.executable, "-P", "-m", module, "--model", self.plan.model),
            *("--control.fleet", FLEET, "--control.bind", bind),
            *("--control.etcd", self.etcd.address, "--control.nats", self.nats.url),
            *own,
            *self.plan.flags.get(role, ()),
        ]
        self.processes[name] = Process(name, command, self.folder / f"{name}.log", host, self.plan.nice)

    def workers(self) -> list[str]:
        return [name for name in self.processes if name not in self.http]

    def address(self, router: str) -> tuple[str, int]:
        return self.plan.hosts.get(router, ("", "127.0.0.1"))[1], self.http[router]

    def start(self) -> None:
        for process in self.processes.values():
            process.start()

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()

    def logs(self) -> str:
        return "\n".join(f"== {name}\n{process.tail()}" for name, process in self.processes.items())


class Watcher:
    """Asks the fleet's workers themselves, from this process."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.registry = EtcdRegistry(fleet.etcd.address)
        self.wire = NetworkWire()

    async def card(self, worker: str) -> WorkerCard | None:
        """None: not registered, or the registry is away."""
        key = worker_key(FLEET, WorkerId(worker))
        try:
            value = await self.registry.get(key)
        except FleetError:
            return None
        return decode_card(value, key) if value is not None else None

    async def report(self, worker: str) -> LoadReport | None:
        """None: nobody answers."""
        card = await self.card(worker)
        if card is None:
            return None
        try:
            return await self.wire.status(card.address, 5.0)
        except FleetError:
            return None

    async def serves(self, worker: str) -> bool:
        """Whether the process that runs under that name now is registered and answers."""
        process, card = self._fleet.processes[worker], await self.card(worker)
        if card is None or not process.alive or card.pid != process.pid:
            return False
        report = await self.report(worker)
        return report is not None and report.incarnation == card.incarnation

    async def all_serve(self) -> bool:
        return all(await asyncio.gather(*map(self.serves, self._fleet.workers())))

    async def unrest(self) -> dict[str, str]:
        """Who holds what, or does not answer; empty when the whole fleet is at rest."""
        found: dict[str, str] = {}
        for worker in self._fleet.workers():
            report = await self.report(worker)
            if report is None:
                found[worker] = "no answer"
                continue
            held = {
                "running": report.running,
                "waiting": report.waiting,
                "blocks": report.blocks_total - report.blocks_free,
                "streams": len(report.streams),
                "leases": report.counters.get("leases", 0),
            }
            if any(held.values()):
                found[worker] = ", ".join(f"{count} {what}" for what, count in held.items() if count)
        return found

    async def close(self) -> None:
        await self.wire.close()
        await self.registry.close()


async def until(condition: Callable[[], object], limit_s: float, what: Callable[[], str]) -> None:
    """Polls a condition, which may be a coroutine function; an AssertionError says what was not so."""
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    while True:
        held = condition()
        if asyncio.iscoroutine(held):
            held = await held
        if held:
            return
        assert loop.time() < end, what()
        await asyncio.sleep(0.1)


async def router_ready(address: tuple[str, int]) -> bool:
    """Whether it could serve a request now."""
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection(*address)
            try:
                writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def all_up(fleet: Fleet, watcher: Watcher, limit_s: float = 120.0) -> None:
    """Every worker is registered and answers, every router could serve."""

    async def served() -> bool:
        dead = [name for name, process in fleet.processes.items() if not process.alive]
        assert not dead, f"{dead} ended\n{fleet.logs()}"
        return await watcher.all_serve()

    await until(served, limit_s, lambda: f"workers are missing\n{fleet.logs()}")
    for router in fleet.http:
        await until(
            lambda router=router: router_ready(fleet.address(router)),  # type: ignore[misc]
            limit_s,
            lambda: f"a router is not ready\n{fleet.logs()}",
        )


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[tuple[Etcd, Nats]]:
    etcd, nats = Etcd(folder / "etcd"), Nats(folder / "nats")
    try:
        etcd.start()
        nats.start()
        yield etcd, nats
    finally:
        etcd.kill()
        nats.kill()


@contextlib.asynccontextmanager
async def running(folder: Path, plan: Plan) -> AsyncIterator[tuple[Fleet, Watcher]]:
    """The whole fleet, up, on loopback; nothing of it outlives the block."""
    with servers(folder) as (etcd, nats):
        fleet = Fleet(folder, replace(plan), etcd, nats)
        watcher = Watcher(fleet)
        try:
            fleet.start()
            await all_up(fleet, watcher)
            yield fleet, watcher
        finally:
            await watcher.close()
            fleet.stop()


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a process holds of its machine."""

    rss_bytes: int
    descriptors: int
    threads: int
    tasks: int


async def holdings(process: Process, limit_s: float = 15.0) -> Holdings | None:
    """None: it ended meanwhile, or is frozen. Tasks are what it says of itself when asked by SIGUSR2."""
    asked = len(process.log.read_bytes())
    process.signal(signal.SIGUSR2)
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    while process.alive and loop.time() < end:
        said = process.log.read_bytes()[asked:].decode(errors="replace")
        if found := re.search(r"fleet\.life: tasks: (\d+): .*\n", said):
            with contextlib.suppress(OSError):
                proc = Path(f"/proc/{process.pid}")
                status = (proc / "status").read_text()
                rss = re.search(r"VmRSS:\s+(\d+) kB", status)
                assert rss is not None
                counts = (len(os.listdir(proc / "fd")), len(os.listdir(proc / "task")))
                return Holdings(int(rss[1]) * 1024, *counts, int(found[1]))
        await asyncio.sleep(0.1)
    return None
