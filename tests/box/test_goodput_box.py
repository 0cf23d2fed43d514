"""Admission in a closed loop: two prefill and two decode workers, more asked of them than they can do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from whole_fleet import MODEL, Answer, Box

from engine.latency_runner import LatencyModel
from fleet.errors import FleetError
from fleet.goodput import Figures
from fleet.handoff import CancelReason
from fleet.ids import RequestId, WorkerId
from fleet.member import Role
from fleet.objectives import Objectives
from fleet.request import Request, Sampling
from fleet.stages import Timeline
from fleet.virtual_time import run
from router.run import RunToken, Terms
from router.settings import AdmissionMode, AdmissionSettings, CostSettings, RouterSettings

SLOW = LatencyModel(base_s=0.02, per_prompt_token_s=0.001, per_decode_s=0.002, per_context_token_s=5e-7)
CAPACITY = 8.5
"""Requests of `Load` a second that two and two such workers can do, by and large."""
OBJECTIVES = Objectives(ttft_ms=3000, tpot_ms=120)
ONE = Terms("standard", OBJECTIVES, "acme")


@dataclass(frozen=True)
class Load:
    rate: float
    """Requests a second, on average, as they come from many clients who do not wait for each other."""
    seconds: float
    terms: Callable[[random.Random], Terms] = lambda chance: ONE
    impatient: float = 0.0
    """Share of clients who leave after a while, wherever their request is then."""


@dataclass
class Seen:
    figures: dict[str, Figures]
    """By class."""
    counters: dict[str, int]
    times: dict[str, list[float]]
    """Of each request when its tokens came."""
    tenants: dict[str, list[bool]]
    """Of each tenant whether its requests attained."""


def play(load: Load, mode: AdmissionMode = AdmissionMode.ENFORCE, seed: int = 5) -> Seen:
    async def main() -> Seen:
        settings = RouterSettings(admission=AdmissionSettings(mode=mode))
        async with Box(2, 2, latency=SLOW, router=settings) as box:
            loop, chance = asyncio.get_running_loop(), random.Random(seed)
            times: dict[str, list[float]] = {}
            asking: list[asyncio.Task[None]] = []

            async def ask(made: Request, terms: Terms, leaves_s: float | None) -> None:
                timeline = Timeline(loop.time())
                flow = box.router.flow.start(made, timeline, terms)
                said = times.setdefault(made.id, [])
                try:
                    async with asyncio.timeout(leaves_s):
                        async for event in flow:
                            if isinstance(event, RunToken):
                                said.append(loop.time() - timeline.start)
                except (FleetError, TimeoutError):
                    pass
                finally:
                    await flow.stop(CancelReason.CLIENT)

            begin, at = loop.time(), 0.0
            while (at := at + chance.expovariate(load.rate)) < load.seconds:
                await asyncio.sleep(begin + at - loop.time())
                terms = load.terms(chance)
                prompt = tuple(chance.randrange(1000) for _ in range(chance.randrange(150, 450)))
                sampling = Sampling(max_tokens=chance.randrange(8, 32), temperature=0.0)
                made = Request(
                    RequestId(f"r{len(asking)}"), MODEL, prompt, sampling,
                    salt=terms.tenant, priority=terms.objectives.priority,
                )  # fmt: skip
                leaves_s = chance.uniform(0.0, 6.0) if chance.random() < load.impatient else None
                asking.append(asyncio.create_task(ask(made, terms, leaves_s)))
            await asyncio.gather(*asking)
            flow = box.router.flow
            tenants: dict[str, list[bool]] = {}
            for record in flow.records.ended:
                assert record.outcome is not None
                tenants.setdefault(record.outcome["tenant"], []).append(record.outcome["attained"] is True)
            figures = {name: rolling.figures(1e6, loop.time()) for name, rolling in flow.goodput.items()}
            counted = sum(one.attained + one.missed + one.uncounted for one in figures.values())
            assert counted == len(asking) == flow.counters["requests"], "every request counts once"
            return Seen(figures, dict(flow.counters), times, tenants)

    return run(main(), horizon_s=7200)


def test_at_twice_the_load_it_can_bear_a_fleet_still_serves_what_it_can() -> None:
    load = Load(2 * CAPACITY, 15.0)
    without, held = (
        play(load, mode).figures["standard"] for mode in (AdmissionMode.OFF, AdmissionMode.ENFORCE)
    )
    assert held.attained >= 4 * without.attained
    assert held.attained >= 0.75 * CAPACITY * load.seconds


def test_a_fleet_with_little_to_do_answers_as_if_there_were_no_admission() -> None:
    load = Load(0.12 * CAPACITY, 15.0)
    held, without = (play(load, mode) for mode in (AdmissionMode.ENFORCE, AdmissionMode.OFF))
    assert len(held.times) > 10
    assert held.times == without.times
    assert "queued" not in held.counters
    assert held.figures["standard"].attainment == 1.0


def test_interactive_requests_are_in_time_while_batch_gives_way_and_is_not_starved() -> None:
    urgent = Terms("interactive", Objectives(ttft_ms=2500, tpot_ms=120, priority=1))
    patient = Terms("batch", Objectives(ttft_ms=10_000, priority=-1, sheddable=True))
    load = Load(2 * CAPACITY, 20.0, lambda chance: urgent if chance.random() < 0.25 else patient)
    held = play(load)
    interactive, batch = held.figures["interactive"], held.figures["batch"]
    assert interactive.attainment is not None
    assert interactive.attainment >= 0.95
    assert "rejected" not in interactive.reasons
    assert batch.reasons["rejected"] == held.counters["shed"] > 20
    assert batch.attained >= 0.4 * CAPACITY * load.seconds, "what is left over is batch's"


def test_two_tenants_of_whom_one_asks_for_three_times_as_much() -> None:
    greedy, modest = Terms("standard", OBJECTIVES, "greedy"), Terms("standard", OBJECTIVES, "modest")
    load = Load(1.8 * CAPACITY, 15.0, lambda chance: greedy if chance.random() < 0.75 else modest)
    tenants = play(load).tenants
    shares = {name: sum(attained) / len(attained) for name, attained in tenants.items()}
    assert shares["modest"] >= 0.9, "it asks for less than half of what there is"
    assert 0.25 < shares["greedy"] < 0.7, "and the other gets all the rest"


def test_more_load_never_sheds_less() -> None:
    sheddable = Terms("batch", Objectives(ttft_ms=3000, sheddable=True))
    shed = [
        play(Load(share * CAPACITY, 10.0, lambda chance: sheddable)).counters.get("shed", 0)
        for share in (0.4, 1.4, 2.0)
    ]
    assert shed[0] == 0
    assert 0 < shed[1] < shed[2]


def test_clients_who_leave_wherever_their_request_is_leave_nothing_behind() -> None:
    """The box checks at its end that every block, lease, stream and place is back."""
    seen = play(Load(2 * CAPACITY, 8.0, impatient=0.5))
    assert seen.counters["cancelled"] > 15
    assert seen.counters["queued"] > 25
    assert seen.figures["standard"].uncounted > 0


def test_nothing_waits_while_a_worker_of_each_role_stands_idle_not_even_after_a_change_of_role() -> None:
    """Bursts that crowd the decode workers, pauses in which they empty, and a worker that changes sides."""

    async def main() -> float:
        settings = RouterSettings(cost=CostSettings(local_prefill_tokens=0, local_advantage=1e9))
        crowds, strict = Terms("batch", Objectives(priority=0)), Terms("standard", Objectives(tpot_ms=45))
        async with Box(2, 3, latency=SLOW, router=settings) as box:
            loop, chance, flow = asyncio.get_running_loop(), random.Random(3), box.router.flow
            asking: list[asyncio.Task[None]] = []
            longest, since = 0.0, None

            def ask(count: int, terms: Terms, tokens: int, size: int) -> None:
                for _ in range(count):
                    prompt = tuple(chance.randrange(1000) for _ in range(size))
                    made = box.request(prompt, Sampling(max_tokens=tokens, temperature=0.0), len(asking))
                    answer = Answer(made.id)
                    asking.append(asyncio.create_task(box.ask_over("router", made, answer, terms=terms)))

            async def load() -> None:
                for turn in range(3):
                    ask(60, crowds, 60, 40)
                    await asyncio.sleep(4.0)
                    # Most of a crowd's answers have ended; long prompts are computed when these come.
                    ask(4, strict, 8, 1500)
                    ask(40, strict, 30, 40)
                    if turn == 1:
                        address = box.workers[WorkerId("decode-2")].address
                        await box.wire.wire("operator").take_role(address, Role.PREFILL, 60.0, 5.0)
                    await asyncio.sleep(6.0)
                await asyncio.gather(*asking)

            loading = asyncio.create_task(load())
            while not loading.done():
                idle = {
                    standing.card.role
                    for standing in box.router.roster.workers()
                    if standing.usable and not box.workers[standing.id].engine.load().running
                    and not box.workers[standing.id].engine.load().waiting
                }  # fmt: skip
                held = flow.admission.queued > 0 and len(idle) == 2
                since = (loop.time() if since is None else since) if held else None
                longest = max(longest, loop.time() - since if since is not None else 0.0)
                await asyncio.sleep(0.02)
            await loading
            assert flow.counters["queued"] > 20, "no load that could wait"
            return longest

    # Until the report of it comes and those who wait are looked at, nobody knows that a worker is idle.
    assert run(main(), horizon_s=600) < 0.6
