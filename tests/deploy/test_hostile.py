"""What users and other programs do to a fleet's objects that nobody foresaw: nothing foreign is taken, and no
fleet is stuck."""

from __future__ import annotations

import asyncio
import copy

import pytest
from cluster_nodes import Behaviour
from scene import SPEC, Scene
from test_controller import counts, play

from deploy.controller.crd import read_spec
from deploy.controller.drift import differs
from deploy.controller.plan import plan
from deploy.controller.render import (
    ACCOUNTS,
    DEPLOYMENTS,
    FLEET_LABEL,
    OWNED,
    PODS,
    RENDERING,
    REVISION_LABEL,
    REVISIONS,
    SERVICES,
    Renderer,
)
from deploy.controller.words import Observed
from fleet.cluster import FLEETS, JSON, MERGE, POOLS, ClusterError, Object, Resource
from fleet.member import desired_key
from fleet.registry.memory import MemoryHub
from fleet.targets import MOST_BUDGET, Desired, Mode, parse_desired
from planner.cluster import ClusterActuator, Shown, allowed, targets
from planner.words import Plan


def test_what_somebody_else_made_is_not_taken() -> None:
    """A fleet called as a Service, or as the namespace's own ServiceAccount, must not swallow it."""

    async def story(s: Scene) -> None:
        body = {"metadata": {"name": "default"}}
        s.store.handle("POST", ACCOUNTS.path("default"), {}, body, JSON)
        body = {
            "metadata": {"name": "default"},
            "spec": {"ports": [{"port": 80}], "selector": {"app": "web"}},
        }
        s.store.handle("POST", SERVICES.path("default"), {}, copy.deepcopy(body), JSON)
        s.create("default")
        await s.until(lambda: s.condition("Degraded", "default").get("status") == "True")
        message = s.condition("Degraded", "default")["message"]
        assert "is there already and not of this fleet" in message
        await asyncio.sleep(600)
        assert s.store.one("services", "default")["spec"] == body["spec"]
        account = s.store.one("serviceaccounts", "default")
        assert "ownerReferences" not in account["metadata"], "it would go with the fleet"
        s.store.handle("DELETE", FLEETS.path("default", "default"), {}, None, JSON)
        await asyncio.sleep(60)
        assert s.store.one("serviceaccounts", "default") is not None

    play(story)


def test_two_fleets_whose_names_meet_do_not_fight() -> None:
    """`a` has a Service a-workers; so would the fleet `a-workers`."""

    async def story(s: Scene) -> None:
        s.create("a")
        await s.settle("a")
        s.create("a-workers")
        await s.until(
            lambda: "a-workers is there already" in s.condition("Degraded", "a-workers").get("message", "")
        )
        headless = s.store.one("services", "a-workers")
        assert headless["spec"]["clusterIP"] == "None"
        before = len(s.store.writes)
        await asyncio.sleep(600)
        assert not [one for one in s.store.writes[before:] if one.endswith("services/a-workers")]
        assert s.settled("a")

    play(story)


def test_a_fleet_deleted_and_made_again_at_once_comes_up() -> None:
    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        first = s.fleet()["metadata"]["uid"]
        s.store.handle("DELETE", FLEETS.path("default", "demo"), {}, None, JSON)
        s.create()
        await s.settle()
        assert s.fleet()["metadata"]["uid"] != first
        await s.until(lambda: (s.ready("prefill"), s.ready("decode"), s.ready("router")) == (1, 2, 1))

    play(story)


def test_leftovers_without_an_owner_are_gone_on_with() -> None:
    """`kubectl delete --cascade=orphan`, and the same fleet again: its pods need not start anew."""

    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        pods = {pod["metadata"]["name"] for pod in s.pods("decode")}
        s.store.handle("DELETE", FLEETS.path("default", "demo"), {"propagationPolicy": "Orphan"}, None, JSON)
        assert not [
            one for kind in OWNED for one in s.store.all(kind.plural) if one["metadata"]["ownerReferences"]
        ]
        s.create()
        await s.settle()
        await asyncio.sleep(60)
        assert {pod["metadata"]["name"] for pod in s.pods("decode")} == pods
        uid = s.fleet()["metadata"]["uid"]
        (service,) = [one for one in s.store.all("services") if one["metadata"]["name"] == "demo"]
        assert [one["uid"] for one in service["metadata"]["ownerReferences"]] == [uid]
        s.store.handle("DELETE", FLEETS.path("default", "demo"), {}, None, JSON)
        await asyncio.sleep(60)
        left = [(one["kind"], one["metadata"]["name"]) for kind in OWNED for one in s.store.all(kind.plural)]
        assert left == []

    play(story)


