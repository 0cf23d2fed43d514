"""One token session: two ends over any pipe of bytes, with heartbeats, limits and one reason why it ended.

The same over TCP and in memory. Either end sends a heartbeat (empty bytes) after half of `heartbeat_s` in
which it had nothing to say, and takes a peer that says nothing, or takes nothing, for three of them for
lost: a frozen process, a half-open connection and a dead host are all found in bounded time.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

from fleet.errors import BadRequest, FleetError, Internal, Overloaded, TooLarge, Unavailable, WorkerLost
from fleet.handoff import Ended, Frame, ToWorker
from fleet.request import FinishReason
from fleet.wire import WorkerService
from fleet.wire.codec import Malformed, decode_frame, decode_to_worker, encode_frame, encode_to_worker

_HEARTBEAT = b""
_MERGE_ITEMS = 1024
"""Frames that queued up behind a write under way go out as one, up to so many tokens."""
_INBOX_FRAMES = 256
"""Frames read ahead of the router's loop; then the worker is made to wait."""


@dataclass(frozen=True, slots=True)
class WireSettings:
    heartbeat_s: float = 2.0
    """Seconds. A peer silent for three of these is lost: shorter finds a frozen worker sooner, longer
    forgives a healthy process on a busy host its pauses."""
    connect_s: float = 5.0
    """Seconds a worker has to take a session."""
    apart_s: float = 0.002
    """Seconds from one frame of a worker to its next: what it has to say meanwhile travels together. Holds up
    only who speaks more often than that; below a decode step of a real model, so that it holds up none."""
    backlog: int = 100_000
    """Tokens (or messages to a worker) that may wait for one peer; with more it is too slow and let go."""
    message_bytes: int = 16 << 20
    """Largest message. A prompt takes 4 bytes a token, a snapshot 8 bytes a block."""
    call_idle_s: float = 30.0
    """Seconds without a call after which a worker closes a connection; callers let go of it after a tenth of
    them. After twice as many it is closed in any case: a call could be made to last for ever."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "connect_s", "backlog", "message_bytes", "call_idle_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"wire.{name} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.apart_s < self.heartbeat_s:
            raise ValueError(f"wire.apart_s must be from 0 to below wire.heartbeat_s, not {self.apart_s}")

    @property
    def silence_s(self) -> float:
        """Longest silence of a peer that is not lost."""
        return 3 * self.heartbeat_s


@dataclass(frozen=True, slots=True)
class Code:
    """How words become the messages that a pipe carries, and those words again: bytes, unless both ends share
    a memory. Writing raises ValueError for what cannot be said, reading `Malformed`."""

    write_to_worker: Callable[[ToWorker], Any]
    read_to_worker: Callable[[Any], ToWorker]
    write_frame: Callable[[Frame], Any]
    read_frame: Callable[[Any], Frame]


ENCODED = Code(encode_to_worker, decode_to_worker, encode_frame, decode_frame)


class Pipe(Protocol):
    """Messages both ways, whole and in order. Raises `FleetError` when broken or when the peer hung up."""

    async def read(self) -> Any: ...

    async def write(self, data: Any) -> None:
        """Waits while the peer takes nothing."""
        ...

    async def finish(self) -> bool:
        """Tells the peer that nothing more comes. True when its own end is still to be read."""
        ...


def wake(waiter: asyncio.Future[None] | None) -> None:
    """Whoever waits for it goes on, if anybody does."""
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


T = TypeVar("T")


class Link(Generic[T]):
    """One end: its outbox, its heartbeats and its verdict on the peer. `run` lasts as long as the session.

    `pack` takes as much from the queue as one message carries: that message, and how much weight left.
    Messages are written `apart_s` seconds apart, full ones at once.
    """

    def __init__(
        self,
        pipe: Pipe,
        settings: WireSettings,
        pack: Callable[[deque[T]], tuple[Any, int]],
        apart_s: float = 0.0,
    ) -> None:
        self._pipe = pipe
        self._settings = settings
        self._pack = pack
        self._apart_s = apart_s
        self._outbox: deque[T] = deque()
        self._weight = 0
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[FleetError] = self._loop.create_future()
        self._final: FleetError | None = None
        self._idle: asyncio.Future[None] | None = None
        """What the writer waits for while there is nothing to write."""
        self._beat = self._wrote = False
        self._ticked = self._loop.time()
        self._reading_since = self._writing_since = math.inf

    @property
    def ended(self) -> FleetError | None:
        """Why, once it has; never changes."""
        return self._over.result() if self._over.done() else None

    @property
    def ending(self) -> FleetError | None:
        """Why, from when nothing more can be put."""
        return self.ended or self._final

    def end(self, why: FleetError) -> None:
        """At once; what is queued is lost. The first reason stays."""
        if not self._over.done():
            self._over.set_result(self._final or why)

    def finish(self, why: FleetError) -> None:
        """When all that is queued is written and, if the pipe can tell, read."""
        self._final = self._final or why
        wake(self._idle)

    def put(self, item: T, weight: int) -> None:
        """Never blocks; no-op once ended or finishing."""
        if self._final is not None or self._over.done():
            return
        self._outbox.append(item)
        self._weight += weight
        wake(self._idle)
        if self._weight > self._settings.backlog:
            self.end(Overloaded(f"the peer is too slow: {self._weight} tokens or messages wait for it"))

    async def run(self, deliver: Callable[[Any], Awaitable[None]]) -> FleetError:
        """Reads and writes until the end; returns its reason. `deliver` may wait, which makes the peer
        wait; a `FleetError` it raises is the reason, anything else is a defect and raised here."""
        tasks = [self._loop.create_task(self._read(deliver)), self._loop.create_task(self._write())]
        ends: list[asyncio.Future[Any]] = [self._over, *tasks]
        self._tick()
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            return await self._over
        finally:
            self._timer.cancel()
            self.end(Unavailable("the session was cancelled"))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, deliver: Callable[[Any], Awaitable[None]]) -> None:
        try:
            while not self._over.done():
                self._reading_since = self._loop.time()
                data = await self._pipe.read()
                self._reading_since = math.inf  # a peer is not silent while its message is looked at
                if data:  # Else it is a heartbeat.
                    await deliver(data)
        except FleetError as error:
            self.end(error)

    async def _write(self) -> None:
        next_at = -math.inf
        try:
            while not self._over.done():
                if self._outbox:
                    early = next_at - self._loop.time()
                    if early > 0 and self._weight < _MERGE_ITEMS and self._final is None:
                        await asyncio.sleep(early)
                    data, weight = self._pack(self._outbox)
                    self._weight -= weight
                elif self._final:
                    if not await self._pipe.finish():
                        self.end(self._final)
                    await self._over
                    return
                elif self._beat:
                    data = _HEARTBEAT
                else:
                    self._idle = self._loop.create_future()
                    await self._idle
                    continue
                self._wrote, self._beat = True, False
                self._writing_since = self._loop.time()
                next_at = self._writing_since + self._apart_s
                await self._pipe.write(data)
                self._writing_since = math.inf
        except FleetError as error:
            self.end(error)

    def _tick(self) -> None:
        """Every half heartbeat: says one if nothing else was said, and looks whether the peer still is."""
        now, limit = self._loop.time(), self._settings.silence_s
        late = now - self._ticked - self._settings.heartbeat_s / 2
        if late > self._settings.heartbeat_s:
            # This process itself stood still: what the peer said meanwhile waits to be read.
            self._reading_since += late
            self._writing_since += late
        if now - self._reading_since > limit:
            self.end(Unavailable(f"nothing heard for {now - self._reading_since:.1f} s"))
        elif now - self._writing_since > limit:
            self.end(Unavailable(f"nothing taken for {now - self._writing_since:.1f} s"))
        self._beat = not self._wrote
        self._wrote = False
        wake(self._idle)
        self._ticked = now
        self._timer = self._loop.call_later(self._settings.heartbeat_s / 2, self._tick)


class RouterSession:
    """The router's end: `fleet.wire.Session`. `hang_up` lets the pipe go, when the session is over."""

    def __init__(
        self,
        address: str,
        pipe: Pipe,
        settings: WireSettings,
        hang_up: Callable[[], Awaitable[None]],
        code: Code = ENCODED,
    ) -> None:
        self._address = address
        self._settings = settings
        self._hang_up = hang_up
        self._code = code
        self._link: Link[Any] = Link(pipe, settings, lambda outbox: (outbox.popleft(), 1))
        self._inbox: deque[Frame] = deque()
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._came: asyncio.Future[None] | None = None
        """What the reader waits for while there is nothing to read."""
        self._room = asyncio.Event()
        self._task = self._loop.create_task(self._run())

    def send(self, message: ToWorker) -> None:
        """As `Session.send`; `BadRequest` or `TooLarge` when this message cannot be said at all."""
        if why := self._link.ending:
            raise self._lost(why)
        try:
            data = self._code.write_to_worker(message)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        if isinstance(data, bytes) and len(data) > self._settings.message_bytes:
            limit = self._settings.message_bytes
            raise TooLarge(f"a message to a worker of {len(data)} bytes; at most {limit} are allowed")
        self._link.put(data, 1)

    def __aiter__(self) -> AsyncIterator[Frame]:
        return self

    async def __anext__(self) -> Frame:
        while not self._inbox:
            if why := self._link.ended:
                raise self._lost(why)
            self._came = self._loop.create_future()
            await self._came
        self._room.set()
        return self._inbox.popleft()

    async def close(self) -> None:
        """What was sent before still reaches a worker that lives; then the iterator raises `WorkerLost`."""
        self._closing = True
        self._room.set()
        self._link.finish(WorkerLost("the session was closed here"))
        await asyncio.wait([self._task])
        self._task.result()

    def _lost(self, why: FleetError) -> WorkerLost:
        return WorkerLost(f"{self._address}: {why.message}")

    async def _run(self) -> FleetError:
        try:
            return await self._link.run(self._deliver)
        finally:
            wake(self._came)
            await self._hang_up()

    async def _deliver(self, data: Any) -> None:
        try:
            frame = self._code.read_frame(data)
        except Malformed as error:
            raise WorkerLost(f"it sent a frame that cannot be read: {error}") from None
        self._inbox.append(frame)
        wake(self._came)
        while len(self._inbox) >= _INBOX_FRAMES and not self._closing:
            self._room.clear()
            await self._room.wait()


