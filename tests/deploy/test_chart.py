"""The Helm chart: real helm lints and renders it; what comes out is held against Kubernetes' schemas."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from kubernetes_tools import find
from scene import Scene
from test_render import check

from deploy.controller.install import example, installation
from deploy.controller.render import FLEET_LABEL
from fleet.cluster import FLEETS, JSON, Object
from fleet.virtual_time import run

CHART = Path(__file__).parents[2] / "deploy" / "chart"
HELM = find("helm")
pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not there: make kubernetes-tools")

DEMO = ["fleet.create=true", "etcd.bundled=true", "nats.bundled=true"]


def helm(home: Path, *words: str, code: int = 0) -> str:
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([str(HELM), *words], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + (done.stderr if code else "")


def rendered(home: Path, *values: str) -> list[Object]:
    sets = [word for value in values for word in ("--set", value)]
    text = helm(home, "template", "release", str(CHART), "--namespace", "serving", "--include-crds", *sets)
    return [one for one in yaml.safe_load_all(text) if one]


def test_lint_finds_nothing(tmp_path: Path) -> None:
    said = helm(tmp_path, "lint", "--strict", str(CHART))
    assert "0 chart(s) failed" in said


@pytest.mark.parametrize(
    "values",
    [[], DEMO, [*DEMO, "etcd.tlsSecret=etcd-tls", "nats.tlsSecret=nats-tls", "fleet.certManager=true"]],
    ids=["controller", "demo", "tls"],
)
def test_what_is_rendered_is_valid(tmp_path: Path, values: list[str]) -> None:
    objects = rendered(tmp_path, *values)
    fleets = [one for one in objects if one["kind"] == "InferenceFleet"]
    assert len(fleets) == bool(values)
    for one in objects:
        check(one)

    async def go() -> None:
        for one in fleets:
            Scene().store.handle("POST", FLEETS.path("serving"), {"fieldValidation": "Strict"}, one, JSON)

    run(go())
    if "etcd.tlsSecret=etcd-tls" in values:
        control = fleets[0]["spec"]["control"]
        assert control == {
            "caSecret": "etcd-tls", "etcd": "release-etcd:2379", "nats": "tls://release-nats:4222",
            "tlsSecret": "demo-tls",
        }  # fmt: skip
        (issued,) = [one["spec"] for one in objects if one["kind"] == "Certificate"
                     and one["spec"]["secretName"] == "demo-tls"]  # fmt: skip
        assert issued["dnsNames"] == ["demo-workers.serving.svc"]


def test_what_is_given_of_the_fleet_stays_and_the_rest_is_filled_in(tmp_path: Path) -> None:
    given = "fleet.spec.control."
    objects = rendered(
        tmp_path, *DEMO, "fleet.certManager=true", f"{given}tlsName=fleet.example", f"{given}etcd=mine:2379"
    )
    (fleet,) = [one for one in objects if one["kind"] == "InferenceFleet"]
    assert fleet["spec"]["control"] == {
        "etcd": "mine:2379", "nats": "nats://release-nats:4222", "tlsName": "fleet.example",
        "tlsSecret": "demo-tls",
    }  # fmt: skip
    names = [one["spec"].get("dnsNames") for one in objects if one["kind"] == "Certificate"]
    assert names == [None, ["fleet.example"]]


def test_prometheus_is_told_of_the_controller_and_of_all_rules(tmp_path: Path) -> None:
    on = ("monitoring.podMonitor=true", "monitoring.rules=true", "monitoring.labels.release=mine")
    found = {one["kind"]: one for one in rendered(tmp_path, *on)}
    assert found["PodMonitor"]["metadata"]["labels"] == {"release": "mine"}
    template = found["Deployment"]["spec"]["template"]
    own = found["PodMonitor"]["spec"]["selector"]["matchLabels"].items()
    assert own <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    (read,) = found["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert read["port"] in {one["name"] for one in container["ports"]}
    rules = yaml.safe_load((CHART.parent / "monitoring/prometheus/rules.yml").read_text())
    assert found["PrometheusRule"]["spec"] == rules
    one_of_both = {one["kind"] for one in rendered(tmp_path, "monitoring.podMonitor=true")}
    assert "PrometheusRule" not in one_of_both


def test_notes_tell_where_the_fleet_is(tmp_path: Path) -> None:
    def notes(*values: str) -> str:
        sets = [word for value in values for word in ("--set", value)]
        return helm(tmp_path, "install", "release", str(CHART), "--dry-run=client", *sets).split("NOTES:")[1]

    assert "InferenceFleet" in notes()
    assert "8000:8000\n  curl http://127.0.0.1:8000/" in notes(*DEMO)
    said = notes(*DEMO, "fleet.spec.router.port=8443", "fleet.spec.router.tlsSecret=https", "fleet.name=b")
    assert "svc/b 8000:8443\n  curl --insecure https://127.0.0.1:8000/" in said


def test_chart_and_plain_manifests_install_the_same(tmp_path: Path) -> None:
    plain = [one for one in installation("pdfleet:0.1.0", "serving") if one["kind"] != "Namespace"]
    key = lambda one: (one["kind"], one["metadata"]["name"])  # noqa: E731
    assert sorted(rendered(tmp_path), key=key) == sorted(plain, key=key)


def test_servers_that_come_along_let_in_pods_of_fleets_only(tmp_path: Path) -> None:
    """They know no users: whoever reaches them may write who is there."""
    objects = rendered(tmp_path, *DEMO)
    policies = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "NetworkPolicy"}
    served = [one for one in objects if one["metadata"]["name"] in ("release-etcd", "release-nats")]
    pods = [one["spec"]["template"] for one in served if one["kind"] in ("StatefulSet", "Deployment")]
    assert len(pods) == 2
    for pod in pods:
        own = pod["metadata"]["labels"]
        (policy,) = [one for one in policies.values() if one["podSelector"]["matchLabels"] == own]
        assert policy["policyTypes"] == ["Ingress"]
        ((way,),) = [one["from"] for one in policy["ingress"]]
        assert way == {"podSelector": {"matchExpressions": [{"key": FLEET_LABEL, "operator": "Exists"}]}}


def test_the_image_is_pulled_with_what_is_given(tmp_path: Path) -> None:
    objects = rendered(
        tmp_path, *DEMO, "image.pullSecrets[0].name=registry", "controller.nodeSelector.pool=system",
        "controller.tolerations[0].key=system", "controller.tolerations[0].operator=Exists",
    )  # fmt: skip
    (controller,) = [one for one in objects if one["metadata"]["name"] == "pdfleet-controller"
                     and one["kind"] == "Deployment"]  # fmt: skip
    check(controller)
    pod = controller["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["nodeSelector"] == {"pool": "system"}
    assert pod["tolerations"] == [{"key": "system", "operator": "Exists"}]
    (fleet,) = [one for one in objects if one["kind"] == "InferenceFleet"]
    assert fleet["spec"]["imagePullSecrets"] == ["registry"]
    plain = installation("pdfleet:0.1.0", "serving", pull_secrets=["registry"])[-1]
    assert plain["spec"]["template"]["spec"]["imagePullSecrets"] == pod["imagePullSecrets"]
    assert example("image:1", pull_secrets=["registry"])["spec"]["imagePullSecrets"] == ["registry"]


def test_every_value_has_its_line(tmp_path: Path) -> None:
    """A comment above it or above its neighbour, and a place in the schema."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for name, value in values.items():
        if isinstance(value, dict):
            assert set(value) == set(schema["properties"][name]["properties"]), name
        else:
            assert name in schema["properties"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("controller.replicas=0", "minimum"),
        ("contoller.replicas=2", "contoller"),
        ("fleet.name=Demo", "pattern"),
        ("fleet.spec=null", "missing property 'spec'"),
        ("image.pullSecrets[0].nme=x", "nme"),
        ("fleet.create=true", "fleet.spec.control.etcd and .nats are needed"),
    ],
)
def test_values_that_cannot_work_are_refused(tmp_path: Path, value: str, said: str) -> None:
    assert said in helm(tmp_path, "template", "release", str(CHART), "--set", value, code=1)
