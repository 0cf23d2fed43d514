"""Several routers in virtual time: they act as one, whoever of them dies, starts, or is cut off."""

from __future__ import annotations

import asyncio
import functools
import random
from dataclasses import dataclass, field

import pytest
from whole_fleet import MODEL, Answer, Box

from fleet.ids import RequestId, WorkerId
from fleet.member import Role
from fleet.request import Request, Sampling
from fleet.virtual_time import run
from fleetctl.sim.fleet import SimWorker
from router.settings import CostSettings, RouterSettings

REMOTE = RouterSettings(cost=CostSettings(local_prefill_tokens=0, local_advantage=1e9))
"""Prompts go to prefill workers: theirs is the load that is looked at."""
WORKERS = 4


@dataclass
class Crowd:
    """Clients of all routers in turn, at random times; and how the load lay on prefill workers meanwhile."""

    box: Box
    rate: float
    shared: int = 0
    """Tokens that all prompts begin with."""
    answers: list[Answer] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    """Seconds to the first token."""
    queues: list[list[int]] = field(default_factory=list)
    """Tokens queued at each worker, every now and then."""
    computed: list[int] = field(default_factory=list)
    """Prompt tokens that each computed."""
    cached: int = 0
    """Prompt tokens that were found in their caches."""

    async def come(self, count: int, first: int = 0, seed: int = 1) -> None:
        """`count` clients, until the last is served."""
        chance = random.Random(seed)
        watching = asyncio.create_task(self._watch())
        root, at = [chance.randrange(1000) for _ in range(self.shared)], 0.0
        clients = []
        for number in range(first, first + count):
            at += chance.expovariate(self.rate)
            own = [chance.randrange(1000) for _ in range(chance.randrange(200, 600))]
            clients.append(asyncio.create_task(self._client(number, at, (*root, *own))))
        await asyncio.gather(*clients)
        watching.cancel()
        counters = [worker.load().counters for worker in self._prefill()]
        self.cached = sum(each["cached_tokens"] for each in counters)
        self.computed = [each["prompt_tokens"] - each["cached_tokens"] for each in counters]

    async def _client(self, number: int, at: float, prompt: tuple[int, ...]) -> None:
        await asyncio.sleep(at)
        request = Request(RequestId(f"r{number}"), MODEL, prompt, Sampling(max_tokens=2), deadline_s=100.0)
        names = list(self.box.routers)
        answer, asked = Answer(request.id), asyncio.get_running_loop().time()
        self.answers.append(answer)
        await self.box.ask_over(names[number % len(names)], request, answer)
        if not answer.lost:
            assert answer.error is None, answer.error
            assert answer.tokens == self.box.truth(request)
            self.waits.append(answer.times[0] - asked)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            self.queues.append([worker.load().queued_tokens for worker in self._prefill()])

    def _prefill(self) -> list[SimWorker]:
        return [worker for worker in self.box.workers.values() if worker.role is Role.PREFILL]

    @property
    def imbalance(self) -> float:
        """The longest queue over the mean one, over all the time."""
        return sum(map(max, self.queues)) * WORKERS / sum(map(sum, self.queues))

    def wait(self, share: float) -> float:
        return sorted(self.waits)[int(share * len(self.waits))]


def counted(box: Box) -> dict[str, int]:
    """What each router believes of others' requests, tombstones aside."""
    return {
        name: sum(
            not sent.missed for worker in router.router.roster.workers() for sent in worker.others.values()
        )
        for name, router in box.routers.items()
    }


@functools.cache
def crowd_of(routers: int, *, shared: int = 0, deaf: bool = False, count: int = 200) -> Crowd:
    async def main() -> Crowd:
        async with Box(WORKERS, WORKERS, router=REMOTE, routers=routers) as box:
            if deaf:
                box.bus.lose = lambda subject: ".moves." in subject
                await asyncio.sleep(4.0)  # Now they know that they do not see each other.
            crowd = Crowd(box, rate=40.0, shared=shared)
            await crowd.come(count)
            return crowd

    return run(main(), horizon_s=3600)


@pytest.mark.parametrize("routers", [2, 8])
def test_several_routers_share_the_load_as_well_as_one_does(routers: int) -> None:
    alone, together = crowd_of(1), crowd_of(routers)
    assert together.imbalance < 1.15 * alone.imbalance
    for share in (0.5, 0.9):
        assert together.wait(share) < 1.25 * alone.wait(share)


def test_without_seeing_each_other_eight_routers_are_worse_but_do_not_run_to_one_worker() -> None:
    """As it is without NATS."""
    apart = crowd_of(8, deaf=True)
    assert apart.imbalance > 1.15 * crowd_of(8).imbalance, "else there is nothing to see each other for"
    assert apart.imbalance < 0.8 * WORKERS


def test_a_system_prompt_that_one_worker_caches_does_not_draw_all_requests_there() -> None:
    crowd = crowd_of(8, shared=800)
    assert max(crowd.computed) < 1.5 * sum(crowd.computed) / WORKERS
    assert crowd.cached > 130 * 800, "of 200 times 800 tokens"


