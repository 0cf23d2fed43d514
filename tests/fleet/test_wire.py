"""One contract for every wire, then what only one of them can show: faults on demand, real processes."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
import pytest
import trustme

from fleet import virtual_time
from fleet.errors import (
    ERRORS,
    BadRequest,
    DeadlineExceeded,
    FleetError,
    Internal,
    NotFound,
    TooLarge,
    WorkerLost,
)
from fleet.events import KvDigest, KvSnapshot, LoadReport
from fleet.handoff import (
    Cancel,
    CancelReason,
    DecodeJob,
    Ended,
    Frame,
    PrefillJob,
    Release,
    Started,
    Token,
    ToWorker,
)
from fleet.ids import Incarnation, LeaseId, RequestId, WorkerId
from fleet.member import MemberState, Role
from fleet.request import FinishReason, Request, Sampling, TokenLogprobs, Usage
from fleet.tls import Tls
from fleet.wire import Session, Wire, WireServer, WorkerEnd, WorkerService
from fleet.wire.calls import CALLS
from fleet.wire.memory import Direction, MemoryHub, Spoilt
from fleet.wire.network import NetworkWire, serve
from fleet.wire.rpc import SERVICE
from fleet.wire.session import WireSettings, merge
from fleet.wire.v1 import worker_pb2

REQUEST = Request(RequestId("r"), "m", (1, 2, 3), Sampling(max_tokens=4))
REPORT = LoadReport(WorkerId("w"), Incarnation("i"), "ready", 1, 2, 3, 4, 5, KvDigest(6, 7, 8))
CANCEL = Cancel(1, CancelReason.CLIENT)


@dataclass
class Recorder:
    """A service that keeps what it hears, and does what the test says on each message."""

    on_message: Callable[[WorkerEnd, ToWorker], None] = lambda end, message: None
    on_drain: Callable[[], Awaitable[None]] | None = None
    ends: list[WorkerEnd] = field(default_factory=list)
    closes: list[WorkerEnd] = field(default_factory=list)
    messages: list[ToWorker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._heard = asyncio.Event()

    def opened(self, end: WorkerEnd) -> None:
        self.ends.append(end)
        self._heard.set()

    def received(self, end: WorkerEnd, message: ToWorker) -> None:
        self.messages.append(message)
        self._heard.set()
        self.on_message(end, message)

    def closed(self, end: WorkerEnd) -> None:
        self.closes.append(end)
        self._heard.set()

    def snapshot(self, part: int = 0) -> KvSnapshot:
        return KvSnapshot(WorkerId("w"), Incarnation("i"), 9, (1, 2**64 - 1), (3,), part=part, parts=8)

    def status(self) -> LoadReport:
        return REPORT

    async def drain(self, limit_s: float) -> MemberState:
        if self.on_drain:
            await self.on_drain()
        return MemberState.DRAINING

    async def until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._heard.clear()
            await self._heard.wait()


class Net(Protocol):
    async def serve(self, service: WorkerService) -> WireServer: ...

    def wire(self) -> Wire: ...


class MemoryNet:
    def __init__(self, settings: WireSettings) -> None:
        self.hub = MemoryHub(settings, to_worker_s=0.002, to_router_s=0.001)

    async def serve(self, service: WorkerService) -> WireServer:
        return self.hub.serve(service)

    def wire(self) -> Wire:
        return self.hub.wire()


class Network:
    def __init__(self, settings: WireSettings) -> None:
        self._settings = settings

    async def serve(self, service: WorkerService) -> WireServer:
        return await serve(service, settings=self._settings)

    def wire(self) -> Wire:
        return NetworkWire(self._settings)


Scenario = Callable[[Net], Coroutine[Any, Any, None]]
Play = Callable[..., None]


async def within(seconds: float, scenario: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(seconds):
        await scenario


@pytest.fixture(params=["memory", "network"])
def play(request: pytest.FixtureRequest) -> Play:
    """Plays a scenario on one wire: in virtual time, or over real sockets."""

    def on_memory(scenario: Scenario, settings: WireSettings | None = None) -> None:
        async def main() -> None:
            await scenario(MemoryNet(settings or WireSettings()))

        virtual_time.run(main(), horizon_s=3600)

    def on_network(scenario: Scenario, settings: WireSettings | None = None) -> None:
        async def main() -> None:
            await within(60, scenario(Network(settings or WireSettings())))

        asyncio.run(main())

    return on_memory if request.param == "memory" else on_network


@asynccontextmanager
async def talking(net: Net, service: Recorder) -> AsyncIterator[tuple[WireServer, Wire, Session]]:
    server = await net.serve(service)
    wire = net.wire()
    try:
        yield server, wire, await wire.open(server.sessions)
    finally:
        await wire.close()
        await server.close(5)
        assert len(service.closes) == len(service.ends)
        assert len(set(map(id, service.closes))) == len(service.closes)


async def frames_until_ended(session: Session, streams: int) -> list[Frame]:
    frames: list[Frame] = []
    async for frame in session:
        frames.append(frame)
        if sum(len(frame.ended) for frame in frames) == streams:
            break
    return frames


async def lost(session: Session) -> WorkerLost:
    with pytest.raises(WorkerLost) as caught:
        async for _ in session:
            pass
    return caught.value


# --- the contract ---


def test_every_stream_comes_whole_and_in_order(play: Play) -> None:
    dice = random.Random(5)
    lengths = {stream: dice.randrange(1, 120) for stream in range(1, 61)}

    async def steps(end: WorkerEnd) -> None:
        """What an engine says: one frame a step, sequences joining and leaving."""
        said = dict.fromkeys(lengths, 0)
        fresh = set(lengths)
        while said:
            now = [stream for stream in said if dice.random() < 0.5]
            tokens = tuple(Token(stream, said[stream]) for stream in now)
            for stream in now:
                said[stream] += 1
            done = [stream for stream in now if said[stream] == lengths[stream]]
            end.send(
                Frame(
                    started=tuple(Started(stream, "pull_ended") for stream in now if stream in fresh),
                    tokens=tokens,
                    ended=tuple(
                        Ended(stream, FinishReason.LENGTH, Usage(3, said.pop(stream))) for stream in done
                    ),
                )
            )
            fresh -= set(now)
            if dice.random() < 0.5:
                await asyncio.sleep(0)

    async def scenario(net: Net) -> None:
        tasks: list[asyncio.Task[None]] = []
        service = Recorder(lambda end, _: tasks.append(asyncio.create_task(steps(end))))
        async with talking(net, service) as (_, _, session):
            session.send(CANCEL)
            got: dict[int, list[object]] = {stream: [] for stream in lengths}
            for frame in await frames_until_ended(session, len(lengths)):
                for words in (frame.started, frame.tokens, frame.ended):
                    for word in words:
                        got[word.stream].append(word)
            await asyncio.gather(*tasks)
        for stream, length in lengths.items():
            assert got[stream] == [
                Started(stream, "pull_ended"),
                *(Token(stream, place) for place in range(length)),
                Ended(stream, FinishReason.LENGTH, Usage(3, length)),
            ]

    play(scenario)


def test_messages_to_a_worker_arrive_in_the_order_in_which_they_were_sent(play: Play) -> None:
    async def scenario(net: Net) -> None:
        service = Recorder()
        sent: list[ToWorker] = [
            PrefillJob(1, REQUEST),
            DecodeJob(2, REQUEST, (5,)),
            Cancel(1, CancelReason.STOP_STRING),
            Release(LeaseId("lease")),
            *(Cancel(stream, CancelReason.CLIENT) for stream in range(300)),
        ]
        async with talking(net, service) as (_, _, session):
            for message in sent:
                session.send(message)
            await service.until(lambda: len(service.messages) == len(sent))
        assert service.messages == sent

    play(scenario)


def test_what_was_sent_just_before_closing_still_arrives(play: Play) -> None:
    """A router that leaves has released and cancelled; those words must not be lost with it."""

    async def scenario(net: Net) -> None:
        service = Recorder()
        async with talking(net, service) as (_, _, session):
            for place in range(200):
                session.send(Release(LeaseId(str(place))))
            await session.close()
            await service.until(lambda: len(service.closes) == 1)
            assert service.messages == [Release(LeaseId(str(place))) for place in range(200)]
            with pytest.raises(WorkerLost, match="closed here"):
                session.send(CANCEL)
            await lost(session)
            await session.close()  # idempotent

    play(scenario)


def test_closing_one_session_leaves_the_others(play: Play) -> None:
    async def scenario(net: Net) -> None:
        service = Recorder(lambda end, message: end.send(Frame(tokens=(Token(1, 7),))))
        async with talking(net, service) as (server, wire, first):
            second = await wire.open(server.sessions)
            await service.until(lambda: len(service.ends) == 2)
            await first.close()
            await service.until(lambda: len(service.closes) == 1)
            service.ends[0].send(Frame(tokens=(Token(1, 1),)))  # to a closed session: nothing happens
            second.send(CANCEL)
            assert await anext(aiter(second)) == Frame(tokens=(Token(1, 7),))
            assert service.closes == service.ends[:1]

    play(scenario)


def test_a_worker_that_closes_says_what_it_has_to_say_first(play: Play) -> None:
    async def scenario(net: Net) -> None:
        service = Recorder()
        async with talking(net, service) as (server, wire, session):
            await service.until(lambda: bool(service.ends))
            for place in range(500):
                service.ends[0].send(Frame(tokens=(Token(1, place),)))
            _, tokens = await asyncio.gather(server.close(30), all_tokens(session))
            assert tokens == list(range(500))
            with pytest.raises(WorkerLost):
                session.send(CANCEL)
            with pytest.raises(WorkerLost):
                await wire.open(server.sessions)

    play(scenario)


async def all_tokens(session: Session) -> list[int]:
    """Until the worker is lost."""
    tokens: list[int] = []
    with suppress(WorkerLost):
        async for frame in session:
            tokens += [token.token for token in frame.tokens]
    return tokens


def test_nobody_at_an_address_is_known_at_once(play: Play) -> None:
    """Also when asked again and again: no call inherits the back-off of an earlier one."""

    async def scenario(net: Net) -> None:
        server = await net.serve(Recorder())
        await server.close(0)
        wire = net.wire()
        async with asyncio.timeout(30):  # far below the connect limit
            for _ in range(5):
                with pytest.raises(WorkerLost, match=server.sessions):
                    await wire.open(server.sessions)
                with pytest.raises(WorkerLost, match=server.address):
                    await wire.status(server.address, 1000)
        await wire.close()

    play(scenario, WireSettings(connect_s=1000))


def test_a_router_that_reads_too_slowly_is_let_go_once(play: Play) -> None:
    async def scenario(net: Net) -> None:
        service = Recorder()
        async with talking(net, service) as (_, _, session):
            await service.until(lambda: bool(service.ends))
            frame = Frame(tokens=tuple(Token(stream, 1 << 30) for stream in range(1000)))
            while not service.closes:
                service.ends[0].send(frame)
                await asyncio.sleep(0)
            service.ends[0].send(frame)
            error = await lost(session)
            assert "the peer is too slow" in error.message or "the worker ended" in error.message
            assert len(service.closes) == 1

    play(scenario, WireSettings(backlog=20_000))


def test_an_idle_session_stays(play: Play) -> None:
    """Far beyond the limit of silence: both ends keep it alive by heartbeats, which nobody sees."""
    settings = WireSettings(heartbeat_s=0.2)

    async def scenario(net: Net) -> None:
        def later(end: WorkerEnd, _: ToWorker) -> None:
            frame = Frame(tokens=(Token(1, 7),))
            asyncio.get_running_loop().call_later(3 * settings.silence_s, end.send, frame)

        service = Recorder(later)
        async with talking(net, service) as (_, _, session):
            session.send(CANCEL)
            assert await anext(aiter(session)) == Frame(tokens=(Token(1, 7),))
            assert service.messages == [CANCEL]

    play(scenario, settings)


def test_a_reader_that_takes_its_time_does_not_lose_the_worker(play: Play) -> None:
    """While the router itself is not reading, the worker is not silent."""
    settings = WireSettings(heartbeat_s=0.1)

    async def scenario(net: Net) -> None:
        service = Recorder()
        async with talking(net, service) as (_, _, session):
            await service.until(lambda: bool(service.ends))
            for place in range(400):  # more than are read ahead
                service.ends[0].send(Frame(tokens=(Token(1, place),)))
                await asyncio.sleep(0)
            pause = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(2 * settings.silence_s, pause.set_result, None)
            await pause
            service.ends[0].send(Frame(ended=(Ended(1, FinishReason.STOP),)))
            frames = await frames_until_ended(session, 1)
            assert [t.token for frame in frames for t in frame.tokens] == list(range(400))

    play(scenario, settings)


def test_a_bad_message_fails_its_stream_and_nothing_else(play: Play) -> None:
    async def scenario(net: Net) -> None:
        service = Recorder()
        async with talking(net, service) as (_, _, session):
            bad = Request(RequestId("r"), "m", (1,), Sampling(max_tokens=4), deadline_s=math.nan)
            session.send(PrefillJob(5, bad))
            session.send(CANCEL)
            ((ended,),) = [frame.ended for frame in [await anext(aiter(session))]]
            assert (ended.stream, ended.finish, ended.error) == (5, FinishReason.FAILED, "BadRequest")
            assert "Request.deadline_s: nan" in ended.message
            await service.until(lambda: service.messages == [CANCEL])

    play(scenario)


def test_a_message_that_cannot_be_said_is_refused_where_it_is_sent(play: Play) -> None:
    async def scenario(net: Net) -> None:
        service = Recorder()
        async with talking(net, service) as (_, _, session):
            with pytest.raises(BadRequest, match="Cancel"):
                session.send(Cancel(-1, CancelReason.CLIENT))
            huge = Request(RequestId("r"), "m", (1 << 30,) * 3000, Sampling(max_tokens=4))
            with pytest.raises(TooLarge, match="10000 are allowed"):
                session.send(PrefillJob(1, huge))
            session.send(CANCEL)
            await service.until(lambda: service.messages == [CANCEL])

    play(scenario, WireSettings(message_bytes=10_000))


def test_a_frame_that_cannot_be_said_ends_the_session_not_the_worker(play: Play) -> None:
    async def scenario(net: Net) -> None:
        service = Recorder()
        async with talking(net, service) as (server, wire, session):
            await service.until(lambda: bool(service.ends))
            service.ends[0].send(Frame(tokens=(Token(1, -1),)))
            await lost(session)
            await service.until(lambda: len(service.closes) == 1)
            assert await wire.status(server.address, 30) == REPORT

    play(scenario)


def test_calls_bring_the_workers_own_words(play: Play) -> None:
    async def scenario(net: Net) -> None:
        service = Recorder()
        async with talking(net, service) as (server, wire, _):
            assert await wire.snapshot(server.address, 30) == service.snapshot()
            assert await wire.snapshot(server.address, 30, 7) == service.snapshot(7)
            assert await wire.status(server.address, 30) == REPORT
            assert await wire.drain(server.address, 5.0, 30) is MemberState.DRAINING
            with pytest.raises(BadRequest, match="limit_s"):
                await wire.drain(server.address, math.inf, 30)

    play(scenario)


@pytest.mark.parametrize("name", list(ERRORS))
def test_every_error_of_a_call_keeps_its_kind(play: Play, name: str) -> None:
    async def scenario(net: Net) -> None:
        async def fail() -> None:
            raise ERRORS[name].error("für später")

        async with talking(net, Recorder(on_drain=fail)) as (server, wire, _):
            with pytest.raises(FleetError) as caught:
                await wire.drain(server.address, 1, 30)
            assert type(caught.value).__name__ == name
            assert caught.value.message == f"{server.address}: für später"

    play(scenario)


def test_a_long_error_of_a_call_keeps_its_kind(play: Play) -> None:
    async def scenario(net: Net) -> None:
        async def fail() -> None:
            raise BadRequest("ü" * 100_000)

        async with talking(net, Recorder(on_drain=fail)) as (server, wire, _):
            with pytest.raises(BadRequest, match="üüü"):
                await wire.drain(server.address, 1, 30)

    play(scenario)


def test_a_call_that_takes_too_long_is_given_up_on_both_sides(play: Play) -> None:
    async def scenario(net: Net) -> None:
        given_up = asyncio.Event()

        async def hang() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                given_up.set()

        async with talking(net, Recorder(on_drain=hang)) as (server, wire, _):
            with pytest.raises(DeadlineExceeded, match=server.address):
                await wire.drain(server.address, 1, 0.2)
            await given_up.wait()

    play(scenario)

    play(scenario)


def test_closing_the_wire_closes_its_sessions(play: Play) -> None:
    async def scenario(net: Net) -> None:
        service = Recorder()
        server = await net.serve(service)
        wire = net.wire()
        sessions = [await wire.open(server.sessions) for _ in range(4)]
        await service.until(lambda: len(service.ends) == 4)
        await wire.close()
        await service.until(lambda: len(service.closes) == 4)
        for session in sessions:
            await lost(session)
        await server.close(0)

    play(scenario)


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(ValueError, match=r"wire\.heartbeat_s must be above 0, not 0"):
        WireSettings(heartbeat_s=0)


@pytest.mark.parametrize(("apart_s", "most"), [(0.0, 20), (0.002, 6)])
def test_steps_that_follow_one_another_closely_travel_together(apart_s: float, most: int) -> None:
    async def main() -> None:
        service = Recorder()
        async with talking(MemoryNet(WireSettings(apart_s=apart_s)), service) as (_, __, session):
            await service.until(lambda: len(service.ends) == 1)
            for step in range(20):
                service.ends[0].send(Frame(tokens=(Token(1, step),)))
                await asyncio.sleep(0.0005)
            frames: list[Frame] = []
            while sum(len(frame.tokens) for frame in frames) < 20:
                frames.append(await anext(session))
            assert [token.token for frame in frames for token in frame.tokens] == list(range(20))
            assert most // 2 < len(frames) <= most

    virtual_time.run(main(), horizon_s=60)


def test_merged_frames_hold_every_word_once() -> None:
    frames = [Frame(tokens=(Token(n, n),), ended=(Ended(n, FinishReason.STOP),)) for n in range(3)]
    merged = merge(frames)
    assert merged.tokens == tuple(Token(n, n) for n in range(3))
    assert [ended.stream for ended in merged.ended] == [0, 1, 2]


# --- faults in memory, in virtual time ---

BEAT = WireSettings(heartbeat_s=2.0, connect_s=5.0)


def in_memory(scenario: Callable[[MemoryHub], Coroutine[Any, Any, Any]], **delays: float) -> Any:
    async def main() -> Any:
        return await scenario(MemoryHub(BEAT, **delays))

    return virtual_time.run(main(), horizon_s=3600)


def test_a_killed_worker_is_lost_at_once_and_its_address_is_free() -> None:
    async def scenario(hub: MemoryHub) -> None:
        service = Recorder()
        server = hub.serve(service, "w")
        wire = hub.wire()
        session = await wire.open(server.sessions)
        service.ends[0].send(Frame(tokens=(Token(1, 1),)))
        before = asyncio.get_running_loop().time()
        hub.kill("w")
        assert "broke" in (await lost(session)).message
        await service.until(lambda: len(service.closes) == 1)
        assert asyncio.get_running_loop().time() == before
        with pytest.raises(WorkerLost, match="nobody listens"):
            await wire.open("w")
        again = Recorder()
        hub.serve(again, "w")
        await wire.open("w")
        assert len(again.ends) == 1
        await wire.close()

    in_memory(scenario)


def test_a_plain_hub_hands_over_what_bytes_would_say_and_as_late() -> None:
    """What a simulation sees of a fleet does not depend on it."""

    async def exchange(plain: bool) -> list[tuple[float, ToWorker | Frame]]:
        hub = MemoryHub(BEAT, to_worker_s=0.002, to_router_s=0.001, plain=plain)
        clock, heard = asyncio.get_running_loop().time, list[tuple[float, ToWorker | Frame]]()

        def answer(end: WorkerEnd, message: ToWorker) -> None:
            heard.append((clock(), message))
            end.send(Frame(started=(Started(1, "prefill_started"),)))
            end.send(Frame(tokens=(Token(1, 7), Token(2, 8, TokenLogprobs(-0.5)))))
            end.send(Frame(ended=(Ended(1, FinishReason.STOP),)))

        service = Recorder(answer)
        hub.serve(service, "w")
        wire = hub.wire()
        session = await wire.open("w")
        for message in (PrefillJob(1, REQUEST), CANCEL):
            await asyncio.sleep(3 * BEAT.silence_s)  # with heartbeats both ways
            session.send(message)
            heard.append((clock(), frame := await anext(aiter(session))))
            while not frame.ended:
                heard.append((clock(), frame := await anext(aiter(session))))
        assert (service.messages[1] is CANCEL) is plain
        await wire.close()
        return heard

    plain, encoded = (virtual_time.run(exchange(plain), horizon_s=3600) for plain in (True, False))
    assert len(plain) >= 4
    assert plain == encoded


@pytest.mark.parametrize("fault", ["freeze", "partition"])
def test_a_worker_cut_off_in_silence_is_lost_in_bounded_time_on_both_ends(fault: str) -> None:
    async def scenario(hub: MemoryHub) -> None:
        service = Recorder()
        hub.serve(service, "w")
        wire = hub.wire("r")
        session = await wire.open("w")
        loop = asyncio.get_running_loop()
        before = loop.time()
        hub.freeze("w") if fault == "freeze" else hub.partition("r", "w")
        assert "nothing heard" in (await lost(session)).message
        assert BEAT.silence_s <= loop.time() - before <= BEAT.silence_s + BEAT.heartbeat_s
        await service.until(lambda: len(service.closes) == 1)
        assert loop.time() - before <= BEAT.silence_s + BEAT.heartbeat_s
        before = loop.time()
        with pytest.raises(WorkerLost, match=r"no answer within 5\.0 s"):
            await wire.open("w")
        with pytest.raises(DeadlineExceeded):
            await wire.status("w", 3.0)
        assert loop.time() - before == 8.0
        hub.unfreeze("w")
        hub.heal("r", "w")
        assert await wire.status("w", 1.0) == REPORT

    in_memory(scenario)


def test_a_short_freeze_loses_nothing() -> None:
    async def scenario(hub: MemoryHub) -> None:
        service = Recorder(lambda end, _: end.send(Frame(tokens=(Token(1, 7),))))
        hub.serve(service, "w")
        wire = hub.wire()
        session = await wire.open("w")
        hub.freeze("w")
        session.send(CANCEL)
        asyncio.get_running_loop().call_later(BEAT.silence_s / 2, hub.unfreeze, "w")
        assert await anext(session) == Frame(tokens=(Token(1, 7),))
        assert asyncio.get_running_loop().time() == BEAT.silence_s / 2
        await wire.close()

    in_memory(scenario)


def test_a_partition_is_between_two_only() -> None:
    async def scenario(hub: MemoryHub) -> None:
        hub.serve(Recorder(), "w")
        near, far = hub.wire("near"), hub.wire("far")
        hub.partition("far", "w")
        assert await near.status("w", 1.0) == REPORT
        with pytest.raises(DeadlineExceeded):
            await far.status("w", 1.0)

    in_memory(scenario)


def test_delays_are_those_of_each_direction() -> None:
    async def scenario(hub: MemoryHub) -> None:
        loop = asyncio.get_running_loop()
        heard: list[float] = []

        def answer(end: WorkerEnd, _: ToWorker) -> None:
            heard.append(loop.time())
            end.send(Frame(tokens=(Token(1, 1),)))

        hub.serve(Recorder(answer), "w")
        wire = hub.wire()
        session = await wire.open("w")
        start = loop.time()
        assert start == pytest.approx(0.75)
        session.send(CANCEL)
        await anext(session)
        assert heard == [pytest.approx(start + 0.5)]
        assert loop.time() == pytest.approx(start + 0.75)
        await wire.close()

    in_memory(scenario, to_worker_s=0.5, to_router_s=0.25)


def test_the_same_scenario_takes_the_same_steps() -> None:
    async def scenario(hub: MemoryHub) -> list[object]:
        loop = asyncio.get_running_loop()
        trace: list[object] = []

        def answer(end: WorkerEnd, message: ToWorker) -> None:
            assert isinstance(message, Cancel)
            for place in range(message.stream % 5):
                frame = Frame(tokens=(Token(message.stream, place),))
                loop.call_later(place * 0.01 * message.stream, end.send, frame)

        async def follow(session: Session, name: str) -> None:
            with suppress(WorkerLost):
                async for frame in session:
                    trace.append((loop.time(), name, frame))
            trace.append((loop.time(), name, "lost"))

        for name in "abc":
            hub.serve(Recorder(answer), name)
        wire = hub.wire()
        sessions = {name: await wire.open(name) for name in "abc"}
        readers = [asyncio.create_task(follow(session, name)) for name, session in sessions.items()]
        for stream in range(40):
            sessions["abc"[stream % 3]].send(Cancel(stream, CancelReason.CLIENT))
        loop.call_later(0.3, hub.kill, "a")
        loop.call_later(0.4, hub.freeze, "b")
        loop.call_later(20.0, hub.kill, "c")
        await asyncio.gather(*readers)
        return trace

    first = in_memory(scenario, to_worker_s=0.001, to_router_s=0.002)
    assert first == in_memory(scenario, to_worker_s=0.001, to_router_s=0.002)
    assert len(first) > 30


# --- real processes and sockets ---

END = struct.pack("<IB", 0, 1)
GREETING = b"pdfleet.v1.Session"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""How an HTTP/2 connection begins: with it a gRPC server takes it for a caller's."""


