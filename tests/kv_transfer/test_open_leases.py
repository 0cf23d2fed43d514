"""Blocks that are read while later ones are still being computed: the same cases over every transport."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from fleet.errors import BadRequest, LeaseExpired, TransferFailed
from fleet.ids import LeaseId


def run(test):
    asyncio.run(asyncio.wait_for(test, 120))


async def waiting(reader, ticket, have):
    """A wait that has reached the source, so that what happens now happens under it."""
    wait = asyncio.create_task(reader.transfer.ready(ticket, have))
    with pytest.raises(BadRequest):  # Asked after it on the same path, answered after it was taken.
        await reader.transfer.pull(ticket, [(1000, 0)], 20)
    assert not wait.done()
    return wait


def test_blocks_are_read_as_they_become_final(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            source, reader = await world.side("p"), await world.side("d")
            leased = [9, 3, 40, 41, 7]
            ticket = source.transfer.open(leased[:2], 70)
            async with reader.transfer.keep(ticket):
                assert await reader.transfer.ready(ticket, 0) == 2
                await reader.transfer.pull(ticket, [(0, 10), (1, 11)], 20)
                with pytest.raises(BadRequest, match="position 2 is outside the 2 blocks"):
                    await reader.transfer.pull(ticket, [(2, 12)], 20)
                wait = await waiting(reader, ticket, 2)
                source.transfer.extend(ticket.lease, leased[2:4])
                assert await wait == 4
                # The newest alone, and old and new in one pull.
                await reader.transfer.pull(ticket, [(3, 13)], 20)
                await reader.transfer.pull(ticket, [(2, 12), (0, 10)], 20)
                wait = await waiting(reader, ticket, 4)
                source.transfer.extend(ticket.lease, leased[4:])
                source.transfer.seal(ticket.lease)
                assert await wait == 5
                assert await reader.transfer.ready(ticket, 5) == 5, "no more will come: nobody waits for it"
                await reader.transfer.pull(ticket, [(4, 14)], 20)
            for position, block in enumerate(leased):
                assert (reader.region.array[10 + position] == source.region.array[block]).all()
            await world.idle()
            assert source.ended(ticket.lease) == ["released"]
            assert reader.transfer.counters()["connections_opened"] == 1

    run(test())


def test_an_open_lease_has_no_clock_and_a_sealed_one_has(bench, each_transport, eventually):
    async def test():
        async with bench(each_transport) as world:
            source, reader = await world.side("p", lease_s=0.3), await world.side("d")
            ticket = source.transfer.open([1], 40)
            other = source.transfer.grant([2], 16)
            await eventually(lambda: source.ended(other.lease) == ["expired"], "the time of a lease")
            # Not renewed, and asked again several times while nothing becomes ready.
            wait = asyncio.create_task(reader.transfer.ready(ticket, 1))
            another = source.transfer.grant([2], 16)
            await eventually(lambda: source.ended(another.lease) == ["expired"], "once more")
            assert not wait.done()
            source.transfer.extend(ticket.lease, [3])
            assert await wait == 2
            source.transfer.seal(ticket.lease)
            await eventually(lambda: source.ended(ticket.lease) == ["expired"], "its own")

    run(test())


@pytest.mark.parametrize("end", ["released", "closed"])
def test_who_waits_is_told_when_the_lease_ends(bench, each_transport, end):
    async def test():
        async with bench(each_transport) as world:
            source, reader = await world.side("p"), await world.side("d")
            ticket = source.transfer.open([1, 2], 90)
            wait = await waiting(reader, ticket, 2)
            if end == "released":  # A prefill that was cancelled, or failed halfway.
                source.transfer.release(ticket.lease)
                with pytest.raises(LeaseExpired, match="released"):
                    await wait
                with pytest.raises(LeaseExpired, match="released"):
                    await reader.transfer.ready(ticket, 0)
                with pytest.raises(LeaseExpired, match="unknown"):
                    await reader.transfer.ready(dataclasses.replace(ticket, lease=LeaseId("never")), 0)
            else:
                await source.transfer.close()
                with pytest.raises((LeaseExpired, TransferFailed)):
                    await wait

    run(test())


def test_a_wait_that_is_given_up_leaves_the_path_as_it_was(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            source, reader = await world.side("p"), await world.side("d")
            ticket = source.transfer.open([1, 2], 90)
            for _ in range(3):
                wait = await waiting(reader, ticket, 2)
                wait.cancel()
                await asyncio.wait({wait})
                assert wait.cancelled()
            source.transfer.extend(ticket.lease, [5])
            assert await reader.transfer.ready(ticket, 2) == 3
            await reader.transfer.pull(ticket, [(2, 0)], 20)
            assert reader.transfer.counters()["connections_opened"] == 1
            source.transfer.release(ticket.lease)

    run(test())


def test_leaving_by_an_exception_keeps_the_lease_for_another_reader(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            source, first, second = await world.side("p"), await world.side("d"), await world.side("e")
            ticket = source.transfer.open([1], 40)

            async def give_up():
                async with first.transfer.keep(ticket):
                    await first.transfer.pull(ticket, [(0, 0)], 20)
                    raise ArithmeticError

            with pytest.raises(ArithmeticError):
                await give_up()
            # What the first would have said is said before this is answered.
            with pytest.raises(BadRequest):
                await first.transfer.pull(ticket, [(7, 0)], 20)
            source.transfer.seal(ticket.lease)
            async with second.transfer.keep(ticket):
                await second.transfer.pull(ticket, [(0, 0)], 20)
            await world.idle()
            assert source.ended(ticket.lease) == ["released"]

    run(test())


def test_a_byte_flipped_in_an_early_block_is_found(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            source, reader = await world.side("p"), await world.side("d")
            ticket = source.transfer.open([1, 2], 90)
            source.transfer.extend(ticket.lease, [3])
            source.region.array[2, -1] ^= 1
            with pytest.raises(TransferFailed, match=r"position 1 .*checksum"):
                await reader.transfer.pull(ticket, [(0, 0), (1, 1), (2, 2)], 20)
            assert reader.transfer.counters()["checksum_mismatches"] == 1
            source.region.array[2, -1] ^= 1
            await reader.transfer.pull(ticket, [(0, 0), (1, 1), (2, 2)], 20)
            source.transfer.release(ticket.lease)

    run(test())


def test_a_crowd_that_waits_holds_up_no_pull(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            source, reader = await world.side("p", blocks=400), await world.side("d")
            tickets = [source.transfer.open([number], 32) for number in range(300)]
            waits = [asyncio.create_task(reader.transfer.ready(ticket, 1)) for ticket in tickets]
            ready = source.transfer.grant([399], 16)
            for _ in range(3):
                await reader.transfer.pull(ready, [(0, 5)], 20)
            assert not any(wait.done() for wait in waits)
            for ticket in tickets:
                source.transfer.extend(ticket.lease, [399])
            assert await asyncio.gather(*waits) == [2] * 300
            assert reader.transfer.counters()["connections_opened"] == 1
            for ticket in (*tickets, ready):
                source.transfer.release(ticket.lease)

    run(test())


def test_blocks_of_an_open_lease_are_checked(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            source = await world.side("p")
            ticket = source.transfer.open([1, 2], 90)
            for blocks in ([2], [3, 3], [-1], [64]):
                with pytest.raises(ValueError, match=r"block"):
                    source.transfer.extend(ticket.lease, blocks)
            source.transfer.seal(ticket.lease)
            with pytest.raises(ValueError, match="is not open"):
                source.transfer.extend(ticket.lease, [3])
            source.transfer.release(ticket.lease)

    run(test())
