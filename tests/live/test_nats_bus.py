"""The NATS bus when its server is killed, paused, emptied, or has never been there."""

from __future__ import annotations

import asyncio

import pytest
from servers import Nats, Proxy, eventually

from fleet.bus import Subscription
from fleet.bus.nats_bus import NatsBus

pytestmark = pytest.mark.live


class Ear:
    """Reads one subscription and remembers the last message."""

    def __init__(self, subscription: Subscription) -> None:
        self.last = b""
        self.count = 0
        self._task = asyncio.create_task(self._read(subscription))

    async def _read(self, subscription: Subscription) -> None:
        async for message in subscription:
            self.last = message.data
            self.count += 1

    async def end(self) -> None:
        await self._task


async def talk(bus: NatsBus, subject: str) -> None:
    """Says something new all the time, broker or not."""
    said = 0
    while True:
        said += 1
        await bus.publish(subject, b"%d" % said)
        await asyncio.sleep(0.005)


def test_events_resume_after_each_of_twenty_kills(nats: Nats) -> None:
    async def main() -> None:
        sender, listener = NatsBus(nats.url), NatsBus(nats.url)
        ear = Ear(await listener.subscribe("a.*"))
        talking = asyncio.create_task(talk(sender, "a.x"))
        for _ in range(20):
            heard = ear.count
            await eventually(lambda heard=heard: ear.count > heard + 3)  # type: ignore[misc]
            await asyncio.to_thread(nats.kill)
            await eventually(lambda: not sender.connected and not listener.connected)
            await asyncio.to_thread(nats.start)
        heard = ear.count
        await eventually(lambda: ear.count > heard + 3)
        assert listener.connections == 21
        assert sender.lost > 0
        talking.cancel()
        await sender.close()
        await listener.close()
        await ear.end()

    asyncio.run(main())


def test_a_frozen_server_is_a_lost_one_and_publishing_does_not_wait(nats: Nats) -> None:
    async def main() -> None:
        sender, listener = NatsBus(nats.url), NatsBus(nats.url)
        ear = Ear(await listener.subscribe("a"))
        talking = asyncio.create_task(talk(sender, "a"))
        await eventually(lambda: ear.count > 3)
        nats.pause()
        dropped = 0
        while sender.connected or listener.connected:
            lost = sender.lost
            await sender.publish("a", b"x" * 500_000)  # far more than a socket holds
            if sender.connected and sender.lost > lost:
                dropped += 1
            await asyncio.sleep(0.002)
        # While it was still taken for connected: what did not fit did not wait for room.
        assert dropped > 3
        nats.resume()
        heard = ear.count
        await eventually(lambda: ear.count > heard + 3)
        talking.cancel()
        await sender.close()
        await listener.close()
        await ear.end()

    asyncio.run(main())


def test_a_server_that_comes_later_is_found(nats: Nats) -> None:
    async def main() -> None:
        nats.kill()
        bus = NatsBus(nats.url)
        ear = Ear(await bus.subscribe("a"))
        for _ in range(100):
            await bus.publish("a", b"nobody there")
        assert bus.lost == 100
        assert not bus.connected
        await asyncio.to_thread(nats.start)
        talking = asyncio.create_task(talk(bus, "a"))
        await eventually(lambda: ear.count > 3)
        talking.cancel()
        await bus.close()
        await ear.end()

    asyncio.run(main())


def test_a_reader_that_fails_inside_the_library_is_noticed(nats: Nats) -> None:
    """The library's reading task ends without a word on an unexpected error, and looks connected."""

    async def main() -> None:
        bus = NatsBus(nats.url)
        ear = Ear(await bus.subscribe("a"))
        talking = asyncio.create_task(talk(bus, "a"))
        await eventually(lambda: ear.count > 3)
        assert bus._client is not None
        bus._client._reading_task.cancel()
        await eventually(lambda: bus.connections == 2)
        heard = ear.count
        await eventually(lambda: ear.count > heard + 3)
        talking.cancel()
        await bus.close()
        await ear.end()

    asyncio.run(main())


def test_closing_sends_what_was_published(nats: Nats) -> None:
    async def main() -> None:
        sender, listener = NatsBus(nats.url), NatsBus(nats.url)
        ear = Ear(await listener.subscribe("a"))
        talking = asyncio.create_task(talk(sender, "a"))
        await eventually(lambda: ear.count > 3)
        talking.cancel()
        await sender.publish("a", b"goodbye")
        await sender.close()
        await eventually(lambda: ear.last == b"goodbye")
        await listener.close()
        await ear.end()

    asyncio.run(main())


def test_a_connection_that_went_silent_is_replaced(nats: Nats) -> None:
    async def main() -> None:
        proxy = Proxy(nats.port)
        await proxy.start()
        sender, listener = NatsBus(nats.url), NatsBus(f"nats://{proxy.address}")
        ear = Ear(await listener.subscribe("a"))
        talking = asyncio.create_task(talk(sender, "a"))
        await eventually(lambda: ear.count > 3)
        proxy.silence()
        await eventually(lambda: listener.connections == 2)
        heard = ear.count
        await eventually(lambda: ear.count > heard + 3)
        talking.cancel()
        await sender.close()
        await listener.close()
        await ear.end()
        await proxy.close()

    asyncio.run(main())