def test_an_idle_fleet_computes_what_is_shared_once_whichever_router_is_asked() -> None:
    async def main() -> None:
        async with Box(WORKERS, 1, router=REMOTE, routers=2) as box:
            for number in range(6):
                prompt = (*range(400), *range(1000 + 50 * number, 1050 + 50 * number))
                request = Request(RequestId(f"r{number}"), MODEL, prompt, Sampling(max_tokens=2))
                await box.ask_over(list(box.routers)[number % 2], request, Answer(request.id))
                await asyncio.sleep(0.5)
            counters = [one.load().counters for one in box.workers.values() if one.role is Role.PREFILL]
            assert sorted(each["prompt_tokens"] for each in counters) == [0, 0, 0, 6 * 450]

    run(main(), horizon_s=600)


def test_a_router_that_dies_in_the_middle_leaves_no_load_and_one_that_starts_sees_all() -> None:
    async def main() -> None:
        async with Box(WORKERS, 2, router=REMOTE, routers=3) as box:
            crowd = Crowd(box, rate=60.0)
            coming = asyncio.create_task(crowd.come(150))
            for name in ("router-1", "router-2", "router-1"):
                await asyncio.sleep(0.6)
                life = box.routers[name].router.life
                await box.kill(name)
                # Its clients' streams end with it, and so what it sent: long before its card is gone.
                await asyncio.sleep(1.5)
                for router in box.routers.values():
                    for worker in router.router.roster.workers():
                        of_dead = [sent for key, sent in worker.others.items() if key[0] == life]
                        assert all(sent.missed for sent in of_dead)
                box.start_router(name)
            await coming
            assert sum(answer.lost for answer in crowd.answers) > 0
            await box.until(box.ready)
            await box.until(lambda: not any(counted(box).values()))
            await box.until(lambda: all(router.router.roster.routers == 1 for router in box.routers.values()))

    run(main(), horizon_s=600)


@pytest.mark.parametrize("how", ["cut", "mute", "deaf", "broker away"])
def test_a_router_cut_off_from_nats_goes_on_alone_and_is_counted_again_when_it_is_back(how: str) -> None:
    async def main() -> None:
        async with Box(WORKERS, 2, router=REMOTE, routers=2) as box:
            crowd = Crowd(box, rate=40.0)
            await crowd.come(20)
            one, other = box.routers["router"], box.routers["router-1"]
            if how == "broker away":
                box.bus.up = False
            else:
                setattr(one.bus, how, True)
            await crowd.come(60, first=100)
            await asyncio.sleep(4.0)
            blind = [router for router in (one, other) if router.router.roster.routers == 2]
            assert blind == {"cut": [one, other], "mute": [other], "deaf": [one]}.get(how, [one, other])
            assert not any(counted(box).values()), "nobody counts what nobody sees"
            await crowd.come(40, first=200)
            if how == "broker away":
                box.bus.up = True
            else:
                setattr(one.bus, how, False)
            await box.until(lambda: all(r.router.roster.routers == 1 for r in (one, other)), 5.0)
            before = crowd.computed
            await crowd.come(60, first=300)
            gained = [after - earlier for after, earlier in zip(crowd.computed, before, strict=True)]
            assert max(gained) < 1.5 * sum(gained) / WORKERS, "what it did not see meanwhile leaves no trace"

    run(main(), horizon_s=600)


def test_lost_doubled_and_late_messages_leave_no_phantom() -> None:
    async def main() -> None:
        chance = random.Random(3)
        async with Box(2, 2, router=REMOTE, routers=4) as box:
            box.bus.lose = lambda subject: ".moves." in subject and chance.random() < 0.3
            box.bus.late = lambda subject: (
                chance.choice([(0.0,), (0.0, 0.3), (1.5,)]) if ".moves." in subject else (0.0,)
            )
            await Crowd(box, rate=40.0).come(120)
            box.bus.lose, box.bus.late = lambda subject: False, lambda subject: (0.0,)
            await box.until(lambda: not any(counted(box).values()), 5.0)
            gaps = [router.router.counters["peer_gaps"] for router in box.routers.values()]
            assert min(gaps) > 0

    run(main(), horizon_s=600)


def test_a_worker_that_dies_is_left_by_all_routers_though_it_alone_caches_the_prompt() -> None:
    async def main() -> None:
        async with Box(2, 1, router=REMOTE, routers=3) as box:
            prompt = tuple(range(600))
            for number, name in enumerate(box.routers):
                request = Request(RequestId(f"a{number}"), MODEL, prompt, Sampling(max_tokens=2))
                await box.ask_over(name, request, Answer(request.id))
            await asyncio.sleep(1.0)
            holder = max((WorkerId("prefill-0"), WorkerId("prefill-1")), key=box.router.index.blocks)
            await box.kill(holder)
            for number, name in enumerate(box.routers):
                request = Request(
                    RequestId(f"b{number}"), MODEL, prompt, Sampling(max_tokens=2), deadline_s=5.0
                )
                answer = Answer(request.id)
                await box.ask_over(name, request, answer)
                assert answer.error is None, answer.error
            await box.until(
                lambda: all(r.router.roster.get(holder) is None for r in box.routers.values()), 30.0
            )
            assert all(r.router.index.blocks(holder) == 0 for r in box.routers.values())

    run(main(), horizon_s=600)
