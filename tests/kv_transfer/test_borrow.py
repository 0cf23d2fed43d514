"""Leases on cached blocks, asked for by name: the same cases over every transport."""

from __future__ import annotations

import asyncio

import pytest

from fleet.errors import BadRequest, LeaseExpired, TransferFailed
from fleet.handoff import Holder
from kv_transfer.grants import LOANS
from kv_transfer.messages import BORROWED_BLOCKS, OPEN_BORROWS

NAMES = [bytes([n]) * 32 for n in range(12)]
CACHED = [9, 3, 40, 41, 7]
"""Blocks of the first names."""


def run(test):
    asyncio.run(asyncio.wait_for(test, 120))


class Cache:
    """Lends the blocks of a chain of names, and knows what it has lent."""

    def __init__(self, side):
        self.side, self.lent, self.wait, self.asked = side, {}, None, 0
        side.transfer.lend = self.lend

    async def lend(self, lease, names, have):
        self.asked += 1
        if self.wait is not None:
            await self.wait.wait()
        count = 0
        for name, own in zip(names, NAMES[: len(CACHED)], strict=False):
            if name != own:
                break
            count += 1
        blocks = CACHED[have:count]
        if blocks:
            self.lent[lease] = blocks
        return blocks

    def over(self):
        """All that was lent has ended, once each."""
        return [lease for lease, _ in self.side.ends] and all(
            self.side.ended(lease) in (["released"], ["expired"], ["aborted"]) for lease in self.lent
        )


def holder(side, **fields):
    own = side.transfer
    given = {
        "incarnation": own.incarnation,
        "address": own.address,
        "fingerprint": own.fingerprint,
        "compute_s": 1.0,
        "blocks": 9,
    }
    return Holder(worker=own.worker, **{**given, **fields})


