"""Who leads, and that a plan of one who does not any more changes nothing; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fleet import virtual_time
from fleet.member import desired_key
from fleet.registry import Condition, Election
from fleet.registry.memory import MemoryHub, MemoryRegistry
from fleet.targets import (
    Desired,
    Mode,
    decision_key,
    format_desired,
    leader_key,
    parse_decision,
    parse_desired,
)
from fleet.wire.memory import MemoryHub as WireHub
from planner.etcd import EtcdActuator
from planner.words import Fence, Plan

T = TypeVar("T")
AUTO = Desired(2, 2, Mode.ACT, 8)
PLAN = Plan(4, 3, "more is asked", 10.0)
TTL_S = 3.0


def played(body: Coroutine[Any, Any, T]) -> T:
    return virtual_time.run(body, horizon_s=3600)


async def leads(election: Election) -> Fence:
    async with asyncio.timeout(60):
        while election.token is None:
            await asyncio.sleep(0.1)
    return Fence(leader_key("f"), election.token)


def actuator(registry: MemoryRegistry) -> EtcdActuator:
    return EtcdActuator("f", registry, WireHub().wire(), lambda role: (), lambda: 5.0)


async def started(hub: MemoryHub) -> MemoryRegistry:
    registry = hub.registry()
    await registry.put(desired_key("f"), format_desired(AUTO))
    return registry


async def wanted(registry: MemoryRegistry) -> Desired:
    data = await registry.get(desired_key("f"))
    assert data is not None
    return parse_desired(data)


def test_one_leads_and_another_when_it_is_gone() -> None:
    async def body() -> None:
        hub = MemoryHub(delay_s=0.001)
        first = hub.registry()
        one = await first.elect(leader_key("f"), b"one", TTL_S)
        token = (await leads(one)).token
        other = await hub.registry().elect(leader_key("f"), b"other", TTL_S)
        await asyncio.sleep(30.0)
        assert one.token == token
        assert other.token is None
        await one.close()
        assert (await leads(other)).token > token
        assert one.token is None

    played(body())


def test_a_deposed_leader_s_plan_changes_nothing() -> None:
    """It stands still while its lease runs out, and goes on as if it were the leader."""

    async def body() -> None:
        hub = MemoryHub(delay_s=0.001)
        registry = await started(hub)
        first = hub.registry()
        one = await first.elect(leader_key("f"), b"one", TTL_S)
        stale = await leads(one)
        first.cut = True
        other = await hub.registry().elect(leader_key("f"), b"other", TTL_S)
        await leads(other)
        assert one.token is None, "it cannot be sure, and knows so"
        first.cut = False
        acting = actuator(first)
        seen = await acting.current()
        assert seen is not None
        assert not await acting.apply(PLAN, seen, stale)
        assert not await acting.tell(PLAN, seen, stale)
        assert await wanted(registry) == AUTO
        assert await registry.get(decision_key("f")) is None
        assert await acting.apply(PLAN, seen, await leads(other))

    played(body())


def test_an_operator_who_is_sooner_wins() -> None:
    async def body() -> None:
        hub = MemoryHub(delay_s=0.001)
        registry = await started(hub)
        fence = await leads(await registry.elect(leader_key("f"), b"one", TTL_S))
        acting = actuator(registry)
        seen = await acting.current()
        assert seen is not None
        by_hand = Desired(1, 7)
        await registry.put(desired_key("f"), format_desired(by_hand))
        assert not await acting.apply(PLAN, seen, fence)
        assert await wanted(registry) == by_hand

    played(body())


def test_both_counts_and_the_decision_change_at_once() -> None:
    async def body() -> None:
        hub = MemoryHub(delay_s=0.001)
        registry = await started(hub)
        fence = await leads(await registry.elect(leader_key("f"), b"one", TTL_S))
        acting = actuator(registry)
        seen = await acting.current()
        assert seen is not None
        before = hub.revision
        assert await acting.apply(PLAN, seen, fence)
        assert hub.revision == before + 1
        assert await wanted(registry) == Desired(4, 3, Mode.ACT, 8)
        data = await registry.get(decision_key("f"))
        assert data is not None
        told = parse_decision(data)
        assert told is not None
        assert (told.prefill, told.decode, told.why, told.mode, told.at) == (
            4, 3, "more is asked", "act", 5.0,
        )  # fmt: skip

    played(body())


def test_of_a_change_of_role_only_the_starts_given_up_for_it_are_written() -> None:
    """The other part follows the worker's card."""

    async def body() -> None:
        hub = MemoryHub(delay_s=0.001)
        registry = await started(hub)
        fence = await leads(await registry.elect(leader_key("f"), b"one", TTL_S))
        acting = actuator(registry)
        for plan, written in (
            # One turns, and one decode worker that was only starting is given up for it.
            (Plan(1, 2, "a turn", 10.0, ("decode",)), Desired(2, 1, Mode.ACT, 8)),
            (Plan(1, 2, "a turn", 10.0, ("decode",)), Desired(2, 1, Mode.ACT, 8)),
        ):
            seen = await acting.current()
            assert seen is not None
            assert await acting.apply(plan, seen, fence)
            assert await wanted(registry) == written
            assert written.turned("decode") == Desired(plan.prefill, plan.decode, Mode.ACT, 8)

    played(body())


def test_an_emptied_registry_makes_a_leader_anew() -> None:
    async def body() -> None:
        hub = MemoryHub(delay_s=0.001)
        registry = hub.registry()
        one = await registry.elect(leader_key("f"), b"one", TTL_S)
        await leads(one)
        hub.wipe()
        async with asyncio.timeout(60):
            while hub.entry(leader_key("f")) is None:
                await asyncio.sleep(0.1)
        await asyncio.sleep(TTL_S)
        fence = await leads(one)
        entry = hub.entry(leader_key("f"))
        assert entry is not None
        assert entry.created == fence.token
        assert await registry.put_if([Condition(fence.key, created=fence.token)], {"/a": b"1"})

    played(body())