def said(data: bytes) -> bytes:
    """As it is on the connection."""
    return struct.pack("<IB", len(data), 0) + data


async def raw(address: str, *data: bytes) -> bytes:
    """Sends this, and returns the name of the error that the worker ended with; empty: none."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    heard = b""
    with suppress(ConnectionError):
        writer.write(b"".join(data))
        while more := await reader.read(1 << 16):
            heard += more
    writer.close()
    last = b""
    while len(heard) >= 5:
        length, kind = struct.unpack_from("<IB", heard)
        last = heard[5 : 5 + length] if kind else last
        heard = heard[5 + length :]
    return last.partition(b"\n")[0]


PEER = Path(__file__).with_name("wire_peer.py")


@asynccontextmanager
async def peer(*arguments: object) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process of `wire_peer.py` and its first line."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PEER), *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def live(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(within(60, scenario))


@pytest.mark.live
def test_a_worker_killed_for_real_is_lost_after_its_last_token() -> None:
    async def scenario() -> None:
        wire = NetworkWire(WireSettings(heartbeat_s=20))  # far beyond this test: the broken connection tells
        async with peer("worker", 20) as (process, line):
            sessions, address = line.split()
            session = await wire.open(sessions)
            await anext(session)
            process.kill()
            await lost(session)
            with pytest.raises(WorkerLost):
                session.send(CANCEL)
            with pytest.raises(WorkerLost):
                await wire.open(sessions)
            with pytest.raises(WorkerLost):
                await wire.status(address, 30)
        await wire.close()

    live(scenario())


@pytest.mark.live
def test_a_worker_stopped_for_real_is_lost_by_its_silence() -> None:
    settings = WireSettings(heartbeat_s=0.5, connect_s=2.0)

    async def scenario() -> None:
        wire = NetworkWire(settings)
        async with peer("worker", 0.5) as (process, line):
            sessions, address = line.split()
            session = await wire.open(sessions)
            await anext(session)
            process.send_signal(signal.SIGSTOP)
            await lost(session)
            with pytest.raises(WorkerLost):
                session.send(CANCEL)
            with pytest.raises(WorkerLost):
                await wire.open(sessions)
            with pytest.raises(DeadlineExceeded):
                await wire.status(address, 0.3)
            process.send_signal(signal.SIGCONT)
            assert (await wire.status(address, 30)).worker == "ticker"
            again = await wire.open(sessions)
            await anext(again)
        await wire.close()

    live(scenario())


@pytest.mark.live
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_router_killed_or_stopped_for_real_is_closed_once(how: signal.Signals) -> None:
    async def scenario() -> None:
        service = Recorder()
        server = await serve(service, settings=WireSettings(heartbeat_s=0.5))
        async with peer("router", 0.5, server.sessions) as (process, _):
            await service.until(lambda: service.messages == [CANCEL])
            process.send_signal(how)
            await service.until(lambda: service.closes == service.ends)
            assert len(service.closes) == 1
        await server.close(0)

    live(scenario())


@pytest.mark.live
def test_a_router_that_stood_still_itself_does_not_blame_the_worker() -> None:
    async def scenario() -> None:
        wire = NetworkWire(WireSettings(heartbeat_s=0.5))
        async with peer("worker", 2.0) as (_, line):
            session = await wire.open(line.split()[0])
            for _ in range(3):
                await anext(session)
            time.sleep(2.0)  # noqa: ASYNC251 - a loop that is stuck is the case
            for _ in range(300):
                await anext(session)
        await wire.close()

    live(scenario())


@pytest.mark.live
def test_rubbish_from_anybody_leaves_both_ports_alive() -> None:
    dice = random.Random(7)

    async def scenario() -> None:
        service = Recorder()
        settings = WireSettings(message_bytes=1 << 20, connect_s=0.5, call_idle_s=0.5)
        server = await serve(service, settings=settings)
        sessions = server.sessions
        for data in [b"\xff", b"\x80\x04\x95cos\nsystem\n", *(dice.randbytes(64) for _ in range(20))]:
            assert await raw(sessions, said(GREETING), said(data), END) in (b"", b"BadRequest")
        assert await raw(sessions, said(GREETING), said(bytes(2 << 20))) in (b"", b"TooLarge")
        assert await raw(sessions, said(bytes(65))) == b""
        assert await raw(sessions, said(b"Drain"), said(b"")) == b"BadRequest"
        for data in [b"", b"\x05\0", END, b"GET / HTTP/1.1\r\n\r\n", dice.randbytes(1000)]:
            assert await raw(sessions, data) == b""
            await raw(server.address, data)
            await raw(server.address, HTTP2 + data)
        assert service.messages == []
        code = grpc.StatusCode
        async with grpc.aio.insecure_channel(server.address) as channel:
            for path, data, status in [
                ("Drain", b"\xff\xff\xff", code.INVALID_ARGUMENT),
                ("Drain", bytes(1 << 17), code.RESOURCE_EXHAUSTED),
                ("Nothing", b"", code.UNIMPLEMENTED),
                ("Session", b"", code.UNIMPLEMENTED),
            ]:
                call: Any = channel.unary_unary(f"/{SERVICE}/{path}")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(data)
                assert caught.value.code() is status
        wire = NetworkWire(settings)
        assert await wire.status(server.address, 30) == REPORT
        session = await wire.open(sessions)
        session.send(CANCEL)
        await service.until(lambda: CANCEL in service.messages)
        await wire.close()
        await server.close(5)
        assert len(service.closes) == len(service.ends)

    live(scenario())


@pytest.mark.live
@pytest.mark.parametrize("tls", [False, True])
def test_who_connects_and_asks_nothing_is_let_go_at_both_ports(tls: bool) -> None:
    """A connection without a greeting, without a handshake, or without a call is closed from here."""
    settings = WireSettings(call_idle_s=0.5, connect_s=0.5)
    authority = trustme.CA()
    part = authority.issue_cert("127.0.0.1")
    chain = b"".join(blob.bytes() for blob in part.cert_chain_pems)
    mine = Tls(authority.cert_pem.bytes(), chain, part.private_key_pem.bytes()) if tls else None

    async def scenario() -> None:
        server = await serve(Recorder(), settings=settings, tls=mine)
        for address in (server.sessions, server.address):
            for said_first in (b"", b"\0") if tls else (b"", b"\x12\0", HTTP2[:10]):
                await raw(address, said_first)
        if not tls:
            await raw(server.address, HTTP2)
        await server.close(0)

    live(scenario())


@pytest.mark.live
def test_a_call_that_never_comes_to_its_end_is_let_go() -> None:
    """Its caller is alive, answers pings and never sends the argument."""

    async def scenario() -> None:
        server = await serve(Recorder(), settings=WireSettings(heartbeat_s=0.2, call_idle_s=0.3))
        async with grpc.aio.insecure_channel(server.address) as channel:
            call: Any = channel.stream_unary(f"/{SERVICE}/Drain")()
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await server.close(0)

    live(scenario())


@pytest.mark.live
@pytest.mark.parametrize(("closer", "worker_s", "caller_s"), [("worker", 0.5, 1000), ("caller", 1000, 1)])
def test_calls_share_a_connection_and_the_first_who_tires_of_it_closes_it(
    closer: str, worker_s: float, caller_s: float
) -> None:
    async def scenario() -> None:
        server = await serve(Recorder(), settings=WireSettings(call_idle_s=worker_s))
        host, _, port = server.address.rpartition(":")
        seen, closed = [], asyncio.Event()

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                writer.write(data)
            writer.close()

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(writer)
            there, back = await asyncio.open_connection(host, int(port))
            await asyncio.gather(carry(reader, back), carry(there, writer))
            closed.set()

        middle = await asyncio.start_server(between, "127.0.0.1", 0)
        address = f"127.0.0.1:{middle.sockets[0].getsockname()[1]}"
        wire = NetworkWire(WireSettings(call_idle_s=caller_s))
        for _ in range(5):
            assert await wire.status(address, 30) == REPORT
        assert len(seen) == 1
        with pytest.raises(BadRequest):
            await wire.drain(address, math.nan, 30)
        assert await wire.status(address, 30) == REPORT
        await closed.wait()
        closed.clear()
        assert await wire.status(address, 30) == REPORT
        await closed.wait()
        await wire.close()
        middle.close()
        await middle.wait_closed()
        await server.close(0)

    live(scenario())


@pytest.mark.live
def test_a_caller_that_is_stopped_during_its_call_is_let_go() -> None:
    async def scenario() -> None:
        begun, given_up = asyncio.Event(), asyncio.Event()

        async def hang() -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                given_up.set()

        server = await serve(Recorder(on_drain=hang), settings=WireSettings(heartbeat_s=0.5))
        async with peer("operator", 0.5, server.address) as (process, _):
            await begun.wait()
            process.send_signal(signal.SIGSTOP)
            await given_up.wait()
        await server.close(0)

    live(scenario())


@pytest.mark.live
def test_a_worker_that_speaks_rubbish_is_lost() -> None:
    async def scenario() -> None:
        async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(5 + len(GREETING))
            writer.write(said(b"") + said(b"\xff"))
            await reader.read()
            writer.close()

        async def answer(_: bytes, context: Any) -> bytes:
            return b"\xff"

        async def strange(_: bytes, context: Any) -> bytes:
            return await context.abort(grpc.StatusCode.NOT_FOUND, "x", (("pdfleet-error", "Strange"),))

        async def long(_: bytes, context: Any) -> bytes:
            return bytes(2 << 20)

        sessions = await asyncio.start_server(attend, "127.0.0.1", 0)
        calls = grpc.aio.server()
        rows: dict[str, Any] = {"Status": answer, "Snapshot": strange, "TakeRole": long}
        rows = {name: grpc.unary_unary_rpc_method_handler(row) for name, row in rows.items()}
        calls.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, rows),))
        address = f"127.0.0.1:{calls.add_insecure_port('127.0.0.1:0')}"
        await calls.start()
        wire = NetworkWire(WireSettings(message_bytes=1 << 20))
        session = await wire.open(f"127.0.0.1:{sessions.sockets[0].getsockname()[1]}")
        assert "cannot be read" in (await lost(session)).message
        with pytest.raises(Internal, match="cannot be read"):
            await wire.status(address, 30)
        with pytest.raises(Internal, match="x"):
            await wire.snapshot(address, 30)
        with pytest.raises(TooLarge):
            await wire.take_role(address, Role.DECODE, 1, 30)
        with pytest.raises(NotFound):
            await wire.drain(address, 1, 30)
        await wire.close()
        sessions.close()
        await sessions.wait_closed()
        await calls.stop(0)

    live(scenario())


@pytest.mark.live
def test_a_taken_port_is_an_error_and_loopback_is_the_default() -> None:
    async def scenario() -> None:
        first = await serve(Recorder(), advertise="worker.example")
        ports = []
        for address in (first.address, first.sessions):
            host, _, port = address.rpartition(":")
            assert host == "worker.example"
            with socket.create_connection(("127.0.0.1", int(port))):
                pass
            ports.append(int(port))
        with pytest.raises(OSError, match=str(ports[0])):
            await serve(Recorder(), port=ports[0])
        with pytest.raises(OSError, match=str(ports[1])):
            await serve(Recorder(), session_port=ports[1])
        await first.close(0)

    live(scenario())


def own_ends(port: int) -> list[socket.socket]:
    """This process's sockets at a port, or connected to it."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # not a socket, or gone since it was listed
            end = socket.socket(fileno=os.dup(int(name)))
            ports = [end.getsockname()[1]] if end.family == socket.AF_INET else []
            with suppress(OSError):  # what listens has no peer
                ports += [end.getpeername()[1]] if ports else []
            if port in ports:
                found.append(end)
            else:
                end.close()
    return found


