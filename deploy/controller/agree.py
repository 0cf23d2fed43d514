"""How many workers there are to be, where a fleet and its pools say different things. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from deploy.controller.drift import differs
from deploy.controller.render import CARRIED, ROLES, Renderer
from deploy.controller.resource import FleetPoolStatus, FleetSpec
from deploy.controller.words import Action, Apply, Carry, Say
from fleet.cluster import Object


@dataclass(frozen=True, slots=True)
class Agreement:
    wanted: Mapping[str, int]
    agreed: Mapping[str, int]
    """Of each pool, for its status."""
    actions: tuple[Action, ...]


def pool_status(pool: Object | None) -> FleetPoolStatus:
    try:
        return msgspec.convert((pool or {}).get("status", {}), FleetPoolStatus)
    except msgspec.ValidationError:
        return FleetPoolStatus()


def agree(fleet: Object, spec: FleetSpec, pools: Mapping[str, Object], renderer: Renderer) -> Agreement:
    """The fleet's count is the one truth. What was asked of a pool alone is carried over to it first."""
    wanted = {role: spec.pool(role).replicas for role in ROLES}
    notes = fleet["metadata"].get("annotations") or {}
    agreed: dict[str, int] = {}
    asked: dict[str, int] = {}
    actions: list[Action] = []
    for role in ROLES:
        pool, ours = pools.get(role), wanted[role]
        agreed[role] = ours
        if pool is None:
            actions.append(Apply(renderer.pool(role, ours), f"the {role} pool has no handle to scale it"))
            continue
        theirs, before = pool.get("spec", {}).get("replicas", 0), pool_status(pool).agreed_replicas
        if theirs == ours:
            handle = renderer.pool(role, ours)
            if found := differs(handle, pool):
                # Such as its owner, where an earlier fleet was deleted without its pools. Not if somebody
                # scales it meanwhile.
                handle["metadata"]["resourceVersion"] = pool["metadata"]["resourceVersion"]
                actions.append(Apply(handle, found))
            continue
        # A pool may be scaled again after its count was carried over and before its status tells of it.
        carried = notes.get(CARRIED + role) == str(ours)
        if before not in (-1, theirs) and (before == ours or carried):
            asked[role] = theirs
            agreed[role] = ours
        else:
            why = (
                "the fleet's count has changed"
                if before == theirs
                else "both were changed: the fleet's counts"
            )
            actions.append(Apply(renderer.pool(role, ours), f"{role} {theirs} → {ours}: {why}"))
    allowed = {role: _within(spec, role, count) for role, count in asked.items()}
    # Two that decide, such as the planner and an autoscaler, would move workers to and fro.
    planned = "the planner decides (planner.mode is act)" if spec.planner.mode == "act" else ""
    over = planned or _over_budget(spec, {**wanted, **allowed})
    for role, count in asked.items():
        ours = wanted[role]
        if over or allowed[role] == ours:
            rule = over or f"between {spec.pool(role).min_replicas} and {spec.pool(role).max_replicas}"
            actions.append(Apply(renderer.pool(role, ours), f"{role} {count} → {ours}: {rule}"))
            actions.append(
                Say(
                    "ScaleRefused",
                    f"FleetPool {renderer.name}-{role} was scaled to {count}: {rule}",
                    "Warning",
                )
            )
            agreed[role] = ours
    counts = {role: allowed[role] for role in asked if not over and allowed[role] != wanted[role]}
    if counts:
        said = ", ".join(f"{role} {wanted[role]} → {count}" for role, count in counts.items())
        version = fleet["metadata"]["resourceVersion"]
        actions.append(Carry(counts, version, f"{said}: asked of FleetPool"))
        actions.append(Say("Scaled", f"{said}: asked of FleetPool"))
        wanted |= counts
    return Agreement(wanted, agreed, tuple(actions))


def _within(spec: FleetSpec, role: str, count: int) -> int:
    pool = spec.pool(role)
    return max(pool.min_replicas, min(pool.max_replicas, count))


def _over_budget(spec: FleetSpec, counts: Mapping[str, int]) -> str:
    if spec.budget.gpus is None:
        return ""
    gpus = sum(counts[role] * spec.pool(role).nodes * spec.pool(role).gpus for role in ROLES)
    return f"{gpus} GPUs are more than budget.gpus ({spec.budget.gpus})" if gpus > spec.budget.gpus else ""
