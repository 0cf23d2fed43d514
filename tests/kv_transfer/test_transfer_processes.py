"""Between real processes: killed, frozen and restarted peers, over shm and ucx."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fleet.errors import LeaseExpired, TransferFailed
from fleet.handoff import KvTicket
from fleet.ids import new_incarnation

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
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
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
                for _ in range(3):
                    async with Process.spawn("p", real_transport) as source:
                        ticket = await source.grant()
                        reader.region.array[:] = 0
                        pull = asyncio.create_task(pull_until_it_fails(reader, ticket, 60))
                        await eventually(lambda: reader.region.array[0, 0] == 1, "first bytes")
                        source.signal(signal.SIGKILL)
                        began = asyncio.get_running_loop().time()
                        with pytest.raises(TransferFailed):
                            await pull
                        # Far below the pull's deadline, whatever the machine does meanwhile.
                        assert asyncio.get_running_loop().time() - began < 20
                        reader.region.array[:] = 0xEE
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
                for _ in range(3):
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
            source = await world.side("p", blocks=BLOCKS, block_bytes=BLOCK_BYTES, lease_s=0.5, **LIMITS)
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