def test_a_users_own_objects_with_the_fleets_labels_stay() -> None:
    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        labels = s.store.one("services", "demo")["metadata"]["labels"]
        body = {"metadata": {"name": "mine", "labels": labels}, "spec": {"ports": [{"port": 80}]}}
        s.store.handle("POST", SERVICES.path("default"), {}, body, JSON)
        await asyncio.sleep(120)
        assert s.store.one("services", "mine") is not None

    play(story)


def test_labels_and_annotations_taken_away_by_hand_stop_nothing() -> None:
    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        for resource in (DEPLOYMENTS, REVISIONS, SERVICES):
            for one in s.store.all(resource.plural):
                meta = one["metadata"]
                for part in ("labels", "annotations"):
                    for key in meta.get(part, {}):
                        if resource is REVISIONS and key not in (FLEET_LABEL, REVISION_LABEL):
                            continue  # Nobody reads them.
                        body = {"metadata": {part: {key: None}}}
                        s.store.handle("PATCH", resource.path("default", meta["name"]), {}, body, MERGE)
                        await asyncio.sleep(10)
                        again = s.store.one(resource.plural, meta["name"])
                        assert again is not None
                        assert key in again["metadata"].get(part, {}), f"{meta['name']} has {key} again"
        s.change(decode={"replicas": 3})
        await s.settle()
        assert s.ready("decode") == 3
        assert all("labels" in one["metadata"] for one in s.store.all("services"))

    play(story)


def test_what_others_add_to_lists_goes_and_who_owns_besides_stays() -> None:
    """Entries of a list are fields of their own for server-side apply, which leaves those of others there."""

    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        path = DEPLOYMENTS.path("default", "demo-router")
        one = copy.deepcopy(s.store.one("deployments", "demo-router"))
        assert one is not None
        containers = one["spec"]["template"]["spec"]["containers"]
        containers[0]["env"].append({"name": "A", "value": "b"})
        containers.append({"name": "beside", "image": "another"})
        other = {"apiVersion": "v1", "kind": "ConfigMap", "name": "a", "uid": "another"}
        one["metadata"]["ownerReferences"].append(other)
        s.store.handle("PUT", path, {}, one, JSON)
        await asyncio.sleep(30)
        now = s.store.one("deployments", "demo-router")
        assert now is not None
        (container,) = now["spec"]["template"]["spec"]["containers"]
        assert "A" not in [one["name"] for one in container["env"]]
        assert other in now["metadata"]["ownerReferences"]
        await s.settle()
        before = len(s.store.writes)
        await asyncio.sleep(600)
        assert len(s.store.writes) == before, s.store.writes[before:]

    play(story)


def test_pods_edited_by_hand_stop_nothing() -> None:
    async def story(s: Scene) -> None:
        s.create(decode={"replicas": 4})
        await s.settle()
        (first, second, third, _) = s.pods("decode")
        path = "/api/v1/namespaces/default/pods/"
        for pod, change in (
            (first, {"annotations": {"controller.kubernetes.io/pod-deletion-cost": "junk"}}),
            (second, {"labels": {"pdfleet.dev/role": "other"}}),
            (third, {"labels": {"pdfleet.dev/revision": "ffffffffff"}}),
        ):
            s.store.handle("PATCH", path + pod["metadata"]["name"], {}, {"metadata": change}, MERGE)
            await asyncio.sleep(30)
        s.change(decode={"replicas": 1})
        await asyncio.sleep(300)
        assert counts(s) == (1, 1)
        (deployment,) = [one for one in s.store.all("deployments") if "-decode-" in one["metadata"]["name"]]
        assert deployment["spec"]["replicas"] == 1

    play(story)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"spec": None},
        {"spec": {"image": 3}, "rendering": RENDERING},
        {"spec": {"old": "field"}, "rendering": 0},
        None,
    ],
)
def test_a_revision_that_cannot_be_read_stops_nothing(data: Object | None) -> None:
    """Written down by another version of the controller; its fleet has unknown fields, too."""
    fleet: Object = {
        "metadata": {
            "name": "demo",
            "namespace": "default",
            "uid": "u",
            "generation": 1,
            "resourceVersion": "1",
        },
        "spec": {**copy.deepcopy(SPEC), "formerly": {"a": 1}, "decode": {"replicas": 2, "colour": "blue"}},
        "status": {"revision": "0123456789", "unheardOf": True, "conditions": [{"type": "Odd"}]},
    }
    record = Renderer(fleet, read_spec(fleet)).record("0123456789", 1)
    record["data"] = data
    made = plan(Observed(fleet, (record,), ()), 1_790_000_000.0)
    assert made.actions


