"""The controller with the rights of its own installation, against real kube-apiserver and controllers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from cluster_nodes import Behaviour, PretendKubelet, is_ready
from control_plane import ControlPlane, Site, working
from kubelet import SECRETS, ProcessKubelet
from servers import Etcd, Nats
from test_end_to_end import whole_life
from test_kubectl import fleet, fleetctl, kubectl

from deploy.controller.election import LEASES
from deploy.controller.render import BINDINGS, DEPLOYMENTS, PODS, REVISION_LABEL, SERVICES
from fleet.cluster import APPLY, FLEETS, GROUP, MERGE, POOLS, ClusterError, Object, Resource

pytestmark = pytest.mark.live

REVIEWS = Resource("authorization.k8s.io/v1", "SubjectAccessReview", "subjectaccessreviews", namespaced=False)
QUOTAS = Resource("v1", "ResourceQuota", "resourcequotas")


class Play:
    """Pods that pretend; how one behaves may change any time."""

    def __init__(self) -> None:
        self.behave: Callable[[Object], Behaviour] = lambda pod: Behaviour(0.05, drain_s=0.05)

    def run(
        self, plane: ControlPlane, folder: Path, story: Callable[[Site], Awaitable[None]], **more: int
    ) -> None:
        async def go() -> None:
            kubelet = PretendKubelet(lambda pod: self.behave(pod))
            async with working(plane, kubelet, folder, **more) as site:
                await story(site)

        asyncio.run(go())


async def apply(site: Site, **changes: object) -> None:
    await kubectl(site, "apply", "--validate=false", "-f", "-", text=fleet(**changes))


def ready(site: Site, role: str) -> int:
    return sum(
        is_ready(pod) for pod in site.pods() if pod["metadata"]["labels"].get("pdfleet.dev/role") == role
    )


async def counts(site: Site) -> tuple[int, int]:
    spec = (await site.fleet())["spec"]
    return spec["prefill"]["replicas"], spec["decode"]["replicas"]


async def change(site: Site, **spec: object) -> None:
    await kubectl(site, "patch", "ifl/demo", "--type=merge", "-p", json.dumps({"spec": spec}))


async def whose(site: Site, reason: str) -> str:
    found = await site.condition("Degraded")
    return str(found["message"]) if found.get("reason") == reason else ""


def test_all_is_made_with_the_rights_of_the_installation_and_then_nothing_is_written(
    plane: ControlPlane, tmp_path: Path
) -> None:
    async def story(site: Site) -> None:
        await apply(site, planner={"mode": "advise"})
        await site.settle()
        kinds = Counter(one.split()[0] for one in await site.left())
        assert kinds["Deployment"] == kinds["ReplicaSet"] == 4
        assert kinds["FleetPool"] == kinds["Service"] == kinds["ServiceAccount"] == 2
        assert kinds["Role"] == kinds["RoleBinding"] == kinds["NetworkPolicy"] == 1
        assert kinds["ControllerRevision"] == 1
        assert kinds["PodDisruptionBudget"] == (0 if plane.minor < 21 else 3)
        if plane.minor < 21:
            assert "PodDisruptionBudget" in await whose(site, "KindMissing")
        shown = (await kubectl(site, "get", "ifl")).splitlines()[1].split()
        assert shown[:6] == ["demo", "m", "1", "1", "2", "2"]
        for kind in (FLEETS, POOLS, DEPLOYMENTS, SERVICES):
            for one in await site.all(kind):
                if one["metadata"]["name"] == "kubernetes":
                    continue
                managers = {entry["manager"] for entry in one["metadata"]["managedFields"]}
                known = {"pdfleet-controller", "kubectl-client-side-apply", "kube-controller-manager"}
                assert managers <= known, (one["metadata"]["name"], managers)
        # Looked at again, for another's annotation, it has nothing to write.
        before = len(writes(plane))
        for number in range(3):
            await kubectl(site, "annotate", "--overwrite", "ifl/demo", f"looked={number}")
            turns = len(renewals(plane))
            await site.until(lambda turns=turns: holds(len(renewals(plane)) > turns + 2))  # type: ignore[misc]
        assert writes(plane)[before:] == []

    Play().run(plane, tmp_path, story)


async def holds(what: bool) -> bool:
    return what


def renewals(plane: ControlPlane) -> list[Object]:
    return [one for one in plane.audited() if one["verb"] == "update"]


def writes(plane: ControlPlane) -> list[str]:
    """Of controllers, but for their lease."""
    return [
        f"{one['verb']} {one['requestURI']}"
        for one in plane.audited()
        if one["verb"] not in ("get", "list", "watch") and "/leases" not in one["requestURI"]
    ]


def test_who_may_what(plane: ControlPlane, tmp_path: Path) -> None:
    """The planner of a fleet may read and change this one; who may edit a namespace may edit its fleets."""

    async def story(site: Site) -> None:
        await apply(site, planner={"mode": "advise"})
        await site.settle()

        async def may(who: str, verb: str, group: str, resource: str, name: str = "", sub: str = "") -> bool:
            attributes = {
                "namespace": "default", "verb": verb, "group": group, "resource": resource, "name": name,
                "subresource": sub,
            }  # fmt: skip
            body: Object = {"spec": {"user": who, "resourceAttributes": attributes}}
            answer = await site.api.ask("POST", REVIEWS.path(), None, body)
            return bool(answer["status"]["allowed"])

        planner = "system:serviceaccount:default:demo-planner"
        assert await may(planner, "patch", GROUP, "inferencefleets", "demo")
        assert not await may(planner, "patch", GROUP, "inferencefleets", "other")
        assert not await may(planner, "delete", GROUP, "inferencefleets", "demo")
        controller = "system:serviceaccount:pdfleet-system:pdfleet-controller"
        assert await may(controller, "list", "", "pods")
        assert not await may(controller, "create", "", "pods", sub="exec")
        for resource in ("secrets", "configmaps", "nodes"):
            assert not await may(controller, "get", "", resource)
        editor = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"}
        subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "ann"}
        body: Object = {"metadata": {"name": "an-editor"}, "roleRef": editor, "subjects": [subject]}
        await site.api.ask("POST", BINDINGS.path("default"), None, body)
        try:
            await site.until(lambda: may("ann", "create", GROUP, "inferencefleets"))
            assert await may("ann", "patch", GROUP, "fleetpools", sub="scale")
        finally:
            await site.api.ask("DELETE", BINDINGS.path("default", "an-editor"))

    Play().run(plane, tmp_path, story)


def test_a_namespace_goes_with_its_fleets(plane: ControlPlane, tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        await kubectl(site, "create", "namespace", "passing")
        await kubectl(site, "apply", "--validate=false", "-n", "passing", "-f", "-", text=fleet())

        async def made() -> bool:
            pool = await site.get(POOLS, "demo-decode", "passing")
            return bool(pool.get("status", {}).get("replicas") == 2)

        await site.until(made)
        await kubectl(site, "delete", "namespace", "passing", "--timeout=120s")
        # And the controller looks after others as before.
        await apply(site)
        await site.settle()

    Play().run(plane, tmp_path, story)


def test_scaled_by_kubectl_and_by_fleetctl(plane: ControlPlane, tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        await apply(site)
        await site.settle()
        await kubectl(site, "scale", "fpool/demo-decode", "--replicas=4")
        await site.until(lambda: holds(ready(site, "decode") == 4))
        assert await counts(site) == (1, 4)
        words = ("scale", "prefill=2", "decode=1", "--kubernetes", "default/demo", "--wait", "--json")
        said = json.loads(await fleetctl(site, *words))
        assert said["desired"] == {"prefill": 2, "decode": 1}
        assert (ready(site, "prefill"), ready(site, "decode")) == (2, 1)
        pool = await site.get(POOLS, "demo-decode")
        assert pool["status"]["agreedReplicas"] == pool["spec"]["replicas"] == 1

    Play().run(plane, tmp_path, story)


def test_rolled_out_and_back(plane: ControlPlane, tmp_path: Path) -> None:
    play = Play()

    async def story(site: Site) -> None:
        await apply(site, prefill={"replicas": 2}, decode={"replicas": 4})
        await site.settle()
        first = (await site.fleet())["status"]["revision"]
        least = 4
        await change(site, image="pdfleet:2")

        async def over() -> bool:
            nonlocal least
            least = min(least, ready(site, "decode"))
            return await site.settled() and (await site.fleet())["status"]["revision"] != first

        await site.until(over)
        assert least == 4, "never fewer than wanted"
        second = (await site.fleet())["status"]["revision"]
        assert {pod["spec"]["containers"][0]["image"] for pod in site.pods()} == {"pdfleet:2"}
        play.behave = lambda pod: Behaviour(
            float("inf") if ":3" in pod["spec"]["containers"][0]["image"] else 0.05, drain_s=0.05
        )
        await change(site, image="pdfleet:3", rollout={"progressDeadlineSeconds": 3})
        await site.until(lambda: true(site, "RolledBack"))
        await site.settle()
        assert (await site.fleet())["status"]["revision"] == second
        assert ready(site, "decode") == 4
        await site.until(
            lambda: holds({p["spec"]["containers"][0]["image"] for p in site.pods()} == {"pdfleet:2"})
        )
        # Older records and sets are not kept for ever.
        alive = {one["metadata"]["labels"].get(REVISION_LABEL, "") for one in await site.all(DEPLOYMENTS)}
        assert alive == {"", second}

    play.run(plane, tmp_path, story)


async def true(site: Site, type: str) -> bool:
    return (await site.condition(type)).get("status") == "True"


def test_other_managers_of_fields(plane: ControlPlane, tmp_path: Path) -> None:
    """F104. What the controller sets it sets back, whoever forced it; what it does not set is another's."""

    async def story(site: Site) -> None:
        await apply(site)
        await site.settle()
        name = next(
            one["metadata"]["name"]
            for one in await site.all(DEPLOYMENTS)
            if "decode" in one["metadata"]["name"]
        )
        path = DEPLOYMENTS.path("default", name)
        theirs: Object = {
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": name, "annotations": {"theirs.example/note": "stays"}},
            "spec": {"replicas": 5},
        }  # fmt: skip
        with pytest.raises(ClusterError) as refused:
            await site.api.ask("PATCH", path, {"fieldManager": "theirs"}, theirs, APPLY)
        assert refused.value.conflict
        assert "pdfleet-controller" in refused.value.message
        await site.api.ask("PATCH", path, {"fieldManager": "theirs", "force": "true"}, theirs, APPLY)

        async def back() -> bool:
            one = await site.get(DEPLOYMENTS, name)
            notes = one["metadata"]["annotations"]
            return one["spec"]["replicas"] == 2 and notes.get("theirs.example/note") == "stays"

        await site.until(back)
        await kubectl(
            site,
            "patch",
            "svc/demo",
            "--type=merge",
            "-p",
            '{"spec": {"selector": {"pdfleet.dev/role": "x"}}}',
        )
        await site.until(lambda: selects(site, "router"))
        events = await kubectl(site, "get", "events", "--field-selector=reason=DriftCorrected", "-o", "name")
        assert len(events.split()) >= 2
        # Entries of a list are fields of their own: an apply alone leaves another's among them.
        await kubectl(site, "set", "env", "deployment/demo-router", "A=b")
        await site.until(lambda: variables(site, "demo-router", "A", False))
        await site.settle()
        turns = len(writes(plane))
        await kubectl(site, "annotate", "ifl/demo", "looked=1")
        seen = len(renewals(plane))
        await site.until(lambda: holds(len(renewals(plane)) > seen + 12))
        assert len(writes(plane)) == turns, "it is over"
        # Ports of a Service are its node's and its cluster's as well: a new port is no drift.
        await change(site, router={"serviceType": "NodePort", "port": 8080})
        await site.settle()
        service = await site.get(SERVICES, "demo")
        assert service["spec"]["type"] == "NodePort"
        assert [one["port"] for one in service["spec"]["ports"]] == [8080]
        await change(site, router={"serviceType": "ClusterIP", "port": 8000})
        await site.settle()
        service = await site.get(SERVICES, "demo")
        assert (service["spec"]["type"], len(service["spec"]["ports"])) == ("ClusterIP", 1)

    Play().run(plane, tmp_path, story)


