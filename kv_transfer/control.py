"""The talk between reader and source beside the bytes: greetings, reads, renewals; small framed messages.

One stream socket a reader and source: Unix, or TCP, which has mutual TLS where the fleet has it. A frame is
its length (4 bytes, little-endian) and one msgpack message; all of it is bounded and validated, because
whoever reaches the port can write to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Annotated, Protocol, TypeVar

import msgspec

from fleet.errors import ERRORS, BadRequest, FleetError, LeaseExpired, TransferFailed, error_named
from fleet.ids import Incarnation, LeaseId, WorkerId
from kv_transfer.transport import Peer, Reading, Source, finish, settle

logger = logging.getLogger(__name__)

VERSION = 1
FRAME_BYTES = 1 << 20
READ_BYTES = 32 << 20
"""Most bytes that one read may ask for, unless it is a single block."""
OPEN_READS = 64
"""Most reads a peer may have under way; readers of ours keep to half of it."""
OPEN_WAITS = 4096
"""Most waits for the next blocks of a lease that a peer may have under way; each ends by itself."""
OPEN_BORROWS = 64
"""Most questions for cached blocks that a peer may have under way."""
NAME_BYTES = 32
"""Of a block's name: it is told, and compared, whole."""
BORROWED_BLOCKS = 1 << 14
"""Most names that one question may have."""
SESSIONS = 1024
"""Most peers at once."""
GOODBYE_S = 1.0
"""How long a peer is waited for to end TLS in order, when nothing is left to say to it."""

Name = Annotated[str, msgspec.Meta(max_length=128)]
Number = Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Sum = Annotated[int, msgspec.Meta(ge=0)]


class Hello(msgspec.Struct, tag="hello", frozen=True):
    version: int
    reader: Name
    worker: Name
    incarnation: Name
    fingerprint: Name
    block_bytes: Count
    ucx: Annotated[bytes, msgspec.Meta(max_length=1 << 16)] = b""


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    blocks: Count
    ucx: Annotated[bytes, msgspec.Meta(max_length=1 << 16)] = b""


class Read(msgspec.Struct, tag="read", frozen=True):
    id: Number
    lease: Name
    positions: Annotated[list[Count], msgspec.Meta(min_length=1, max_length=1 << 16)]


class Granted(msgspec.Struct, tag="granted", frozen=True):
    """The blocks are pinned for this read. Over ucx their bytes are on the way; over shm `blocks` says
    where the reader finds them, and the reader says `copied`."""

    id: Number
    checksums: list[Sum]
    blocks: list[Count] = []


class Copied(msgspec.Struct, tag="copied", frozen=True):
    id: Number


class Done(msgspec.Struct, tag="done", frozen=True):
    """The lease stood after the last byte."""

    id: Number


class Renew(msgspec.Struct, tag="renew", frozen=True):
    id: Number
    lease: Name


class Renewed(msgspec.Struct, tag="renewed", frozen=True):
    id: Number
    left_s: float


class Wait(msgspec.Struct, tag="wait", frozen=True):
    """Asks for `Ready`: when more than `have` blocks of the lease can be read or no more will come, and
    after `wait_s` anyway."""

    id: Number
    lease: Name
    have: Count
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)]


class Ready(msgspec.Struct, tag="ready", frozen=True):
    id: Number
    blocks: Count
    more: bool
    """Whether more are to come."""


class Borrow(msgspec.Struct, tag="borrow", frozen=True):
    """Asks for a lease on cached blocks, by their names one after the other from the sequence's first; on
    those after the first `have` of them, for `limit_s` at most."""

    id: Number
    names: Annotated[bytes, msgspec.Meta(max_length=BORROWED_BLOCKS * NAME_BYTES)]
    have: Annotated[int, msgspec.Meta(ge=0, lt=BORROWED_BLOCKS)]
    limit_s: Annotated[float, msgspec.Meta(gt=0, le=600)]


class Borrowed(msgspec.Struct, tag="borrowed", frozen=True):
    """`blocks` that follow the first `have` are under the lease, the next one at position 0. 0: none, and
    there is no lease."""

    id: Number
    lease: Name
    blocks: Annotated[int, msgspec.Meta(ge=0, le=BORROWED_BLOCKS)]


class Leave(msgspec.Struct, tag="leave", frozen=True):
    lease: Name


class Refused(msgspec.Struct, tag="refused", frozen=True):
    id: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    """0 refuses the greeting."""
    error: Name
    message: Annotated[str, msgspec.Meta(max_length=1000)]

    @classmethod
    def of(cls, number: int, error: FleetError) -> Refused:
        name = type(error).__name__
        return cls(number, name if name in ERRORS else "TransferFailed", error.message[:1000])

    def error_(self) -> FleetError:
        if self.error in ("LeaseExpired", "BadRequest"):
            return error_named(self.error, self.message)
        return TransferFailed(f"{self.error}: {self.message}")


