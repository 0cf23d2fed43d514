"""The wire in memory, on any clock: the same sessions and calls, with delays and with faults on demand.

One hub is a network. Workers serve at addresses, routers have names; what is sent arrives in order, after
a delay. A fault holds messages back (`freeze`, `partition`) or breaks connections (`kill`); how it is
noticed is the business of `session.py`, as over gRPC. Nothing is random.
"""

from __future__ import annotations

import asyncio
from collections import deque

from fleet.errors import DeadlineExceeded, FleetError, Unavailable, WorkerLost, error_named
from fleet.wire import WorkerService
from fleet.wire.calls import CALLS, Caller
from fleet.wire.session import RouterSession, WireSettings, WorkerSessions

_WINDOW = 256
"""Messages under way in one direction; a writer waits for more room, as on a socket."""


class _Way:
    """One direction between a router and a worker."""

    def __init__(self, hub: MemoryHub, router: str, address: str, delay_s: float) -> None:
        self._hub = hub
        self.route = (router, address)
        self._delay_s = delay_s
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[float, bytes | None]] = deque()
        self._cut = ""
        self.moved = asyncio.Event()
        """Set when something was put, taken, cut or let through."""

    async def put(self, data: bytes) -> None:
        while len(self._items) >= _WINDOW and not self._cut:
            self.moved.clear()
            await self.moved.wait()
        if self._cut:
            raise Unavailable(self._cut)
        self._items.append((self._loop.time() + self._delay_s, data))
        self.moved.set()

    def cut(self, why: str) -> None:
        """The last item; the reader finds it after all that was put before."""
        if not self._cut:
            self._cut = why
            self._items.append((self._loop.time() + self._delay_s, None))
            self.moved.set()

    async def get(self) -> bytes:
        while True:
            if not self._items or self._hub.holds(*self.route):
                self.moved.clear()
                await self.moved.wait()
            elif (wait_s := self._items[0][0] - self._loop.time()) > 0:
                await asyncio.sleep(wait_s)
            elif (item := self._items[0][1]) is None:
                raise Unavailable(self._cut)  # the item stays: whoever reads again is told again
            else:
                self._items.popleft()
                self.moved.set()
                return item


class _Pipe:
    """One end of a connection: `waits_for_peer` at the end that hangs up second."""

    def __init__(self, out: _Way, back: _Way, waits_for_peer: bool) -> None:
        self.read = back.get
        self.write = out.put
        self._out = out
        self._waits_for_peer = waits_for_peer

    async def finish(self) -> bool:
        if self._waits_for_peer:
            self._out.cut("the router closed the session")
        return self._waits_for_peer


class _Connection:
    """Two ways between a router and a worker, cut together."""

    def __init__(self, hub: MemoryHub, router: str, address: str) -> None:
        self.address = address
        self.to_worker = _Way(hub, router, address, hub.to_worker_s)
        self.to_router = _Way(hub, router, address, hub.to_router_s)

    def cut(self, why: str) -> None:
        self.to_worker.cut(why)
        self.to_router.cut(why)

    async def carry(self, way: _Way, data: bytes | None) -> bytes:
        """Sends one message and waits for it at the other end, or only waits; `WorkerLost` when cut."""
        try:
            if data is not None:
                await way.put(data)
            return await way.get()
        except Unavailable as error:
            raise WorkerLost(f"{self.address}: {error.message}") from None


class _Host:
    def __init__(self, service: WorkerService, sessions: WorkerSessions) -> None:
        self.service = service
        self.sessions = sessions
        self.tasks: dict[asyncio.Task[None], None] = {}