async def variables(site: Site, deployment: str, name: str, there: bool) -> bool:
    (container,) = (await site.get(DEPLOYMENTS, deployment))["spec"]["template"]["spec"]["containers"]
    return (name in [one["name"] for one in container["env"]]) is there


async def selects(site: Site, role: str) -> bool:
    return bool((await site.get(SERVICES, "demo"))["spec"]["selector"].get("pdfleet.dev/role") == role)


@pytest.mark.parametrize("cascade", ["background", "foreground"])
def test_deleted_while_no_controller_is_there_nothing_is_left(
    plane: ControlPlane, tmp_path: Path, cascade: str
) -> None:
    async def story(site: Site) -> None:
        await apply(site)
        await site.settle()
        site.controllers["controller-0"].kill()
        await kubectl(site, "delete", "ifl/demo", f"--cascade={cascade}", "--timeout=60s")
        await site.until(site.empty)

    Play().run(plane, tmp_path, story)


def test_what_is_orphaned_is_gone_on_with(plane: ControlPlane, tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        await apply(site)
        await site.settle()
        before = {pod["metadata"]["uid"] for pod in site.pods()}
        await kubectl(site, "delete", "ifl/demo", "--cascade=orphan", "--timeout=60s")
        assert {pod["metadata"]["uid"] for pod in site.pods()} == before
        await apply(site)
        await site.settle()
        assert {pod["metadata"]["uid"] for pod in site.pods()} == before

    Play().run(plane, tmp_path, story)


def test_a_pod_that_stays_holds_no_rollout_up(plane: ControlPlane, tmp_path: Path) -> None:
    """By another's finalizer, which is taken away at last."""

    async def story(site: Site) -> None:
        await apply(site)
        await site.settle()
        stuck = next(pod["metadata"]["name"] for pod in site.pods() if "decode" in pod["metadata"]["name"])
        path = PODS.path("default", stuck)
        held: Object = {"metadata": {"finalizers": ["example.com/held"]}}
        await site.api.ask("PATCH", path, None, held, MERGE)
        try:
            await kubectl(site, "scale", "fpool/demo-decode", "--replicas=3")
            await site.until(lambda: holds(ready(site, "decode") == 3))
            await change(site, image="pdfleet:2")
            await site.until(lambda: holds(sum(
                is_ready(pod) and pod["spec"]["containers"][0]["image"] == "pdfleet:2" for pod in site.pods()
                if "decode" in pod["metadata"]["name"]) == 3))  # fmt: skip
        finally:
            await site.api.ask("PATCH", path, None, {"metadata": {"finalizers": None}}, MERGE)
        await site.settle()

    Play().run(plane, tmp_path, story)


def test_what_the_cluster_does_not_take_shows_and_holds_nothing_else_up(
    plane: ControlPlane, tmp_path: Path
) -> None:
    async def story(site: Site) -> None:
        hard: Object = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "3"}}}
        await site.api.ask("POST", QUOTAS.path("default"), None, hard)
        try:
            await site.until(lambda: limited(site))
            await apply(site, decode={"replicas": 4})
            await site.until(lambda: whose(site, "PodsRefused"))
            assert "exceeded quota: few" in await whose(site, "PodsRefused")
        finally:
            await site.api.ask("DELETE", QUOTAS.path("default", "few"))
        # Kubernetes' own controllers wait longer from failure to failure.
        await site.until(lambda: holds(ready(site, "decode") == 4), 400)
        await site.settle()
        assert await whose(site, "PodsRefused") == ""

        await change(site, decode={"priorityClassName": "urgent"})
        await site.until(lambda: whose(site, "PodsRefused"))
        assert "urgent" in await whose(site, "PodsRefused")
        assert ready(site, "decode") == 4
        await change(site, decode={"priorityClassName": "pdfleet-decode"})
        await site.settle()

        # An open field that pods do not have: server-side apply answers with 500.
        await change(site, decode={"affinity": {"nodes": []}, "replicas": 3}, prefill={"replicas": 2})
        await site.until(lambda: whose(site, "Refused"))
        assert "affinity" in await whose(site, "Refused")
        await change(site, decode={"affinity": None})
        await site.settle()
        assert (ready(site, "prefill"), ready(site, "decode")) == (2, 3)

    Play().run(plane, tmp_path, story)


