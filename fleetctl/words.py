"""Words of the supervisor: its children, the counts that are wanted, and what it can do about them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fleet.targets import Desired, LastDecision


class Kind(StrEnum):
    ETCD = "etcd"
    NATS = "nats"
    ROUTER = "router"
    PLANNER = "planner"
    """Where the fleet is not scaled by hand."""
    PREFILL = "prefill"
    DECODE = "decode"


SERVERS = (Kind.ETCD, Kind.NATS)
WORKERS = (Kind.PREFILL, Kind.DECODE)


class Phase(StrEnum):
    STARTING = "starting"
    """Its process runs and does not serve yet."""
    READY = "ready"
    TURNING = "turning"
    """Drains to take another role, and counts as one of that role already."""
    DRAINING = "draining"
    """Leaves because an operator told it to; no longer counted."""
    STOPPING = "stopping"
    """Leaves because the supervisor told it to; no longer counted."""
    CRASHED = "crashed"
    """It has no process, and is started again when its back-off is over."""


class Closing(StrEnum):
    """How far the whole fleet is on its way down."""

    NO = "no"
    ORDERLY = "orderly"
    """Router, then workers, then NATS, then etcd; each has its time to drain."""
    HURRIED = "hurried"
    """All at once, and killed soon after."""


@dataclass(frozen=True, slots=True)
class Child:
    """One process slot of the supervisor. Times are seconds on the supervisor's clock."""

    name: str
    """Worker id, or the kind where there is only one."""
    kind: Kind
    phase: Phase
    since: float
    """When it entered its phase."""
    pid: int | None = None
    load: int | None = None
    """Requests running and waiting; None = unknown, which is not zero."""
    silent_since: float | None = None
    """Since when it neither shows its card nor answers; None = it does."""
    failures: int = 0
    """Crashes in a row; forgotten when it has run well. Sets the back-off."""
    unready: int = 0
    """Starts in a row that never became ready."""
    restarts: int = 0
    """All starts after the first."""
    retry_at: float = 0.0
    """When a crashed child is started again."""
    killed: bool = False
    """SIGKILL was sent; its exit is awaited."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits; those that end in `_s` in seconds."""

    back_off_s: float = 0.5
    """First pause after a crash; doubles with each further one."""
    back_off_most_s: float = 30.0
    well_s: float = 60.0
    """A child that was ready this long ran well: its next crash counts as the first."""
    ready_limit_s: float = 180.0
    """From start to ready: importing torch and loading weights on a busy machine, with room."""
    attempts: int = 3
    """Starts in a row that may fail before ready until it is called an error."""
    drain_limit_s: float = 75.0
    """From SIGTERM to exit of a worker or router: above their own drain limit, so that it is they who
    end late requests with an error."""
    server_limit_s: float = 10.0
    """From SIGTERM to exit of etcd and NATS."""
    hurry_limit_s: float = 3.0
    """From SIGTERM to exit once a second Ctrl-C came."""
    silent_limit_s: float = 30.0
    """A ready child that shows no card and answers nothing for this long is frozen: as good as dead."""
    log_bytes: int = 16 << 20
    """Longest log of a process: then it is kept once, and begun anew."""


@dataclass(frozen=True, slots=True)
class Start:
    kind: Kind
    name: str | None
    """Of the crashed child to start again; None = a new one."""
    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    """SIGTERM, to exactly this one: it drains."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Kill:
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Forget:
    """A slot without a process that is not needed any more."""

    name: str
    why: str


Action = Start | Stop | Kill | Forget


@dataclass(frozen=True, slots=True)
class Decision:
    actions: tuple[Action, ...]
    wake_at: float | None
    """When time alone can change the decision."""


@dataclass(frozen=True, slots=True)
class ChildRecord:
    """A child as the state file tells of it, for other commands and for the next supervisor."""

    name: str
    kind: Kind
    phase: Phase
    pid: int | None
    born: str | None
    """Tells this process from a later one with the same pid."""
    restarts: int
    log: str
    note: str
    """What was last said about it."""


@dataclass(frozen=True, slots=True)
class FleetState:
    """The state file of one supervised fleet."""

    fleet: str
    pid: int
    """Of the supervisor."""
    born: str
    model: str
    etcd: str
    nats: str
    router: str
    """Its URL, without `/v1`."""
    ready: bool
    """Whether a request could be served when this was written."""
    children: tuple[ChildRecord, ...]


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker as the operator sees it. None = unknown."""

    id: str
    role: str
    state: str
    pid: int | None = None
    host: str | None = None
    address: str | None = None
    """Of its control server."""
    sessions: str | None = None
    """Where it takes sessions of routers."""
    metrics: str | None = None
    """Where Prometheus reads its figures."""
    model: str | None = None
    running: int | None = None
    waiting: int | None = None
    queued_tokens: int | None = None
    blocks_free: int | None = None
    blocks_total: int | None = None
    counters: dict[str, int] | None = None
    restarts: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class RouterRow:
    id: str
    url: str
    state: str
    """`ready` means that a request could be served now."""
    pid: int | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class ServerRow:
    address: str
    state: str
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class FleetPicture:
    """All of a fleet at one moment, as `status` and the live view show it."""

    fleet: str
    model: str
    workers: tuple[WorkerRow, ...]
    routers: tuple[RouterRow, ...]
    desired: Desired | None
    etcd: ServerRow
    nats: ServerRow | None
    supervisor: int | None
    """Its pid; None when nobody supervises this fleet here."""
    decision: LastDecision | None = None
    """The planner's last one; None: there never was one."""
