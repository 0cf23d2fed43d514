"""Transfers inside one process, on any clock: a model of links with bandwidth, latency and failures.

For the fleet in virtual time and for tests. Bytes are really copied; only the time they take is modelled.
Where processes share a loop (`virtual_time.Process`), what a source does is done in its own process: one
that is stopped answers nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar, TypeVarTuple, Unpack

from fleet.errors import LeaseExpired, TransferFailed
from fleet.ids import LeaseId
from fleet.virtual_time import first_of, outside, true_time
from kv_transfer.plan import Chunk
from kv_transfer.region import Region
from kv_transfer.settings import TransferSettings
from kv_transfer.transport import Peer, Reading, Source, settle, settled, verify

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Damage(Enum):
    """How bytes of a read come to be wrong, though it seems to go well."""

    FLIPPED = "flipped"
    """One bit of the last block."""
    TORN = "torn"
    """The second half of the last block never came."""
    STALE = "stale"
    """The last block is what lay there before."""
    SWAPPED = "swapped"
    """The bytes are those of another block of the source."""


@dataclass(slots=True)
class _Link:
    """A host's way to the others; when each direction is idle again."""

    egress_free: float = 0.0
    ingress_free: float = 0.0


@dataclass
class _Port:
    """One worker's place on the network."""

    address: str
    source: Source
    context: Context
    """Of the process that serves."""
    link: _Link = field(default_factory=_Link)
    alive: bool = True
    thawed: asyncio.Event = field(default_factory=asyncio.Event)
    delay_s: float = 0.0
    drops: int = 0
    damages: deque[Damage] = field(default_factory=deque)
    connections: list[LoopbackConnection] = field(default_factory=list)


class LoopbackHub:
    """The network between the transfers of one process.

    A link sends at most `bytes_s` and receives at most `bytes_s`, requests in turn: pulls that share a
    link share its bandwidth. `host_of` names the host of an address, whose workers share one link and are
    apart by `local_bytes_s` each; without it each worker has one of its own. `block_bytes` is what a block
    weighs on the link when the real one is only a stand-in. The methods are knobs for tests; `address` is
    `Transfer.address`.
    """

    def __init__(
        self,
        *,
        bytes_s: float = 10e9,
        latency_s: float = 100e-6,
        block_bytes: int | None = None,
        host_of: Callable[[str], str] | None = None,
        local_bytes_s: float = math.inf,
    ) -> None:
        self.bytes_s = bytes_s
        self.latency_s = latency_s
        self.block_bytes = block_bytes
        self.local_bytes_s = local_bytes_s
        self._host_of = host_of
        self._links: dict[str, _Link] = {}
        self.tap: Callable[[str, str, str], None] = lambda reader, source, what: None
        """Told of everything asked of a source before it is sent, such as connect, read, borrow."""
        self.damaged = 0
        """Reads so far whose bytes were made to differ."""
        self._ports: dict[str, _Port] = {}
        self._parted: dict[tuple[str, str], asyncio.Event] = {}

    def attach(self, address: str, source: Source) -> None:
        link = _Link() if self._host_of is None else self._links.setdefault(self._host_of(address), _Link())
        port = self._ports[address] = _Port(address, source, copy_context(), link)
        port.thawed.set()

    def detach(self, address: str) -> None:
        """The source stops serving, of its own will: reads of its blocks have ended when this returns."""
        port = self._ports.pop(address, None)
        if port is not None:
            served = [served for connection in port.connections for served in connection.served]
            self._break(port)
            for read in served:
                read.end()

    def port(self, address: str) -> _Port:
        port = self._ports.get(address)
        if port is None or not port.alive:
            raise TransferFailed(f"no source at {address}")
        return port

    def _break(self, port: _Port) -> None:
        port.alive = False
        port.thawed.set()
        for other in (port, *self._ports.values()):
            for connection in list(other.connections):
                if port in connection.ends:
                    connection.shut()

    def die(self, address: str) -> None:
        """As if the process were killed: every path to it breaks."""
        self._break(self._ports[address])

    def freeze(self, address: str) -> None:
        """As if stopped or cut off: nothing is answered and nothing breaks, until `thaw`."""
        self._ports[address].thawed.clear()

    def thaw(self, address: str) -> None:
        self._ports[address].thawed.set()

    def part(self, reader: str, source: str) -> None:
        """Nothing passes between these two, nor breaks, until `heal`. Others reach both."""
        self._parted.setdefault((reader, source), asyncio.Event())

    def heal(self, reader: str, source: str) -> None:
        if (healed := self._parted.pop((reader, source), None)) is not None:
            healed.set()

    def cut(self, address: str) -> None:
        """Every open path to it breaks, once."""
        for connection in list(self._ports[address].connections):
            connection.shut()

    def way(self, reader: str, source: _Port) -> asyncio.Event | None:
        """What a message between these two waits for now; None: nothing."""
        parted = self._parted.get((reader, source.address))
        return parted or (None if source.thawed.is_set() else source.thawed)

    def delay(self, address: str, seconds: float) -> None:
        """Extra latency of everything asked of it."""
        self._ports[address].delay_s = seconds

    def drop(self, address: str, reads: int = 1) -> None:
        """The next reads are never answered."""
        self._ports[address].drops += reads

    def corrupt(self, address: str, reads: int = 1, how: Damage = Damage.FLIPPED) -> None:
        """The next reads arrive damaged."""
        self._ports[address].damages.extend([how] * reads)


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
        self._hub.tap(self.address, address, "connect")
        port = self._hub.port(address)
        try:
            async with asyncio.timeout(self._settings.connect_s):
                await asyncio.sleep(self._hub.latency_s + port.delay_s)
                while (way := self._hub.way(self.address, port)) is not None:
                    await way.wait()
                port = self._hub.port(address)
                await _answer(_asked(port, port.source.welcome, peer))
        except TimeoutError:
            raise TransferFailed(f"{address}: no answer within {self._settings.connect_s} s") from None
        port = self._hub.port(address)
        connection = LoopbackConnection(
            self._hub, port, self._hub.port(self.address), self._region, self._settings
        )
        port.connections.append(connection)
        return connection

    async def close(self) -> None:
        self._hub.detach(self.address)


