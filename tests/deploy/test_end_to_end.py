"""A fleet by `kubectl apply`: the controller's pods are real processes, and scaling loses no request."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import httpx
import pytest
import trustme
from cluster_http import Front, api_server
from cluster_nodes import Workloads, is_ready
from kubelet import ProcessKubelet
from servers import Etcd, Nats
from test_kubectl import KUBECTL, fleet, fleetctl, kubectl

from deploy.controller.controller import Controller, ControllerSettings
from deploy.controller.crd import definitions
from deploy.controller.looks import PageLooks
from deploy.controller.render import CONTROL_PORT
from deploy.controller.yaml_text import to_yaml
from fleet.cluster import KubernetesApi, Object
from fleet.errors import FleetError
from fleet.tls import Tls
from fleet.wire.network import NetworkWire
from fleet.wire.session import WireSettings

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(KUBECTL is None, reason="kubectl is not there: make kubernetes-tools"),
]

MODEL = "latency:base=5,prompt=0.1,decode=5"


Pods = Callable[[], list[Object]]


class Site(Protocol):
    """A cluster with a controller."""

    kubeconfig: Path

    def pods(self) -> list[Object]:
        """All that there are now."""
        ...


class Ours:
    def __init__(self, front: Front) -> None:
        self.kubeconfig = front.kubeconfig
        self._front = front

    def pods(self) -> list[Object]:
        return self._front.store.all("pods")


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[tuple[Ours, ProcessKubelet]]:
    async with api_server(folder) as front:
        kubelet = ProcessKubelet(folder)
        workloads = Workloads(front.store, kubelet)
        nodes = asyncio.ensure_future(workloads.run())
        api = await KubernetesApi.connect(kubeconfig=front.kubeconfig)
        controller = Controller(api, PageLooks(), ControllerSettings(), front.store.clock)
        acting: asyncio.Future[None] | None = None
        try:
            await kubectl(front, "apply", "--server-side", "--validate=false", "-f", "-",
                          text=to_yaml(definitions()))  # fmt: skip
            acting = asyncio.ensure_future(controller.run())
            yield Ours(front), kubelet
        finally:
            tasks = [task for task in (acting, nodes) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await api.close()


def router(pods: Pods) -> str:
    """What the Service would lead to."""
    for pod in pods():
        if pod["metadata"]["labels"].get("pdfleet.dev/role") == "router" and is_ready(pod):
            return f"http://{pod['status']['podIP']}:8000"
    raise AssertionError("no router is ready")


async def complete(client: httpx.AsyncClient, url: str, number: int, tokens: int = 60) -> str:
    body = {"model": "m", "prompt": f"request {number}", "max_tokens": tokens, "stream": True}
    text = ""
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            assert "error" not in line, line
            text += line + "\n"
    assert "data: [DONE]" in text, text[-300:]
    return text


class Load:
    """Requests one after another from several clients, each to a router that is ready then, until its end."""

    def __init__(self, pods: Pods) -> None:
        self.done = 0
        self._pods = pods
        self._ended = False

    async def run(self, clients: int) -> None:
        async with httpx.AsyncClient(timeout=120) as client:

            async def one(number: int) -> None:
                turn = 0
                while not self._ended:
                    await complete(client, router(self._pods), number * 10_000 + turn)
                    self.done += 1
                    turn += 1

            async with asyncio.TaskGroup() as tasks:
                for number in range(clients):
                    tasks.create_task(one(number))

    def end(self) -> None:
        self._ended = True


async def settled(site: Site) -> None:
    await kubectl(site, "wait", "--for=condition=Progressing=false", "ifl/demo", "--timeout=120s")


def certificate() -> Object:
    """A Secret as cert-manager makes it: of an authority, for the one name that the fleet's pods have."""
    ca = trustme.CA()
    own = ca.issue_cert("demo-workers.default.svc")
    data = {
        "ca.crt": ca.cert_pem.bytes(),
        "tls.crt": b"".join(part.bytes() for part in own.cert_chain_pems),
        "tls.key": own.private_key_pem.bytes(),
    }
    return {
        "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": {"name": "demo-tls"},
        "data": {name: base64.b64encode(text).decode() for name, text in data.items()},
    }  # fmt: skip


async def hears(pod: Object, tls: Tls | None) -> bool:
    """Whether that worker answers who shows this."""
    wire = NetworkWire(WireSettings(connect_s=10), tls)
    try:
        await wire.status(f"{pod['status']['podIP']}:{CONTROL_PORT}", 10)
        return True
    except FleetError:
        return False
    finally:
        await wire.close()


