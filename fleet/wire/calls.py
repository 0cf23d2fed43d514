"""The table of calls a worker answers, bytes to bytes, and the caller's half that any wire shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fleet.errors import BadRequest, Internal
from fleet.events import KvSnapshot, LoadReport
from fleet.member import MemberState, Role
from fleet.wire import WorkerService, codec
from fleet.wire.codec import Malformed

T = TypeVar("T")


async def _snapshot(service: WorkerService, data: bytes) -> bytes:
    try:
        part = codec.decode_snapshot_request(data)
    except Malformed as error:
        raise BadRequest(str(error)) from None
    return codec.encode_kv_snapshot(service.snapshot(part))


async def _status(service: WorkerService, data: bytes) -> bytes:
    return codec.encode_load_report(service.status())


async def _drain(service: WorkerService, data: bytes) -> bytes:
    try:
        limit_s = codec.decode_drain_request(data)
    except Malformed as error:
        raise BadRequest(str(error)) from None
    return codec.encode_drain_reply(await service.drain(limit_s))


async def _take_role(service: WorkerService, data: bytes) -> bytes:
    try:
        role, limit_s = codec.decode_take_role_request(data)
    except Malformed as error:
        raise BadRequest(str(error)) from None
    return codec.encode_take_role_reply(await service.take_role(role, limit_s))


CALLS: dict[str, Callable[[WorkerService, bytes], Awaitable[bytes]]] = {
    "Snapshot": _snapshot,
    "Status": _status,
    "Drain": _drain,
    "TakeRole": _take_role,
}


class Caller(ABC):
    """The calls of `fleet.wire.Wire`, over a way to carry bytes."""

    @abstractmethod
    async def call(self, address: str, name: str, data: bytes, timeout_s: float) -> bytes:
        """Raises `WorkerLost` when nobody answers there, `DeadlineExceeded` after `timeout_s` seconds,
        and what the worker raised."""

    async def snapshot(self, address: str, timeout_s: float, part: int = 0) -> KvSnapshot:
        data = await self.call(address, "Snapshot", codec.encode_snapshot_request(part), timeout_s)
        return _understood(address, codec.decode_kv_snapshot, data)

    async def status(self, address: str, timeout_s: float) -> LoadReport:
        data = await self.call(address, "Status", b"", timeout_s)
        return _understood(address, codec.decode_load_report, data)

    async def drain(self, address: str, limit_s: float, timeout_s: float) -> MemberState:
        data = await self.call(address, "Drain", codec.encode_drain_request(limit_s), timeout_s)
        return _understood(address, codec.decode_drain_reply, data)

    async def take_role(self, address: str, role: Role, limit_s: float, timeout_s: float) -> MemberState:
        asked = codec.encode_take_role_request(role, limit_s)
        data = await self.call(address, "TakeRole", asked, timeout_s)
        return _understood(address, codec.decode_take_role_reply, data)


def _understood(address: str, decode: Callable[[bytes], T], data: bytes) -> T:
    try:
        return decode(data)
    except Malformed as error:
        raise Internal(f"{address} answered what cannot be read: {error}") from None
