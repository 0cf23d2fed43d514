"""From what is seen of one fleet to what is to be done, and why. Pure, level-triggered, idempotent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from deploy.controller.agree import agree, pool_status
from deploy.controller.conditions import Conditions, judge
from deploy.controller.crd import read_spec, read_status
from deploy.controller.drift import differs
from deploy.controller.pods import MARKED, OVERDUE_S, seconds, victims
from deploy.controller.progress import progress
from deploy.controller.render import (
    DEPLOYMENTS,
    GROUPS,
    OWNED,
    RENDERING,
    REVISIONS,
    ROLES,
    Renderer,
    revision,
    selector,
    shaped,
)
from deploy.controller.resource import (
    FleetPoolStatus,
    FleetSpec,
    FleetStatus,
    PoolCount,
    RolloutStatus,
)
from deploy.controller.rollout import Side, Step, next_step, shrink
from deploy.controller.scene import Scene, count, made_by, router_pods, some_router_ready, stamp
from deploy.controller.words import (
    Action,
    Apply,
    Mark,
    Observed,
    Plan,
    Remove,
    Resize,
    Say,
    TellFleet,
    TellPool,
)
from fleet.cluster import Object

APPLIED = "pdfleet.dev/applied"
"""Annotation: a digest of what was applied, so that what is taken out of an object is noticed too."""
QUIET_S = 60.0
BUSY_S = 5.0
"""When to look again where nothing, or something, is awaited: deadlines make no events of their own."""
_KUBERNETES_OWN = ("foregroundDeletion", "orphan")
"""Finalizers that Kubernetes takes away itself."""
KEPT = 5
"""Revisions that are remembered."""


@dataclass
class _Draft:
    """A plan in the making."""

    actions: list[Action] = field(default_factory=list)

    def apply(self, wanted: Object, scene: Scene, absent: frozenset[str], why: str = "") -> None:
        """If the cluster has it not, or otherwise."""
        kind, name = wanted["kind"], wanted["metadata"]["name"]
        if kind in absent:
            return
        digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:16]
        wanted = {
            **wanted,
            "metadata": {
                **wanted["metadata"],
                "annotations": {**wanted["metadata"].get("annotations", {}), APPLIED: digest},
            },
        }
        live = scene.by_name.get((kind, name))
        if live is None:
            self.actions.append(Apply(wanted, why or f"there is no {kind} {name}"))
            return
        made = scene.altered.get((kind, name))
        if made is None or (made["metadata"].get("annotations") or {}).get(APPLIED) != digest:
            made = wanted
        found = differs(made, live)
        if found is None:
            return
        drift = live["metadata"].get("annotations", {}).get(APPLIED) == digest
        if drift:
            # Of several changes the annotation's is the least telling one.
            self.actions.append(Apply(wanted, f"somebody changed it: {found}", drift=True))
            self.actions.append(Say("DriftCorrected", f"{kind} {name} was changed: {found}", "Warning"))
        else:
            self.actions.append(Apply(wanted, why or found))


def plan(observed: Observed, now: float) -> Plan:
    """`now`: seconds since 1970, as in the stamps of Kubernetes."""
    fleet = observed.fleet
    before, meta = read_status(fleet), fleet["metadata"]
    if "deletionTimestamp" in meta:
        # Owner references see to the rest, once it has gone.
        holding = [one for one in meta.get("finalizers", []) if one not in _KUBERNETES_OWN]
        if holding and now > seconds(meta["deletionTimestamp"]) + OVERDUE_S:
            said = (
                "the fleet was deleted, and runs on as it is until its finalizers are taken away: "
                f"{', '.join(holding)}"
            )
            return _as_it_is(fleet, before, "StuckTerminating", said, now)
        return Plan((), QUIET_S)
    try:
        spec = read_spec(fleet)
    except ValueError as error:
        # The API server refuses such a spec, unless its CRD is of another version: what runs stays as it is.
        return _as_it_is(fleet, before, "InvalidSpec", str(error), now)
    scene, draft = Scene.of(observed, now), _Draft()
    renderer = Renderer(fleet, spec)
    pools = {
        role: found
        for role in ROLES
        if (found := scene.by_name.get(("FleetPool", f"{renderer.name}-{role}")))
    }
    agreement = agree(fleet, spec, pools, renderer)
    draft.actions += agreement.actions
    for wanted in renderer.around():
        draft.apply(wanted, scene, observed.absent)
    _remove_unwanted(draft, scene, fleet, renderer)

    asked = revision(spec)
    failed = before.failed_revision if before.failed_revision == asked else ""
    target = before.revision if failed and before.revision in scene.records else asked
    if asked not in scene.records:
        number = 1 + max((int(one.get("revision", 0)) for one in scene.records.values()), default=0)
        draft.apply(renderer.record(asked, number), scene, observed.absent, "a new revision of spec")
    for name, one in sorted(scene.records.items()):
        if not made_by(one, fleet):
            # Of an earlier fleet that was deleted without it.
            again = renderer.recorded(name, int(one.get("revision", 0)), one.get("data"))
            draft.apply(again, scene, observed.absent)
    specs = _readable(scene, spec)
    specs[asked] = spec
    if target not in specs:
        target = asked  # What it would go back to cannot be made any more.

    # New workers may be such that only new routers find them: old ones are not let go for those alone.
    held = target == asked and not some_router_ready(scene, renderer.name)
    behind = before.rollout.step if before.update_revision == asked else 0
    step = _step(scene, specs, target, agreement.wanted, spec, behind if held else None)
    routers = router_pods(observed, renderer.name, now) if held else []
    rollout, why_failed = progress(
        before, scene, observed.judged, target, agreement.wanted, step, spec, routers, now
    )
    if why_failed and target == asked and before.revision in specs and before.revision != asked:
        failed, target = asked, before.revision
        draft.actions.append(Say("RolledBack", f"revision {asked} has failed: {why_failed}", "Warning"))
        step = _step(scene, specs, target, agreement.wanted, spec)
        rollout = RolloutStatus(started=stamp(now), progressed=stamp(now))
    failed_reason = (why_failed or before.failed_reason) if failed else ""

    draft.apply(
        Renderer(fleet, specs[target]).routers(), scene, observed.absent, f"routers of revision {target}"
    )
    for role in ROLES:
        _workers(draft, observed, scene, specs, before.revision, target, role, step)
    settled = target if step.complete else before.revision
    if step.complete:
        _forget(draft, scene, {settled, asked})
    if step.complete and before.revision != target:
        draft.actions.append(Say("Settled", f"all workers are of revision {target}"))
    counts = {role: count(scene, role, target, agreement.wanted[role]) for role in ROLES}
    ready = sum(one.ready for one in router_pods(observed, renderer.name, now))
    conditions = Conditions(fleet, before, now)
    judge(
        conditions,
        observed,
        scene,
        spec,
        counts,
        ready,
        step,
        failed,
        failed_reason,
        why_failed,
        target,
        rollout.progressed,
        now,
    )
    draft.actions = [
        one
        for one in draft.actions
        if not isinstance(one, Apply)
        or (one.object["kind"], one.object["metadata"]["name"]) not in scene.leaving
    ]
    status = FleetStatus(
        observed_generation=int(fleet["metadata"].get("generation", 0)),
        revision=settled,
        update_revision=asked,
        failed_revision=failed,
        failed_reason=failed_reason,
        prefill=counts["prefill"],
        decode=counts["decode"],
        routers_ready=ready,
        rollout=rollout,
        conditions=conditions.found,
    )
    for role in ROLES:
        _tell_pool(draft, pools.get(role), renderer, role, counts[role], agreement.agreed[role])
    if status != before or "status" not in fleet:
        draft.actions.append(TellFleet(status, step.why))
    stuck = any(one.trouble for one in scene.workers)
    busy = conditions.holds("Progressing") or stuck or len(draft.actions) > 0
    return Plan(tuple(draft.actions), BUSY_S if busy else QUIET_S)


def _readable(scene: Scene, spec: FleetSpec) -> dict[str, FleetSpec]:
    """By revision. One that another version of this controller wrote down may not be readable: its workers
    stay as they are, and are only ever fewer."""
    found = {}
    for name, one in scene.records.items():
        try:
            found[name] = shaped(one["data"]["spec"], spec)
        except (msgspec.ValidationError, KeyError, TypeError, AttributeError):
            continue
    return found


def _step(
    scene: Scene,
    specs: Mapping[str, FleetSpec],
    target: str,
    wanted: Mapping[str, int],
    spec: FleetSpec,
    most: int | None = None,
) -> Step:
    sides = {}
    for role in ROLES:
        old = [name for pool, name in scene.sets if pool == role and name != target]
        there = [one for one in scene.workers if one.role == role and one.revision != target and not one.gone]
        sides[role] = Side(
            wanted=wanted[role],
            new=scene.count(role, target),
            new_there=scene.there(role, target),
            new_ready=scene.ready(role, target),
            old=sum(scene.count(role, name) for name in old),
            old_there=len(there),
            old_stuck=sum(one.trouble is not None for one in there if not one.leaving),
        )
    rollout = spec.rollout
    return next_step(sides, rollout.max_surge_percent, rollout.max_unavailable_percent, rollout.paused, most)


def _workers(
    draft: _Draft,
    observed: Observed,
    scene: Scene,
    specs: Mapping[str, FleetSpec],
    proven: str,
    target: str,
    role: str,
    step: Step,
) -> None:
    """Of one role: each revision's set has as many as it should, and those that are to go are marked."""
    there = {name: scene.count(role, name) for pool, name in scene.sets if pool == role and name != target}
    goals = shrink(there, step.old[role], proven) if there else {}
    goals[target] = step.new[role]
    for name, goal in sorted(goals.items()):
        have, live = scene.count(role, name), scene.sets.get((role, name))
        if name != target and goal == 0 and live is not None:
            left = [one for one in scene.of_set(role, name) if not one.gone]
            if have == 0 and not left:
                resource = next(one for one in OWNED if one.kind == live["kind"])
                draft.actions.append(
                    Remove(resource, live["metadata"]["name"], f"no worker of revision {name} is left")
                )
                continue
        marked = _mark(draft, observed, scene, role, name, goal)
        count = goal if marked or goal >= have else have
        why = f"{role} of revision {name}: {have} → {count}; {step.why}"
        record = scene.records.get(name)
        if name in specs and (record is None or record["data"].get("rendering") == RENDERING):
            draft.apply(
                Renderer(observed.fleet, specs[name]).workers(role, name, count), scene, observed.absent, why
            )
        elif live is not None and have != count:
            # Made by another version of this controller, whose pods it would change by applying its own.
            resource = next(one for one in OWNED if one.kind == live["kind"])
            draft.actions.append(Resize(resource, live["metadata"]["name"], count, why))


