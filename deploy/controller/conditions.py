"""What the conditions of a fleet say. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.controller.pods import OVERDUE_S, UNSCHEDULED_S, Trouble, condition, seconds, trouble
from deploy.controller.render import DEPLOYMENTS, GROUPS, MONITORS, ROLES
from deploy.controller.resource import Condition, FleetSpec, FleetStatus, PoolCount
from deploy.controller.rollout import Step
from deploy.controller.scene import Scene, routers_settled, stamp
from deploy.controller.words import Observed
from fleet.cluster import Object


class Conditions:
    """Keeps the time of a change where there is none."""

    def __init__(self, fleet: Object, before: FleetStatus, now: float) -> None:
        self._before = {one.type: one for one in before.conditions}
        self._generation = int(fleet["metadata"].get("generation", 0))
        self._now = stamp(now)
        self._found: dict[str, Condition] = {}

    def add(self, type: str, holds: bool, reason: str, message: str) -> None:
        last, status = self._before.get(type), "True" if holds else "False"
        changed = last is None or last.status != status
        self._found[type] = Condition(
            type=type,
            status="True" if holds else "False",
            reason=reason,
            message=message[:2000],
            last_transition_time=self._now if last is None or changed else last.last_transition_time,
            observed_generation=self._generation,
        )

    def holds(self, type: str) -> bool:
        return self._found[type].status == "True"

    @property
    def found(self) -> list[Condition]:
        return list(self._found.values())


def judge(
    conditions: Conditions,
    observed: Observed,
    scene: Scene,
    spec: FleetSpec,
    counts: Mapping[str, PoolCount],
    routers: int,
    step: Step,
    failed: str,
    failed_reason: str,
    why_late: str,
    target: str,
    progressed: str,
    now: float,
) -> None:
    """The conditions. `progressed`: when the last worker got ready that is waited for; empty: none is."""
    decode = counts["decode"]
    if decode.wanted == 0:
        conditions.add("Available", False, "ScaledToZero", "no decode worker is wanted: nobody can answer")
    elif routers == 0:
        conditions.add("Available", False, "NoRouter", "no router is ready")
    elif decode.ready == 0:
        conditions.add("Available", False, "NoDecodeWorker", "no decode worker is ready")
    else:
        said = (
            "" if counts["prefill"].ready else "; without a prefill worker prompts are read by decode workers"
        )
        conditions.add(
            "Available", True, "Serving",
            f"ready: {routers} routers, {counts['prefill'].ready} prefill and {decode.ready} decode{said}",
        )  # fmt: skip
    numbers = ", ".join(
        f"{role} {one.updated_ready}/{one.wanted} of revision {target}" for role, one in counts.items()
    )
    short = not routers_settled(scene, observed.fleet["metadata"]["name"])
    if step.complete and not short:
        conditions.add("Progressing", False, "Settled", numbers)
    elif step.complete:
        conditions.add(
            "Progressing", True, "RoutersStart", f"{routers}/{spec.router.replicas} routers are ready"
        )
    elif why_late:
        conditions.add("Progressing", True, "ProgressDeadlineExceeded", f"{why_late}; {numbers}")
    else:
        reason = "Paused" if spec.rollout.paused else "RollingOut" if any(step.old.values()) else "Scaling"
        blind = (
            "; attainment is not known: not all routers show their /metrics"
            if reason == "RollingOut" and spec.rollout.min_attainment_percent and observed.judged is None
            else ""
        )
        conditions.add("Progressing", True, reason, f"{step.why}; {numbers}{blind}")
    troubles = _troubles(observed, scene, progressed, now)
    missing = [kind for kind in sorted(observed.absent) if _needs(spec, kind)]
    causes: list[tuple[str, str]] = []
    if troubles:
        kinds = sorted({one.kind for one in troubles})
        said = "; ".join(
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {one.kind}: {one.message}"
            for one, names in list(troubles.items())[:5]
        )
        more = f"; and {len(troubles) - 5} other troubles" if len(troubles) > 5 else ""
        reason = kinds[0] if len(kinds) == 1 else "SeveralTroubles"
        causes.append((reason, said + more))
    if observed.refused:
        causes.append(("Refused", "; ".join(observed.refused)))
    if missing:
        causes.append(
            ("KindMissing", f"this cluster does not know {', '.join(missing)}: install it, or change spec")
        )
    if causes:
        conditions.add("Degraded", True, causes[0][0], "; ".join(said for _, said in causes))
    else:
        conditions.add("Degraded", False, "AsExpected", "")
    if failed:
        conditions.add(
            "RolledBack",
            True,
            "RevisionFailed",
            f"revision {failed} of spec has failed: {failed_reason}; {target} serves",
        )
    else:
        conditions.add("RolledBack", False, "AsExpected", "")


def _troubles(observed: Observed, scene: Scene, progressed: str, now: float) -> dict[Trouble, list[str]]:
    """Whose they are: names of pods, and of sets whose pods the API server does not take."""
    found: dict[Trouble, list[str]] = {}
    for pod in sorted(observed.pods, key=lambda pod: str(pod["metadata"]["name"])):
        name = str(pod["metadata"]["name"])
        if (one := trouble(pod, now, observed.warnings.get(name, ()))) is not None:
            found.setdefault(one, []).append(name)
    for (kind, name), live in sorted(scene.by_name.items()):
        failure = condition(live, "ReplicaFailure") if kind == DEPLOYMENTS.kind else {}
        if failure.get("status") == "True":
            found.setdefault(Trouble("PodsRefused", str(failure.get("message", ""))), []).append(name)
    late = progressed and now - seconds(progressed) > UNSCHEDULED_S
    for (role, revision), live in sorted(scene.sets.items()):
        groups = live["spec"].get("replicas", 1) if live["kind"] == GROUPS.kind else 0
        if groups and late and not scene.of_set(role, revision):
            # Of a quota, a policy or a name that is too long only its StatefulSets tell, by events.
            said = (
                "no pod of it is made: `kubectl describe leaderworkerset,statefulset` says why, if LWS runs"
            )
            found.setdefault(Trouble("PodsRefused", said), []).append(live["metadata"]["name"])
    for (kind, name), live in sorted(scene.leaving.items()):
        meta = live["metadata"]
        if now > seconds(meta["deletionTimestamp"]) + OVERDUE_S:
            held = ", ".join(meta.get("finalizers", []))
            said = f"was deleted and cannot be made again before its finalizers are taken away: {held}"
            found.setdefault(Trouble("StuckTerminating", said), []).append(f"{kind} {name}")
    return found


def _needs(spec: FleetSpec, kind: str) -> bool:
    if kind == MONITORS.kind:
        return spec.monitoring.pod_monitor
    return kind != GROUPS.kind or any(spec.pool(role).nodes > 1 for role in ROLES)
