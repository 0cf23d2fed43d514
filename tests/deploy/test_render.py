"""What is made of a fleet, held against Kubernetes' own schemas and against what pods must never be."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml
from scene import SPEC, Scene, scene

from deploy.controller.crd import RESERVED, definitions, read_spec
from deploy.controller.drift import differs
from deploy.controller.install import RULES, example, installation
from deploy.controller.render import Renderer, revision, shape, shaped
from deploy.controller.yaml_text import to_yaml
from fleet.cluster import FLEETS, JSON, Object
from fleet.settings import load
from fleet.virtual_time import run

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "deploy" / "manifests" / "examples").glob("*.yaml"))
RICH: Object = {
    **SPEC,
    "model": {
        "path": "/models/m", "name": "m", "volume": {"persistentVolumeClaim": {"claimName": "models"}},
    },
    "control": {**SPEC["control"], "caSecret": "ca", "credentialsSecret": "etcd", "tlsSecret": "own"},
    "prefill": {
        "replicas": 2, "gpus": 1, "rdma": {"resource": "rdma/hca", "count": 1},
        "priorityClassName": "pdfleet-prefill",
        "resources": {"requests": {"cpu": "4", "memory": "16Gi"}}, "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "settings": {"engine.max-batch": "64"}, "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    },
    "decode": {"replicas": 1, "gpus": 8, "nodes": 2},
    "router": {"replicas": 2, "keysSecret": "keys", "tlsSecret": "tls", "serviceType": "LoadBalancer"},
    "monitoring": {"podMonitor": True, "labels": {"release": "prometheus"}},
    "network": {"metricsFrom": {"team": "monitoring"}},
    "imagePullSecrets": ["pull"],
    "planner": {"mode": "act", "settings": {"planner.scale-to-zero": "true", "planner.idle-s": "300"}},
}  # fmt: skip


def renderer(spec: Object) -> Renderer:
    fleet = {"metadata": {"name": "demo", "namespace": "default", "uid": "1"}, "spec": spec}
    return Renderer(fleet, read_spec(fleet))


def everything(spec: Object) -> list[Object]:
    made = renderer(spec)
    return [
        *made.around(), made.routers(), made.record("abc", 1),
        *(made.workers(role, "abc", 2) for role in ("prefill", "decode")),
        *(made.pool(role, 1) for role in ("prefill", "decode")),
    ]  # fmt: skip


KNOWN = (
    "cert-manager.io",
    "gateway.networking.k8s.io",
    "pdfleet.dev",
    "leaderworkerset",
    "monitoring.coreos.com",
    "apiextensions.k8s.io",
)


def check(one: Object) -> None:
    if not one["apiVersion"].startswith(KNOWN):
        kubernetes_validate.validate(one, "1.34", strict=True)


@pytest.mark.parametrize("spec", [SPEC, RICH], ids=["plain", "rich"])
def test_all_that_is_made_is_valid_and_strictly_so(spec: Object) -> None:
    for one in everything(spec):
        check(one)


def test_the_installation_is_valid() -> None:
    for one in [*installation("image:1"), *definitions()]:
        check(one)
    assert list(yaml.safe_load_all(to_yaml(installation("image:1")))) == installation("image:1")


def pods(spec: Object) -> Iterator[Object]:
    made = renderer(spec)
    yield made.routers()["spec"]["template"]["spec"]
    for role in ("prefill", "decode"):
        one = made.workers(role, "abc", 1)["spec"]
        if "template" in one:
            yield one["template"]["spec"]
        else:
            yield one["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
            yield one["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    yield from (one["spec"]["template"]["spec"] for one in made.planner() if one["kind"] == "Deployment")
    (controller,) = (one for one in installation("i:1") if one["kind"] == "Deployment")
    yield controller["spec"]["template"]["spec"]


@pytest.mark.parametrize("spec", [SPEC, RICH], ids=["plain", "rich"])
def test_pods_hear_sigterm_have_time_and_few_rights(spec: Object) -> None:
    """F095, F096."""
    for pod in pods(spec):
        (container,) = pod["containers"]
        assert "command" not in container, "the image's entry point is process 1"
        assert container["args"][:2] == ["python", "-m"]
        assert not {"sh", "bash", "-c"} & {*container["args"]}
        assert importlib.util.find_spec(container["args"][2])
        limits = [arg.split("=")[1] for arg in container["args"] if "drain-limit" in arg]
        waits = 5 if "preStop" in container.get("lifecycle", {}) else 0
        for limit in limits:
            assert pod["terminationGracePeriodSeconds"] >= waits + int(limit) + 10
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        assert set(security["capabilities"].get("add", [])) <= {"IPC_LOCK"}
        assert pod["securityContext"]["runAsNonRoot"] is True
        if pod["serviceAccountName"] == "demo":
            assert pod["automountServiceAccountToken"] is False


def test_all_processes_of_a_fleet_hold_each_other_to_one_name() -> None:
    """Not to pods' addresses: those of its headless Service, or what is given."""
    for name, wanted in (("", "demo-workers.default.svc"), ("fleet.example", "fleet.example")):
        spec = {**RICH, "control": {**RICH["control"], "tlsName": name}}
        for pod in list(pods(spec))[:-1]:
            (container,) = pod["containers"]
            given = dict(arg.removeprefix("--").split("=", 1) for arg in container["args"][3:])
            assert given["control.tls-name"] == wanted
            (mount,) = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "fleet-tls"]
            files = {given[f"control.tls-{part}"] for part in ("ca", "cert", "key")}
            assert files == {f"{mount}/{file}" for file in ("ca.crt", "tls.crt", "tls.key")}
            (volume,) = [one for one in pod["volumes"] if one["name"] == "fleet-tls"]
            assert volume["secret"]["secretName"] == "own"
            assert {one["path"] for one in volume["secret"]["items"]} == {"tls.crt", "tls.key", "ca.crt"}
    assert renderer(SPEC).tls_name in {f"{one['metadata']['name']}.default.svc" for one in everything(SPEC)}


