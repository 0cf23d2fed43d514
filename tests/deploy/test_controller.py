"""The controller in virtual time: create, scale, update, roll back, delete, and what goes wrong meanwhile."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from cluster_nodes import Behaviour
from scene import Scene, scene

from deploy.controller.plan import plan
from deploy.controller.render import DELETION_COST, OWNED
from deploy.controller.words import Apply, Mark, Observed, Plan
from fleet.cluster import FLEETS, JSON, MERGE, POOLS, ClusterError, Object
from fleet.virtual_time import run

HORIZON = 2e5


def play(story: Any) -> None:
    async def go() -> None:
        async with scene() as s:
            await story(s)

    run(go(), horizon_s=HORIZON)


def counts(s: Scene, name: str = "demo") -> tuple[int, int]:
    spec = s.fleet(name)["spec"]
    return spec["prefill"]["replicas"], spec["decode"]["replicas"]


def sets(s: Scene, role: str) -> dict[str, int]:
    return {
        one["metadata"]["labels"]["pdfleet.dev/revision"]: one["spec"]["replicas"]
        for one in (*s.store.all("deployments"), *s.store.all("leaderworkersets"))
        if one["metadata"]["labels"].get("pdfleet.dev/role") == role
        and "pdfleet.dev/revision" in one["metadata"]["labels"]
    }


def test_a_fleet_comes_up_and_then_nothing_is_written_any_more() -> None:
    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        assert (s.ready("prefill"), s.ready("decode"), s.ready("router")) == (1, 2, 1)
        assert s.condition("Available")["status"] == "True"
        status = s.fleet()["status"]
        assert status["revision"] == status["updateRevision"] != ""
        await asyncio.sleep(5)
        before = len(s.store.writes)
        await asyncio.sleep(3600)
        assert s.store.writes[before:] == []

    play(story)


def test_scaled_at_the_fleet_both_pools_change() -> None:
    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        s.change(prefill={"replicas": 3}, decode={"replicas": 5})
        await s.settle()
        assert (s.ready("prefill"), s.ready("decode")) == (3, 5)
        pools = {one["metadata"]["name"]: one for one in s.store.all("fleetpools")}
        assert pools["demo-prefill"]["spec"]["replicas"] == 3
        assert pools["demo-decode"]["status"]["readyReplicas"] == 5
        assert pools["demo-decode"]["status"]["selector"].startswith("pdfleet.dev/fleet=demo")

    play(story)


def test_scaled_at_a_pool_the_fleet_says_so_too() -> None:
    """As `kubectl scale`, HPA and KEDA do; a count of the other pool does not change (F108)."""

    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        s.scale("demo-decode", 4)
        await s.until(lambda: counts(s) == (1, 4))
        await s.settle()
        assert (s.ready("prefill"), s.ready("decode")) == (1, 4)
        s.scale("demo-prefill", 2)
        s.scale("demo-decode", 1)
        await s.until(lambda: counts(s) == (2, 1))
        await s.settle()
        assert (s.ready("prefill"), s.ready("decode")) == (2, 1)

    play(story)


def test_two_fleets_with_opposite_wishes_get_each_its_own() -> None:
    """F108."""

    async def story(s: Scene) -> None:
        s.create("a")
        s.create("b")
        for turn in range(100):
            s.scale("a-decode" if s.store.one("fleetpools", "a-decode") else "a", 3) if turn > 5 else None
            if turn > 5:
                s.scale("b-decode", 1)
                s.scale("b-prefill", 4)
            await asyncio.sleep(0.2)
        await s.settle("a")
        await s.settle("b")
        assert counts(s, "a") == (1, 3)
        assert counts(s, "b") == (4, 1)
        assert (s.ready("decode", "a"), s.ready("prefill", "b")) == (3, 4)

    play(story)


def test_a_pool_that_is_scaled_again_at_once_is_not_set_back() -> None:
    """While its count goes to the fleet, before its status says so."""

    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        again: list[str] = []

        def hook(method: str, path: str, body: Object) -> None:
            if body.get("spec", {}).get("decode", {}) == {"replicas": 4} and not again:
                again.append(path)
                s.scale("demo-decode", 1)

        s.store.hooks.append(hook)
        s.scale("demo-decode", 4)
        await s.until(lambda: bool(again) and counts(s) == (1, 1))
        await s.settle()
        assert (s.ready("prefill"), s.ready("decode")) == (1, 1)
        s.change(decode={"replicas": 4})
        await s.settle()
        assert counts(s) == (1, 4), "what the fleet says later goes before what a pool once asked"

    play(story)


def test_when_fleet_and_pool_are_changed_at_once_the_fleet_counts() -> None:
    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        await s.stop_controller()
        s.scale("demo-decode", 7)
        s.change(decode={"replicas": 3})
        s.start_controller()
        await s.until(lambda: s.store.one("fleetpools", "demo-decode")["spec"]["replicas"] == 3)  # type: ignore[index]
        await s.settle()
        assert counts(s) == (1, 3)

    play(story)


def test_a_pool_is_not_scaled_beyond_the_fleets_rules() -> None:
    async def story(s: Scene) -> None:
        s.create(decode={"replicas": 2, "gpus": 4, "maxReplicas": 5}, budget={"gpus": 12})
        await s.settle()
        s.scale("demo-decode", 4)  # 16 GPUs
        await s.until(lambda: s.store.one("fleetpools", "demo-decode")["spec"]["replicas"] == 2)  # type: ignore[index]
        assert counts(s) == (1, 2)
        said = [one["message"] for one in s.store.all("events") if one["reason"] == "ScaleRefused"]
        assert "16 GPUs are more than budget.gpus (12)" in said[0]
        s.change(budget={"gpus": 100})
        await s.settle()
        s.scale("demo-decode", 50)
        await s.until(lambda: counts(s) == (1, 5))

    play(story)


def test_the_least_loaded_go_and_those_that_do_not_serve_before_them() -> None:
    async def story(s: Scene) -> None:
        s.create(decode={"replicas": 4})
        await s.settle()
        names = [pod["metadata"]["name"] for pod in s.pods("decode")]
        s.looks.load = {names[0]: 9, names[1]: 1, names[2]: 5, names[3]: 0.0}
        s.change(decode={"replicas": 2})
        await s.settle()
        assert sorted(s.workloads.removed) == sorted([names[1], names[3]])
        assert all(DELETION_COST not in pod["metadata"].get("annotations", {}) for pod in s.pods("decode"))

    play(story)


def test_a_pod_that_does_not_tell_its_load_is_not_taken_for_idle() -> None:
    async def story(s: Scene) -> None:
        s.create(decode={"replicas": 3})
        await s.settle()
        names = [pod["metadata"]["name"] for pod in s.pods("decode")]
        s.looks.load = {names[0]: 7, names[2]: 8}
        s.change(decode={"replicas": 2})
        await s.settle()
        assert s.workloads.removed == [names[0]]

    play(story)


def test_an_update_goes_step_by_step_and_is_over_when_no_old_one_is_left() -> None:
    async def story(s: Scene) -> None:
        s.create(prefill={"replicas": 4}, decode={"replicas": 12})
        await s.settle()
        old = s.fleet()["status"]["revision"]
        s.behaviours = lambda pod: Behaviour(ready_s=20.0, drain_s=10.0)
        s.change(image="pdfleet:2")
        least = {"prefill": 99, "decode": 99}
        while not s.settled():
            for role, wanted in (("prefill", 4), ("decode", 12)):
                least[role] = min(least[role], s.ready(role))
                assert len(s.pods(role)) <= wanted + wanted // 4
            new = s.fleet()["status"]["updateRevision"]
            if new != old and s.ready("decode", revision=new):
                # Both generations in proportion, whichever has ready ones.
                p, d = s.ready("prefill", revision=new), s.ready("decode", revision=new)
                assert d <= 3 * (p + 1)
            assert s.fleet()["status"]["revision"] == old
            await asyncio.sleep(0.5)
        assert least == {"prefill": 4, "decode": 12}
        status = s.fleet()["status"]
        assert status["revision"] == status["updateRevision"] != old
        assert set(sets(s, "prefill")) == set(sets(s, "decode")) == {status["revision"]}
        stay = [pod for pod in s.pods("router") if "deletionTimestamp" not in pod["metadata"]]
        assert all("pdfleet:2" in str(pod) for pod in s.pods("decode") + stay)

    play(story)


def test_paused_it_stays_between_two_steps_and_scaling_goes_on() -> None:
    async def story(s: Scene) -> None:
        s.create(prefill={"replicas": 2}, decode={"replicas": 4})
        await s.settle()
        s.behaviours = lambda pod: Behaviour(ready_s=10.0)
        s.change(image="pdfleet:2")
        await s.until(lambda: s.fleet()["status"]["rollout"]["step"] == 1)
        s.change(rollout={"paused": True})
        await s.until(lambda: s.condition("Progressing")["reason"] == "Paused")
        await asyncio.sleep(20)
        before = len(s.store.writes)
        await asyncio.sleep(500)
        assert s.store.writes[before:] == []
        new = s.fleet()["status"]["updateRevision"]
        assert 0 < s.ready("decode", revision=new) < 4
        s.change(decode={"replicas": 6})
        await s.until(lambda: s.ready("decode") == 6)
        s.change(rollout={"paused": False})
        await s.settle()
        assert s.ready("decode", revision=new) == 6

    play(story)


@pytest.mark.parametrize("how", ["crashes", "never ready", "no image"])
def test_a_revision_that_does_not_get_ready_is_rolled_back(how: str) -> None:
    async def story(s: Scene) -> None:
        s.create(prefill={"replicas": 2}, decode={"replicas": 4})
        await s.settle()
        old = s.fleet()["status"]["revision"]

        def behave(pod: Object) -> Behaviour:
            if pod["spec"]["containers"][0]["image"] != "pdfleet:bad" or "router" in pod["metadata"]["name"]:
                return Behaviour()
            return {
                "crashes": Behaviour(crashes=True),
                "never ready": Behaviour(ready_s=float("inf")),
                "no image": Behaviour(image=False),
            }[how]

        s.behaviours = behave
        s.change(image="pdfleet:bad", rollout={"progressDeadlineSeconds": 120})
        await s.until(lambda: s.condition("RolledBack").get("status") == "True", 1000)
        await s.settle()
        assert (s.ready("prefill", revision=old), s.ready("decode", revision=old)) == (2, 4)
        status = s.fleet()["status"]
        assert status["revision"] == old != status["failedRevision"] == status["updateRevision"]
        assert s.condition("Available")["status"] == "True"
        assert set(sets(s, "decode")) == {old}
        stay = [pod for pod in s.pods("router") if "deletionTimestamp" not in pod["metadata"]]
        assert all("pdfleet:bad" not in str(pod) for pod in stay), "routers go back too"
        await asyncio.sleep(10)
        writes = len(s.store.writes)
        await asyncio.sleep(600)
        assert s.store.writes[writes:] == [], "it is not tried again"
        s.change(image="pdfleet:good")
        await s.settle()
        assert s.condition("RolledBack")["status"] == "False"
        assert s.fleet()["status"]["revision"] not in (old, status["failedRevision"])

    play(story)


def test_a_pod_without_a_place_fails_no_revision_and_holds_nothing_else_up() -> None:
    async def story(s: Scene) -> None:
        s.create(prefill={"replicas": 2}, decode={"replicas": 2})
        await s.settle()
        s.room = lambda pod: "prefill" not in pod["metadata"]["name"]
        s.change(prefill={"replicas": 3}, decode={"replicas": 4})
        await s.until(lambda: s.ready("decode") == 4)
        await s.until(lambda: s.condition("Degraded")["reason"] == "Unschedulable")
        assert "Insufficient nvidia.com/gpu" in s.condition("Degraded")["message"]
        s.change(image="pdfleet:2", rollout={"progressDeadlineSeconds": 60})
        await asyncio.sleep(300)
        assert s.condition("RolledBack")["status"] == "False"
        s.room = lambda pod: True
        await s.settle()
        assert (s.ready("prefill"), s.ready("decode")) == (3, 4)
        assert s.condition("Degraded")["status"] == "False"

    play(story)


def test_a_crashing_pod_shows_and_the_rest_goes_on() -> None:
    async def story(s: Scene) -> None:
        s.create(decode={"replicas": 2})
        await s.settle()
        s.behaviours = lambda pod: Behaviour(crashes="decode" in pod["metadata"]["name"])
        s.change(decode={"replicas": 3}, prefill={"replicas": 2})
        await s.until(lambda: s.condition("Degraded").get("reason") == "CrashLoop")
        await s.until(lambda: s.ready("prefill") == 2)
        assert s.condition("Available")["status"] == "True"
        # Scaling down takes the one that crashes, whatever it may say of its load.
        crashing = next(p["metadata"]["name"] for p in s.pods("decode") if p["status"]["phase"] == "Running"
                        and p["status"]["containerStatuses"][0]["state"].get("waiting"))  # fmt: skip
        s.change(decode={"replicas": 2})
        await s.settle()
        assert s.workloads.removed == [crashing]

    play(story)


def test_a_pod_that_never_ends_does_not_hold_up_a_rollout() -> None:
    """Its node is gone: it stays Terminating."""

    async def story(s: Scene) -> None:
        s.create(prefill={"replicas": 1}, decode={"replicas": 2})
        await s.settle()
        old = s.fleet()["status"]["revision"]
        stuck = s.pods("decode")[0]["metadata"]["name"]
        s.behaviours = lambda pod: Behaviour(
            drain_s=float("inf") if pod["metadata"]["name"] == stuck else 1.0
        )
        s.change(image="pdfleet:2")
        await s.settle(limit_s=2000)
        assert s.fleet()["status"]["revision"] != old
        assert s.condition("Degraded")["reason"] == "StuckTerminating"

    play(story)


def test_what_somebody_changes_in_a_child_is_set_back() -> None:
    """F104."""

    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        (name,) = [
            n["metadata"]["name"] for n in s.store.all("deployments") if "decode" in n["metadata"]["name"]
        ]
        path = f"/apis/apps/v1/namespaces/default/deployments/{name}"
        s.store.handle("PATCH", path, {}, {"spec": {"replicas": 9}}, MERGE)
        await s.until(lambda: s.store.one("deployments", name)["spec"]["replicas"] == 2, 5)  # type: ignore[index]
        said = [one["message"] for one in s.store.all("events") if one["reason"] == "DriftCorrected"]
        assert "spec.replicas: 9 ≠ 2" in said[0]
        s.store.handle("DELETE", path, {}, None, JSON)
        await s.until(lambda: s.store.one("deployments", name) is not None, 5)
        await s.settle()

    play(story)


def test_deleted_everything_goes_even_without_a_controller() -> None:
    async def story(s: Scene) -> None:
        s.create()
        s.create("other")
        await s.settle()
        await s.settle("other")
        await s.stop_controller()
        s.store.handle("DELETE", FLEETS.path("default", "demo"), {}, None, JSON)
        await s.until(lambda: not s.pods("decode") and not s.pods("router"))
        for kind in ("deployments", "services", "fleetpools", "poddisruptionbudgets", "controllerrevisions",
                     "networkpolicies", "serviceaccounts"):  # fmt: skip
            left = [one["metadata"]["labels"]["pdfleet.dev/fleet"] for one in s.store.all(kind)]
            assert set(left) == {"other"}, kind

    play(story)


def test_an_older_spec_again_is_the_older_revision_again() -> None:
    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        first = s.fleet()["status"]["revision"]
        s.change(image="pdfleet:2")
        await s.until(lambda: len(sets(s, "decode")) == 2)
        s.change(image="pdfleet:1")
        await s.settle()
        assert s.fleet()["status"]["revision"] == first
        assert set(sets(s, "decode")) == {first}

    play(story)


def test_a_third_revision_in_the_middle_of_the_second() -> None:
    async def story(s: Scene) -> None:
        s.create(prefill={"replicas": 2}, decode={"replicas": 4})
        await s.settle()
        s.behaviours = lambda pod: Behaviour(ready_s=5.0)
        s.change(image="pdfleet:2")
        await s.until(lambda: s.fleet()["status"]["rollout"]["step"] == 1)
        s.change(image="pdfleet:3")
        while not s.settled():
            assert s.ready("decode") >= 4
            assert len(s.pods("decode")) <= 5
            await asyncio.sleep(0.5)
        assert all("pdfleet:3" in str(pod) for pod in s.pods("decode"))

    play(story)


def test_workers_of_several_nodes_are_groups() -> None:
    async def story(s: Scene) -> None:
        s.create(decode={"replicas": 2, "nodes": 2, "gpus": 8})
        await s.settle()
        (group,) = s.store.all("leaderworkersets")
        assert group["spec"]["leaderWorkerTemplate"]["size"] == 2
        assert len(s.pods("decode")) == 4
        assert s.fleet()["status"]["decode"]["ready"] == 2
        s.change(decode={"replicas": 1})
        await s.settle()
        assert len(s.pods("decode")) == 2

    play(story)


def test_groups_of_which_no_pod_is_made_are_told() -> None:
    """A quota or a policy shows at their StatefulSets only, which are not the controller's to see."""

    async def story(s: Scene) -> None:
        s.workloads.refuses = lambda pod: "exceeded quota"
        s.create(decode={"replicas": 2, "nodes": 2})
        await s.until(lambda: "LeaderWorkerSet" in str(s.store.all("leaderworkersets")))
        (group,) = s.store.all("leaderworkersets")
        said = f"{group['metadata']['name']}: PodsRefused: no pod of it is made"
        await s.until(lambda: said in s.condition("Degraded")["message"])
        s.workloads.refuses = lambda pod: ""
        await s.settle()
        fine = s.condition("Degraded")
        assert fine["status"] == "False"
        # Those that were none for a while are not told of at once when they are to be some again.
        for count in (0, 3):
            s.change(decode={"replicas": count})
            await s.until(lambda count=count: s.ready("decode") == 2 * count)  # type: ignore[misc]
            await s.settle()
            assert s.condition("Degraded")["lastTransitionTime"] == fine["lastTransitionTime"]
            await asyncio.sleep(300)

    play(story)


