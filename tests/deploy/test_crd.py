"""The CRDs: made from code, checked in, and what they refuse, by name of the field."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from scene import SPEC, Scene, scene

from deploy.controller.__main__ import files
from deploy.controller.crd import RESERVED, definitions, read_spec
from deploy.controller.resource import FleetSpec
from fleet.cluster import FLEETS, JSON, MERGE, POOLS, ClusterError, Object
from fleet.virtual_time import run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", files())
def test_checked_in_files_are_those_that_the_code_makes(path: str) -> None:
    assert (ROOT / path).read_text() == files()[path], "run `make crds`"


def _structural(schema: Object, path: str = "") -> None:
    """What Kubernetes asks of a schema, beyond JSON schema."""
    assert "$ref" not in schema, path
    assert "title" not in schema, path
    assert "propertyNames" not in schema, path
    assert isinstance(schema.get("type"), str), f"{path} has no type"
    if schema["type"] == "object":
        assert not ("properties" in schema and "additionalProperties" in schema), path
        for name, part in schema.get("properties", {}).items():
            _structural(part, f"{path}.{name}")
    if schema["type"] == "array":
        _structural(schema["items"], f"{path}[]")


@pytest.mark.parametrize("definition", definitions(), ids=lambda one: str(one["spec"]["names"]["plural"]))
def test_schemas_are_structural(definition: Object) -> None:
    (version,) = definition["spec"]["versions"]
    _structural(version["schema"]["openAPIV3Schema"])


def create(**changes: Any) -> Object:
    async def go() -> Object:
        made = Scene()
        body = {"metadata": {"name": changes.pop("name", "demo")}, "spec": {**SPEC, **changes}}
        return made.store.handle("POST", FLEETS.path("default"), {}, body, JSON)

    return run(go())


def test_defaults_are_filled_in_and_readable() -> None:
    spec = create()["spec"]
    assert spec["prefill"]["maxReplicas"] == 10_000
    assert spec["rollout"]["maxSurgePercent"] == 25
    assert spec["router"]["port"] == 8000
    assert read_spec({"spec": spec}).decode.replicas == 2


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prefill": {"replicas": -1}}, "spec.prefill.replicas"),
    ({"prefill": {"replicas": "two"}}, "spec.prefill.replicas"),
    ({"decode": {"replicas": 5, "maxReplicas": 4}}, "spec.decode.replicas"),
    ({"decode": {"replicas": 1, "minReplicas": 2}}, "spec.decode.replicas"),
    ({"prefill": {"replicas": 2, "gpus": 4}, "budget": {"gpus": 7}}, "spec.budget.gpus"),
    ({"prefill": {"replicas": 2, "gpus": 2, "nodes": 2}, "budget": {"gpus": 7}}, "spec.budget.gpus"),
    ({"rollout": {"maxSurgePercent": 0, "maxUnavailablePercent": 0}}, "spec.rollout.maxSurgePercent"),
    ({"control": {"etcd": "http://etcd:2379", "nats": "nats://n:4222"}}, "spec.control.etcd"),
    ({"control": {"etcd": "etcd:2379"}}, "spec.control"),
    ({"image": ""}, "spec.image"),
    ({"router": {"serviceType": "Ingress"}}, "spec.router.serviceType"),
    ({"decode": {"sharedMemory": "much"}}, "spec.decode.sharedMemory"),
    ({"decode": {"settings": {"engine.max-batch": 4}}}, "spec.decode.settings"),
    ({"prefill": {"settings": {"control.etcd": "elsewhere:1"}}}, "spec.prefill.settings"),
    *(({"decode": {"settings": {name: "x"}}}, "spec.decode.settings") for name in RESERVED),
    ({"planner": {"settings": {"control.etcd": "elsewhere:1"}}}, "spec.planner.settings"),
    ({"planner": {"settings": {"planner.budget": "4"}}}, "spec.planner.settings"),
    ({"planner": {"settings": {"decisions": "/x"}}}, "spec.planner.settings"),
    ({"name": "1-demo"}, "metadata.name"),
    ({"name": "d" * 41}, "metadata.name"),
    ({"name": "d" * 29, "prefill": {"nodes": 2}}, "metadata.name"),
    ({"name": "d" * 29, "decode": {"nodes": 2}}, "metadata.name"),
]


@pytest.mark.parametrize(("changes", "field"), REFUSED)
def test_what_could_not_work_is_refused_and_the_field_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ClusterError) as refused:
        create(**changes)
    assert refused.value.code == 422
    assert field in refused.value.message


def test_budget_as_large_as_wanted_is_enough() -> None:
    spec = create(prefill={"replicas": 2, "gpus": 4}, budget={"gpus": 8})["spec"]
    assert spec["budget"]["gpus"] == 8
    # Null is as much as nothing said.
    assert create(prefill={"replicas": 2, "gpus": 4}, budget={"gpus": None})["spec"]["budget"] == {}


def test_pool_of_a_fleet_stays_its_pool() -> None:
    async def go() -> None:
        async with scene() as s:
            s.create()
            await s.settle()
            body: Object = {"spec": {"pool": "decode"}}
            with pytest.raises(ClusterError, match=r"spec\.pool"):
                s.store.handle("PATCH", POOLS.path("default", "demo-prefill"), {}, body, MERGE)

    run(go(), horizon_s=1e4)


def test_a_definition_whose_defaults_are_against_its_rules_is_refused() -> None:
    """Of a real API server such a definition is not taken, whatever would be filled in later."""
    (fleets, _) = copy.deepcopy(definitions())
    spec = fleets["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert spec["properties"]["decode"]["default"]["replicas"] == 1
    spec["properties"]["decode"]["default"] = {}
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

    async def go() -> None:
        with pytest.raises(ClusterError, match=r"decode.*default.*replicas"):
            Scene().store.handle("POST", path, {}, fleets, JSON)

    run(go())


def test_a_handle_that_nobody_would_look_at_is_refused() -> None:
    async def go() -> None:
        async with scene() as s:
            body: Object = {"metadata": {"name": "mine"}, "spec": {"fleet": "demo", "pool": "decode"}}
            with pytest.raises(ClusterError, match="must be FLEET-POOL"):
                s.store.handle("POST", POOLS.path("default"), {}, body, JSON)

    run(go(), horizon_s=1e4)


def test_spec_that_cannot_be_read_is_said_by_field() -> None:
    with pytest.raises(ValueError, match=r"spec\.prefill\.replicas: .*int"):
        read_spec({"spec": {**SPEC, "prefill": {"replicas": "two"}}})
    assert isinstance(read_spec({"spec": SPEC}), FleetSpec)
