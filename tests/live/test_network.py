"""Workers, router, client and control plane on hosts of their own, and the network between them at its worst.

One fleet for all tests here, one after another: each leaves the network whole and the fleet at rest. Silence
has to be noticed where it begins: each test cuts without a FIN or RST.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from chaos import LatencyOracle, Question, ask
from network import Network, missing
from processes import Fleet, Plan, Watcher, all_up, until
from servers import Etcd, Nats

from fleet.card_codec import encode_card
from fleet.ids import WorkerId, new_incarnation
from fleet.member import worker_key

pytestmark = pytest.mark.live

HOSTS = ("client", "control", "router", "prefill", "decode-a", "decode-b")
PLACES = {"router-0": "router", "prefill-0": "prefill", "decode-0": "decode-a", "decode-1": "decode-b"}
LIMIT_S = 90.0

EVERYBODY = ("--wire.heartbeat-s", "0.5", "--control.lease-ttl-s", "2")
# Silence is to be found by heartbeats, not by the limits of a request: these are beyond the test's own. Steps
# are slow in the middle of a cut: that is to be forgotten soon, for each worker to get work again.
ROUTER = (
    *(*EVERYBODY, "--flow.worker-wait-s", "60", "--http.write-timeout-s", "4"),
    *("--flow.token-timeout-s", "600", "--flow.first-token-timeout-s", "600", "--unknown.fresh-s", "2"),
)
WORKER = (*EVERYBODY, "--transfer.transport", "ucx", "--transfer.lease-s", "3")
FLAGS = {"router": ROUTER, "prefill": WORKER, "decode": (*WORKER, "--pull-limit-s", "1.5")}


@dataclass
class World:
    network: Network
    fleet: Fleet
    asked: int = 0

    def log(self, name: str) -> str:
        return self.fleet.processes[name].log.read_text(errors="replace")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if why := missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("network")
    with Network(HOSTS) as network:
        etcd, nats = Etcd(folder / "etcd"), Nats(folder / "nats")
        for server in (etcd, nats):
            server.host = network.address("control")
            server.within = ("ip", "netns", "exec", network.namespace("control"))
        hosts = {name: (network.namespace(host), network.address(host)) for name, host in PLACES.items()}
        fleet = Fleet(folder, Plan("latency:base=15", 1, 2, 1, FLAGS, hosts), etcd, nats)
        try:
            etcd.start()
            nats.start()
            fleet.start()
            yield World(network, fleet)
        finally:
            fleet.stop()
            etcd.kill()
            nats.kill()


ORACLE = LatencyOracle(7, tokens=100)


async def load(world: World, count: int, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
    """So many requests at once, `meanwhile` from the first text on; all right, or the test fails."""
    begun = asyncio.Event()

    async def one() -> None:
        world.asked += 1
        body = {**ORACLE.question(world.asked), "max_tokens": 100, "stream": bool(world.asked % 4)}
        question = Question(world.asked, body, None)
        right = ORACLE.answer(world.asked, 100)
        heard = await ask(world.fleet.address("router-0"), question, begun.set)
        assert (heard.outcome, heard.text) == ("whole", right), f"{heard}\n{world.fleet.logs()}"

    async with asyncio.timeout(LIMIT_S):
        asking = [asyncio.create_task(one()) for _ in range(count)]
        if meanwhile is not None:
            await begun.wait()
            await meanwhile()
        await asyncio.gather(*asking)


async def counter(watcher: Watcher, worker: str, name: str) -> int:
    report = await watcher.report(worker)
    return report.counters[name] if report is not None else -1


async def whole_again(world: World, watcher: Watcher) -> None:
    """Each worker gets work again, KV is handed over again, and nobody holds anything at the end."""
    await all_up(world.fleet, watcher, LIMIT_S)
    names = [*(("decode-0", "pulls"), ("decode-1", "pulls")), ("prefill-0", "leases_granted")]
    before = [await counter(watcher, *name) for name in names]

    async def worked() -> bool:
        nonlocal now
        await load(world, 4)
        now = [await counter(watcher, *name) for name in names]
        return all(b > a for a, b in zip(before, now, strict=True))

    def idle() -> str:
        return f"somebody gets no work any more: {names} {before} {now}\n{world.fleet.logs()}"

    now = before
    await until(worked, LIMIT_S, idle)
    await at_rest(world, watcher)


async def at_rest(world: World, watcher: Watcher, *, but: str = "") -> None:
    rest: dict[str, str] = {}

    async def resting() -> bool:
        nonlocal rest
        rest = await watcher.unrest()
        rest.pop(but, None)
        return not rest

    await until(resting, LIMIT_S, lambda: f"not at rest: {rest}\n{world.fleet.logs()}")


def play(world: World, scenario: Callable[[Watcher], Awaitable[None]]) -> None:
    async def main() -> None:
        watcher = Watcher(world.fleet)
        try:
            await all_up(world.fleet, watcher)
            await scenario(watcher)
            await whole_again(world, watcher)
        finally:
            await watcher.close()

    asyncio.run(main())


def test_kv_goes_from_host_to_host_over_ucx(world: World) -> None:
    async def scenario(watcher: Watcher) -> None:
        before = [await counter(watcher, f"decode-{n}", "pulls_recomputed") for n in range(2)]
        await load(world, 12)
        assert [await counter(watcher, f"decode-{n}", "pulls_recomputed") for n in range(2)] == before

    play(world, scenario)


@pytest.mark.parametrize(
    "bad",
    [{"delay_s": 0.05}, {"loss": 0.03, "delay_s": 0.005}, {"bytes_s": 100_000.0}],
    ids=["delay", "loss", "bandwidth"],
)
def test_slow_and_lossy_ways_cost_time_only(world: World, bad: dict[str, float]) -> None:
    async def scenario(watcher: Watcher) -> None:
        with world.network.bad(world.network.hosts, world.network.hosts, **bad):
            await load(world, 16)

    play(world, scenario)


CUTS = {
    "a decode worker from all": (["decode-a"], None),
    "a decode worker from its router": (["decode-a"], ["router"]),
    "a decode worker from its source of KV": (["decode-a", "decode-b"], ["prefill"]),
    "a decode worker from etcd and NATS": (["decode-a"], ["control"]),
    "the prefill worker from all": (["prefill"], None),
    "the prefill worker from its router": (["prefill"], ["router"]),
    "the router from etcd and NATS": (["router"], ["control"]),
    "etcd and NATS from all": (["control"], None),
}


FEW = ("a decode worker from all", "a decode worker from its source of KV", "etcd and NATS from all")
"""Of every run; the others are for `CHAOS_LONG=1`."""


@pytest.mark.parametrize("cut", CUTS if os.environ.get("CHAOS_LONG") else FEW)
def test_a_partition_costs_time_only_and_all_join_again(world: World, cut: str) -> None:
    some, others = CUTS[cut]
    others = others if others is not None else world.network.everybody_but(*some)

    async def scenario(watcher: Watcher) -> None:
        async def go_on() -> None:
            with world.network.partition(some, others):
                # Longer than silence, leases and pulls may last.
                await load(world, 8)
                await asyncio.sleep(5.0)
                await load(world, 8)

        await load(world, 12, go_on)

    play(world, scenario)


def test_blocks_lent_to_a_reader_that_is_cut_off_come_back_while_it_still_is(world: World) -> None:
    async def scenario(watcher: Watcher) -> None:
        before = await counter(watcher, "decode-0", "pulls_recomputed")
        before += await counter(watcher, "decode-1", "pulls_recomputed")
        with world.network.partition(["prefill"], ["decode-a", "decode-b"]):
            await load(world, 6)
            await at_rest(world, watcher)
        after = await counter(watcher, "decode-0", "pulls_recomputed")
        after += await counter(watcher, "decode-1", "pulls_recomputed")
        assert after > before

    play(world, scenario)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_client_that_vanishes_without_a_word_is_cancelled(world: World, streamed: bool) -> None:
    async def scenario(watcher: Watcher) -> None:
        body = {**ORACLE.question(1), "max_tokens": 100_000, "stream": streamed}
        asking = asyncio.create_task(ask(world.fleet.address("router-0"), Question(0, body, None)))

        async def decoding() -> bool:
            reports = [await watcher.report(f"decode-{n}") for n in range(2)]
            return any(report is not None and report.running for report in reports)

        await until(decoding, LIMIT_S, lambda: "it does not run")
        # The test's own way to the workers is not that of a client: only the router's is cut.
        with world.network.partition(["client"], ["router"]):
            await at_rest(world, watcher)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    play(world, scenario)


def test_silence_is_noticed_by_each_of_those_who_wait(world: World) -> None:
    """Each in its own way: sessions by heartbeats, NATS by round trips, etcd by answers."""

    def said(name: str, sign: str) -> int:
        return len(re.findall(sign, world.log(name)))

    async def scenario(watcher: Watcher) -> None:
        signs = [
            ("router-0", "link to decode-0 is lost"),
            ("decode-0", "session ended"),
            ("decode-0", "NATS connection lost"),
            ("decode-0", "lease not renewed|does not know the lease"),
        ]
        before = [said(*sign) for sign in signs]
        with world.network.partition(["decode-a"], world.network.everybody_but("decode-a")):
            await until(
                lambda: all(said(*sign) > count for sign, count in zip(signs, before, strict=True)),
                LIMIT_S,
                lambda: f"unnoticed: {world.fleet.logs()}",
            )
            gone = await watcher.card("decode-0")
            await until(lambda: gone is None or expired(watcher), LIMIT_S, lambda: "its card stands")

    async def expired(watcher: Watcher) -> bool:
        return await watcher.card("decode-0") is None

    play(world, scenario)


def test_one_that_accepts_and_never_answers_holds_up_nobody(world: World, tmp_path: Path) -> None:
    async def scenario(watcher: Watcher) -> None:

        held: list[asyncio.StreamWriter] = []
        silent = await asyncio.start_server(
            lambda _, writer: held.append(writer), world.network.address("client")
        )
        address = f"{world.network.address('client')}:{silent.sockets[0].getsockname()[1]}"
        card = await watcher.card("decode-0")
        assert card is not None
        mute = replace(
            card, id=WorkerId("decode-mute"), incarnation=new_incarnation(), address=address,
            sessions=address, transfer=f"ucx:{address}",
        )  # fmt: skip
        key = worker_key("chaos", mute.id)
        await watcher.registry.put(key, encode_card(mute))
        try:
            await until(
                lambda: (
                    "link to decode-mute" in world.log("router-0") or "decode-mute" in world.log("router-0")
                ),
                LIMIT_S,
                lambda: "the router does not see it",
            )
            await load(world, 12)
        finally:
            await watcher.registry.delete(key)
            silent.close()
            for writer in held:
                writer.transport.abort()

    play(world, scenario)
