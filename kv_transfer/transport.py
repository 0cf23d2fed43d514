"""What a transport must do: connect, read, close, and serve a source; written by `transfer.py`, its user."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fleet.errors import TransferFailed
from fleet.ids import Incarnation, LeaseId, WorkerId
from kv_transfer.plan import Chunk
from kv_transfer.region import Region, checksum

Result = TypeVar("Result")

INLINE_BYTES = 1 << 20
"""Work on fewer bytes than this (about 0.1 ms) is done on the event loop; a thread costs as much."""


class ChecksumMismatch(TransferFailed):
    """Bytes that came are not those that were promised."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Whom a reader wants to reach, and what it is itself."""

    reader: WorkerId
    worker: WorkerId
    incarnation: Incarnation
    """Of the source that made the promise; another life of it must refuse."""
    fingerprint: str
    """The reader's; must equal the source's."""
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Reading:
    """One read under way at the source: its blocks are pinned until `Source.end_read`."""

    number: int
    lease: LeaseId
    blocks: tuple[int, ...]
    checksums: tuple[int, ...]
    """One a block; empty when switched off."""


class Source(Protocol):
    """The serving side, which every transport asks before it lets a byte go."""

    region: Region

    def welcome(self, peer: Peer) -> None:
        """Raises LeaseExpired (another incarnation) or BadRequest (fingerprint, block size)."""
        ...

    async def begin_read(
        self, lease: LeaseId, positions: Sequence[int], abort: Callable[[], None]
    ) -> Reading:
        """Raises LeaseExpired or BadRequest. `abort` is called when the lease is past its end: the transport
        must then end the read at once, whatever its peer does."""
        ...

    def end_read(self, reading: Reading) -> None:
        """Called exactly once, when nothing touches the blocks any more. LeaseExpired when the lease did not
        stand until now."""
        ...

    async def ready(self, lease: LeaseId, have: int, wait_s: float) -> tuple[int, bool]:
        """Blocks of the lease that can be read, and whether more are to come: as soon as they are more than
        `have` or no more will come, and after `wait_s` anyway. Raises LeaseExpired, also when the lease ends
        meanwhile. It may be cancelled, and pins nothing."""
        ...

    async def borrow(self, names: Sequence[bytes], have: int, limit_s: float) -> tuple[LeaseId, int]:
        """A lease on cached blocks by their names, and how many: those after the first `have` of `names`, as
        many in a row as are here and can be spared. None of them: 0 and no lease. It ends after `limit_s`
        by itself. Raises TransferFailed. It may be cancelled, and leaves nothing then."""
        ...

    def renew(self, lease: LeaseId) -> float:
        """Seconds left. Raises LeaseExpired."""
        ...

    def leave(self, lease: LeaseId) -> None:
        """The reader is done with it. Idempotent."""
        ...


class Connection(Protocol):
    """A path to one life of one source. A broken one is closed and never used again."""

    @property
    def closed(self) -> bool: ...

    async def read(self, lease: LeaseId, chunk: Chunk) -> None:
        """Bring one chunk into the reader's region, verified, the lease proven to stand after the last byte.

        When it has returned, raised or been cancelled, no later write into the destinations can happen.
        Raises LeaseExpired, TransferFailed, BadRequest.
        """
        ...

    async def ready(self, lease: LeaseId, have: int, wait_s: float) -> tuple[int, bool]:
        """`Source.ready`, asked from here. Raises TransferFailed when the path breaks."""
        ...

    async def borrow(self, names: Sequence[bytes], have: int, limit_s: float) -> tuple[LeaseId, int]:
        """`Source.borrow`, asked from here. Raises TransferFailed when the path breaks."""
        ...

    async def renew(self, lease: LeaseId) -> float: ...

    def leave(self, lease: LeaseId) -> None: ...

    async def close(self) -> None:
        """Reads under way fail, fenced."""
        ...


class Transport(Protocol):
    name: str
    address: str
    """With its scheme; what a reader needs to connect."""

    def reaches(self, address: str) -> bool:
        """Whether this address is of this transport and seems reachable from here."""
        ...

    async def connect(self, address: str, peer: Peer) -> Connection:
        """Raises TransferFailed, LeaseExpired, BadRequest."""
        ...

    async def close(self) -> None:
        """Stop serving: reads by peers end, fenced."""
        ...


async def finish(work: Coroutine[Any, Any, Result]) -> Result:
    """Await to the end even when cancelled meanwhile; then the cancellation goes on."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()
    raise cancelled


def settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def settled(work: Coroutine[Any, Any, None], *, fence_s: float, abort: Callable[[], None]) -> None:
    """Run a read so that leaving it proves it over: when cancelled, it may end by itself within `fence_s`,
    else `abort` closes its path, after which the read must end."""
    task = asyncio.ensure_future(work)

    async def end() -> None:
        done, _ = await asyncio.wait({task}, timeout=fence_s)
        if not done:
            abort()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()

    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await finish(end())
        raise


def verify(region: Region, chunk: Chunk, sums: Sequence[int]) -> None:
    """ChecksumMismatch names the first block that is not what was promised."""
    for position, block, expected in zip(chunk.positions, chunk.destinations, sums, strict=True):
        if checksum(region.array[block]) != expected:
            raise ChecksumMismatch(f"block at lease position {position} is not what was promised (checksum)")


async def verify_off_loop(region: Region, chunk: Chunk, sums: Sequence[int], threads: Executor) -> None:
    if not sums:
        return
    if len(sums) * region.block_bytes <= INLINE_BYTES:
        verify(region, chunk, sums)
    else:
        await asyncio.get_running_loop().run_in_executor(threads, verify, region, chunk, sums)
