"""The wire over loopback, worker and router in two processes: tokens/s of one session over TCP by streams a
frame, bytes a frame, the way there and back, a call over gRPC, and the codec alone."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.report import emit
from fleet.events import KvDigest, KvSnapshot, LoadReport
from fleet.handoff import Cancel, CancelReason, Frame, PrefillJob, Token, ToWorker
from fleet.ids import Incarnation, RequestId, WorkerId
from fleet.member import MemberState
from fleet.request import Request, Sampling, TokenLogprobs
from fleet.wire import WorkerEnd, codec, session
from fleet.wire.network import NetworkWire, serve

SIZES = (1, 8, 64, 256)
SETTINGS = session.WireSettings(backlog=1 << 30)


def frame_of(streams: int) -> Frame:
    """As from a vocabulary of 50,000 and a router that has sent thousands of requests."""
    return Frame(tokens=tuple(Token(5000 + place, (place * 7919) % 50_000) for place in range(streams)))


@dataclass
class Flood:
    """Answers `Cancel(n)` with n frames as fast as the session takes them."""

    frame: Frame

    def opened(self, end: WorkerEnd) -> None:
        self.tasks: list[asyncio.Task[None]] = []

    def received(self, end: WorkerEnd, message: ToWorker) -> None:
        assert isinstance(message, Cancel)
        if message.stream == 1:
            end.send(self.frame)
        else:
            self.tasks.append(asyncio.create_task(self.flood(end, message.stream)))

    async def flood(self, end: WorkerEnd, frames: int) -> None:
        for sent in range(frames):
            end.send(self.frame)
            if sent % 16 == 0:
                await asyncio.sleep(0)

    def closed(self, end: WorkerEnd) -> None:
        pass

    def snapshot(self, part: int = 0) -> KvSnapshot:
        return KvSnapshot(WorkerId("w"), Incarnation("i"), 0, ())

    def status(self) -> LoadReport:
        return LoadReport(WorkerId("w"), Incarnation("i"), "ready", 0, 0, 0, 0, 0, KvDigest(0, 0, 0))

    async def drain(self, limit_s: float) -> MemberState:
        return MemberState.DRAINING


async def worker(streams: int, merge: bool) -> None:
    settings = SETTINGS
    if not merge:
        session._MERGE_ITEMS = 0
        settings = replace(SETTINGS, apart_s=0.0)
    server = await serve(Flood(frame_of(streams)), settings=settings)
    print(server.sessions, server.address, flush=True)
    await asyncio.Event().wait()


@asynccontextmanager
async def worker_process(streams: int, merge: bool) -> AsyncIterator[tuple[str, str]]:
    """Its addresses: of sessions, of calls."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.micro.wire", "--worker", str(streams)),
        *(["--merge"] if merge else []),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        sessions, calls = (await process.stdout.readline()).decode().split()
        yield sessions, calls
    finally:
        process.kill()
        await process.wait()


async def measure(streams: int, merge: bool, frames: int, runs: int) -> None:
    async with worker_process(streams, merge) as (sessions, _):
        wire = NetworkWire(SETTINGS)
        link = await wire.open(sessions)
        rates = []
        for _ in range(runs):
            start, came = time.perf_counter(), 0
            link.send(Cancel(frames, CancelReason.CLIENT))
            while came < frames * streams:
                came += len((await anext(link)).tokens)
            rates.append(came / (time.perf_counter() - start))
        size = len(codec.encode_frame(frame_of(streams)))
        emit("wire.session", "tokens/s", rates, streams=streams, merged=merge, frame_bytes=size)
        if not merge:
            trips = []
            for _ in range(runs * 100):
                start = time.perf_counter()
                link.send(Cancel(1, CancelReason.CLIENT))
                await anext(link)
                trips.append((time.perf_counter() - start) * 1e6)
            emit("wire.round_trip", "µs", trips, streams=streams)
        await wire.close()


async def measure_calls(calls: int) -> None:
    async with worker_process(1, False) as (_, address):
        wire = NetworkWire(SETTINGS)
        trips = []
        for _ in range(calls):
            start = time.perf_counter()
            await wire.status(address, 60)
            trips.append((time.perf_counter() - start) * 1e6)
        emit("wire.call", "µs", trips, call="status")
        await wire.close()


def cost(case: str, run: Callable[[], Any], repeats: int, **settings: object) -> None:
    """Microseconds a call, in batches long enough for the clock."""
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(50):
            run()
        samples.append((time.perf_counter() - start) / 50 * 1e6)
    emit(case, "µs", samples, **settings)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--merge", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        asyncio.run(worker(options.worker, options.merge))
        return 0
    repeats = 5 if options.quick else 100
    for streams in SIZES:
        frame = frame_of(streams)
        data = codec.encode_frame(frame)
        cost("wire.encode_frame", lambda f=frame: codec.encode_frame(f), repeats, streams=streams)
        cost("wire.decode_frame", lambda d=data: codec.decode_frame(d), repeats, streams=streams)
    top = TokenLogprobs(-0.5, tuple((token, -1.0) for token in range(5)))
    rich = Frame(tokens=tuple(Token(place, place, top) for place in range(64)))
    data = codec.encode_frame(rich)
    cost("wire.encode_frame", lambda: codec.encode_frame(rich), repeats, streams=64, top_logprobs=5)
    cost("wire.decode_frame", lambda: codec.decode_frame(data), repeats, streams=64, top_logprobs=5)
    job = PrefillJob(1, Request(RequestId("r" * 24), "m", tuple(range(2000)), Sampling(max_tokens=100)))
    job_data = codec.encode_to_worker(job)
    cost("wire.encode_job", lambda: codec.encode_to_worker(job), repeats, prompt=2000)
    cost("wire.decode_job", lambda: codec.decode_to_worker(job_data), repeats, prompt=2000)
    for streams in SIZES:
        for merge in (False, True):
            frames, runs = (200, 2) if options.quick else (4000, 8)
            asyncio.run(measure(streams, merge, frames, runs))
    asyncio.run(measure_calls(20 if options.quick else 500))
    return 0


if __name__ == "__main__":
    sys.exit(main())
