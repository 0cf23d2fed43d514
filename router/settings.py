"""Settings of the router's own part: what a choice weighs, how long each phase may last, how much is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum

from fleet.objectives import CLASS_NAME, CLASSES, STANDARD, Objectives


def _positive(settings: object, *names: str) -> None:
    for name in names:
        if getattr(settings, name) <= 0:
            raise ValueError(f"{name} must be above 0, not {getattr(settings, name)}")


def _not_negative(settings: object) -> None:
    for item in fields(settings):  # type: ignore[arg-type]  # every caller is a dataclass
        if getattr(settings, item.name) < 0:
            raise ValueError(f"{item.name} must not be negative, not {getattr(settings, item.name)}")


@dataclass(frozen=True, slots=True)
class UnknownSettings:
    """What is supposed of a worker that has not said it; each a plain guess, none of them zero. Of speeds it
    holds until any worker of that role and model has measured its own: then those are supposed."""

    queued_tokens: int = 1024
    """Prompt tokens queued at a worker whose load is unknown: it is taken when the others are busy."""
    sequences: int = 4
    """Sequences at a worker whose load is unknown."""
    prefill_tokens_s: float = 2000.0
    """Prompt tokens a second, until a worker has measured its own."""
    decode_step_s: float = 0.03
    """Seconds of a decode step, until a worker has measured its own."""
    pull_bytes_s: float = 1e9
    """Bytes a second of KV transfer, until a worker has measured its own."""
    fresh_s: float = 10.0
    """Seconds without work after which what a worker measured is old news, and it is supposed to be as others
    of its role and model are: one that was slow in a bad moment would else be avoided for ever, and never
    show that it is over. One that is slow indeed gets a request more than it should in so many seconds."""

    def __post_init__(self) -> None:
        _positive(self, *(item.name for item in fields(self)))


@dataclass(frozen=True, slots=True)
class CostSettings:
    """Weights of a choice. All costs are expected seconds, so the weights are few."""

    handoff_s: float = 0.003
    """Seconds that a hand-off adds besides the bytes: one more dispatch, a reservation, a pull's set-up."""
    local_prefill_tokens: int = 32
    """Uncached prompt tokens up to which a decode worker may compute a prompt itself; 0: only when no
    prefill worker can, or when those are much slower."""
    local_advantage: float = 2.0
    """How many times sooner a decode worker must be done with a longer prompt for it to stay there."""
    borrow_s: float = 0.005
    """Seconds that bringing a cached beginning from another worker adds besides the bytes."""
    borrow_advantage: float = 2.0
    """How many times sooner that must be than computing it; 0: it is never brought."""
    disturbance: float = 0.1
    """Share of a local prompt's computing time by which each sequence decoding there is held up."""
    crowding: float = 0.02
    """How much longer a decode step becomes for each sequence more than in the measured ones."""
    horizon_tokens: int = 32
    """Tokens of the answer over which decode workers are compared: more weighs speed, fewer the start."""
    memory_s: float = 1.0
    """Seconds that a sequence without any free block is expected to wait; in proportion for a part."""
    tie_s: float = 0.002
    """Choices closer than this are equal, and spread."""
    tie_share: float = 0.1
    """So are those closer than this share of the request's own work: measured speeds of equals differ."""
    herd_share: float = 0.25
    """For each router whose choices are not seen here, the share of a request like this one that it may have
    sent: the more of them there are, the further apart choices may lie and still be spread. Those that are
    heard over NATS need none: what they send is counted."""

    def __post_init__(self) -> None:
        _not_negative(self)


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """How much the router remembers of which worker caches what."""

    max_blocks: int = 4_000_000
    """Blocks in the index, 30 to 70 bytes each, 100 without a C compiler; one that three workers hold counts
    thrice. Beyond, the largest tables lose their oldest, and that is counted."""
    max_hints: int = 200_000
    """Blocks remembered as sent to workers whose own table is not known."""
    hint_s: float = 300.0
    """Seconds for which such a block is believed to be there, at least; twice that at most."""
    told_s: float = 60.0
    """Seconds within which a worker is to tell of a prompt's first block that it was sent. One that did not,
    three times in a row, is reported: it caches nothing, or names blocks otherwise than this router."""
    max_tail: int = 4096
    """Event messages kept for one worker while its snapshot is under way."""

    def __post_init__(self) -> None:
        _positive(self, *(item.name for item in fields(self)))


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """How long each phase of a request may last, and how often it is tried again."""

    max_requests: int = 4096
    """Requests in this router at once; more are refused with 429."""
    retry_after_s: float = 1.0
    """What a refused client is told to wait, seconds; and after how long a request that waits for a worker
    asks those again that failed it."""
    worker_wait_s: float = 0.0
    """Seconds for which a request waits for a worker when there is none; 0 fails at once with 503."""
    scale_wait_s: float = 300.0
    """The same while a planner acts, which brings workers for requests that wait: time for a cold start."""
    max_held: int = 512
    """Requests that may wait for a first worker; beyond, they are refused with 429."""
    held_retry_s: float = 10.0
    """What those are told to wait, seconds."""
    resume_wait_s: float = 30.0
    """Seconds for which a request that lost its worker, or has tokens already, waits for another: its client
    cannot ask for the rest. Time for a worker to be started again, or to be reached again."""
    first_token_timeout_s: float = 120.0
    """Seconds from a dispatch to its first token; beyond, the worker is lost for this request."""
    token_timeout_s: float = 30.0
    """Seconds between two tokens; beyond, the worker is lost for this request."""
    max_failovers: int = 3
    """How often one request may lose its worker, be it the same one again, before it fails. Refusals do not
    count."""
    early_handoff: bool = True
    """Whether a decode worker brings the KV of a prompt that takes several steps while it is still being
    computed. It takes room there sooner; the second token comes sooner by what the pull would have taken."""
    lease_margin_s: float = 1.0
    """Seconds that a lease must have left for its KV to be offered to a second decode worker."""
    sessions: int = 100_000
    """Conversations of which it is remembered where their last turn went (`x-session-id`), about 500 bytes
    each; the oldest go first."""
    records: int = 2048
    """Hand-off records kept for explaining; the oldest go first."""

    def __post_init__(self) -> None:
        _not_negative(self)
        _positive(self, "max_requests", "max_held", "first_token_timeout_s", "token_timeout_s", "records")