def test_no_frame_waits_until_the_one_before_is_acknowledged() -> None:
    async def scenario() -> None:
        server, wire = await serve(Recorder()), NetworkWire()
        await wire.open(server.sessions)
        ends = own_ends(int(server.sessions.rpartition(":")[2]))
        assert len(ends) == 3  # what listens, who was taken in, who called
        for end in ends:
            with end:
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await wire.close()
        await server.close(0)

    live(scenario())


def test_the_calls_are_those_of_the_service_in_proto() -> None:
    methods = worker_pb2.DESCRIPTOR.services_by_name["Worker"].methods_by_name
    assert set(CALLS) == set(methods)


@pytest.mark.parametrize(
    ("direction", "hears"), [(Direction.TO_WORKER, "worker"), (Direction.TO_ROUTER, "router")]
)
def test_a_partition_of_one_direction_is_found_by_the_end_that_hears_nothing(
    direction: Direction, hears: str
) -> None:
    async def scenario(hub: MemoryHub) -> None:
        service = Recorder()
        hub.serve(service, "w")
        wire = hub.wire("r")
        session = await wire.open("w")
        hub.partition("r", "w", direction)
        service.ends[0].send(Frame(tokens=(Token(1, 1),)))
        if direction is Direction.TO_ROUTER:
            assert "nothing heard" in (await lost(session)).message
        else:
            assert (await anext(session)).tokens
            await service.until(lambda: len(service.closes) == 1)
        hub.heal("r", "w")
        await lost(session)
        await service.until(lambda: len(service.closes) == 1)
        await wire.close()

    in_memory(scenario)


