"""A process to be killed or stopped: `worker`, `router ADDRESS` or `operator ADDRESS`.

Prints its addresses, of sessions and of calls, or `open` when its session stands, and then lives until it is
killed.
"""

from __future__ import annotations

import asyncio
import sys

from fleet.events import KvDigest, KvSnapshot, LoadReport
from fleet.handoff import Cancel, CancelReason, Frame, Token, ToWorker
from fleet.ids import Incarnation, WorkerId
from fleet.member import MemberState
from fleet.wire import WorkerEnd
from fleet.wire.network import NetworkWire, serve
from fleet.wire.session import WireSettings


class Ticker:
    """Sends a token every hundredth of a second on each session."""

    def __init__(self) -> None:
        self.ends: dict[WorkerEnd, int] = {}

    def opened(self, end: WorkerEnd) -> None:
        self.ends[end] = 0

    def received(self, end: WorkerEnd, message: ToWorker) -> None:
        pass

    def closed(self, end: WorkerEnd) -> None:
        del self.ends[end]

    def snapshot(self, part: int = 0) -> KvSnapshot:
        return KvSnapshot(WorkerId("ticker"), Incarnation("a"), 0, ())

    def status(self) -> LoadReport:
        return LoadReport(WorkerId("ticker"), Incarnation("a"), "ready", 0, 0, 0, 0, 0, KvDigest(0, 0, 0))

    async def drain(self, limit_s: float) -> MemberState:
        return MemberState.DRAINING

    async def run(self) -> None:
        while True:
            for end, count in self.ends.items():
                end.send(Frame(tokens=(Token(1, count),)))
                self.ends[end] = count + 1
            await asyncio.sleep(0.01)


async def worker(settings: WireSettings) -> None:
    ticker = Ticker()
    server = await serve(ticker, settings=settings)
    print(server.sessions, server.address, flush=True)
    await ticker.run()


async def router(settings: WireSettings, address: str) -> None:
    session = await NetworkWire(settings).open(address)
    session.send(Cancel(1, CancelReason.CLIENT))
    print("open", flush=True)
    async for _ in session:
        pass


async def operator(settings: WireSettings, address: str) -> None:
    print("asks", flush=True)
    await NetworkWire(settings).drain(address, 1, 1000)


if __name__ == "__main__":
    role, heartbeat_s, *rest = sys.argv[1:]
    chosen = WireSettings(heartbeat_s=float(heartbeat_s))
    if role == "worker":
        asyncio.run(worker(chosen))
    else:
        asyncio.run((router if role == "router" else operator)(chosen, rest[0]))