@pytest.mark.parametrize("name", ["Engine.max", "x=1 --y", ""])
def test_what_the_api_server_lets_through_fails_a_revision_and_no_fleet(name: str) -> None:
    """A schema cannot judge the names of settings. The process does, and names the one it does not know."""

    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        s.behaviours = lambda pod: Behaviour(crashes=f"--{name}=1" in pod["spec"]["containers"][0]["args"])
        s.change(decode={"settings": {name: "1"}})
        await s.until(lambda: s.condition("RolledBack")["status"] == "True", 1000)
        await s.settle()
        s.scale("demo-decode", 3)
        await s.until(lambda: s.ready("decode") == 3)

    play(story)


def test_old_workers_are_not_let_go_for_new_ones_that_no_router_finds() -> None:
    """A certificate of another name, an etcd that is another one: new workers are ready, and of no use."""

    async def story(s: Scene) -> None:
        s.create(prefill={"replicas": 2}, decode={"replicas": 4}, rollout={"progressDeadlineSeconds": 90})
        await s.settle()
        old = s.fleet()["status"]["revision"]

        def behave(pod: Object) -> Behaviour:
            late = {"pdfleet:lost": float("inf"), "pdfleet:late": 45.0}
            image = pod["spec"]["containers"][0]["image"]
            return Behaviour(late.get(image, 1.0) if "router" in pod["metadata"]["name"] else 1.0)

        s.behaviours = behave
        s.change(image="pdfleet:lost")
        await s.until(lambda: s.ready("decode") > 4)
        while s.condition("RolledBack")["status"] == "False":
            assert (s.ready("prefill", revision=old), s.ready("decode", revision=old)) == (2, 4)
            assert s.condition("Progressing")["status"] == "True"
            await asyncio.sleep(1)
        assert "demo-router-" in s.condition("RolledBack")["message"]
        await s.settle()
        assert s.ready("decode", revision=old) == s.ready("decode") == 4
        # Those that take longer are waited for.
        s.change(image="pdfleet:late")
        await s.until(lambda: "waiting for a router" in s.condition("Progressing")["message"])
        assert s.ready("decode", revision=old) == 4
        await s.settle()
        assert s.ready("decode", revision=old) == 0
        assert s.condition("RolledBack")["status"] == "False"

    play(story)


def test_one_router_without_a_place_holds_no_workers_up() -> None:
    async def story(s: Scene) -> None:
        s.create(router={"replicas": 2}, rollout={"progressDeadlineSeconds": 90})
        await s.settle()
        s.room = lambda pod: (
            "router" not in pod["metadata"]["name"]
            or sum(pod["spec"]["containers"][0]["image"] in str(one["spec"]) for one in s.pods("router")) < 2
        )
        s.change(image="pdfleet:2")
        new = s.fleet()["status"]["updateRevision"]
        await s.until(lambda: s.fleet()["status"]["updateRevision"] != new)
        new = s.fleet()["status"]["updateRevision"]
        await s.until(lambda: s.fleet()["status"]["revision"] == new, 600)
        assert s.condition("RolledBack")["status"] == "False"
        await s.until(lambda: s.condition("Degraded")["reason"] == "Unschedulable")

    play(story)


