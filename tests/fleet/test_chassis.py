"""What a worker says, and how much of it at once: real chassis, registry, bus and wire in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from fleet import virtual_time
from fleet.bus.memory import MemoryHub as MemoryBusHub
from fleet.chassis import Chassis, ChassisSettings, Stream
from fleet.events import BlocksStored, KvEvents, LoadReport, kv_subject
from fleet.handoff import CancelReason, DecodeJob, Frame
from fleet.ids import Incarnation, LeaseId, RequestId, WorkerId
from fleet.kv_layout import Fingerprint
from fleet.member import MemberState, Role, WorkerCard
from fleet.registry.memory import MemoryHub as MemoryRegistryHub
from fleet.request import Request, Sampling
from fleet.stages import Stage
from fleet.wire import Session
from fleet.wire.codec import decode_kv_events
from fleet.wire.memory import MemoryHub
from fleet.wire.session import WireSettings

CARD = WorkerCard(
    id=WorkerId("w"),
    incarnation=Incarnation("i"),
    role=Role.DECODE,
    state=MemberState.STARTING,
    address="w",
    sessions="w",
    transfer="",
    model="m",
    fingerprint=Fingerprint("m", "t", 1, 1, 8, 16, "float32"),
    blocks=100,
    max_tokens=100,
    version="0",
    pid=1,
    host="here",
)
JOB = DecodeJob(1, Request(RequestId("r"), "m", (1, 2, 3), Sampling(max_tokens=4)))


class Stand:
    """A role that leaves to the test what is said on its stream."""

    def __init__(self) -> None:
        self.taken: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()

    def accept(self, stream: Stream) -> None:
        self.taken.set_result(stream)

    def cancel(self, stream: Stream, reason: CancelReason) -> None: ...

    def proceed(self, stream: Stream) -> None: ...

    def renew(self, lease: LeaseId) -> None: ...

    def release(self, lease: LeaseId) -> None: ...

    def report(self, base: LoadReport) -> LoadReport:
        return replace(base, blocks_total=100)

    def busy(self) -> bool:
        return False

    def idle(self) -> bool:
        return True


def play(scenario: Callable[[Chassis, Stand, Session, list[KvEvents]], Awaitable[None]]) -> None:
    async def main() -> None:
        bus, heard = MemoryBusHub(), list[KvEvents]()
        hub, stand = MemoryHub(WireSettings()), Stand()
        chassis = Chassis("f", ChassisSettings(), MemoryRegistryHub().registry(), bus.bus())
        server = hub.serve(chassis, "w")
        running = asyncio.create_task(chassis.run(CARD, stand, 10.0))
        events = await bus.bus().subscribe(kv_subject("f"))

        async def listen() -> None:
            async for message in events:
                heard.append(decode_kv_events(message.data))

        listening = asyncio.create_task(listen())
        await asyncio.sleep(1)
        session = await hub.wire().open(server.address)
        await scenario(chassis, stand, session, heard)
        chassis.begin_drain(0)
        await running
        listening.cancel()
        await session.close()
        await server.close(0)

    virtual_time.run(main(), horizon_s=60)


def test_kv_events_of_a_moment_are_one_message_and_none_waits_after_silence() -> None:
    async def scenario(chassis: Chassis, stand: Stand, session: Session, heard: list[KvEvents]) -> None:
        chassis.publish((BlocksStored((1,)),))
        await asyncio.sleep(0.001)
        assert [message.sequence for message in heard] == [1]
        for name in (2, 3, 4):
            chassis.publish((BlocksStored((name,)),))
            await asyncio.sleep(0.001)
        assert len(heard) == 1
        await asyncio.sleep(0.01)
        assert heard[1].sequence == 2
        assert heard[1].events == tuple(BlocksStored((name,)) for name in (2, 3, 4))

    play(scenario)


def test_a_snapshot_holds_events_that_were_not_sent_yet() -> None:
    async def scenario(chassis: Chassis, stand: Stand, session: Session, heard: list[KvEvents]) -> None:
        for name in (1, 2):
            chassis.publish((BlocksStored((name,)),))
            await asyncio.sleep(0.001)
        snapshot = chassis.snapshot()
        assert snapshot.sequence == 2
        assert set(snapshot.hashes) == {1, 2}
        await asyncio.sleep(0.02)
        assert [message.sequence for message in heard] == [1, 2]

    play(scenario)


def test_the_word_that_it_has_started_goes_with_the_first_token_or_soon_alone() -> None:
    async def scenario(chassis: Chassis, stand: Stand, session: Session, heard: list[KvEvents]) -> None:
        session.send(JOB)
        stream = await stand.taken
        stream.started(Stage.PREFILL_STARTED)
        await asyncio.sleep(0.001)
        stream.token(7)
        frames: list[Frame] = [await anext(session)]
        assert [(len(frame.started), len(frame.tokens)) for frame in frames] == [(1, 1)]
        stream.started(Stage.PULL_STARTED)
        began = asyncio.get_running_loop().time()
        alone = await anext(session)
        assert (len(alone.started), len(alone.tokens)) == (1, 0)
        assert asyncio.get_running_loop().time() - began < 0.01

    play(scenario)
