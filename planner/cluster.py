"""Wanted counts as an InferenceFleet of Kubernetes keeps them. Implements `planner.words.Actuator`.

There is no change of role in place there: a pod belongs to the set of its role, so `turns` come about as one
worker less and one more. The fence is not compared: a plan is applied to the spec that it was made from, or
not at all, so that of two leaders the later one to read writes.
"""

from __future__ import annotations

import logging

from fleet.cluster import FLEETS, MERGE, Api, ClusterError, Object
from fleet.errors import Unavailable
from fleet.targets import Desired, Mode
from planner.words import Fence, Plan, Targets

log = logging.getLogger(__name__)

DECISION = "pdfleet.dev/planner-decision"
"""Annotation with the last decision, for `kubectl describe`."""
_TRIES = 5
"""The controller writes the status of the same object; that is no change of what is wanted."""


class ClusterActuator:
    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api = api
        self._path = FLEETS.path(namespace, name)

    async def current(self) -> Targets | None:
        fleet = await self._read()
        return None if fleet is None else targets(fleet)

    async def apply(self, plan: Plan, seen: Targets, fence: Fence | None) -> bool:
        spec = {"prefill": {"replicas": plan.prefill}, "decode": {"replicas": plan.decode}}
        return await self._write(seen, {"metadata": _told(plan), "spec": spec})

    async def tell(self, plan: Plan, seen: Targets, fence: Fence | None) -> bool:
        return await self._write(seen, {"metadata": _told(plan)})

    async def _write(self, seen: Targets, change: Object) -> bool:
        for _ in range(_TRIES):
            fleet = await self._read()
            if fleet is None or targets(fleet).version != seen.version:
                return False
            version = fleet["metadata"]["resourceVersion"]
            body = {**change, "metadata": {**change["metadata"], "resourceVersion": version}}
            try:
                await self._api.ask("PATCH", self._path, None, body, MERGE)
                return True
            except ClusterError as error:
                if error.refused:
                    log.warning("the plan is against the fleet's rules: %s", error.message)
                    return False
                if not error.conflict:
                    raise Unavailable(error.message) from None
        return False

    async def _read(self) -> Object | None:
        try:
            return await self._api.ask("GET", self._path)
        except ClusterError as error:
            if error.missing:
                return None
            raise Unavailable(error.message) from None


def _told(plan: Plan) -> Object:
    said = f"prefill={plan.prefill} decode={plan.decode}: {plan.why}"
    return {"annotations": {DECISION: said + (f"; {plan.advice}" if plan.advice else "")}}


def targets(fleet: Object) -> Targets:
    """Of its spec; the version is that of the spec alone."""
    spec = fleet["spec"]
    plan = spec.get("planner", {})
    desired = Desired(
        spec.get("prefill", {}).get("replicas", 1),
        spec.get("decode", {}).get("replicas", 1),
        Mode(plan.get("mode", Mode.OFF)),
        plan.get("maxWorkers"),
    )
    return Targets(desired, int(fleet["metadata"].get("generation", 0)))
