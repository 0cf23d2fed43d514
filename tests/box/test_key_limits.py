"""The limits of an API key over several routers, in virtual time: those of the fleet, as far as routers hear
each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from whole_fleet import Box

from fleet.api_keys import ApiKey, digest
from fleet.errors import Overloaded
from fleet.virtual_time import run
from fleetctl.sim.fleet import SimFleet
from router.openai.callers import Callers, Quota

SECRET = "k" * 43
SOON_S = 0.1
"""By then routers have heard of each other: `peers.batch_s`, and its way."""


def key(**limits: Any) -> ApiKey:
    return ApiKey(sha256=digest(SECRET), tenant="acme", **limits)


class Front:
    """The API keys of each router of a box, as its ingress has them."""

    def __init__(self, box: SimFleet, one: ApiKey) -> None:
        self._box = box
        self._key = one
        self._callers: dict[str, Callers] = {}
        for name in box.routers:
            self.open(name)

    def open(self, router: str) -> None:
        callers = self._callers[router] = Callers([self._key])
        self._box.routers[router].router.share(callers)

    def _do(self, router: str, what: Callable[[Quota], None]) -> None:
        caller = self._callers[router].caller(f"Bearer {SECRET}".encode())
        assert caller.quota is not None
        quota = caller.quota
        self._box.routers[router].process.call(lambda: what(quota))

    def enter(self, router: str) -> bool:
        """Whether it was let in."""
        try:
            self._do(router, lambda quota: quota.enter(asyncio.get_running_loop().time()))
        except Overloaded:
            return False
        return True

    def leave(self, router: str, tokens: int = 0) -> None:
        def ended(quota: Quota) -> None:
            quota.leave()
            quota.used(tokens)

        self._do(router, ended)


NAMES = ("router", "router-1", "router-2")


def test_requests_running_at_all_routers_are_counted_together() -> None:
    async def main() -> None:
        async with Box(1, 1, routers=3) as box:
            front = Front(box, key(concurrent_requests=3))
            await asyncio.sleep(2.0)
            for name in NAMES:
                assert front.enter(name)
            await asyncio.sleep(SOON_S)
            assert not any(front.enter(name) for name in NAMES)
            front.leave("router-1")
            await asyncio.sleep(SOON_S)
            assert front.enter("router")
            await asyncio.sleep(SOON_S)
            assert not front.enter("router-2")

    run(main(), horizon_s=600)


def test_a_minutes_requests_and_tokens_are_those_of_all_routers() -> None:
    async def main() -> None:
        async with Box(1, 1, routers=3) as box:
            front = Front(box, key(requests_per_minute=30, tokens_per_minute=6000))
            for name in NAMES:  # So that each has been heard of once.
                assert front.enter(name)
                front.leave(name)
            await asyncio.sleep(60.0)
            let_in = 0
            for number in range(90):
                if front.enter(NAMES[number % 3]):
                    let_in += 1
                    front.leave(NAMES[number % 3], tokens=10)
                await asyncio.sleep(SOON_S)
            assert 30 <= let_in <= 30 + 90 * SOON_S / 2 + 1, "what refills meanwhile, and no more"
            await asyncio.sleep(60.0)
            assert front.enter("router")
            front.leave("router", tokens=12_000)
            await asyncio.sleep(SOON_S)
            assert not front.enter("router-2"), "overdrawn at another router"
            await asyncio.sleep(61.0)
            assert front.enter("router-2")
            front.leave("router-2")

    run(main(), horizon_s=600)


def test_a_router_that_dies_takes_what_ran_there_with_it_and_one_that_starts_knows_what_runs() -> None:
    async def main() -> None:
        async with Box(1, 1, routers=3) as box:
            front = Front(box, key(concurrent_requests=2))
            await asyncio.sleep(2.0)
            assert front.enter("router-1")
            assert front.enter("router")
            await asyncio.sleep(SOON_S)
            assert not front.enter("router-2")
            await box.kill("router-1")
            await asyncio.sleep(5.0)
            assert front.enter("router-2"), "its clients' connections are broken"
            await asyncio.sleep(SOON_S)
            box.start_router("router-1")
            front.open("router-1")
            await asyncio.sleep(2.0)
            assert not front.enter("router-1")

    run(main(), horizon_s=600)


def test_lost_messages_are_made_up_for_and_without_nats_each_router_counts_its_own() -> None:
    async def main() -> None:
        async with Box(1, 1, routers=2) as box:
            front = Front(box, key(concurrent_requests=1))
            await asyncio.sleep(2.0)
            assert front.enter("router")
            await asyncio.sleep(SOON_S)
            box.bus.lose = lambda subject: ".moves." in subject
            front.leave("router")
            await asyncio.sleep(SOON_S)
            assert not front.enter("router-1"), "that it is over was lost"
            box.bus.lose = lambda subject: False
            await asyncio.sleep(1.5)
            assert front.enter("router-1"), "all that runs was told again"
            await asyncio.sleep(SOON_S)
            assert not front.enter("router")
            box.bus.up = False
            await asyncio.sleep(5.0)
            assert front.enter("router")
            box.bus.up = True
            await asyncio.sleep(5.0)
            assert not front.enter("router"), "two run, one too many"

    run(main(), horizon_s=600)


@pytest.mark.parametrize("limits", [{}, {"concurrent_requests": 5}])
def test_only_keys_that_have_a_limit_are_told_of(limits: dict[str, int]) -> None:
    callers, told = Callers([key(**limits)]), list[bool]()
    callers.tell = lambda: told.append(True)
    quota = callers.caller(f"Bearer {SECRET}".encode()).quota
    assert quota is not None
    quota.enter(0.0)
    assert [use.running for use in callers.take(whole=False)] == ([1] if limits else [])
    assert not callers.take(whole=False)
    assert bool(callers.take(whole=True)) == bool(told) == bool(limits)