ToSource = Read | Copied | Wait | Borrow | Renew | Leave
ToReader = Granted | Done | Ready | Borrowed | Renewed | Refused

_encode = msgspec.msgpack.Encoder().encode
_hello = msgspec.msgpack.Decoder(Hello)
_greeted: msgspec.msgpack.Decoder[Welcome | Refused] = msgspec.msgpack.Decoder(Welcome | Refused)
_to_source: msgspec.msgpack.Decoder[ToSource] = msgspec.msgpack.Decoder(ToSource)
_to_reader: msgspec.msgpack.Decoder[ToReader] = msgspec.msgpack.Decoder(ToReader)

Message = TypeVar("Message")


def frame(message: msgspec.Struct) -> bytes:
    body = _encode(message)
    return len(body).to_bytes(4, "little") + body


def _length(head: bytes) -> int:
    length = int.from_bytes(head, "little")
    if not 0 < length <= FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes; 1 to {FRAME_BYTES} are allowed")
    return length


async def _receive(sock: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        part = await loop.sock_recv(sock, count - len(data))
        if not part:
            raise ConnectionResetError("the peer hung up")
        data += part
    return data


def tune(sock: socket.socket) -> None:
    """No delay for small messages; a peer whose host vanished without a word is noticed within 25 s."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


async def opened(
    sock: socket.socket, tls: ssl.SSLContext | None = None, host: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams on a connected socket, the reader's end. With `tls` the source must prove that it is `host`;
    that it does not believe our own certificate is only noticed by the first answer. OSError."""
    if sock.family == socket.AF_UNIX:
        return await asyncio.open_unix_connection(sock=sock)
    if tls is None:
        return await asyncio.open_connection(sock=sock)
    return await asyncio.open_connection(
        sock=sock, ssl=tls, server_hostname=host, ssl_shutdown_timeout=GOODBYE_S
    )


async def _accepted(
    sock: socket.socket, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams on an accepted socket, the source's end; with `tls` the peer has shown its certificate."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.connect_accepted_socket(  # with TLS, uvloop gives its own protocol back
        lambda: protocol,
        sock,
        ssl=tls,
        ssl_shutdown_timeout=None if tls is None else GOODBYE_S,
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class Call:
    """One question to the source and its answers, in order."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._answers: asyncio.Queue[ToReader | FleetError] = asyncio.Queue()

    def put(self, answer: ToReader | FleetError) -> None:
        self._answers.put_nowait(answer)

    def unread(self) -> list[ToReader]:
        """Takes out what came and was not read."""
        answers = [self._answers.get_nowait() for _ in range(self._answers.qsize())]
        return [answer for answer in answers if not isinstance(answer, FleetError)]

    async def next(self, kind: type[Message]) -> Message:
        """The next answer; raises what the source refused with, or TransferFailed."""
        answer = await self._answers.get()
        if isinstance(answer, FleetError):
            raise answer
        if isinstance(answer, Refused):
            raise answer.error_()
        if not isinstance(answer, kind):
            raise TransferFailed(f"the source said {type(answer).__name__} where {kind.__name__} was due")
        return answer


class Caller:
    """The reader's end of one control socket; `closed` from the first sign of trouble on."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_close: Callable[[], None]
    ) -> None:
        self._writer = writer
        self._on_close = on_close
        self._calls: dict[int, Call] = {}
        self._number = 0
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.hung_up = False
        """Whether it was the source that ended it."""
        self._task = asyncio.create_task(self._listen(reader))

    @property
    def closed(self) -> bool:
        return self.gone.done()

    def open(self) -> Call:
        """A call with a number never used before on this socket. Raises TransferFailed when closed."""
        if self.closed:
            raise TransferFailed("the connection to the source is closed")
        self._number += 1
        call = self._calls[self._number] = Call(self._number)
        return call

    def end(self, call: Call) -> None:
        self._calls.pop(call.number, None)

    def say(self, message: ToSource) -> None:
        if not self.closed:
            self._writer.write(frame(message))

    async def ready(self, lease: LeaseId, have: int, wait_s: float) -> tuple[int, bool]:
        call = self.open()
        try:
            self.say(Wait(call.number, lease, have, min(wait_s, 60.0)))
            answer = await call.next(Ready)
            return answer.blocks, answer.more
        finally:
            self.end(call)

    async def borrow(self, names: Sequence[bytes], have: int, limit_s: float) -> tuple[LeaseId, int]:
        call = self.open()
        try:
            self.say(Borrow(call.number, b"".join(names), have, min(limit_s, 600.0)))
            answer = await call.next(Borrowed)
            return LeaseId(answer.lease), answer.blocks
        finally:
            self.end(call)
            for late in call.unread():
                self._unwanted(late)

    def _unwanted(self, answer: ToReader) -> None:
        """Who asked for it has given up: what was lent for it is given back, or it would stay to its end."""
        if isinstance(answer, Borrowed) and answer.blocks and not self.closed:
            self.leave(LeaseId(answer.lease))

    async def renew(self, lease: LeaseId) -> float:
        call = self.open()
        try:
            self.say(Renew(call.number, lease))
            return (await call.next(Renewed)).left_s
        finally:
            self.end(call)

    def leave(self, lease: LeaseId) -> None:
        self.say(Leave(lease))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        why = "the source hung up"
        try:
            while True:
                body = await reader.readexactly(_length(await reader.readexactly(4)))
                answer = _to_reader.decode(body)
                call = self._calls.get(answer.id)
                if call is not None:
                    call.put(answer)
                else:
                    self._unwanted(answer)
        except (OSError, EOFError):
            self.hung_up = True
        except (ValueError, msgspec.MsgspecError) as error:
            why = f"the source talks nonsense: {error}"
        self.shut(why)

    def shut(self, why: str) -> None:
        """Close now; every open call fails."""
        if self.closed:
            return
        self.gone.set_result(None)
        self._writer.transport.abort()
        for call in self._calls.values():
            call.put(TransferFailed(why))
        self._on_close()

    async def close(self) -> None:
        self.shut("the connection was closed")
        self._task.cancel()
        await asyncio.wait({self._task})


async def greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer, ucx: bytes, timeout_s: float
) -> Welcome:
    """Say hello; the welcome. Raises what the source refused with, TransferFailed otherwise."""
    async with _greeting(timeout_s):
        writer.write(_hello_of(peer, ucx))
        return _welcome(await reader.readexactly(_length(await reader.readexactly(4))))


