"""Transfers inside one process, on any clock: a model of links with bandwidth, latency and failures.

For the fleet in virtual time and for tests. Bytes are really copied; only the time they take is modelled.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from fleet.errors import TransferFailed
from fleet.ids import LeaseId
from kv_transfer.plan import Chunk
from kv_transfer.region import Region
from kv_transfer.settings import TransferSettings
from kv_transfer.transport import Peer, Reading, Source, settle, settled, verify


@dataclass
class _Port:
    """One worker's place on the network; `egress_free` and `ingress_free` are when its link is idle again."""

    source: Source
    egress_free: float = 0.0
    ingress_free: float = 0.0
    alive: bool = True
    thawed: asyncio.Event = field(default_factory=asyncio.Event)
    delay_s: float = 0.0
    drops: int = 0
    corrupts: int = 0
    connections: list[LoopbackConnection] = field(default_factory=list)


class LoopbackHub:
    """The network between the transfers of one process.

    A worker sends at most `bytes_s` and receives at most `bytes_s`, requests in turn: pulls that share a
    link share its bandwidth. `block_bytes` is what a block weighs on the link when the real one is only a
    stand-in. The methods are knobs for tests; `address` is `Transfer.address`.
    """

    def __init__(
        self, *, bytes_s: float = 10e9, latency_s: float = 100e-6, block_bytes: int | None = None
    ) -> None:
        self.bytes_s = bytes_s
        self.latency_s = latency_s
        self.block_bytes = block_bytes
        self._ports: dict[str, _Port] = {}

    def attach(self, address: str, source: Source) -> None:
        port = self._ports[address] = _Port(source)
        port.thawed.set()

    def detach(self, address: str) -> None:
        port = self._ports.pop(address, None)
        if port is not None:
            self._break(port)

    def port(self, address: str) -> _Port:
        port = self._ports.get(address)
        if port is None or not port.alive:
            raise TransferFailed(f"no source at {address}")
        return port

    def _break(self, port: _Port) -> None:
        port.alive = False
        port.thawed.set()
        for connection in list(port.connections):
            connection.shut()

    def die(self, address: str) -> None:
        """As if the process were killed: every path to it breaks."""
        self._break(self._ports[address])

    def freeze(self, address: str) -> None:
        """As if stopped or cut off: nothing is answered and nothing breaks, until `thaw`."""
        self._ports[address].thawed.clear()

    def thaw(self, address: str) -> None:
        self._ports[address].thawed.set()

    def delay(self, address: str, seconds: float) -> None:
        """Extra latency of everything asked of it."""
        self._ports[address].delay_s = seconds

    def drop(self, address: str, reads: int = 1) -> None:
        """The next reads are never answered."""
        self._ports[address].drops += reads

    def corrupt(self, address: str, reads: int = 1) -> None:
        """One byte of the next reads arrives flipped."""
        self._ports[address].corrupts += reads


class LoopbackTransport:
    name = "loopback"

    def __init__(
        self, hub: LoopbackHub, address: str, source: Source, region: Region, settings: TransferSettings
    ) -> None:
        self._hub = hub
        self._region = region
        self._settings = settings
        self.address = address
        hub.attach(address, source)

    def reaches(self, address: str) -> bool:
        return address.startswith("loopback:")

    async def connect(self, address: str, peer: Peer) -> LoopbackConnection:
        port = self._hub.port(address)
        await asyncio.sleep(self._hub.latency_s + port.delay_s)
        await port.thawed.wait()
        port = self._hub.port(address)
        port.source.welcome(peer)
        connection = LoopbackConnection(
            self._hub, port, self._hub.port(self.address), self._region, self._settings
        )
        port.connections.append(connection)
        return connection

    async def close(self) -> None:
        self._hub.detach(self.address)


class LoopbackConnection:
    def __init__(
        self, hub: LoopbackHub, port: _Port, own: _Port, region: Region, settings: TransferSettings
    ) -> None:
        self._hub = hub
        self._port = port
        self._own = own
        self._region = region
        self._settings = settings
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def closed(self) -> bool:
        return self._broken.done()

    def shut(self) -> None:
        if not self._broken.done():
            self._broken.set_result(None)
            self._port.connections.remove(self)

    async def _or_broken(self, seconds: float, *, thawed: bool = True) -> None:
        """Let `seconds` pass, then wait for a frozen source; TransferFailed when the path breaks first."""
        if seconds:
            await asyncio.wait({self._broken}, timeout=seconds)
        if thawed and not self._port.thawed.is_set():
            thaw = asyncio.ensure_future(self._port.thawed.wait())
            waits: set[asyncio.Future[Any]] = {self._broken, thaw}
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                thaw.cancel()
        if self._broken.done():
            raise TransferFailed("the source is gone")

    async def read(self, lease: LeaseId, chunk: Chunk) -> None:
        await settled(self._exchange(lease, chunk), fence_s=self._settings.fence_s, abort=self.shut)

    async def _exchange(self, lease: LeaseId, chunk: Chunk) -> None:
        loop = asyncio.get_running_loop()
        port, hub = self._port, self._hub
        await self._or_broken(hub.latency_s + port.delay_s)
        if port.drops:
            port.drops -= 1
            await self._broken
            raise TransferFailed("the source is gone")
        overdue: asyncio.Future[None] = loop.create_future()
        reading: Reading = await port.source.begin_read(lease, chunk.positions, lambda: settle(overdue))
        try:
            size = len(chunk.positions) * (hub.block_bytes or self._region.block_bytes)
            ends = max(loop.time(), port.egress_free, self._own.ingress_free) + size / hub.bytes_s
            port.egress_free = self._own.ingress_free = ends
            await asyncio.wait(
                {self._broken, overdue},
                timeout=ends - loop.time(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not overdue.done():
                await self._or_broken(0)
                self._copy(reading, chunk)
        finally:
            port.source.end_read(reading)
        await self._or_broken(hub.latency_s + port.delay_s, thawed=False)
        if reading.checksums:
            verify(self._region, chunk, reading.checksums)

    def _copy(self, reading: Reading, chunk: Chunk) -> None:
        remote = self._port.source.region.array
        for block, own in zip(reading.blocks, chunk.destinations, strict=True):
            self._region.array[own] = remote[block]
        if self._port.corrupts:
            self._port.corrupts -= 1
            self._region.array[chunk.destinations[0], -1] ^= 0x40

    async def renew(self, lease: LeaseId) -> float:
        await self._or_broken(self._hub.latency_s + self._port.delay_s)
        return self._port.source.renew(lease)

    def leave(self, lease: LeaseId) -> None:
        if not self.closed and self._port.thawed.is_set():
            asyncio.get_running_loop().call_later(self._hub.latency_s, self._port.source.leave, lease)

    async def close(self) -> None:
        self.shut()