def test_a_cluster_without_a_kind_says_so_and_the_rest_works() -> None:
    async def go() -> None:
        async with scene(kinds=()) as s:
            s.create(monitoring={"podMonitor": True})
            await s.until(lambda: s.ready("decode") == 2)
            await s.until(lambda: s.condition("Degraded").get("reason") == "KindMissing")
            assert "PodMonitor" in s.condition("Degraded")["message"]
            # What is the matter with pods does not hide it.
            s.behaviours = lambda pod: Behaviour(image="nowhere" not in pod["spec"]["containers"][0]["image"])
            s.change(image="nowhere:1")
            await s.until(lambda: s.condition("Degraded")["reason"] == "ImagePull")
            assert "PodMonitor" in s.condition("Degraded")["message"]

    run(go(), horizon_s=HORIZON)


def test_what_the_api_server_refuses_shows_and_holds_nothing_else_up() -> None:
    async def story(s: Scene) -> None:
        def refuse(method: str, path: str, body: Object) -> None:
            if "networkpolicies" in path:
                raise ClusterError(403, "Forbidden", "networkpolicies are not yours to make")

        s.store.hooks.append(refuse)
        s.create()
        await s.until(lambda: s.ready("decode") == 2)
        await s.until(lambda: s.condition("Degraded").get("reason") == "Refused")
        assert "networkpolicies are not yours" in s.condition("Degraded")["message"]
        s.store.hooks.clear()
        await s.until(lambda: s.condition("Degraded").get("status") == "False")
        assert s.store.one("networkpolicies", "demo")

    play(story)


