"""The registry within one process: for tests and virtual time, with faults to order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from fleet.registry.session import StoreRegistry
from fleet.registry.store import (
    Change,
    Changes,
    Compacted,
    Condition,
    Entry,
    LeaseGone,
    Listing,
    StoreAway,
)
from fleet.virtual_time import outside

_News = Changes | StoreAway | Compacted


class _Watcher:
    def __init__(self, store: _Store, prefix: str) -> None:
        self.store = store
        self.prefix = prefix
        self.news: asyncio.Queue[_News] = asyncio.Queue()


class MemoryHub:
    """What the etcd server is to processes; each of a simulated fleet takes its own `registry()`.

    `up = False` is a server that is away or paused; leases go on to age meanwhile, the worse of the two.
    `delay_s` is how long each call takes, `list_s` how much longer a listing does after it was made.
    """

    def __init__(self, delay_s: float = 0.0, seed: int = 0) -> None:
        self.delay_s = delay_s
        self.list_s = 0.0
        self.tap: Callable[[], None] = lambda: None
        """Told of every call before it is made."""
        self.revision = 1
        self.cluster = 1
        self.compacted = 0
        self.watchers: list[_Watcher] = []
        self.values: dict[str, tuple[bytes, int]] = {}
        """Key → value and lease; 0 is no lease."""
        self.stamps: dict[str, tuple[int, int]] = {}
        """Key → revisions at which it came to be and was changed last."""
        self.leases: dict[int, tuple[float, asyncio.TimerHandle]] = {}
        """Lease → its time in seconds and the timer that ends it."""
        self._granted = 0
        self._random = random.Random(seed)
        self._up = True

    def registry(self) -> MemoryRegistry:
        return MemoryRegistry(self, self._random)

    @property
    def up(self) -> bool:
        return self._up

    @up.setter
    def up(self, up: bool) -> None:
        self._up = up
        if not up:
            self.break_watches(StoreAway("the registry is down"))

    def wipe(self) -> None:
        """A server that was restarted with nothing: no keys, no leases, revisions from the start."""
        for lease in list(self.leases):
            self.leases.pop(lease)[1].cancel()
        self.values.clear()
        self.stamps.clear()
        self.revision, self.compacted = 1, 0
        self.break_watches(StoreAway("the registry was restarted"))

    def compact(self) -> None:
        """No history is kept, and streams are broken: who was behind must list again."""
        self.compacted = self.revision
        self.break_watches(Compacted("history is gone"))

    def revoke_all(self) -> None:
        """All leases at once, as a stalled leader that comes back does."""
        for lease in list(self.leases):
            self.leases.pop(lease)[1].cancel()
        self._change({key: None for key, (_, lease) in self.values.items() if lease})

    def break_watches(self, why: StoreAway | Compacted, store: _Store | None = None) -> None:
        for watcher in self.watchers:
            if store is None or watcher.store is store:
                watcher.news.put_nowait(why)

    def grant(self, ttl_s: float) -> int:
        self._granted += 1
        self.leases[self._granted] = (ttl_s, self._timer(self._granted, ttl_s))
        return self._granted

    def keep_alive(self, lease: int) -> float:
        ttl_s, timer = self.leases[lease]
        timer.cancel()
        self.leases[lease] = (ttl_s, self._timer(lease, ttl_s))
        return ttl_s

    def end(self, lease: int) -> None:
        if lease in self.leases:
            self.leases.pop(lease)[1].cancel()
            self._change({key: None for key, (_, holder) in self.values.items() if holder == lease})

    def put(self, key: str, value: bytes, lease: int) -> None:
        self._change({key: value}, lease)

    def entry(self, key: str) -> Entry | None:
        if key not in self.values:
            return None
        return Entry(self.values[key][0], *self.stamps[key])

    def holds(self, condition: Condition) -> bool:
        entry = self.entry(condition.key)
        created, modified = (0, 0) if entry is None else (entry.created, entry.modified)
        return condition.created in (None, created) and condition.modified in (None, modified)

    def put_all(self, puts: Mapping[str, bytes], lease: int) -> int:
        self._change(dict(puts), lease)
        return self.revision

    def delete(self, key: str) -> None:
        if key in self.values:
            self._change({key: None})

    def _timer(self, lease: int, ttl_s: float) -> asyncio.TimerHandle:
        return outside(asyncio.get_running_loop().call_later, ttl_s, self.end, lease)

    def _change(self, changes: dict[str, bytes | None], lease: int = 0) -> None:
        if not changes:
            return
        self.revision += 1
        for key, value in changes.items():
            if value is None:
                del self.values[key]
                self.stamps.pop(key, None)
            else:
                created = self.stamps[key][0] if key in self.values else self.revision
                self.values[key] = (value, lease)
                self.stamps[key] = (created, self.revision)
        if self._up:
            for watcher in self.watchers:
                seen = tuple(Change(k, v) for k, v in changes.items() if k.startswith(watcher.prefix))
                if seen and not watcher.store.cut:
                    watcher.news.put_nowait(Changes(self.revision, seen))


class _Store:
    """One process's way to the hub: a `fleet.registry.store.Store`."""

    def __init__(self, hub: MemoryHub) -> None:
        self.cut = False
        self.unanswered = False
        self._hub = hub

    async def _reach(self) -> MemoryHub:
        self._hub.tap()
        if self._hub.delay_s > 0:
            await asyncio.sleep(self._hub.delay_s)
        if self.cut or not self._hub.up:
            raise StoreAway("the registry is away")
        return self._hub

    def _answered(self) -> None:
        """Raises when what was asked has happened and the answer is lost."""
        if self.unanswered:
            raise StoreAway("the answer was lost")

    async def grant(self, ttl_s: float) -> tuple[int, float]:
        lease = (await self._reach()).grant(ttl_s)
        self._answered()
        return lease, ttl_s

    async def keep_alive(self, lease: int) -> float:
        hub = await self._reach()
        if lease not in hub.leases:
            raise LeaseGone
        granted_s = hub.keep_alive(lease)
        self._answered()
        return granted_s

    async def attached(self, lease: int) -> frozenset[str]:
        hub = await self._reach()
        if lease not in hub.leases:
            raise LeaseGone
        return frozenset(key for key, (_, holder) in hub.values.items() if holder == lease)

    async def revoke(self, lease: int) -> None:
        (await self._reach()).end(lease)

    async def put(self, key: str, value: bytes, lease: int = 0) -> None:
        hub = await self._reach()
        if lease and lease not in hub.leases:
            raise LeaseGone
        hub.put(key, value, lease)
        self._answered()

    async def get(self, key: str) -> bytes | None:
        value = (await self._reach()).values.get(key)
        self._answered()
        return None if value is None else value[0]

    async def entry(self, key: str) -> Entry | None:
        entry = (await self._reach()).entry(key)
        self._answered()
        return entry

    async def put_if(
        self, conditions: Sequence[Condition], puts: Mapping[str, bytes], lease: int = 0
    ) -> int | None:
        hub = await self._reach()
        if lease and lease not in hub.leases:
            raise LeaseGone
        done = hub.put_all(puts, lease) if all(map(hub.holds, conditions)) else None
        self._answered()
        return done

    async def delete(self, key: str) -> None:
        (await self._reach()).delete(key)
        self._answered()

    async def list(self, prefix: str) -> Listing:
        hub = await self._reach()
        values = {key: value for key, (value, _) in hub.values.items() if key.startswith(prefix)}
        listing = Listing(values, hub.revision, hub.cluster)
        if hub.list_s > 0:
            await asyncio.sleep(hub.list_s)
        self._answered()
        return listing

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[Changes, None]:
        hub = await self._reach()
        self._answered()
        if revision <= hub.revision:
            # The hub keeps no history: what happened between listing and watching cannot be told.
            raise Compacted("history is gone")
        watcher = _Watcher(self, prefix)
        hub.watchers.append(watcher)
        try:
            while True:
                news = await watcher.news.get()
                if isinstance(news, Exception):
                    raise news
                yield news
        finally:
            hub.watchers.remove(watcher)

    async def renew(self) -> None:
        """There is one way only."""

    async def close(self) -> None:
        self._hub.break_watches(StoreAway("closed"), self)


class MemoryRegistry(StoreRegistry):
    """One process's connection to the hub. `cut = True` is a partition: nothing goes out or comes in;
    `unanswered = True`: what is asked for happens, and the answer and all news are lost."""

    def __init__(self, hub: MemoryHub, chance: random.Random) -> None:
        self._way = _Store(hub)
        super().__init__(self._way, chance.random)
        self._hub = hub

    @property
    def cut(self) -> bool:
        return self._way.cut

    @cut.setter
    def cut(self, cut: bool) -> None:
        self._way.cut = cut
        if cut:
            self._hub.break_watches(StoreAway("cut off"), self._way)

    @property
    def unanswered(self) -> bool:
        return self._way.unanswered

    @unanswered.setter
    def unanswered(self, unanswered: bool) -> None:
        self._way.unanswered = unanswered
        if unanswered:
            self._hub.break_watches(StoreAway("cut off"), self._way)
