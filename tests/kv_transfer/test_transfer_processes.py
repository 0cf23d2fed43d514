"""Between real processes: killed, frozen and restarted peers, over shm and ucx."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import random
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fleet.errors import LeaseExpired, TransferFailed
from fleet.handoff import KvTicket
from fleet.ids import new_incarnation
from kv_transfer import messages, ucx

pytestmark = pytest.mark.live

BLOCKS, BLOCK_BYTES = 64, 1 << 18
LIMITS = {"chunk_bytes": 1 << 20, "in_flight_bytes": 1 << 21}
PAIRS = [(number, number) for number in range(BLOCKS)]


class Process:
    """The other process; what it says is awaited with a limit that only a broken test reaches."""

    def __init__(self, process):
        self._process = process

    @classmethod
    @contextlib.asynccontextmanager
    async def spawn(cls, worker, transport, **settings):
        given = {
            "worker": worker,
            "incarnation": new_incarnation(),
            "blocks": BLOCKS,
            "block_bytes": BLOCK_BYTES,
            "settings": {"transport": transport, **LIMITS, **settings},
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("transfer_peer.py")),
            msgspec.json.encode(given).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "UCX_LOG_FILE": "stderr"},
        )
        peer = cls(process)
        try:
            assert "ready" in await peer.hear()
            yield peer
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            process._transport.close()

    async def hear(self):
        line = await asyncio.wait_for(self._process.stdout.readline(), 30)
        assert line, "the peer process died"
        return msgspec.json.decode(line)

    def tell(self, **order):
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")

    async def ask(self, **order):
        self.tell(**order)
        return await self.hear()

    async def grant(self, blocks=range(BLOCKS)):
        answer = await self.ask(do="grant", blocks=list(blocks))
        return msgspec.convert(answer["ticket"], KvTicket)

    def signal(self, number):
        self._process.send_signal(number)

    async def gone(self):
        await self._process.wait()


def run(test):
    asyncio.run(asyncio.wait_for(test, 120))


def mapped_pools():
    return Path("/proc/self/maps").read_text().count("pdfleet-kv")


async def pull_until_it_fails(reader, ticket, deadline_s):
    while True:
        await reader.transfer.pull(ticket, PAIRS, deadline_s)


def own(world, **settings):
    return world.side("d", blocks=BLOCKS + 1, block_bytes=BLOCK_BYTES, **LIMITS, **settings)


def test_a_source_killed_under_a_pull_is_an_error_soon_and_its_successor_serves(
    bench, real_transport, eventually
):
    async def test():
        async with bench(real_transport) as world:
            reader = await own(world)
            async with Process.spawn("other", real_transport) as other:
                for _ in range(2):
                    async with Process.spawn("p", real_transport) as source:
                        gc.collect()  # pools of earlier tests
                        before = mapped_pools()
                        ticket = await source.grant()
                        reader.region.array[:] = 0
                        # The deadline is beyond the test's own: it is not what ends the pull.
                        pull = asyncio.create_task(pull_until_it_fails(reader, ticket, 600))
                        await eventually(lambda: reader.region.array[0, 0] == 1, "first bytes")
                        source.signal(signal.SIGKILL)
                        with pytest.raises(TransferFailed):
                            await pull
                        reader.region.array[:] = 0xEE
                        # A dead source's pool is not kept alive by a mapping of it.
                        await eventually(lambda before=before: mapped_pools() <= before, "unmapping")
                        with pytest.raises(TransferFailed):
                            await reader.transfer.pull(ticket, PAIRS, 60)
                    unaffected = await other.grant([7])
                    await reader.transfer.pull(unaffected, [(0, 3)], 60)
                    assert (reader.region.array[3] == 8).all()
                    assert (reader.region.array[4:] == 0xEE).all()

    run(test())


def test_a_frozen_source_costs_the_deadline_and_writes_nothing_when_it_thaws(
    bench, real_transport, eventually
):
    async def test():
        async with bench(real_transport) as world:
            reader = await own(world)
            async with Process.spawn("p", real_transport, lease_s=60) as source:
                for _ in range(2):
                    ticket = await source.grant()
                    reader.region.array[:] = 0
                    pull = asyncio.create_task(pull_until_it_fails(reader, ticket, 1.0))
                    await eventually(lambda: reader.region.array[0, 0] == 1, "first bytes")
                    source.signal(signal.SIGSTOP)
                    with pytest.raises(TransferFailed):
                        await pull
                    reader.region.array[:] = 0xEE
                    source.signal(signal.SIGCONT)
                    again = await source.grant([9])
                    await reader.transfer.pull(again, [(0, BLOCKS)], 60)
                    assert (reader.region.array[BLOCKS] == 10).all()
                    assert (reader.region.array[:BLOCKS] == 0xEE).all()

    run(test())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_killed_or_frozen_ends_its_pins_by_lease_and_the_source_serves_on(
    bench, real_transport, eventually, how
):
    async def test():
        async with bench(real_transport) as world:
            # Long enough for a reader on a busy machine to find its way before its first renewal is due.
            source = await world.side("p", blocks=BLOCKS, block_bytes=BLOCK_BYTES, lease_s=2.0, **LIMITS)
            served = source.transfer.counters
            for _ in range(2):
                async with Process.spawn("d", real_transport) as reader:
                    ticket = source.transfer.grant(range(BLOCKS), 1024)
                    before = served()["served_reads"]
                    order = {"ticket": msgspec.to_builtins(ticket), "pairs": PAIRS, "times": 100000}
                    assert await reader.ask(do="pull", **order) == {"pulling": True}
                    await eventually(lambda before=before: served()["served_reads"] > before, "a read")
                    reader.signal(how)
                    await eventually(lambda: not source.transfer.leases, "the lease's end")
                    assert source.ended(ticket.lease) == ["expired"]
                    source.transfer.validate(idle=True)
                    source.region.array[:] ^= 0xFF  # reused at once
                    if how == signal.SIGSTOP:
                        reader.signal(signal.SIGCONT)
                        assert (await reader.hear())["error"] in ("LeaseExpired", "TransferFailed")
            async with Process.spawn("d", real_transport) as reader:
                ticket = source.transfer.grant([5], 16)
                order = {"ticket": msgspec.to_builtins(ticket), "pairs": [(0, 2)], "times": 1}
                await reader.ask(do="pull", **order)
                answer = await reader.hear()
                assert answer["sums"][2] == int(source.region.array[5].sum(dtype=np.int64))

    run(test())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_killed_or_frozen_under_a_wait_for_its_next_blocks_is_an_error_soon(
    bench, real_transport, how
):
    async def test():
        async with bench(real_transport) as world:
            reader = await own(world)
            async with Process.spawn("p", real_transport, lease_s=1.0) as source:
                answer = await source.ask(do="open", blocks=[0, 1, 2])
                ticket = msgspec.convert(answer["ticket"], KvTicket)
                assert await reader.transfer.ready(ticket, 0) == 3
                wait = asyncio.create_task(reader.transfer.ready(ticket, 3))
                await source.ask(do="state")
                source.signal(how)
                with pytest.raises(TransferFailed):
                    await wait
                if how == signal.SIGSTOP:
                    source.signal(signal.SIGCONT)
                    await source.ask(do="extend", lease=ticket.lease, blocks=[3])
                    assert await reader.transfer.ready(ticket, 3) == 4
                    await reader.transfer.pull(ticket, [(3, 0)], 60)
                    assert (reader.region.array[0] == 4).all()

    run(test())


def test_a_lease_survives_a_freeze_of_its_reader_shorter_than_itself(bench, real_transport, eventually):
    async def test():
        async with bench(real_transport) as world:
            source = await world.side("p", blocks=BLOCKS, block_bytes=BLOCK_BYTES, lease_s=30, **LIMITS)
            async with Process.spawn("d", real_transport) as reader:
                ticket = source.transfer.grant(range(BLOCKS), 1024)
                order = {"ticket": msgspec.to_builtins(ticket), "pairs": PAIRS, "times": 20}
                await reader.ask(do="pull", **order)
                await eventually(lambda: source.transfer.counters()["served_reads"] > 0, "a read")
                reader.signal(signal.SIGSTOP)
                other = source.transfer.grant([1], 16)
                source.transfer.release(other.lease)
                reader.signal(signal.SIGCONT)
                answer = await reader.hear()
                assert answer["sums"] == source.region.array.sum(axis=1, dtype=np.int64).tolist()

    run(test())


def held(peer):
    """What a process holds of its machine: descriptors and threads."""
    return [len(os.listdir(f"/proc/{peer._process.pid}/{what}")) for what in ("fd", "task")]


@pytest.mark.parametrize("victim", ["source", "reader"])
def test_the_death_of_a_peer_at_any_moment_of_a_transfer_harms_no_survivor(real_transport, victim):
    """Both sides are processes of their own: whoever aborts, aborts alone and is seen."""
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(1_000_000))
    deaths = 10 if os.environ.get("CHAOS_LONG") else 4
    print(f"seed {seed}")
    chance = random.Random(seed)
    limits = {"lease_s": 1.0}

    def order(ticket, times):
        return {"do": "pull", "ticket": msgspec.to_builtins(ticket), "pairs": PAIRS, "times": times}

    async def pulled(source, reader):
        """Also that whoever met dead peers serves the living ones."""
        await reader.ask(**order(await source.grant(), 1))
        answer = await reader.hear()
        assert answer.get("pulled"), answer
        assert answer["sums"] == [(number + 1) * BLOCK_BYTES for number in range(BLOCKS)]

    async def test():
        name, other = ("d", "p") if victim == "source" else ("p", "d")
        holds = []
        async with Process.spawn(name, real_transport, **limits) as survivor:
            for _ in range(deaths):
                async with Process.spawn(other, real_transport, **limits) as peer:
                    source, reader = (peer, survivor) if victim == "source" else (survivor, peer)
                    await pulled(source, reader)
                    await reader.ask(**order(await source.grant(), 1_000_000))
                    await asyncio.sleep(chance.uniform(0.0, 0.08))  # the moment that is drawn
                    peer.signal(signal.SIGKILL)
                    if victim == "source":
                        assert (await reader.hear())["error"] in ("TransferFailed", "LeaseExpired")
                    else:
                        while (await source.ask(do="state"))["leases"]:
                            await asyncio.sleep(0.05)
                holds.append(held(survivor))
            async with Process.spawn(other, real_transport, **limits) as peer:
                await pulled(*((peer, survivor) if victim == "source" else (survivor, peer)))
        # The first one brings threads and libraries; the others leave nothing behind. UCX has ten descriptors
        # a path, and at times ends the last path with the next one.
        assert holds[-1][0] <= holds[1][0] + 20, holds
        assert holds[-1][1] <= holds[1][1], holds

    run(test())


def test_a_restart_under_the_same_name_refuses_the_old_ticket(bench, real_transport):
    async def test():
        async with bench(real_transport) as world:
            reader = await own(world)
            tickets = []
            for _ in range(2):
                async with Process.spawn("p", real_transport) as source:
                    tickets.append(await source.grant([1]))
                    await reader.transfer.pull(tickets[-1], [(0, 0)], 60)
                    source.signal(signal.SIGKILL)
                    await source.gone()
            async with Process.spawn("p", real_transport) as source:
                new = await source.grant([2])
                for old in tickets:
                    with pytest.raises(LeaseExpired, match="is gone"):
                        await reader.transfer.pull(
                            dataclasses.replace(old, address=new.address), [(0, 0)], 60
                        )
                await reader.transfer.pull(new, [(0, 0)], 60)
                assert (reader.region.array[0] == 3).all()

    run(test())


def listening(pid):
    """TCP ports that a process listens on, UCX's own included."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    assert all(row[1].startswith("0100007F:") for row in rows if row[3] == "0A" and row[9] in inodes)
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes]


