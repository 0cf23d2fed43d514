"""Words: what an InferenceFleet and a FleetPool say. The CRDs are made from these classes alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

Count = Annotated[int, Meta(ge=0, le=10_000)]
Percent = Annotated[int, Meta(ge=0, le=100)]
Name = Annotated[str, Meta(max_length=253)]
Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$", max_length=32)]
Open = dict[str, Any]
"""Of Kubernetes' own: its schema is not repeated here, and the API server judges it in the pods."""


class Says(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Fields are camelCase in YAML; docstrings of `Meta` are what `kubectl explain` prints."""


class Rdma(Says, frozen=True):
    """A resource that gives a pod access to RDMA."""

    resource: Annotated[str, Meta(description="Extended resource of the RDMA device plugin.")] = "rdma/hca"
    count: Annotated[int, Meta(ge=1, le=64, description="Devices of each node's pod.")] = 1


class Placed(Says, frozen=True):
    """Where pods go, and what they may use."""

    resources: Annotated[Open, Meta(description="Requests and limits of a pod, besides gpus and rdma.")] = (
        field(default_factory=dict)
    )
    node_selector: Annotated[dict[str, str], Meta(description="Labels that a node must have.")] = field(
        default_factory=dict
    )
    tolerations: Annotated[
        list[Open], Meta(max_length=64, description="Taints of nodes that are put up with.")
    ] = field(default_factory=list)
    affinity: Annotated[Open, Meta(description="Affinity of the pods.")] = field(default_factory=dict)
    topology_key: Annotated[
        Name, Meta(description="Node label over whose values pods are spread; empty: not.")
    ] = "kubernetes.io/hostname"
    priority_class_name: Annotated[
        Name, Meta(description="PriorityClass of the pods; empty: the cluster's.")
    ] = ""
    env: Annotated[
        list[Open], Meta(max_length=128, description="Variables, as in a container; valueFrom as well.")
    ] = field(default_factory=list)
    settings: Annotated[
        dict[str, Annotated[str, Meta(max_length=4096)]],
        Meta(
            description="Settings of the process by name (engine.max-batch), as --help lists them. Those of "
            "addresses, ports and names are the controller's."
        ),
    ] = field(default_factory=dict)


class Pool(Placed, frozen=True):
    """The workers of one role."""

    replicas: Annotated[
        Count, Meta(description="How many workers there are to be. Leave it out where something else scales.")
    ] = 1
    min_replicas: Annotated[
        Count, Meta(description="The planner and scaling of the FleetPool stay above.")
    ] = 0
    max_replicas: Annotated[
        Count, Meta(description="The planner and scaling of the FleetPool stay below.")
    ] = 10_000
    nodes: Annotated[
        int,
        Meta(ge=1, le=256, description="Pods of one worker. Above 1: a LeaderWorkerSet, for tensor "
             "parallelism over several nodes."),
    ] = 1  # fmt: skip
    gpus: Annotated[int, Meta(ge=0, le=64, description="GPUs of each pod.")] = 0
    gpu_resource: Annotated[Name, Meta(description="Extended resource that a GPU is.")] = "nvidia.com/gpu"
    rdma: Annotated[Rdma | None, Meta(description="RDMA devices of each pod.")] = None
    shared_memory: Annotated[Quantity, Meta(description="Most that a pod may use of /dev/shm.")] = "1Gi"


class Routers(Placed, frozen=True):
    """The ingress."""

    replicas: Annotated[Count, Meta(description="How many routers.")] = 1
    service_type: Annotated[
        Literal["ClusterIP", "NodePort", "LoadBalancer"], Meta(description="Of the Service before them.")
    ] = "ClusterIP"
    port: Annotated[int, Meta(ge=1, le=65535, description="Port of the Service and of the routers.")] = 8000
    keys_secret: Annotated[
        Name, Meta(description="Secret with the file keys.jsonl of `fleetctl key new`; empty: no keys.")
    ] = ""
    tls_secret: Annotated[
        Name, Meta(description="Secret of type kubernetes.io/tls for https; empty: http.")
    ] = ""


class Control(Says, frozen=True):
    """Where the fleet's processes meet. Both are brought by you or by the Helm chart."""

    etcd: Annotated[
        str,
        Meta(pattern=r"^[^:/,\s]+:[0-9]+(,[^:/,\s]+:[0-9]+)*$", max_length=1000,
             description="HOST:PORT of etcd; several: commas."),
    ]  # fmt: skip
    nats: Annotated[
        str,
        Meta(pattern=r"^(nats|tls)://[^\s]+$", max_length=2000, description="URL of NATS; several: commas."),
    ]  # fmt: skip
    credentials_secret: Annotated[
        Name, Meta(description="Secret with PDFLEET_CONTROL_ETCD_USER and _PASSWORD; empty: without.")
    ] = ""
    ca_secret: Annotated[
        Name, Meta(description="Secret with ca.crt; given, etcd and NATS are spoken to over TLS only.")
    ] = ""
    tls_secret: Annotated[
        Name,
        Meta(description="Secret with tls.crt, tls.key and ca.crt, as cert-manager makes it; given, routers "
             "and workers speak to each other over mutual TLS only. Read again when it is renewed."),
    ] = ""  # fmt: skip
    tls_name: Annotated[
        Name,
        Meta(description="DNS name that this certificate bears; empty: FLEET-workers.NAMESPACE.svc."),
    ] = ""  # fmt: skip


class Model(Says, frozen=True):
    """What is served."""

    path: Annotated[
        str,
        Meta(min_length=1, max_length=500, description="Folder, .gguf file or hub name, as seen in a pod."),
    ]
    name: Annotated[str, Meta(min_length=1, max_length=200, description="What clients call it.")]
    volume: Annotated[
        Open,
        Meta(description="A volume of a pod with the model, without its name: persistentVolumeClaim, image, "
             "hostPath …"),
    ] = field(default_factory=dict)  # fmt: skip
    mount_path: Annotated[str, Meta(max_length=500, description="Where that volume is mounted.")] = "/models"


class Budget(Says, frozen=True):
    """What a fleet may take."""

    gpus: Annotated[
        Annotated[int, Meta(ge=0, le=1_000_000)] | None,
        Meta(description="Most GPUs of both pools together, as wanted; surge comes on top. Unset: no limit."),
    ] = None


class Rollout(Says, frozen=True):
    """How one revision follows another."""

    paused: Annotated[bool, Meta(description="Stays between two steps; scaling goes on.")] = False
    max_surge_percent: Annotated[
        Percent,
        Meta(description="Of each pool, how many more there may be meanwhile; at least one if above 0."),
    ] = 25
    max_unavailable_percent: Annotated[
        Percent, Meta(description="Of each pool, how many may be missing meanwhile; at least one if above 0.")
    ] = 0
    progress_deadline_seconds: Annotated[
        int,
        Meta(ge=1, le=86_400, description="Longest between two workers getting ready, before it goes back."),
    ] = 600
    max_restarts: Annotated[
        int, Meta(ge=1, le=100, description="Restarts of a new pod that count as a failure of its revision.")
    ] = 3
    min_attainment_percent: Annotated[
        Percent,
        Meta(description="Share of requests served by its workers that met their objectives, under which it "
             "goes back where those served by others keep it; 0: not looked at."),
    ] = 0  # fmt: skip
    min_requests: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Requests of its own that have to be judged before attainment counts.",
        ),
    ] = 100