def test_a_refusal_in_other_words_each_time_is_heard_less_and_less_often() -> None:
    """Such as of a webhook that breaks off: its port stands in the message."""

    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        said: list[str] = []

        def refuse(method: str, path: str, body: Object) -> None:
            if path.endswith("/services/demo"):
                # The clock of this test would stand still for a loop that asks all the time.
                assert len(said) < 100
                said.append(f"failed calling webhook: read 10.0.0.1:{40_000 + len(said)}: reset by peer")
                raise ClusterError(500, "InternalError", said[-1])

        s.store.hooks.append(refuse)
        s.change(router={"port": 8080})
        await s.until(lambda: s.condition("Degraded").get("reason") == "Refused")
        await asyncio.sleep(1800)
        assert len(said) < 50
        s.store.hooks.clear()
        await s.until(lambda: s.condition("Degraded")["status"] == "False")
        assert s.store.one("services", "demo")["spec"]["ports"][0]["port"] == 8080

    play(story)


@pytest.mark.parametrize("code", [413, 422])
def test_an_object_that_is_too_large_shows(code: int) -> None:
    async def story(s: Scene) -> None:
        def refuse(method: str, path: str, body: Object) -> None:
            if path.endswith("/services/demo"):
                raise ClusterError(code, "", "the object is too large")

        s.store.hooks.append(refuse)
        s.create()
        await s.until(lambda: s.condition("Degraded").get("reason") == "Refused")
        assert "too large" in s.condition("Degraded")["message"]
        await s.until(lambda: s.ready("decode") == 2)

    play(story)


