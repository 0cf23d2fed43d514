"""A real control plane of Kubernetes, for tests, where `KUBEBUILDER_ASSETS` names a folder with its programs.

etcd, kube-apiserver with RBAC, kube-controller-manager and, where it is there, kube-scheduler: on loopback,
with keys of their own. There is no node: `Nodes` says it is one, and a kubelet of ours lives in it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trustme
import yaml
from cluster_nodes import Kubelet, OnNode
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from kubernetes_tools import find
from servers import Etcd, Server, free_ports

from deploy.controller.pods import condition
from deploy.controller.render import FLEET_LABEL, OWNED, PODS
from fleet.cluster import FLEETS, MERGE, Api, ClusterError, KubernetesApi, Object, Resource
from fleet.errors import Unavailable

REPLICA_SETS = Resource("apps/v1", "ReplicaSet", "replicasets")
NODES = Resource("v1", "Node", "nodes", namespaced=False)
_CONTROLLERS = (
    *("deployment", "replicaset", "statefulset", "disruption", "garbagecollector", "namespace"),
    *("serviceaccount", "serviceaccount-token", "root-ca-cert-publisher", "resourcequota", "endpointslice"),
    "clusterrole-aggregation",
)
_USERS = {
    "admin": ("admin", "system:masters"),
    "manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
}
"""Token → user and group."""


def assets() -> Path | None:
    """The folder of programs, as envtest of controller-runtime has it; None: there is none."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    wanted = ("kube-apiserver", "kube-controller-manager")
    found = folder and all((Path(folder) / name).exists() for name in wanted)
    return Path(folder) if found and folder else None


class ApiServer(Server):
    limit_s = 180.0

    def __init__(self, programs: Path, folder: Path, etcd: Etcd) -> None:
        super().__init__("kube-apiserver", folder, free_ports(1)[0])
        self._programs, self._etcd = programs, etcd
        self.ca = trustme.CA()
        self.ca.cert_pem.write_to_path(str(folder / "ca.crt"))
        own = self.ca.issue_cert("127.0.0.1", "localhost", "kubernetes.default.svc")
        for number, part in enumerate(own.cert_chain_pems):
            part.write_to_path(str(folder / "tls.crt"), append=number > 0)
        own.private_key_pem.write_to_path(str(folder / "tls.key"))
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        (folder / "accounts.key").write_bytes(pem)
        rows = [f'{token},{user},{token},"{group}"' for token, (user, group) in _USERS.items()]
        (folder / "tokens.csv").write_text("\n".join(rows) + "\n")
        policy = {
            "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
            "rules": [
                {"level": "Metadata", "userGroups": ["system:serviceaccounts:pdfleet-system"]},
                {"level": "None"},
            ],
        }  # fmt: skip
        (folder / "audit.yaml").write_text(yaml.safe_dump(policy))

    def command(self) -> Sequence[str]:
        key = self.folder / "accounts.key"
        return [
            str(self._programs / "kube-apiserver"),
            f"--etcd-servers=http://{self._etcd.address}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--tls-cert-file={self.folder}/tls.crt",
            f"--tls-private-key-file={self.folder}/tls.key",
            f"--cert-dir={self.folder}",
            f"--token-auth-file={self.folder}/tokens.csv",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}",
            "--api-audiences=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--endpoint-reconciler-type=none",
            "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
            "--disable-admission-plugins=TaintNodesByCondition,StorageObjectInUseProtection",
            f"--audit-policy-file={self.folder}/audit.yaml",
            f"--audit-log-path={self.folder}/audit.log",
            "--audit-log-mode=blocking",
        ]  # fmt: skip

    def ask(self) -> None:
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        request = urllib.request.Request(
            f"https://{self.address}/readyz", headers={"Authorization": "Bearer admin"}
        )
        urllib.request.urlopen(request, timeout=5, context=context).close()


class _Beside(Server):
    """A program that speaks to the API server and that nobody speaks to."""

    def __init__(self, name: str, programs: Path, folder: Path, flags: Sequence[str]) -> None:
        super().__init__(name, folder, 0)
        self._command = [str(programs / name), *flags]

    def command(self) -> Sequence[str]:
        return self._command

    def ask(self) -> None: ...


