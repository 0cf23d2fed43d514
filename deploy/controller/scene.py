"""What was seen of a fleet, sorted: sets, workers and revisions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from deploy.controller.pods import Worker, worker, workers
from deploy.controller.render import (
    DEPLOYMENTS,
    FLEET_LABEL,
    GROUPS,
    REVISION_LABEL,
    REVISIONS,
    ROLE_LABEL,
    ROLES,
    selector,
)
from deploy.controller.resource import PoolCount
from deploy.controller.words import Observed
from fleet.cluster import FLEETS, Object


@dataclass(frozen=True, slots=True)
class Scene:
    """What was seen, sorted."""

    by_name: Mapping[tuple[str, str], Object]
    """(kind, name) → object."""
    leaving: Mapping[tuple[str, str], Object]
    """Those that were deleted and are still there, by finalizers: none can be made in their place yet."""
    altered: Mapping[tuple[str, str], Object]
    """As in `Observed`."""
    workers: list[Worker]
    sets: Mapping[tuple[str, str], Object]
    """(role, revision) → its Deployment or LeaderWorkerSet."""
    records: Mapping[str, Object]
    """Revision → its ControllerRevision."""

    @classmethod
    def of(cls, observed: Observed, now: float) -> Scene:
        by_name, leaving, sets, records = {}, {}, {}, {}
        for one in observed.owned:
            meta = one["metadata"]
            if "deletionTimestamp" in meta:
                leaving[one["kind"], meta["name"]] = one
                continue
            by_name[one["kind"], meta["name"]] = one
            own = meta.get("labels", {})
            # Labels may have been taken away by hand; whoever applies the object again sets them.
            if one["kind"] in (DEPLOYMENTS.kind, GROUPS.kind) and REVISION_LABEL in own:
                if own.get(ROLE_LABEL) in ROLES:
                    sets[own[ROLE_LABEL], own[REVISION_LABEL]] = one
            elif one["kind"] == REVISIONS.kind and REVISION_LABEL in own:
                records[own[REVISION_LABEL]] = one
        there = workers(observed.pods, now, observed.warnings)
        return cls(by_name, leaving, observed.altered, there, sets, records)

    def count(self, role: str, revision: str) -> int:
        found = self.sets.get((role, revision))
        return int(found["spec"].get("replicas", 1)) if found else 0

    def of_set(self, role: str, revision: str) -> list[Worker]:
        return [one for one in self.workers if (one.role, one.revision) == (role, revision)]

    def there(self, role: str, revision: str) -> int:
        return sum(not one.gone for one in self.of_set(role, revision))

    def ready(self, role: str, revision: str) -> int:
        found = self.sets.get((role, revision))
        if found is not None and found["kind"] == GROUPS.kind:
            return int(found.get("status", {}).get("readyReplicas", 0))
        return sum(one.ready for one in self.of_set(role, revision))


def owned(live: Object, fleet: Object) -> bool:
    """Whether what stands there is of this fleet: made by it, or left over by one of the same name. What
    another controller owns, or nobody marked, is not."""
    meta, uid = live["metadata"], fleet["metadata"]["uid"]
    owner = next((one for one in meta.get("ownerReferences", []) if one.get("controller")), None)
    if owner is not None and owner.get("uid") == uid:
        return True
    same = owner is None or (owner.get("kind"), owner.get("name")) == (FLEETS.kind, fleet["metadata"]["name"])
    return same and bool(meta.get("labels", {}).get(FLEET_LABEL) == fleet["metadata"]["name"])


def made_by(live: Object, fleet: Object) -> bool:
    """Whether its owner is this very fleet."""
    return any(
        one.get("uid") == fleet["metadata"]["uid"] for one in live["metadata"].get("ownerReferences", [])
    )


def count(scene: Scene, role: str, target: str, wanted: int) -> PoolCount:
    names = {name for pool, name in scene.sets if pool == role} | {
        one.revision for one in scene.workers if one.role == role
    }
    there = [one for one in scene.workers if one.role == role and not one.gone]
    return PoolCount(
        wanted=wanted,
        replicas=len(there),
        ready=sum(scene.ready(role, name) for name in names),
        updated=sum(one.revision == target for one in there),
        updated_ready=scene.ready(role, target),
    )


def routers_settled(scene: Scene, name: str) -> bool:
    """Whether all routers are ready, and of the template that they are to have."""
    made = scene.by_name.get((DEPLOYMENTS.kind, f"{name}-router"))
    if made is None:
        return False
    status, want = made.get("status", {}), made["spec"].get("replicas", 1)
    counts = [status.get(name, 0) for name in ("replicas", "updatedReplicas", "readyReplicas")]
    return counts == [want] * 3 and status.get("observedGeneration", 0) >= made["metadata"].get(
        "generation", 0
    )


def some_router_ready(scene: Scene, name: str) -> bool:
    """Whether one is ready that is of the template that they are to have, if there are to be any. Not all:
    one without a place must not hold up workers."""
    made = scene.by_name.get((DEPLOYMENTS.kind, f"{name}-router"))
    if made is None or made.get("status", {}).get("observedGeneration", 0) < made["metadata"].get(
        "generation", 0
    ):
        return False
    status = made.get("status", {})
    others = status.get("replicas", 0) - status.get("updatedReplicas", 0)
    return bool(made["spec"].get("replicas", 1) == 0 or status.get("readyReplicas", 0) > others)


def router_pods(observed: Observed, name: str, now: float) -> list[Worker]:
    own = selector(name, "router").items()
    return [
        worker(pod, now, observed.warnings.get(pod["metadata"]["name"], ()))
        for pod in observed.pods
        if own <= pod["metadata"].get("labels", {}).items()
    ]


def stamp(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
