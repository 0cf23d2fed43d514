"""Leases that heal and watches that go on, against every fault the registry in memory has; virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import Unavailable
from fleet.registry import Lease, Registry, View
from fleet.registry.memory import MemoryHub, MemoryRegistry
from fleet.virtual_time import run

TTL_S = 6.0


class Eye:
    """Watches a prefix and keeps every view."""

    def __init__(self, registry: Registry, prefix: str = "/w/") -> None:
        self.views: list[View] = []
        self._task = asyncio.create_task(self._look(registry, prefix))

    async def _look(self, registry: Registry, prefix: str) -> None:
        async for view in registry.watch(prefix):
            self.views.append(view)

    @property
    def keys(self) -> set[str]:
        return set(self.views[-1].values)

    @property
    def live(self) -> bool:
        return self.views[-1].live


async def fleet(hub: MemoryHub, count: int) -> list[tuple[MemoryRegistry, Lease]]:
    members: list[tuple[MemoryRegistry, Lease]] = []
    for i in range(count):
        registry = hub.registry()
        lease = await registry.lease(TTL_S)
        await lease.put(f"/w/{i}", b"%d" % i)
        members.append((registry, lease))
    return members


def play(scene: Callable[[MemoryHub], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await scene(MemoryHub())

    run(main(), horizon_s=10_000)


def test_keys_live_as_long_as_their_owner() -> None:
    async def scene(hub: MemoryHub) -> None:
        (_, lease), (second, _) = await fleet(hub, 2)
        eye = Eye(hub.registry())
        await asyncio.sleep(1000)
        assert eye.keys == {"/w/0", "/w/1"}
        assert lease.registered
        await lease.close()
        await asyncio.sleep(0)
        assert "/w/0" not in hub.values
        second.cut = True  # as a process that was killed
        await asyncio.sleep(TTL_S)
        assert eye.keys == set()
        assert not eye.views[-1].emptied

    play(scene)


def test_an_outage_costs_nobody_his_life_and_all_come_back_within_a_ttl() -> None:
    async def scene(hub: MemoryHub) -> None:
        members = await fleet(hub, 5)
        eye = Eye(hub.registry())
        await asyncio.sleep(1)
        hub.up = False
        await asyncio.sleep(2 * TTL_S)
        assert hub.values == {}
        assert not eye.live
        assert len(eye.keys) == 5  # the last picture stands
        assert not any(lease.registered for _, lease in members)
        hub.up = True
        await asyncio.sleep(TTL_S)
        assert len(hub.values) == 5
        assert len(eye.keys) == 5
        assert eye.live
        assert all(lease.registered for _, lease in members)

    play(scene)


def test_those_who_come_back_do_not_come_all_at_once() -> None:
    async def scene(hub: MemoryHub) -> None:
        await fleet(hub, 20)
        eye = Eye(hub.registry())
        await asyncio.sleep(1)
        hub.revoke_all()
        came: set[float] = set()
        seen = 0
        while len(hub.values) < 20:
            await asyncio.sleep(0.001)
            if len(hub.values) != seen:
                seen = len(hub.values)
                came.add(asyncio.get_running_loop().time())
        assert len(came) > 5
        assert len(eye.keys) == 20

    play(scene)


def test_a_mass_disappearance_is_told_from_a_death() -> None:
    async def scene(hub: MemoryHub) -> None:
        members = await fleet(hub, 4)
        eye = Eye(hub.registry())
        await asyncio.sleep(1)
        await members[0][1].close()
        await asyncio.sleep(0)
        assert (len(eye.keys), eye.views[-1].emptied) == (3, False)
        hub.revoke_all()
        await asyncio.sleep(0)
        assert (len(eye.keys), eye.views[-1].emptied) == (0, True)
        await asyncio.sleep(TTL_S)
        assert (len(eye.keys), eye.views[-1].emptied) == (3, False)

    play(scene)


def test_lost_data_is_told_even_of_one_key() -> None:
    async def scene(hub: MemoryHub) -> None:
        await fleet(hub, 1)
        eye = Eye(hub.registry())
        await asyncio.sleep(1)
        hub.wipe()
        await asyncio.sleep(0.2)
        assert any(view.emptied for view in eye.views)
        await asyncio.sleep(TTL_S)
        assert eye.keys == {"/w/0"}
        assert not eye.views[-1].emptied

    play(scene)


@pytest.mark.parametrize("gap", ["compacted", "down"])
def test_a_deletion_in_a_gap_is_seen(gap: str) -> None:
    async def scene(hub: MemoryHub) -> None:
        hub.delay_s = 0.01
        members = await fleet(hub, 3)
        eye = Eye(hub.registry())
        await asyncio.sleep(1)
        if gap == "compacted":
            hub.compact()
            hub.delete("/w/1")
            hub.compact()
        else:
            hub.up = False
            hub.values.pop("/w/1")
            hub.up = True
        members[1][0].cut = True
        await asyncio.sleep(1)
        assert eye.keys == {"/w/0", "/w/2"}
        assert not eye.views[-1].emptied

    play(scene)


def test_a_change_between_listing_and_watching_is_seen() -> None:
    async def scene(hub: MemoryHub) -> None:
        hub.put("/w/a", b"1", 0)
        hub.delay_s = 0.5
        eye = Eye(hub.registry())
        await asyncio.sleep(0.75)  # listed, not watching yet
        assert eye.keys == {"/w/a"}
        hub.put("/w/b", b"2", 0)
        await asyncio.sleep(2)
        assert eye.keys == {"/w/a", "/w/b"}

    play(scene)


def test_a_key_deleted_by_hand_is_back_at_the_next_renewal() -> None:
    async def scene(hub: MemoryHub) -> None:
        ((_, lease),) = await fleet(hub, 1)
        hub.delete("/w/0")
        await asyncio.sleep(TTL_S / 3)
        assert hub.values["/w/0"][0] == b"0"
        assert lease.registered

    play(scene)


def test_what_was_put_and_deleted_during_an_outage_holds_after_it() -> None:
    async def scene(hub: MemoryHub) -> None:
        registry = hub.registry()
        hub.up = False
        lease = await registry.lease(TTL_S)
        await asyncio.sleep(1)
        before = asyncio.get_running_loop().time()
        await lease.put("/w/a", b"1")
        await lease.put("/w/b", b"2")
        await lease.put("/w/a", b"3")
        await lease.delete("/w/b")
        assert asyncio.get_running_loop().time() == before
        assert not lease.registered
        hub.up = True
        await asyncio.sleep(TTL_S)
        assert {key: value for key, (value, _) in hub.values.items()} == {"/w/a": b"3"}
        assert lease.registered
        await lease.put("/w/a", b"4")
        assert hub.values["/w/a"][0] == b"4"

    play(scene)


def test_plain_keys_say_when_the_registry_is_away() -> None:
    async def scene(hub: MemoryHub) -> None:
        registry = hub.registry()
        await registry.put("/d", b"x")
        assert await registry.get("/d") == b"x"
        assert await registry.get("/e") is None
        await registry.delete("/d")
        assert await registry.get("/d") is None
        registry.cut = True
        for call in (registry.put("/d", b"y"), registry.get("/d"), registry.delete("/d")):
            with pytest.raises(Unavailable, match="registry"):
                await call

    play(scene)


def test_a_call_that_never_returns_is_given_up() -> None:
    async def scene(hub: MemoryHub) -> None:
        hub.delay_s = 1e9
        registry = hub.registry()
        eye = Eye(registry)
        lease = await registry.lease(TTL_S)
        with pytest.raises(Unavailable):
            await registry.get("/d")
        await lease.put("/w/0", b"0")
        assert not lease.registered
        assert not eye.live
        hub.delay_s = 0.0
        await asyncio.sleep(TTL_S)
        assert lease.registered
        assert eye.keys == {"/w/0"}

    play(scene)


@given(st.integers(0, 2**32), st.floats(0.05, 0.45))
def test_with_every_other_renewal_lost_a_lease_never_lapses(seed: int, lost: float) -> None:
    """Faults at random moments, each shorter than the time a lease has left after a renewal."""
    chance = random.Random(seed)

    async def scene(hub: MemoryHub) -> None:
        ((registry, _),) = await fleet(hub, 1)
        holder = hub.values["/w/0"][1]
        for _ in range(50):
            await asyncio.sleep(chance.uniform(0, TTL_S))
            registry.cut = True
            await asyncio.sleep(chance.uniform(0, TTL_S * lost))
            registry.cut = False
            await asyncio.sleep(TTL_S / 3 + TTL_S / 6)
            assert hub.values["/w/0"][1] == holder

    play(scene)


@given(st.integers(0, 2**32))
def test_after_any_faults_the_picture_is_the_truth(seed: int) -> None:
    chance = random.Random(seed)

    async def scene(hub: MemoryHub) -> None:
        members = await fleet(hub, 4)
        eyes = [Eye(registry) for registry, _ in members]
        faults: list[Callable[[], object]] = [
            hub.wipe,
            hub.compact,
            hub.revoke_all,
            lambda: hub.delete(f"/w/{chance.randrange(4)}"),
            lambda: setattr(hub, "up", not hub.up),
            lambda: setattr(members[chance.randrange(4)][0], "cut", chance.random() < 0.5),
            lambda: setattr(hub, "delay_s", chance.choice([0.0, 0.01, 5.0])),
        ]
        for _ in range(40):
            chance.choice(faults)()
            await asyncio.sleep(chance.choice([0.0, 0.01, 1.0, TTL_S]))
        hub.up = True
        hub.delay_s = 0.0
        for registry, _ in members:
            registry.cut = False
        await asyncio.sleep(2 * TTL_S)
        for i, eye in enumerate(eyes):
            assert eye.views[-1].values == {f"/w/{k}": b"%d" % k for k in range(4)}, i
            assert eye.live
        assert all(lease.registered for _, lease in members)

    play(scene)


def test_closing_revokes_and_ends_the_watches() -> None:
    async def scene(hub: MemoryHub) -> None:
        ((registry, lease),) = await fleet(hub, 1)
        eye = Eye(registry)
        await asyncio.sleep(1)
        await registry.close()
        assert hub.values == {}
        assert hub.leases == {}
        await eye._task
        with pytest.raises(ValueError, match="closed"):
            await lease.put("/w/1", b"")
        await registry.close()

    play(scene)


def test_answers_that_are_lost_cost_neither_the_lease_nor_the_picture() -> None:
    """What was asked for happened all the same: keys are put under a lease that its owner does not know."""

    async def scene(hub: MemoryHub) -> None:
        ((first, lease),) = await fleet(hub, 1)
        watching = hub.registry()
        eye = Eye(watching)
        await asyncio.sleep(10)
        first.unanswered = watching.unanswered = True
        await lease.put("/w/0", b"new")
        await asyncio.sleep(4 * TTL_S)
        assert not eye.live
        assert not lease.registered
        first.unanswered = watching.unanswered = False
        await asyncio.sleep(2 * TTL_S)
        assert eye.live
        assert eye.views[-1].values == {"/w/0": b"new"}
        assert lease.registered

    play(scene)


def test_a_listing_that_comes_late_is_followed_by_what_changed_since() -> None:
    async def scene(hub: MemoryHub) -> None:
        _, (second, _) = await fleet(hub, 2)
        hub.list_s = 2.0
        eye = Eye(hub.registry())
        await asyncio.sleep(1.0)
        hub.delete("/w/1")
        second.cut = True
        await asyncio.sleep(1.5)
        hub.list_s = 0.0
        await asyncio.sleep(20)
        assert eye.keys == {"/w/0"}

    play(scene)