class Planning(Says, frozen=True):
    """Who decides the counts."""

    mode: Annotated[
        Literal["off", "advise", "act"],
        Meta(description="off: you; advise: you, and a planner says what it would do; act: the planner."),
    ] = "off"
    max_workers: Annotated[
        Annotated[int, Meta(ge=1, le=512)] | None,
        Meta(description="Most workers of both pools that the planner may want; unset: its own default."),
    ] = None
    settings: Annotated[
        dict[str, Annotated[str, Meta(max_length=4096)]],
        Meta(description="Settings of the planner by name (planner.scale-to-zero), as --help lists them."),
    ] = field(default_factory=dict)


class Monitoring(Says, frozen=True):
    """For Prometheus."""

    pod_monitor: Annotated[bool, Meta(description="Whether to make a PodMonitor (prometheus-operator).")] = (
        False
    )
    interval: Annotated[str, Meta(pattern=r"^[0-9]+s$", description="Between two scrapes.")] = "15s"
    labels: Annotated[
        dict[str, str], Meta(description="Labels by which your Prometheus finds PodMonitors.")
    ] = field(default_factory=dict)


class Network(Says, frozen=True):
    """Who reaches the pods."""

    policy: Annotated[bool, Meta(description="Whether to make a NetworkPolicy.")] = True
    metrics_from: Annotated[
        dict[str, str], Meta(description="Labels of namespaces that may read metrics; empty: all may.")
    ] = field(default_factory=dict)


