"""Who leads: the first to put a key under its lease, for as long as that lease stands.

The revision at which the key came to be is the fence (Kleppmann, "How to do distributed locking", 2016): a
write that names it in a condition fails once somebody else leads, however late it arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from fleet.registry.limits import CALL_LIMIT_S
from fleet.registry.store import Condition, LeaseGone, Store, StoreAway

log = logging.getLogger(__name__)

_CLOSE_LIMIT_S = 1.0


class StandingElection:
    """An `Election` over a store. All of its work is done by one task."""

    def __init__(self, store: Store, key: str, value: bytes, ttl_s: float) -> None:
        self._store = store
        self._key = key
        self._value = value
        self._ttl_s = ttl_s
        self._lease: int | None = None
        self._token: int | None = None
        self._expiry = 0.0
        """On the loop's clock; counted from when the renewal was sent, so the store's is never earlier."""
        self._closed = False
        self._task = asyncio.get_running_loop().create_task(self._stand(), name="registry-election")

    @property
    def token(self) -> int | None:
        now = asyncio.get_running_loop().time()
        return self._token if not self._closed and now < self._expiry else None

    async def close(self) -> None:
        self._closed = True
        self._task.cancel()
        await asyncio.wait({self._task})
        lease, self._lease, self._token = self._lease, None, None
        if lease is not None:
            with contextlib.suppress(StoreAway, LeaseGone, TimeoutError):
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    await self._store.revoke(lease)

    async def _stand(self) -> None:
        while True:
            try:
                async with asyncio.timeout(min(CALL_LIMIT_S, self._ttl_s / 3)):
                    await self._once()
            except LeaseGone:
                log.warning("no longer the leader of %s: the registry does not know its lease", self._key)
                self._lease = self._token = None
                continue
            except (StoreAway, TimeoutError) as error:
                log.info("cannot stand for %s: %s", self._key, error or "no answer")
                await self._store.renew()
            await asyncio.sleep(self._ttl_s / 3)

    async def _once(self) -> None:
        sent = asyncio.get_running_loop().time()
        if self._lease is None:
            self._lease, granted_s = await self._store.grant(self._ttl_s)
        else:
            granted_s = await self._store.keep_alive(self._lease)
        self._expiry = sent + granted_s
        if self._token is not None and await self._mine():
            return
        self._token = await self._store.put_if(
            [Condition(self._key, created=0)], {self._key: self._value}, self._lease
        )
        if self._token is not None:
            log.info("leader of %s from revision %d on", self._key, self._token)
            return
        entry = await self._store.entry(self._key)
        if entry is not None and entry.value == self._value:
            self._token = entry.created  # It was put, and the answer was lost.

    async def _mine(self) -> bool:
        entry = await self._store.entry(self._key)
        if entry is not None and entry.created == self._token:
            return True
        log.warning("no longer the leader of %s: the key is not the one that was put", self._key)
        self._token = None
        return False