def _mark(draft: _Draft, observed: Observed, scene: Scene, role: str, name: str, goal: int) -> bool:
    """True: those that are to go bear the mark, or none can. Counted by pods, not by what the set was last
    told: until it has let go of them the marks stay."""
    live = scene.sets.get((role, name))
    if live is None or live["kind"] == GROUPS.kind:
        return True
    stay = [one for one in scene.of_set(role, name) if not one.leaving]
    marked = [one for one in stay if one.marked]
    due = max(0, len(stay) - goal)
    if len(marked) == due or due == len(stay):
        return True
    chosen = dict(victims(stay, observed.loads, due))
    for one in stay:
        if one.pod in chosen and not one.marked:
            draft.actions.append(Mark(one.pod, MARKED, f"it goes first: {chosen[one.pod]}"))
        elif one.marked and one.pod not in chosen:
            draft.actions.append(Mark(one.pod, None, "it stays after all"))
    return due == 0


def wants_loads(observed: Observed, now: float) -> bool:
    """Whether the next plan may have to choose who goes: then loads are worth asking for."""
    try:
        spec = read_spec(observed.fleet)
    except ValueError:
        return False
    scene, asked = Scene.of(observed, now), revision(spec)
    return any(
        name != asked or scene.count(role, name) > spec.pool(role).replicas for role, name in scene.sets
    ) or any(
        one["kind"] == "FleetPool"
        and one.get("spec", {}).get("replicas", 0) < spec.pool(one["spec"]["pool"]).replicas
        for one in observed.owned
    )


