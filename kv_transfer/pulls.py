"""Others' blocks, brought into a worker's own pool: leases kept, paths to their sources, reads, the proof."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fleet.errors import BadRequest, FleetError, LeaseExpired, TransferFailed
from fleet.handoff import Holder, KvTicket
from fleet.ids import Incarnation, LeaseId, WorkerId
from fleet.metrics import SHORT_S, Buckets
from kv_transfer.budget import Budget
from kv_transfer.messages import BORROWED_BLOCKS
from kv_transfer.plan import Chunk, Pulled, plan_pull
from kv_transfer.pull_speed import PullSpeed
from kv_transfer.region import Region
from kv_transfer.settings import TransferSettings
from kv_transfer.transport import ChecksumMismatch, Connection, Peer, Transport, finish

logger = logging.getLogger(__name__)


class Pulls:
    """The reader's side. On one event loop."""

    def __init__(
        self,
        worker: WorkerId,
        fingerprint: str,
        region: Region,
        settings: TransferSettings,
        transports: Sequence[Transport],
        counters: Counter[str],
    ) -> None:
        """`transports`: the best first; looked at when a path is made."""
        self.seconds = Buckets(SHORT_S)
        """Of pulls that came whole and proven."""
        self._worker = worker
        self._fingerprint = fingerprint
        self._region = region
        self._settings = settings
        self._transports = transports
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._paths: dict[tuple[WorkerId, Incarnation, str], asyncio.Task[_Path]] = {}
        self._budgets: dict[tuple[WorkerId, Incarnation], Budget] = {}
        self._kept: Counter[LeaseId] = Counter()
        self._pulls = 0
        self._calm = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._speed = PullSpeed()
        self._closed = False

    @property
    def bytes_s(self) -> float | None:
        """How fast KV comes here; None: unknown, or long ago."""
        return self._speed.bytes_s(self._loop.time())

    @contextlib.asynccontextmanager
    async def keep(self, ticket: KvTicket) -> AsyncGenerator[None]:
        """See `Transfer.keep`."""
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
        pause = max(0.01, min(ticket.lease_s, self._settings.lease_s) / 3)
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
            async with asyncio.timeout(self._settings.connect_s):
                connection = (await self._path(ticket)).connection
                connection.leave(ticket.lease)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def ready(self, ticket: KvTicket, have: int) -> int:
        """See `Transfer.ready`."""
        patience = min(ticket.lease_s, self._settings.lease_s)
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

    @contextlib.asynccontextmanager
    async def borrow(
        self, holder: Holder, names: Sequence[bytes], have: int, limit_s: float
    ) -> AsyncGenerator[tuple[KvTicket, int]]:
        """See `Transfer.borrow`."""
        names = names[:BORROWED_BLOCKS]
        if have >= BORROWED_BLOCKS:  # Asked nevertheless, the source would end the path.
            raise TransferFailed(
                f"{have} blocks are here; only of the first {BORROWED_BLOCKS} are some brought"
            )
        ticket = KvTicket(
            worker=holder.worker,
            incarnation=holder.incarnation,
            address=holder.address,
            lease=LeaseId(""),
            fingerprint=holder.fingerprint,
            tokens=0,  # Blocks are what counts.
            lease_s=min(limit_s, self._settings.lease_s),
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
        """See `Transfer.pull`."""
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
        self.seconds.observe(pulled.seconds)
        self._speed.add(pulled.bytes, pulled.seconds, self._loop.time())
        return pulled

    async def _pull(
        self, ticket: KvTicket, pairs: Sequence[tuple[int, int]], deadline_s: float, started: float
    ) -> Pulled:
        self._check_fingerprint(ticket)
        chunks = plan_pull(
            pairs,
            own_blocks=self._region.blocks,
            block_bytes=self._region.block_bytes,
            chunk_bytes=self._settings.chunk_bytes,
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
        size = len(pairs) * self._region.block_bytes
        return Pulled(len(pairs), size, seconds, path.transport, f"{path.transport}: {path.why}")

    def _check_fingerprint(self, ticket: KvTicket) -> None:
        if ticket.fingerprint != self._fingerprint:
            raise BadRequest(
                f"fingerprint: {ticket.worker} has {ticket.fingerprint}, "
                f"{self._worker} has {self._fingerprint}",
                param="fingerprint",
            )

    async def _read_all(self, connection: Connection, ticket: KvTicket, chunks: Sequence[Chunk]) -> None:
        key = (ticket.worker, ticket.incarnation)
        budget = self._budgets.setdefault(key, Budget(self._settings.in_flight_bytes))
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
        size = len(chunk.positions) * self._region.block_bytes
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
            # Another pull that waited for the same one may have begun the next already.
            if self._paths.get(key) is task:
                del self._paths[key]
        raise TransferFailed("this worker's transfer layer is closed")

    def _forget(self, key: tuple[WorkerId, Incarnation, str], task: asyncio.Task[_Path]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._paths.get(key) is task:
            del self._paths[key]

    async def _connect(self, ticket: KvTicket) -> _Path:
        peer = Peer(
            self._worker, ticket.worker, ticket.incarnation, self._fingerprint, self._region.block_bytes
        )
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

    def validate(self, idle: bool) -> None:
        """See `Transfer.validate`."""
        if idle:
            assert not self._pulls, f"{self._pulls} pulls are under way"
            assert not self._kept, f"{len(self._kept)} leases are being kept"
            assert not self._budgets, "bytes are in flight"

    def stop(self) -> None:
        """No pull begins any more."""
        self._closed = True

    async def close(self) -> None:
        """Those under way fail; returns when none is left."""
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


@dataclass(frozen=True, slots=True)
class _Path:
    connection: Connection
    transport: str
    why: str
    """Why this transport and not a better one."""


async def _all_ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks)
