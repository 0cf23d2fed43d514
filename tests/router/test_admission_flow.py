"""Requests that wait for their turn, over scripted workers in virtual time: every one ends, once, with its
reasons, however and whenever its waiting ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from router_fleet import REMOTE, Answer, Fleet, ask, in_fleet
from scripted_worker import Script, request

from fleet.errors import DeadlineExceeded, Overloaded, Unavailable
from fleet.handoff import CancelReason
from fleet.ids import RequestId, WorkerId
from fleet.objectives import CLASSES, Objectives
from fleet.request import FinishReason
from fleet.stages import Timeline
from router.run import RunEnd, RunToken, Terms
from router.settings import AdmissionMode, AdmissionSettings, RouterSettings

HIGH = Terms("interactive", CLASSES["interactive"], "acme")
LOW = Terms("batch", CLASSES["batch"], "zeta")


def settings(**admission: Any) -> RouterSettings:
    return replace(REMOTE, admission=AdmissionSettings(**admission))


async def fill(fleet: Fleet) -> None:
    """From now on the prefill worker says that a second of prompts waits there."""
    fleet.workers[WorkerId("p1")].script.queued_tokens = 10_000
    await asyncio.sleep(0.5)


def make_room(fleet: Fleet) -> None:
    fleet.workers[WorkerId("p1")].script.queued_tokens = 0


async def ask_as(fleet: Fleet, terms: Terms, id: str, **fields: Any) -> Answer:
    got = Answer(timeline=Timeline(asyncio.get_running_loop().time()))
    run = fleet.router.flow.start(request(id, **fields), got.timeline, terms)
    try:
        async for event in run:
            if isinstance(event, RunToken):
                got.tokens.append(event.token)
            else:
                got.ends.append(event)
    except (Overloaded, DeadlineExceeded, Unavailable) as error:
        got.error = error
    finally:
        await run.stop(CancelReason.CLIENT)
    return got


async def settle(fleet: Fleet) -> None:
    await fleet.settle()
    fleet.check_idle()
    assert fleet.router.flow.admission.queued == 0
    assert not fleet.router.flow.turns


def told(fleet: Fleet, id: str) -> dict[str, Any]:
    record = fleet.router.explain(RequestId(id))
    assert record is not None
    return record


def test_a_request_waits_for_room_and_its_record_says_why_and_what_became_of_it() -> None:
    async def body(fleet: Fleet) -> None:
        await fill(fleet)
        asking = asyncio.create_task(ask_as(fleet, HIGH, "r"))
        await asyncio.sleep(1.0)
        assert not fleet.workers[WorkerId("p1")].jobs
        make_room(fleet)
        assert len((await asking).tokens) == 8
        record = told(fleet, "r")
        first, second = record["admission"]
        assert (first["verdict"], first["at_s"]) == ("queued", 0.0)
        assert first["why"] == "1 s of prompts are queued at its worker, more than 0.5 s"
        assert first["forecast"]["ttft_s"] == pytest.approx(1.0, abs=0.05)
        assert second["verdict"] == "admitted"
        assert 1.0 <= second["at_s"] <= 1.3
        assert second["why"].startswith("after 1.")
        outcome = record["outcome"]
        assert outcome["class"] == "interactive"
        assert outcome["tenant"] == "acme"
        assert (outcome["attained"], outcome["why"]) == (True, "every objective was met")
        assert outcome["ttft_s"] == pytest.approx(second["at_s"] + 0.05, abs=0.02)
        assert outcome["tokens"] == 8
        assert fleet.router.flow.counters["queued"] == 1
        await settle(fleet)

    in_fleet(body, settings=settings())


def test_room_goes_to_the_more_urgent_though_it_came_later() -> None:
    async def body(fleet: Fleet) -> None:
        await fill(fleet)
        asking = [asyncio.create_task(ask_as(fleet, LOW, f"low{n}")) for n in range(3)]
        await asyncio.sleep(0.1)
        asking += [asyncio.create_task(ask_as(fleet, HIGH, f"high{n}")) for n in range(3)]
        await asyncio.sleep(0.1)
        make_room(fleet)
        await asyncio.gather(*asking)
        jobs = [job.request.id for job in fleet.workers[WorkerId("p1")].jobs]
        assert jobs == ["high0", "high1", "high2", "low0", "low1", "low2"]
        await settle(fleet)

    in_fleet(body, settings=settings())


@pytest.mark.parametrize("way", ["stop", "cancel", "leave"])
@pytest.mark.parametrize("room", [False, True])
def test_given_up_while_it_waits_nothing_is_left(way: str, room: bool) -> None:
    """`room`: in the same turn of the loop it is its turn, so it is at a worker before it knows."""

    async def body(fleet: Fleet) -> None:
        flow = fleet.router.flow
        await fill(fleet)
        run = flow.start(request("r"), Timeline(asyncio.get_running_loop().time()), HIGH)
        events = aiter(run)
        seen: list[RunToken | RunEnd] = []

        async def read() -> None:
            seen.append(await anext(events))

        reader = asyncio.create_task(read())
        await asyncio.sleep(0.3)
        assert flow.admission.queued == 1
        if room:
            fleet.router.roster.workers()[0].queued_tokens = 0
            fleet.router.roster.workers()[1].queued_tokens = 0
            flow.turn()
            assert flow.admission.queued == 0
        if way == "stop":
            await run.stop(CancelReason.CLIENT)
            await reader
            (end,) = seen
            assert isinstance(end, RunEnd)
            assert end.finish is FinishReason.CANCELLED
        else:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            if way == "leave":
                await events.aclose()  # type: ignore[attr-defined]
        await run.stop(CancelReason.CLIENT)
        assert told(fleet, "r")["outcome"]["attained"] is None
        make_room(fleet)
        await settle(fleet)
        assert len((await ask(fleet, request("next"))).tokens) == 8

    in_fleet(body, settings=settings())


def test_the_deadline_ends_the_waiting_to_the_moment() -> None:
    async def body(fleet: Fleet) -> None:
        await fill(fleet)
        start = asyncio.get_running_loop().time()
        got = await ask_as(fleet, HIGH, "r", deadline_s=3.0)
        assert isinstance(got.error, DeadlineExceeded)
        assert asyncio.get_running_loop().time() - start == pytest.approx(3.0)
        outcome = told(fleet, "r")["outcome"]
        assert (outcome["end"], outcome["attained"]) == ("timed_out", False)
        await settle(fleet)

    in_fleet(body, settings=settings())


def test_what_gives_way_is_refused_as_soon_as_it_would_be_late() -> None:
    soon = Terms("soon", Objectives(ttft_ms=2000, sheddable=True))

    async def body(fleet: Fleet) -> None:
        await fill(fleet)
        start = asyncio.get_running_loop().time()
        got = await ask_as(fleet, soon, "r")
        assert isinstance(got.error, Overloaded)
        assert got.error.retry_after_s >= 1.0
        assert "it would be late (soon is sheddable)" in got.error.message
        assert 1.0 < asyncio.get_running_loop().time() - start < 2.0
        record = told(fleet, "r")
        assert [decision["verdict"] for decision in record["admission"]] == ["queued", "refused"]
        assert (record["outcome"]["end"], record["outcome"]["attained"]) == ("rejected", False)
        assert fleet.router.flow.counters["shed"] == 1
        await settle(fleet)

    in_fleet(body, settings=settings())


def test_every_request_of_a_flood_ends_once_and_those_refused_at_once_know_when_to_come_back() -> None:
    async def body(fleet: Fleet) -> None:
        await fill(fleet)
        start, times = asyncio.get_running_loop().time(), []

        async def one(n: int) -> Answer:
            got = await ask_as(fleet, LOW if n % 2 else HIGH, f"r{n}")
            if isinstance(got.error, Overloaded):
                times.append(asyncio.get_running_loop().time() - start)
            return got

        asking = [asyncio.create_task(one(n)) for n in range(200)]
        await asyncio.sleep(1.0)
        make_room(fleet)
        answers = await asyncio.gather(*asking)
        kinds = Counter(type(got.error).__name__ for got in answers)
        assert kinds == {"NoneType": 20, "Overloaded": 180}
        assert all(len(got.tokens) == 8 for got in answers if got.error is None)
        assert times == [0.0] * 180, "refusals take no time"
        counters = fleet.router.flow.counters
        assert counters["requests"] == 200
        assert (counters["finished_length"], counters["failed_Overloaded"]) == (20, 180)
        figures = [rolling.figures(600, start + 9) for rolling in fleet.router.flow.goodput.values()]
        assert sum(one.attained + one.missed + one.uncounted for one in figures) == 200
        assert told(fleet, "r0")["outcome"]["end"] == "finished"
        await settle(fleet)

    in_fleet(body, settings=settings(max_queued=20))


@pytest.mark.parametrize("mode", [AdmissionMode.OFF, AdmissionMode.OBSERVE])
def test_where_it_is_not_enforced_nothing_waits(mode: AdmissionMode) -> None:
    async def body(fleet: Fleet) -> None:
        await fill(fleet)
        got = await ask_as(fleet, LOW, "r")
        assert len(got.tokens) == 8
        assert got.timeline.marks[next(iter(got.timeline.marks))] == 0.0
        decisions = told(fleet, "r")["admission"]
        assert [decision["verdict"] for decision in decisions] == (
            [] if mode is AdmissionMode.OFF else ["queued"]
        )
        assert told(fleet, "r")["outcome"]["attained"] is True
        await settle(fleet)

    in_fleet(body, settings=settings(mode=mode))


def test_when_the_last_worker_goes_those_who_wait_are_told_at_once() -> None:
    async def body(fleet: Fleet) -> None:
        await fill(fleet)
        asking = [asyncio.create_task(ask_as(fleet, HIGH, f"r{n}")) for n in range(3)]
        await asyncio.sleep(0.3)
        assert fleet.router.flow.admission.queued == 3
        for worker in ("p1", "d1"):
            fleet.kill(WorkerId(worker))
        start = asyncio.get_running_loop().time()
        assert [type(got.error) for got in await asyncio.gather(*asking)] == [Unavailable] * 3
        assert asyncio.get_running_loop().time() - start < 1.0
        await settle(fleet)

    in_fleet(body, settings=settings())


@pytest.mark.parametrize(("hang_at", "stages"), [(0, 2), (1, 5), (4, 6)])
def test_a_request_given_up_at_any_stage_has_no_interval_it_did_not_live(hang_at: int, stages: int) -> None:
    async def body(fleet: Fleet) -> None:
        await asyncio.sleep(100)  # an uptime that would show
        await ask_as(fleet, HIGH, "r", deadline_s=3.0)
        outcome = told(fleet, "r")["outcome"]
        assert ("ttft_s" in outcome, "tpot_s" in outcome, "e2e_s" in outcome) == (
            hang_at > 0,
            hang_at > 1,
            False,
        )
        assert len([name for name in outcome["stages"] if name != "ended"]) >= stages
        assert all(0 <= at <= 3.0 for at in outcome["stages"].values())
        figures = fleet.router.flow.goodput["interactive"].figures(600, asyncio.get_running_loop().time())
        assert (figures.ttft is None, figures.e2e) == (hang_at == 0, None)
        await settle(fleet)

    hang = Script(hang_at=hang_at)
    in_fleet(body, prefill=(hang,) if hang_at == 0 else (Script(),), decode=(hang,), settings=settings())
