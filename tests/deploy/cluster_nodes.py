"""Kubernetes' own controllers and nodes, for tests: sets make pods, pods get nodes, run, get ready and end.

Who goes when a set shrinks is decided in the order of the real ReplicaSet controller. What a pod does is said
by `Behaviour`, or by another kubelet (`kubelet.py` runs its command).
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from cluster_store import Kind, Store, StoreApi

from deploy.controller.controller import EVENTS
from deploy.controller.render import PODS
from fleet.cluster import JSON, MERGE, Api, ClusterError, Object, Resource
from fleet.errors import Unavailable

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"


@dataclass(frozen=True)
class Behaviour:
    """Of one pod."""

    ready_s: float = 1.0
    """Seconds until it is ready; infinite: never."""
    crashes: bool = False
    unschedulable: bool = False
    image: bool = True
    """Whether its image can be pulled."""
    mounts: str = ""
    """What keeps its volumes from being there, in the words of a kubelet; empty: they are."""
    drain_s: float = 0.5
    """Seconds it takes to go; infinite: it never does."""


class Kubelet(Protocol):
    async def run(self, own: OnNode, pod: Object) -> None:
        """The life of a pod that has a node, until it was asked to go and has gone."""
        ...


class PretendKubelet:
    def __init__(self, behave: Callable[[Object], Behaviour]) -> None:
        self.behave = behave

    async def run(self, own: OnNode, pod: Object) -> None:
        said = asyncio.ensure_future(self._live(own, pod))
        await own.asked_to_go()
        said.cancel()
        await asyncio.gather(said, return_exceptions=True)
        how = self.behave(pod)
        await own.set_ready(False)
        if how.drain_s == float("inf"):
            await asyncio.Event().wait()
        await asyncio.sleep(how.drain_s)
        await own.finish()

    async def _live(self, own: OnNode, pod: Object) -> None:
        while (how := self.behave(pod)).mounts:
            creating = {"reason": "ContainerCreating"}
            await own.tell(phase="Pending", containerStatuses=[_container(0, creating)])
            await own.warn("FailedMount", how.mounts)
            await asyncio.sleep(2.0)
        if not how.image:
            waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
            await own.tell(phase="Pending", containerStatuses=[_container(0, waiting)])
            return
        if how.crashes:
            restarts = 0
            while True:
                waiting = {"reason": "CrashLoopBackOff", "message": "back-off restarting failed container"}
                await own.tell(phase="Running", containerStatuses=[_container(restarts, waiting)])
                await asyncio.sleep(min(300.0, 10.0 * 2**restarts))
                restarts += 1
        await own.tell(phase="Running", podIP="127.255.255.1", containerStatuses=[_container(0, None)])
        if how.ready_s != float("inf"):
            await asyncio.sleep(how.ready_s)
            await own.set_ready(True)


def _container(restarts: int, waiting: Object | None) -> Object:
    state: Object = {"running": {}} if waiting is None else {"waiting": waiting}
    last: Object = {"terminated": {"exitCode": 1}} if restarts else {}
    return {
        "name": "pdfleet", "restartCount": restarts, "state": state, "lastState": last,
        "image": "pdfleet", "imageID": "", "ready": False,
    }  # fmt: skip


class OnNode:
    """What a kubelet reads and writes of one pod, by the API of a cluster: ours, or a real one."""

    def __init__(self, api: Api, pod: Object, clock: Callable[[], float]) -> None:
        self._api, self._clock = api, clock
        self.namespace, self.name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        self._uid = pod["metadata"]["uid"]
        self._path = PODS.path(self.namespace, self.name)
        self._warned = ""

    async def read(self, resource: Resource, name: str) -> Object:
        """Of the pod's namespace; empty: it is not there."""
        return await self._ask("GET", resource.path(self.namespace, name))

    async def _pod(self) -> Object:
        pod = await self.read(PODS, self.name)
        return pod if pod.get("metadata", {}).get("uid") == self._uid else {}

    async def _ask(self, method: str, path: str, body: Object | None = None, content: str = JSON) -> Object:
        """Again until the API server is there; empty, where the object is not."""
        while True:
            try:
                return await self._api.ask(method, path, None, body, content)
            except ClusterError as error:
                if error.missing or error.conflict:
                    return {}
                if error.code < 500:
                    raise
            except Unavailable:
                pass
            await asyncio.sleep(0.2)

    async def asked_to_go(self) -> None:
        """Returns too when it is gone."""
        only = {"fieldSelector": f"metadata.name={self.name}"}
        while True:
            try:
                found = await self._api.ask("GET", PODS.path(self.namespace), only)
                pods = [one for one in found["items"] if one["metadata"]["uid"] == self._uid]
                if not pods or "deletionTimestamp" in pods[0]["metadata"]:
                    return
                # From the list's version: that of an object may be too old by far.
                since = {**only, "resourceVersion": found["metadata"]["resourceVersion"]}
                async for event in self._api.follow(PODS.path(self.namespace), since):
                    if event["type"] == "DELETED" or "deletionTimestamp" in event["object"]["metadata"]:
                        return
            except (Unavailable, ClusterError):
                await asyncio.sleep(0.2)

    async def tell(self, **status: object) -> None:
        """Part of its status."""
        await self._ask("PATCH", f"{self._path}/status", {"status": status}, MERGE)

    async def set_ready(self, ready: bool) -> None:
        if pod := await self._pod():
            await self.tell(conditions=with_condition(pod, "Ready", ready, self._stamp()))

    async def warn(self, reason: str, message: str) -> None:
        """An event; the same one again is none."""
        if self._warned == message:
            return
        self._warned = message
        digest = hashlib.sha256(message.encode()).hexdigest()[:16]
        body = {
            "metadata": {"name": f"{self.name}.{digest}", "namespace": self.namespace},
            "involvedObject": {
                "apiVersion": "v1", "kind": "Pod", "name": self.name, "namespace": self.namespace,
                "uid": self._uid,
            },
            "reason": reason, "message": message, "type": "Warning", "source": {"component": "kubelet"},
            "firstTimestamp": self._stamp(), "lastTimestamp": self._stamp(), "count": 1,
        }  # fmt: skip
        await self._ask("POST", EVENTS.path(self.namespace), body)

    async def finish(self) -> None:
        """At the end of a pod that was asked to go."""
        if await self._pod():
            await self._ask("DELETE", self._path, {"gracePeriodSeconds": 0})

    def _stamp(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def with_condition(pod: Object, type: str, holds: bool, stamp: str, message: str = "") -> list[Object]:
    """All conditions of a pod, this one as given; the time of its change stays, where there is none."""
    all_ = pod.get("status", {}).get("conditions", [])
    status = "True" if holds else "False"
    for one in all_:
        if one["type"] == type and one["status"] == status:
            stamp = one["lastTransitionTime"]
    new = {"type": type, "status": status, "lastTransitionTime": stamp, "message": message}
    return [*(one for one in all_ if one["type"] != type), new]


class Workloads:
    """`run` does not end; a step follows each change of the store."""

    def __init__(
        self, store: Store, kubelet: Kubelet, capacity: Callable[[Object], bool] | None = None
    ) -> None:
        self._store = store
        self._kubelet = kubelet
        self._fits = capacity or (lambda pod: True)
        """Whether a node has room for it now."""
        self.refuses: Callable[[Object], str] = lambda pod: ""
        """Why the API server takes no such pod, as by a quota; empty: it does."""
        self._numbers = 0
        self._running: dict[str, asyncio.Task[None]] = {}
        self.removed: list[str] = []
        """Pods that were asked to go, in order."""

    async def run(self) -> None:
        wake = asyncio.Event()
        self._store._wakes.add(wake)
        try:
            while True:
                wake.clear()
                self.step()
                try:
                    # What does not fit is tried again; nothing else needs the clock.
                    async with asyncio.timeout(5.0):
                        await wake.wait()
                except TimeoutError:
                    continue
                await asyncio.sleep(0.01)
        finally:
            self._store._wakes.discard(wake)
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def step(self) -> None:
        for kind in ("deployments", "leaderworkersets"):
            for one in self._store.all(kind):
                if "deletionTimestamp" not in one["metadata"]:
                    self._scale(kind, one)
        for pod in self._store.all("pods"):
            self._place(pod)

    def _scale(self, kind: str, one: Object) -> None:
        meta, spec = one["metadata"], one["spec"]
        groups = kind == "leaderworkersets"
        mine = [
            pod
            for pod in self._store.all("pods", meta["namespace"])
            if any(owner["uid"] == meta["uid"] for owner in pod["metadata"].get("ownerReferences", []))
        ]
        there = [pod for pod in mine if "deletionTimestamp" not in pod["metadata"]]
        size = spec["leaderWorkerTemplate"]["size"] if groups else 1
        template = spec["leaderWorkerTemplate"]["leaderTemplate"] if groups else spec["template"]
        want = spec.get("replicas", 1)
        if groups:
            have = {pod["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/group-index"] for pod in there}
            for number in range(want):
                if str(number) not in have and not self.refuses(template):
                    for index in range(size):
                        self._make(one, template, group=number, index=index)
            for pod in there:
                if int(pod["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/group-index"]) >= want:
                    self._let_go(pod)
        refused = ""
        if not groups:
            digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]
            stale = [pod for pod in there if pod["metadata"]["labels"]["pod-template-hash"] != digest]
            short = want - len(there) if not stale else int(len(there) <= want)
            if short > 0:
                named = {**template.get("metadata", {}), "generateName": f"{meta['name']}-"}
                refused = self.refuses({**template, "metadata": named})
            if not stale:
                for _ in range(0 if refused else short):
                    self._make(one, template, digest=digest)
                for pod in sorted(there, key=_goes_first)[: max(0, len(there) - want)]:
                    self._let_go(pod)
            elif len(there) <= want:
                # A rolling update with a surge of one.
                if not refused:
                    self._make(one, template, digest=digest)
            elif all(is_ready(pod) for pod in there if pod not in stale):
                self._let_go(min(stale, key=_goes_first))
        ready = sum(is_ready(pod) for pod in there if _leads(pod))
        status: Object = {
            "replicas": sum(_leads(pod) for pod in there),
            "readyReplicas": ready,
            "updatedReplicas": sum(
                groups or pod["metadata"]["labels"]["pod-template-hash"] == digest for pod in there
            ),
            "observedGeneration": meta.get("generation", 1),
        }
        failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": refused}
        status["conditions"] = [failure] if refused else []
        if one.get("status") != status:
            path = self._path(kind, meta["namespace"], meta["name"]) + "/status"
            self._store.handle("PATCH", path, {}, {"status": status}, "application/merge-patch+json")

    def _path(self, plural: str, namespace: str, name: str = "") -> str:
        kind = next(one for one in self._store.kinds.values() if one.plural == plural)
        assert isinstance(kind, Kind)
        path = f"{kind.root}/namespaces/{namespace}/{plural}"
        return f"{path}/{name}" if name else path

    def _make(
        self, owner: Object, template: Object, group: int = -1, index: int = 0, digest: str = ""
    ) -> None:
        self._numbers += 1
        meta = owner["metadata"]
        pod: Object = {
            "metadata": {
                "name": f"{meta['name']}-{self._numbers:05d}",
                "labels": copy.deepcopy(template["metadata"].get("labels", {})),
                "annotations": copy.deepcopy(template["metadata"].get("annotations", {})),
                "ownerReferences": [
                    {
                        "kind": owner["kind"],
                        "name": meta["name"],
                        "uid": meta["uid"],
                        "controller": True,
                        "blockOwnerDeletion": True,
                    }
                ],
            },
            "spec": copy.deepcopy(template["spec"]),
            "status": {"phase": "Pending"},
        }
        if digest:
            pod["metadata"]["labels"]["pod-template-hash"] = digest
        if group >= 0:
            pod["metadata"]["labels"] |= {
                "leaderworkerset.sigs.k8s.io/group-index": str(group),
                "leaderworkerset.sigs.k8s.io/worker-index": str(index),
            }
        self._store.handle("POST", self._path("pods", meta["namespace"]), {}, pod, "application/json")

    def _let_go(self, pod: Object) -> None:
        meta = pod["metadata"]
        self.removed.append(meta["name"])
        self._store.handle("DELETE", self._path("pods", meta["namespace"], meta["name"]), {}, None, "")

    def _place(self, pod: Object) -> None:
        meta = pod["metadata"]
        if pod["spec"].get("nodeName") or "deletionTimestamp" in meta:
            return
        path = self._path("pods", meta["namespace"], meta["name"])
        now = self._store.stamp()
        if not self._fits(pod):
            said = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
            status: Object = {"conditions": with_condition(pod, "PodScheduled", False, now, said)}
            self._store.handle("PATCH", f"{path}/status", {}, {"status": status}, MERGE)
            return
        new = self._store.handle("PATCH", path, {}, {"spec": {"nodeName": "node-1"}}, MERGE)
        for type, holds in (("PodScheduled", True), ("Ready", False)):
            status = {"conditions": with_condition(new, type, holds, now)}
            new = self._store.handle("PATCH", f"{path}/status", {}, {"status": status}, MERGE)
        own = OnNode(StoreApi(self._store), new, self._store.clock)
        self._running[meta["name"]] = asyncio.ensure_future(self._kubelet.run(own, new))


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return "deletionTimestamp" not in pod["metadata"] and any(
        one["type"] == "Ready" and one["status"] == "True" for one in conditions
    )


def _leads(pod: Object) -> bool:
    return bool(pod["metadata"].get("labels", {}).get("leaderworkerset.sigs.k8s.io/worker-index", "0") == "0")


def _goes_first(pod: Object) -> tuple[bool, bool, bool, int, str]:
    """Without a node, then pending, then not ready, then cheap to delete, then young."""
    cost = int(pod["metadata"].get("annotations", {}).get(DELETION_COST, "0"))
    return (
        bool(pod["spec"].get("nodeName")),
        pod.get("status", {}).get("phase") == "Running",
        is_ready(pod),
        cost,
        pod["metadata"]["name"],
    )