def test_apply_serves_and_scaling_and_updating_under_load_lose_no_request(
    tmp_path: Path, etcd: Etcd, nats: Nats
) -> None:
    async def go() -> None:
        async with cluster(tmp_path) as (site, kubelet):
            try:
                await whole_life(site, kubelet, etcd, nats)
            except BaseException:
                print(kubelet.logs())
                raise

    asyncio.run(go())


async def whole_life(site: Site, kubelet: ProcessKubelet, etcd: Etcd, nats: Nats) -> None:
    """Of a fleet, under load, from its file to its end."""
    body = fleet(
        model={"path": MODEL, "name": "m"},
        control={"etcd": etcd.address, "nats": nats.url, "tlsSecret": "demo-tls"},
        prefill={"replicas": 1},
        decode={"replicas": 2},
        drainSeconds=60,
    )
    secret = certificate()
    await kubectl(site, "apply", "--validate=false", "-f", "-", text=body)
    reason = '{.status.conditions[?(@.type=="Degraded")].reason}'
    await kubectl(site, "wait", f"--for=jsonpath={reason}=Missing", "ifl/demo", "--timeout=120s")
    said = await kubectl(site, "get", "ifl/demo", "-o", f"jsonpath={reason.replace('reason', 'message')}")
    assert "Secret demo-tls, named by spec.control.tlsSecret, is not there" in said
    await kubectl(site, "apply", "--validate=false", "-f", "-", text=to_yaml([secret]))
    await settled(site)
    ca, cert, key = (base64.b64decode(secret["data"][name]) for name in sorted(secret["data"]))
    for worker in workers(site.pods, "prefill") + workers(site.pods, "decode"):
        assert await hears(worker, Tls(ca, cert, key, "demo-workers.default.svc"))
        assert not await hears(worker, None)
    async with httpx.AsyncClient(timeout=60) as client:
        await complete(client, router(site.pods), 0, 5)

    load = Load(site.pods)
    loading = asyncio.create_task(load.run(4))
    await done(load, loading, 4)
    first = {pod["metadata"]["name"] for pod in site.pods()}
    await kubectl(site, "scale", "fpool/demo-decode", "--replicas=1")
    await done(load, loading, load.done + 8)
    await until(lambda: len(workers(site.pods, "decode")) == 1)
    await fleetctl(site, "scale", "prefill=2", "decode=2", "--kubernetes", "default/demo",
                   "--wait", "--limit", "120")  # fmt: skip
    await done(load, loading, load.done + 4)
    await fleetctl(site, "scale", "prefill=1", "decode=1", "--kubernetes", "default/demo",
                   "--wait", "--limit", "120")  # fmt: skip
    await done(load, loading, load.done + 4)
    assert len(kubelet.exits) == 3
    assert set(kubelet.exits.values()) == {0}, kubelet.exits
    routers = {name for name in first if "router" in name}
    assert routers <= {pod["metadata"]["name"] for pod in site.pods()}

    # Another revision: each pod is another process in the end, the router as well.
    before = {pod["metadata"]["name"] for pod in site.pods()}
    image = '{"spec": {"image": "pdfleet:2"}}'
    await kubectl(site, "patch", "ifl/demo", "--type=merge", "-p", image)
    await settled(site)
    await until(lambda: not before & {pod["metadata"]["name"] for pod in site.pods()})
    await done(load, loading, load.done + 4)
    load.end()
    await loading
    assert set(kubelet.exits) >= before
    assert set(kubelet.exits.values()) == {0}, kubelet.exits
    # Deleted all at once, every process still ends by itself.
    await kubectl(site, "delete", "ifl/demo", "--timeout=60s")
    await until(lambda: not site.pods())
    assert set(kubelet.exits.values()) == {0}, kubelet.exits


def workers(pods: Pods, role: str) -> list[Object]:
    return [pod for pod in pods() if pod["metadata"]["labels"].get("pdfleet.dev/role") == role]


async def until(condition: object, limit_s: float = 120.0) -> None:
    assert callable(condition)
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.05)


async def done(load: Load, loading: asyncio.Task[None], count: int) -> None:
    """Until so many requests are over; one that failed ends the load, and the test."""
    while load.done < count:
        if loading.done():
            loading.result()
        await asyncio.sleep(0.05)