def test_what_is_cached_is_lent_by_name_and_given_back(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            source, reader = await world.side("p"), await world.side("d")
            cache = Cache(source)
            async with reader.transfer.borrow(holder(source), NAMES[:8], 2, 20) as (ticket, blocks):
                assert blocks == 3, "three of eight: five are cached, and two the reader has"
                await reader.transfer.pull(ticket, [(0, 10), (1, 11), (2, 12)], 20)
                with pytest.raises(BadRequest, match="position 3 is outside the 3 blocks"):
                    await reader.transfer.pull(ticket, [(3, 13)], 20)
            for position, block in enumerate(CACHED[2:]):
                assert (reader.region.array[10 + position] == source.region.array[block]).all()
            await world.idle()
            assert source.ended(ticket.lease) == ["released"]
            counters = source.transfer.counters()
            assert (counters["loans"], counters["loaned_blocks"], counters["loans_empty"]) == (1, 3, 0)
            assert cache.over()

    run(test())


def test_nothing_is_lent_that_is_not_named(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            source, reader = await world.side("p"), await world.side("d")

            async def refused(match, names, have=0, **fields):
                with pytest.raises(TransferFailed, match=match):
                    async with reader.transfer.borrow(holder(source, **fields), names, have, 20):
                        raise AssertionError("lent")

            await refused("none of these blocks", NAMES[:3])  # nobody lends
            Cache(source)
            await refused("none of these blocks", NAMES[1:3])
            await refused("none of these blocks", NAMES[:8], 5)
            assert source.transfer.counters()["loans_empty"] == 3
            other = reader.transfer.borrow(holder(source, incarnation="another"), NAMES[:3], 0, 20)
            with pytest.raises(LeaseExpired):
                await other.__aenter__()
            other = reader.transfer.borrow(holder(source, fingerprint="another"), NAMES[:3], 0, 20)
            with pytest.raises(BadRequest, match="fingerprint"):
                await other.__aenter__()
            await world.idle()
            assert not source.ends

    run(test())


def test_a_loan_that_nobody_gives_back_ends_by_itself(bench, each_transport, eventually):
    async def test():
        async with bench(each_transport) as world:
            source, reader = await world.side("p"), await world.side("d")
            cache = Cache(source)
            borrowing = reader.transfer.borrow(holder(source), NAMES[:5], 0, 0.3)
            ticket, _ = await borrowing.__aenter__()
            await eventually(lambda: source.ended(ticket.lease) == ["expired"])
            with pytest.raises(LeaseExpired):
                await reader.transfer.pull(ticket, [(0, 10)], 20)
            await borrowing.__aexit__(None, None, None)
            await world.idle()
            assert cache.over()
            counters = source.transfer.counters()
            assert (counters["leases_expired"], counters["loans_expired"]) == (1, 1)

    run(test())


def test_who_takes_too_long_to_answer_is_given_up_and_keeps_nothing(bench, each_transport, eventually):
    async def test():
        async with bench(each_transport) as world:
            source, reader = await world.side("p"), await world.side("d")
            cache = Cache(source)
            async with reader.transfer.borrow(holder(source), NAMES[:1], 0, 20):
                pass  # Now there is a path: the next question arrives before it is given up.
            cache.wait = asyncio.Event()
            with pytest.raises(TransferFailed, match="did not answer"):
                async with reader.transfer.borrow(holder(source), NAMES[:5], 0, 0.2):
                    pass
            cache.wait.set()
            await eventually(lambda: len(cache.lent) == 2)
            await world.idle()
            assert cache.over()

    run(test())


def test_what_is_lent_to_one_who_gave_up_asking_comes_back_at_once(bench, each_transport, eventually):
    async def test():
        async with bench(each_transport) as world:
            source, reader = await world.side("p"), await world.side("d")
            cache = Cache(source)
            cache.wait = asyncio.Event()
            borrowing = reader.transfer.borrow(holder(source), NAMES[:5], 0, 60.0)
            asking = asyncio.ensure_future(borrowing.__aenter__())
            await eventually(lambda: cache.asked)
            asking.cancel()
            await asyncio.wait({asking})
            cache.wait.set()
            await eventually(lambda: bool(source.ends))
            assert source.ended(next(iter(cache.lent))) == ["released"]
            await world.idle()

    run(test())


def test_a_source_that_closes_takes_all_back(bench, each_transport, eventually):
    async def test():
        async with bench(each_transport) as world:
            source, reader = await world.side("p"), await world.side("d")
            cache = Cache(source)
            async with reader.transfer.borrow(holder(source), NAMES[:5], 0, 20) as (ticket, _):
                await source.transfer.close()
                assert source.ended(ticket.lease) == ["aborted"]
                with pytest.raises((TransferFailed, LeaseExpired)):
                    await reader.transfer.pull(ticket, [(0, 10)], 5)
            assert cache.over()
            source.transfer.validate(idle=True)

    run(test())


def test_many_at_once_are_bounded(bench, each_transport):
    async def test():
        async with bench(each_transport) as world:
            source, reader = await world.side("p"), await world.side("d")
            Cache(source)
            held = []
            for _ in range(LOANS):
                held.append(reader.transfer.borrow(holder(source), NAMES[:5], 0, 60))
                await held[-1].__aenter__()
            with pytest.raises(TransferFailed, match="none of these blocks"):
                await reader.transfer.borrow(holder(source), NAMES[:5], 0, 20).__aenter__()
            for one in held:
                await one.__aexit__(None, None, None)
            await world.idle()
            async with reader.transfer.borrow(holder(source), NAMES[:5], 0, 20) as (_, blocks):
                assert blocks == 5
            await world.idle()

    run(test())


def test_questions_under_way_are_bounded(bench, eventually):
    async def test():
        async with bench("shm") as world:
            source, reader = await world.side("p"), await world.side("d")
            cache = Cache(source)
            cache.wait = asyncio.Event()

            async def ask():
                async with reader.transfer.borrow(holder(source), NAMES[:5], 0, 20):
                    return True

            asking = [asyncio.create_task(ask()) for _ in range(OPEN_BORROWS + 3)]
            await eventually(lambda: sum(task.done() for task in asking) == 3)
            cache.wait.set()
            answers = await asyncio.gather(*asking, return_exceptions=True)
            assert sum(isinstance(answer, BadRequest) for answer in answers) == 3
            assert answers.count(True) == OPEN_BORROWS
            await world.idle()

    run(test())


def test_names_that_are_none_are_refused(bench):
    async def test():
        async with bench("shm") as world:
            source, reader = await world.side("p"), await world.side("d")
            Cache(source)
            for names, have in (([b"short"], 0), (NAMES[:2], 2), ([], 0)):
                with pytest.raises(BadRequest, match="no names"):
                    await reader.transfer.borrow(holder(source), names, have, 20).__aenter__()
            async with reader.transfer.borrow(holder(source), NAMES[:5], 0, 20) as (_, blocks):
                assert blocks == 5, "the connection stands"
            await world.idle()

    run(test())


def test_of_a_sequence_that_is_longer_than_can_be_named_nothing_is_asked(bench):
    async def test():
        async with bench("shm") as world:
            source, reader = await world.side("p"), await world.side("d")
            Cache(source)
            ticket = source.transfer.grant([4], 16)
            async with reader.transfer.keep(ticket):
                await reader.transfer.pull(ticket, [(0, 0)], 20)
                names = [bytes(32)] * (BORROWED_BLOCKS + 5)
                with pytest.raises(TransferFailed, match=f"only of the first {BORROWED_BLOCKS}"):
                    await reader.transfer.borrow(holder(source), names, BORROWED_BLOCKS, 20).__aenter__()
                await reader.transfer.pull(ticket, [(0, 1)], 20)
            assert reader.transfer.counters()["connections_opened"] == 1, "the path stands"

    run(test())
