"""One worker's transfers: grants of its own blocks to readers, and pulls of others' blocks into its pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from fleet.errors import BadRequest, FleetError, LeaseExpired, TransferFailed
from fleet.handoff import Holder, KvTicket
from fleet.ids import Incarnation, LeaseId, WorkerId, new_lease_id
from fleet.metrics import SHORT_S, Buckets, Family, histogram
from fleet.tls import Tls
from kv_transfer.budget import Budget
from kv_transfer.lease import Ended, LeaseTable
from kv_transfer.loopback import LoopbackHub, LoopbackTransport
from kv_transfer.messages import BORROWED_BLOCKS
from kv_transfer.plan import Chunk, Pulled, plan_pull
from kv_transfer.pull_speed import PullSpeed
from kv_transfer.region import Region, checksums
from kv_transfer.settings import TransferSettings
from kv_transfer.transport import (
    INLINE_BYTES,
    ChecksumMismatch,
    Connection,
    Peer,
    Reading,
    Transport,
    finish,
)

logger = logging.getLogger(__name__)

COUNTERS = (
    "pulls",
    "pull_failures",
    "pulled_blocks",
    "pulled_bytes",
    "checksum_mismatches",
    "leases_granted",
    "leases_released",
    "leases_expired",
    "leases_aborted",
    "refused_reads",
    "served_reads",
    "served_bytes",
    "connections_opened",
    "loans",
    "loans_empty",
    "loans_expired",
    "loaned_blocks",
)

Lend = Callable[[LeaseId, Sequence[bytes], int], Awaitable[Sequence[int]]]
"""(lease, names of a chain of blocks from its first, how many to leave out) → the blocks that are cached here
in a row, but those left out, pinned until that lease ends. None: nothing is pinned. It may be cancelled or
raise a FleetError, and pins nothing then."""
LOANS = 256
"""Most leases on cached blocks at once."""

_ENDS = {"expired": "leases_expired", "aborted": "leases_aborted"}


class Transfer:
    """Both sides of KV transfer for one process. All methods are called on one event loop."""

    def __init__(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        fingerprint: str,
        region: Region,
        settings: TransferSettings,
        on_end: Callable[[LeaseId, str], None],
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.fingerprint = fingerprint
        self.region = region
        self.settings = settings
        self._on_end = on_end
        self.lend: Lend | None = None
        """Who finds cached blocks; None: nothing is lent by name."""
        self._loans: set[LeaseId] = set()
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="kv-transfer")
        self._threaded = True
        self._transports: list[Transport] = []
        self._table = LeaseTable()
        self._sealed: dict[LeaseId, list[_Sums]] = {}
        """Checksums of each lease's blocks in order, part by part as they were promised."""
        self._changes: dict[LeaseId, asyncio.Future[None]] = {}
        """Done when that lease has more blocks, or is sealed, or over; where somebody waits for it."""
        self._aborts: dict[LeaseId, dict[int, Callable[[], None]]] = {}
        self._read_number = 0
        self._sweep: asyncio.TimerHandle | None = None
        self._paths: dict[tuple[WorkerId, Incarnation, str], asyncio.Task[_Path]] = {}
        self._budgets: dict[tuple[WorkerId, Incarnation], Budget] = {}
        self._kept: Counter[LeaseId] = Counter()
        self._pulls = 0
        self._calm = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._counters: Counter[str] = Counter()
        self._pull_s = Buckets(SHORT_S)
        self._pull_speed = PullSpeed()
        self._closed = False

    @classmethod
    async def start(
        cls,
        *,
        worker: WorkerId,
        incarnation: Incarnation,
        fingerprint: str,
        region: Region,
        settings: TransferSettings,
        on_end: Callable[[LeaseId, str], None],
        loopback: LoopbackHub | None = None,
        tls: Tls | None = None,
    ) -> Transfer:
        """Open the transports that `settings` name (with a `loopback`, that one alone) and serve. With `tls`
        both ends of what leaves the host must prove themselves.

        `on_end(lease, why)` is called exactly once for each lease, when it is over and no read touches its
        blocks any more; it must not raise. With `auto`, a transport that this host lacks is left out;
        ValueError when one that was named, or every one, is not to be had.
        """
        transfer = cls(worker, incarnation, fingerprint, region, settings, on_end)
        if loopback is not None:
            transfer._threaded = False  # a virtual clock knows no threads
            address = f"loopback:{worker}/{incarnation}"
            transfer._transports.append(
                LoopbackTransport(loopback, address, _Serving(transfer), region, settings)
            )
            return transfer
        try:
            for name in settings.names():
                await transfer._open(name, tls)
        except BaseException:
            await transfer.close()
            raise
        if not transfer._transports:
            raise ValueError("transport: neither shm nor ucx can be used on this host")
        return transfer

    async def _open(self, name: str, tls: Tls | None) -> None:
        # Imported here: ucxx takes most of a second, and not every process moves KV.
        from kv_transfer.shm import ShmTransport
        from kv_transfer.ucx import UcxTransport, available

        source = _Serving(self)
        try:
            if name == "loopback":
                raise ValueError("transport: loopback needs a hub, inside one process")
            if name == "shm":
                self._transports.append(
                    await ShmTransport.start(source, self.region, self.settings, self._threads)
                )
            elif reason := await self._loop.run_in_executor(self._threads, available):
                raise ValueError(f"transport: {reason}")
            else:
                self._transports.append(
                    await UcxTransport.start(source, self.region, self.settings, self._threads, tls)
                )
        except (ValueError, OSError) as error:
            if self.settings.transport != "auto":
                raise
            logger.warning("KV transfer goes without %s: %s", name, error)

    @property
    def address(self) -> str:
        """All transports a reader may choose from, the best first; for the card and tickets."""
        return ",".join(transport.address for transport in self._transports)

    @property
    def leases(self) -> int:
        return len(self._table)

    @property
    def pinned(self) -> int:
        """Own blocks under at least one lease."""
        return self._table.pinned

    @property
    def pull_bytes_s(self) -> float | None:
        """How fast KV comes here; None: unknown, or long ago."""
        return self._pull_speed.bytes_s(self._loop.time())

    def families(self) -> list[Family]:
        """Beside `counters` for Prometheus."""
        name, help = "pdfleet_worker_pull_seconds", "Pulls of KV that came whole and proven."
        return [histogram(name, help, (), {(): self._pull_s})]

    def counters(self) -> dict[str, int]:
        """Totals since start, all keys always there."""
        return {name: self._counters[name] for name in COUNTERS}

    # The source's side.

    def grant(self, blocks: Sequence[int], tokens: int) -> KvTicket:
        """Promise that these blocks stay as they are; the ticket is what a reader needs.

        The bytes must be final. ValueError for blocks outside the region or repeated; TransferFailed when
        closed.
        """
        ticket = self.open(blocks, tokens)
        self.seal(ticket.lease)
        return ticket

    def open(self, blocks: Sequence[int], tokens: int) -> KvTicket:
        """Like `grant` while the later ones of all blocks that `tokens` need are still being computed: they
        follow by `extend`. Until `seal` the lease has no clock, and lasts until it is released."""
        lease = new_lease_id()
        self._open_lease(lease, blocks)
        return KvTicket(
            worker=self.worker,
            incarnation=self.incarnation,
            address=self.address,
            lease=lease,
            fingerprint=self.fingerprint,
            tokens=tokens,
            lease_s=self.settings.lease_s,
        )

    def _open_lease(self, lease: LeaseId, blocks: Sequence[int]) -> None:
        self._check(blocks)
        self._table.open(lease, blocks)
        self._sealed[lease] = []
        self._sum(lease, blocks)
        self._counters["leases_granted"] += 1

    def extend(self, lease: LeaseId, blocks: Sequence[int]) -> None:
        """These are final too: the next positions of an open lease. ValueError when it is not open."""
        self._check(blocks)
        self._table.extend(lease, blocks)
        self._sum(lease, blocks)
        self._changed(lease)

    def seal(self, lease: LeaseId) -> None:
        """All blocks are there: the lease's clock starts. Nothing when it is not open."""
        self._table.seal(lease, self._loop.time(), self.settings.lease_s)
        self._arm()
        self._changed(lease)

    async def _lend_cached(self, names: Sequence[bytes], have: int, limit_s: float) -> tuple[LeaseId, int]:
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
            self._open_lease(lease, blocks)
        except TransferFailed:
            self._loans.discard(lease)
            self._on_end(lease, "aborted")
            raise
        self._table.seal(lease, self._loop.time(), min(limit_s, self.settings.lease_s))
        self._arm()
        self._counters["loans"] += 1
        self._counters["loaned_blocks"] += len(blocks)
        return lease, len(blocks)

    def _check(self, blocks: Sequence[int]) -> None:
        if blocks and max(blocks) >= self.region.blocks:
            raise ValueError(f"block {max(blocks)} is outside the {self.region.blocks} of this pool")
        if self._closed:
            raise TransferFailed("this worker's transfer layer is closed")

    def _sum(self, lease: LeaseId, blocks: Sequence[int]) -> None:
        if not self.settings.checksum or not blocks:
            return
        sums: _Sums
        if not self._threaded or len(blocks) * self.region.block_bytes <= INLINE_BYTES:
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

    def release(self, lease: LeaseId) -> None:
        """End a lease, as soon as no read touches it; unknown and ended ones are none of our business."""
        # Reads of an open one have to end within the time of a lease, too.
        self._table.seal(lease, self._loop.time(), self.settings.lease_s)
        self._ended(self._table.release(lease))
        self._arm()
        self._changed(lease)

    def renew(self, lease: LeaseId) -> None:
        """A reader is still being looked for. One that is over stays so."""
        with contextlib.suppress(LeaseExpired):
            self._table.renew(lease, self._loop.time(), self.settings.lease_s)
            self._arm()

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

    # The reader's side.

    def keep(self, ticket: KvTicket) -> contextlib.AbstractAsyncContextManager[None]:
        """Renew the lease at its source until left, from now on, also while the pull waits for its turn.
        Leaving tells the source that this reader is done; the source then ends the lease. Leaving by an
        exception tells it nothing: another reader may want what this one could not use."""
        return self._keep(ticket)

    @contextlib.asynccontextmanager
    async def _keep(self, ticket: KvTicket) -> AsyncGenerator[None]:
        self._kept[ticket.lease] += 1
        renewing = asyncio.create_task(self._renew(ticket))
        done = False
        try:
            yield
            done = True
        finally:
            renewing.cancel()
            self._kept[ticket.lease] -= 1
            if not self._kept[ticket.lease]:
                del self._kept[ticket.lease]
                if done:
                    self._spawn(self._leave(ticket))

    async def _renew(self, ticket: KvTicket) -> None:
        pause = max(0.01, min(ticket.lease_s, self.settings.lease_s) / 3)
        while True:
            try:
                async with asyncio.timeout(pause):
                    connection = (await self._path(ticket)).connection
                    await connection.renew(ticket.lease)
            except (LeaseExpired, BadRequest) as error:
                logger.info("lease %s of %s is not renewed any more: %s", ticket.lease, ticket.worker, error)
                return
            except (TransferFailed, TimeoutError):
                pass  # it may be only slow; the lease's end is the judge
            await asyncio.sleep(pause)

    async def _leave(self, ticket: KvTicket) -> None:
        with contextlib.suppress(FleetError, TimeoutError):
            async with asyncio.timeout(self.settings.connect_s):
                connection = (await self._path(ticket)).connection
                connection.leave(ticket.lease)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def ready(self, ticket: KvTicket, have: int) -> int:
        """How many blocks of a lease can be pulled, as soon as they are more than `have` or no more will
        come. Holds up no pull.

        Raises LeaseExpired when the lease is over, TransferFailed when its source is gone, or has said
        nothing for the time of a lease.
        """
        patience = min(ticket.lease_s, self.settings.lease_s)
        while True:
            try:
                async with asyncio.timeout(patience):
                    connection = (await self._path(ticket)).connection
                    # Asked again and again: no answer is a sign that nobody is there.
                    count, more = await connection.ready(ticket.lease, have, patience / 3)
            except TimeoutError:
                raise TransferFailed(f"{ticket.worker} did not answer for {patience:.3f} s") from None
            if count > have or not more:
                return count

    def borrow(
        self, holder: Holder, names: Sequence[bytes], have: int, limit_s: float
    ) -> contextlib.AbstractAsyncContextManager[tuple[KvTicket, int]]:
        """A lease on blocks that another worker caches, asked for by their whole names, and how many: those
        after the first `have` of `names`, as many in a row as it still has and can spare, one at least. The
        first is at position 0. It lasts for `limit_s`, or until left.

        Raises LeaseExpired, TransferFailed (also when it holds none of them, or does not answer within
        `limit_s`), BadRequest.
        """
        return self._borrow(holder, names[:BORROWED_BLOCKS], have, limit_s)

    @contextlib.asynccontextmanager
    async def _borrow(
        self, holder: Holder, names: Sequence[bytes], have: int, limit_s: float
    ) -> AsyncGenerator[tuple[KvTicket, int]]:
        ticket = KvTicket(
            worker=holder.worker,
            incarnation=holder.incarnation,
            address=holder.address,
            lease=LeaseId(""),
            fingerprint=holder.fingerprint,
            tokens=0,  # Blocks are what counts.
            lease_s=min(limit_s, self.settings.lease_s),
        )
        self._check_fingerprint(ticket)
        try:
            async with asyncio.timeout(limit_s):
                connection = (await self._path(ticket)).connection
                lease, blocks = await connection.borrow(names, have, ticket.lease_s)
        except TimeoutError:
            # Granted meanwhile, it is given back when the answer comes, or ends there by itself.
            raise TransferFailed(f"{holder.worker} did not answer for {limit_s:.3f} s") from None
        if not blocks:
            raise TransferFailed(f"{holder.worker} has none of these blocks to spare")
        ticket = replace(ticket, lease=lease)
        try:
            if blocks > len(names) - have:
                raise TransferFailed(f"{holder.worker} lends {blocks} blocks, more than were asked for")
            yield ticket, blocks
        finally:
            # Nobody else reads by it.
            self._spawn(self._leave(ticket))

    async def pull(self, ticket: KvTicket, pairs: Sequence[tuple[int, int]], deadline_s: float) -> Pulled:
        """Bring blocks of a lease into own blocks: `pairs` are (position in the lease, own block).

        Returns only when the data is whole, checksummed, and the lease was proven to stand after the last
        byte. Raises LeaseExpired, TransferFailed, BadRequest (`param="fingerprint"` before any byte moved).
        When it has returned, raised or been cancelled, no later write into the own blocks can happen; for
        that it may outlast its deadline by `fence_s`. Without `keep`, the lease's rest bounds the deadline.
        """
        if self._closed:
            raise TransferFailed("this worker's transfer layer is closed")
        started = self._loop.time()
        self._pulls += 1
        try:
            pulled = await self._pull(ticket, pairs, deadline_s, started)
        except BaseException as error:
            self._counters["pull_failures"] += 1
            if isinstance(error, ChecksumMismatch):
                self._counters["checksum_mismatches"] += 1
            raise
        finally:
            self._pulls -= 1
            self._calm.set()
        self._counters["pulls"] += 1
        self._counters["pulled_blocks"] += pulled.blocks
        self._counters["pulled_bytes"] += pulled.bytes
        self._pull_s.observe(pulled.seconds)
        self._pull_speed.add(pulled.bytes, pulled.seconds, self._loop.time())
        return pulled

    async def _pull(
        self, ticket: KvTicket, pairs: Sequence[tuple[int, int]], deadline_s: float, started: float
    ) -> Pulled:
        self._check_fingerprint(ticket)
        chunks = plan_pull(
            pairs,
            own_blocks=self.region.blocks,
            block_bytes=self.region.block_bytes,
            chunk_bytes=self.settings.chunk_bytes,
        )
        if ticket.lease not in self._kept:
            deadline_s = min(deadline_s, ticket.lease_s)
        try:
            async with asyncio.timeout(deadline_s):
                path = await self._path(ticket)
                await self._read_all(path.connection, ticket, chunks)
        except TimeoutError:
            raise TransferFailed(
                f"{ticket.worker} did not deliver {len(pairs)} blocks within {deadline_s:.3f} s"
            ) from None
        seconds = self._loop.time() - started
        size = len(pairs) * self.region.block_bytes
        return Pulled(len(pairs), size, seconds, path.transport, f"{path.transport}: {path.why}")

    def _check_fingerprint(self, ticket: KvTicket) -> None:
        if ticket.fingerprint != self.fingerprint:
            raise BadRequest(
                f"fingerprint: {ticket.worker} has {ticket.fingerprint}, "
                f"{self.worker} has {self.fingerprint}",
                param="fingerprint",
            )

    async def _read_all(self, connection: Connection, ticket: KvTicket, chunks: Sequence[Chunk]) -> None:
        key = (ticket.worker, ticket.incarnation)
        budget = self._budgets.setdefault(key, Budget(self.settings.in_flight_bytes))
        budget.users += 1
        try:
            if len(chunks) == 1:
                await self._read(connection, ticket.lease, chunks[0], budget)
                return
            # Not a TaskGroup: until Python 3.13 it can swallow a cancel that meets a failure.
            reads = [
                asyncio.create_task(self._read(connection, ticket.lease, chunk, budget)) for chunk in chunks
            ]
            try:
                if reads:
                    await asyncio.wait(reads, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for read in reads:
                    read.cancel()
                await finish(_all_ended(reads))
            # One reason is enough: the others are its consequence.
            for read in reads:
                if not read.cancelled():
                    read.result()
        finally:
            budget.users -= 1
            if not budget.users:
                self._budgets.pop(key, None)

    async def _read(self, connection: Connection, lease: LeaseId, chunk: Chunk, budget: Budget) -> None:
        size = len(chunk.positions) * self.region.block_bytes
        await budget.take(size)
        try:
            await connection.read(lease, chunk)
        finally:
            budget.give(size)

    async def _path(self, ticket: KvTicket) -> _Path:
        """An open connection to this life of the source, shared by all pulls."""
        key = (ticket.worker, ticket.incarnation, ticket.address)
        while not self._closed:
            task = self._paths.get(key)
            if task is None:
                task = self._paths[key] = asyncio.create_task(self._connect(ticket))
                task.add_done_callback(lambda done: self._forget(key, done))
            try:
                path = await asyncio.shield(task)
            except asyncio.CancelledError:
                own = asyncio.current_task()
                if task.cancelled() and not (own and own.cancelling()):
                    break  # by close, not this pull
                raise
            if not path.connection.closed:
                return path
            self._paths.pop(key, None)
        raise TransferFailed("this worker's transfer layer is closed")

    def _forget(self, key: tuple[WorkerId, Incarnation, str], task: asyncio.Task[_Path]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._paths.get(key) is task:
            del self._paths[key]

    async def _connect(self, ticket: KvTicket) -> _Path:
        peer = Peer(self.worker, ticket.worker, ticket.incarnation, self.fingerprint, self.region.block_bytes)
        self._drop_closed()
        reasons: list[str] = []
        for transport in self._transports:
            address = next((part for part in ticket.address.split(",") if transport.reaches(part)), None)
            if address is None:
                reasons.append(f"{transport.name} does not reach it")
                continue
            try:
                connection = await transport.connect(address, peer)
            except TransferFailed as error:
                reasons.append(f"{transport.name}: {error.message}")
                continue
            self._counters["connections_opened"] += 1
            why = "; ".join(reasons) or "the best that both sides have"
            return _Path(connection, transport.name, why)
        raise TransferFailed(f"no path to {ticket.worker} at {ticket.address}: {'; '.join(reasons)}")

    def _drop_closed(self) -> None:
        """Forget paths to peers that are gone, so that restarts of peers leave nothing behind."""
        for key, task in list(self._paths.items()):
            made = task.done() and not task.cancelled() and task.exception() is None
            if made and task.result().connection.closed:
                del self._paths[key]

    def validate(self, idle: bool = False) -> None:
        """AssertionError on any broken invariant; idle: nothing leased, read, pulled or kept either."""
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
            assert not self._pulls, f"{self._pulls} pulls are under way"
            assert not self._kept, f"{len(self._kept)} leases are being kept"
            assert not self._budgets, "bytes are in flight"

    async def close(self) -> None:
        """Fence and end all: pulls fail, peers' reads end, then every lease ends as `aborted`. Idempotent."""
        if not self._closed:
            self._closed = True
            await finish(self._close())

    async def _close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for task in list(self._tasks):
            task.cancel()
        for path in list(self._paths.values()):
            path.cancel()
            await asyncio.wait({path})
            if not path.cancelled() and path.exception() is None:
                await path.result().connection.close()
        while self._pulls:
            self._calm.clear()
            await self._calm.wait()
        for transport in self._transports:
            await transport.close()
        for lease in list(self._sealed):
            self._ended(self._table.release(lease, "aborted"))
        self._threads.shutdown(wait=False)


_Sums = tuple[int, ...] | asyncio.Future[tuple[int, ...]]
"""Checksums of blocks, or the thread that works them out."""


@dataclass(frozen=True, slots=True)
class _Path:
    connection: Connection
    transport: str
    why: str
    """Why this transport and not a better one."""


async def _all_ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks)


class _Serving:
    """`Source` for the transports, so that what they may call is not what workers may call."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self.region = transfer.region

    def welcome(self, peer: Peer) -> None:
        own = self._transfer
        if (peer.worker, peer.incarnation) != (own.worker, own.incarnation):
            raise LeaseExpired(
                f"{peer.worker} of incarnation {peer.incarnation} is gone; "
                f"here is another life of {own.worker}"
            )
        if peer.fingerprint != own.fingerprint:
            raise BadRequest(
                f"fingerprint: {peer.reader} has {peer.fingerprint}, {own.worker} has {own.fingerprint}",
                param="fingerprint",
            )
        if peer.block_bytes != own.region.block_bytes:
            raise BadRequest(
                f"block_bytes: {peer.reader} has {peer.block_bytes}, "
                f"{own.worker} has {own.region.block_bytes}",
                param="block_bytes",
            )

    async def begin_read(
        self, lease: LeaseId, positions: Sequence[int], abort: Callable[[], None]
    ) -> Reading:
        own = self._transfer
        try:
            blocks = own._table.begin_read(lease, positions, own._loop.time())
        except IndexError as error:
            own._counters["refused_reads"] += 1
            raise BadRequest(str(error), param="positions") from None
        except LeaseExpired:
            own._counters["refused_reads"] += 1
            raise
        own._read_number += 1
        number = own._read_number
        own._aborts.setdefault(lease, {})[number] = abort
        try:
            sums = await own._sums(lease, max(positions) + 1)
            # It may have been revoked meanwhile, and its reads aborted, before this one could be.
            own._table.check(lease, own._loop.time())
        except BaseException:
            self._end(lease, number)
            raise
        return Reading(number, lease, blocks, tuple(sums[position] for position in positions) if sums else ())

    def _end(self, lease: LeaseId, number: int) -> str:
        own = self._transfer
        aborts = own._aborts[lease]
        del aborts[number]
        if not aborts:
            del own._aborts[lease]
        why, ended = own._table.end_read(lease, own._loop.time())
        own._ended(ended)
        return why

    def end_read(self, reading: Reading) -> None:
        why = self._end(reading.lease, reading.number)
        counters = self._transfer._counters
        counters["served_reads"] += 1
        counters["served_bytes"] += len(reading.blocks) * self.region.block_bytes
        if why:
            raise LeaseExpired(f"lease {reading.lease} did not stand until the last byte: {why}")

    async def ready(self, lease: LeaseId, have: int, wait_s: float) -> tuple[int, bool]:
        own = self._transfer
        until = own._loop.time() + wait_s
        while True:
            count, more = own._table.ready(lease, own._loop.time())
            left = until - own._loop.time()
            if count > have or not more or left <= 0:
                return count, more
            change = own._changes.setdefault(lease, own._loop.create_future())
            await asyncio.wait({change}, timeout=left)

    async def borrow(self, names: Sequence[bytes], have: int, limit_s: float) -> tuple[LeaseId, int]:
        return await self._transfer._lend_cached(names, have, limit_s)

    def renew(self, lease: LeaseId) -> float:
        own = self._transfer
        left = own._table.renew(lease, own._loop.time(), own.settings.lease_s)
        own._arm()
        return left

    def leave(self, lease: LeaseId) -> None:
        self._transfer.release(lease)