class WorkerSessions:
    """The worker's ends of all open sessions of one server."""

    def __init__(self, service: WorkerService, settings: WireSettings, code: Code = ENCODED) -> None:
        self._service = service
        self._settings = settings
        self._code = code
        self._open: dict[_WorkerEnd, None] = {}
        self._left = asyncio.Event()
        self._closing = False

    async def attend(self, pipe: Pipe) -> FleetError:
        """One session, from `opened` to `closed`, each called once; returns why it ended."""
        if self._closing:
            return Unavailable("the worker is closing")
        end = _WorkerEnd(Link(pipe, self._settings, self._pack_frames, self._settings.apart_s))
        self._open[end] = None
        self._service.opened(end)
        try:
            return await end.link.run(lambda data: self._received(end, data))
        finally:
            self._service.closed(end)
            del self._open[end]
            self._left.set()

    def finish(self) -> None:
        """Ends every session when its frames are written; takes no more."""
        self._closing = True
        for end in self._open:
            end.link.finish(Unavailable("the worker is closing"))

    async def all_ended(self) -> None:
        while self._open:
            self._left.clear()
            await self._left.wait()

    async def _received(self, end: _WorkerEnd, data: Any) -> None:
        try:
            message = self._code.read_to_worker(data)
        except Malformed as error:
            if error.stream is None:
                raise BadRequest(f"a message that cannot be read: {error}") from None
            failed = Ended(error.stream, FinishReason.FAILED, error=BadRequest.__name__, message=str(error))
            end.send(Frame(ended=(failed,)))
        else:
            self._service.received(end, message)

    def _pack_frames(self, outbox: deque[Frame]) -> tuple[Any, int]:
        frames = [outbox.popleft()]
        items = _items(frames[0])
        while outbox and items + _items(outbox[0]) <= _MERGE_ITEMS:
            frames.append(outbox.popleft())
            items += _items(frames[-1])
        try:
            return self._code.write_frame(frames[0] if len(frames) == 1 else merge(frames)), items
        except ValueError as error:
            raise Internal(f"a frame that cannot be said: {error}") from None


class _WorkerEnd:
    """`fleet.wire.WorkerEnd`."""

    __slots__ = ("link",)

    def __init__(self, link: Link[Frame]) -> None:
        self.link = link

    def send(self, frame: Frame) -> None:
        if items := _items(frame):
            self.link.put(frame, items)


def _items(frame: Frame) -> int:
    items = len(frame.started) + len(frame.lent) + len(frame.prefilled) + len(frame.tokens) + len(frame.ended)
    return items + sum(len(said.logprobs) for said in frame.scored) if frame.scored else items


def merge(frames: list[Frame]) -> Frame:
    """One frame for several. The order within each stream stands: started, scored, lent, prefilled, tokens,
    ended."""
    return Frame(
        started=tuple(chain.from_iterable(frame.started for frame in frames)),
        prefilled=tuple(chain.from_iterable(frame.prefilled for frame in frames)),
        tokens=tuple(chain.from_iterable(frame.tokens for frame in frames)),
        ended=tuple(chain.from_iterable(frame.ended for frame in frames)),
        scored=tuple(chain.from_iterable(frame.scored for frame in frames)),
        lent=tuple(chain.from_iterable(frame.lent for frame in frames)),
    )
