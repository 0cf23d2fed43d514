"""Kubernetes' own controllers and nodes, for tests: sets make pods, pods get nodes, run, get ready and end.

Who goes when a set shrinks is decided in the order of the real ReplicaSet controller. What a pod does is said
by `Behaviour`, or by another kubelet (`kubelet.py` runs its command).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster_store import Kind, Store

from fleet.cluster import ClusterError, Object
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
    drain_s: float = 0.5
    """Seconds it takes to go."""


class Kubelet(Protocol):
    async def run(self, store: Store, pod: Object) -> None:
        """The life of a pod that has a node, until it was asked to go and has gone."""
        ...


class PretendKubelet:
    def __init__(self, behave: Callable[[Object], Behaviour]) -> None:
        self.behave = behave

    async def run(self, store: Store, pod: Object) -> None:
        meta = pod["metadata"]
        how = self.behave(pod)
        said = asyncio.ensure_future(self._live(store, meta["namespace"], meta["name"], how))
        await asked_to_go(store, meta["namespace"], meta["name"])
        said.cancel()
        set_ready(store, meta["namespace"], meta["name"], False)
        await asyncio.sleep(how.drain_s)
        store.finish(meta["namespace"], meta["name"])

    async def _live(self, store: Store, namespace: str, name: str, how: Behaviour) -> None:
        if not how.image:
            waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
            tell(store, namespace, name, phase="Pending", containerStatuses=[_container(0, waiting)])
            return
        if how.crashes:
            restarts = 0
            while True:
                waiting = {"reason": "CrashLoopBackOff", "message": "back-off restarting failed container"}
                tell(
                    store, namespace, name, phase="Running", containerStatuses=[_container(restarts, waiting)]
                )
                await asyncio.sleep(min(300.0, 10.0 * 2**restarts))
                restarts += 1
        tell(
            store, namespace, name, phase="Running", podIP="10.0.0.1", containerStatuses=[_container(0, None)]
        )
        if how.ready_s != float("inf"):
            await asyncio.sleep(how.ready_s)
            set_ready(store, namespace, name, True)


def _container(restarts: int, waiting: Object | None) -> Object:
    state: Object = {"running": {}} if waiting is None else {"waiting": waiting}
    last: Object = {"terminated": {"exitCode": 1}} if restarts else {}
    return {"name": "pdfleet", "restartCount": restarts, "state": state, "lastState": last}


async def asked_to_go(store: Store, namespace: str, name: str) -> None:
    """Returns too when it is gone."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    while (pod := store.one("pods", name, namespace)) is not None:
        query = {"fieldSelector": f"metadata.name={name}", "resourceVersion": str(store.version)}
        if "deletionTimestamp" in pod["metadata"]:
            return
        with contextlib.suppress(Unavailable, ClusterError):
            async for event in store.watch(path, query):
                if event["type"] == "DELETED" or "deletionTimestamp" in event["object"]["metadata"]:
                    return


def tell(store: Store, namespace: str, name: str, **status: object) -> None:
    """Part of a pod's status."""
    path = f"/api/v1/namespaces/{namespace}/pods/{name}"
    if store.one("pods", name, namespace) is not None:
        store.handle("PATCH", path, {}, {"status": status}, "application/merge-patch+json")


def set_condition(store: Store, namespace: str, name: str, type: str, holds: bool, message: str = "") -> None:
    pod = store.one("pods", name, namespace)
    if pod is None:
        return
    others = [one for one in pod.get("status", {}).get("conditions", []) if one["type"] != type]
    status = "True" if holds else "False"
    before = [one for one in pod.get("status", {}).get("conditions", []) if one["type"] == type]
    stamp = before[0]["lastTransitionTime"] if before and before[0]["status"] == status else store.stamp()
    new = {"type": type, "status": status, "lastTransitionTime": stamp, "message": message}
    tell(store, namespace, name, conditions=[*others, new])


def set_ready(store: Store, namespace: str, name: str, ready: bool) -> None:
    set_condition(store, namespace, name, "Ready", ready)


class Workloads:
    """`run` does not end; a step follows each change of the store."""

    def __init__(
        self, store: Store, kubelet: Kubelet, capacity: Callable[[Object], bool] | None = None
    ) -> None:
        self._store = store
        self._kubelet = kubelet
        self._fits = capacity or (lambda pod: True)
        """Whether a node has room for it now."""
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
                if str(number) not in have:
                    for index in range(size):
                        self._make(one, template, group=number, index=index)
            for pod in there:
                if int(pod["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/group-index"]) >= want:
                    self._let_go(pod)
        else:
            digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]
            stale = [pod for pod in there if pod["metadata"]["labels"]["pod-template-hash"] != digest]
            if not stale:
                for _ in range(want - len(there)):
                    self._make(one, template, digest=digest)
                for pod in sorted(there, key=_goes_first)[: max(0, len(there) - want)]:
                    self._let_go(pod)
            elif len(there) <= want:
                # A rolling update with a surge of one.
                self._make(one, template, digest=digest)
            elif all(is_ready(pod) for pod in there if pod not in stale):
                self._let_go(min(stale, key=_goes_first))
        ready = sum(is_ready(pod) for pod in there if _leads(pod))
        status = {
            "replicas": sum(_leads(pod) for pod in there),
            "readyReplicas": ready,
            "updatedReplicas": sum(
                groups or pod["metadata"]["labels"]["pod-template-hash"] == digest for pod in there
            ),
            "observedGeneration": meta.get("generation", 1),
        }
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
                    {"kind": owner["kind"], "name": meta["name"], "uid": meta["uid"], "controller": True}
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
        if not self._fits(pod):
            set_condition(
                self._store, meta["namespace"], meta["name"], "PodScheduled", False,
                "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
            )  # fmt: skip
            return
        path = self._path("pods", meta["namespace"], meta["name"])
        placed = {"spec": {"nodeName": "node-1"}}
        new = self._store.handle("PATCH", path, {}, placed, "application/merge-patch+json")
        set_condition(self._store, meta["namespace"], meta["name"], "PodScheduled", True)
        set_ready(self._store, meta["namespace"], meta["name"], False)
        self._running[meta["name"]] = asyncio.ensure_future(self._kubelet.run(self._store, new))


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
