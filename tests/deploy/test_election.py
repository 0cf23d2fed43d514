"""Who of several controllers acts; beside it the queue of keys, and the planner's actuator."""

from __future__ import annotations

import asyncio

import pytest
from cluster_store import Store, StoreApi
from scene import EPOCH, scene

from deploy.controller.election import Deposed, Election, ElectionSettings
from deploy.controller.work_queue import WorkQueue
from fleet.cluster import FLEETS, JSON, MERGE
from fleet.targets import Mode
from fleet.virtual_time import run
from planner.cluster import ClusterActuator
from planner.words import Plan

LEASE = "/apis/coordination.k8s.io/v1/namespaces/n/leases/pdfleet-controller"


class Candidate:
    def __init__(self, store: Store, name: str, acting: list[str]) -> None:
        self.api = StoreApi(store)
        self.name = name
        self._acting = acting
        self.election = Election(self.api, "n", name, ElectionSettings())
        self.task = asyncio.ensure_future(self.election.lead(self._act))

    async def _act(self) -> None:
        self._acting.append(self.name)
        try:
            await asyncio.Event().wait()
        finally:
            self._acting.remove(self.name)

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def store() -> Store:
    return Store(lambda: EPOCH + asyncio.get_running_loop().time())


def test_one_leads_and_the_next_follows_at_once_when_it_leaves() -> None:
    async def go() -> None:
        acting: list[str] = []
        s = store()
        one, two = Candidate(s, "one", acting), Candidate(s, "two", acting)
        await asyncio.sleep(60)
        assert acting == ["one"]
        await one.end()
        assert acting == []
        await asyncio.sleep(3)
        assert acting == ["two"]
        await two.end()

    run(go(), horizon_s=1e4)


def test_one_that_cannot_renew_stops_before_another_begins() -> None:
    async def go() -> None:
        acting: list[str] = []
        s = store()
        one, two = Candidate(s, "one", acting), Candidate(s, "two", acting)
        await asyncio.sleep(20)
        assert acting == ["one"]
        one.api.away = True
        seen: set[tuple[str, ...]] = set()
        for _ in range(400):
            seen.add(tuple(acting))
            await asyncio.sleep(0.1)
        assert acting == ["two"]
        assert all(len(both) <= 1 for both in seen)
        with pytest.raises(Deposed):
            await one.task
        await two.end()

    run(go(), horizon_s=1e4)


def test_clocks_of_others_do_not_matter() -> None:
    async def go() -> None:
        acting: list[str] = []
        s = store()
        spec = {
            "holderIdentity": "ghost", "leaseDurationSeconds": 15, "renewTime": "2099-01-01T00:00:00.000000Z",
        }  # fmt: skip
        s.handle(
            "POST",
            LEASE.rpartition("/")[0],
            {},
            {"metadata": {"name": "pdfleet-controller"}, "spec": spec},
            JSON,
        )
        one = Candidate(s, "one", acting)
        await asyncio.sleep(10)
        assert acting == []
        await asyncio.sleep(8)
        assert acting == ["one"]
        # Somebody takes it by force.
        s.handle("PATCH", LEASE, {}, {"spec": {"holderIdentity": "ghost"}}, MERGE)
        with pytest.raises(Deposed):
            await one.task
        assert acting == []

    run(go(), horizon_s=1e4)


def test_a_key_is_worked_on_once_at_a_time_and_failures_wait_longer_each_time() -> None:
    async def go() -> None:
        queue = WorkQueue(first_s=1.0, most_s=8.0)
        loop = asyncio.get_running_loop()
        queue.add("a")
        queue.add("a")
        assert await queue.next() == "a"
        queue.add("a")
        queue.add("b")
        assert await queue.next() == "b"
        queue.done("a", failed=False, again_s=0)
        assert await queue.next() == "a"
        times = []
        for _ in range(5):
            queue.done("a", failed=True, again_s=0)
            assert await queue.next() == "a"
            times.append(loop.time())
        assert times == [1, 3, 7, 15, 23]
        # What changed in the middle of a failure does not wait for the whole of it.
        queue.add("a")
        queue.done("a", failed=True, again_s=0)
        assert await queue.next() == "a"
        assert loop.time() == 25
        queue.done("a", failed=False, again_s=5)
        assert await queue.next() == "a"
        assert loop.time() == 30

    run(go(), horizon_s=1e4)


def test_the_planner_writes_both_counts_of_the_spec_it_saw_or_nothing() -> None:
    async def go() -> None:
        async with scene() as s:
            s.create(planner={"mode": "act", "maxWorkers": 9})
            await s.settle()
            actuator = ClusterActuator(s.api, "default", "demo")
            seen = await actuator.current()
            assert seen is not None
            assert (seen.desired.prefill, seen.desired.decode, seen.desired.mode) == (1, 2, Mode.ACT)
            assert seen.desired.budget == 9
            # A status written meanwhile is no other wish.
            s.store.handle(
                "PATCH", FLEETS.path("default", "demo", "status"), {}, {"status": {"revision": "x"}}, MERGE
            )
            plan = Plan(2, 4, "queues grow", 0.0)
            assert await actuator.tell(plan, seen, None)
            assert await actuator.apply(plan, seen, None)
            spec = s.fleet()["spec"]
            assert (spec["prefill"]["replicas"], spec["decode"]["replicas"]) == (2, 4)
            assert "queues grow" in str(s.fleet()["metadata"]["annotations"])
            assert not await actuator.apply(Plan(1, 1, "late", 0.0), seen, None)
            now = await actuator.current()
            assert now is not None
            s.change(decode={"maxReplicas": 5})
            now = await actuator.current()
            assert now is not None
            assert await actuator.apply(Plan(1, 6, "too many", 0.0), now, None)
            assert s.fleet()["spec"]["decode"]["replicas"] == 5, "as near to it as the rules allow"
            # A pod does not take another role: what would turn instead of a start under way stays as it is.
            now = await actuator.current()
            assert now is not None
            assert await actuator.apply(Plan(0, 5, "one turns", 0.0, ("decode",)), now, None)
            assert s.fleet()["spec"]["prefill"]["replicas"] == 1
            assert "one turns" in str(s.fleet()["metadata"]["annotations"])
            assert await ClusterActuator(s.api, "default", "nobody").current() is None

    run(go(), horizon_s=1e4)
