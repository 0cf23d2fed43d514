"""The way of a request through admission to its first leg: at once, when its turn comes, or not at all."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fleet.errors import Overloaded
from fleet.ids import RequestId
from router.account import Account
from router.admission import Act, Admission, Decision
from router.choosing import Found, Known
from router.forecast import Forecast, forecast
from router.legs import Leg, Legs
from router.settings import AdmissionMode

if TYPE_CHECKING:
    from router.flow import Flow

_TURN_S = 0.25
"""How often those who wait for their turn are looked at when nothing happens, seconds."""


class Turns:
    """Those who wait for their turn."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._waiting: dict[RequestId, Turn] = {}
        self._ticking: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, request: RequestId, turn: Turn) -> None:
        """Puts it into the queue, for `look` to end its waiting."""
        self._waiting[request] = turn
        self.look()

    def look(self) -> None:
        """Sends on those whose turn it is, as long as there is room. Called whenever there may be more."""
        if not self._waiting:
            return
        now = asyncio.get_running_loop().time()
        for request, decision in self._admission.expired(now):
            self.refuse(request, decision)
        for model in self._admission.models():
            while (head := self._admission.head(model, now)) is not None:
                if not self._waiting[head].offered(now):
                    break
                del self._waiting[head]
        if self._ticking is None and self._waiting:
            self._ticking = asyncio.get_running_loop().call_later(_TURN_S, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        self.look()

    def refuse(self, request: RequestId, decision: Decision) -> None:
        """One that waits."""
        self._waiting.pop(request).turned_away(decision)

    def forget(self, request: RequestId) -> None:
        """Its waiting is over, for whatever reason; idempotent."""
        self._waiting.pop(request, None)


class Turn:
    """One request until its first leg was dispatched."""

    __slots__ = ("_account", "_flow", "_known", "_legs", "_waiting")

    def __init__(self, flow: Flow, known: Known, account: Account, legs: Legs) -> None:
        self._flow = flow
        self._known = known
        self._account = account
        self._legs = legs
        self._waiting: asyncio.Future[None] | None = None
        """While it waits for its turn."""

    async def first_leg(self) -> Leg:
        """Raises `Overloaded` for a request that is refused."""
        flow, known, legs = self._flow, self._known, self._legs
        now = asyncio.get_running_loop().time()
        flow.chooser.check_pins(known)
        found = None if flow.mode is AdmissionMode.OFF else flow.chooser.computer(known, now, set())
        if found is None:
            return await legs.next()
        cast = self._forecast(found)
        accepted = self._account.timeline.start
        decision, gave_way = flow.admission.arrive(known.request, known.terms, cast, accepted, now)
        self._account.decided(decision, now)
        if gave_way is not None:
            flow.turns.refuse(*gave_way)
        if flow.mode is AdmissionMode.ENFORCE:
            if decision.act is Act.REFUSE:
                raise self._shed(decision)
            if decision.act is Act.QUEUE:
                return await self._wait()
        return legs.try_next(found, cast) or await legs.next()

    async def _wait(self) -> Leg:
        flow, known = self._flow, self._known
        flow.counters["queued"] += 1
        self._legs.arm()
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            flow.turns.wait(known.request.id, self)
            await self._waiting
        finally:
            self._waiting = None
            flow.turns.forget(known.request.id)
        if known.verdict is not None:
            raise known.verdict
        return self._legs.now or await self._legs.next()

    def offered(self, now: float) -> bool:
        """It is its turn: whether it went. It is dispatched here, so that the next one sees it."""
        admission, request = self._flow.admission, self._known.request.id
        found = self._flow.chooser.computer(self._known, now, set())
        cast = None if found is None else self._forecast(found)
        decision = admission.offer(request, cast, now)
        if decision.act is Act.QUEUE and found is not None:
            other = self._elsewhere(found, now)
            if other is not None:
                found, cast = other, self._forecast(other)
                decision = admission.offer(request, cast, now)
        if decision.act is not Act.ADMIT:
            return False
        self._account.decided(decision, now)
        if found is not None:
            self._legs.try_next(found, cast)
        self.wake()
        return True

    def _elsewhere(self, found: Found, now: float) -> Found | None:
        """A worker with room that is worse than the one without, but better than as long a wait as there is:
        the cost model knows queues at workers only, and this one stands for what would be there."""
        flow, known = self._flow, self._known
        crowded = flow.chooser.crowded(known, flow.admission.ahead_s(known.terms))
        other = flow.chooser.computer(known, now, crowded)
        if other is None or other.choice.worker == found.choice.worker:
            return None
        wait_s = flow.admission.wait_s(known.request.model)
        advantage = flow.settings.cost.local_advantage if other.choice.local else 1.0
        return other if other.choice.seconds * advantage < found.choice.seconds + wait_s else None

    def turned_away(self, decision: Decision) -> None:
        """While it waits."""
        self._account.decided(decision, asyncio.get_running_loop().time())
        self._known.verdict = self._shed(decision)
        self.wake()

    def wake(self) -> None:
        """Its waiting, if it waits, is over."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _shed(self, decision: Decision) -> Overloaded:
        self._flow.counters["shed"] += 1
        return decision.error()

    def _forecast(self, found: Found) -> Forecast:
        answer = self._flow.admission.answer(self._known.request, self._known.terms)
        return forecast(found.pool, found.choice, answer, self._flow.settings.cost)
