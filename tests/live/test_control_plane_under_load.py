"""etcd and NATS killed, emptied, frozen and away under load: no request notices, and everything joins again.

One fleet for all tests here, one after another: each leaves it whole. A second router runs in this process,
so that its index can be looked into.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import xor

import pytest
from chaos import LatencyOracle, Question, ask
from processes import FLEET, Fleet, Plan, Watcher, all_up, servers, until
from servers import Server

from fleet.bus.nats_bus import NatsBus
from fleet.ids import WorkerId
from fleet.registry.etcd_registry import EtcdRegistry
from fleet.wire.network import NetworkWire
from router.roster import LinkState
from router.settings import RouterSettings
from router.watcher import Router

pytestmark = pytest.mark.live

LIMIT_S = 90.0
TTL_S = 2.0
EVERYBODY = ("--control.lease-ttl-s", f"{TTL_S}")
ORACLE = LatencyOracle(11, tokens=60)


@dataclass
class World:
    fleet: Fleet
    asked: int = 0

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.fleet.processes.items()}

    def log(self, name: str) -> str:
        return self.fleet.processes[name].log.read_text(errors="replace")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("control")
    with servers(folder) as (etcd, nats):
        flags = dict.fromkeys(("router", "prefill", "decode"), EVERYBODY)
        fleet = Fleet(folder, Plan("latency:base=20", 1, 2, 1, flags), etcd, nats)
        try:
            fleet.start()
            yield World(fleet)
        finally:
            fleet.stop()


@contextlib.asynccontextmanager
async def observing(fleet: Fleet) -> AsyncIterator[Router]:
    registry, bus, wire = EtcdRegistry(fleet.etcd.address), NatsBus(fleet.nats.url), NetworkWire()
    router = Router(RouterSettings(), FLEET, registry, bus, wire)
    task = asyncio.create_task(router.run())
    try:
        yield router
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await wire.close()
        await bus.close()
        await registry.close()


def knows_all(router: Router, fleet: Fleet) -> bool:
    """Every worker has a session and an index that nothing contradicts."""
    up = {standing.id for standing in router.roster.workers() if standing.link is LinkState.UP}
    return up == set(fleet.workers()) and not router.index.unproven()


async def proven(router: Router, watcher: Watcher, fleet: Fleet) -> bool:
    """Of a fleet at rest: whether the index has of each worker exactly the blocks that are there."""
    if not knows_all(router, fleet):
        return False
    for worker in fleet.workers():
        report = await watcher.report(worker)
        held = router.index.holds(WorkerId(worker))
        if report is None or (len(held), reduce(xor, held, 0)) != (report.kv.blocks, report.kv.xor):
            return False
    return True


async def load(world: World, stop: asyncio.Event) -> int:
    """One request after another by each of eight clients, until told to stop; all right. Returns how many."""
    count = 0

    async def client() -> None:
        nonlocal count
        while not stop.is_set():
            world.asked += 1
            count += 1
            number = world.asked
            question = Question(number, {**ORACLE.question(number), "stream": bool(number % 4)}, None)
            heard = await ask(world.fleet.address("router-0"), question)
            told = f"{heard}\n{world.fleet.logs()}"
            assert (heard.outcome, heard.text) == ("whole", ORACLE.answer(number)), told

    async with asyncio.TaskGroup() as clients:
        for _ in range(8):
            clients.create_task(client())
    return count


def again(server: Server) -> None:
    server.restart()


def empty(server: Server) -> None:
    server.restart_empty()


def frozen(server: Server) -> Callable[[], None]:
    server.pause()
    return server.resume


def away(server: Server) -> Callable[[], None]:
    server.kill()
    return server.start


FAULTS = {"killed": again, "emptied": empty, "frozen": frozen, "away": away}


@pytest.mark.parametrize("whom", ["both", "etcd", "nats"] if os.environ.get("CHAOS_LONG") else ["both"])
@pytest.mark.parametrize("how", FAULTS)
def test_no_request_notices_and_all_is_known_again(world: World, whom: str, how: str) -> None:
    fleet = world.fleet
    victims: list[Server] = [fleet.etcd, fleet.nats] if whom == "both" else [getattr(fleet, whom)]

    async def main() -> None:
        watcher = Watcher(fleet)
        try:
            await all_up(fleet, watcher, LIMIT_S)
            async with observing(fleet) as router:
                await until(lambda: proven(router, watcher, fleet), LIMIT_S, lambda: "never proven")
                pids, moved = world.pids(), world.log("router-0").count(" W router.flow: request ")
                stop = asyncio.Event()
                loading = asyncio.create_task(load(world, stop))
                ends = await asyncio.to_thread(lambda: [FAULTS[how](victim) for victim in victims])
                # Longer than any lease lasts.
                await asyncio.sleep(2 * TTL_S if any(ends) else TTL_S)
                for end in filter(None, ends):
                    await asyncio.to_thread(end)
                await until(
                    lambda: loading.done() or knows_all(router, fleet),
                    LIMIT_S,
                    lambda: f"not proven again: {router.index.unproven()}\n{fleet.logs()}",
                )
                stop.set()
                async with asyncio.timeout(LIMIT_S):
                    assert await loading > 8
                await until(lambda: proven(router, watcher, fleet), LIMIT_S, lambda: "not proven at rest")
            await all_up(fleet, watcher, LIMIT_S)
            assert world.pids() == pids, "a lost registry is no reason to end"
            found = world.log("router-0").count(" W router.flow: request ")
            assert found == moved, f"requests had to go elsewhere\n{fleet.logs()}"
        finally:
            await watcher.close()

    asyncio.run(main())