def test_watches_that_break_and_versions_that_are_too_old_lose_nothing() -> None:
    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        for turn in range(6):
            s.store.break_watches() if turn % 2 else s.store.compact()
            s.change(decode={"replicas": 1 + turn % 3})
            await s.until(lambda turn=turn: s.ready("decode") == 1 + turn % 3)  # type: ignore[misc]
        await s.settle()

    play(story)


def test_the_api_server_goes_away_and_comes_back() -> None:
    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        s.api.away = True
        s.store.break_watches()
        s.change(decode={"replicas": 4})
        await asyncio.sleep(600)
        s.api.away = False
        await s.until(lambda: s.ready("decode") == 4)
        await s.settle()

    play(story)


def test_writes_that_conflict_are_made_again() -> None:
    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        turns = 0

        def race(method: str, path: str, body: Object) -> None:
            nonlocal turns
            if (
                path == FLEETS.path("default", "demo")
                and "resourceVersion" in body.get("metadata", {})
                and turns < 3
            ):
                turns += 1
                s.store.handle("PATCH", path, {}, {"metadata": {"annotations": {"n": str(turns)}}}, MERGE)

        s.store.hooks.append(race)
        s.scale("demo-decode", 5)
        await s.until(lambda: counts(s) == (1, 5))
        assert turns == 3

    play(story)


