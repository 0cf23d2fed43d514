"""The reader's end of the talk with a source: says hello, asks, and hears the answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

import msgspec

from fleet.errors import FleetError, TransferFailed
from fleet.ids import LeaseId
from kv_transfer.messages import (
    VERSION,
    Borrow,
    Borrowed,
    Hello,
    Leave,
    Ready,
    Refused,
    Renew,
    Renewed,
    ToReader,
    ToSource,
    Wait,
    Welcome,
    answer_in,
    frame,
    welcome_in,
)
from kv_transfer.streams import frame_from, frame_with_descriptor
from kv_transfer.transport import Peer

Message = TypeVar("Message")


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
                body = await frame_from(reader)
                answer = answer_in(body)
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
        return _welcome(await frame_from(reader))


async def greet_for_memory(sock: socket.socket, peer: Peer, timeout_s: float) -> tuple[Welcome, int]:
    """As `greet`, on a connected non-blocking Unix socket; with the welcome its descriptor (-1: none)."""
    async with _greeting(timeout_s):
        await asyncio.get_running_loop().sock_sendall(sock, _hello_of(peer, b""))
        body, fd = await frame_with_descriptor(sock)
        try:
            return _welcome(body), fd
        except BaseException:
            if fd >= 0:
                socket.close(fd)
            raise


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
    answer = welcome_in(body)
    if isinstance(answer, Refused):
        raise answer.error_()
    return answer