def hostile(ticket):
    """Things to say to a port: noise, lies about lengths, greetings that go wrong half-way."""
    random = np.random.default_rng(5)

    def greeting(**changes):
        values = {
            "reader": "x",
            "worker": ticket.worker,
            "incarnation": ticket.incarnation,
            "fingerprint": ticket.fingerprint,
            "block_bytes": BLOCK_BYTES,
        }
        return messages.frame(messages.Hello(version=messages.VERSION, **{**values, **changes}))

    yield b""
    yield b"\x00" * 4
    yield b"\xff" * 64
    yield (1 << 20).to_bytes(4, "little") + b"x" * 1000
    for size in (1, 3, 17, 500, 70000):
        yield random.bytes(size)
    for size in (1, 9, 300):
        yield size.to_bytes(4, "little") + random.bytes(size)
    yield greeting()[:20]
    yield greeting(incarnation="another")
    yield greeting(block_bytes=0)
    yield greeting(ucx=b"short")
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def after_greeting(lease):
    """Things to say once greeted: noise, reads that are wrong in every field."""
    yield os.urandom(300)
    yield (0).to_bytes(4, "little")
    for raw in (
        {"type": "read"},
        {"type": "read", "id": -1, "lease": "x", "positions": [0]},
        {"type": "read", "id": 1, "lease": 7, "positions": [0]},
        {"type": "read", "id": 1, "lease": lease, "positions": []},
        {"type": "read", "id": 1, "lease": lease, "positions": [1 << 60]},
        {"type": "read", "id": 1, "lease": lease, "positions": [5000]},
        {"type": "read", "id": 1, "lease": lease, "positions": [0] * 60000},
        {"type": "copied", "id": 99},
        {"type": "renew", "id": 1, "lease": "nobody"},
        {"type": "leave", "lease": "nobody"},
        {"type": "welcome", "blocks": 1},
    ):
        body = msgspec.msgpack.encode(raw)
        yield len(body).to_bytes(4, "little") + body
    twice = messages.frame(messages.Read(1, lease, [0]))
    yield twice + twice