ADMISSION = "admissionregistration.k8s.io/v1"
POLICIES = Resource(ADMISSION, "MutatingAdmissionPolicy", "mutatingadmissionpolicies", namespaced=False)
BOUND = Resource(ADMISSION, "MutatingAdmissionPolicyBinding", "mutatingadmissionpolicybindings", False)


def test_what_a_policy_of_the_cluster_changes_is_written_once(plane: ControlPlane, tmp_path: Path) -> None:
    if plane.minor < 36:
        pytest.skip("it knows no MutatingAdmissionPolicy")
    at = "/spec/template/spec/containers/0/image"
    image = "object.spec.template.spec.containers[0].image"
    mirrored = f"{image}.startsWith('mirror/') ? {image} : 'mirror/' + {image}"
    patch = f'[JSONPatch{{op: "replace", path: "{at}", value: {mirrored}}}]'
    rule = {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["*"], "resources": ["deployments"]}
    policy = {
        "matchConstraints": {"resourceRules": [rule]}, "failurePolicy": "Fail", "reinvocationPolicy": "Never",
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": patch}}],
    }  # fmt: skip

    async def story(site: Site) -> None:
        for kind, spec in ((POLICIES, policy), (BOUND, {"policyName": "mirror"})):
            body: Object = {
                "apiVersion": ADMISSION, "kind": kind.kind, "metadata": {"name": "mirror"}, "spec": spec,
            }  # fmt: skip
            await site.api.ask("POST", kind.path(), None, body)
        try:
            # A server hears of a policy a moment after it has taken it.
            await site.until(lambda: mirrors(site))
            await apply(site)
            await site.settle()
            assert {pod["spec"]["containers"][0]["image"] for pod in site.pods()} == {"mirror/pdfleet:1"}
            turns, seen = len(writes(plane)), len(renewals(plane))
            await site.until(lambda: holds(len(renewals(plane)) > seen + 20))
            assert writes(plane)[turns:] == []
        finally:
            for kind in (BOUND, POLICIES):
                await site.api.ask("DELETE", kind.path("", "mirror"))
        await change(site, image="pdfleet:2")
        await site.until(lambda: some(site, "pdfleet:2"))
        await site.settle()

    Play().run(plane, tmp_path, story)


