"""What routers do for a planner: they count what is asked whoever serves, hold requests while it brings
workers, and say what they are asked."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from router_fleet import REMOTE, Fleet, ask, in_fleet
from scripted_worker import card, request

from fleet.demand import Demand, decode_demand, demand_subject
from fleet.errors import Overloaded, Unavailable
from fleet.member import Role, desired_key
from fleet.targets import Desired, LastDecision, Mode, decision_key, format_desired, planner_prefix
from router.exposition import families
from router.live import Live
from router.settings import FlowSettings

AUTO = format_desired(Desired(0, 0, Mode.ACT))


def shown(fleet: Fleet) -> dict[str, float]:
    told = families(fleet.router.flow, {}, asyncio.get_running_loop().time())
    return {one.name: one.series[()] for one in told if one.name.startswith("pdfleet_demand")}  # type: ignore[misc]


def test_demand_is_counted_where_nobody_serves() -> None:
    """F100: the signal that would bring the first worker is there only when there is one."""

    async def body(fleet: Fleet) -> None:
        before = shown(fleet)
        assert before == dict.fromkeys(before, 0)
        assert set(before) == {"pdfleet_demand_requests", "pdfleet_demand_rejected", "pdfleet_demand_held"}
        got = await ask(fleet, request("r1"))
        assert isinstance(got.error, Unavailable)
        after = shown(fleet)
        assert after["pdfleet_demand_requests"] == after["pdfleet_demand_rejected"] == 1

    in_fleet(body, prefill=(), decode=())


def test_a_router_of_a_fleet_at_rest_is_ready_until_it_serves_again() -> None:
    """Or no Service would lead to it: the request that is to wake the fleet would never come."""

    async def body(fleet: Fleet) -> None:
        flow = fleet.router.flow
        await fleet.settle()
        assert flow.ready() is not None
        for desired, ready in (
            (Desired(1, 1, Mode.ACT), False),  # It has not come up yet.
            (Desired(0, 0, Mode.ACT), True),
            (Desired(1, 1, Mode.ACT), True),  # Woken: who comes meanwhile is held.
            (Desired(0, 0), False),  # By hand: nobody would wake it.
            (Desired(1, 1, Mode.ACT), False),
        ):
            fleet.registry.put(desired_key("f"), format_desired(desired), 0)
            await fleet.settle()
            assert (flow.ready() is None) == ready, desired

    in_fleet(body, prefill=(), decode=())


def test_requests_are_held_while_a_planner_acts_and_served_when_workers_come() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.registry.put(desired_key("f"), AUTO, 0)
        await fleet.settle()
        asking = [asyncio.create_task(ask(fleet, request(f"r{number}"))) for number in range(3)]
        await asyncio.sleep(100.0)
        assert shown(fleet)["pdfleet_demand_held"] == 3
        assert not any(task.done() for task in asking)
        await fleet.add(card("d1"))
        await fleet.add(card("p1", Role.PREFILL))
        answers = await asyncio.gather(*asking)
        assert all(got.error is None and got.ends for got in answers)
        assert shown(fleet)["pdfleet_demand_held"] == 0

    in_fleet(body, prefill=(), decode=())


@pytest.mark.parametrize(("mode", "waits"), [(Mode.ACT, True), (Mode.ADVISE, False), (Mode.OFF, False)])
def test_only_who_acts_is_waited_for(mode: Mode, waits: bool) -> None:
    async def body(fleet: Fleet) -> None:
        fleet.registry.put(desired_key("f"), format_desired(Desired(0, 0, mode)), 0)
        await fleet.settle()
        began = asyncio.get_running_loop().time()
        got = await ask(fleet, request("r1"))
        assert isinstance(got.error, Unavailable)
        waited_s = asyncio.get_running_loop().time() - began
        limits = fleet.settings.flow
        assert waited_s == pytest.approx(limits.scale_wait_s if waits else 0.0, abs=0.01)

    in_fleet(body, prefill=(), decode=())


def test_the_held_are_bounded() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.registry.put(desired_key("f"), AUTO, 0)
        await fleet.settle()
        held = [asyncio.create_task(ask(fleet, request(f"r{number}"))) for number in range(2)]
        await asyncio.sleep(1.0)
        got = await ask(fleet, request("r7"))
        assert isinstance(got.error, Overloaded)
        assert got.error.retry_after_s == 10.0
        assert "max_held" in got.error.message
        await fleet.add(card("d1"))
        assert all(one.error is None for one in await asyncio.gather(*held))

    in_fleet(body, prefill=(), decode=(), settings=replace(REMOTE, flow=FlowSettings(max_held=2)))


def test_a_planner_is_told_what_is_asked_and_nobody_else() -> None:
    async def body(fleet: Fleet) -> None:
        bus = fleet.bus.bus()
        heard: list[Demand] = []

        async def listen() -> None:
            async for message in await bus.subscribe(demand_subject("f")):
                heard.append(decode_demand(message.data))

        listening = asyncio.create_task(listen())
        await ask(fleet, request("r1"))
        await asyncio.sleep(5.0)
        assert heard == []
        fleet.registry.put(f"{planner_prefix('f')}planners/one", b"{}", 0)
        await asyncio.sleep(2.5)
        answer = await ask(fleet, request("r2"))
        await asyncio.sleep(2.5)
        listening.cancel()
        last = heard[-1]
        assert [one.sequence for one in heard] == list(range(1, len(heard) + 1))
        assert (last.arrived, last.ended, last.waiting, last.running) == (2, 2, 0, 0)
        assert last.output_tokens == 2 * len(answer.tokens)
        assert last.prompt_tokens == last.ended_tokens == 2 * len(request("r2").prompt)
        (told,) = last.classes.values()
        assert (told.arrived, told.attained, told.missed) == (2, 2, 0)

    in_fleet(body)


def test_the_last_decision_reaches_who_shows_it() -> None:
    async def body(fleet: Fleet) -> None:
        heard: list[LastDecision | None] = []
        fleet.router.planning.on_decision = heard.append
        decision = {"prefill": 2, "decode": 1, "why": "x", "mode": "act", "changed": True, "at": 1.0}
        fleet.registry.put(decision_key("f"), json.dumps(decision).encode(), 0)
        await asyncio.sleep(1.0)
        assert heard == [], "it was made by a planner that has gone"
        planner = f"{planner_prefix('f')}planners/one"
        fleet.registry.put(planner, b"{}", 0)
        await asyncio.sleep(1.0)
        fleet.registry.put(decision_key("f"), b'{"of": "another version"}', 0)
        await asyncio.sleep(1.0)
        made = LastDecision(2, 1, "x", "act", True, 1.0)
        assert heard == [made, None]
        fleet.registry.put(decision_key("f"), json.dumps(decision).encode(), 0)
        await asyncio.sleep(1.0)
        fleet.registry.delete(planner)
        await asyncio.sleep(1.0)
        assert heard == [made, None, made, None]
        live = Live(fleet.router.flow)
        live.planned(LastDecision(2, 1, "more is asked", "advise", False, 1.0, advice="1 would do"), 7.0)
        plan = live.snapshot(8.0).plan
        assert plan is not None
        assert (plan.prefill, plan.decode, plan.at) == (2, 1, 7.0)
        assert plan.why == "(advise) more is asked; 1 would do"
        live.planned(None, 9.0)
        assert live.snapshot(9.0).plan is None

    in_fleet(body)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"router": 1}', b'{"router":"r","life":"l","sequence":1,"up_s":-1}']
)
def test_what_no_router_says_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"router asks|below zero"):
        decode_demand(data)