class FleetSpec(Says, frozen=True):
    """A fleet: what it serves, of what, and how it changes."""

    image: Annotated[str, Meta(min_length=1, max_length=500, description="Of routers and workers.")]
    model: Annotated[Model, Meta(description="What is served.")]
    control: Annotated[Control, Meta(description="Where etcd and NATS are.")]
    prefill: Annotated[Pool, Meta(description="Workers that read prompts.")] = Pool()
    decode: Annotated[Pool, Meta(description="Workers that write tokens.")] = Pool()
    router: Annotated[Routers, Meta(description="The ingress.")] = Routers()
    budget: Annotated[Budget, Meta(description="What the fleet may take.")] = Budget()
    planner: Annotated[Planning, Meta(description="Who decides the counts.")] = Planning()
    rollout: Annotated[Rollout, Meta(description="How one revision follows another.")] = Rollout()
    drain_seconds: Annotated[
        int, Meta(ge=0, le=3600, description="Longest that a leaving process may finish what runs there.")
    ] = 60
    image_pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"], Meta(description="When the image is pulled.")
    ] = "IfNotPresent"
    image_pull_secrets: Annotated[
        list[Name], Meta(max_length=16, description="Names of Secrets to pull it with.")
    ] = field(default_factory=list)
    monitoring: Annotated[Monitoring, Meta(description="For Prometheus.")] = Monitoring()
    network: Annotated[Network, Meta(description="Who reaches the pods.")] = Network()

    def pool(self, role: str) -> Pool:
        return self.prefill if role == "prefill" else self.decode


class Condition(Says, frozen=True, omit_defaults=False):
    """As everywhere in Kubernetes."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: Annotated[str, Meta(max_length=32_768)]
    last_transition_time: str
    observed_generation: int = 0


class PoolCount(Says, frozen=True, omit_defaults=False):
    """One pool as it is."""

    wanted: int = 0
    replicas: int = 0
    """Workers that exist, of all revisions."""
    ready: int = 0
    updated: int = 0
    """Of the newest revision."""
    updated_ready: int = 0


class RolloutStatus(Says, frozen=True, omit_defaults=False):
    """How far the newest revision is."""

    step: int = 0
    steps: int = 0
    started: str = ""
    progressed: str = ""
    """When the last of its workers got ready."""
    best_ready: int = 0
    attained: int = -1
    """Of routers' counters when it started, of requests in which a worker of it had a part; -1: not known."""
    judged: int = -1
    others_attained: int = -1
    """Of requests in which none had."""
    others_judged: int = -1


class FleetStatus(Says, frozen=True, omit_defaults=False):
    """What the controller has seen and done."""

    observed_generation: int = 0
    revision: str = ""
    """The last one that served alone."""
    update_revision: str = ""
    """That of `spec`."""
    failed_revision: str = ""
    """One that was given up; it is not tried again until `spec` says another."""
    failed_reason: str = ""
    prefill: PoolCount = PoolCount()
    decode: PoolCount = PoolCount()
    routers_ready: int = 0
    rollout: RolloutStatus = RolloutStatus()
    conditions: list[Condition] = field(default_factory=list)


class FleetPoolSpec(Says, frozen=True):
    """A pool of a fleet, as something that can be scaled."""

    fleet: Annotated[str, Meta(min_length=1, max_length=253, description="InferenceFleet of this namespace.")]
    pool: Annotated[Literal["prefill", "decode"], Meta(description="Which of its pools.")]
    replicas: Annotated[Count, Meta(description="How many workers; carried over to the fleet.")] = 0


class FleetPoolStatus(Says, frozen=True, omit_defaults=False):
    """The pool as it is."""

    replicas: int = 0
    ready_replicas: int = 0
    selector: str = ""
    """Of its pods, for autoscalers."""
    agreed_replicas: int = -1
    """What fleet and pool last had in common; -1: nothing yet."""
    observed_generation: int = 0
