"""What reader and source say to each other beside the bytes: greetings, reads, renewals. Pure.

A frame is its length (4 bytes, little-endian) and one msgpack message; all of it is bounded and validated,
because whoever reaches the port can write to it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from fleet.errors import ERRORS, FleetError, TransferFailed, error_named

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
hello_in = msgspec.msgpack.Decoder(Hello).decode
welcome_in = msgspec.msgpack.Decoder[Welcome | Refused](Welcome | Refused).decode
asked_in = msgspec.msgpack.Decoder[ToSource](ToSource).decode
answer_in = msgspec.msgpack.Decoder[ToReader](ToReader).decode
"""Each takes a frame's body and raises MsgspecError for what is no such message."""


def frame(message: msgspec.Struct) -> bytes:
    body = _encode(message)
    return len(body).to_bytes(4, "little") + body


def length_in(head: bytes) -> int:
    """Of the body that follows a frame's first 4 bytes. ValueError: more than is allowed, or none."""
    length = int.from_bytes(head, "little")
    if not 0 < length <= FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes; 1 to {FRAME_BYTES} are allowed")
    return length
