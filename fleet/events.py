"""What a worker tells everybody: changes of its KV blocks and its load; and a router the other routers: what
it sends where. At most once, so numbered."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from fleet.ids import Incarnation, RequestId, WorkerId


class Tier(StrEnum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class BlocksStored(Struct, frozen=True):
    """These blocks can be hit now. `hashes` are `short()` names, in chain order."""

    hashes: tuple[int, ...]
    tier: Tier = Tier.DEVICE


class BlocksDropped(Struct, frozen=True):
    """The last copy at this tier is gone."""

    hashes: tuple[int, ...]
    tier: Tier = Tier.DEVICE


class Cleared(Struct, frozen=True):
    """Nothing is cached any more."""


KvEvent = BlocksStored | BlocksDropped | Cleared


class KvEvents(Struct, frozen=True):
    """One engine step's changes; numbered without gaps within one incarnation, from 1."""

    worker: WorkerId
    incarnation: Incarnation
    sequence: int
    events: tuple[KvEvent, ...]


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """A part of the worker's table, as of event `sequence`."""

    worker: WorkerId
    incarnation: Incarnation
    sequence: int
    hashes: tuple[int, ...]
    """On the device."""
    host: tuple[int, ...] = ()
    disk: tuple[int, ...] = ()
    part: int = 0
    parts: int = 1
    """All of them, asked for in order and followed by the events after the first, are the whole table."""


@dataclass(frozen=True, slots=True)
class KvDigest:
    """Cheap proof that an index equals the worker's table: count and xor of the 64-bit names, each tier's
    turned by some bits (`KvTable.xor`)."""

    sequence: int
    blocks: int
    xor: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's state of work, published a few times a second and on change. None is unknown, never zero."""

    worker: WorkerId
    incarnation: Incarnation
    state: str
    """A `MemberState` value."""
    running: int
    """Sequences in the batch."""
    waiting: int
    """Sequences queued, pulls included."""
    queued_tokens: int
    """Prompt tokens accepted and not computed yet."""
    blocks_total: int
    blocks_free: int
    """Free or evictable at once."""
    kv: KvDigest
    prefill_tokens_s: float | None = None
    """Measured speed of prompt computation."""
    decode_step_s: float | None = None
    """Measured time of a recent pure decode step."""
    decode_batch: float | None = None
    """Sequences in those steps, on average."""
    pull_bytes_s: float | None = None
    """Measured bandwidth of recent pulls to this worker."""
    streams: tuple[str, ...] = ()
    """Ids of the requests held, so that no router counts a phantom."""
    counters: dict[str, int] = field(default_factory=dict)
    """Totals since start: see `docs/counters.md`; shown by `fleetctl status --json`."""
    stalled_s: float = 0.0
    """Seconds for which a step has been owed and none has ended; 0 while none is owed."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A request that a router has sent to a worker."""

    worker: WorkerId
    incarnation: Incarnation
    request: RequestId
    tokens: int
    """Prompt tokens to compute there."""
    blocks: int
    """To find room for there."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What was sent there is over, however it ended."""

    worker: WorkerId
    request: RequestId


@dataclass(frozen=True, slots=True)
class KeyUse:
    """What one API key has asked of a router in this life of it. Totals, so that none is lost for good."""

    key: str
    """First digits of its hash (`fleet.api_keys.ApiKey.short`)."""
    running: int
    """Requests that run now."""
    requests: int
    """Taken on since the router's start."""
    tokens: int
    """Of prompts and answers since then."""


@dataclass(frozen=True, slots=True)
class RouterMoves:
    """What one router did of late, for the others to count before the workers report it; numbered without
    gaps within one life of it, from 1."""

    router: str
    """Its name, to be shown."""
    life: Incarnation
    sequence: int
    whole: bool
    """`sent` is all that no report counts, as far as this router knows: nothing else of it is under way."""
    sent: tuple[Dispatch, ...]
    settled: tuple[Settled, ...]
    keys: tuple[KeyUse, ...] = ()
    """Those whose use has changed; if `whole`, all others run nothing there."""


def moves_subject(fleet: str, life: str = "*") -> str:
    return f"pdfleet.{fleet}.moves.{life}"


def load_subject(fleet: str, worker: str = "*") -> str:
    return f"pdfleet.{fleet}.load.{worker}"


def kv_subject(fleet: str, worker: str = "*") -> str:
    return f"pdfleet.{fleet}.kv.{worker}"
