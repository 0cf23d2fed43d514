"""The loop: mirrors tell whose fleet changed, a queue says whose turn it is, and a plan is carried out."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import msgspec

from deploy.controller.drift import as_made, differs
from deploy.controller.figures import Figures
from deploy.controller.looks import Looks
from deploy.controller.mirror import Mirror
from deploy.controller.plan import plan, wants_judged, wants_loads
from deploy.controller.pods import unstarted, workers
from deploy.controller.render import (
    CARRIED,
    CONTROLLER,
    DELETION_COST,
    FLEET_LABEL,
    METRICS_PORT,
    OWNED,
    PODS,
    REVISION_LABEL,
    ROLE_LABEL,
)
from deploy.controller.scene import owned
from deploy.controller.words import (
    Action,
    Apply,
    Carry,
    Mark,
    Observed,
    Plan,
    Remove,
    Resize,
    Say,
    TellFleet,
    TellPool,
)
from deploy.controller.work_queue import WorkQueue
from fleet.cluster import APPLY, FLEETS, MERGE, POOLS, Api, ClusterError, Object, Resource
from fleet.errors import FleetError, Unavailable
from fleet.metrics import Family

log = logging.getLogger(__name__)

EVENTS = Resource("v1", "Event", "events")
OURS = {"fieldManager": CONTROLLER}
"""So that whoever meets a conflict, or looks at managedFields, reads whose a field is."""
FORCE = {**OURS, "force": "true"}
_NAMED = ("apiVersion", "kind", "metadata")
_TEMPLATE = (ROLE_LABEL, REVISION_LABEL, "pod-template-hash")


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """What it looks after."""

    namespace: str = ""
    """The one namespace whose fleets it looks after; empty: all."""
    workers: int = 4
    """Fleets that are looked after at the same time."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers is {self.workers}; at least 1 is needed")


