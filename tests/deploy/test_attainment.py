"""A new revision is judged by the requests that its own workers served, not by the whole fleet's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from cluster_nodes import Behaviour
from scene import Scene, scene

from deploy.controller.words import Judged
from fleet.virtual_time import run


def rollout(story: Callable[[Scene, str, str], Awaitable[None]]) -> None:
    """One under way: the story is told the old and the new revision."""

    async def whole() -> None:
        async with scene() as s:
            s.create(prefill={"replicas": 2}, decode={"replicas": 8}, rollout={"minAttainmentPercent": 90})
            await s.settle()
            old = s.fleet()["status"]["revision"]
            s.behaviours = lambda pod: Behaviour(ready_s=60.0)
            s.looks.attainment = {old: Judged(950, 1000)}
            s.change(image="pdfleet:slow")
            await s.until(
                lambda: (
                    s.fleet()["status"]["updateRevision"] != old and s.fleet()["status"]["rollout"]["step"]
                )
            )
            await story(s, old, s.fleet()["status"]["updateRevision"])

    run(whole(), horizon_s=100_000)


def rolled_back(s: Scene) -> bool:
    return bool(s.condition("RolledBack")["status"] == "True")


def test_it_goes_back_when_its_own_requests_miss_though_the_whole_fleet_does_well() -> None:
    async def story(s: Scene, old: str, new: str) -> None:
        s.looks.attainment = None
        await asyncio.sleep(30)
        assert not rolled_back(s), "missing figures change nothing"
        assert "attainment is not known" in s.condition("Progressing")["message"]
        # 97 % of all. A request of an old prefill worker and a new decode worker is of both.
        s.looks.attainment = {
            old: Judged(10_700, 10_750), new: Judged(20, 50), "+".join(sorted((old, new))): Judged(50, 100),
        }  # fmt: skip
        await s.until(lambda: "not known" not in s.condition("Progressing")["message"], 60)
        await s.until(lambda: rolled_back(s), 60)
        said = s.condition("RolledBack")["message"]
        assert "70 of 150 requests in which its workers had a part" in said
        assert "without them 9750 of 9750" in said
        await s.settle(limit_s=1000)
        assert s.ready("decode", revision=old) == 8

    rollout(story)


def test_what_the_old_ones_miss_too_is_not_of_its_making() -> None:
    """A peak in the middle of a rollout; and when it is over and only the new ones miss, it goes back."""

    async def story(s: Scene, old: str, new: str) -> None:
        s.looks.attainment = {old: Judged(1200, 1500), new: Judged(70, 150)}
        await asyncio.sleep(60)
        assert not rolled_back(s)
        s.looks.attainment = {old: Judged(5700, 6000), new: Judged(170, 400)}
        await s.until(lambda: rolled_back(s), 60)

    rollout(story)


def test_a_router_that_starts_anew_begins_at_nothing() -> None:
    async def story(s: Scene, old: str, new: str) -> None:
        s.looks.attainment = {old: Judged(10, 10), new: Judged(90, 99)}
        await asyncio.sleep(30)
        s.looks.attainment = {old: Judged(5, 5), new: Judged(0, 0)}
        await asyncio.sleep(30)
        s.looks.attainment = {old: Judged(205, 205), new: Judged(90, 99)}
        await asyncio.sleep(30)
        assert not rolled_back(s)
        s.looks.attainment = {old: Judged(205, 205), new: Judged(60, 100)}
        await s.until(lambda: rolled_back(s), 60)
        assert "without them 200 of 200" in s.condition("RolledBack")["message"]

    rollout(story)
