"""A worker without an engine: real chassis, card, registry and wire; its load is what a file says.

Files in `--folder`: `ID.load` holds a number of running requests, `ID.busy` keeps its drain from ending.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from fleet.bus.memory import MemoryHub
from fleet.chassis import Chassis, ChassisSettings, Stream
from fleet.errors import Overloaded
from fleet.events import LoadReport
from fleet.handoff import CancelReason
from fleet.ids import LeaseId, WorkerId, new_incarnation
from fleet.kv_layout import Fingerprint
from fleet.member import MemberState, Role, WorkerCard
from fleet.registry.etcd_registry import EtcdRegistry
from fleet.settings import ControlSettings, load_or_exit
from fleet.wire.network import serve

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StandInSettings:
    """What the supervisor gives a worker, and what the test adds."""

    worker_id: str
    model: str
    served_model_name: str
    folder: Path
    role: str
    other_role: str = ""
    behave: str = ""
    """crash: ends before it is ready; hang: never ready; deaf: SIGTERM changes nothing."""
    control: ControlSettings = field(default_factory=ControlSettings)


class StandIn:
    def __init__(self, settings: StandInSettings) -> None:
        self._load = settings.folder / f"{settings.worker_id}.load"
        self._busy = settings.folder / f"{settings.worker_id}.busy"

    def accept(self, stream: Stream) -> None:
        raise Overloaded("a stand-in serves nobody")

    def cancel(self, stream: Stream, reason: CancelReason) -> None: ...

    def proceed(self, stream: Stream, generated: tuple[int, ...]) -> None: ...

    def release(self, lease: LeaseId) -> None: ...

    def renew(self, lease: LeaseId) -> None: ...

    def report(self, base: LoadReport) -> LoadReport:
        running = int(self._load.read_text()) if self._load.exists() else 0
        return replace(base, running=running, blocks_total=100, blocks_free=100 - running)

    def busy(self) -> bool:
        return self._busy.exists()

    def idle(self) -> bool:
        return not self.busy()


async def serve_until_drained(settings: StandInSettings) -> None:
    registry = EtcdRegistry(settings.control.etcd)
    chassis = Chassis(settings.control.fleet, ChassisSettings(), registry, MemoryHub().bus())
    server = await serve(chassis, settings.control.bind)
    card = WorkerCard(
        id=WorkerId(settings.worker_id),
        incarnation=new_incarnation(),
        role=Role(settings.role),
        state=MemberState.STARTING,
        address=server.address,
        sessions=server.sessions,
        transfer="",
        model=settings.served_model_name,
        fingerprint=Fingerprint("m", "t", 1, 1, 8, 16, "float32"),
        blocks=100,
        max_tokens=100,
        version="0",
        pid=os.getpid(),
        host="here",
    )
    if settings.behave != "deaf":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: chassis.begin_drain(60.0))
    log.info("serves")
    turns = {role: lambda: None for role in Role}
    await chassis.run(card, StandIn(settings), settings.control.lease_ttl_s, turns)
    await server.close(1.0)
    await registry.close()
    log.info("left")


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    given = load_or_exit(StandInSettings)
    if given.behave == "crash":
        sys.exit("the weights are torn")
    if given.behave in ("hang", "deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while given.behave == "hang":
        time.sleep(60)
    asyncio.run(serve_until_drained(given))