class ControlPlane:
    """`kubeconfig` is an administrator's."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.folder = folder
        self.etcd = Etcd(folder / "etcd")
        self.api_server = ApiServer(programs, folder / "api", self.etcd)
        said = subprocess.run(
            [programs / "kube-apiserver", "--version"], capture_output=True, text=True, check=True
        )
        version = re.search(r"v1\.(\d+)", said.stdout)
        assert version is not None, said.stdout
        self.minor = int(version[1])
        self.kubeconfig = self.login("admin", "admin")
        api = self.api_server.folder
        self._beside = [
            _Beside("kube-controller-manager", programs, folder / "manager", [
                f"--kubeconfig={self.login('manager', 'manager')}",
                f"--controllers={','.join(_CONTROLLERS)}",
                f"--service-account-private-key-file={api}/accounts.key",
                f"--root-ca-file={api}/ca.crt",
                "--use-service-account-credentials=true",
                *self._unheard(),
            ])
        ]  # fmt: skip
        if (programs / "kube-scheduler").exists():
            flags = [f"--kubeconfig={self.login('scheduler', 'scheduler')}", *self._unheard()]
            self._beside.append(_Beside("kube-scheduler", programs, folder / "scheduler", flags))
        self.schedules = len(self._beside) > 1

    def _unheard(self) -> list[str]:
        """Of those beside the API server; a second port without TLS went with 1.24."""
        return ["--leader-elect=false", "--secure-port=0", *(["--port=0"] if self.minor < 24 else [])]

    def login(self, name: str, token: str, namespace: str = "default") -> Path:
        """A kubeconfig with that token."""
        authority = base64.b64encode((self.api_server.folder / "ca.crt").read_bytes()).decode()
        server = f"https://{self.api_server.address}"
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [
                {"name": "test", "cluster": {"server": server, "certificate-authority-data": authority}}
            ],
            "contexts": [
                {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}
            ],
            "users": [{"name": "test", "user": {"token": token}}],
        }  # fmt: skip
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(yaml.safe_dump(config))
        return path

    def start(self) -> None:
        self.etcd.start()
        self.api_server.start()
        for one in self._beside:
            one.start()

    def kill(self) -> None:
        for one in [*reversed(self._beside), self.api_server, self.etcd]:
            one.kill()

    def install(self, manifests: str) -> None:
        """By kubectl, as a person does. `policy/v1`, which 1.20 does not know, is left out there; rules of
        definitions it prunes, wherefore kubectl's own check is off."""
        objects = [one for one in yaml.safe_load_all(manifests) if one]
        taken = [one for one in objects if self.minor >= 21 or one["apiVersion"] != "policy/v1"]
        subprocess.run(
            [str(find("kubectl")), "apply", "--validate=false", "-f", "-"],
            input=yaml.safe_dump_all(taken), text=True, check=True, capture_output=True,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.folder)},
        )  # fmt: skip

    def audited(self) -> list[Object]:
        """What service accounts of pdfleet-system have asked for."""
        lines = (self.api_server.folder / "audit.log").read_text().splitlines()
        return [json.loads(line) for line in lines]


class Nodes:
    """One node with room for what tests want, and the lives of its pods."""

    def __init__(self, plane: ControlPlane, api: Api, kubelet: Kubelet) -> None:
        self._api, self._kubelet, self._schedules = api, kubelet, plane.schedules
        self._lives: dict[str, asyncio.Task[None]] = {}
        self.pods: dict[str, Object] = {}
        """By uid, as last heard."""

    async def run(self) -> None:
        """Does not end."""
        path = PODS.path()
        try:
            await _join(self._api)
            while True:
                try:
                    page = await self._api.ask("GET", path)
                    self.pods = {one["metadata"]["uid"]: one for one in page["items"]}
                    for pod in page["items"]:
                        await self._see(pod)
                    since = {"resourceVersion": page["metadata"]["resourceVersion"]}
                    async for event in self._api.follow(path, since):
                        pod = event["object"]
                        if event["type"] == "DELETED":
                            self.pods.pop(pod["metadata"]["uid"], None)
                        else:
                            self.pods[pod["metadata"]["uid"]] = pod
                            await self._see(pod)
                except (Unavailable, ClusterError):
                    await asyncio.sleep(0.2)
        finally:
            for life in self._lives.values():
                life.cancel()
            await asyncio.gather(*self._lives.values(), return_exceptions=True)

    async def _see(self, pod: Object) -> None:
        meta = pod["metadata"]
        if meta["uid"] in self._lives or FLEET_LABEL not in meta.get("labels", {}):
            return
        if pod["spec"].get("nodeName"):
            own = OnNode(self._api, pod, time.time)
            self._lives[meta["uid"]] = asyncio.create_task(self._kubelet.run(own, pod))
        elif not self._schedules:
            target = {"apiVersion": "v1", "kind": "Node", "name": "node-1"}
            body: Object = {"metadata": {"name": meta["name"]}, "target": target}
            await self._api.ask("POST", PODS.path(meta["namespace"], meta["name"], "binding"), None, body)


