"""What every bus promises, in memory and over a real NATS server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from servers import Nats, eventually

from fleet.bus import Bus, BusMessage, Subscription
from fleet.bus.memory import MemoryHub
from fleet.bus.nats_bus import NatsBus

Case = Callable[[Callable[[], Bus]], Awaitable[None]]


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.live)])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Case], None]]:
    """Runs a case with a function that makes buses of one broker."""

    async def run(case: Case) -> None:
        buses: list[Bus] = []
        hub = MemoryHub()

        def make() -> Bus:
            buses.append(hub.bus() if server is None else NatsBus(server.url))
            return buses[-1]

        try:
            async with asyncio.timeout(60):
                await case(make)
        finally:
            for bus in buses:
                await bus.close()

    server: Nats | None = None
    if request.param == "nats":
        server = Nats(tmp_path / "nats")
        server.start()
    yield lambda case: asyncio.run(run(case))
    if server is not None:
        server.kill()


async def take(subscription: Subscription, count: int) -> list[BusMessage]:
    taken: list[BusMessage] = []
    if count:
        async for message in subscription:
            taken.append(message)
            if len(taken) == count:
                break
    return taken


async def heard(sender: Bus, subject: str, *subscriptions: Subscription) -> None:
    """Returns when what `sender` says on the subject reaches them all, with nothing left in any."""

    async def hear(subscription: Subscription, first: asyncio.Event) -> None:
        async for message in subscription:
            if message.data == b"last probe":
                return
            first.set()

    events = [asyncio.Event() for _ in subscriptions]
    async with asyncio.TaskGroup() as group:
        for subscription, event in zip(subscriptions, events, strict=True):
            group.create_task(hear(subscription, event))
        while not all(event.is_set() for event in events):
            await sender.publish(subject, b"probe")
            await asyncio.sleep(0.01)
        await sender.publish(subject, b"last probe")


def test_messages_come_in_order_to_all_who_listen(play: Callable[[Case], None]) -> None:
    async def case(make: Callable[[], Bus]) -> None:
        sender, first, second = make(), make(), make()
        one = await first.subscribe("fleet.kv.*")
        two = await second.subscribe("fleet.>")
        await heard(sender, "fleet.kv.a", one, two)
        sent = [BusMessage(f"fleet.kv.{i % 3}", b"%d" % i) for i in range(500)]
        for message in sent:
            await sender.publish(message.subject, message.data)
        assert await take(one, 500) == sent
        assert await take(two, 500) == sent
        assert one.dropped == two.dropped == 0

    play(case)


@pytest.mark.parametrize(
    ("pattern", "takes", "leaves"),
    [
        ("a.b", ["a.b"], ["a", "a.b.c", "a.c"]),
        ("a.*", ["a.b", "a.c"], ["a", "a.b.c", "b.b"]),
        ("a.>", ["a.b", "a.b.c"], ["a", "b.a"]),
        ("*.b.*", ["x.b.y"], ["x.b", "x.c.y", "x.b.y.z"]),
    ],
)
def test_patterns(play: Callable[[Case], None], pattern: str, takes: list[str], leaves: list[str]) -> None:
    async def case(make: Callable[[], Bus]) -> None:
        sender, listener = make(), make()
        subscription = await listener.subscribe(pattern)
        await heard(sender, takes[0], subscription)
        for subject in [*leaves, *takes]:
            await sender.publish(subject, b"x")
        assert [message.subject for message in await take(subscription, len(takes))] == takes

    play(case)


def test_a_slow_reader_loses_the_oldest_and_they_are_counted(play: Callable[[Case], None]) -> None:
    async def case(make: Callable[[], Bus]) -> None:
        sender, listener = make(), make()
        slow = await listener.subscribe("a", limit=100)  # type: ignore[call-arg]  # beyond the protocol
        quick = await listener.subscribe("a")
        await heard(sender, "a", slow, quick)
        before = slow.dropped
        for i in range(5_000):
            await sender.publish("a", b"%d" % i)
        assert [message.data for message in await take(quick, 5_000)] == [b"%d" % i for i in range(5_000)]
        await eventually(lambda: slow.dropped - before >= 4_900)
        assert [message.data for message in await take(slow, 100)] == [b"%d" % i for i in range(4_900, 5_000)]
        assert quick.dropped == 0

    play(case)


def test_closing_ends_the_readers_iteration(play: Callable[[Case], None]) -> None:
    async def case(make: Callable[[], Bus]) -> None:
        bus = make()
        one, two = await bus.subscribe("a"), await bus.subscribe("a")
        readers = [asyncio.create_task(take(subscription, 10_000)) for subscription in (one, two)]
        await heard(bus, "b", await bus.subscribe("b"))
        await one.close()
        assert await readers[0] == []
        await one.close()
        await bus.close()
        assert await readers[1] == []

    play(case)


def test_publishing_to_nobody_is_fine(play: Callable[[Case], None]) -> None:
    async def case(make: Callable[[], Bus]) -> None:
        bus = make()
        for _ in range(1000):
            await bus.publish("nobody.listens", b"x" * 1000)
        await eventually(lambda: bus.connected)

    play(case)
