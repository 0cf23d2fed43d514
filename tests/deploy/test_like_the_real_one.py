"""Our API server answers as a real one does, request by request, where there is a real one to ask."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from cluster_store import Store, StoreApi
from control_plane import ControlPlane
from scene import SPEC

from deploy.controller.crd import definitions
from deploy.controller.render import ACCOUNTS, SERVICES
from fleet.cluster import (
    APPLY,
    FLEETS,
    JSON,
    MERGE,
    POOLS,
    Api,
    ClusterError,
    KubernetesApi,
    Object,
    Resource,
)

pytestmark = pytest.mark.live

KIND = {"apiVersion": FLEETS.api_version, "kind": "InferenceFleet"}
CONFIGS = Resource("v1", "ConfigMap", "configmaps")
HANDLE = "same-decode"
_OWN = ("uid", "resourceVersion", "creationTimestamp", "managedFields", "selfLink", "deletionTimestamp")


@dataclass(frozen=True)
class Ask:
    method: str
    path: str
    body: Object | None = None
    content: str = JSON
    query: Mapping[str, str] = field(default_factory=dict)


def make(**changes: Any) -> Ask:
    body = {**KIND, "metadata": {"name": "same"}, "spec": {**SPEC, **changes}}
    return Ask("POST", FLEETS.path("default"), body)


def patch(spec: Object, **meta: Any) -> Ask:
    return Ask("PATCH", FLEETS.path("default", "same"), {"metadata": meta, "spec": spec}, MERGE)


def status(**parts: Any) -> Ask:
    return Ask("PATCH", FLEETS.path("default", "same", "status"), {"status": parts}, MERGE)


def pool(replicas: int, name: str = HANDLE, **meta: Any) -> Ask:
    body = {
        "apiVersion": POOLS.api_version, "kind": "FleetPool", "metadata": {"name": name, **meta},
        "spec": {"fleet": "same", "pool": "decode", "replicas": replicas},
    }  # fmt: skip
    return Ask("POST", POOLS.path("default"), body)


def scale(body: Object) -> Ask:
    return Ask("PATCH", POOLS.path("default", HANDLE, "scale"), body, MERGE)


def applied(manager: str, body: Object, **query: str) -> Ask:
    whole = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "same"}, **body}
    return Ask("PATCH", CONFIGS.path("default", "same"), whole, APPLY, {"fieldManager": manager, **query})


def service(manager: str, *ports: int, **spec: Any) -> Ask:
    whole = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "same"},
        "spec": {
            "clusterIP": "None", "selector": {"a": "b"},
            "ports": [
                {"name": f"p{port}", "port": port, "targetPort": port, "protocol": "TCP"} for port in ports
            ],
            **spec,
        },
    }  # fmt: skip
    query = {"fieldManager": manager, "force": "true"}
    return Ask("PATCH", SERVICES.path("default", "same"), whole, APPLY, query)


GET = Ask("GET", FLEETS.path("default", "same"))
CONDITION = {
    "type": "Available", "status": "True", "reason": "R", "message": "", "observedGeneration": 1,
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}  # fmt: skip
STORIES: dict[str, list[Ask]] = {
    "defaults": [make(), GET, make()],
    "unknown fields are pruned": [make(strange={"a": 1}, decode={"replicas": 2, "strange": 1})],
    "open fields keep all": [
        make(decode={"affinity": {"what": {"ever": [1, "2", None]}}, "env": [{"name": "A", "odd": True}]})
    ],
    "nulls with a default": [make(drainSeconds=None, decode=None)],
    "nulls without a default": [make(budget={"gpus": None}), make(prefill={"rdma": None})],
    "nulls that are needed": [make(image=None)],
    "a null in a list": [make(imagePullSecrets=["a", None])],
    "a null in a map": [make(decode={"settings": {"a": None}})],
    "wrong types": [
        make(decode={"replicas": "2"}), make(image=3), make(decode=[]), make(imagePullSecrets="a"),
        make(decode={"replicas": 2.5}), make(decode={"settings": {"a": 1}}), make(rollout={"paused": "no"}),
    ],
    "whole numbers as fractions": [make(decode={"replicas": 2.0}), make(router={"replicas": 2.0})],
    "limits": [
        make(decode={"replicas": -1}), make(decode={"replicas": 10_001}), make(image=""),
        make(image="x" * 501), make(decode={"sharedMemory": "1 GB"}), make(drainSeconds=3601),
        make(planner={"mode": "both"}), make(router={"serviceType": "None"}),
        make(imagePullSecrets=["a"] * 17), make(decode={"settings": {str(n): "" for n in range(201)}}),
    ],
    "rules": [
        make(decode={"replicas": 5, "maxReplicas": 4}), make(decode={"replicas": 1, "minReplicas": 2}),
        make(rollout={"maxSurgePercent": 0}), make(decode={"settings": {"model": "a"}}),
        make(decode={"gpus": 4}, budget={"gpus": 7}), make(control={**SPEC["control"], "tlsName": "a"}),
        make(planner={"settings": {"a": "b"}}), make(decode={"settings": {"engine.max-batch": "4"}}),
        patch({"decode": {"minReplicas": 3}}), patch({"decode": {"nodes": 2}}), patch({"decode": None}), GET,
    ],
    "rules of pools": [
        pool(2), Ask("PATCH", POOLS.path("default", HANDLE), {"spec": {"pool": "prefill"}}, MERGE),
        Ask("PATCH", POOLS.path("default", HANDLE), {"spec": {"replicas": 3, "fleet": "same"}}, MERGE),
        pool(2, "same"),
    ],
    "what is needed": [
        Ask("POST", FLEETS.path("default"), {**KIND, "metadata": {"name": "same"}}),
        Ask("POST", FLEETS.path("default"), {**KIND, "metadata": {"name": "same"}, "spec": {"image": "a"}}),
    ],
    "names": [
        Ask("POST", FLEETS.path("default"), {**KIND, "metadata": {"name": name}, "spec": SPEC})
        for name in ("Upper", "a_b", "-a", "a..b", "x" * 254)
    ],
    "generations": [
        make(), patch({"image": "b"}), GET, patch({}, labels={"a": "b"}), patch({"image": "b"}),
        status(revision="x"), GET, patch({"drainSeconds": None}), patch({"decode": None}),
        patch({"strange": 1}), GET,
    ],
    "status": [
        make(), status(revision="x", strange=1), status(conditions=[CONDITION]),
        status(conditions=[{"type": "Available"}]), status(revision=3),
        Ask("PATCH", FLEETS.path("default", "same"), {"status": {"revision": "y"}}, MERGE), GET,
        Ask("PATCH", FLEETS.path("default", "same", "status"), {"spec": {"image": "c"}}, MERGE), GET,
        status(conditions=[]), status(revision=None),
    ],
    "conflicts": [
        make(), patch({"image": "b"}, resourceVersion="1"),
        patch({"image": "b"}, resourceVersion=""),
        patch({"image": "c"}, uid="other"), patch({"image": "c"}, name="other"),
        Ask("PATCH", FLEETS.path("default", "nobody"), {}, MERGE),
        Ask("GET", FLEETS.path("default", "nobody")),
        Ask("DELETE", FLEETS.path("default", "nobody")),
        Ask("PATCH", FLEETS.path("default", "nobody", "status"), {}, MERGE),
    ],
    "scale": [
        pool(2), scale({"spec": {"replicas": 3}}), Ask("GET", POOLS.path("default", HANDLE, "scale")),
        scale({"spec": {"replicas": -1}}), scale({"spec": {"replicas": 20_000}}),
        scale({"spec": {"replicas": 4}, "metadata": {"resourceVersion": "1"}}),
        Ask("PATCH", POOLS.path("default", HANDLE, "status"),
            {"status": {"replicas": 4, "selector": "a=b"}}, MERGE),
        Ask("GET", POOLS.path("default", HANDLE, "scale")), Ask("GET", POOLS.path("default", HANDLE)),
        Ask("GET", FLEETS.path("default", "same", "scale")),
    ],
    "finalizers": [
        pool(2, finalizers=["example.com/held"]), Ask("DELETE", POOLS.path("default", HANDLE)),
        Ask("GET", POOLS.path("default", HANDLE)), Ask("DELETE", POOLS.path("default", HANDLE)),
        Ask("PATCH", POOLS.path("default", HANDLE), {"spec": {"replicas": 3}}, MERGE),
        Ask("PATCH", POOLS.path("default", HANDLE), {"metadata": {"finalizers": ["example.com/b"]}}, MERGE),
        Ask("PATCH", POOLS.path("default", HANDLE), {"metadata": {"finalizers": None}}, MERGE),
        Ask("GET", POOLS.path("default", HANDLE)),
    ],
    "managers of fields": [
        applied("one", {"data": {"a": "1", "b": "1"}}), applied("two", {"data": {"b": "2"}}),
        applied("two", {"data": {"b": "1", "c": "2"}}), applied("one", {"data": {"a": "1"}}),
        applied("two", {"data": {"c": "2"}}), applied("two", {"data": {"a": "2"}}, force="true"),
        applied("one", {}), applied("two", {}), Ask("GET", CONFIGS.path("default", "same")),
        Ask("PATCH", CONFIGS.path("default", "same"), {"data": {"a": "3"}}, MERGE),
    ],
    "entries of lists": [
        service("one", 80, 81), service("two", 82), service("one", 81),
        service("two", 81, 82), Ask("GET", SERVICES.path("default", "same")), service("two"),
    ],
    "applied to what is not there": [
        applied("one", {"metadata": {"name": "other"}}),
        applied("one", {"metadata": {"name": "same", "uid": "x"}}),
    ],
    "deleted as asked": [
        Ask("POST", ACCOUNTS.path("default"), {"metadata": {"name": "same"}}),
        Ask("DELETE", ACCOUNTS.path("default", "same"), {"preconditions": {"uid": "other"}}),
        Ask("DELETE", ACCOUNTS.path("default", "same"), {"preconditions": {"resourceVersion": "1"}}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_each_answer_is_that_of_a_real_one(plane: ControlPlane, story: str) -> None:
    async def go() -> None:
        real = await KubernetesApi.connect(kubeconfig=plane.kubeconfig)
        store = Store(time.time)
        for one in definitions():
            definition = copy.deepcopy(one)
            if plane.minor < 25:
                _without_rules(definition)
            store.handle(
                "POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", {}, definition, JSON
            )
        ours = StoreApi(store)
        try:
            unlike = []
            for number, ask in enumerate(STORIES[story]):
                wanted, got = [await answer(api, ask) for api in (real, ours)]
                if got != wanted:
                    unlike.append(
                        f"{number}: {ask.method} {ask.path} {ask.body}\nreal: {wanted}\nours: {got}"
                    )
            assert not unlike, "\n".join(unlike)
        finally:
            for resource in (FLEETS, POOLS, CONFIGS, SERVICES, ACCOUNTS):
                for name in ("same", "upper", HANDLE):
                    with contextlib.suppress(ClusterError):
                        await real.ask("DELETE", resource.path("default", name))
            await real.close()

    asyncio.run(go())


async def answer(api: Api, ask: Ask) -> Object:
    """Without what differs each time, and the words of refusals."""
    try:
        found = await api.ask(ask.method, ask.path, ask.query, copy.deepcopy(ask.body), ask.content)
    except ClusterError as error:
        return {"code": error.code, "reason": error.reason}
    if found.get("kind") == "Status":
        return {"kind": "Status"}
    meta = {key: value for key, value in found.get("metadata", {}).items() if key not in _OWN}
    kept = {**found, "metadata": meta}
    if found["kind"] == "Service":
        # Of what it adds itself nothing is held here.
        kept = {key: found["spec"].get(key) for key in ("ports", "selector")}
    return kept


def _without_rules(node: Any) -> None:
    if isinstance(node, dict):
        node.pop("x-kubernetes-validations", None)
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _without_rules(each)
