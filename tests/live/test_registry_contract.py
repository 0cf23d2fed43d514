"""What every registry promises, in memory and over a real etcd server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from servers import Etcd, eventually

from fleet.registry import Condition, Registry, View
from fleet.registry.etcd_registry import EtcdRegistry
from fleet.registry.memory import MemoryHub

Case = Callable[[Callable[[], Registry]], Awaitable[None]]


class Eye:
    """Watches a prefix and keeps every view."""

    def __init__(self, registry: Registry, prefix: str = "/w/") -> None:
        self.views: list[View] = []
        self.task = asyncio.create_task(self._look(registry, prefix))

    async def _look(self, registry: Registry, prefix: str) -> None:
        async for view in registry.watch(prefix):
            self.views.append(view)

    def sees(self, values: dict[str, bytes]) -> bool:
        return bool(self.views) and self.views[-1] == View(values)


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.live)])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Case], None]]:
    """Runs a case with a function that makes registries of one store."""

    async def run(case: Case) -> None:
        registries: list[Registry] = []
        hub = MemoryHub()

        def make() -> Registry:
            registries.append(hub.registry() if server is None else EtcdRegistry(server.address))
            return registries[-1]

        try:
            async with asyncio.timeout(60):
                await case(make)
        finally:
            for registry in registries:
                await registry.close()

    server: Etcd | None = None
    if request.param == "etcd":
        server = Etcd(tmp_path / "etcd")
        server.start()
    yield lambda case: asyncio.run(run(case))
    if server is not None:
        server.kill()


def test_plain_keys(play: Callable[[Case], None]) -> None:
    async def case(make: Callable[[], Registry]) -> None:
        one, other = make(), make()
        assert await one.get("/a") is None
        await one.put("/a", b"\x00\xff")
        await one.put("/empty", b"")
        assert await other.get("/a") == b"\x00\xff"
        assert await other.get("/empty") == b""
        await one.put("/a", b"new")
        assert await other.get("/a") == b"new"
        await other.delete("/a")
        await other.delete("/a")
        assert await one.get("/a") is None

    play(case)


def test_a_watch_sees_all_below_its_prefix_and_nothing_else(play: Callable[[Case], None]) -> None:
    async def case(make: Callable[[], Registry]) -> None:
        writer, reader = make(), make()
        await writer.put("/w/before", b"0")
        await writer.put("/v/other", b"0")
        await writer.put("/w", b"0")
        eye = Eye(reader)
        await eventually(lambda: eye.sees({"/w/before": b"0"}))
        for i in range(50):
            await writer.put(f"/w/{i}", b"%d" % i)
            await writer.put(f"/x/{i}", b"%d" % i)
        await writer.put("/w/0", b"changed")
        await writer.delete("/w/before")
        await eventually(lambda: eye.sees({f"/w/{i}": b"%d" % i if i else b"changed" for i in range(50)}))
        assert not any(view.emptied for view in eye.views)

    play(case)


def test_a_watch_of_nothing_says_so_at_once(play: Callable[[Case], None]) -> None:
    async def case(make: Callable[[], Registry]) -> None:
        eye = Eye(make())
        await eventually(lambda: eye.sees({}))

    play(case)


def test_leased_keys_stand_until_their_owner_goes(play: Callable[[Case], None]) -> None:
    async def case(make: Callable[[], Registry]) -> None:
        owner, reader = make(), make()
        eye = Eye(reader)
        lease = await owner.lease(2)
        assert lease.registered  # nothing is wanted, nothing is missing
        await lease.put("/w/a", b"1")
        assert lease.registered
        assert await reader.get("/w/a") == b"1"
        await lease.put("/w/b", b"1")
        await lease.put("/w/a", b"2")
        await eventually(lambda: eye.sees({"/w/a": b"2", "/w/b": b"1"}))
        await lease.delete("/w/b")
        await eventually(lambda: eye.sees({"/w/a": b"2"}))
        await asyncio.sleep(5)  # more than two lives of the lease
        assert eye.sees({"/w/a": b"2"})
        assert lease.registered
        await lease.close()
        await eventually(lambda: eye.sees({}))

    play(case)


def test_a_key_deleted_by_hand_comes_back(play: Callable[[Case], None]) -> None:
    async def case(make: Callable[[], Registry]) -> None:
        owner, other = make(), make()
        eye = Eye(other)
        lease = await owner.lease(2)
        await lease.put("/w/a", b"1")
        await eventually(lambda: eye.sees({"/w/a": b"1"}))
        await other.delete("/w/a")
        await eventually(lambda: View({}) in eye.views[1:] and eye.sees({"/w/a": b"1"}))
        # Others may see the key before its owner has heard that it stands.
        await eventually(lambda: lease.registered)

    play(case)


def test_the_keys_of_many_leases_are_apart(play: Callable[[Case], None]) -> None:
    async def case(make: Callable[[], Registry]) -> None:
        registry = make()
        eye = Eye(make())
        leases = [await registry.lease(5) for _ in range(5)]
        await asyncio.gather(*(lease.put(f"/w/{i}", b"x") for i, lease in enumerate(leases)))
        await eventually(lambda: eye.sees({f"/w/{i}": b"x" for i in range(5)}))
        await leases[2].close()
        await eventually(lambda: eye.sees({f"/w/{i}": b"x" for i in range(5) if i != 2}))
        await registry.close()
        await eventually(lambda: bool(eye.views) and eye.views[-1].values == {})

    play(case)


def test_writes_happen_on_conditions_or_not_at_all(play: Callable[[Case], None]) -> None:
    async def case(make: Callable[[], Registry]) -> None:
        one, other = make(), make()
        assert await one.entry("/a") is None
        absent = [Condition("/a", created=0)]
        revision = await one.put_if(absent, {"/a": b"1", "/b": b"2"})
        assert revision is not None
        assert await other.put_if(absent, {"/a": b"x"}) is None
        entry = await other.entry("/a")
        assert entry is not None
        assert (entry.value, entry.created, entry.modified) == (b"1", revision, revision)
        assert await other.put_if([Condition("/a", modified=entry.modified)], {"/a": b"3"}) is not None
        again = [Condition("/a", modified=entry.modified), Condition("/b", created=revision)]
        assert await one.put_if(again, {"/b": b"lost"}) is None
        assert await one.get("/b") == b"2"
        changed = await one.entry("/a")
        assert changed is not None
        assert changed.created == revision < changed.modified

    play(case)


def test_one_leads_until_it_lets_go(play: Callable[[Case], None]) -> None:
    async def case(make: Callable[[], Registry]) -> None:
        one, other = make(), make()
        first = await one.elect("/leader", b"one", 3.0)
        await eventually(lambda: first.token is not None)
        token = first.token
        second = await other.elect("/leader", b"other", 3.0)
        fence = [Condition("/leader", created=token)]
        assert await one.put_if(fence, {"/a": b"1"}) is not None
        assert second.token is None
        await first.close()
        await eventually(lambda: second.token is not None)
        assert await one.put_if(fence, {"/a": b"late"}) is None
        assert await other.get("/a") == b"1"

    play(case)
