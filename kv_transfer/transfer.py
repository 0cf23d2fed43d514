"""One worker's transfers: grants of its own blocks to readers, and pulls of others' blocks into its pool."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager

from fleet.handoff import Holder, KvTicket
from fleet.ids import Incarnation, LeaseId, WorkerId
from fleet.metrics import Family, histogram
from fleet.tls import Tls
from kv_transfer.grants import Grants, Lend, Serving
from kv_transfer.loopback import LoopbackHub, LoopbackTransport
from kv_transfer.plan import Pulled
from kv_transfer.pulls import Pulls
from kv_transfer.region import Region
from kv_transfer.settings import TransferSettings
from kv_transfer.transport import Transport, finish

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
        threaded: bool = True,
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.fingerprint = fingerprint
        self.region = region
        self.settings = settings
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="kv-transfer")
        self._transports: list[Transport] = []
        self._counters: Counter[str] = Counter()
        self._grants = Grants(region, settings, on_end, self._counters, self._threads if threaded else None)
        self._serving = Serving(self._grants, worker, incarnation, fingerprint, self._counters)
        self._pulls = Pulls(worker, fingerprint, region, settings, self._transports, self._counters)
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
        # A virtual clock knows no threads.
        threaded = loopback is None
        transfer = cls(worker, incarnation, fingerprint, region, settings, on_end, threaded)
        if loopback is not None:
            address = f"loopback:{worker}/{incarnation}"
            transfer._transports.append(
                LoopbackTransport(loopback, address, transfer._serving, region, settings)
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

        source, loop = self._serving, asyncio.get_running_loop()
        try:
            if name == "loopback":
                raise ValueError("transport: loopback needs a hub, inside one process")
            if name == "shm":
                self._transports.append(
                    await ShmTransport.start(source, self.region, self.settings, self._threads)
                )
            elif reason := await loop.run_in_executor(self._threads, available):
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
        return self._grants.leases

    @property
    def pinned(self) -> int:
        """Own blocks under at least one lease."""
        return self._grants.pinned

    @property
    def lend(self) -> Lend | None:
        """Who finds cached blocks; None: nothing is lent by name."""
        return self._grants.lend

    @lend.setter
    def lend(self, lend: Lend | None) -> None:
        self._grants.lend = lend

    @property
    def pull_bytes_s(self) -> float | None:
        """How fast KV comes here; None: unknown, or long ago."""
        return self._pulls.bytes_s

    def families(self) -> list[Family]:
        """Beside `counters` for Prometheus."""
        name, help = "pdfleet_worker_pull_seconds", "Pulls of KV that came whole and proven."
        return [histogram(name, help, (), {(): self._pulls.seconds})]

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
        lease = self._grants.open(blocks)
        return KvTicket(
            worker=self.worker,
            incarnation=self.incarnation,
            address=self.address,
            lease=lease,
            fingerprint=self.fingerprint,
            tokens=tokens,
            lease_s=self.settings.lease_s,
        )

    def grows(self, lease: LeaseId) -> bool:
        """Whether it is open. A reader may have ended it, which is over only when its reads are."""
        return self._grants.grows(lease)

    def extend(self, lease: LeaseId, blocks: Sequence[int]) -> None:
        """These are final too: the next positions of an open lease. ValueError when it is not open."""
        self._grants.extend(lease, blocks)

    def seal(self, lease: LeaseId) -> None:
        """All blocks are there: the lease's clock starts. Nothing when it is not open."""
        self._grants.seal(lease, self.settings.lease_s)

    def release(self, lease: LeaseId) -> None:
        """End a lease, as soon as no read touches it; unknown and ended ones are none of our business."""
        self._grants.release(lease)

    def renew(self, lease: LeaseId) -> None:
        """A reader is still being looked for. One that is over stays so."""
        self._grants.renew(lease)

    # The reader's side.

    def keep(self, ticket: KvTicket) -> AbstractAsyncContextManager[None]:
        """Renew the lease at its source until left, from now on, also while the pull waits for its turn.
        Leaving tells the source that this reader is done; the source then ends the lease. Leaving by an
        exception tells it nothing: another reader may want what this one could not use."""
        return self._pulls.keep(ticket)

    async def ready(self, ticket: KvTicket, have: int) -> int:
        """How many blocks of a lease can be pulled, as soon as they are more than `have` or no more will
        come. Holds up no pull.

        Raises LeaseExpired when the lease is over, TransferFailed when its source is gone, or has said
        nothing for the time of a lease.
        """
        return await self._pulls.ready(ticket, have)

    def borrow(
        self, holder: Holder, names: Sequence[bytes], have: int, limit_s: float
    ) -> AbstractAsyncContextManager[tuple[KvTicket, int]]:
        """A lease on blocks that another worker caches, asked for by their whole names, and how many: those
        after the first `have` of `names`, as many in a row as it still has and can spare, one at least. The
        first is at position 0. It lasts for `limit_s`, or until left.

        Raises LeaseExpired, TransferFailed (also when it holds none of them, or does not answer within
        `limit_s`), BadRequest.
        """
        return self._pulls.borrow(holder, names, have, limit_s)

    async def pull(self, ticket: KvTicket, pairs: Sequence[tuple[int, int]], deadline_s: float) -> Pulled:
        """Bring blocks of a lease into own blocks: `pairs` are (position in the lease, own block).

        Returns only when the data is whole, checksummed, and the lease was proven to stand after the last
        byte. Raises LeaseExpired, TransferFailed, BadRequest (`param="fingerprint"` before any byte moved).
        When it has returned, raised or been cancelled, no later write into the own blocks can happen; for
        that it may outlast its deadline by `fence_s`. Without `keep`, the lease's rest bounds the deadline.
        """
        return await self._pulls.pull(ticket, pairs, deadline_s)

    def validate(self, idle: bool = False) -> None:
        """AssertionError on any broken invariant; idle: nothing leased, read, pulled or kept either."""
        self._grants.validate(idle)
        self._pulls.validate(idle)

    async def close(self) -> None:
        """Fence and end all: pulls fail, peers' reads end, then every lease ends as `aborted`. Idempotent."""
        if not self._closed:
            self._closed = True
            self._grants.stop()
            self._pulls.stop()
            await finish(self._close())

    async def _close(self) -> None:
        await self._pulls.close()
        for transport in self._transports:
            await transport.close()
        self._grants.abort()
        self._threads.shutdown(wait=False)
