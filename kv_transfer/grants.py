"""A worker's own blocks, promised to readers: leases, checksums, reads under way, loans of what is cached."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor

from fleet.errors import BadRequest, LeaseExpired, TransferFailed
from fleet.ids import Incarnation, LeaseId, WorkerId, new_lease_id
from kv_transfer.lease import Ended, LeaseTable
from kv_transfer.region import Region, checksums
from kv_transfer.settings import TransferSettings
from kv_transfer.transport import INLINE_BYTES, Peer, Reading

Lend = Callable[[LeaseId, Sequence[bytes], int], Awaitable[Sequence[int]]]
"""(lease, names of a chain of blocks from its first, how many to leave out) → the blocks that are cached here
in a row, but those left out, pinned until that lease ends. None: nothing is pinned. It may be cancelled or
raise a FleetError, and pins nothing then."""
LOANS = 256
"""Most leases on cached blocks at once."""

_ENDS = {"expired": "leases_expired", "aborted": "leases_aborted"}
_Sums = tuple[int, ...] | asyncio.Future[tuple[int, ...]]
"""Checksums of blocks, or the thread that works them out."""


class Grants:
    """Leases on own blocks. The first half is the worker's; the second is what `Serving` lets readers do."""

    def __init__(
        self,
        region: Region,
        settings: TransferSettings,
        on_end: Callable[[LeaseId, str], None],
        counters: Counter[str],
        threads: Executor | None,
    ) -> None:
        """`on_end`: see `Transfer.start`. Without `threads`, as on a virtual clock, sums are worked out at
        once."""
        self.region = region
        self.lend: Lend | None = None
        """Who finds cached blocks; None: nothing is lent by name."""
        self._settings = settings
        self._on_end = on_end
        self._counters = counters
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._table = LeaseTable()
        self._sealed: dict[LeaseId, list[_Sums]] = {}
        """Checksums of each lease's blocks in order, part by part as they were promised."""
        self._changes: dict[LeaseId, asyncio.Future[None]] = {}
        """Done when that lease has more blocks, or is sealed, or over; where somebody waits for it."""
        self._aborts: dict[LeaseId, dict[int, Callable[[], None]]] = {}
        """How to end the reads that are under way, by their number."""
        self._read_number = 0
        self._loans: set[LeaseId] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def leases(self) -> int:
        return len(self._table)

    @property
    def pinned(self) -> int:
        """Blocks under at least one lease."""
        return self._table.pinned

    def open(self, blocks: Sequence[int]) -> LeaseId:
        """A lease without a clock, to be extended and sealed. Raises what `Transfer.grant` does."""
        lease = new_lease_id()
        self._open(lease, blocks)
        return lease

    def grows(self, lease: LeaseId) -> bool:
        """See `Transfer.grows`."""
        return self._table.grows(lease)

    def extend(self, lease: LeaseId, blocks: Sequence[int]) -> None:
        """The next positions of an open lease. ValueError when it is not open."""
        self._check(blocks)
        self._table.extend(lease, blocks)
        self._sum(lease, blocks)
        self._changed(lease)

    def seal(self, lease: LeaseId, seconds: float) -> None:
        """All blocks are there: the lease's clock starts. Nothing when it is not open."""
        self._table.seal(lease, self._loop.time(), seconds)
        self._arm()
        self._changed(lease)

    def release(self, lease: LeaseId) -> None:
        """End a lease, as soon as no read touches it; unknown and ended ones are none of our business."""
        # Reads of an open one have to end within the time of a lease, too.
        self._table.seal(lease, self._loop.time(), self._settings.lease_s)
        self._ended(self._table.release(lease))
        self._arm()
        self._changed(lease)

    def renew(self, lease: LeaseId) -> None:
        """A reader is still being looked for. One that is over stays so."""
        with contextlib.suppress(LeaseExpired):
            self.renewed(lease)

    def stop(self) -> None:
        """Nothing more is promised; leases stay until `abort`."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()

    def abort(self) -> None:
        """Every lease ends, now that no transport serves any more."""
        for lease in list(self._sealed):
            self._ended(self._table.release(lease, "aborted"))

    def validate(self, idle: bool) -> None:
        """See `Transfer.validate`."""
        self._table.validate()
        assert set(self._sealed) == {lease for lease in self._sealed if lease in self._table}
        assert len(self._sealed) == len(self._table), "sums of ended leases are kept"
        assert all(lease in self._table for lease in self._changes), "somebody waits for a lease that is over"
        assert sum(map(len, self._aborts.values())) == self._table.reads, "reads and their aborts differ"
        if idle:
            assert not self._loans, f"{len(self._loans)} loans stand"
            assert not len(self._table), f"{len(self._table)} leases are open"
            assert not self._table.pinned, f"{self._table.pinned} blocks are pinned"
            assert not self._aborts, "reads of own blocks are under way"

    # For `Serving`.

    async def begin_read(
        self, lease: LeaseId, positions: Sequence[int], abort: Callable[[], None]
    ) -> Reading:
        """See `Source.begin_read`."""
        try:
            blocks = self._table.begin_read(lease, positions, self._loop.time())
        except IndexError as error:
            self._counters["refused_reads"] += 1
            raise BadRequest(str(error), param="positions") from None
        except LeaseExpired:
            self._counters["refused_reads"] += 1
            raise
        self._read_number += 1
        number = self._read_number
        self._aborts.setdefault(lease, {})[number] = abort
        try:
            sums = await self._sums(lease, max(positions) + 1)
            # It may have been revoked meanwhile, and its reads aborted, before this one could be.
            self._table.check(lease, self._loop.time())
        except BaseException:
            self.end_read(lease, number)
            raise
        return Reading(number, lease, blocks, tuple(sums[position] for position in positions) if sums else ())

    def end_read(self, lease: LeaseId, number: int) -> str:
        """Why the lease did not stand until now; empty: it did."""
        aborts = self._aborts[lease]
        del aborts[number]
        if not aborts:
            del self._aborts[lease]
        why, ended = self._table.end_read(lease, self._loop.time())
        self._ended(ended)
        return why

    async def ready(self, lease: LeaseId, have: int, wait_s: float) -> tuple[int, bool]:
        """See `Source.ready`."""
        until = self._loop.time() + wait_s
        while True:
            count, more = self._table.ready(lease, self._loop.time())
            left = until - self._loop.time()
            if count > have or not more or left <= 0:
                return count, more
            change = self._changes.setdefault(lease, self._loop.create_future())
            await asyncio.wait({change}, timeout=left)

    def renewed(self, lease: LeaseId) -> float:
        """Seconds left, now that its reader has renewed it. Raises LeaseExpired."""
        left = self._table.renew(lease, self._loop.time(), self._settings.lease_s)
        self._arm()
        return left

    async def lend_cached(self, names: Sequence[bytes], have: int, limit_s: float) -> tuple[LeaseId, int]:
        """See `Source.borrow`."""
        lease = new_lease_id()
        blocks: Sequence[int] = ()
        if self.lend is not None and len(self._loans) < LOANS and not self._closed:
            self._loans.add(lease)
            try:
                blocks = await self.lend(lease, names, have)
            finally:
                if not blocks:
                    self._loans.discard(lease)
        if not blocks:
            self._counters["loans_empty"] += 1
            return LeaseId(""), 0
        try:
            self._open(lease, blocks)
        except TransferFailed:
            self._loans.discard(lease)
            self._on_end(lease, "aborted")
            raise
        self.seal(lease, min(limit_s, self._settings.lease_s))
        self._counters["loans"] += 1
        self._counters["loaned_blocks"] += len(blocks)
        return lease, len(blocks)

    def _open(self, lease: LeaseId, blocks: Sequence[int]) -> None:
        self._check(blocks)
        self._table.open(lease, blocks)
        self._sealed[lease] = []
        self._sum(lease, blocks)
        self._counters["leases_granted"] += 1

    def _check(self, blocks: Sequence[int]) -> None:
        if blocks and max(blocks) >= self.region.blocks:
            raise ValueError(f"block {max(blocks)} is outside the {self.region.blocks} of this pool")
        if self._closed:
            raise TransferFailed("this worker's transfer layer is closed")

    def _sum(self, lease: LeaseId, blocks: Sequence[int]) -> None:
        if not self._settings.checksum or not blocks:
            return
        sums: _Sums
        if self._threads is None or len(blocks) * self.region.block_bytes <= INLINE_BYTES:
            sums = checksums(self.region.array, blocks)
        else:
            sums = self._loop.run_in_executor(self._threads, checksums, self.region.array, tuple(blocks))
        self._sealed[lease].append(sums)

    async def _sums(self, lease: LeaseId, count: int) -> list[int]:
        """Of the first `count` blocks at least; none when they are switched off."""
        parts, sums = self._sealed[lease], list[int]()
        for number, part in enumerate(parts):
            if len(sums) >= count:
                break
            if isinstance(part, asyncio.Future):
                parts[number] = done = await asyncio.shield(part)
                sums += done
            else:
                sums += part
        return sums

    def _changed(self, lease: LeaseId) -> None:
        if (change := self._changes.pop(lease, None)) is not None:
            change.set_result(None)

    def _ended(self, ended: Ended | None) -> None:
        if ended is None:
            return
        self._counters[_ENDS.get(ended.why, "leases_released")] += 1
        for part in self._sealed.pop(ended.lease):
            if isinstance(part, asyncio.Future) and not part.done():
                # The thread may still read the blocks: harmless, as sums of an ended lease are never used.
                part.cancel()
        self._changed(ended.lease)
        if ended.lease in self._loans:
            self._loans.discard(ended.lease)
            self._counters["loans_expired"] += ended.why == "expired"
        self._on_end(ended.lease, ended.why)

    def _arm(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        due = self._table.next_expiry()
        if due is not None and not self._closed:
            self._sweep = self._loop.call_at(due, self._expire)

    def _expire(self) -> None:
        swept = self._table.expire(self._loop.time())
        for lease in swept.overdue:
            for abort in list(self._aborts.get(lease, {}).values()):
                abort()
        for ended in swept.ended:
            self._ended(ended)
        self._arm()


class Serving:
    """`Source` for the transports: what readers may ask of this life of this worker."""

    def __init__(
        self,
        grants: Grants,
        worker: WorkerId,
        incarnation: Incarnation,
        fingerprint: str,
        counters: Counter[str],
    ) -> None:
        self.region = grants.region
        self._grants = grants
        self._worker = worker
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._counters = counters

    def welcome(self, peer: Peer) -> None:
        if (peer.worker, peer.incarnation) != (self._worker, self._incarnation):
            raise LeaseExpired(
                f"{peer.worker} of incarnation {peer.incarnation} is gone; "
                f"here is another life of {self._worker}"
            )
        if peer.fingerprint != self._fingerprint:
            raise BadRequest(
                f"fingerprint: {peer.reader} has {peer.fingerprint}, {self._worker} has {self._fingerprint}",
                param="fingerprint",
            )
        if peer.block_bytes != self.region.block_bytes:
            raise BadRequest(
                f"block_bytes: {peer.reader} has {peer.block_bytes}, "
                f"{self._worker} has {self.region.block_bytes}",
                param="block_bytes",
            )

    async def begin_read(
        self, lease: LeaseId, positions: Sequence[int], abort: Callable[[], None]
    ) -> Reading:
        return await self._grants.begin_read(lease, positions, abort)

    def end_read(self, reading: Reading) -> None:
        why = self._grants.end_read(reading.lease, reading.number)
        self._counters["served_reads"] += 1
        self._counters["served_bytes"] += len(reading.blocks) * self.region.block_bytes
        if why:
            raise LeaseExpired(f"lease {reading.lease} did not stand until the last byte: {why}")

    async def ready(self, lease: LeaseId, have: int, wait_s: float) -> tuple[int, bool]:
        return await self._grants.ready(lease, have, wait_s)

    async def borrow(self, names: Sequence[bytes], have: int, limit_s: float) -> tuple[LeaseId, int]:
        return await self._grants.lend_cached(names, have, limit_s)

    def renew(self, lease: LeaseId) -> float:
        return self._grants.renewed(lease)

    def leave(self, lease: LeaseId) -> None:
        self._grants.release(lease)
