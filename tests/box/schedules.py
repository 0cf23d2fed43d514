"""What a fault schedule is: a fleet, its clients, and what befalls them, all drawn from one seed."""

from __future__ import annotations

from dataclasses import dataclass

from engine.grammar import Vocabulary
from engine.latency_runner import LatencyModel
from engine.settings import EngineSettings
from fleet.request import Constraint, ConstraintKind, Request
from kv_transfer.settings import TransferSettings
from router.settings import CostSettings

SAFE_WORKER, SAFE_ROUTER = "decode-0", "router"
"""Spared by everything in a schedule that is `safe`: with them alone every request can be served."""
LATENCY = LatencyModel(base_s=0.03, per_prompt_token_s=0.001, per_decode_s=0.001, per_context_token_s=1e-6)
DEADLINE_S = 25.0
ROOMY, TIGHT, OUTGROWN = 160, 26, 12
"""Blocks of 4 tokens each; the longest sequence that must finish has 60 + 40 tokens."""
END = 1001
VOCABULARY = Vocabulary(
    (*(bytes([token]) if token < 128 else b"" for token in range(END)), b""), (END,), END + 1
)
"""Of ASCII; above it tokens that prompts hold and nothing writes."""
CONSTRAINTS = (
    Constraint(ConstraintKind.REGEX, r"([a-f]{4}-){2,20}[0-9]{3}"),
    Constraint(ConstraintKind.GRAMMAR, 'root ::= "yes" | "no" | "perhaps"'),
)


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    who: tuple[str, ...]
    lasts: float
    """Seconds until it is undone."""
    at: float = 0.0
    """Seconds after the fleet is up; or, with `link`, the earliest."""
    link: str = ""
    """With the `count`-th message of this link, if it comes to that."""
    of: str = ""
    """Only messages from or to this worker count."""
    after: float = 0.0
    """Seconds after that message was sent."""
    count: int = 0
    detail: str = ""
    amount: float = 0.0


@dataclass(frozen=True, slots=True)
class Client:
    at: float
    router: str
    request: Request
    stop_after: int | None = None
    """Leaves after so many tokens."""
    vanish_after: float | None = None
    """Its connection breaks after so many seconds."""


@dataclass(frozen=True, slots=True)
class Schedule:
    seed: int
    prefill: int
    decode: int
    routers: int
    blocks: int
    bytes_s: float
    """Of the links that KV takes: a block of 360 KiB in 2 or in 20 ms."""
    engine: EngineSettings
    transfer: TransferSettings
    cost: CostSettings
    rough: bool
    """Nothing but leases and quarantine keep wrong KV out: no checksums, slow links, short leases."""
    clocks: dict[str, float]
    clients: tuple[Client, ...]
    faults: tuple[Fault, ...]
    safe: bool
    """One decode worker and one router are spared, and have room: what is asked there must finish."""
    outgrows: bool = False
    """A pool is smaller than some sequence will be."""
    borrows: bool = False
    """Workers bring from any other what it caches."""
    rush: bool = False
    """More comes at once than there is room for; pools are looked at all the while."""

    @property
    def workers(self) -> tuple[str, ...]:
        return (
            *(f"prefill-{n}" for n in range(self.prefill)),
            *(f"decode-{n}" for n in range(self.decode)),
        )

    @property
    def router_names(self) -> tuple[str, ...]:
        return ("router", *(f"router-{n}" for n in range(1, self.routers)))
