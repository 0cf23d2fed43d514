"""The loopback network in virtual time: exact durations, shared links, and every failure it can play."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from fleet.errors import LeaseExpired, TransferFailed
from fleet.ids import LeaseId
from fleet.virtual_time import Process, run
from kv_transfer.loopback import Damage, LoopbackHub
from kv_transfer.region import Region
from kv_transfer.settings import TransferSettings
from kv_transfer.transfer import Transfer

MB = 1_000_000


class World:
    """Sides on one hub; a block weighs 1 MB on a link of 1 GB/s, whatever it holds here."""

    def __init__(self):
        self.hub = LoopbackHub(bytes_s=1e9, latency_s=0.001, block_bytes=MB)
        self.sides = {}
        self.ends = []

    async def add(self, name, **settings):
        region = Region.allocate(64, 16)
        region.array[:] = len(self.sides) + 1
        self.sides[name] = await Transfer.start(
            worker=name,
            incarnation="1",
            fingerprint="same",
            region=region,
            settings=TransferSettings(**settings),
            on_end=lambda lease, why: self.ends.append((asyncio.get_running_loop().time(), lease, why)),
            loopback=self.hub,
        )
        return self.sides[name]

    async def close(self):
        for side in self.sides.values():
            while side.leases:
                await asyncio.sleep(0.1)
            side.validate(idle=True)
            await side.close()


def in_virtual_time(test):
    async def main():
        world = World()
        await test(world)
        await world.close()

    run(main(), horizon_s=3600)


def now():
    return asyncio.get_running_loop().time()


def pairs(count):
    return [(n, n) for n in range(count)]


def test_a_pull_takes_its_bytes_over_the_bandwidth_and_three_crossings():
    async def test(world):
        source, reader = await world.add("p"), await world.add("d")
        ticket = source.grant(range(32), 512)
        pulled = await reader.pull(ticket, pairs(32), 10)
        # One crossing to connect, one to ask, one back.
        assert pulled.seconds == pytest.approx(0.032 + 0.003)
        again = await reader.pull(ticket, pairs(32), 10)
        assert again.seconds == pytest.approx(0.032 + 0.002)
        source.release(ticket.lease)

    in_virtual_time(test)


def test_readers_of_one_source_share_its_link():
    async def test(world):
        source = await world.add("p")
        readers = [await world.add(f"d{n}") for n in range(4)]
        ticket = source.grant(range(10), 160)
        began = now()
        await asyncio.gather(*(reader.pull(ticket, pairs(10), 10) for reader in readers))
        assert now() - began == pytest.approx(0.040 + 0.003)
        source.release(ticket.lease)

    in_virtual_time(test)


def test_workers_of_one_host_share_its_link_and_do_not_need_it_among_themselves():
    async def test(world):
        world.hub = LoopbackHub(
            bytes_s=1e9,
            latency_s=0.001,
            block_bytes=MB,
            host_of=lambda address: address.removeprefix("loopback:")[0],
            local_bytes_s=1e10,
        )
        one, two = await world.add("a1"), await world.add("a2")
        near, far, further = await world.add("a3"), await world.add("b1"), await world.add("c1")
        took = {}

        async def pull(name, reader, source):
            start = now()
            ticket = source.grant(range(10), 10)
            await reader.pull(ticket, [(k, k) for k in range(10)], 5.0)
            source.release(ticket.lease)
            took[name] = now() - start

        await asyncio.gather(pull("far", far, one), pull("further", further, two), pull("near", near, one))
        # Three crossings of 1 ms each besides the bytes.
        assert took["near"] == pytest.approx(0.001 + 0.003)
        assert sorted((took["far"], took["further"])) == pytest.approx([0.013, 0.023])

    in_virtual_time(test)


def test_pulls_are_deterministic_and_leave_nothing():
    def once():
        seen = []

        async def test(world):
            source, reader = await world.add("p", lease_s=5), await world.add("d")
            for number in range(600):
                ticket = source.grant([number % 64], 16)
                async with reader.keep(ticket):
                    seen.append((await reader.pull(ticket, [(0, number % 50)], 10)).seconds)
            seen.append(now())

        in_virtual_time(test)
        return seen

    assert once() == once()


def test_expiry_between_renewals_is_at_the_lease_to_the_instant():
    async def test(world):
        source, reader = await world.add("p", lease_s=9), await world.add("d")
        kept, lost = source.grant([1], 16), source.grant([2], 16)
        async with reader.keep(kept):
            await asyncio.sleep(100)
            assert [(at, lease, why) for at, lease, why in world.ends] == [(9.0, lost.lease, "expired")]
            assert source.pinned == 1
            await reader.pull(kept, [(0, 0)], 10)
        await asyncio.sleep(1)
        assert world.ends[-1][1:] == (kept.lease, "released")

    in_virtual_time(test)


def test_a_lease_that_expires_while_bytes_move_fails_the_read_and_ends_once():
    async def test(world):
        source, reader = await world.add("p", lease_s=0.05), await world.add("d")
        ticket = dataclasses.replace(source.grant(range(60), 960), lease_s=60)
        with pytest.raises(LeaseExpired, match="expired"):
            await reader.pull(ticket, pairs(60), 10)
        assert now() == pytest.approx(0.05)
        assert [end[1:] for end in world.ends] == [(ticket.lease, "expired")]

    in_virtual_time(test)


def test_reused_blocks_are_never_read_under_an_old_lease():
    async def test(world):
        source, reader = await world.add("p", lease_s=30), await world.add("d")
        ticket = source.grant([1, 2], 32)
        await asyncio.sleep(30.5)
        source.region.array[1:3] = 99
        fresh = source.grant([1, 2], 32)
        with pytest.raises(LeaseExpired, match="expired"):
            await reader.pull(ticket, pairs(2), 10)
        assert (reader.region.array == 2).all()
        await reader.pull(fresh, pairs(2), 10)
        source.release(fresh.lease)

    in_virtual_time(test)


def test_a_frozen_source_costs_the_deadline_and_writes_nothing_later():
    async def test(world):
        source, reader = await world.add("p"), await world.add("d")
        ticket = source.grant(range(8), 128)
        await reader.pull(ticket, [(0, 0)], 10)
        reader.region.array[:] = 7
        world.hub.freeze(source.address)
        began = now()
        with pytest.raises(TransferFailed, match=r"within 2\.000 s"):
            await reader.pull(ticket, pairs(8), 2)
        assert now() - began == pytest.approx(2 + reader.settings.fence_s)
        world.hub.thaw(source.address)
        await asyncio.sleep(5)
        assert (reader.region.array == 7).all()
        await reader.pull(ticket, pairs(8), 2)
        source.release(ticket.lease)

    in_virtual_time(test)


@pytest.mark.parametrize("when", [0.0005, 0.0015, 0.0045, 0.0095, 0.0105])
def test_a_cancel_at_any_point_is_fenced_within_its_bound(when):
    async def test(world):
        source, reader = await world.add("p"), await world.add("d")
        ticket = source.grant(range(8), 128)
        pull = asyncio.create_task(reader.pull(ticket, pairs(8), 10))
        await asyncio.sleep(when)
        pull.cancel()
        began = now()
        await asyncio.wait({pull})
        assert pull.cancelled()
        assert now() - began <= reader.settings.fence_s
        reader.region.array[:] = 7
        await asyncio.sleep(1)
        assert (reader.region.array == 7).all()
        source.release(ticket.lease)

    in_virtual_time(test)


def test_a_dead_source_fails_its_pulls_at_once_and_no_others():
    async def test(world):
        source, other, reader = await world.add("p"), await world.add("q"), await world.add("d")
        lost, good = source.grant(range(60), 960), other.grant(range(60), 960)

        async def doomed():
            with pytest.raises(TransferFailed, match="gone"):
                await reader.pull(lost, pairs(60), 10)
            return now()

        async def killer():
            await asyncio.sleep(0.01)
            world.hub.die(source.address)

        ended, pulled, _ = await asyncio.gather(
            doomed(), reader.pull(good, [(n, 63 - n) for n in range(4)], 10), killer()
        )
        assert ended == pytest.approx(0.01)
        assert pulled.blocks == 4
        with pytest.raises(TransferFailed, match="no source"):
            await reader.pull(lost, pairs(1), 10)
        other.release(good.lease)

    in_virtual_time(test)


def test_a_dropped_request_ends_at_the_deadline_and_a_flipped_byte_is_found():
    async def test(world):
        source, reader = await world.add("p"), await world.add("d")
        ticket = source.grant(range(8), 128)
        world.hub.drop(source.address)
        with pytest.raises(TransferFailed, match="did not deliver"):
            await reader.pull(ticket, pairs(8), 1)
        world.hub.corrupt(source.address)
        with pytest.raises(TransferFailed, match="checksum"):
            await reader.pull(ticket, pairs(8), 1)
        await reader.pull(ticket, pairs(8), 1)
        assert reader.counters()["pull_failures"] == 2
        source.release(ticket.lease)

    in_virtual_time(test)


def test_a_slow_network_delays_and_keeps_the_lease():
    async def test(world):
        source, reader = await world.add("p", lease_s=3), await world.add("d")
        world.hub.delay(source.address, 0.4)
        ticket = source.grant(range(8), 128)
        async with reader.keep(ticket):
            await asyncio.sleep(20)
            pulled = await reader.pull(ticket, pairs(8), 5)
        assert pulled.seconds > 0.8
        assert source.counters()["leases_expired"] == 0

    in_virtual_time(test)


def test_without_a_renewal_the_deadline_is_within_the_lease():
    async def test(world):
        source, reader = await world.add("p", lease_s=1.5), await world.add("d")
        ticket = source.grant([0], 16)
        world.hub.freeze(source.address)
        with pytest.raises(TransferFailed, match=r"within 1\.500 s"):
            await reader.pull(ticket, pairs(1), 100)

    in_virtual_time(test)


def test_pulls_that_wait_for_room_go_in_turn_and_a_cancelled_one_blocks_nobody():
    async def test(world):
        source = await world.add("p")
        reader = await world.add("d", chunk_bytes=4096, in_flight_bytes=4096)
        ticket = source.grant(range(8), 128)
        # 256 blocks of 16 bytes are 4096, so every pull of 8 fits; the number of requests does not.
        pulls = [asyncio.create_task(reader.pull(ticket, [(n % 8, n)], 10)) for n in range(60)]
        await asyncio.sleep(0.0005)
        waiting = pulls[32:]
        for pull in waiting[::2]:
            pull.cancel()
        ended = await asyncio.gather(*pulls, return_exceptions=True)
        assert [isinstance(end, asyncio.CancelledError) for end in ended] == [False] * 32 + [True, False] * 14
        source.release(ticket.lease)

    in_virtual_time(test)


def test_closing_while_connecting_fails_the_pull_and_does_not_cancel_it():
    async def test(world):
        source, reader = await world.add("p"), await world.add("d")
        ticket = source.grant([0], 16)
        world.hub.freeze(source.address)
        pull = asyncio.create_task(reader.pull(ticket, pairs(1), 5))
        await asyncio.sleep(1)
        await reader.close()
        with pytest.raises(TransferFailed, match="closed"):
            await pull
        with pytest.raises(TransferFailed, match="closed"):
            reader.grant([0], 16)
        source.release(ticket.lease)

    in_virtual_time(test)


def test_many_readers_where_one_dies_pin_only_what_lives():
    async def test(world):
        source = await world.add("p", lease_s=6)
        readers = [await world.add(f"d{n}") for n in range(2)]
        tickets = [source.grant([n], 16) for n in range(40)]

        async def hold(reader, mine, seconds):
            async with reader.keep(mine):
                await asyncio.sleep(seconds)

        holds = [asyncio.create_task(hold(readers[n % 2], ticket, 60)) for n, ticket in enumerate(tickets)]
        await asyncio.sleep(10)
        assert source.pinned == source.leases == 40
        await readers[1].close()
        for task in holds[1::2]:
            task.cancel()
        died = now()
        await asyncio.sleep(6.01)
        assert source.pinned == 20
        assert {lease for _, lease, _ in world.ends} == {LeaseId(t.lease) for t in tickets[1::2]}
        assert max(at for at, _, _ in world.ends) <= died + 6
        await asyncio.gather(*holds[0::2])

    in_virtual_time(test)


@pytest.mark.parametrize("how", list(Damage))
def test_whatever_is_wrong_with_the_bytes_is_found_and_counted(how):
    async def test(world):
        source, reader = await world.add("p"), await world.add("d")
        source.region.array[:] = [[block] * 16 for block in range(64)]
        reader.region.array[:] = 200
        ticket = source.grant(range(8), 128)
        world.hub.corrupt(source.address, how=how)
        with pytest.raises(TransferFailed, match="checksum"):
            await reader.pull(ticket, pairs(8), 1)
        assert world.hub.damaged == reader.counters()["checksum_mismatches"] == 1
        await reader.pull(ticket, pairs(8), 1)
        assert (reader.region.array[:8] == source.region.array[:8]).all()
        source.release(ticket.lease)

    in_virtual_time(test)


def test_a_stopped_process_ends_its_reads_when_it_goes_on_and_holds_up_nobody():
    async def test(world):
        process = Process("p", offset_s=1e5)
        source, reader = await process.start(world.add("p", lease_s=30)), await world.add("d")
        ticket = process.call(source.grant, range(40), 640)
        before = asyncio.create_task(reader.pull(ticket, pairs(40), 1))
        await asyncio.sleep(0.02)
        process.stop()
        with pytest.raises(TransferFailed, match=r"within 1\.000 s"):
            await before
        with pytest.raises(TransferFailed, match="did not deliver"):
            await reader.pull(ticket, pairs(40), 1)
        assert now() < 3
        with pytest.raises(TransferFailed, match=r"no answer|did not deliver"):
            await reader.pull(ticket, pairs(40), 8)
        process.resume()
        await asyncio.sleep(1)
        assert source._grants._table.reads == 0
        await reader.pull(ticket, pairs(40), 1)
        process.call(source.release, ticket.lease)

    in_virtual_time(test)


def test_two_that_cannot_reach_each_other_disturb_no_third():
    async def test(world):
        source, reader, other = await world.add("p"), await world.add("d"), await world.add("e")
        ticket = source.grant(range(4), 64)
        await reader.pull(ticket, pairs(4), 1)
        world.hub.part(reader.address, source.address)
        with pytest.raises(TransferFailed):
            await reader.pull(ticket, pairs(4), 1)
        await other.pull(ticket, pairs(4), 1)
        world.hub.heal(reader.address, source.address)
        await reader.pull(ticket, pairs(4), 1)
        world.hub.cut(source.address)
        await reader.pull(ticket, pairs(4), 1)
        source.release(ticket.lease)

    in_virtual_time(test)