def test_whatever_is_said_to_a_port_the_source_lives_and_serves(bench, real_transport):
    async def send(where, *parts):
        opening = asyncio.open_unix_connection(where) if isinstance(where, str) else None
        reader, writer = await (opening or asyncio.open_connection("127.0.0.1", where))
        try:
            for part in parts:
                writer.write(part)
                with contextlib.suppress(ConnectionError, TimeoutError):
                    await writer.drain()
                    await asyncio.wait_for(reader.read(1 << 16), 0.02)
        finally:
            writer.transport.abort()

    async def test():
        async with bench(real_transport) as world:
            reader = await own(world)
            async with Process.spawn("p", real_transport, lease_s=60) as source:
                ticket = await source.grant([4])
                await reader.transfer.pull(ticket, [(0, 0)], 60)  # brings UCX's port up
                ports = listening(source._process.pid)
                assert len(ports) == {"shm": 0, "ucx": 2}[real_transport]
                ports += [ticket.address.split(":", 2)[2]] if real_transport == "shm" else []
                for where in ports:
                    for noise in hostile(ticket):
                        await send(where, noise)
                greeter = (
                    ucx._Worker(reader.transfer._transports[0]._context) if real_transport == "ucx" else None
                )
                own_port = ports[-1] if real_transport == "shm" else int(ticket.address.split(":")[2])
                hello = messages.Hello(
                    messages.VERSION,
                    "x",
                    ticket.worker,
                    ticket.incarnation,
                    ticket.fingerprint,
                    BLOCK_BYTES,
                    greeter.address if greeter else b"",
                )
                for noise in after_greeting(ticket.lease):
                    await send(own_port, messages.frame(hello), noise)
                await reader.transfer.pull(ticket, [(0, 1)], 60)
                assert (reader.region.array[1] == 5).all()
                assert (await source.ask(do="state"))["leases"] == 1
                if greeter:
                    greeter.close()

    run(test())