def test_what_a_policy_of_the_cluster_changes_stays_so_and_the_rest_is_kept() -> None:
    """A webhook names a mirror of the registry, or a managed cluster adds tolerations: whoever would set that
    back would write for ever."""

    async def story(s: Scene) -> None:
        def mirrored(method: str, path: str, body: Object) -> None:
            template = body.get("spec", {}).get("template")
            if template and "/deployments/" in path:
                (container,) = template["spec"]["containers"]
                container["image"] = f"mirror.example/{container['image'].rpartition('/')[2]}"
                container["securityContext"] = {"privileged": False}
                template["spec"]["tolerations"] = [{"key": "any", "operator": "Exists"}]

        s.store.hooks.append(mirrored)
        s.create(decode={"replicas": 2})
        await s.settle()
        await quiet(s)
        (said,) = [one for one in s.store.all("events") if "demo-router" in one["message"]]
        assert said["reason"] == "Altered"
        assert "mirror.example" in said["message"]
        s.scale("demo-decode", 3)
        await s.until(lambda: s.ready("decode") == 3)
        s.change(image="pdfleet:2")
        await s.until(lambda: not s.settled())
        await s.settle()
        images = {pod["spec"]["containers"][0]["image"] for pod in s.pods("decode") + s.pods("router")}
        assert images == {"mirror.example/pdfleet:2"}
        # What else somebody changes there is set back as anywhere.
        path = DEPLOYMENTS.path("default", "demo-router")
        s.store.handle("PATCH", path, {}, {"spec": {"replicas": 4}}, MERGE)
        await s.until(lambda: s.store.one("deployments", "demo-router")["spec"]["replicas"] == 1)
        await s.settle()
        await quiet(s)

    play(story)


async def quiet(s: Scene) -> None:
    await asyncio.sleep(120)
    before, asked = len(s.store.writes), 0

    def count(method: str, path: str, body: Object) -> None:
        nonlocal asked
        asked += 1

    s.store.hooks.append(count)
    await asyncio.sleep(600)
    s.store.hooks.remove(count)
    assert (s.store.writes[before:], asked) == ([], 0)


@pytest.mark.parametrize(
    ("resource", "name"), [(POOLS, "demo-decode"), (DEPLOYMENTS, "demo-router"), (SERVICES, "demo")]
)
def test_what_was_deleted_and_is_held_by_a_finalizer_is_told_and_made_again_when_it_has_gone(
    resource: Resource, name: str
) -> None:
    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        path, before = resource.path("default", name), s.store.one(resource.plural, name)
        assert before is not None
        held = {"metadata": {"finalizers": ["example.com/held"]}}
        s.store.handle("PATCH", path, {}, held, MERGE)
        s.store.handle("DELETE", path, {}, None, "")
        await s.until(lambda: s.condition("Degraded")["reason"] == "StuckTerminating", 200)
        assert f"{resource.kind} {name}: StuckTerminating" in s.condition("Degraded")["message"]
        assert "example.com/held" in s.condition("Degraded")["message"]
        await quiet(s)
        s.change(prefill={"replicas": 2})
        await s.until(lambda: s.ready("prefill") == 2)
        s.store.handle("PATCH", path, {}, {"metadata": {"finalizers": None}}, MERGE)
        await s.until(lambda: s.condition("Degraded")["status"] == "False")
        after = s.store.one(resource.plural, name)
        assert after is not None
        assert after["metadata"]["uid"] != before["metadata"]["uid"]
        await s.settle()

    play(story)


def test_a_fleet_that_was_deleted_and_is_held_by_a_finalizer_says_so() -> None:
    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        path, held = FLEETS.path("default", "demo"), {"metadata": {"finalizers": ["example.com/held"]}}
        s.store.handle("PATCH", path, {}, held, MERGE)
        s.store.handle("DELETE", path, {}, None, "")
        await s.until(lambda: s.condition("Degraded")["reason"] == "StuckTerminating", 200)
        assert "example.com/held" in s.condition("Degraded")["message"]
        assert s.condition("Available")["status"] == "True"
        await quiet(s)
        s.store.handle("PATCH", path, {}, {"metadata": {"finalizers": None}}, MERGE)
        await s.until(lambda: not s.store.all("deployments"))

    play(story)


def test_a_pod_that_no_set_has_holds_nothing_up() -> None:
    """Made by hand with a worker's labels, or taken out of its set by a label, to be looked into."""

    async def story(s: Scene) -> None:
        s.create(rollout={"maxSurgePercent": 0, "maxUnavailablePercent": 25, "progressDeadlineSeconds": 60})
        await s.settle()
        first = s.fleet()["status"]["revision"]
        of_set = s.pods("decode")[0]
        alone = {
            "metadata": {"name": "mine", "labels": copy.deepcopy(of_set["metadata"]["labels"])},
            "spec": copy.deepcopy(of_set["spec"]),
        }
        alone["metadata"]["labels"].pop("pod-template-hash", None)
        s.behaviours = lambda pod: Behaviour(float("inf") if pod["metadata"]["name"] == "mine" else 1.0)
        s.store.handle("POST", PODS.path("default"), {}, alone, JSON)
        await s.settle()
        s.change(image="pdfleet:2")
        await s.until(lambda: s.fleet()["status"]["revision"] != first, 600)
        await s.settle()
        assert s.condition("RolledBack")["status"] == "False"
        assert s.store.one("pods", "mine") is not None

    play(story)