async def mirrors(site: Site) -> bool:
    pod: Object = {"containers": [{"name": "a", "image": "a"}]}
    template: Object = {"metadata": {"labels": {"a": "a"}}, "spec": pod}
    spec: Object = {"replicas": 0, "selector": {"matchLabels": {"a": "a"}}, "template": template}
    body: Object = {"metadata": {"name": "probe"}, "spec": spec}
    made = await site.api.ask("POST", DEPLOYMENTS.path("default"), {"dryRun": "All"}, body)
    return bool(made["spec"]["template"]["spec"]["containers"][0]["image"] == "mirror/a")


async def limited(site: Site) -> bool:
    return "hard" in (await site.get(QUOTAS, "few")).get("status", {})


def test_the_api_server_is_killed_in_the_middle_and_comes_back(plane: ControlPlane, tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        await apply(site, decode={"replicas": 2})
        await site.settle()
        for count in (5, 1):
            await kubectl(site, "scale", "fpool/demo-decode", f"--replicas={count}")
            await asyncio.to_thread(plane.api_server.restart)
            await site.until(lambda count=count: revived(site, count))  # type: ignore[misc]
            await site.settle()

    Play().run(plane, tmp_path, story, count=2)


async def revived(site: Site, decode: int) -> bool:
    """On a busy machine the API server starts for longer than a controller may lead unheard."""
    await site.revive()
    return ready(site, "decode") == decode


def test_a_version_that_is_too_old_is_told_as_such(plane: ControlPlane, tmp_path: Path) -> None:
    """410, by a watch that does not start, or by its first event: both are `expired`."""

    async def story(site: Site) -> None:
        await asyncio.to_thread(plane.api_server.restart)  # It remembers nothing of before.
        with pytest.raises(ClusterError) as told:
            await anext(aiter(site.api.follow(PODS.path("default"), {"resourceVersion": "1"})))
        assert told.value.expired, told.value
        with pytest.raises(ClusterError) as told:
            await site.api.ask("GET", "/apis/leaderworkerset.x-k8s.io/v1/leaderworkersets")
        assert told.value.missing

    Play().run(plane, tmp_path, story, count=0)


def test_controllers_that_are_killed_one_after_another_finish_what_was_begun(
    plane: ControlPlane, tmp_path: Path
) -> None:
    async def story(site: Site) -> None:
        await apply(site, prefill={"replicas": 2}, decode={"replicas": 4})
        await site.settle()
        for number, image in enumerate(("pdfleet:2", "pdfleet:3")):
            await change(site, image=image)
            await site.until(lambda image=image: some(site, image))  # type: ignore[misc]
            lease = await site.get(LEASES, "pdfleet-controller", "pdfleet-system")
            leader = lease["spec"]["holderIdentity"]
            process = site.controllers[leader]
            process.kill() if number == 0 else process.terminate()
            await process.wait()
            await site.start_controller(leader)
            await site.settle()
            assert {pod["spec"]["containers"][0]["image"] for pod in site.pods() if is_ready(pod)} == {image}
            assert (ready(site, "prefill"), ready(site, "decode")) == (2, 4)

    Play().run(plane, tmp_path, story, count=2)


async def some(site: Site, image: str) -> bool:
    return any(pod["spec"]["containers"][0]["image"] == image for pod in site.pods())


def test_requests_go_on_while_a_real_cluster_scales_updates_and_deletes(
    plane: ControlPlane, tmp_path: Path, etcd: Etcd, nats: Nats
) -> None:
    """Pods of real controllers as processes."""

    async def go() -> None:
        kubelet = ProcessKubelet(tmp_path)
        async with working(plane, kubelet, tmp_path) as site:
            try:
                await whole_life(site, kubelet, etcd, nats)
            finally:
                await site.api.ask("DELETE", SECRETS.path("default", "demo-tls"))

    asyncio.run(go())


def test_no_right_is_missing(plane: ControlPlane) -> None:
    """Of all that the tests before it had the controller do, nothing was always forbidden: a server that has
    just started does not know of roles yet, and forbids for a moment what it allows before and after."""
    said: dict[str, set[tuple[str, ...]]] = {"allow": set(), "forbid": set()}
    for one in plane.audited():
        what = one["objectRef"]
        key = (one["verb"], what.get("apiGroup", ""), what["resource"], what.get("subresource", ""))
        said[one["annotations"]["authorization.k8s.io/decision"]].add(key)
    assert not said["forbid"] - said["allow"]
