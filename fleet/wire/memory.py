"""The wire in memory, on any clock: the same sessions and calls, with delays and with faults on demand.

One hub is a network. Workers serve at addresses, routers have names; what is sent arrives in order, after
a delay. A fault holds messages back (`freeze`, `partition`, `slow`), breaks connections (`kill`, `cut`) or
spoils a call; how it is noticed is the business of `session.py`, as over TCP. Nothing is random.

Messages are bytes, as over TCP; a hub that is `plain` hands the words over as they are, which takes a tenth
of a simulation's time away.

Where processes share a loop (`virtual_time.Process`), a worker's part of a session or call runs in the
process that serves it: what is sent to a stopped one waits in its sockets, and delays are on no one's clock.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from enum import Enum
from typing import Any, TypeVar

from fleet.errors import DeadlineExceeded, FleetError, Unavailable, WorkerLost, error_named
from fleet.virtual_time import outside, true_sleep_until, true_time
from fleet.wire import WorkerService
from fleet.wire.calls import CALLS, Caller
from fleet.wire.session import ENCODED, Code, RouterSession, WireSettings, WorkerSessions, wake

T = TypeVar("T")

_PLAIN = Code(*[lambda word: word] * 4)
_WINDOW = 256
"""Messages under way in one direction; a writer waits for more room, as on a socket."""


class Direction(Enum):
    TO_WORKER = "to worker"
    TO_ROUTER = "to router"


_TO_WORKER = Direction.TO_WORKER
"""Asked for with each message, and an enum takes its time to find a member."""


class Spoilt(Enum):
    """What becomes of a call."""

    BROKEN = "broken"
    """Done at the worker; the connection breaks before the answer."""
    SILENT = "silent"
    """Never answered."""


class _Way:
    """One direction between a router and a worker."""

    def __init__(self, hub: MemoryHub, router: str, address: str, direction: Direction) -> None:
        self._loop = asyncio.get_running_loop()
        self._hub = hub
        self.route = (router, address, direction)
        self._last_due = 0.0
        self._items: deque[tuple[float, Any]] = deque()
        self._cut = ""
        self._reader: asyncio.Future[None] | None = None
        """Set while somebody waits for the next item, or for it to come through."""
        self._room = asyncio.Event()

    def _due(self) -> float:
        """On the true clock; a shorter delay overtakes nothing."""
        self._last_due = max(self._last_due, true_time() + self._hub.delay_s(*self.route))
        return self._last_due

    async def put(self, data: Any) -> None:
        self._hub.tap(*self.route, len(data) if isinstance(data, bytes) else 0)
        while len(self._items) >= _WINDOW and not self._cut:
            self._room.clear()
            await self._room.wait()
        if self._cut:
            raise Unavailable(self._cut)
        self._add(data)

    def cut(self, why: str) -> None:
        """The last item; the reader finds it after all that was put before."""
        if not self._cut:
            self._cut = why
            self._room.set()
            self._add(None)

    def _add(self, item: Any) -> None:
        due = self._due()
        self._items.append((due, item))
        if self._reader is not None and len(self._items) == 1:
            # At once the reader would only wait again.
            outside(self._loop.call_at, due, self.look)

    def look(self) -> None:
        """Something may be there to be read now."""
        wake(self._reader)

    async def get(self) -> Any:
        while True:
            if not self._items or self._hub.holds(*self.route):
                self._reader = self._loop.create_future()
                try:
                    await self._reader
                finally:
                    self._reader = None
            elif (due := self._items[0][0]) > true_time():
                await true_sleep_until(due)
            elif (item := self._items[0][1]) is None:
                raise Unavailable(self._cut)  # the item stays: whoever reads again is told again
            else:
                self._items.popleft()
                self._room.set()
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
        self.router = router
        self.address = address
        self.to_worker = _Way(hub, router, address, Direction.TO_WORKER)
        self.to_router = _Way(hub, router, address, Direction.TO_ROUTER)

    def cut(self, why: str) -> None:
        self.to_worker.cut(why)
        self.to_router.cut(why)

    async def carry(self, way: _Way, data: bytes | None) -> Any:
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
        self._context = copy_context()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """In the process that serves."""
        return asyncio.get_running_loop().create_task(work, context=self._context.copy())


class MemoryHub:
    """`to_worker_s` and `to_router_s` are the delays of each direction, in seconds."""

    def __init__(
        self,
        settings: WireSettings | None = None,
        *,
        to_worker_s: float = 0.0,
        to_router_s: float = 0.0,
        plain: bool = False,
    ) -> None:
        self.settings = settings or WireSettings()
        self.code = _PLAIN if plain else ENCODED
        self.to_worker_s = to_worker_s
        self.to_router_s = to_router_s
        self._hosts: dict[str, _Host] = {}
        self._connections: dict[_Connection, None] = {}
        self._frozen: set[str] = set()
        self._parted: set[tuple[str, str, Direction]] = set()
        self._slow: dict[tuple[str, str], float] = {}
        self._spoilt: defaultdict[str, deque[Spoilt]] = defaultdict(deque)
        self.tap: Callable[[str, str, Direction, int], None] = lambda router, address, direction, size: None
        """Told of every message before it is sent (its bytes; 0: it has none); may play a fault at that very
        moment."""

    def serve(self, service: WorkerService, address: str = "") -> MemoryServer:
        """ValueError when the address is taken; a free one is chosen for ""."""
        if not address:
            address = next(name for n in range(1, 1 << 30) if (name := f"worker:{n}") not in self._hosts)
        if address in self._hosts:
            raise ValueError(f"{address} is taken")
        self._hosts[address] = _Host(service, WorkerSessions(service, self.settings, self.code))
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

    def cut(self, router: str, address: str = "") -> None:
        """Connections of a router break, all or those with one worker: a reset, or the router was killed."""
        for connection in self._connections:
            if connection.router == router and address in ("", connection.address):
                connection.cut("the connection broke")
        self._let_through()

    def freeze(self, address: str) -> None:
        """Nothing leaves or enters the worker until `unfreeze`; connections stand, as under SIGSTOP."""
        self._frozen.add(address)

    def unfreeze(self, address: str) -> None:
        self._frozen.discard(address)
        self._let_through()

    def partition(self, router: str, address: str, direction: Direction | None = None) -> None:
        """Nothing passes between these two, or in one direction, until `heal`; neither is told."""
        for way in Direction if direction is None else (direction,):
            self._parted.add((router, address, way))

    def heal(self, router: str, address: str) -> None:
        for way in Direction:
            self._parted.discard((router, address, way))
        self._let_through()

    def slow(self, router: str, address: str, seconds: float) -> None:
        """Everything between these two takes so much longer, from now on; 0 ends it."""
        self._slow[router, address] = seconds

    def spoil(self, address: str, how: Spoilt) -> None:
        """The next call there goes wrong; several are spoilt one after the other."""
        self._spoilt[address].append(how)

    def holds(self, router: str, address: str, direction: Direction) -> bool:
        if not (self._frozen or self._parted):
            return False
        return address in self._frozen or (router, address, direction) in self._parted

    def delay_s(self, router: str, address: str, direction: Direction) -> float:
        usual_s = self.to_worker_s if direction is _TO_WORKER else self.to_router_s
        return usual_s + self._slow.get((router, address), 0.0) if self._slow else usual_s

    def _let_through(self) -> None:
        for connection in self._connections:
            connection.to_worker.look()
            connection.to_router.look()

    # --- for the two ends ---

    def spoilt(self, address: str) -> Spoilt | None:
        """What is to become of a call that is made now."""
        coming = self._spoilt.get(address)
        return coming.popleft() if coming else None

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
            except Unavailable:
                pass  # the router gave up before this process came to it
            finally:
                self._connections.pop(connection, None)
                connection.cut("the worker ended the session")

        task = host.start(session())
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

    @property
    def sessions(self) -> str:
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
        session = RouterSession(address, pipe, settings, hang_up, self._hub.code)
        self._sessions[session] = None
        return session

    async def call(self, address: str, name: str, data: bytes, timeout_s: float) -> bytes:
        connection = self._hub.connect(self._router, address)
        try:
            async with asyncio.timeout(timeout_s):
                host = await self._hub.arrive(connection)
                spoilt = self._hub.spoilt(address)
                reply = await _abandonable(host.start(_answered(address, name, host.service, data)))
                if spoilt is Spoilt.BROKEN:
                    connection.cut("the connection broke")
                elif spoilt is Spoilt.SILENT:
                    await connection.carry(connection.to_router, None)  # nothing comes
                if isinstance(reply, FleetError):
                    raise reply
                answer: bytes = await connection.carry(connection.to_router, reply)
                return answer
        except TimeoutError:
            raise DeadlineExceeded(f"{address}: {name} took more than {timeout_s} s") from None
        finally:
            self._hub.disconnect(connection, "the call is over")

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in list(self._sessions)))


async def _answered(address: str, name: str, service: WorkerService, data: bytes) -> bytes | FleetError:
    try:
        return await CALLS[name](service, data)
    except FleetError as error:
        return error_named(type(error).__name__, f"{address}: {error.message}")


async def _abandonable(task: asyncio.Task[T]) -> T:
    """Its result; who is cancelled does not wait for it, as its process may stand still."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        raise
