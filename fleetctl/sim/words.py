"""What is simulated, and what came of it."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.settings import EngineSettings
from fleet.goodput import Outcome
from fleet.objectives import CLASSES, Objectives
from fleetctl.sim.policies import Policy
from fleetctl.sim.speed import Speed
from planner.words import PlannerSettings


@dataclass(frozen=True, slots=True)
class Fault:
    """A worker or router fails at a moment, and is back later."""

    process: str
    """Its name: prefill-0, decode-3, router, router-1."""
    kind: str
    """crash (another life of it starts later) or freeze (it stands still, and goes on)."""
    at_s: float
    for_s: float
    """Until it is back, seconds; inf: never."""

    @classmethod
    def parse(cls, text: str) -> Fault:
        """`crash:prefill-0@30+10`, `freeze:decode-1@60+5`; without `+SECONDS` it does not come back."""
        found = re.fullmatch(r"(crash|freeze):([a-z]+(?:-\d+)?)@([\d.]+)(?:\+([\d.]+))?", text.strip())
        if found is None:
            raise ValueError(f"{text!r} is no fault: write crash:prefill-0@30+10 or freeze:decode-1@60+5")
        kind, process, at_s, for_s = found.groups()
        return cls(process, kind, float(at_s), float(for_s) if for_s else math.inf)


@dataclass(frozen=True, slots=True)
class PlannerOnly:
    """What `--planner-set` may set."""

    planner: PlannerSettings = field(default_factory=PlannerSettings)


@dataclass(frozen=True, slots=True)
class Scaling:
    """A planner decides how many workers there are."""

    planner: PlannerSettings = field(default_factory=PlannerSettings)
    budget: int | None = None
    """None: that of its settings."""
    cold_start_s: float = 60.0
    """From a worker's start until it serves."""
    decisions: Path | None = None
    """File for the log of decisions."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """What became of it."""

    counts: tuple[tuple[float, int, int, int], ...]
    """Whenever one of them changed: second, wanted prefill and decode workers, and workers that there were,
    starting and leaving ones included."""
    worker_s: float
    """Of all workers together, from their start to their end."""
    changes: int
    reversals: tuple[int, int]
    """Of the wanted prefill and decode workers: how often they turned from rising to falling or back."""
    turns: int
    """Workers that changed their role."""
    last_why: str
    wanted_s: tuple[float, float]
    """Wanted prefill and decode workers, added up over seconds."""

    def told(self) -> dict[str, Any]:
        return {
            "worker_hours": round(self.worker_s / 3600, 4),
            "changes": self.changes,
            "reversals": {"prefill": self.reversals[0], "decode": self.reversals[1]},
            "turns": self.turns,
            "counts": [[round(at, 1), *rest] for at, *rest in self.counts],
            "last_why": self.last_why,
        }


@dataclass(frozen=True, slots=True)
class Beside:
    """How much longer a step takes for as long as another worker of its host computes: what they share of
    memory, caches and power. Factors from 1 on; of GPUs, which share none of it, there are none."""

    prompt: float = 1.0
    """Of steps with prompts."""
    decode: float = 1.0
    """Of others."""

    def __post_init__(self) -> None:
        if not (1 <= self.prompt < math.inf and 1 <= self.decode < math.inf):
            raise ValueError(f"a worker beside others is not faster than alone: {self}")


@dataclass(frozen=True, slots=True)
class Setup:
    """A fleet to be simulated."""

    speed: Speed
    """Of every worker."""
    kv_bytes: float
    """Of one token, as it travels."""
    kv_tokens: int
    """Tokens for whose KV a worker has room."""
    prefill: int = 1
    """0: aggregated, decode workers compute prompts too."""
    decode: int = 1
    routers: int = 1
    policy: Policy = Policy.PRECISE
    admission: str = "enforce"
    """off, observe or enforce: `router.settings.AdmissionMode`."""
    objectives: Mapping[str, Objectives] = field(default_factory=lambda: dict(CLASSES))
    default_class: str = "standard"
    """Of requests that name none."""
    block_size: int = 64
    """Tokens a KV block. Larger than the engine's default: long prompts cost the simulator time by the
    block."""
    max_batch: int = 256
    step_tokens: int = 8192
    """Chunk budget of prefill workers' steps."""
    decode_step_tokens: int = 1024
    """Of decode workers' steps, in which prompts are computed beside running streams."""
    max_tokens: int = 1 << 17
    """Longest sequence."""
    link_bytes_s: float = 50e9
    """Of each host's link in each direction: 400 Gbit/s."""
    local_bytes_s: float = 200e9
    """Between workers of one host."""
    workers_per_host: int = 8
    link_latency_s: float = 20e-6
    beside: Beside = Beside()
    faults: tuple[Fault, ...] = ()
    scaling: Scaling | None = None
    """`prefill` and `decode` are then what it begins with."""
    warm_up_s: float = 0.0
    """What is asked before is not judged."""
    deadline_s: float = 600.0
    seed: int = 0
    validate: bool = False
    """Prove at the end that nothing is left of any request anywhere."""

    def engine(self, step_tokens: int) -> EngineSettings:
        batch = min(self.max_batch, step_tokens - 1)
        return EngineSettings(block_size=self.block_size, max_batch=batch, max_step_tokens=step_tokens)


@dataclass(slots=True)
class Asked:
    """One request and what became of it. Seconds since the run's start."""

    number: int
    service_class: str
    at_s: float
    prompt_tokens: int
    wanted_tokens: int
    outcome: Outcome | None = None
    cached_tokens: int = 0
    output_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        told = asdict(replace(self, outcome=None))
        return told | {"outcome": self.outcome.as_dict() if self.outcome is not None else None}


@dataclass(frozen=True, slots=True)
class RoleFigures:
    """Of all workers of a role together, whichever life."""

    workers: float
    """Where a planner decides, those that were wanted, on average."""
    busy_share: float
    """Of the time from the first request to the last one, in which a step was computed: what runs out after
    that is no load."""
    busy: tuple[float, ...]
    """The same of each second from the first request to the last answer."""
    counters: Mapping[str, int]
    """Sums of `docs/counters.md`."""


@dataclass(frozen=True, slots=True)
class Played:
    """A run."""

    asked: list[Asked]
    sending_s: float
    """From the first request to the last one."""
    total_s: float
    """From the first request to the last answer."""
    roles: Mapping[str, RoleFigures]
    routers: Mapping[str, int]
    """Counters of all routers' flows, added up."""
    cpu_s: float
    """What the simulation cost."""
    scaled: Scaled | None = None


def times(seconds: list[float], start: float) -> array[float]:
    return array("d", [at - start for at in seconds])
