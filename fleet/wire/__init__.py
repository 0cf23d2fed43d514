"""The wire: one token session a (router, worker) pair, and a table of calls; a network or memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from fleet.events import KvSnapshot, LoadReport
from fleet.handoff import Frame, ToWorker
from fleet.member import MemberState, Role


class WorkerEnd(Protocol):
    """A worker's side of one open session. `send` never blocks and never raises: a session whose
    peer is gone or too slow is closed, and the service hears of it by `closed`."""

    def send(self, frame: Frame) -> None: ...


class WorkerService(Protocol):
    """What a worker answers to; written by each role, served by any wire. All called on the loop."""

    def opened(self, end: WorkerEnd) -> None: ...

    def received(self, end: WorkerEnd, message: ToWorker) -> None:
        """Never raises: a bad message is answered by `Ended(FAILED)` on its stream."""
        ...

    def closed(self, end: WorkerEnd) -> None:
        """The router is gone: every stream of this session is to be cancelled."""
        ...

    def snapshot(self, part: int) -> KvSnapshot:
        """`BadRequest` when there are not so many parts."""
        ...

    def status(self) -> LoadReport: ...

    async def drain(self, limit_s: float) -> MemberState:
        """Returns at once with DRAINING; the chassis ends the process when the drain is done."""
        ...

    async def take_role(self, role: Role, limit_s: float) -> MemberState:
        """Returns at once: READY when the worker has the role, DRAINING when it will have it after what runs
        has ended, or after `limit_s` seconds. Raises `Unavailable` when it is leaving, `BadRequest` when it
        can never have that role."""
        ...


class Session(Protocol):
    """A router's side of one open session."""

    def send(self, message: ToWorker) -> None:
        """Never blocks. Raises `WorkerLost` when the session is known to be broken."""
        ...

    def __aiter__(self) -> AsyncIterator[Frame]:
        """Ends by raising `WorkerLost`; never silently. A peer that answers nothing, not even
        keep-alives, for the configured time is lost."""
        ...

    async def close(self) -> None: ...


class Wire(Protocol):
    """How a router or an operator reaches workers, by the addresses on their card: `open` takes that of
    their sessions, the calls that of their control server."""

    async def open(self, address: str) -> Session:
        """Returns when the worker has taken the session; `WorkerLost` when it does not, at once when nobody
        listens."""
        ...

    async def snapshot(self, address: str, timeout_s: float, part: int = 0) -> KvSnapshot: ...

    async def status(self, address: str, timeout_s: float) -> LoadReport: ...

    async def drain(self, address: str, limit_s: float, timeout_s: float) -> MemberState: ...

    async def take_role(self, address: str, role: Role, limit_s: float, timeout_s: float) -> MemberState: ...

    async def close(self) -> None: ...


class WireServer(Protocol):
    """A worker's listening side."""

    @property
    def address(self) -> str:
        """Where it answers calls."""
        ...

    @property
    def sessions(self) -> str:
        """Where it takes sessions."""
        ...

    async def close(self, grace_s: float) -> None:
        """Sessions end when their frames are written, or after `grace_s` seconds."""
        ...