async def greet_for_memory(sock: socket.socket, peer: Peer, timeout_s: float) -> tuple[Welcome, int]:
    """As `greet`, on a connected non-blocking Unix socket; with the welcome its descriptor (-1: none)."""
    fd = -1
    try:
        async with _greeting(timeout_s):
            await asyncio.get_running_loop().sock_sendall(sock, _hello_of(peer, b""))
            head, fd = await _receive_fd(sock)
            welcome = _welcome(await _receive(sock, _length(head)))
            given, fd = fd, -1
            return welcome, given
    finally:
        if fd >= 0:
            socket.close(fd)


@contextlib.asynccontextmanager
async def _greeting(timeout_s: float) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise TransferFailed(f"the source did not answer a greeting within {timeout_s} s") from None
    except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
        raise TransferFailed(f"greeting the source: {error}") from error


def _hello_of(peer: Peer, ucx: bytes) -> bytes:
    return frame(
        Hello(VERSION, peer.reader, peer.worker, peer.incarnation, peer.fingerprint, peer.block_bytes, ucx)
    )


def _welcome(body: bytes) -> Welcome:
    answer = _greeted.decode(body)
    if isinstance(answer, Refused):
        raise answer.error_()
    return answer


async def _receive_fd(sock: socket.socket) -> tuple[bytes, int]:
    """The first 4 bytes of the answer and the descriptor sent with them (-1: none)."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, settle, readable)
    try:
        await readable
    finally:
        loop.remove_reader(sock)
    head, fds, _, _ = socket.recv_fds(sock, 4, 1)
    fd = fds[0] if fds else -1
    try:
        return head + await _receive(sock, 4 - len(head)), fd
    except BaseException:
        if fd >= 0:
            socket.close(fd)
        raise


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
        tls: ssl.SSLContext | None = None,
        greeting_s: float,
    ) -> None:
        self._listener = listener
        self._source = source
        self._open_session = open_session
        self._descriptor = descriptor
        self._tls = tls
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
                reader, writer = await _accepted(sock, self._tls)
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
        hello = _hello.decode(await reader.readexactly(_length(await reader.readexactly(4))))
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
        self._beginning: set[asyncio.Task[None]] = set()
        self._waiting: set[asyncio.Task[None]] = set()
        self._borrowing: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()

    def _say(self, message: ToReader) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def run(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                body = await reader.readexactly(_length(await reader.readexactly(4)))
                self._answer(_to_source.decode(body))
                await self._writer.drain()
        finally:
            self._writer.transport.abort()
            for task in (*self._beginning, *self._waiting, *self._borrowing):
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
                if message.id in self._open:
                    raise ValueError(f"read {message.id} is under way already")
                task = asyncio.create_task(self._begin(message))
                self._beginning.add(task)
                task.add_done_callback(self._begun)
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

    def _begun(self, task: asyncio.Task[None]) -> None:
        self._beginning.discard(task)
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