class AdmissionMode(StrEnum):
    OFF = "off"
    """Whatever comes is sent to a worker at once; its queue is the only one."""
    OBSERVE = "observe"
    """So it is, but what admission would have done stands in the record."""
    ENFORCE = "enforce"


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Which requests wait at the router, in which order, and which are refused: see docs/objectives.md."""

    mode: AdmissionMode = AdmissionMode.ENFORCE
    """Enforced by default: while there is room nothing waits, and without it a queue at the router, which
    knows objectives and tenants, is better than one at a worker, which does not."""
    default_class: str = STANDARD
    """Class of requests whose key or header names none."""
    ahead_s: float = 0.5
    """Seconds of queued prompts at a worker up to which it is sent more; at most a quarter of the request's
    TTFT objective. Twice the time between two load reports: less leaves workers idle or in odd batches, and
    each second more is out of the router's hands."""
    least_running: int = 4
    """Sequences that a decode worker is given whatever time per token they get: fewer would waste it."""
    margin: float = 0.1
    """Share of an objective kept in reserve for what forecasts miss: who is served last in time must still
    be in time."""
    max_queued: int = 2048
    """Requests that may wait here; beyond, one that would be late anyway, or of the lowest priority, is
    refused with 429."""
    max_wait_s: float = 120.0
    """Longest a request may wait here, seconds; then it is refused with 429."""
    aging_s: float = 10.0
    """Seconds of waiting after which a request of a lower priority gets its part of `aged_share`."""
    aged_share: float = 0.1
    """Share of the fleet that goes to requests so old, whatever is before them: nothing waits for ever."""
    target: float = 0.95
    """Share of requests that are to attain their objectives: what burn rates are measured against."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"{item.name} must not be negative, not {value}")
        _positive(self, "max_queued", "max_wait_s", "aging_s", "aged_share", "target")
        for name in ("margin", "aged_share", "target"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a share below 1 is needed")


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """How the router follows its workers."""

    load_s: float = 2.0
    """Seconds without a load report after which a worker is asked directly; thrice that: unknown."""
    snapshot_timeout_s: float = 5.0
    """Longest a worker may take to answer a question beside the path, seconds."""
    open_timeout_s: float = 5.0
    """Longest opening a session may take, seconds."""
    retry_min_s: float = 0.1
    """First pause before a session or a snapshot is tried again, seconds; doubled each time."""
    retry_max_s: float = 5.0
    """Longest such pause, seconds."""
    tick_s: float = 0.25
    """How often ages are looked at, seconds."""
    mass_share: float = 0.5
    """Workers that vanish from the registry at once, as a share of all, beyond which the registry is
    doubted and each is kept while its session lives."""

    def __post_init__(self) -> None:
        _positive(self, *(item.name for item in fields(self)))


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What routers of one fleet tell each other, so that each counts what the others send."""

    batch_s: float = 0.02
    """Least time between two messages of a router, seconds: the first goes at once, what follows within it
    goes together. The longest for which routers do not see each other's choices."""
    whole_s: float = 1.0
    """How often a router tells all that no worker has reported yet, seconds: what makes up for lost messages,
    and shows that it lives."""
    silent_s: float = 3.0
    """Seconds without a message after which a router counts as unseen, and nothing of it is counted."""
    grace_s: float = 1.0
    """Seconds for which a worker's reports may not know what another router says it sent there: it may still
    be on its way. Then it is not counted."""
    max_dispatches: int = 4096
    """Dispatches in one message, about 70 bytes each: what NATS takes, with room. The oldest are left out."""

    def __post_init__(self) -> None:
        _positive(self, *(item.name for item in fields(self)))


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Everything the router core takes; the ingress has its own."""

    unknown: UnknownSettings = field(default_factory=UnknownSettings)
    cost: CostSettings = field(default_factory=CostSettings)
    index: IndexSettings = field(default_factory=IndexSettings)
    flow: FlowSettings = field(default_factory=FlowSettings)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    objectives: Mapping[str, Objectives] = field(default_factory=lambda: dict(CLASSES))
    """Classes of requests, by name."""
    watch: WatchSettings = field(default_factory=WatchSettings)
    peers: PeerSettings = field(default_factory=PeerSettings)

    def __post_init__(self) -> None:
        for name in self.objectives:
            if not CLASS_NAME.fullmatch(name):
                raise ValueError(f"objectives: {name!r} is no name of a class")
        if self.admission.default_class not in self.objectives:
            raise ValueError(
                f"admission.default_class is {self.admission.default_class!r}; there are: "
                f"{', '.join(self.objectives)}"
            )