@pytest.mark.parametrize("what", ["create", "scale", "update", "rollback"])
def test_a_controller_that_dies_at_any_write_is_taken_over_from(what: str) -> None:
    """Killed before its n-th write, for each n; a new one finishes what it left."""

    async def prepared(s: Scene) -> None:
        if what != "create":
            s.create(prefill={"replicas": 1}, decode={"replicas": 3})
            await s.settle()

    async def change(s: Scene) -> None:
        if what == "create":
            s.create(prefill={"replicas": 1}, decode={"replicas": 3})
        elif what == "scale":
            s.scale("demo-decode", 1)
        else:
            if what == "rollback":
                s.behaviours = lambda pod: Behaviour(crashes=":2" in str(pod["spec"]))
            s.change(image="pdfleet:2")

    async def story(s: Scene, kill_at: int) -> bool:
        """Whether it got that far."""
        await prepared(s)
        made, died = 0, asyncio.Event()

        def count(method: str, path: str, body: Object) -> None:
            nonlocal made
            task = asyncio.current_task()
            assert task is not None
            if task.get_name().startswith("worker "):
                made += 1
                if made == kill_at:
                    died.set()
                    raise asyncio.CancelledError

        await change(s)
        s.store.hooks.append(count)
        done = asyncio.ensure_future(finished(s))
        await asyncio.wait((done, asyncio.ensure_future(died.wait())), return_when=asyncio.FIRST_COMPLETED)
        s.store.hooks.clear()
        if died.is_set():
            await s.stop_controller()
            s.start_controller()
            await finished(s)
        done.cancel()
        return died.is_set()

    async def finished(s: Scene) -> None:
        if what == "rollback":
            await s.until(lambda: s.condition("RolledBack").get("status") == "True", 2000)
        if what == "scale":
            await s.until(lambda: counts(s) == (1, 1))
        if what == "update":
            await s.until(lambda: "pdfleet:2" in str(s.pods("decode")))
        await s.settle(limit_s=2000)
        assert s.ready("decode") == (1 if what == "scale" else 3)
        assert len(s.pods("decode")) == (1 if what == "scale" else 3)
        image = "pdfleet:2" if what == "update" else "pdfleet:1"
        assert all(pod["spec"]["containers"][0]["image"] == image for pod in s.pods("decode"))

    kill_at = 1
    while True:

        async def go(kill_at: int = kill_at) -> bool:
            async with scene() as s:
                return await story(s, kill_at)

        if not run(go(), horizon_s=HORIZON):
            break
        kill_at += 1 if kill_at < 8 else 3
    assert kill_at > 3, "there was nothing to die at"