@pytest.mark.parametrize("change", ["image", "nothing"])
def test_a_fleet_that_is_deleted_at_any_moment_leaves_nothing(change: str) -> None:
    """Its neighbour does not notice."""

    async def story(s: Scene) -> None:
        s.create("neighbour")
        for turn, after_s in enumerate((0.0, 0.05, 0.3, 1.3)):
            name = f"demo{turn}" if turn % 2 else "demo"
            s.create(name)
            if change == "image":
                await s.settle(name)
                s.change(name, image="pdfleet:2")
            await asyncio.sleep(after_s)
            s.store.handle("DELETE", FLEETS.path("default", name), {}, None, "")
            await asyncio.sleep(5)
            left = [
                (kind.kind, one["metadata"]["name"])
                for kind in s.store.kinds.values()
                for one in s.store.all(kind.plural)
                if one["metadata"].get("labels", {}).get(FLEET_LABEL) == name
            ]
            assert not left, f"deleted after {after_s} s"
        await s.settle("neighbour")
        assert s.ready("decode", "neighbour") == 2

    play(story)


def test_an_autoscaler_does_not_fight_the_planner() -> None:
    async def story(s: Scene) -> None:
        s.create(planner={"mode": "act"})
        await s.settle()
        for _ in range(20):
            s.scale("demo-decode", 7)
            await asyncio.sleep(15)
            assert counts(s) == (1, 2)
        events = [one for one in s.store.all("events") if one["reason"] == "ScaleRefused"]
        assert len(events) == 1
        assert "the planner decides" in events[0]["message"]

    play(story)


@pytest.mark.parametrize(
    ("rules", "plan", "found"),
    [
        ({"prefill": {"minReplicas": 2, "replicas": 2}}, (1, 5), (2, 5)),
        ({"decode": {"maxReplicas": 3}}, (2, 9), (2, 3)),
        (
            {"budget": {"gpus": 4}, "prefill": {"gpus": 1}, "decode": {"gpus": 1, "replicas": 2}},
            (1, 9),
            (1, 3),
        ),
        # More runs already than the budget that was set since allows: nothing grows.
        (
            {"budget": {"gpus": 1}, "prefill": {"gpus": 1}, "decode": {"gpus": 1, "replicas": 2}},
            (2, 3),
            (1, 2),
        ),
        ({"budget": {"gpus": 0}}, (3, 4), (3, 4)),
    ],
)
def test_a_plan_keeps_to_the_fleets_rules(
    rules: Object, plan: tuple[int, int], found: tuple[int, int]
) -> None:
    counts, why = allowed(Plan(*plan, "it grows", 0.0), {"prefill": {}, "decode": {}, **rules})
    assert counts == found
    assert bool(why) == (counts != plan)


@pytest.mark.parametrize(
    ("gpus", "costs", "most", "budget"),
    [
        (8, (1, 1), None, 8),
        (9, (2, 4), None, 4),
        (8, (1, 1), 3, 3),
        (8, (0, 1), None, None),
        (None, (1, 1), None, None),
        (0, (1, 1), None, 0),
        (1_000_000, (1, 1), None, MOST_BUDGET),
    ],
)
def test_the_planner_knows_how_many_workers_the_gpus_are_enough_for(
    gpus: int | None, costs: tuple[int, int], most: int | None, budget: int | None
) -> None:
    fleet: Object = {
        "metadata": {},
        "spec": {
            "prefill": {"gpus": costs[0]}, "decode": {"gpus": costs[1]}, "planner": {"maxWorkers": most},
            "budget": {} if gpus is None else {"gpus": gpus},
        },
    }  # fmt: skip
    assert targets(fleet).desired.budget == budget


