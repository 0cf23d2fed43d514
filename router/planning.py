"""A router's part in scaling: tells a planner, where there is one, what is asked here; hears what it decided.

Without a planner nothing is told. What is asked is in the metrics in any case.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

from fleet.bus import Bus
from fleet.demand import demand_subject, encode_demand
from fleet.errors import BadRequest, Internal
from fleet.ids import Incarnation
from fleet.member import desired_key
from fleet.registry import Registry, View
from fleet.targets import LastDecision, Mode, decision_key, parse_decision, parse_desired, planner_prefix
from router.flow import Flow

log = logging.getLogger(__name__)

_TELL_S = 1.0


class Planning:
    """Of one router."""

    def __init__(
        self, flow: Flow, fleet: str, registry: Registry, bus: Bus, name: str, life: Incarnation
    ) -> None:
        self._flow = flow
        self._fleet = fleet
        self._registry = registry
        self._bus = bus
        self._name = name
        self._life = life
        self._since = asyncio.get_running_loop().time()
        self._planned = asyncio.Event()
        """Set while a planner shows itself."""
        self.on_decision: Callable[[LastDecision | None], None] = lambda decision: None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tell())
            tasks.create_task(self._follow_planner())
            tasks.create_task(self._follow_desired())

    async def _tell(self) -> NoReturn:
        loop, subject = asyncio.get_running_loop(), demand_subject(self._fleet, self._life)
        while True:
            await self._planned.wait()
            ledger, records = self._flow.demand, self._flow.records
            demand = ledger.demand(self._name, self._life, loop.time() - self._since, records.running)
            await self._bus.publish(subject, encode_demand(demand))
            await asyncio.sleep(_TELL_S)

    async def _follow_planner(self) -> None:
        last: bytes | None = None
        async for view in self._registry.watch(planner_prefix(self._fleet)):
            if not view.live:
                continue
            shown = decision_key(self._fleet)
            # A decision outlives its planner, and is of no interest then; all else there is leased.
            if any(key != shown for key in view.values):
                self._planned.set()
            else:
                self._planned.clear()
            if (data := view.values.get(shown) if self._planned.is_set() else None) != last:
                last = data
                self.on_decision(None if data is None else parse_decision(data))
        raise Internal("the watch of the planner ended")

    async def _follow_desired(self) -> None:
        key = desired_key(self._fleet)
        async for view in self._registry.watch(key):
            if view.live:
                self._heard(view, key)
        raise Internal("the watch of the wanted counts ended")

    def _heard(self, view: View, key: str) -> None:
        data, demand = view.values.get(key), self._flow.demand
        try:
            desired = None if data is None else parse_desired(data)
        except BadRequest as error:
            log.warning("%s: %s", key, error.message)
            desired = None
        demand.scaling = desired is not None and desired.mode is Mode.ACT
        # Woken it rests on, until somebody serves.
        woken = demand.resting and not self._flow.serves()
        demand.resting = demand.scaling and desired is not None and (desired.decode == 0 or woken)
