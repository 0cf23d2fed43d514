"""What is made of a fleet: the objects to apply, each a function of spec and counts. Pure."""

from __future__ import annotations

import hashlib
import json

import msgspec

from deploy.controller.resource import FleetSpec, Placed, Pool
from fleet.cluster import FLEETS, GROUP, POOLS, Object, Resource

CONTROLLER = "pdfleet-controller"
ROLES = ("prefill", "decode")

FLEET_LABEL = "pdfleet.dev/fleet"
ROLE_LABEL = "pdfleet.dev/role"
REVISION_LABEL = "pdfleet.dev/revision"
CARRIED = "pdfleet.dev/carried-"
"""With a role: an annotation of the fleet, its count that was last carried over from that role's pool."""
MANAGED = ("app.kubernetes.io/managed-by", CONTROLLER)
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"

DEPLOYMENTS = Resource("apps/v1", "Deployment", "deployments")
REVISIONS = Resource("apps/v1", "ControllerRevision", "controllerrevisions")
GROUPS = Resource("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets")
PODS = Resource("v1", "Pod", "pods")
SERVICES = Resource("v1", "Service", "services")
ACCOUNTS = Resource("v1", "ServiceAccount", "serviceaccounts")
ROLES_OF = Resource("rbac.authorization.k8s.io/v1", "Role", "roles")
BINDINGS = Resource("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
BUDGETS = Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
POLICIES = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
MONITORS = Resource("monitoring.coreos.com/v1", "PodMonitor", "podmonitors")

OWNED = (
    *(DEPLOYMENTS, GROUPS, REVISIONS, SERVICES, ACCOUNTS),
    *(BUDGETS, POLICIES, MONITORS, POOLS, ROLES_OF, BINDINGS),
)
"""What a fleet owns. Pods are owned by what is here."""

METRICS_PORT = 9090
CONTROL_PORT = 7070
SESSION_PORT = 7071
_ROUTER_WAITS_S = 5
"""Between leaving the Service's endpoints and SIGTERM: until no node sends new connections any more."""
_START_S = 1800
"""Longest that a worker may load its model before it is started again."""
_BESIDE_DRAIN_S = 30
_USER = 10001
_TLS = "/etc/pdfleet/fleet-tls"
RENDERING = 3
"""Of the way in which pods are made of a spec: another number is another revision of everything."""


_BESIDE_SHAPE = ("router", "planner", "budget", "rollout", "monitoring", "network")
_COUNTS = ("replicas", "minReplicas", "maxReplicas")


def shape(spec: FleetSpec) -> Object:
    """All that shapes a worker's pod; the rest of a spec changes without new workers."""
    found: Object = {
        name: value for name, value in msgspec.to_builtins(spec).items() if name not in _BESIDE_SHAPE
    }
    for role in ROLES:
        pool = found.get(role, {})
        found[role] = {name: value for name, value in pool.items() if name not in _COUNTS}
    return found


def revision(spec: FleetSpec) -> str:
    """Ten hex digits of the shape."""
    text = json.dumps([RENDERING, shape(spec)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def shaped(data: Object, spec: FleetSpec) -> FleetSpec:
    """The spec of another revision, by its shape, with all else as it is in `spec`."""
    whole: Object = msgspec.to_builtins(spec)
    found = {name: whole[name] for name in _BESIDE_SHAPE if name in whole} | data
    for role in ROLES:
        counts = {name: value for name, value in whole.get(role, {}).items() if name in _COUNTS}
        found[role] = {**data.get(role, {}), **counts}
    return msgspec.convert(found, FleetSpec)


def labels(fleet: str, component: str = "") -> dict[str, str]:
    found = {
        "app.kubernetes.io/name": "pdfleet",
        "app.kubernetes.io/instance": fleet,
        MANAGED[0]: MANAGED[1],
        FLEET_LABEL: fleet,
    }
    if component:
        found |= {"app.kubernetes.io/component": component, ROLE_LABEL: component}
    return found


def selector(fleet: str, component: str) -> dict[str, str]:
    return {FLEET_LABEL: fleet, ROLE_LABEL: component}


class Renderer:
    """Of one fleet: its name, namespace and owner reference stand in every object."""

    def __init__(self, fleet: Object, spec: FleetSpec) -> None:
        self.spec = spec
        self.name: str = fleet["metadata"]["name"]
        self.namespace: str = fleet["metadata"]["namespace"]
        self._owner = {
            "apiVersion": FLEETS.api_version,
            "kind": FLEETS.kind,
            "name": self.name,
            "uid": fleet["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }

    @property
    def fleet_name(self) -> str:
        """In etcd and on NATS. Neither part has the line between them: no two fleets are of one name."""
        return f"{self.namespace}_{self.name}"

    @property
    def tls_name(self) -> str:
        """Of the headless Service: an authority of the cluster's would sign it."""
        return f"{self.name}-workers.{self.namespace}.svc"

    def workers_name(self, role: str, revision: str) -> str:
        return f"{self.name}-{role}-{revision}"

    def _object(self, resource: Resource, name: str, component: str = "", **parts: object) -> Object:
        return {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "labels": labels(self.name, component),
                "ownerReferences": [self._owner],
            },
            **parts,
        }

    def around(self) -> list[Object]:
        """All but workers and routers, which change by step."""
        made = [self.account(), self.ingress(), self.headless(), *(self.disruption(role) for role in ROLES)]
        if self.spec.router.replicas:
            made.append(self.disruption("router"))
        if self.spec.network.policy:
            made.append(self.policy())
        if self.spec.monitoring.pod_monitor:
            made.append(self.monitor())
        if self.spec.planner.mode != "off":
            made += self.planner()
        return made

    def account(self) -> Object:
        return self._object(ACCOUNTS, self.name, automountServiceAccountToken=False)

    def ingress(self) -> Object:
        router = self.spec.router
        port = {"name": "http", "port": router.port, "targetPort": "http", "protocol": "TCP"}
        return self._object(
            SERVICES, self.name, "router",
            spec={"type": router.service_type, "selector": selector(self.name, "router"), "ports": [port]},
        )  # fmt: skip

    def headless(self) -> Object:
        port = {"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics", "protocol": "TCP"}
        return self._object(
            SERVICES, f"{self.name}-workers", "worker",
            spec={
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {FLEET_LABEL: self.name, "pdfleet.dev/worker": "true"},
                "ports": [port],
            },
        )  # fmt: skip

    def disruption(self, component: str) -> Object:
        return self._object(
            BUDGETS, f"{self.name}-{component}", component,
            spec={
                "maxUnavailable": 1,
                "selector": {"matchLabels": selector(self.name, component)},
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            },
        )  # fmt: skip

    def policy(self) -> Object:
        """Into pods only: where etcd, NATS and models are is not known here."""
        own = {"podSelector": {"matchLabels": {FLEET_LABEL: self.name}}}
        chosen = self.spec.network.metrics_from
        watchers: list[Object] = [
            {"namespaceSelector": {"matchLabels": chosen} if chosen else {}},
            {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": CONTROLLER}}},
        ]
        return self._object(
            POLICIES, self.name,
            spec={
                "podSelector": {"matchLabels": {FLEET_LABEL: self.name}},
                "policyTypes": ["Ingress"],
                "ingress": [
                    # Of KV any port: UCX takes free ones.
                    {"from": [own]},
                    {"from": watchers, "ports": [{"port": "metrics", "protocol": "TCP"}]},
                    {"ports": [{"port": "http", "protocol": "TCP"}]},
                ],
            },
        )  # fmt: skip

    def monitor(self) -> Object:
        spec = self.spec.monitoring
        made = self._object(
            MONITORS, self.name,
            spec={
                "selector": {"matchLabels": {FLEET_LABEL: self.name}},
                "podMetricsEndpoints": [
                    {"port": "metrics", "path": "/metrics", "interval": spec.interval},
                    {"port": "http", "path": "/metrics", "interval": spec.interval},
                ],
                "podTargetLabels": [ROLE_LABEL, REVISION_LABEL],
            },
        )  # fmt: skip
        made["metadata"]["labels"] |= spec.labels
        return made

    def pool(self, role: str, replicas: int) -> Object:
        made = self._object(
            POOLS, f"{self.name}-{role}", role,
            spec={"fleet": self.name, "pool": role, "replicas": replicas},
        )  # fmt: skip
        return made

    def record(self, revision: str, number: int) -> Object:
        return self.recorded(revision, number, {"spec": shape(self.spec), "rendering": RENDERING})

    def recorded(self, revision: str, number: int, data: object) -> Object:
        """With what was written down before, which cannot be changed."""
        made = self._object(REVISIONS, f"{self.name}-{revision}", data=data, revision=number)
        made["metadata"]["labels"][REVISION_LABEL] = revision
        return made

    def routers(self) -> Object:
        """Of the image and model of the renderer's spec. Rolled by their Deployment: never fewer than now."""
        spec, router = self.spec, self.spec.router
        args = [
            *self._common("router-id"),
            f"--http.port={router.port}",
            f"--http.drain-limit-s={spec.drain_seconds}",
        ]
        volumes, mounts = self._volumes()
        if router.keys_secret:
            args.append("--http.keys-file=/etc/pdfleet/keys/keys.jsonl")
            volumes.append(_secret("keys", router.keys_secret, "keys.jsonl"))
            mounts.append({"name": "keys", "mountPath": "/etc/pdfleet/keys", "readOnly": True})
        if router.tls_secret:
            args += ["--http.tls-cert=/etc/pdfleet/tls/tls.crt", "--http.tls-key=/etc/pdfleet/tls/tls.key"]
            volumes.append(_secret("tls", router.tls_secret, "tls.crt", "tls.key"))
            mounts.append({"name": "tls", "mountPath": "/etc/pdfleet/tls", "readOnly": True})
        scheme = "HTTPS" if router.tls_secret else "HTTP"
        container = self._container("router", args, router, mounts, {"http": router.port})

        def ask(path: str, **more: int) -> Object:
            return {"httpGet": {"path": path, "port": "http", "scheme": scheme}, **more}

        container |= {
            "startupProbe": ask("/health", periodSeconds=2, failureThreshold=150),
            "readinessProbe": ask("/ready", periodSeconds=2, failureThreshold=2),
            "livenessProbe": ask("/health", periodSeconds=10, failureThreshold=6, timeoutSeconds=5),
            "lifecycle": {
                "preStop": {
                    "exec": {"command": ["python", "-c", f"import time; time.sleep({_ROUTER_WAITS_S})"]}
                }
            },
        }
        made = self._object(DEPLOYMENTS, f"{self.name}-router", "router")
        made["spec"] = {
            "replicas": router.replicas,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": selector(self.name, "router")},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {
                "metadata": {"labels": labels(self.name, "router")},
                "spec": self._pod(router, container, volumes, "router", _ROUTER_WAITS_S),
            },
        }
        return made

    def planner(self) -> list[Object]:
        """A process that may read and change this one fleet, and nothing else."""
        name = f"{self.name}-planner"
        rights = [
            {
                "apiGroups": [GROUP], "resources": [FLEETS.plural], "resourceNames": [self.name],
                "verbs": ["get", "patch"],
            }
        ]  # fmt: skip
        args = [
            f"--kubernetes={self.namespace}/{self.name}",
            # As long as the pod lives: `kubectl cp` it, and `python -m planner replay` decides again.
            "--decisions=/tmp/decisions.jsonl",
            # A pod keeps the role of its set: one that turned would be one stopped, and another's cold start.
            "--planner.turns=false",
            *self._control(),
        ]
        volumes, mounts = self._volumes(model=False)
        placed = Placed(settings=self.spec.planner.settings)
        container = self._container("planner", args, placed, mounts, {})
        pod = self._pod(Placed(topology_key=""), container, volumes, "planner", 0)
        pod |= {"serviceAccountName": name, "automountServiceAccountToken": True}
        deployment = self._object(DEPLOYMENTS, name, "planner")
        deployment["spec"] = {
            "replicas": 1,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": selector(self.name, "planner")},
            # Two for a moment do no harm: they choose a leader among themselves.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {"metadata": {"labels": labels(self.name, "planner")}, "spec": pod},
        }
        subject = {"kind": "ServiceAccount", "name": name, "namespace": self.namespace}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
        return [
            self._object(ACCOUNTS, name, "planner"),
            self._object(ROLES_OF, name, "planner", rules=rights),
            self._object(BINDINGS, name, "planner", roleRef=reference, subjects=[subject]),
            deployment,
        ]

    def workers(self, role: str, revision: str, replicas: int) -> Object:
        """Of the renderer's spec, which is that of the revision: Deployment, or LeaderWorkerSet of groups."""
        spec, pool = self.spec, self.spec.pool(role)
        args = [
            *self._common("worker-id"),
            f"--port={CONTROL_PORT}",
            f"--session-port={SESSION_PORT}",
            f"--chassis.drain-limit-s={spec.drain_seconds}",
            f"--chassis.revision={revision}",
            "--metrics.bind=0.0.0.0",
            f"--metrics.port={METRICS_PORT}",
        ]
        volumes, mounts = self._volumes()
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pool.shared_memory}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        ports = {"metrics": METRICS_PORT, "control": CONTROL_PORT, "sessions": SESSION_PORT}
        container = self._container(f"{role}_worker", args, pool, mounts, ports)
        container["resources"] = _resources(pool)
        ask = {"httpGet": {"path": "/metrics", "port": "metrics", "scheme": "HTTP"}}
        # No livenessProbe: a worker whose steps stop ends itself, and knows better than a page of HTTP.
        container |= {
            "startupProbe": {**ask, "periodSeconds": 2, "failureThreshold": _START_S // 2},
            "readinessProbe": {**ask, "periodSeconds": 5, "failureThreshold": 3, "timeoutSeconds": 3},
        }
        if pool.rdma is not None:
            container["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]
        own = {**labels(self.name, role), REVISION_LABEL: revision, "pdfleet.dev/worker": "true"}
        template = {
            "metadata": {"labels": own},
            "spec": self._pod(pool, container, volumes, role, 0),
        }
        made = self._object(
            DEPLOYMENTS if pool.nodes == 1 else GROUPS, self.workers_name(role, revision), role
        )
        made["metadata"]["labels"][REVISION_LABEL] = revision
        if pool.nodes == 1:
            made["spec"] = {
                "replicas": replicas,
                "revisionHistoryLimit": 0,
                "selector": {"matchLabels": {**selector(self.name, role), REVISION_LABEL: revision}},
                # A revision's template never changes; new ones are Deployments of their own.
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
                "template": template,
            }
        else:
            made["spec"] = {
                "replicas": replicas,
                "startupPolicy": "LeaderCreated",
                "rolloutStrategy": {"type": "RollingUpdate"},
                "leaderWorkerTemplate": {
                    "size": pool.nodes,
                    "restartPolicy": "RecreateGroupOnPodRestart",
                    "leaderTemplate": template,
                    "workerTemplate": template,
                },
            }
        return made

    def _common(self, id_flag: str) -> list[str]:
        model = self.spec.model
        return [
            f"--model={model.path}",
            f"--served-model-name={model.name}",
            f"--{id_flag}=$(POD_NAME)",
            *self._control(),
        ]

    def _control(self) -> list[str]:
        spec = self.spec
        return [
            f"--control.fleet={self.fleet_name}",
            f"--control.etcd={spec.control.etcd}",
            f"--control.nats={spec.control.nats}",
            "--control.bind=0.0.0.0",
            "--control.advertise=$(POD_IP)",
            *(
                ["--control.etcd-ca=/etc/pdfleet/ca/ca.crt", "--control.nats-ca=/etc/pdfleet/ca/ca.crt"]
                if spec.control.ca_secret
                else []
            ),
            *(
                [
                    f"--control.tls-ca={_TLS}/ca.crt",
                    f"--control.tls-cert={_TLS}/tls.crt",
                    f"--control.tls-key={_TLS}/tls.key",
                    # Not the pods' addresses, which nobody knows before they are there.
                    f"--control.tls-name={spec.control.tls_name or self.tls_name}",
                ]
                if spec.control.tls_secret
                else []
            ),
        ]

    def _volumes(self, model: bool = True) -> tuple[list[Object], list[Object]]:
        spec = self.spec
        volumes: list[Object] = [{"name": "tmp", "emptyDir": {}}]
        mounts: list[Object] = [{"name": "tmp", "mountPath": "/tmp"}]
        if model and spec.model.volume:
            volumes.append({"name": "model", **spec.model.volume})
            mounts.append({"name": "model", "mountPath": spec.model.mount_path, "readOnly": True})
        if spec.control.ca_secret:
            volumes.append(_secret("ca", spec.control.ca_secret, "ca.crt"))
            mounts.append({"name": "ca", "mountPath": "/etc/pdfleet/ca", "readOnly": True})
        if spec.control.tls_secret:
            volumes.append(_secret("fleet-tls", spec.control.tls_secret, "tls.crt", "tls.key", "ca.crt"))
            mounts.append({"name": "fleet-tls", "mountPath": _TLS, "readOnly": True})
        return volumes, mounts

    def _container(
        self, module: str, args: list[str], placed: Placed, mounts: list[Object], ports: dict[str, int]
    ) -> Object:
        spec = self.spec
        chosen = [f"--{name}={value}" for name, value in sorted(placed.settings.items())]
        container: Object = {
            "name": "pdfleet",
            "image": spec.image,
            "imagePullPolicy": spec.image_pull_policy,
            # No command: the image's own entry point stays process 1 and passes SIGTERM on, also to a process
            # that still imports, which as number 1 would not hear it.
            "args": ["python", "-m", module, *args, *chosen],
            "env": _environment(placed),
            "volumeMounts": mounts,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
        }
        if ports:
            container["ports"] = [
                {"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()
            ]
        if spec.control.credentials_secret:
            container["envFrom"] = [{"secretRef": {"name": spec.control.credentials_secret}}]
        if placed.resources:
            container["resources"] = placed.resources
        return container

    def _pod(
        self, placed: Placed, container: Object, volumes: list[Object], component: str, before_s: int
    ) -> Object:
        spec = self.spec
        pod: Object = {
            "serviceAccountName": self.name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": before_s + spec.drain_seconds + _BESIDE_DRAIN_S,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": volumes,
        }
        if placed.topology_key:
            pod["topologySpreadConstraints"] = [
                {
                    "maxSkew": 1,
                    "topologyKey": placed.topology_key,
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": selector(self.name, component)},
                }
            ]
        if placed.priority_class_name:
            pod["priorityClassName"] = placed.priority_class_name
        if placed.node_selector:
            pod["nodeSelector"] = placed.node_selector
        if placed.tolerations:
            pod["tolerations"] = placed.tolerations
        if placed.affinity:
            pod["affinity"] = placed.affinity
        if spec.image_pull_secrets:
            pod["imagePullSecrets"] = [{"name": name} for name in spec.image_pull_secrets]
        return pod


def _secret(volume: str, name: str, *keys: str) -> Object:
    """With keys named, a node says which one is missing, and starts nothing that would crash without it."""
    items = [{"key": key, "path": key} for key in keys]
    return {"name": volume, "secret": {"secretName": name, "items": items}}


def _environment(placed: Placed) -> list[Object]:
    """Each name once, or the API server refuses the pod: the last one counts, as in a container. What flags
    refer to is the controller's."""
    own: list[Object] = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    found: dict[str, Object] = {"HOME": {"name": "HOME", "value": "/tmp"}}
    for one in placed.env:
        found[str(one.get("name", ""))] = one
    return [*own, *(one for name, one in found.items() if name not in ("POD_NAME", "POD_IP"))]


def _resources(pool: Pool) -> Object:
    """Extended resources are given as limits, and requested as much."""
    extended: dict[str, str] = {}
    if pool.gpus:
        extended[pool.gpu_resource] = str(pool.gpus)
    if pool.rdma is not None:
        extended[pool.rdma.resource] = str(pool.rdma.count)
    found: Object = {
        "requests": {**pool.resources.get("requests", {}), **extended},
        "limits": {**pool.resources.get("limits", {}), **extended},
    }
    return {
        **{key: value for key, value in pool.resources.items() if key not in found},
        **{key: value for key, value in found.items() if value},
    }
