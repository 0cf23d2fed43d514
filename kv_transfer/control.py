"""The source's end of the talk with its readers: accepts them, checks what they ask, and answers."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Protocol

import msgspec

from fleet.errors import BadRequest, FleetError, LeaseExpired
from fleet.ids import Incarnation, LeaseId, WorkerId
from fleet.tls import Tls, names_in
from kv_transfer.messages import (
    NAME_BYTES,
    OPEN_BORROWS,
    OPEN_READS,
    OPEN_WAITS,
    READ_BYTES,
    VERSION,
    Borrow,
    Borrowed,
    Copied,
    Done,
    Granted,
    Hello,
    Leave,
    Read,
    Ready,
    Refused,
    Renew,
    Renewed,
    ToReader,
    ToSource,
    Wait,
    Welcome,
    asked_in,
    frame,
    hello_in,
)
from kv_transfer.streams import accepted, frame_from, tune
from kv_transfer.transport import Peer, Reading, Source, finish

logger = logging.getLogger(__name__)

SESSIONS = 1024
"""Most peers at once."""


class Session(Protocol):
    """The part of serving one peer that differs between transports."""

    ucx: bytes
    """Goes into the welcome."""
    lists_blocks: bool
    """Whether a reader is told which blocks to read by itself."""

    def start(self, number: int, reading: Reading, done: Callable[[bool], None]) -> None:
        """Begin moving; `done` is to be called once, when nothing touches the blocks any more, with whether
        all bytes went out."""
        ...

    def copied(self, number: int) -> None:
        """The reader says that it has the bytes."""
        ...

    def drop(self, number: int) -> bool:
        """End this read now, whatever the peer does; `done` is called soon. Whether the peer can still be
        served: False when ending one read took the whole path down."""
        ...

    def abort(self) -> None:
        """End all reads of this peer now; every `done` is called, soon."""
        ...


class ControlServer:
    """The source's end: accepts peers on a listening socket and answers them. Survives any bytes."""

    def __init__(
        self,
        listener: socket.socket,
        source: Source,
        open_session: Callable[[Hello], Session],
        *,
        descriptor: Callable[[], int] | None = None,
        tls: Tls | None = None,
        greeting_s: float,
    ) -> None:
        self._listener = listener
        self._source = source
        self._open_session = open_session
        self._descriptor = descriptor
        self._tls = tls
        self._context = None if tls is None else tls.server()
        self._greeting_s = greeting_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._listen()

    def _listen(self) -> None:
        self._retry = None
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        # Not `sock_accept`: cancelled at the wrong moment it loses a socket that it has accepted.
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors, most likely: those that are served go on.
            logger.warning("kv transfer cannot accept: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            self._retry = loop.call_later(0.1, self._listen)
            return
        if len(self._tasks) >= SESSIONS:
            sock.close()
            return
        task = asyncio.create_task(self._serve(sock))
        self._tasks.add(task)

        def served(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            sock.close()  # a task that is cancelled before its first step closes nothing

        task.add_done_callback(served)

    async def _serve(self, sock: socket.socket) -> None:
        writer: asyncio.StreamWriter | None = None
        session: Session | None = None
        try:
            sock.setblocking(False)
            tune(sock)
            async with asyncio.timeout(self._greeting_s):
                reader, writer = await accepted(sock, self._context)
                if self._tls is not None and not self._tls.admits(
                    names_in(writer.get_extra_info("peercert"))
                ):
                    raise ssl.SSLError("its certificate does not bear the fleet's name")
                session = await self._greeting(reader, writer, sock)
            if session is not None:
                await _Serving(self._source, session, writer).run(reader)
        except ssl.SSLError as error:
            logger.warning("kv transfer drops a peer that does not prove itself: %s", error)
        except (OSError, EOFError, TimeoutError):
            pass  # the peer went away, or never said who it is
        except (ValueError, msgspec.MsgspecError) as error:
            logger.warning("kv transfer drops a peer that talks nonsense: %s", error)
        finally:
            if session is not None:
                session.abort()
            if writer is not None:
                writer.transport.abort()
            else:
                sock.close()

    async def _greeting(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sock: socket.socket
    ) -> Session | None:
        hello = hello_in(await frame_from(reader))
        try:
            if hello.version != VERSION:
                raise BadRequest(f"transfer protocol {hello.version}, this worker speaks {VERSION}")
            self._source.welcome(
                Peer(
                    reader=WorkerId(hello.reader),
                    worker=WorkerId(hello.worker),
                    incarnation=Incarnation(hello.incarnation),
                    fingerprint=hello.fingerprint,
                    block_bytes=hello.block_bytes,
                )
            )
            session = self._open_session(hello)
        except FleetError as error:
            writer.write(frame(Refused.of(0, error)))
            await writer.drain()
            return None
        data = frame(Welcome(self._source.region.blocks, session.ucx))
        try:
            if self._descriptor is not None:
                fd = self._descriptor()
                try:
                    # Nothing was sent on this socket yet, so its buffer takes these few bytes at once.
                    data = data[socket.send_fds(sock, [data], [fd]) :]
                finally:
                    socket.close(fd)
            writer.write(data)
            await writer.drain()
        except BaseException:
            session.abort()
            raise
        return session

    async def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._listener.close()


class _Serving:
    """Answers one peer until it goes; then ends its reads."""

    def __init__(self, source: Source, session: Session, writer: asyncio.StreamWriter) -> None:
        self._source = source
        self._session = session
        self._writer = writer
        self._open: dict[int, Reading] = {}
        self._told: set[int] = set()
        self._beginning: dict[int, asyncio.Task[None]] = {}
        self._waiting: set[asyncio.Task[None]] = set()
        self._borrowing: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()

    def _say(self, message: ToReader) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def run(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                body = await frame_from(reader)
                self._answer(asked_in(body))
                await self._writer.drain()
        finally:
            self._writer.transport.abort()
            for task in (*self._beginning.values(), *self._waiting, *self._borrowing):
                task.cancel()
            self._session.abort()
            await finish(self._ended())

    async def _ended(self) -> None:
        while self._open or self._beginning or self._waiting or self._borrowing:
            self._idle.clear()
            await self._idle.wait()

    def _answer(self, message: ToSource) -> None:
        match message:
            case Read():
                if message.id in self._open or message.id in self._beginning:
                    raise ValueError(f"read {message.id} is under way already")
                task = self._beginning[message.id] = asyncio.create_task(self._begin(message))
                task.add_done_callback(lambda _: self._begun(message.id))
            case Copied():
                self._session.copied(message.id)
            case Wait():
                task = asyncio.create_task(self._wait(message))
                self._waiting.add(task)
                task.add_done_callback(self._waited)
            case Borrow():
                if len(self._borrowing) >= OPEN_BORROWS:
                    error = BadRequest(f"more than {OPEN_BORROWS} questions for cached blocks under way")
                    self._say(Refused.of(message.id, error))
                    return
                task = asyncio.create_task(self._borrow(message))
                self._borrowing.add(task)
                task.add_done_callback(self._borrowed)
            case Renew():
                try:
                    self._say(Renewed(message.id, self._source.renew(LeaseId(message.lease))))
                except LeaseExpired as error:
                    self._say(Refused.of(message.id, error))
            case Leave():
                self._source.leave(LeaseId(message.lease))

    async def _wait(self, message: Wait) -> None:
        try:
            if len(self._waiting) > OPEN_WAITS:
                raise BadRequest(f"more than {OPEN_WAITS} waits under way")
            blocks, more = await self._source.ready(LeaseId(message.lease), message.have, message.wait_s)
        except FleetError as error:
            self._say(Refused.of(message.id, error))
        else:
            self._say(Ready(message.id, blocks, more))

    def _waited(self, task: asyncio.Task[None]) -> None:
        self._waiting.discard(task)
        self._idle.set()

    async def _borrow(self, message: Borrow) -> None:
        names, size = message.names, NAME_BYTES
        try:
            if len(names) % size or len(names) <= message.have * size:
                raise BadRequest(f"{len(names)} bytes are no names of blocks after {message.have}")
            lease, blocks = await self._source.borrow(
                [names[start : start + size] for start in range(0, len(names), size)],
                message.have,
                message.limit_s,
            )
        except FleetError as error:
            self._say(Refused.of(message.id, error))
        else:
            self._say(Borrowed(message.id, lease, blocks))

    def _borrowed(self, task: asyncio.Task[None]) -> None:
        self._borrowing.discard(task)
        self._idle.set()

    def _begun(self, number: int) -> None:
        del self._beginning[number]
        self._idle.set()

    async def _begin(self, message: Read) -> None:
        number = message.id
        try:
            if len(self._open) + len(self._beginning) > OPEN_READS:
                raise BadRequest(f"more than {OPEN_READS} reads under way")
            size = len(message.positions) * self._source.region.block_bytes
            if size > READ_BYTES and len(message.positions) > 1:
                raise BadRequest(f"a read of {size} bytes; at most {READ_BYTES} are allowed")
            reading = await self._source.begin_read(
                LeaseId(message.lease), message.positions, lambda: self._overdue(number)
            )
        except FleetError as error:
            self._say(Refused.of(number, error))
            return
        self._open[number] = reading
        blocks = list(reading.blocks) if self._session.lists_blocks else []
        self._say(Granted(number, list(reading.checksums), blocks))
        self._session.start(number, reading, lambda whole: self._done(number, whole))

    def _overdue(self, number: int) -> None:
        """The lease is past its end and this read still holds it."""
        if number not in self._open:
            return  # not begun yet: refused when it does
        self._told.add(number)
        self._say(Refused.of(number, LeaseExpired("the lease expired during the read")))
        if not self._session.drop(number):
            self._writer.close()

    def _done(self, number: int, whole: bool) -> None:
        answer: ToReader = Done(number)
        try:
            self._source.end_read(self._open.pop(number))
        except LeaseExpired as error:
            answer = Refused.of(number, error)
        if not whole and number not in self._told:
            self._writer.close()  # the path is broken; the reader learns it by this
        elif number not in self._told:
            self._say(answer)
        self._told.discard(number)
        self._idle.set()
