"""Real kubectl and the real controller process, against the API server of ours."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest
import yaml
from cluster_http import Front, api_server
from cluster_nodes import Behaviour, PretendKubelet, Workloads
from kubernetes_tools import find
from scene import SPEC

from deploy.controller.controller import Controller, ControllerSettings
from deploy.controller.crd import definitions
from deploy.controller.looks import PageLooks
from deploy.controller.yaml_text import to_yaml
from fleet.cluster import KubernetesApi

KUBECTL = find("kubectl")
pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(KUBECTL is None, reason="kubectl is not there: make kubernetes-tools"),
]


class Reached(Protocol):
    kubeconfig: Path


async def command(front: Reached, *words: str, text: str = "", code: int = 0) -> str:
    env = {**os.environ, "KUBECONFIG": str(front.kubeconfig), "HOME": str(front.kubeconfig.parent)}
    process = await asyncio.create_subprocess_exec(
        *words, env=env, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate(text.encode())
    assert process.returncode == code, f"{words}: {out.decode()}{err.decode()}"
    return out.decode() + (err.decode() if code else "")


async def kubectl(front: Reached, *words: str, text: str = "", code: int = 0) -> str:
    return await command(front, str(KUBECTL), *words, text=text, code=code)


async def fleetctl(front: Reached, *words: str, code: int = 0) -> str:
    return await command(front, sys.executable, "-m", "fleetctl", *words, code=code)


def fleet(**changes: object) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "pdfleet.dev/v1alpha1",
            "kind": "InferenceFleet",
            "metadata": {"name": "demo"},
            "spec": {**SPEC, **changes},
        }
    )


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Front]:
    """API server, nodes that pretend, and the controller as it speaks to a real one."""
    async with api_server(folder) as front:
        workloads = Workloads(front.store, PretendKubelet(lambda pod: Behaviour(0.05, drain_s=0.05)))
        nodes = asyncio.ensure_future(workloads.run())
        api = await KubernetesApi.connect(kubeconfig=front.kubeconfig)
        acting: asyncio.Future[None] | None = None
        try:
            await kubectl(front, "apply", "--server-side", "--validate=false", "-f", "-",
                          text=to_yaml(definitions()))  # fmt: skip
            controller = Controller(api, PageLooks(), ControllerSettings(), front.store.clock)
            acting = asyncio.ensure_future(controller.run())
            yield front
        finally:
            tasks = [task for task in (acting, nodes) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await api.close()


async def settled(front: Front) -> None:
    await kubectl(front, "wait", "--for=condition=Progressing=false", "ifl/demo", "--timeout=60s")


def test_apply_get_scale_wait_and_delete(tmp_path: Path) -> None:
    async def go() -> None:
        async with cluster(tmp_path) as front:
            await kubectl(front, "apply", "--validate=false", "-f", "-", text=fleet())
            await settled(front)
            shown = await kubectl(front, "get", "ifl")
            head, row = shown.splitlines()
            assert head.split()[:6] == ["NAME", "MODEL", "PREFILL", "P-READY", "DECODE", "D-READY"]
            assert row.split()[:6] == ["demo", "m", "1", "1", "2", "2"]
            await kubectl(front, "scale", "fleetpool/demo-decode", "--replicas=4")
            await asyncio.wait_for(_until(front, lambda: _counts(front) == (1, 4)), 30)
            await kubectl(front, "wait", "--for=jsonpath={.status.readyReplicas}=4", "fpool/demo-decode",
                          "--timeout=60s")  # fmt: skip
            said = json.loads(await fleetctl(front, "scale", "prefill=2", "decode=1", "--kubernetes",
                                             "default/demo", "--wait", "--json"))  # fmt: skip
            assert said["before"] == {"prefill": 1, "decode": 4}
            assert said["desired"] == {"prefill": 2, "decode": 1}
            assert _counts(front) == (2, 1)
            pods = await kubectl(front, "get", "pods", "-l", "pdfleet.dev/role=decode", "-o", "name")
            assert len(pods.splitlines()) == 1
            await kubectl(front, "delete", "ifl/demo", "--timeout=30s")
            await asyncio.wait_for(_until(front, lambda: not front.store.all("pods")), 30)
            assert not front.store.all("deployments")

    asyncio.run(go())


def test_watches_that_break_in_the_middle_are_opened_again(tmp_path: Path) -> None:
    async def go() -> None:
        async with cluster(tmp_path) as front:
            await kubectl(front, "apply", "--validate=false", "-f", "-", text=fleet())
            await settled(front)
            for count in (3, 1):
                front.store.break_watches()
                await kubectl(front, "scale", "fpool/demo-decode", f"--replicas={count}")
                await asyncio.wait_for(_until(front, lambda count=count: _counts(front) == (1, count)), 60)  # type: ignore[misc]
                front.store.compact()
            await settled(front)

    asyncio.run(go())


def test_applying_again_keeps_counts_that_the_file_does_not_name(tmp_path: Path) -> None:
    async def go() -> None:
        async with cluster(tmp_path) as front:
            body = fleet(prefill={}, decode={})
            await kubectl(front, "apply", "--server-side", "--validate=false", "-f", "-", text=body)
            await settled(front)
            await kubectl(front, "scale", "fpool/demo-decode", "--replicas=3")
            await asyncio.wait_for(_until(front, lambda: _counts(front) == (1, 3)), 30)
            await kubectl(front, "apply", "--server-side", "--validate=false", "-f", "-", text=body)
            assert _counts(front) == (1, 3)

    asyncio.run(go())


def test_what_is_refused_names_its_field(tmp_path: Path) -> None:
    async def go() -> None:
        async with cluster(tmp_path) as front:
            wrong = fleet(rollout={"maxSurgePercent": 0}, decode={"replicas": 2})
            said = await kubectl(front, "apply", "--validate=false", "-f", "-", text=wrong, code=1)
            assert "spec.rollout.maxSurgePercent" in said
            await kubectl(front, "apply", "--validate=false", "-f", "-",
                          text=fleet(decode={"replicas": 2, "gpus": 1}, budget={"gpus": 3}))  # fmt: skip
            said = await fleetctl(front, "scale", "decode=4", "--kubernetes", "default/demo", code=1)
            assert "budget.gpus" in said
            said = await fleetctl(front, "scale", "decode=3", "--kubernetes", "default/demo", "--dry-run")
            assert "would set decode 2 → 3" in said
            assert _counts(front) == (1, 2)
            said = await fleetctl(front, "scale", "decode=3", "--kubernetes", "default/nobody", code=1)
            assert "there is no InferenceFleet default/nobody" in said

    asyncio.run(go())


def test_auto_hands_over_to_the_planner_and_counts_take_it_back(tmp_path: Path) -> None:
    async def go() -> None:
        async with cluster(tmp_path) as front:
            await kubectl(front, "apply", "--validate=false", "-f", "-", text=fleet())
            await fleetctl(front, "scale", "auto", "--budget", "6", "--kubernetes", "default/demo")
            spec = front.store.all("inferencefleets")[0]["spec"]
            assert (spec["planner"]["mode"], spec["planner"]["maxWorkers"]) == ("act", 6)
            await fleetctl(front, "scale", "decode=3", "--kubernetes", "demo")
            spec = front.store.all("inferencefleets")[0]["spec"]
            assert (spec["planner"]["mode"], spec["decode"]["replicas"]) == ("off", 3)

    asyncio.run(go())


async def start_controller(folder: Path, name: str, flags: list[str]) -> asyncio.subprocess.Process:
    with (folder / f"{name}.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "deploy.controller", f"--identity={name}", *flags), stdout=log, stderr=log
        )


def test_a_controller_that_is_killed_is_followed_by_another(tmp_path: Path) -> None:
    """Two processes, as they are installed."""

    async def go() -> None:
        async with api_server(tmp_path) as front:
            workloads = Workloads(front.store, PretendKubelet(lambda pod: Behaviour(0.05, drain_s=0.05)))
            nodes = asyncio.ensure_future(workloads.run())
            await kubectl(front, "apply", "--server-side", "--validate=false", "-f", "-",
                          text=to_yaml(definitions()))  # fmt: skip
            flags = ["--election.lease-s=10", "--election.deadline-s=9", "--election.renew-s=0.5",
                     "--lease-namespace=default", f"--kubeconfig={front.kubeconfig}"]  # fmt: skip
            started = [await start_controller(tmp_path, name, flags) for name in ("one", "two")]
            try:
                await kubectl(front, "apply", "--validate=false", "-f", "-", text=fleet())
                await asyncio.wait_for(_until(front, lambda: front.store.all("leases")), 60)
                await settled(front)
                leader = front.store.all("leases")[0]["spec"]["holderIdentity"]
                first, second = started if leader == "one" else reversed(started)
                first.kill()
                await kubectl(front, "scale", "fpool/demo-decode", "--replicas=4")
                await asyncio.wait_for(_until(front, lambda: _counts(front) == (1, 4)), 120)
                await settled(front)
                assert front.store.all("leases")[0]["spec"]["holderIdentity"] not in ("", leader)
                second.terminate()
                assert await asyncio.wait_for(second.wait(), 30) == 0
                assert front.store.all("leases")[0]["spec"]["holderIdentity"] == "", "it is let go"
            except BaseException:
                print("\n".join((tmp_path / f"{name}.log").read_text() for name in ("one", "two")))
                raise
            finally:
                for process in started:
                    if process.returncode is None:
                        process.kill()
                        await process.wait()
                nodes.cancel()
                await asyncio.gather(nodes, return_exceptions=True)

    asyncio.run(go())


def _counts(front: Front) -> tuple[int, int]:
    spec = front.store.all("inferencefleets")[0]["spec"]
    return spec["prefill"]["replicas"], spec["decode"]["replicas"]


async def _until(front: Front, condition: object) -> None:
    assert callable(condition)
    while not condition():
        await asyncio.sleep(0.05)