@pytest.mark.parametrize("spoilt", list(Spoilt))
def test_a_spoilt_call_fails_once_and_in_time(spoilt: Spoilt) -> None:
    async def scenario(hub: MemoryHub) -> None:
        hub.serve(Recorder(), "w")
        wire = hub.wire("r")
        hub.spoil("w", spoilt)
        with pytest.raises(WorkerLost if spoilt is Spoilt.BROKEN else DeadlineExceeded):
            await wire.status("w", 3.0)
        await wire.status("w", 3.0)

    in_memory(scenario)


def test_a_stopped_process_keeps_its_connections_and_answers_when_it_goes_on() -> None:
    async def scenario(hub: MemoryHub) -> None:
        service, process = Recorder(), virtual_time.Process("worker", offset_s=-40.0)

        async def serve_there() -> None:
            hub.serve(service, "w")

        await process.start(serve_there())
        wire = hub.wire("r")
        session = await wire.open("w")
        process.stop()
        session.send(Release(LeaseId("a")))
        asked = asyncio.create_task(wire.status("w", 100.0))
        with pytest.raises(DeadlineExceeded):
            await wire.status("w", 2.0)
        assert not service.messages
        process.resume()
        await asked
        assert service.messages == [Release(LeaseId("a"))]
        # A delay on one end's clock and the look on the other's would show as 40 s.
        hub.slow("r", "w", 0.5)
        before = asyncio.get_running_loop().time()
        await wire.status("w", 3.0)
        assert asyncio.get_running_loop().time() - before == pytest.approx(1.0)
        hub.cut("r", "w")
        await lost(session)

    in_memory(scenario)