class _Served:
    """One read at its source, which ends once: by the reader, by a broken path or by the lease's end."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.reading: Reading
        self._ended = False
        self._refused: LeaseExpired | None = None

    def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            self._source.end_read(self.reading)
        except LeaseExpired as error:
            self._refused = error

    def confirm(self) -> None:
        """LeaseExpired when the lease did not stand until the last byte."""
        self.end()
        if self._refused is not None:
            raise self._refused


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
        self.served: dict[_Served, None] = {}
        """Reads under way."""

    @property
    def ends(self) -> tuple[_Port, _Port]:
        return self._port, self._own

    @property
    def closed(self) -> bool:
        return self._broken.done()

    def shut(self) -> None:
        if not self._broken.done():
            self._broken.set_result(None)
            self._port.connections.remove(self)
            for served in self.served:
                self._at(served.end)

    async def _or_broken(self, seconds: float) -> None:
        """Lets `seconds` pass, then waits for an open way; TransferFailed when the path breaks first."""
        if seconds:
            await first_of(self._broken, seconds=seconds)
        while not self._broken.done() and (way := self._hub.way(self._own.address, self._port)) is not None:
            opened = asyncio.ensure_future(way.wait())
            try:
                await first_of(self._broken, opened)
            finally:
                opened.cancel()
        if self._broken.done():
            raise TransferFailed("the source is gone")

    async def _at_source(self, work: Coroutine[Any, Any, T]) -> T:
        """Done by the source's process; TransferFailed when the path breaks before it has answered."""
        task = asyncio.get_running_loop().create_task(work, context=self._port.context.copy())
        return await _answer(task, self._broken)

    async def _asked(self, function: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
        """The same of what takes no time there."""
        return await _answer(_asked(self._port, function, *args), self._broken)

    async def read(self, lease: LeaseId, chunk: Chunk) -> None:
        self._hub.tap(self._own.address, self._port.address, "read")
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
        served = _Served(port.source)
        await self._at_source(self._begin(served, lease, chunk, overdue))
        try:
            size = len(chunk.positions) * (hub.block_bytes or self._region.block_bytes)
            now = true_time()
            if port.link is self._own.link:
                ends = now + size / hub.local_bytes_s
            else:
                ends = max(now, port.link.egress_free, self._own.link.ingress_free) + size / hub.bytes_s
                port.link.egress_free = self._own.link.ingress_free = ends
            await first_of(self._broken, overdue, seconds=ends - now)
            if not overdue.done():
                await self._or_broken(0)
            if not overdue.done():
                self._copy(served.reading, chunk)
            await self._asked(served.confirm)
        except BaseException:
            # Whatever became of this end, the source lets go of the blocks by itself.
            self._at(served.end)
            raise
        finally:
            self.served.pop(served, None)
        await self._or_broken(hub.latency_s + port.delay_s)
        if served.reading.checksums:
            verify(self._region, chunk, served.reading.checksums)

    async def _begin(
        self, served: _Served, lease: LeaseId, chunk: Chunk, overdue: asyncio.Future[None]
    ) -> None:
        """At the source. The end of the lease ends the read there, whatever its reader does."""
        source, loop = self._port.source, asyncio.get_running_loop()

        def abort() -> None:
            settle(overdue)
            loop.call_soon(served.end)

        served.reading = await source.begin_read(lease, chunk.positions, abort)
        if self._broken.done():
            served.end()
        else:
            self.served[served] = None

    def _copy(self, reading: Reading, chunk: Chunk) -> None:
        remote, own = self._port.source.region.array, self._region.array
        damage = self._port.damages.popleft() if self._port.damages else None
        before = own[chunk.destinations[-1]].copy()
        own[list(chunk.destinations)] = remote[list(reading.blocks)]
        if damage is None:
            return
        last = own[chunk.destinations[-1]]
        match damage:
            case Damage.FLIPPED:
                last[-1] ^= 0x40
            case Damage.TORN:
                last[len(last) // 2 :] = before[len(last) // 2 :]
            case Damage.STALE:
                last[:] = before
            case Damage.SWAPPED:
                last[:] = remote[reading.blocks[-1] - 1]
        self._hub.damaged += bool((last != remote[reading.blocks[-1]]).any())

    async def ready(self, lease: LeaseId, have: int, wait_s: float) -> tuple[int, bool]:
        self._hub.tap(self._own.address, self._port.address, "ready")
        await self._or_broken(self._hub.latency_s + self._port.delay_s)
        answer = await self._at_source(self._port.source.ready(lease, have, wait_s))
        await self._or_broken(self._hub.latency_s + self._port.delay_s)
        return answer

    async def borrow(self, names: Sequence[bytes], have: int, limit_s: float) -> tuple[LeaseId, int]:
        self._hub.tap(self._own.address, self._port.address, "borrow")
        await self._or_broken(self._hub.latency_s + self._port.delay_s)
        lent: list[LeaseId] = []
        wanted = True

        async def lend() -> tuple[LeaseId, int]:
            lease, blocks = await self._port.source.borrow(names, have, limit_s)
            if blocks:
                lent.append(lease)
                if not wanted:
                    self.leave(lease)
            return lease, blocks

        try:
            answer = await self._at_source(lend())
            await self._or_broken(self._hub.latency_s + self._port.delay_s)
        except BaseException:
            # Like over a socket: what comes for one who has given up is given back.
            wanted = False
            for lease in lent:
                self.leave(lease)
            raise
        return answer

    async def renew(self, lease: LeaseId) -> float:
        self._hub.tap(self._own.address, self._port.address, "renew")
        await self._or_broken(self._hub.latency_s + self._port.delay_s)
        return await self._asked(self._port.source.renew, lease)

    def leave(self, lease: LeaseId) -> None:
        self._hub.tap(self._own.address, self._port.address, "leave")
        if not self.closed and self._hub.way(self._own.address, self._port) is None:
            loop = asyncio.get_running_loop()
            outside(loop.call_later, self._hub.latency_s, self._at, self._port.source.leave, lease)

    def _at(self, function: Callable[..., object], *args: object) -> None:
        """Done by the source's process, soon."""
        self._port.context.copy().run(asyncio.get_running_loop().call_soon, function, *args)

    async def close(self) -> None:
        self.shut()


def _asked(port: _Port, function: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
    """What it returns or raises, done soon by the port's process."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            answer.set_result(function(*args))
        except Exception as error:  # noqa: BLE001 — whoever asked is told
            answer.set_exception(error)

    loop.call_soon(work, context=port.context.copy())
    return answer


async def _answer(answer: asyncio.Future[T], *broken: asyncio.Future[None]) -> T:
    """Who is cancelled, or whose path breaks, does not wait for it: the process may stand still for ever."""
    answer.add_done_callback(_ignored)
    await first_of(answer, *broken)
    if not answer.done():
        raise TransferFailed("the source is gone")
    return answer.result()


def _ignored(answer: asyncio.Future[Any]) -> None:
    """Whoever waits is told what it raised; nobody may."""
    if not answer.cancelled():
        answer.exception()
