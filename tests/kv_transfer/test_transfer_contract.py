"""What every transport must do, in one process: the same cases over loopback, shm and ucx."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import threading

import numpy as np
import pytest

from fleet.errors import BadRequest, FleetError, LeaseExpired, TransferFailed
from fleet.ids import Incarnation, LeaseId
from kv_transfer.messages import VERSION, Hello, Read, frame


def run(test):
    asyncio.run(asyncio.wait_for(test, 120))


def test_scattered_blocks_arrive_where_they_were_asked_for(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            source = await world.side("p")
            reader = await world.side("d")
            leased = [5, 63, 0, 17, 42, 8]
            before = reader.region.array.copy()
            ticket = source.transfer.grant(leased, 90)
            pairs = [(4, 1), (0, 60), (5, 2), (2, 59)]
            async with reader.transfer.keep(ticket):
                pulled = await reader.transfer.pull(ticket, pairs, 20)
            for position, own in pairs:
                assert (reader.region.array[own] == source.region.array[leased[position]]).all()
            untouched = [block for block in range(64) if block not in {own for _, own in pairs}]
            assert (reader.region.array[untouched] == before[untouched]).all()
            assert (pulled.blocks, pulled.bytes, pulled.transport) == (4, 4 * 4096, each_transport)
            assert "the best" in pulled.why
            await world.idle()
            assert source.ended(ticket.lease) == ["released"]
            assert source.transfer.counters()["served_bytes"] == 4 * 4096
            assert reader.transfer.counters()["pulled_bytes"] == 4 * 4096

    run(test())


def test_a_worker_pulls_what_it_lends_itself(bench, each_transport):
    """As one does that took the decode role while its leases of the prefill role stood."""

    async def test():
        async with bench(each_transport) as world:
            both = await world.side("p")
            ticket = both.transfer.grant([5, 63], 32)
            async with both.transfer.keep(ticket):
                await both.transfer.pull(ticket, [(0, 1), (1, 2)], 20)
            assert (both.region.array[[1, 2]] == both.region.array[[5, 63]]).all()
            await world.idle()
            assert both.ended(ticket.lease) == ["released"]

    run(test())


@pytest.mark.parametrize("cached", [0, 1, 7, 8])
def test_a_prefix_already_here_shifts_nothing(bench, each_transport, cached):
    async def test():
        async with bench(each_transport) as world:
            source = await world.side("p")
            reader = await world.side("d")
            leased = list(range(20, 28))
            ticket = source.transfer.grant(leased, 128)
            pairs = [(position, 40 - position) for position in range(cached, 8)]
            pulled = await reader.transfer.pull(ticket, pairs, 20)
            assert pulled.blocks == 8 - cached
            for position, own in pairs:
                assert (reader.region.array[own] == source.region.array[leased[position]]).all()
            source.transfer.release(ticket.lease)

    run(test())


def test_many_chunks_and_pulls_at_once(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            limits = {"chunk_bytes": 1 << 16, "in_flight_bytes": 1 << 17}
            source = await world.side("p", blocks=96, block_bytes=30000, **limits)
            readers = [await world.side(f"d{n}", blocks=96, block_bytes=30000, **limits) for n in range(2)]
            tickets = [source.transfer.grant(range(start, start + 32), 512) for start in (0, 32, 64)]

            async def pull(reader, ticket, start):
                async with reader.transfer.keep(ticket):
                    await reader.transfer.pull(ticket, [(n, start + 31 - n) for n in range(32)], 60)

            async with asyncio.TaskGroup() as group:
                for reader in readers:
                    for number, ticket in enumerate(tickets[:2] if reader is readers[0] else tickets[2:]):
                        group.create_task(pull(reader, ticket, number * 32))
            for position in range(32):
                assert (readers[0].region.array[31 - position] == source.region.array[position]).all()
                assert (readers[0].region.array[63 - position] == source.region.array[32 + position]).all()
                assert (readers[1].region.array[31 - position] == source.region.array[64 + position]).all()

    run(test())


def test_a_crowd_of_small_pulls_stays_within_what_a_source_allows(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            source = await world.side("p")
            reader = await world.side("d", blocks=300)
            tickets = [source.transfer.grant([number % 64], 16) for number in range(300)]
            await asyncio.gather(
                *(reader.transfer.pull(ticket, [(0, n)], 60) for n, ticket in enumerate(tickets))
            )
            assert (reader.region.array == source.region.array[np.arange(300) % 64]).all()
            for ticket in tickets:
                source.transfer.release(ticket.lease)

    run(test())


def test_another_fingerprint_is_named_before_a_byte_moves(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            source = await world.side("p", fingerprint="aa11")
            reader = await world.side("d", fingerprint="bb22")
            before = reader.region.array.copy()
            ticket = source.transfer.grant([1], 16)
            with pytest.raises(BadRequest, match=r"aa11.*bb22") as caught:
                await reader.transfer.pull(ticket, [(0, 0)], 20)
            assert caught.value.param == "fingerprint"
            # A ticket that lies about it is found out by the source.
            with pytest.raises(BadRequest, match="fingerprint: d has bb22, p has aa11"):
                await reader.transfer.pull(dataclasses.replace(ticket, fingerprint="bb22"), [(0, 0)], 20)
            assert (reader.region.array == before).all()
            assert source.transfer.counters()["served_reads"] == 0
            source.transfer.release(ticket.lease)

    run(test())


def test_another_block_size_is_named(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            source = await world.side("p", block_bytes=4096)
            reader = await world.side("d", block_bytes=8192)
            ticket = source.transfer.grant([1], 16)
            with pytest.raises(BadRequest, match="block_bytes: d has 8192, p has 4096"):
                await reader.transfer.pull(ticket, [(0, 0)], 20)
            source.transfer.release(ticket.lease)

    run(test())


def test_a_ticket_of_another_life_is_refused(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            source = await world.side("p", incarnation="second")
            reader = await world.side("d")
            ticket = source.transfer.grant([1], 16)
            old = dataclasses.replace(ticket, incarnation=Incarnation("first"))
            with pytest.raises(LeaseExpired, match="first is gone"):
                await reader.transfer.pull(old, [(0, 0)], 20)
            await reader.transfer.pull(ticket, [(0, 0)], 20)
            source.transfer.release(ticket.lease)

    run(test())


def test_a_lease_that_does_not_stand_is_refused_and_the_path_stays(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            source = await world.side("p")
            reader = await world.side("d")
            good, gone = source.transfer.grant([1], 16), source.transfer.grant([2], 16)
            source.transfer.release(gone.lease)
            source.transfer.release(gone.lease)
            assert source.ended(gone.lease) == ["released"]
            with pytest.raises(LeaseExpired, match="released"):
                await reader.transfer.pull(gone, [(0, 0)], 20)
            with pytest.raises(LeaseExpired, match="unknown"):
                await reader.transfer.pull(dataclasses.replace(good, lease=LeaseId("never")), [(0, 0)], 20)
            with pytest.raises(BadRequest, match="position 1 is outside the 1 blocks"):
                await reader.transfer.pull(good, [(1, 0)], 20)
            with pytest.raises(BadRequest, match="outside the 64"):
                await reader.transfer.pull(good, [(0, 64)], 20)
            await reader.transfer.pull(good, [(0, 0)], 20)
            assert reader.transfer.counters()["connections_opened"] == 1
            assert source.transfer.counters()["refused_reads"] == 3
            source.transfer.release(good.lease)

    run(test())


def test_a_lease_running_out_under_pulls_ends_them_and_no_stale_byte_counts(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            source = await world.side("p", lease_s=0.3, chunk_bytes=4096, in_flight_bytes=8192)
            reader = await world.side("d", chunk_bytes=4096, in_flight_bytes=8192)
            ticket = dataclasses.replace(source.transfer.grant(range(16), 256), lease_s=60.0)
            pairs = [(n, n) for n in range(16)]
            promised = source.region.array[:16].copy()

            def reuse(lease, why):
                source.ends.append((lease, why))
                source.region.array[:16] ^= 0xFF

            source.transfer._grants._on_end = reuse

            async def pull_on():
                while True:
                    await reader.transfer.pull(ticket, pairs, 20)
                    assert (reader.region.array[:16] == promised).all()

            with pytest.raises(LeaseExpired):
                await pull_on()
            await world.idle()
            assert source.ended(ticket.lease) == ["expired"]

    run(test())


def test_release_during_a_pull_lets_the_blocks_go_only_after_the_last_read(bench, each_transport, eventually):
    async def test():
        async with bench(each_transport) as world:
            limits = {"chunk_bytes": 1 << 16, "in_flight_bytes": 1 << 16}
            source = await world.side("p", block_bytes=1 << 16, **limits)
            reader = await world.side("d", block_bytes=1 << 16, **limits)
            reader.region.array[:] = 0
            source.region.array[:] |= 1
            ticket = source.transfer.grant(range(64), 1024)
            pull = asyncio.create_task(reader.transfer.pull(ticket, [(n, n) for n in range(64)], 20))
            await eventually(lambda: reader.region.array[0].any() or pull.done(), "first bytes")
            source.transfer.release(ticket.lease)
            with pytest.raises(LeaseExpired):
                await pull
            await world.idle()
            assert source.ended(ticket.lease) == ["released"]

    run(test())


@pytest.mark.parametrize("block_bytes", [4096, 1 << 20])
def test_a_byte_flipped_after_the_grant_is_found(bench, each_transport, block_bytes):
    async def test():
        async with bench(each_transport) as world:
            source = await world.side("p", blocks=8, block_bytes=block_bytes)
            reader = await world.side("d", blocks=8, block_bytes=block_bytes)
            ticket = source.transfer.grant([1, 2, 3], 48)
            await reader.transfer.pull(ticket, [(0, 0)], 20)  # sealed by now
            source.region.array[2, -1] ^= 1
            with pytest.raises(TransferFailed, match=r"position 1 .*checksum"):
                await reader.transfer.pull(ticket, [(0, 0), (1, 1), (2, 2)], 20)
            assert reader.transfer.counters()["checksum_mismatches"] == 1
            source.region.array[2, -1] ^= 1
            await reader.transfer.pull(ticket, [(0, 0), (1, 1), (2, 2)], 20)
            source.transfer.release(ticket.lease)

    run(test())


def test_checksums_can_be_switched_off(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            source = await world.side("p", checksum=False)
            reader = await world.side("d")
            ticket = source.transfer.grant([1], 16)
            await reader.transfer.pull(ticket, [(0, 0)], 20)
            assert (reader.region.array[0] == source.region.array[1]).all()
            source.transfer.release(ticket.lease)

    run(test())


def test_renewal_keeps_a_lease_and_its_lack_frees_exactly_the_others(bench, each_transport, eventually):
    async def test():
        async with bench(each_transport) as world:
            source = await world.side("p", lease_s=0.4)
            reader = await world.side("d")
            kept, *dead = [source.transfer.grant([number], 16) for number in range(5)]
            async with reader.transfer.keep(kept):
                await eventually(lambda: len(source.ends) == 4, "four ends")
                assert source.ends == [(ticket.lease, "expired") for ticket in dead]
                assert source.transfer.pinned == 1
                again = source.transfer.grant([9], 16)
                await eventually(lambda: source.ended(again.lease) == ["expired"], "one more lease's time")
                await reader.transfer.pull(kept, [(0, 0)], 20)
            await world.idle()
            assert source.ended(kept.lease) == ["released"]

    run(test())


def test_after_a_cancel_nothing_is_written_any_more(bench, each_transport, eventually):
    async def test():
        async with bench(each_transport) as world:
            limits = {"chunk_bytes": 1 << 18, "in_flight_bytes": 1 << 19}
            source = await world.side("p", block_bytes=1 << 17, **limits)
            reader = await world.side("d", block_bytes=1 << 17, **limits)
            source.region.array[:] |= 1
            ticket = source.transfer.grant(range(64), 1024)
            pairs = [(n, n) for n in range(64)]
            for _ in range(5):
                reader.region.array[:] = 0
                pull = asyncio.create_task(reader.transfer.pull(ticket, pairs, 20))
                await eventually(lambda pull=pull: reader.region.array[0, 0] or pull.done(), "first bytes")
                pull.cancel()
                pull.cancel()
                await asyncio.wait({pull})
                reader.region.array[:] = 0xEE
                if pull.cancelled():
                    # Whatever the source still had to say is said when it answers again.
                    other = source.transfer.grant([0], 16)
                    await reader.transfer.pull(other, [(0, 63)], 20)
                    source.transfer.release(other.lease)
                    assert (reader.region.array[:63] == 0xEE).all()
            source.transfer.release(ticket.lease)

    run(test())


def test_closing_the_source_fails_pulls_and_ends_each_lease_once(bench, each_transport, eventually):
    async def test():
        async with bench(each_transport) as world:
            limits = {"chunk_bytes": 1 << 16, "in_flight_bytes": 1 << 16}
            source = await world.side("p", block_bytes=1 << 16, **limits)
            reader = await world.side("d", block_bytes=1 << 16, **limits)
            reader.region.array[:] = 0
            source.region.array[:] |= 1
            idle, pulled = source.transfer.grant([1], 16), source.transfer.grant(range(64), 1024)
            pull = asyncio.create_task(reader.transfer.pull(pulled, [(n, n) for n in range(64)], 20))
            await eventually(lambda: reader.region.array[0].any() or pull.done(), "first bytes")
            await source.transfer.close()
            with pytest.raises(FleetError):
                await pull
            assert sorted(source.ends) == sorted([(idle.lease, "aborted"), (pulled.lease, "aborted")])
            with pytest.raises(TransferFailed):
                await reader.transfer.pull(pulled, [(0, 0)], 20)

    run(test())


def test_closing_the_reader_fences_its_pulls(bench, each_transport, eventually):
    async def test():
        async with bench(each_transport) as world:
            limits = {"chunk_bytes": 1 << 16, "in_flight_bytes": 1 << 16}
            source = await world.side("p", block_bytes=1 << 16, **limits)
            reader = await world.side("d", block_bytes=1 << 16, **limits)
            reader.region.array[:] = 0
            source.region.array[:] |= 1
            ticket = source.transfer.grant(range(64), 1024)
            pull = asyncio.create_task(reader.transfer.pull(ticket, [(n, n) for n in range(64)], 20))
            await eventually(lambda: reader.region.array[0].any() or pull.done(), "first bytes")
            await reader.transfer.close()
            after = reader.region.array.copy()
            with pytest.raises(FleetError):
                await pull
            source.transfer.release(ticket.lease)
            await world.idle()
            assert (reader.region.array == after).all()

    run(test())


def test_a_restarted_source_is_pulled_from_without_restarting_the_reader(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            reader = await world.side("d")
            for life in range(3):
                source = await world.side("p", incarnation=f"life-{life}")
                ticket = source.transfer.grant([life], 16)
                async with reader.transfer.keep(ticket):
                    await reader.transfer.pull(ticket, [(0, life)], 20)
                assert (reader.region.array[life] == source.region.array[life]).all()
                await world.idle()
                await source.transfer.close()
                with pytest.raises((LeaseExpired, TransferFailed)):
                    await reader.transfer.pull(ticket, [(0, life)], 20)
            assert len(reader.transfer._pulls._paths) <= 1

    run(test())


def test_a_path_that_breaks_as_it_is_made_is_made_once_more_for_all_who_wait(bench):
    async def test():
        async with bench("loopback") as world:
            source, reader = await world.side("p"), await world.side("d")
            ticket = source.transfer.grant([4], 16)

            async def cut():
                while not (made := world.hub.port(ticket.address).connections):
                    await asyncio.sleep(0)
                made[0].shut()

            pulls = [reader.transfer.pull(ticket, [(0, block)], 20) for block in range(3)]
            await asyncio.gather(cut(), *pulls)
            assert reader.transfer.counters()["connections_opened"] == 2
            source.transfer.release(ticket.lease)

    run(test())


def test_a_read_that_is_asked_for_twice_at_once_holds_no_block_for_ever(bench, eventually):
    async def test():
        async with bench("shm") as world:
            source = await world.side("p")
            ticket = source.transfer.grant([4], 16)
            hello = Hello(VERSION, "d", ticket.worker, ticket.incarnation, ticket.fingerprint, 4096)
            read = frame(Read(1, ticket.lease, [0]))
            talk, writer = await asyncio.open_unix_connection(ticket.address.split(":", 2)[2])
            writer.write(frame(hello) + read + read)
            await talk.read()
            writer.close()
            source.transfer.release(ticket.lease)
            await eventually(lambda: source.ended(ticket.lease) == ["released"])

    run(test())


def test_auto_takes_shared_memory_and_says_so_else_ucx(bench):
    async def test():
        async with bench("auto") as world:
            source = await world.side("p")
            reader = await world.side("d")
            assert source.transfer.address.startswith("shm:")
            assert ",ucx:127.0.0.1:" in source.transfer.address
            ticket = source.transfer.grant([1], 16)
            assert (await reader.transfer.pull(ticket, [(0, 0)], 20)).transport == "shm"
            elsewhere = ",".join(part.replace("shm:", "shm:other-") for part in ticket.address.split(","))
            pulled = await reader.transfer.pull(dataclasses.replace(ticket, address=elsewhere), [(0, 1)], 20)
            assert pulled.why == "ucx: shm does not reach it"
            nowhere = dataclasses.replace(ticket, address="tube:1")
            with pytest.raises(TransferFailed, match="no path to p at tube:1"):
                await reader.transfer.pull(nowhere, [(0, 1)], 20)
            source.transfer.release(ticket.lease)

    run(test())


def _resources():
    gc.collect()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), resident


def test_two_thousand_small_pulls_leave_nothing_behind(bench, real_transport):
    async def test():
        async with bench(real_transport) as world:
            source = await world.side("p")
            reader = await world.side("d")

            async def pulls(count):
                for number in range(count):
                    ticket = source.transfer.grant([number % 64], 16)
                    await reader.transfer.pull(ticket, [(0, number % 50)], 20)
                    source.transfer.release(ticket.lease)

            await pulls(1100)  # past what the table remembers of ended leases
            files, threads, resident = _resources()
            await pulls(2000)
            assert _resources()[:2] == (files, threads)
            assert _resources()[2] - resident < 4 << 20
            assert reader.transfer.counters()["connections_opened"] == 1

    run(test())


def test_coming_and_going_peers_leave_nothing_behind(bench, each_transport):
    async def test():
        async def generation():
            async with bench(each_transport) as world:
                source = await world.side("p")
                reader = await world.side("d")
                ticket = source.transfer.grant(range(8), 128)
                async with reader.transfer.keep(ticket):
                    await reader.transfer.pull(ticket, [(n, n) for n in range(8)], 20)
                await world.idle()
                assert np.array_equal(reader.region.array[:8], source.region.array[:8])

        for _ in range(3):
            await generation()
        files, threads, _ = _resources()
        for _ in range(5):
            await generation()
        assert _resources()[0] <= files
        assert _resources()[1] <= threads

    run(test())