@pytest.mark.parametrize("after", ["welcome", "grant"])
def test_a_source_that_goes_before_the_first_read_is_through_costs_its_reader_nothing(bench, after):
    async def test():
        async with bench("ucx") as world:
            source = await world.side("p", blocks=BLOCKS, block_bytes=BLOCK_BYTES)
            context = source.transfer._transports[0]._context

            async def heard(reader, kind):
                size = int.from_bytes(await reader.readexactly(4), "little")
                return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)

            async def welcome_and_go(reader, writer):
                hello = await heard(reader, messages.Hello)
                worker = ucx._Worker(context)
                path = ucx._endpoint(worker, ucx._checked(hello.ucx))
                writer.write(messages.frame(messages.Welcome(BLOCKS, worker.address)))
                if after == "grant":
                    said = await heard(reader, messages.Read | messages.Renew)
                    while not isinstance(said, messages.Read):
                        said = await heard(reader, messages.Read | messages.Renew)
                    writer.write(messages.frame(messages.Granted(said.id, [])))
                worker.close()
                del worker, path
                await writer.drain()
                writer.transport.abort()

            server = await asyncio.start_server(welcome_and_go, "127.0.0.1", 0)
            ticket = source.transfer.grant([1], 16)
            port = server.sockets[0].getsockname()[1]
            gone = dataclasses.replace(ticket, address=f"ucx:127.0.0.1:{port}")
            async with Process.spawn("d", "ucx") as reader:
                held = []
                for _ in range(6):
                    await reader.ask(do="pull", ticket=gone, pairs=[(0, 0)], times=1)
                    assert (await reader.hear())["error"] == "TransferFailed"
                    held.append((await reader.ask(do="state"))["descriptors"])
                good = source.transfer.grant([1], 16)
                await reader.ask(do="pull", ticket=good, pairs=[(0, 0)], times=1)
                assert (await reader.hear())["pulled"]
                source.transfer.release(ticket.lease)
                if after == "welcome":
                    # A worker of UCX has ten; that of the last path may be on its way out.
                    assert held[-1] - held[0] < 20, held
            server.close()
            await server.wait_closed()

    run(test())