async def _join(api: Api) -> None:
    """A node that is there; again where it is."""
    body: Object = {"metadata": {"name": "node-1", "labels": {"kubernetes.io/hostname": "node-1"}}}
    try:
        await api.ask("POST", NODES.path(), None, body)
    except ClusterError as error:
        if not error.conflict:
            raise
    room = {"cpu": "64", "memory": "256Gi", "pods": "200", "nvidia.com/gpu": "8"}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    status = {"capacity": room, "allocatable": room, "conditions": [ready]}
    await api.ask("PATCH", NODES.path("", "node-1", "status"), None, {"status": status}, MERGE)


@asynccontextmanager
async def working(plane: ControlPlane, kubelet: Kubelet, folder: Path, count: int = 1) -> AsyncIterator[Site]:
    """With a node, and controllers as processes that have no rights but those of the installation."""
    api = await KubernetesApi.connect(kubeconfig=plane.kubeconfig)
    nodes = Nodes(plane, api, kubelet)
    running = asyncio.create_task(nodes.run())
    site = Site(plane, api, nodes, folder)
    try:
        for number in range(count):
            await site.start_controller(f"controller-{number}")
        yield site
        await site.clean()
    except BaseException:
        print(site.logs())
        raise
    finally:
        for process in site.controllers.values():
            if process.returncode is None:
                process.kill()
            await process.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await api.close()


class Site:
    """What a test sees of it, in the namespace `default`."""

    def __init__(self, plane: ControlPlane, api: KubernetesApi, nodes: Nodes, folder: Path) -> None:
        self.plane, self.api, self.kubeconfig = plane, api, plane.kubeconfig
        self.controllers: dict[str, asyncio.subprocess.Process] = {}
        self._nodes, self._folder = nodes, folder

    def pods(self) -> list[Object]:
        return [one for one in self._nodes.pods.values() if one["metadata"]["namespace"] == "default"]

    async def start_controller(self, name: str) -> None:
        path = "/api/v1/namespaces/pdfleet-system/serviceaccounts/pdfleet-controller/token"
        body: Object = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = (await self.api.ask("POST", path, None, body))["status"]["token"]
        kubeconfig = self.plane.login(name, token)
        flags = ["--election.lease-s=10", "--election.deadline-s=9", "--election.renew-s=0.5",
                 f"--kubeconfig={kubeconfig}", f"--identity={name}"]  # fmt: skip
        with (self._folder / f"{name}.log").open("ab") as log:
            self.controllers[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "deploy.controller", *flags), stdout=log, stderr=log
            )

    async def revive(self) -> None:
        """As a node does: a controller that ended, as it could not renew its lease, is started again."""
        for name, process in list(self.controllers.items()):
            if process.returncode is not None:
                await self.start_controller(name)

    async def get(self, resource: Resource, name: str, namespace: str = "default") -> Object:
        return await self.api.ask("GET", resource.path(namespace, name))

    async def all(self, resource: Resource) -> list[Object]:
        """Empty, too, of a kind that the cluster does not know."""
        try:
            page = await self.api.ask("GET", resource.path("default"))
        except ClusterError as error:
            if error.missing:
                return []
            raise
        return [{"kind": resource.kind, **one} for one in page["items"]]

    async def fleet(self, name: str = "demo") -> Object:
        return await self.get(FLEETS, name)

    async def condition(self, type: str, name: str = "demo") -> Object:
        return condition(await self.fleet(name), type)

    async def until(self, holds: Callable[[], Awaitable[object]], limit_s: float = 180.0) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        if await holds():
                            return
                    except (Unavailable, ClusterError):
                        pass
                    await asyncio.sleep(0.2)
        except TimeoutError:
            fleets = [one.get("status") for one in await self.all(FLEETS)]
            raise AssertionError(f"not so after {limit_s} s: {json.dumps(fleets, indent=1)}") from None

    async def settled(self, name: str = "demo") -> bool:
        fleet = await self.fleet(name)
        seen = fleet.get("status", {}).get("observedGeneration") == fleet["metadata"]["generation"]
        return seen and condition(fleet, "Progressing").get("status") == "False"

    async def settle(self, name: str = "demo") -> None:
        await self.until(lambda: self.settled(name))

    async def clean(self) -> None:
        """Nothing of a fleet is left when fleets are gone: owner references see to it."""
        for one in await self.all(FLEETS):
            await self.api.ask("DELETE", FLEETS.path("default", one["metadata"]["name"]))
        await self.until(self.empty)

    async def empty(self) -> bool:
        return not await self.left()

    async def left(self) -> list[str]:
        """What bears a fleet's label."""
        kinds = (FLEETS, *OWNED, PODS, REPLICA_SETS)
        return [
            f"{one['kind']} {one['metadata']['name']}"
            for kind in kinds
            for one in await self.all(kind)
            if kind is FLEETS or FLEET_LABEL in one["metadata"].get("labels", {})
        ]

    def logs(self) -> str:
        return "\n".join(f"== {one.name}\n{one.read_text()}" for one in sorted(self._folder.glob("*.log")))
