"""Wanted counts as an InferenceFleet of Kubernetes keeps them. Implements `planner.words.Actuator`.

There is no change of role in place there: a pod belongs to the set of its role, so `turns` come about as one
worker less and one more. The fence is not compared: a plan is applied to the spec that it was made from, or
not at all, so that of two leaders the later one to read writes.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from fleet.cluster import FLEETS, MERGE, Api, ClusterError, Object
from fleet.errors import Unavailable
from fleet.member import desired_key
from fleet.registry import Lease, Registry
from fleet.targets import MOST_BUDGET, Desired, Mode, format_desired
from planner.words import ROLES, Fence, Plan, Targets

log = logging.getLogger(__name__)

DECISION = "pdfleet.dev/planner-decision"
"""Annotation with the last decision, for `kubectl describe`."""
_TRIES = 5
"""The controller writes the status of the same object; that is no change of what is wanted."""


class Shown:
    """What is wanted, for routers, which ask etcd and no cluster: so they know whether to hold requests while
    nobody serves. Under a lease: without a planner nobody would bring workers for them."""

    def __init__(self, registry: Registry, lease: Lease, fleet: str) -> None:
        self._registry, self._lease, self._key = registry, lease, desired_key(fleet)

    async def show(self, desired: Desired) -> None:
        value = format_desired(desired)
        try:
            entry = await self._registry.entry(self._key)
            if entry is None or entry.value != value:
                await self._lease.put(self._key, value)
        except Unavailable as error:
            log.info("what is wanted is not shown to routers: %s", error.message)


class ClusterActuator:
    def __init__(self, api: Api, namespace: str, name: str, shown: Shown | None = None) -> None:
        self._shown = shown
        self._api = api
        self._path = FLEETS.path(namespace, name)
        self._rule = ""
        """What kept the last plan from being followed."""

    async def current(self) -> Targets | None:
        fleet = await self._read()
        if fleet is None:
            return None
        found = targets(fleet)
        if self._shown is not None:
            await self._shown.show(found.desired)
        return found

    async def apply(self, plan: Plan, seen: Targets, fence: Fence | None) -> bool:
        """As near to the plan as the fleet's own rules allow: one of its counts that is against them must not
        keep the other one from being followed."""
        if plan.turns and plan.of(plan.turns[0]) <= seen.desired.of(plan.turns[0]):
            return await self.tell(
                plan, seen, fence
            )  # Instead of a start under way: here it would be one more.
        fleet = await self._read()
        if fleet is None:
            return False
        counts, rule = allowed(plan, fleet["spec"])
        if rule and counts == (seen.desired.prefill, seen.desired.decode):
            log.log(logging.DEBUG if rule == self._rule else logging.WARNING, "nothing is changed: %s", rule)
            self._rule = rule
            return False
        self._rule = rule
        told = replace(
            plan, prefill=counts[0], decode=counts[1], why=plan.why + (f"; {rule}" if rule else "")
        )
        spec = {"prefill": {"replicas": told.prefill}, "decode": {"replicas": told.decode}}
        return await self._write(seen, {"metadata": _told(told), "spec": spec})

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


def allowed(plan: Plan, spec: Object) -> tuple[tuple[int, int], str]:
    """Counts within `minReplicas`, `maxReplicas` and `budget.gpus` of a fleet's spec, and which of these kept
    them from being the plan's; empty: none."""
    found, rules = {}, []
    for role in ROLES:
        pool, asked = spec.get(role, {}), plan.of(role)
        least, most = pool.get("minReplicas", 0), pool.get("maxReplicas", asked)
        found[role] = max(least, min(most, asked))
        if found[role] != asked:
            rules.append(f"{role} stays between {least} and {most}")
    budget = spec.get("budget", {}).get("gpus")
    costs = {role: spec.get(role, {}).get("nodes", 1) * spec.get(role, {}).get("gpus", 0) for role in ROLES}
    if budget is not None and sum(found[role] * costs[role] for role in ROLES) > budget:
        rules.append(f"budget.gpus is {budget}")
        # What would grow gives way first, the larger wish by one at a time.
        now = {role: spec.get(role, {}).get("replicas", 1) for role in ROLES}
        while sum(found[role] * costs[role] for role in ROLES) > budget:
            growing = [role for role in ROLES if costs[role] and found[role] > now[role]]
            if not growing:
                return (now["prefill"], now["decode"]), "; ".join(rules)
            found[max(growing, key=lambda role: found[role] - now[role])] -= 1
    return (found["prefill"], found["decode"]), "; ".join(rules)


def _affordable(spec: Object) -> int | None:
    """Workers that `budget.gpus` is enough for, all of the role that takes fewer; None: no limit."""
    gpus = spec.get("budget", {}).get("gpus")
    costs = [spec.get(role, {}).get("nodes", 1) * spec.get(role, {}).get("gpus", 0) for role in ROLES]
    return None if gpus is None or not min(costs) else min(MOST_BUDGET, int(gpus) // min(costs))


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
        plan.get("maxWorkers") or _affordable(spec),
    )
    return Targets(desired, int(fleet["metadata"].get("generation", 0)))