def test_one_pool_at_its_limit_does_not_hold_the_other_one_up() -> None:
    async def story(s: Scene) -> None:
        s.create(planner={"mode": "act"}, prefill={"replicas": 2, "minReplicas": 2})
        await s.settle()
        actuator = ClusterActuator(s.api, "default", "demo")
        seen = await actuator.current()
        assert await actuator.apply(Plan(1, 5, "decode is short", 0.0), seen, None)
        assert counts(s) == (2, 5)
        seen = await actuator.current()
        before = len(s.store.writes)
        assert not await actuator.apply(Plan(1, 5, "decode is short", 0.0), seen, None)
        assert len(s.store.writes) == before, "the API server is not asked again for what it would refuse"

    play(story)


def test_routers_hear_what_is_wanted_of_a_fleet_in_a_cluster() -> None:
    """They ask etcd: without it they would hold nobody while a planner brings the first worker. It goes with
    the planner, without which nobody would bring one."""

    async def story(s: Scene) -> None:
        s.create(planner={"mode": "act", "maxWorkers": 6}, prefill={"replicas": 0}, decode={"replicas": 0})
        await s.settle()
        hub = MemoryHub(delay_s=0.001)
        registry = hub.registry()
        lease = await registry.lease(5.0)
        actuator = ClusterActuator(s.api, "default", "demo", Shown(registry, lease, "default_demo"))
        key = desired_key("default_demo")
        for decode in (0, 2):
            s.change(decode={"replicas": decode})
            await actuator.current()
            await s.until(lambda: hub.entry(key) is not None)
            data = await registry.get(key)
            assert data is not None
            assert parse_desired(data) == Desired(0, decode, Mode.ACT, 6)
        await lease.close()
        await s.until(lambda: hub.entry(key) is None)
        registry.cut = True
        assert await actuator.current() is not None, "etcd is no reason not to plan"

    play(story)


def test_variables_are_named_once() -> None:
    fleet: Object = {
        "metadata": {"name": "demo", "namespace": "default", "uid": "u"},
        "spec": copy.deepcopy(SPEC),
    }
    secret = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    fleet["spec"]["decode"] = {
        "env": [{"name": "HOME", "value": "/data"}, {"name": "POD_IP", "value": "1.2.3.4"}, secret, secret]
    }
    made = Renderer(fleet, read_spec(fleet)).workers("decode", "r", 1)
    (container,) = made["spec"]["template"]["spec"]["containers"]
    names = [one["name"] for one in container["env"]]
    assert sorted(names) == ["HOME", "POD_IP", "POD_NAME", "TOKEN"]
    found = {one["name"]: one for one in container["env"]}
    assert found["HOME"]["value"] == "/data"
    assert "valueFrom" in found["POD_IP"], "flags refer to it"


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ("1024Pi", "1Ei"),
        ("1E3", "1e3"),
        ("1000", "1e3"),
        ("0.5", "500m"),
        (".5", "500m"),
        ("1.", "1"),
        ("1000u", "1m"),
    ],
)
def test_quantities_that_the_api_server_writes_otherwise_are_no_drift(asked: str, kept: str) -> None:
    assert differs({"memory": asked}, {"memory": kept}) is None
    assert differs({"memory": asked}, {"memory": "7"}) is not None


@pytest.mark.parametrize("name", ["a" * 41, "a" * 253, "Größe", "é", "a.b", "-a", "a-"])
def test_names_of_which_no_others_can_be_made_are_refused(name: str) -> None:
    async def story(s: Scene) -> None:
        with pytest.raises(ClusterError, match=r"metadata\.name"):
            s.create(name)

    play(story)


@pytest.mark.parametrize(("length", "nodes"), [(40, 1), (28, 2)])
def test_the_longest_name_works(length: int, nodes: int) -> None:
    async def story(s: Scene) -> None:
        name = "a" * length
        s.create(name, decode={"replicas": 1, "nodes": nodes})
        await s.settle(name)
        for group in s.store.all("leaderworkersets"):
            # Its StatefulSets, one for each of up to 10,000 groups, are labels of pods with ten digits more.
            assert len(group["metadata"]["name"] + "-9999-0123456789") <= 63

    play(story)


@pytest.mark.parametrize("count", [-1, 10_001, 2**63])
def test_counts_that_are_slips_are_refused(count: int) -> None:
    async def story(s: Scene) -> None:
        s.create(budget={"gpus": 1_000_000})
        with pytest.raises(ClusterError, match="replicas"):
            s.change(decode={"replicas": count})

    play(story)
