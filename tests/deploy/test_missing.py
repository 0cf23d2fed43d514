"""What a fleet names and nobody has made, and pods that the cluster does not take: said, and cleared."""

from __future__ import annotations

import pytest
from cluster_nodes import Behaviour
from scene import SPEC, Scene
from test_controller import play
from test_render import RICH, renderer

from deploy.controller.missing import missing
from deploy.controller.pods import trouble
from fleet.cluster import ClusterError, Object

MOUNT = 'MountVolume.SetUp failed for volume "{}" : {}'
NOW = 1_790_000_000.0


def pod(component: str) -> Object:
    made = renderer(RICH)
    whole = made.routers() if component == "router" else made.workers(component, "abc", 1)
    template = whole["spec"]["template"]
    return {
        "metadata": {**template["metadata"], "name": "p", "namespace": "serving"},
        "spec": template["spec"],
    }


@pytest.mark.parametrize(
    ("component", "said", "wanted"),
    [
        (
            "router", MOUNT.format("keys", 'secret "keys" not found'),
            "Secret keys, named by spec.router.keysSecret, is not there: kubectl create secret generic keys "
            "--namespace serving --from-file=keys.jsonl",
        ),
        (
            "prefill", MOUNT.format("fleet-tls", "references non-existent secret key: ca.crt"),
            "Secret own, named by spec.control.tlsSecret, has no key ca.crt: add it",
        ),
        (
            "prefill", 'secret "etcd" not found',
            "Secret etcd, named by spec.control.credentialsSecret, is not there: "
            "kubectl create secret generic etcd --namespace serving",
        ),
        (
            "prefill", '0/3 nodes are available: persistentvolumeclaim "models" not found. preemption: none.',
            "PersistentVolumeClaim models, named by spec.model.volume, is not there: "
            "make it in namespace serving",
        ),
        (
            "prefill", "couldn't find key token in Secret serving/hub",
            "Secret hub, named by spec.prefill.env, has no key token: add it",
        ),
        (
            "prefill", 'configmap "other" not found',
            "ConfigMap other is not there: kubectl create configmap other --namespace serving",
        ),
        ("prefill", MOUNT.format("model", "rpc error: code = Internal"), ""),
        ("prefill", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", ""),
    ],
)  # fmt: skip
def test_the_object_its_key_and_its_field_are_named(component: str, said: str, wanted: str) -> None:
    one = pod(component)
    reference = {"secretKeyRef": {"name": "hub", "key": "token"}}
    one["spec"]["containers"][0]["env"].append({"name": "HF_TOKEN", "valueFrom": reference})
    assert missing(one, said) == wanted


def test_a_secret_that_is_not_there_shows_by_name_until_it_is() -> None:
    async def story(s: Scene) -> None:
        failed = MOUNT.format("fleet-tls", 'secret "own" not found')
        s.behaviours = lambda pod: Behaviour(mounts=failed if "decode" in pod["metadata"]["name"] else "")
        s.create(control={**SPEC["control"], "tlsSecret": "own"}, decode={"replicas": 2})
        await s.until(lambda: s.condition("Degraded").get("reason") == "Missing", 30)
        message = s.condition("Degraded")["message"]
        assert "Secret own, named by spec.control.tlsSecret, is not there" in message
        assert "--from-file=tls.crt --from-file=tls.key --from-file=ca.crt" in message
        assert "and 1 more" in message, "both pods wait for the same"
        await s.until(lambda: (s.ready("prefill"), s.ready("router")) == (1, 1))
        failed = MOUNT.format("fleet-tls", "references non-existent secret key: ca.crt")
        await s.until(lambda: "Secret own" in s.condition("Degraded")["message"]
                      and "has no key ca.crt" in s.condition("Degraded")["message"], 30)  # fmt: skip
        failed = ""
        await s.settle()
        assert s.condition("Degraded")["status"] == "False"

    play(story)


def test_volumes_that_fail_otherwise_are_told_in_the_nodes_words() -> None:
    async def story(s: Scene) -> None:
        failed = MOUNT.format("model", "rpc error: code = Internal desc = no route to host")
        s.behaviours = lambda pod: Behaviour(mounts=failed)
        s.create()
        await s.until(lambda: s.condition("Degraded").get("reason") == "Mount", 30)
        assert "no route to host" in s.condition("Degraded")["message"]
        failed = ""
        await s.settle()

    play(story)


def test_without_events_pods_that_wait_hold_nothing_up() -> None:
    async def story(s: Scene) -> None:
        ask = s.api.ask

        async def asked(method: str, path: str, *rest: object) -> Object:
            if method == "GET" and path.endswith("/events"):
                raise ClusterError(403, "Forbidden", "events are not yours to list")
            return await ask(method, path, *rest)  # type: ignore[arg-type]

        s.api.ask = asked  # type: ignore[method-assign, assignment]
        s.behaviours = lambda pod: Behaviour(mounts="" if "decode" in pod["metadata"]["name"] else "gone")
        s.create()
        await s.until(lambda: s.ready("decode") == 2)
        await s.until(lambda: s.condition("Degraded").get("reason") == "NotReady", 400)

    play(story)


def test_pods_that_the_cluster_does_not_take_show_and_hold_nothing_else_up() -> None:
    """A quota, a PriorityClass or a ServiceAccount that is not there, a policy of the namespace."""

    async def story(s: Scene) -> None:
        said = 'pods "demo-decode-" is forbidden: no PriorityClass with name urgent was found'
        s.workloads.refuses = lambda pod: said if "decode" in pod["metadata"]["generateName"] else ""
        s.create(decode={"replicas": 2, "priorityClassName": "urgent"})
        await s.until(lambda: s.condition("Degraded").get("reason") == "PodsRefused", 30)
        assert "no PriorityClass with name urgent" in s.condition("Degraded")["message"]
        await s.until(lambda: (s.ready("prefill"), s.ready("router")) == (1, 1))
        s.workloads.refuses = lambda pod: ""
        await s.settle()
        assert s.condition("Degraded")["status"] == "False"

    play(story)


def test_a_field_that_server_side_apply_does_not_know_holds_nothing_else_up() -> None:
    """To it the API server says 500, and no reason."""

    async def story(s: Scene) -> None:
        wrong = "failed to create typed patch object: .spec.affinity.nodes: field not declared in schema"

        def refuse(method: str, path: str, body: Object) -> None:
            if "nodes" in body.get("spec", {}).get("template", {}).get("spec", {}).get("affinity", {}):
                raise ClusterError(500, "", wrong)

        s.store.hooks.append(refuse)
        s.create(decode={"replicas": 2, "affinity": {"nodes": []}})
        await s.until(lambda: (s.ready("prefill"), s.ready("router")) == (1, 1))
        await s.until(lambda: s.condition("Degraded").get("reason") == "Refused")
        assert "field not declared in schema" in s.condition("Degraded")["message"]
        s.change(decode={"replicas": 2, "affinity": None})
        await s.settle()

    play(story)


def test_a_pod_that_only_starts_is_in_no_trouble() -> None:
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-09-21T14:00:00Z"}
    creating = {"state": {"waiting": {"reason": "ContainerCreating"}}}
    one = {**pod("prefill"), "status": {"conditions": [scheduled], "containerStatuses": [creating]}}
    assert trouble(one, NOW) is None
    said = ['MountVolume.SetUp failed for volume "ca" : secret "ca" not found']
    found = trouble(one, NOW, said)
    assert found is not None
    assert found.kind == "Missing"
    creating["state"] = {"running": {}}  # type: ignore[dict-item]
    assert trouble(one, NOW, said) is None
