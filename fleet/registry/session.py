"""Leases that heal themselves and watches that never go blind, over any store.

A lease is renewed at a third of its time, and after a failure halfway to its end, again and again, so that
an answer in time is never missed for want of asking. Each renewal also asks which keys stand: a lease that
was revoked, expired or forgotten is taken anew after a random moment (a whole fleet must not come at once),
a key that vanished is put again. Nothing here ever ends a process: a lost registry costs news, not service.

A watch lists all keys, follows the changes from there, and lists again whenever the stream breaks for any
reason, so that no deletion in a gap is missed and compaction needs no case of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from fleet.errors import Unavailable
from fleet.registry import View
from fleet.registry.election import StandingElection
from fleet.registry.limits import CALL_LIMIT_S
from fleet.registry.store import Compacted, Condition, Entry, LeaseGone, Store, StoreAway

log = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSE_LIMIT_S = 1.0
_RETRY_FIRST_S = 0.1
_RETRY_MOST_S = 1.0
_JITTER = 0.1
"""Longest random wait before a lost lease is taken anew, as a part of its time."""


class StoreRegistry:
    """A `Registry` over a store. `chance` draws from [0, 1): waits are spread by it."""

    def __init__(self, store: Store, chance: Callable[[], float]) -> None:
        self._store = store
        self._chance = chance
        self._leases: list[HealingLease] = []
        self._elections: list[StandingElection] = []
        self._closed = False

    async def lease(self, ttl_s: float) -> HealingLease:
        lease = HealingLease(self._store, ttl_s, self._chance)
        self._leases.append(lease)
        return lease

    async def put(self, key: str, value: bytes) -> None:
        await self._asked(self._store.put(key, value))

    async def get(self, key: str) -> bytes | None:
        return await self._asked(self._store.get(key))

    async def entry(self, key: str) -> Entry | None:
        return await self._asked(self._store.entry(key))

    async def put_if(self, conditions: Sequence[Condition], puts: Mapping[str, bytes]) -> int | None:
        return await self._asked(self._store.put_if(conditions, puts))

    async def elect(self, key: str, value: bytes, ttl_s: float) -> StandingElection:
        election = StandingElection(self._store, key, value, ttl_s)
        self._elections.append(election)
        return election

    async def delete(self, key: str) -> None:
        await self._asked(self._store.delete(key))

    async def watch(self, prefix: str) -> AsyncIterator[View]:
        """See `Registry.watch`. A view is `emptied` when more than half of the keys, and at least two,
        vanished at once, or when any did while the store lost its data (its revision went back, or it is
        another store). Then the registry is the suspect, not the keys' owners."""
        values: dict[str, bytes] = {}
        revision, cluster = 0, 0
        live = True
        retry_s = _RETRY_FIRST_S
        while not self._closed:
            try:
                async with asyncio.timeout(CALL_LIMIT_S):
                    listing = await self._store.list(prefix)
                lost_data = listing.revision < revision or (cluster != 0 and listing.cluster != cluster)
                emptied = _emptied(values, listing.values, lost_data)
                if lost_data or emptied:
                    log.warning(
                        "%s: the registry %s; %d of %d keys vanished with it",
                        prefix,
                        "lost its data" if lost_data else "was emptied",
                        len(values.keys() - listing.values.keys()),
                        len(values),
                    )
                values, revision, cluster = listing.values, listing.revision, listing.cluster
                live, retry_s = True, _RETRY_FIRST_S
                yield View(dict(values), emptied=emptied)
                async with contextlib.aclosing(self._store.watch(prefix, revision + 1)) as stream:
                    async for news in stream:
                        before, revision = dict(values), news.revision
                        for change in news.changes:
                            if change.value is None:
                                values.pop(change.key, None)
                            else:
                                values[change.key] = change.value
                        yield View(dict(values), emptied=_emptied(before, values, False))
            except Compacted:
                log.info("%s: history compacted; listing again", prefix)
            except (StoreAway, TimeoutError) as error:
                if live:
                    why = _told(error)
                    log.warning("%s: the registry is away (%s); going on with what is known", prefix, why)
                    live = False
                yield View(dict(values), live=False)
                await self._store.renew()
                await asyncio.sleep(retry_s * (0.5 + self._chance() / 2))
                retry_s = min(retry_s * 2, _RETRY_MOST_S)

    async def close(self) -> None:
        """Revokes its leases and leaves; idempotent."""
        self._closed = True
        for election in self._elections:
            await election.close()
        for lease in self._leases:
            await lease.close()
        await self._store.close()

    async def _asked(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                return await call
        except (StoreAway, LeaseGone, TimeoutError) as error:
            await self._store.renew()
            raise Unavailable(f"the registry cannot be reached: {_told(error)}") from error


def _told(error: Exception) -> str:
    return str(error) or "no answer"


def _emptied(before: dict[str, bytes], after: dict[str, bytes], lost_data: bool) -> bool:
    gone = len(before.keys() - after.keys())
    return (gone > 0 and lost_data) or (gone >= 2 and gone * 2 > len(before))


class HealingLease:
    """A `Lease` over a store. All of its work is done by one task."""

    def __init__(self, store: Store, ttl_s: float, chance: Callable[[], float]) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._chance = chance
        self._wanted: dict[str, bytes] = {}
        self._standing: dict[str, bytes] = {}
        """What was put under the present lease, and is there still as far as is known."""
        self._lease: int | None = None
        self._expiry = 0.0
        """On the loop's clock; counted from when the renewal was sent, so the store's is never earlier."""
        self._away = False
        """Whether the last attempt failed."""
        self._waiting: list[asyncio.Future[None]] = []
        self._stirred = asyncio.Event()
        self._closed = False
        self._task = asyncio.get_running_loop().create_task(self._stay(), name="registry-lease")

    @property
    def registered(self) -> bool:
        now = asyncio.get_running_loop().time()
        return self._standing == self._wanted and (not self._wanted or now < self._expiry)

    async def put(self, key: str, value: bytes) -> None:
        """Waits for the outcome of one attempt, unless the last one already failed."""
        self._wanted[key] = value
        await self._attempted()

    async def delete(self, key: str) -> None:
        self._wanted.pop(key, None)
        await self._attempted()

    async def close(self) -> None:
        self._closed = True
        self._task.cancel()
        await asyncio.wait({self._task})
        self._answer(self._waiting)
        lease, self._lease = self._lease, None
        self._standing.clear()
        if lease is not None:
            with contextlib.suppress(StoreAway, LeaseGone, TimeoutError):
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    await self._store.revoke(lease)

    async def _attempted(self) -> None:
        if self._closed:
            raise ValueError("this lease is closed; take a new one")
        self._stirred.set()
        if not self._away:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting

    async def _stay(self) -> None:
        clock = asyncio.get_running_loop().time
        retry_s = _RETRY_FIRST_S
        while True:
            self._stirred.clear()
            waiting, self._waiting = self._waiting, []
            left_s = self._expiry - clock() if self._lease is not None else 0.0
            try:
                # A try may not take so long that there is no time for another one.
                async with asyncio.timeout(
                    min(CALL_LIMIT_S, max(left_s / 2, 0.2)) if left_s > 0 else CALL_LIMIT_S
                ):
                    await self._renew_and_put()
                if self._away:
                    log.info("registered again: %s", ", ".join(self._wanted))
                self._away = False
                pause_s, retry_s = self._ttl_s / 3, _RETRY_FIRST_S
            except LeaseGone:
                log.warning("the registry does not know the lease of %s any more", ", ".join(self._wanted))
                self._lease = None
                self._standing.clear()
                self._away = True
                pause_s = self._ttl_s * _JITTER * self._chance()
            except Exception as error:  # noqa: BLE001 — a lease that dies makes a healthy process a ghost
                if not self._away:
                    log.warning("lease not renewed: %s: %s", type(error).__name__, _told(error))
                self._away = True
                left_s = self._expiry - clock() if self._lease is not None else 0.0
                if left_s > 0:
                    pause_s = max(left_s / 2, 0.05)
                else:
                    pause_s = retry_s * (0.5 + self._chance() / 2)
                    retry_s = min(retry_s * 2, _RETRY_MOST_S)
                await self._store.renew()
            self._answer(waiting)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stirred.wait()

    @staticmethod
    def _answer(waiting: list[asyncio.Future[None]]) -> None:
        for one in waiting:
            if not one.done():
                one.set_result(None)

    async def _renew_and_put(self) -> None:
        clock = asyncio.get_running_loop().time
        sent = clock()
        if not self._wanted and self._lease is None:
            return
        if self._lease is None:
            self._lease, granted_s = await self._store.grant(self._ttl_s)
            attached: frozenset[str] = frozenset()
        else:
            granted_s = await self._store.keep_alive(self._lease)
            self._expiry = sent + granted_s  # what follows may fail; this much is known
            attached = await self._store.attached(self._lease)
        self._expiry = sent + granted_s
        for key in self._standing.keys() - attached:
            log.warning("%s vanished from the registry; putting it again", key)
            del self._standing[key]
        for key, value in list(self._wanted.items()):
            if self._standing.get(key) != value:
                await self._store.put(key, value, self._lease)
                self._standing[key] = value
        for key in (attached | self._standing.keys()) - self._wanted.keys():
            await self._store.delete(key)
            self._standing.pop(key, None)