def wants_judged(observed: Observed) -> bool:
    """Whether attainment may end a rollout."""
    try:
        spec = read_spec(observed.fleet)
    except ValueError:
        return False
    return (
        bool(spec.rollout.min_attainment_percent) and revision(spec) != read_status(observed.fleet).revision
    )


def _tell_pool(
    draft: _Draft, pool: Object | None, renderer: Renderer, role: str, count: PoolCount, agreed: int
) -> None:
    if pool is None:
        return
    status = FleetPoolStatus(
        replicas=count.replicas,
        ready_replicas=count.ready,
        selector=",".join(f"{key}={value}" for key, value in selector(renderer.name, role).items()),
        agreed_replicas=agreed,
        observed_generation=int(pool["metadata"].get("generation", 0)),
    )
    if status != pool_status(pool):
        name = pool["metadata"]["name"]
        draft.actions.append(TellPool(name, status, f"{count.ready}/{count.wanted} ready"))


def _remove_unwanted(draft: _Draft, scene: Scene, fleet: Object, renderer: Renderer) -> None:
    """What `spec` wants no more. Of what was made of this fleet only: others may have used its labels."""
    kept = {(one["kind"], one["metadata"]["name"]) for one in renderer.around()}
    changing = {DEPLOYMENTS.kind, GROUPS.kind, REVISIONS.kind, "FleetPool"}
    for kind, name in sorted(scene.by_name):
        idle_planner = (kind, name) == (DEPLOYMENTS.kind, f"{renderer.name}-planner")
        if not made_by(scene.by_name[kind, name], fleet):
            continue
        if (kind not in changing or idle_planner) and (kind, name) not in kept:
            resource = next((one for one in OWNED if one.kind == kind), None)
            if resource is not None:
                draft.actions.append(Remove(resource, name, "spec wants it no more"))


def _forget(draft: _Draft, scene: Scene, kept: Iterable[str]) -> None:
    """Old records, but for the newest few."""
    needed = {*kept, *(name for _, name in scene.sets)}
    spare = sorted(
        (int(one.get("revision", 0)), name) for name, one in scene.records.items() if name not in needed
    )
    for _, name in spare[: max(0, len(spare) - KEPT)]:
        record = scene.records[name]["metadata"]["name"]
        draft.actions.append(Remove(REVISIONS, record, f"{KEPT} revisions are remembered"))


def _as_it_is(fleet: Object, before: FleetStatus, reason: str, said: str, now: float) -> Plan:
    """Nothing is done but told why."""
    conditions = Conditions(fleet, before, now)
    for one in before.conditions:
        conditions.add(one.type, one.status == "True", one.reason, one.message)
    conditions.add("Degraded", True, reason, said)
    status = msgspec.structs.replace(
        before,
        observed_generation=int(fleet["metadata"].get("generation", 0)),
        conditions=conditions.found,
    )
    return Plan((TellFleet(status, said),) if status != before else (), QUIET_S)
