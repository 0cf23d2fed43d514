"""What a pod's status says: ready, on its way out, or stuck and why. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from deploy.controller.missing import missing
from deploy.controller.render import DELETION_COST, REVISION_LABEL, ROLE_LABEL
from fleet.cluster import Object

MARKED = -1000
"""Deletion cost of those that go first."""
UNSCHEDULED_S = 60.0
"""So long a pod may be without a node before anybody is told: nodes may have to be brought first."""
NOT_READY_S = 300.0
UNSTARTED_S = 5.0
"""After it has got a node, beyond which it is asked why no container of it runs."""
OVERDUE_S = 60.0
"""After its grace, beyond which a leaving pod holds nothing up any more: its node may never come back."""

_WAITS = {
    "CrashLoopBackOff": "CrashLoop",
    "RunContainerError": "CrashLoop",
    "ImagePullBackOff": "ImagePull",
    "ErrImagePull": "ImagePull",
    "InvalidImageName": "ImagePull",
    "CreateContainerConfigError": "Config",
    "CreateContainerError": "Config",
}
LEADER = "leaderworkerset.sigs.k8s.io/worker-index"


@dataclass(frozen=True, slots=True)
class Trouble:
    kind: str
    """Unschedulable, Missing, Mount, CrashLoop, ImagePull, Config, NotReady or StuckTerminating."""
    message: str


@dataclass(frozen=True, slots=True)
class Worker:
    """A pod of a worker, of a group the leader's; or of a router."""

    pod: str
    role: str
    revision: str
    ready: bool
    leaving: bool
    gone: bool
    """Leaving for so long that its place is not waited for."""
    restarts: int
    created: float
    """Seconds since 1970."""
    address: str
    marked: bool
    unscheduled: bool
    trouble: Trouble | None


def seconds(stamp: str) -> float:
    """Of RFC 3339, since 1970."""
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


def condition(thing: Object, type: str) -> Object:
    for one in thing.get("status", {}).get("conditions", []):
        if one.get("type") == type:
            return dict(one)
    return {}


def workers(
    pods: Iterable[Object], now: float, warnings: Mapping[str, Sequence[str]] | None = None
) -> list[Worker]:
    """In the order of their names. Routers, followers of groups, and what no set keeps are left out.
    `warnings`: by pod, what its node says."""
    found = []
    for pod in pods:
        meta = pod["metadata"]
        own: Mapping[str, str] = meta.get("labels", {})
        if REVISION_LABEL in own and own.get(LEADER, "0") == "0" and kept(pod):
            found.append(worker(pod, now, (warnings or {}).get(meta["name"], ())))
    return sorted(found, key=lambda one: one.pod)


def kept(pod: Object) -> bool:
    """Whether a set has it. One that was made by hand, or was taken out of its set by another label to be
    looked into, stays as long as its maker wants, and no count waits for it."""
    return any(one.get("controller") for one in pod["metadata"].get("ownerReferences", []))


def worker(pod: Object, now: float, said: Sequence[str] = ()) -> Worker:
    meta, status = pod["metadata"], pod.get("status", {})
    leaving = "deletionTimestamp" in meta
    cost = meta.get("annotations", {}).get(DELETION_COST, "0")
    return Worker(
        pod=meta["name"],
        role=meta.get("labels", {}).get(ROLE_LABEL, ""),
        revision=meta.get("labels", {}).get(REVISION_LABEL, ""),
        ready=not leaving and condition(pod, "Ready").get("status") == "True",
        leaving=leaving,
        gone=status.get("phase") in ("Failed", "Succeeded")
        or (leaving and now > seconds(meta["deletionTimestamp"]) + OVERDUE_S),
        restarts=sum(one.get("restartCount", 0) for one in status.get("containerStatuses", [])),
        created=seconds(meta["creationTimestamp"]) if "creationTimestamp" in meta else 0.0,
        address=status.get("podIP", ""),
        marked=cost == str(MARKED),
        unscheduled=condition(pod, "PodScheduled").get("status") == "False",
        trouble=trouble(pod, now, said),
    )


def unstarted(pod: Object, now: float) -> bool:
    """Whether it has a node and none of its containers has run for a while: its node's events say why."""
    meta, status = pod["metadata"], pod.get("status", {})
    scheduled = condition(pod, "PodScheduled")
    if "deletionTimestamp" in meta or scheduled.get("status") != "True":
        return False
    containers = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    waits = [one.get("state", {}).get("waiting", {}).get("reason") for one in containers]
    return all(one in _BEFORE_START for one in waits) and now - _since(scheduled, meta) >= UNSTARTED_S


_BEFORE_START = ("ContainerCreating", "PodInitializing")


def trouble(pod: Object, now: float, said: Sequence[str] = ()) -> Trouble | None:
    """Why it will not serve soon; None: nothing known against it. `said`: by its node, of its volumes."""
    meta, status = pod["metadata"], pod.get("status", {})
    if "deletionTimestamp" in meta:
        overdue = now - seconds(meta["deletionTimestamp"])
        if overdue > OVERDUE_S:
            return Trouble(
                "StuckTerminating", f"still there {overdue:.0f} s after its grace: is its node gone?"
            )
        return None
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        if what := missing(pod, str(scheduled.get("message", ""))):
            return Trouble("Missing", what)
        if now - _since(scheduled, meta) >= UNSCHEDULED_S:
            return Trouble("Unschedulable", str(scheduled.get("message", "no node has room")))
        return None
    for one in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waiting = one.get("state", {}).get("waiting", {})
        if (kind := _WAITS.get(waiting.get("reason", ""))) is not None:
            if what := missing(pod, str(waiting.get("message", ""))):
                return Trouble("Missing", what)
            ended = one.get("lastState", {}).get("terminated", {})
            code = f"; it ended with code {ended['exitCode']}" if "exitCode" in ended else ""
            return Trouble(kind, f"{waiting['reason']}: {waiting.get('message', '')}{code}".strip(": "))
    if said and unstarted(pod, now):
        whats = list(dict.fromkeys(what for text in said if (what := missing(pod, text))))
        return Trouble("Missing", "; ".join(whats)) if whats else Trouble("Mount", said[-1])
    ready = condition(pod, "Ready")
    if ready.get("status") == "False" and now - _since(ready, meta) >= NOT_READY_S:
        return Trouble("NotReady", f"not ready for more than {NOT_READY_S:g} s")
    return None


def _since(one: Object, meta: Object) -> float:
    return seconds(one.get("lastTransitionTime") or meta["creationTimestamp"])


def victims(candidates: Iterable[Worker], loads: Mapping[str, float], count: int) -> list[tuple[str, str]]:
    """Pods that are to go first, and why: those that do not serve, then the least loaded. One that does not
    tell its load is the busiest."""
    ranked = sorted(candidates, key=lambda one: (one.ready, loads.get(one.pod, float("inf")), one.pod))
    found = []
    for one in ranked[: max(0, count)]:
        if not one.ready:
            why = "it does not serve"
        elif one.pod in loads:
            why = f"{loads[one.pod]:g} requests there, the least"
        else:
            why = "none tells its load"
        found.append((one.pod, why))
    return found
