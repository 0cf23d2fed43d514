"""What a cluster needs before its first fleet: definitions, the controller, its rights, priorities. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.controller.crd import definitions
from deploy.controller.render import CONTROLLER, METRICS_PORT
from fleet.cluster import GROUP, Object

NAMESPACE = "pdfleet-system"
_READ = ["get", "list", "watch"]
_KEEP = [*_READ, "create", "patch", "delete"]


def _rule(group: str, resources: Sequence[str], verbs: Sequence[str]) -> Object:
    return {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}


RULES: list[Object] = [
    _rule(GROUP, ["inferencefleets"], [*_READ, "patch"]),
    _rule(GROUP, ["inferencefleets/status", "fleetpools/status"], ["patch"]),
    # OpenShift and others ask for it of who sets owner references that block.
    _rule(GROUP, ["inferencefleets/finalizers"], ["update"]),
    _rule(GROUP, ["fleetpools"], _KEEP),
    _rule("apps", ["deployments", "controllerrevisions"], _KEEP),
    _rule("leaderworkerset.x-k8s.io", ["leaderworkersets"], _KEEP),
    _rule("", ["services", "serviceaccounts"], _KEEP),
    _rule("policy", ["poddisruptionbudgets"], _KEEP),
    _rule("networking.k8s.io", ["networkpolicies"], _KEEP),
    _rule("monitoring.coreos.com", ["podmonitors"], _KEEP),
    # For the planner of a fleet: it gives no right that it has not itself.
    _rule("rbac.authorization.k8s.io", ["roles", "rolebindings"], _KEEP),
    _rule("", ["pods"], ["list", "watch", "patch"]),
    # What nodes say of pods that do not start stands in events only; what they name is not to be read.
    _rule("", ["events"], ["list", "create", "patch"]),
]
"""All that the controller may do, in any namespace; no Secrets, no exec, no nodes."""


def installation(
    image: str, namespace: str = NAMESPACE, replicas: int = 2, pull_secrets: Sequence[str] = ()
) -> list[Object]:
    """In the order in which they are to be applied. `pull_secrets`: names, to bring the image with."""
    labels = {"app.kubernetes.io/name": CONTROLLER, "app.kubernetes.io/part-of": "pdfleet"}

    def one(api: str, kind: str, name: str, spaced: bool = True, **parts: object) -> Object:
        meta: Object = {"name": name, "labels": labels}
        if spaced:
            meta["namespace"] = namespace
        return {"apiVersion": api, "kind": kind, "metadata": meta, **parts}

    deployment = _deployment(image, labels, namespace, replicas)
    if pull_secrets:
        deployment["template"]["spec"]["imagePullSecrets"] = [{"name": name} for name in pull_secrets]
    rbac = "rbac.authorization.k8s.io"
    subject = [{"kind": "ServiceAccount", "name": CONTROLLER, "namespace": namespace}]
    return [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {
                "name": namespace,
                "labels": {**labels, "pod-security.kubernetes.io/enforce": "restricted"},
            },
        },
        *definitions(),
        one("v1", "ServiceAccount", CONTROLLER),
        one(f"{rbac}/v1", "ClusterRole", CONTROLLER, False, rules=RULES),
        one(
            f"{rbac}/v1", "ClusterRoleBinding", CONTROLLER, False,
            roleRef={"apiGroup": rbac, "kind": "ClusterRole", "name": CONTROLLER},
            subjects=subject,
        ),
        one(
            f"{rbac}/v1", "Role", CONTROLLER,
            rules=[_rule("coordination.k8s.io", ["leases"], ["get", "create", "update"])],
        ),
        one(
            f"{rbac}/v1", "RoleBinding", CONTROLLER,
            roleRef={"apiGroup": rbac, "kind": "Role", "name": CONTROLLER},
            subjects=subject,
        ),
        *(_role(verb, verbs) for verb, verbs in (("view", _READ), ("edit", [*_KEEP, "update"]))),
        *_priorities(),
        one(
            "policy/v1", "PodDisruptionBudget", CONTROLLER,
            spec={"maxUnavailable": 1, "selector": {"matchLabels": labels}},
        ),
        one("apps/v1", "Deployment", CONTROLLER, spec=deployment),
    ]  # fmt: skip


def _role(name: str, verbs: Sequence[str]) -> Object:
    """So that whoever may view or edit a namespace may do so with its fleets."""
    resources = ["inferencefleets", "fleetpools", "fleetpools/scale"]
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {
            "name": f"pdfleet-{name}",
            "labels": {f"rbac.authorization.k8s.io/aggregate-to-{name}": "true"},
        },
        "rules": [_rule(GROUP, resources, verbs)],
    }


def _priorities() -> list[Object]:
    """To be named in `priorityClassName`: a decode worker's loss breaks streams, a prefill worker's costs a
    prompt's time."""
    return [
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": f"pdfleet-{role}"},
            "value": value,
            "description": f"{role} of pdfleet fleets",
        }
        for role, value in (("prefill", 100_000), ("decode", 110_000), ("router", 120_000))
    ]


def _ask(path: str, **more: int) -> Object:
    return {"httpGet": {"path": path, "port": "metrics", "scheme": "HTTP"}, **more}


def _deployment(image: str, labels: dict[str, str], namespace: str, replicas: int) -> Object:
    return {
        "replicas": replicas,
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": labels},
            "spec": {
                "serviceAccountName": CONTROLLER,
                "terminationGracePeriodSeconds": 30,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 10001,
                    "runAsGroup": 10001,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [
                    {
                        "name": "controller",
                        "image": image,
                        "args": [
                            "python",
                            "-m",
                            "deploy.controller",
                            f"--lease-namespace={namespace}",
                            "--identity=$(POD_NAME)",
                            "--metrics.bind=0.0.0.0",
                            f"--metrics.port={METRICS_PORT}",
                        ],
                        "ports": [{"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"}],
                        "startupProbe": _ask("/live", periodSeconds=2, failureThreshold=60),
                        "livenessProbe": _ask(
                            "/live", periodSeconds=10, failureThreshold=6, timeoutSeconds=5
                        ),
                        "readinessProbe": _ask(
                            "/ready", periodSeconds=5, failureThreshold=3, timeoutSeconds=3
                        ),
                        "env": [
                            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                            {"name": "HOME", "value": "/tmp"},
                        ],
                        "resources": {
                            "requests": {"cpu": "50m", "memory": "128Mi"},
                            "limits": {"memory": "512Mi"},
                        },
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "readOnlyRootFilesystem": True,
                            "capabilities": {"drop": ["ALL"]},
                        },
                        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                    }
                ],
                "volumes": [{"name": "tmp", "emptyDir": {}}],
            },
        },
    }


def example(
    image: str,
    name: str = "demo",
    model: str = "smollm2",
    served: str = "smollm2",
    pull_secrets: Sequence[str] = (),
    etcd: str = "etcd:2379",
    nats: str = "nats://nats:4222",
) -> Object:
    """A fleet of one prefill and one decode worker, to begin with."""
    return {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": name},
        "spec": {
            "image": image,
            **({"imagePullSecrets": list(pull_secrets)} if pull_secrets else {}),
            "model": {"path": model, "name": served},
            "control": {"etcd": etcd, "nats": nats},
            "prefill": {"replicas": 1},
            "decode": {"replicas": 1},
        },
    }