class MemoryHub:
    """`to_worker_s` and `to_router_s` are the delays of each direction, in seconds."""

    def __init__(
        self, settings: WireSettings | None = None, *, to_worker_s: float = 0.0, to_router_s: float = 0.0
    ) -> None:
        self.settings = settings or WireSettings()
        self.to_worker_s = to_worker_s
        self.to_router_s = to_router_s
        self._hosts: dict[str, _Host] = {}
        self._connections: dict[_Connection, None] = {}
        self._frozen: set[str] = set()
        self._parted: set[tuple[str, str]] = set()

    def serve(self, service: WorkerService, address: str = "") -> MemoryServer:
        """ValueError when the address is taken; a free one is chosen for ""."""
        if not address:
            address = next(name for n in range(1, 1 << 30) if (name := f"worker:{n}") not in self._hosts)
        if address in self._hosts:
            raise ValueError(f"{address} is taken")
        self._hosts[address] = _Host(service, WorkerSessions(service, self.settings))
        return MemoryServer(self, address)

    def wire(self, router: str = "router") -> MemoryWire:
        return MemoryWire(self, router)

    # --- faults ---

    def kill(self, address: str) -> None:
        """The process is gone: its connections break, nobody listens. Its service hears `closed`."""
        self._hosts.pop(address, None)
        self._frozen.discard(address)
        for connection in self._connections:
            if connection.address == address:
                connection.cut("the connection broke")
        self._let_through()

    def freeze(self, address: str) -> None:
        """Nothing leaves or enters the worker until `unfreeze`; connections stand, as under SIGSTOP."""
        self._frozen.add(address)

    def unfreeze(self, address: str) -> None:
        self._frozen.discard(address)
        self._let_through()

    def partition(self, router: str, address: str) -> None:
        """Nothing passes between these two until `heal`; neither is told."""
        self._parted.add((router, address))

    def heal(self, router: str, address: str) -> None:
        self._parted.discard((router, address))
        self._let_through()

    def holds(self, router: str, address: str) -> bool:
        return address in self._frozen or (router, address) in self._parted

    def _let_through(self) -> None:
        for connection in self._connections:
            connection.to_worker.moved.set()
            connection.to_router.moved.set()

    # --- for the two ends ---

    def connect(self, router: str, address: str) -> _Connection:
        connection = _Connection(self, router, address)
        self._connections[connection] = None
        return connection

    def disconnect(self, connection: _Connection, why: str) -> None:
        connection.cut(why)
        self._connections.pop(connection, None)

    async def arrive(self, connection: _Connection) -> _Host:
        """Waits for a message's way to the worker; `WorkerLost` when nobody listens there."""
        await connection.carry(connection.to_worker, b"")
        host = self._hosts.get(connection.address)
        if host is None:
            raise WorkerLost(f"{connection.address}: nobody listens there")
        return host

    def attend(self, host: _Host, connection: _Connection) -> None:
        async def session() -> None:
            try:
                await connection.to_router.put(b"")  # tells the router that the session is taken
                await host.sessions.attend(_Pipe(connection.to_router, connection.to_worker, False))
            finally:
                self._connections.pop(connection, None)
                connection.cut("the worker ended the session")

        task = asyncio.get_running_loop().create_task(session())
        host.tasks[task] = None
        task.add_done_callback(host.tasks.pop)

    async def shut(self, address: str, grace_s: float) -> None:
        host = self._hosts.pop(address, None)
        if host is None or not host.tasks:
            return
        host.sessions.finish()
        _, late = await asyncio.wait(list(host.tasks), timeout=grace_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


class MemoryServer:
    """`fleet.wire.WireServer`."""

    def __init__(self, hub: MemoryHub, address: str) -> None:
        self._hub = hub
        self._address = address

    @property
    def address(self) -> str:
        return self._address

    async def close(self, grace_s: float) -> None:
        await self._hub.shut(self._address, grace_s)


class MemoryWire(Caller):
    """`fleet.wire.Wire` of one router."""

    def __init__(self, hub: MemoryHub, router: str) -> None:
        self._hub = hub
        self._router = router
        self._sessions: dict[RouterSession, None] = {}

    async def open(self, address: str) -> RouterSession:
        settings = self._hub.settings
        connection = self._hub.connect(self._router, address)
        try:
            async with asyncio.timeout(settings.connect_s):
                host = await self._hub.arrive(connection)
                self._hub.attend(host, connection)
                await connection.carry(connection.to_router, None)
        except TimeoutError:
            self._hub.disconnect(connection, "the router gave up")
            raise WorkerLost(f"{address}: no answer within {settings.connect_s} s") from None
        except BaseException:
            self._hub.disconnect(connection, "the router gave up")
            raise

        async def hang_up() -> None:
            self._sessions.pop(session, None)
            connection.cut("the router is gone")

        pipe = _Pipe(connection.to_worker, connection.to_router, True)
        session = RouterSession(address, pipe, settings, hang_up)
        self._sessions[session] = None
        return session

    async def call(self, address: str, name: str, data: bytes, timeout_s: float) -> bytes:
        connection = self._hub.connect(self._router, address)
        try:
            async with asyncio.timeout(timeout_s):
                host = await self._hub.arrive(connection)
                try:
                    reply = await CALLS[name](host.service, data)
                except FleetError as error:
                    raise error_named(type(error).__name__, f"{address}: {error.message}") from None
                return await connection.carry(connection.to_router, reply)
        except TimeoutError:
            raise DeadlineExceeded(f"{address}: {name} took more than {timeout_s} s") from None
        finally:
            self._hub.disconnect(connection, "the call is over")

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in list(self._sessions)))