def test_the_planner_knows_that_pods_keep_their_roles() -> None:
    from planner.__main__ import PlannerProcessSettings

    (deployment,) = [one for one in renderer(RICH).planner() if one["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    args = [arg.replace("$(POD_IP)", "10.0.0.1") for arg in container["args"][3:]]
    given = load(PlannerProcessSettings, args, {}).planner
    assert given.turns is False
    assert (given.scale_to_zero, given.idle_s) == (True, 300)


def test_no_two_fleets_have_one_name_in_etcd() -> None:
    """A fleet b-c of the namespace a, and a fleet c of the namespace a-b."""
    names = set()
    for namespace, name in (("a", "b-c"), ("a-b", "c")):
        fleet = {"metadata": {"name": name, "namespace": namespace, "uid": "1"}, "spec": SPEC}
        (container,) = Renderer(fleet, read_spec(fleet)).routers()["spec"]["template"]["spec"]["containers"]
        names |= {arg for arg in container["args"] if arg.startswith("--control.fleet=")}
    assert len(names) == 2


@pytest.mark.parametrize("spec", [SPEC, RICH], ids=["plain", "rich"])
def test_workers_tell_their_revision(spec: Object) -> None:
    for role in ("prefill", "decode"):
        assert "--chassis.revision=abc" in str(renderer(spec).workers(role, "abc", 1))


def shown() -> dict[str, Object]:
    """Specs of the examples, by file."""
    found = {file.stem: list(yaml.safe_load_all(file.read_text())) for file in EXAMPLES}
    return {
        name: one["spec"] for name, objects in found.items() for one in objects if one["kind"] == FLEETS.kind
    }


@pytest.mark.parametrize("spec", [SPEC, RICH, *shown().values()], ids=["plain", "rich", *shown()])
def test_processes_know_every_flag_that_they_are_given(spec: Object) -> None:
    from decode_worker.settings import DecodeWorkerSettings
    from deploy.controller.__main__ import ProcessSettings
    from planner.__main__ import PlannerProcessSettings
    from prefill_worker.settings import PrefillWorkerSettings
    from router.__main__ import RouterProcessSettings

    classes: dict[str, Any] = {
        "router": RouterProcessSettings,
        "prefill_worker": PrefillWorkerSettings,
        "decode_worker": DecodeWorkerSettings,
        "deploy.controller": ProcessSettings,
        "planner": PlannerProcessSettings,
    }
    for pod in pods(spec):
        (container,) = pod["containers"]
        args = [arg.replace("$(POD_IP)", "10.0.0.1").replace("$(POD_NAME)", "p") for arg in container["args"]]
        load(classes[args[2]], args[3:], {})


def test_settings_that_the_controller_gives_are_those_that_specs_may_not() -> None:
    for pod in list(pods(RICH))[:3]:
        given = {arg.removeprefix("--").split("=")[0] for arg in pod["containers"][0]["args"][3:]}
        own = {name for name in given if name != "engine.max-batch"}
        assert all(name in RESERVED or name.startswith("control.") for name in own), own


def test_the_controller_asks_for_no_right_that_it_does_not_use() -> None:
    granted = {
        (group, resource, verb)
        for rule in RULES
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert not any("*" in right for right in granted)
    assert not any(resource in ("secrets", "nodes", "pods/exec") for _, resource, _ in granted)
    used: set[tuple[str, str, str]] = set()
    verbs = {"GET": "list", "PATCH": "patch", "POST": "create", "DELETE": "delete"}

    async def go() -> None:
        async with scene() as s:
            ask = s.api.ask

            async def noted(method: str, path: str, *rest: Any) -> Object:
                kind, _, _, sub = s.store._where(path)
                group = kind.api_version.rpartition("/")[0]
                used.add((group, f"{kind.plural}/{sub}" if sub else kind.plural, verbs[method]))
                return await ask(method, path, *rest)

            s.api.ask = noted  # type: ignore[method-assign]
            await s.stop_controller()
            s.start_controller()
            s.create(monitoring={"podMonitor": True}, planner={"mode": "act"})
            await s.settle()
            assert s.store.one("roles", "demo-planner")["rules"][0]["resourceNames"] == ["demo"]  # type: ignore[index]
            s.change(planner={"mode": "advise"})
            s.scale("demo-decode", 1)
            await s.until(lambda: s.fleet()["spec"]["decode"]["replicas"] == 1)
            s.change(image="pdfleet:2", monitoring={"podMonitor": False}, planner={"mode": "off"})
            await s.settle()
            assert s.store.one("deployments", "demo-planner") is None
            assert s.store.one("roles", "demo-planner") is None

    run(go(), horizon_s=1e4)
    assert used <= granted, used - granted


def test_counts_make_no_revision_and_all_else_of_workers_does() -> None:
    base = read_spec({"spec": SPEC})
    other: list[Object] = [
        {"image": "pdfleet:2"}, {"drainSeconds": 90}, {"prefill": {"gpus": 1}},
        {"decode": {"settings": {"engine.max-batch": "2"}}}, {"model": {"path": "/models/n", "name": "m"}},
    ]  # fmt: skip
    same: list[Object] = [
        {"prefill": {"replicas": 9}}, {"decode": {"replicas": 3, "maxReplicas": 5}}, {"budget": {"gpus": 4}},
        {"rollout": {"paused": True}}, {"router": {"replicas": 3}}, {"planner": {"mode": "act"}},
    ]  # fmt: skip
    for changes in other:
        assert revision(read_spec({"spec": {**SPEC, **changes}})) != revision(base), changes
    for changes in same:
        assert revision(read_spec({"spec": {**SPEC, **changes}})) == revision(base), changes


def test_an_older_revision_is_made_again_exactly() -> None:
    old = read_spec({"spec": RICH})
    new = read_spec({"spec": {**SPEC, "prefill": {"replicas": 7}}})
    again = shaped(msgspec.json.decode(msgspec.json.encode(shape(old))), new)
    assert revision(again) == revision(old)
    assert (again.prefill.replicas, again.router.replicas) == (7, 1)


def test_drift_is_named_and_defaults_are_none() -> None:
    wanted = {"spec": {"replicas": 2, "cpu": "1000m", "list": [{"a": 1}], "empty": ""}}
    live = {"spec": {"replicas": 2, "cpu": "1", "list": [{"a": 1, "b": 2}], "more": True}}
    assert differs(wanted, live) is None
    assert differs(wanted, {"spec": {**live["spec"], "replicas": 3}}) == "spec.replicas: 3 ≠ 2"
    assert differs(wanted, {"spec": {**live["spec"], "list": []}}) == "spec.list: [] ≠ [{'a': 1}]"
    assert differs({"on": True}, {"on": 1}) is not None


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: str(file.stem))
def test_examples_are_taken(file: Path) -> None:
    objects = list(yaml.safe_load_all(file.read_text()))

    async def go() -> None:
        s = Scene()
        for one in objects:
            if one["kind"] == "InferenceFleet":
                s.store.handle("POST", FLEETS.path("default"), {"fieldValidation": "Strict"}, one, JSON)
                for made in everything(one["spec"]):
                    check(made)
                if secret := one["spec"]["control"].get("tlsSecret"):
                    (issued,) = [made["spec"] for made in objects if made["kind"] == "Certificate"
                                 and made["spec"]["secretName"] == secret]  # fmt: skip
                    assert issued["dnsNames"] == [f"{one['metadata']['name']}-workers.default.svc"]
            else:
                check(one)

    run(go())


def test_the_example_that_is_printed_is_taken() -> None:
    async def go() -> None:
        query = {"fieldValidation": "Strict"}
        Scene().store.handle("POST", FLEETS.path("default"), query, example("image:1"), JSON)

    run(go())
