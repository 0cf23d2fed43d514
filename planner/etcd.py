"""Wanted counts in etcd, changed by one transaction; role changes asked of the workers themselves.

Implements `planner.words.Actuator`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from fleet.errors import BadRequest, FleetError
from fleet.member import Role, WorkerCard, desired_key
from fleet.registry import Condition, Registry
from fleet.targets import LastDecision, decision_key, format_desired, parse_desired
from fleet.wire import Wire
from planner.words import Fence, Plan, Targets

log = logging.getLogger(__name__)

TURN_LIMIT_S = 60.0
"""After which requests that still run at a worker that changes its role go on elsewhere."""
_ASK_S = 5.0


class EtcdActuator:
    def __init__(
        self,
        fleet: str,
        registry: Registry,
        wire: Wire,
        candidates: Callable[[str], Sequence[WorkerCard]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`candidates`: ready workers of a role, those first that are to change it first. `clock`: Unix time,
        for those who read of a decision."""
        self._fleet = fleet
        self._registry = registry
        self._wire = wire
        self._candidates = candidates
        self._clock = clock

    async def current(self) -> Targets | None:
        entry = await self._registry.entry(desired_key(self._fleet))
        if entry is None:
            return None
        try:
            return Targets(parse_desired(entry.value), entry.modified)
        except BadRequest as error:
            log.warning("%s: %s", desired_key(self._fleet), error.message)
            return None

    async def apply(self, plan: Plan, seen: Targets, fence: Fence | None) -> bool:
        """Of a change of roles the counts follow the workers' cards: whoever keeps the workers moves them.
        What else the plan changes, as starts that are given up, is written at once."""
        now = seen.desired
        turned = plan.turns.count("prefill") - plan.turns.count("decode")
        new = replace(now, prefill=plan.prefill - turned, decode=plan.decode + turned)
        puts = {decision_key(self._fleet): self._told(plan, seen, changed=True)}
        if new != now:
            puts[desired_key(self._fleet)] = format_desired(new)
        if not await self._put(puts, seen, fence):
            return False
        for role, count in Counter(plan.turns).items():
            other = "decode" if role == "prefill" else "prefill"
            for card in self._candidates(other)[:count]:
                await self._turn(card, Role(role))
        return True

    async def tell(self, plan: Plan, seen: Targets, fence: Fence | None) -> bool:
        """Shows a decision that changes nothing."""
        return await self._put({decision_key(self._fleet): self._told(plan, seen)}, seen, fence)

    async def _put(self, puts: dict[str, bytes], seen: Targets, fence: Fence | None) -> bool:
        conditions = [Condition(desired_key(self._fleet), modified=int(seen.version))]
        if fence is not None:
            conditions.append(Condition(fence.key, created=fence.token))
        return await self._registry.put_if(conditions, puts) is not None

    async def _turn(self, card: WorkerCard, role: Role) -> None:
        try:
            state = await self._wire.take_role(card.address, role, TURN_LIMIT_S, _ASK_S)
            log.info("%s is to be a %s worker: it is %s", card.id, role, state)
        except FleetError as error:
            log.warning("%s does not become a %s worker: %s", card.id, role, error.message)

    def _told(self, plan: Plan, seen: Targets, changed: bool = False) -> bytes:
        return msgspec.json.encode(
            LastDecision(
                plan.prefill,
                plan.decode,
                plan.why,
                seen.desired.mode.value,
                changed,
                round(self._clock(), 3),
                len(plan.turns),
                plan.advice,
            )
        )