def test_pools_handles_that_are_deleted_come_back() -> None:
    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        s.store.handle("DELETE", POOLS.path("default", "demo-decode"), {}, None, JSON)
        await s.until(lambda: s.store.one("fleetpools", "demo-decode") is not None)
        await s.settle()
        assert counts(s) == (1, 2)

    play(story)


def test_scaled_to_zero_and_back() -> None:
    async def story(s: Scene) -> None:
        s.create()
        await s.settle()
        s.change(prefill={"replicas": 0}, decode={"replicas": 0})
        await s.settle()
        assert not s.pods("decode")
        assert s.condition("Available")["reason"] == "ScaledToZero"
        assert s.ready("router") == 1, "who is asked for is seen by routers"
        s.change(decode={"replicas": 1})
        await s.settle()
        assert s.condition("Available")["status"] == "True"

    play(story)


def test_no_set_is_lowered_by_the_plan_that_marks_who_goes() -> None:
    """Who deletes pods reads marks from a copy of its own, which may be behind."""

    async def story(s: Scene) -> None:
        s.create(decode={"replicas": 3})
        await s.settle()
        fleet, pods = copy.deepcopy(s.fleet()), s.pods("decode")
        fleet["spec"]["decode"]["replicas"] = 1
        owned = tuple(one for kind in OWNED for one in s.store.all(kind.plural))

        def made(pods: list[Object]) -> Plan:
            return plan(
                Observed(fleet, owned, (*pods, *s.pods("prefill"), *s.pods("router"))), s.store.clock()
            )

        def lowered(found: Plan) -> list[int]:
            return [
                one.object["spec"]["replicas"]
                for one in found.actions
                if isinstance(one, Apply) and "demo-decode-" in one.object["metadata"]["name"]
            ]

        first = made(pods)
        marks = [one for one in first.actions if isinstance(one, Mark)]
        assert [one.cost for one in marks] == [-1000, -1000]
        assert lowered(first) == []
        marked = copy.deepcopy(pods)
        for pod in marked:
            if pod["metadata"]["name"] in {one.pod for one in marks}:
                pod["metadata"]["annotations"] = {DELETION_COST: "-1000"}
        assert lowered(made(marked)) == [1]

    play(story)
