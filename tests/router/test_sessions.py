"""Conversations that stay where their last turn was, and requests that an operator pins to workers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from router_fleet import REMOTE, Fleet, ask_and_settle, in_fleet
from scripted_worker import Script, request

from fleet.errors import Unavailable
from fleet.ids import WorkerId
from fleet.member import Role
from fleet.objectives import CLASSES, STANDARD
from router.run import Terms
from router.sessions import Sessions
from router.settings import RouterSettings

TERMS = Terms(STANDARD, CLASSES[STANDARD], "acme")
P, D = WorkerId("p"), WorkerId("d")


def test_a_session_is_its_tenants_and_has_one_worker_of_each_role() -> None:
    sessions = Sessions(10)
    sessions.went("acme", "chat", Role.PREFILL, P)
    sessions.went("acme", "chat", Role.DECODE, WorkerId("d-before"))
    sessions.went("acme", "chat", Role.DECODE, D)
    assert sessions.last("acme", "chat") == {P, D}
    assert sessions.last("other", "chat") == sessions.last("acme", "other") == frozenset()


def test_who_names_no_session_has_none() -> None:
    sessions = Sessions(10)
    sessions.went("acme", "", Role.DECODE, D)
    assert sessions.last("acme", "") == frozenset()
    assert len(sessions) == 0


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_those_used_longest_ago_are_forgotten_first(limit: int) -> None:
    sessions = Sessions(limit)
    for name in "abcda":
        sessions.went("acme", name, Role.DECODE, D)
    assert len(sessions) == limit
    kept = {0: [], 1: ["a"], 3: ["a", "c", "d"]}[limit]
    assert [name for name in "abcd" if sessions.last("acme", name)] == kept


def whys(fleet: Fleet, id: str) -> str:
    told = fleet.router.explain(request(id).id)
    assert told is not None
    return "; ".join(step["why"] for step in told["transitions"])


def places(fleet: Fleet, id: str) -> list[WorkerId]:
    """Where it was computed, and where it was decoded."""
    jobs = {w: [job.request.id for job in worker.jobs] for w, worker in fleet.workers.items()}
    return [worker for worker, ids in sorted(jobs.items(), reverse=True) if id in ids]


def test_turns_of_a_session_stay_together_and_others_are_spread() -> None:
    async def body(fleet: Fleet) -> None:
        there = {}
        for tenant in ("acme", "other"):
            for n in range(6):
                id = f"{tenant}-{n}"
                terms = replace(TERMS, tenant=tenant, session="chat")
                await ask_and_settle(fleet, request(id, salt=id), terms=terms)
                there[id] = tuple(places(fleet, id))
                assert whys(fleet, id).count("its session's last turn was here") == (2 if n else 0)
        assert (
            len({there[f"acme-{n}"] for n in range(6)}) == len({there[f"other-{n}"] for n in range(6)}) == 1
        )
        for n in range(12):
            await ask_and_settle(fleet, request(f"free-{n}", salt=str(n)), terms=TERMS)
        assert len({tuple(places(fleet, f"free-{n}")) for n in range(12)}) > 2
        assert len(fleet.router.flow.sessions) == 2

    in_fleet(body, prefill=(Script(),) * 4, decode=(Script(),) * 4)


def test_a_session_whose_worker_is_gone_goes_on_elsewhere() -> None:
    async def body(fleet: Fleet) -> None:
        terms = replace(TERMS, session="chat")
        await ask_and_settle(fleet, request("one"), terms=terms)
        for worker in places(fleet, "one"):
            fleet.kill(worker)
        await fleet.settle()
        assert (await ask_and_settle(fleet, request("two"), terms=terms)).error is None
        assert set(places(fleet, "one")).isdisjoint(places(fleet, "two"))
        assert "its session's" not in whys(fleet, "two")

    in_fleet(body, prefill=(Script(),) * 2, decode=(Script(),) * 2)


@pytest.mark.parametrize(
    "settings", [REMOTE, replace(REMOTE, cost=replace(REMOTE.cost, local_advantage=0.0))]
)
@pytest.mark.parametrize("pins", [("p2",), ("d2",), ("p1", "d2"), ("p1", "p2")])
def test_a_pinned_request_goes_where_it_is_pinned(settings: RouterSettings, pins: tuple[str, ...]) -> None:
    async def body(fleet: Fleet) -> None:
        terms = replace(TERMS, pins=tuple(map(WorkerId, pins)))
        for n in range(6):
            await ask_and_settle(fleet, request(f"r{n}", salt=str(n)), terms=terms)
            there = places(fleet, f"r{n}")
            for role in {pin[0] for pin in pins}:
                assert {worker for worker in there if worker[0] == role} <= set(pins)
                assert any(worker[0] == role for worker in there)
            assert "pinned by the request" in whys(fleet, f"r{n}")

    in_fleet(body, prefill=(Script(),) * 3, decode=(Script(),) * 3, settings=settings)


def test_who_is_pinned_and_not_there_is_said() -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request(), terms=replace(TERMS, pins=(WorkerId("p9"),)))
        assert isinstance(got.error, Unavailable)
        assert "pinned to worker p9, which is not here" in got.error.message
        fleet.kill(WorkerId("d2"))
        await fleet.settle()
        got = await ask_and_settle(fleet, request("b"), terms=replace(TERMS, pins=(WorkerId("d2"),)))
        assert isinstance(got.error, Unavailable)
        assert "pinned to worker d2, which is ready with its session lost" in got.error.message

    in_fleet(body, decode=(Script(),) * 2)