class Controller:
    """`run` does not end. `clock`: seconds since 1970, as in the stamps of Kubernetes."""

    def __init__(
        self, api: Api, looks: Looks, settings: ControllerSettings, clock: Callable[[], float]
    ) -> None:
        self._api, self._looks, self._settings, self._clock = api, looks, settings, clock
        self.queue = WorkQueue()
        self.figures = Figures()
        self._refused: dict[str, tuple[str, ...]] = {}
        self._altered: dict[str, dict[tuple[str, str], Object]] = {}
        namespace = settings.namespace
        self._fleets = Mirror(api, FLEETS, namespace, self._fleet_changed, labelled=False)
        self._pods = Mirror(api, PODS, namespace, self._owned_changed, labelled=True)
        self._owned = {
            one.kind: Mirror(api, one, namespace, self._owned_changed, labelled=True) for one in OWNED
        }

    def _fleet_changed(self, fleet: Object) -> None:
        self.queue.add(f"{fleet['metadata']['namespace']}/{fleet['metadata']['name']}")

    def _owned_changed(self, one: Object) -> None:
        fleet = one["metadata"].get("labels", {}).get(FLEET_LABEL)
        if fleet:
            self.queue.add(f"{one['metadata']['namespace']}/{fleet}")

    async def run(self) -> None:
        mirrors = [self._fleets, self._pods, *self._owned.values()]
        async with asyncio.TaskGroup() as tasks:
            for mirror in mirrors:
                tasks.create_task(mirror.run(), name=f"mirror of {mirror.resource.kind}")
            for mirror in mirrors:
                await mirror.synced.wait()
            log.info("%d fleets", sum(1 for _ in self._fleets.all()))
            for number in range(self._settings.workers):
                tasks.create_task(self._work(), name=f"worker {number}")

    async def _work(self) -> None:
        while True:
            key = await self.queue.next()
            result, again_s = "defect", 0.0
            began = self.figures.begin(key, self._now())
            try:
                again_s = await self.reconcile(key)
                result = "done"
            except ClusterError as error:
                result = "conflict" if error.conflict else "failed"
                if not error.conflict:
                    log.warning("%s: %s", key, error.message)
            except FleetError as error:
                result = "failed"
                log.warning("%s: %s", key, error.message)
            except Exception:
                # The root of one fleet's turn: a defect that one fleet meets must not stop the others.
                log.exception("%s: cannot be looked after", key)
            finally:
                self.figures.end(key, result, self._now() - began)
                self.queue.done(key, result != "done", again_s)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    @property
    def synced(self) -> bool:
        """Whether it has seen all that there is."""
        return all(mirror.synced.is_set() for mirror in (self._fleets, self._pods, *self._owned.values()))

    def families(self) -> list[Family]:
        """For Prometheus."""
        return self.figures.families(list(self._fleets.all()), self.queue.waiting, len(self._refused))

    async def reconcile(self, key: str) -> float:
        """One look and what follows from it; when to look again. FleetError: a write failed."""
        namespace, _, name = key.partition("/")
        fleet = self._fleets.get(namespace, name)
        if fleet is None:
            self.queue.forget(key)
            self._refused.pop(key, None)
            self._altered.pop(key, None)
            return 0.0
        observed = await self._observe(key, namespace, name, fleet)
        made = plan(observed, self._clock())
        refused = await self._carry_out(namespace, fleet, made)
        if refused:
            self._refused[key] = refused
            # Again soon, so that it stands in the conditions, and then less and less often: its words may be
            # others each time.
            raise Unavailable(f"refused: {'; '.join(refused)}")
        if self._refused.pop(key, None):
            self.queue.add(key)
        return made.again_s

    async def _observe(self, key: str, namespace: str, name: str, fleet: Object) -> Observed:
        seen = Observed(
            fleet=fleet,
            owned=tuple(one for mirror in self._owned.values() for one in mirror.of(namespace, name)),
            pods=tuple(self._pods.of(namespace, name)),
            absent=frozenset(kind for kind, mirror in self._owned.items() if mirror.absent),
            altered=self._altered.get(key, {}),
            refused=self._refused.get(key, ()),
        )
        now = self._clock()
        if wants_loads(seen, now):
            pages = {
                one.pod: f"{_host(one.address)}:{METRICS_PORT}"
                for one in workers(seen.pods, now)
                if one.ready and one.address
            }
            seen = replace(seen, loads=await self._looks.loads(pages))
        if waiting := [pod for pod in seen.pods if unstarted(pod, now)]:
            seen = replace(seen, warnings=await self._warnings(namespace, waiting))
        if wants_judged(seen):
            seen = replace(seen, judged=await self._looks.judged(_router_pages(seen)))
        return seen

    async def _warnings(self, namespace: str, pods: list[Object]) -> dict[str, list[str]]:
        """What nodes say of volumes, newest last. Of pods of one template one is asked about, for all."""
        alike: dict[tuple[str, ...], list[Object]] = {}
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
            own = pod["metadata"].get("labels", {})
            alike.setdefault(tuple(own.get(one, "") for one in _TEMPLATE), []).append(pod)
        found: dict[str, list[str]] = {}
        for group in alike.values():
            query = {"fieldSelector": f"involvedObject.uid={group[0]['metadata']['uid']},reason=FailedMount"}
            try:
                page = await self._api.ask("GET", EVENTS.path(namespace), query)
            except ClusterError as error:
                # Why pods wait is worth knowing, and no reason to do nothing.
                log.warning("%s: events cannot be read: %s", namespace, error.message)
                return found
            said = sorted(page.get("items") or (), key=lambda one: str(one.get("lastTimestamp") or ""))
            texts = list(dict.fromkeys(str(one.get("message", "")) for one in said))
            found |= {pod["metadata"]["name"]: texts for pod in group}
        return found

    async def _carry_out(self, namespace: str, fleet: Object, made: Plan) -> tuple[str, ...]:
        """Each action for itself: what the API server refuses holds nothing else up."""
        name, refused = fleet["metadata"]["name"], []
        for action in made.actions:
            try:
                await self._act(namespace, fleet, action)
                self.figures.acted(action)
            except ClusterError as error:
                # 500: of a field that server-side apply does not know, and where a webhook fails.
                refuses = error.refused or error.code == 500
                if not refuses and not (error.missing and isinstance(action, Apply | Mark)):
                    raise
                if isinstance(action, Mark) and error.missing:
                    continue  # The pod has gone meanwhile.
                refused.append(f"{_what(action)}: {error.message}")
                log.warning("%s/%s: %s", namespace, name, refused[-1])
        return tuple(refused)

    async def _act(self, namespace: str, fleet: Object, action: Action) -> None:
        name = fleet["metadata"]["name"]
        body: Object
        if not isinstance(action, Say | TellFleet | TellPool):
            log.info("%s/%s: %s: %s", namespace, name, _what(action), action.why)
        match action:
            case Apply(wanted):
                mirror = self._owned[wanted["kind"]]
                path = mirror.resource.path(namespace, wanted["metadata"]["name"])
                await self._not_foreign(namespace, fleet, wanted, mirror, path)
                written = await self._api.ask("PATCH", path, FORCE, wanted, APPLY)
                if differs(wanted, written):
                    # An apply leaves what another has added to a list whose entries are fields of their own,
                    # such as variables of a container. A merge takes such lists as they are given.
                    body = {key: value for key, value in wanted.items() if key not in _NAMED}
                    written = await self._api.ask("PATCH", path, OURS, body, MERGE)
                mirror.wrote(written)
                if found := differs(wanted, written):
                    # A webhook or a policy makes something else of it, and would do so each time.
                    kind, called = wanted["kind"], wanted["metadata"]["name"]
                    self._altered.setdefault(f"{namespace}/{name}", {})[kind, called] = as_made(
                        wanted, written
                    )
                    said = f"the cluster makes something else of {kind} {called}, which stays so: {found}"
                    await self._say(namespace, fleet, Say("Altered", said))
            case Resize(resource, set_name, count):
                resized: Object = {"spec": {"replicas": count}}
                path = resource.path(namespace, set_name)
                self._owned[resource.kind].wrote(await self._api.ask("PATCH", path, OURS, resized, MERGE))
            case Remove(resource, gone):
                query = {"propagationPolicy": "Background"}
                try:
                    await self._api.ask("DELETE", resource.path(namespace, gone), query)
                except ClusterError as error:
                    if not error.missing:
                        raise
            case Mark(pod, cost):
                value = None if cost is None else str(cost)
                body = {"metadata": {"annotations": {DELETION_COST: value}}}
                self._pods.wrote(await self._api.ask("PATCH", PODS.path(namespace, pod), OURS, body, MERGE))
            case Carry(counts, version):
                notes = {CARRIED + role: str(count) for role, count in counts.items()}
                body = {
                    "metadata": {"resourceVersion": version, "annotations": notes},
                    "spec": {role: {"replicas": count} for role, count in counts.items()},
                }
                self._fleets.wrote(
                    await self._api.ask("PATCH", FLEETS.path(namespace, name), OURS, body, MERGE)
                )
            case TellPool(pool, status):
                body = {"status": msgspec.to_builtins(status)}
                path = POOLS.path(namespace, pool, "status")
                self._owned[POOLS.kind].wrote(await self._api.ask("PATCH", path, OURS, body, MERGE))
            case TellFleet(fleet_status):
                body = {"status": msgspec.to_builtins(fleet_status)}
                path = FLEETS.path(namespace, name, "status")
                self._fleets.wrote(await self._api.ask("PATCH", path, OURS, body, MERGE))
            case Say():
                await self._say(namespace, fleet, action)

    async def _not_foreign(
        self, namespace: str, fleet: Object, wanted: Object, mirror: Mirror, path: str
    ) -> None:
        """An apply takes what is there, whoever made it: only what is this fleet's may be taken."""
        meta = wanted["metadata"]
        live = mirror.get(namespace, meta["name"])
        if live is None:
            try:
                live = await self._api.ask("GET", path)
            except ClusterError as error:
                if error.missing:
                    return
                raise
        if not owned(live, fleet):
            raise ClusterError(
                422, "Foreign",
                f"{wanted['kind']} {meta['name']} is there already and not of this fleet; remove it, or give "
                "the fleet another name",
            )  # fmt: skip

    async def _say(self, namespace: str, fleet: Object, said: Say) -> None:
        log.info("%s/%s: %s: %s", namespace, fleet["metadata"]["name"], said.reason, said.message)
        stamp = datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        meta = fleet["metadata"]
        digest = hashlib.sha256(f"{meta['uid']} {said.reason} {said.message}".encode()).hexdigest()[:16]
        event: Object = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": f"{meta['name']}.{digest}", "namespace": namespace},
            "involvedObject": {
                "apiVersion": FLEETS.api_version,
                "kind": FLEETS.kind,
                "name": meta["name"],
                "namespace": namespace,
                "uid": meta["uid"],
            },
            "reason": said.reason,
            "message": said.message[:1000],
            "type": said.kind,
            "source": {"component": CONTROLLER},
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
        }
        path = EVENTS.path(namespace, event["metadata"]["name"])
        await self._api.ask("PATCH", path, FORCE, event, APPLY)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _router_pages(seen: Observed) -> list[str]:
    pages = []
    for pod in seen.pods:
        meta = pod["metadata"]
        if meta.get("labels", {}).get(ROLE_LABEL) != "router" or "deletionTimestamp" in meta:
            continue
        address = pod.get("status", {}).get("podIP")
        container = pod["spec"]["containers"][0]
        port = next(
            (one["containerPort"] for one in container.get("ports", []) if one["name"] == "http"), None
        )
        if address and port:
            scheme = container.get("readinessProbe", {}).get("httpGet", {}).get("scheme", "HTTP").lower()
            pages.append(f"{scheme}://{_host(address)}:{port}/metrics")
    return pages


def _what(action: Action) -> str:
    match action:
        case Apply(wanted):
            return f"apply {wanted['kind']} {wanted['metadata']['name']}"
        case Resize(resource, name):
            return f"resize {resource.kind} {name}"
        case Remove(resource, gone):
            return f"remove {resource.kind} {gone}"
        case Mark(pod, cost):
            return f"{'unmark' if cost is None else 'mark'} {pod}"
        case Carry():
            return "set counts"
        case TellPool(pool):
            return f"status of FleetPool {pool}"
        case TellFleet():
            return "status"
        case Say(reason):
            return f"event {reason}"
