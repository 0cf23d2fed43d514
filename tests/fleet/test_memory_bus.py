"""Faults that the bus in memory can be told to have, in virtual time."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from fleet.bus.mailbox import Mailbox
from fleet.bus.memory import MemoryHub
from fleet.virtual_time import Process, run


async def drain(box: Mailbox) -> list[bytes]:
    """What comes until a second passes without a message."""
    taken: list[bytes] = []

    async def read() -> None:
        async for message in box:
            taken.append(message.data)

    reader = asyncio.create_task(read())
    await asyncio.sleep(1000)
    await box.close()
    await reader
    return taken


def test_a_delay_is_kept() -> None:
    async def main() -> float:
        hub = MemoryHub(delay_s=0.25)
        box = await hub.bus().subscribe("a")
        await hub.bus().publish("a", b"x")
        async for _ in box:
            break
        return asyncio.get_running_loop().time()

    assert run(main()) == 0.25


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 3)), max_size=30))
def test_a_message_never_overtakes_one_sent_before(steps: list[tuple[float, float]]) -> None:
    async def main() -> list[bytes]:
        hub = MemoryHub()
        box = await hub.bus().subscribe("a")
        sender = hub.bus()
        for i, (delay_s, pause_s) in enumerate(steps):
            hub.delay_s = delay_s
            await sender.publish("a", b"%d" % i)
            await asyncio.sleep(pause_s)
        return await drain(box)

    assert run(main()) == [b"%d" % i for i in range(len(steps))]


def test_messages_are_lost_where_the_test_says_so() -> None:
    async def main() -> None:
        hub = MemoryHub()
        sender, listener = hub.bus(), hub.bus()
        box = await listener.subscribe("a.*")
        await sender.publish("a.1", b"heard")
        hub.lose = lambda subject: subject == "a.2"
        await sender.publish("a.2", b"lost on the way")
        await sender.publish("a.3", b"heard too")
        hub.up = False
        assert not sender.connected
        await sender.publish("a.1", b"broker away")
        hub.up = True
        listener.cut = True
        assert not listener.connected
        await sender.publish("a.1", b"reader cut off")
        listener.cut = False
        sender.cut = True
        await sender.publish("a.1", b"writer cut off")
        sender.cut = False
        hub.delay_s = 1.0
        await sender.publish("a.1", b"on the way when the broker dies")
        hub.up = False
        await asyncio.sleep(2)
        hub.up = True
        await sender.publish("a.1", b"last")
        assert await drain(box) == [b"heard", b"heard too", b"last"]
        assert hub.lost == 4

    run(main())


def test_a_message_can_come_late_and_twice_and_ways_can_be_cut_one_by_one() -> None:
    async def main() -> list[bytes]:
        hub = MemoryHub(delay_s=0.1)
        box = await (reader := hub.bus()).subscribe("a")
        sender = hub.bus()
        hub.late = lambda subject: (0.0, 5.0)
        await sender.publish("a", b"twice")
        hub.late = lambda subject: (2.0,)
        await sender.publish("a", b"late")
        hub.late = lambda subject: (0.0,)
        await sender.publish("a", b"usual")
        sender.mute = True
        await sender.publish("a", b"never said")
        sender.mute, reader.mute = False, True
        await sender.publish("a", b"heard")
        await asyncio.sleep(10)
        reader.deaf = True
        await sender.publish("a", b"never heard")
        assert reader.cut
        return await drain(box)

    assert run(main()) == [b"twice", b"usual", b"heard", b"late", b"twice"]


def test_what_a_stopped_process_sent_before_still_comes() -> None:
    async def main() -> list[bytes]:
        hub = MemoryHub(delay_s=0.5)
        box = await hub.bus().subscribe("a")
        sender = Process("sender", offset_s=1e4)
        await sender.start(hub.bus().publish("a", b"x"))
        sender.stop()
        return await drain(box)

    assert run(main()) == [b"x"]
