"""The shell of a planner: follows registry and bus, stands for leader, decides, and has its plans applied.

The same on real plumbing and in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from fleet.bus import Bus, Subscription
from fleet.card_codec import decode_card
from fleet.demand import decode_demand, demand_subject
from fleet.errors import Internal, Unavailable
from fleet.events import load_subject
from fleet.ids import Incarnation
from fleet.member import workers_prefix
from fleet.registry import Registry, View
from fleet.targets import Mode, leader_key, planner_prefix
from fleet.wire.codec import decode_load_report
from planner.decide import State, decide
from planner.observe import Observer
from planner.record import Line, encode_line
from planner.words import Actuator, Fence, Plan, PlannerSettings, Targets

log = logging.getLogger(__name__)

_TELL_S = 30.0
"""How often a decision that changes nothing is shown again, seconds."""


class Planner:
    """One process of possibly several; all follow and decide, and the leader's decisions count."""

    def __init__(
        self,
        settings: PlannerSettings,
        fleet: str,
        registry: Registry,
        bus: Bus,
        *,
        name: str,
        card: bytes,
        lease_ttl_s: float = 5.0,
        keep: Callable[[bytes], None] = lambda line: None,
    ) -> None:
        """`card`: what it shows of itself; no other planner's is the same. `keep` takes the lines of the log
        of decisions."""
        self.settings = settings
        self.observer = Observer()
        self.state = State(settings)
        self.plan: Plan | None = None
        """The last decision."""
        self.actuator: Actuator
        """To be set before it runs."""
        self._fleet = fleet
        self._registry = registry
        self._bus = bus
        self._name = name
        self._card = card
        self._ttl_s = lease_ttl_s
        self._keep = keep
        self._stirred = asyncio.Event()
        self._told: tuple[float, tuple[object, ...]] | None = None

    async def run(self) -> None:
        """Until cancelled."""
        self._keep(encode_line(Line(self._now(), self.settings)))
        lease = await self._registry.lease(self._ttl_s)
        election = await self._registry.elect(leader_key(self._fleet), self._card, self._ttl_s)
        try:
            async with asyncio.TaskGroup() as tasks:
                # Subscribed before it shows itself, upon which routers begin to speak.
                demand = await self._bus.subscribe(demand_subject(self._fleet))
                loads = await self._bus.subscribe(load_subject(self._fleet))
                await lease.put(f"{planner_prefix(self._fleet)}planners/{self._name}", self._card)
                tasks.create_task(self._follow_registry())
                tasks.create_task(self._follow_demand(demand))
                tasks.create_task(self._follow_loads(loads))
                while True:
                    await self._pause()  # Before the first decision, too: it has heard nothing yet.
                    token = election.token
                    fence = None if token is None else Fence(leader_key(self._fleet), token)
                    await self._decide(fence)
        finally:
            await election.close()
            await lease.close()

    # -- what is heard

    async def _follow_registry(self) -> None:
        async for view in self._registry.watch(f"/fleet/{self._fleet}/"):
            self._take(view)
        raise Internal("the watch of the registry ended")

    def _take(self, view: View) -> None:
        cards, lives = {}, set()
        for key, value in view.values.items():
            if key.startswith(workers_prefix(self._fleet)):
                try:
                    card = decode_card(value, key)
                except ValueError as error:
                    log.debug("%s", error)
                    continue
                cards[card.id] = card
            elif key.startswith(f"/fleet/{self._fleet}/routers/"):
                with contextlib.suppress(msgspec.MsgspecError, KeyError):
                    told = msgspec.json.decode(value, type=dict[str, str | int])
                    lives.add(Incarnation(str(told["life"])))
        self.observer.apply_view(cards, frozenset(lives), self._now(), live=view.live, emptied=view.emptied)

    async def _follow_demand(self, subscription: Subscription) -> None:
        async for message in subscription:
            try:
                self.observer.apply_demand(decode_demand(message.data), self._now())
            except ValueError as error:
                log.warning("a message on %s cannot be read: %s", message.subject, error)
                continue
            if self.observer.calling and self.plan is not None and self.plan.decode == 0:
                self._stirred.set()
        raise Internal("the subscription to demand ended")

    async def _follow_loads(self, subscription: Subscription) -> None:
        async for message in subscription:
            try:
                self.observer.apply_load(decode_load_report(message.data), self._now())
            except ValueError as error:
                log.warning("a message on %s cannot be read: %s", message.subject, error)
        raise Internal("the subscription to load reports ended")

    # -- deciding

    async def _pause(self) -> None:
        """Until the next decision is due, or somebody waits for whom nobody is there."""
        self._stirred.clear()
        due = self.plan.next_at if self.plan is not None else self._now() + self.settings.interval_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, due - self._now())):
                await self._stirred.wait()

    async def _decide(self, fence: Fence | None) -> None:
        try:
            seen = await self.actuator.current()
        except Unavailable as error:
            log.warning("what is wanted is not known: %s", error.message)
            self.plan = None
            return
        if seen is None:
            self.plan = None
            return
        now = self._now()
        observation = self.observer.observe(seen.desired, now)
        plan = self.plan = decide(observation, self.state, now)
        desired = seen.desired
        changes = (plan.prefill, plan.decode) != (desired.prefill, desired.decode)
        # Before it is carried out: whatever happens to this process then, what was decided is known.
        self._keep(encode_line(Line(now, None, observation, plan, leading=fence is not None)))
        if fence is not None and (outcome := await self._act(plan, seen, fence, changes)):
            self._keep(encode_line(Line(now, outcome=outcome)))

    async def _act(self, plan: Plan, seen: Targets, fence: Fence, changes: bool) -> str:
        mode, now = seen.desired.mode, self._now()
        try:
            if changes and mode is Mode.ACT:
                done = await self.actuator.apply(plan, seen, fence)
                before = f"prefill={seen.desired.prefill} decode={seen.desired.decode}"
                log.info(
                    "%s: %s → prefill=%d decode=%d: %s",
                    "applied" if done else "refused", before, plan.prefill, plan.decode, plan.why,
                )  # fmt: skip
                self._told = None
                return "applied" if done else "refused"
            said = (plan.prefill, plan.decode, plan.advice, mode)
            if self._told is None or self._told[1] != said or now - self._told[0] >= _TELL_S:
                if changes:
                    log.info("advised: prefill=%d decode=%d: %s", plan.prefill, plan.decode, plan.why)
                await self.actuator.tell(plan, seen, fence)
                self._told = (now, said)
        except Unavailable as error:
            log.warning("a plan could not be applied: %s", error.message)
            return "away"
        return ""

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
