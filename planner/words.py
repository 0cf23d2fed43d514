"""What the planner sees, what it says, and through whom it acts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Protocol

from fleet.targets import Desired, Mode

ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """One worker that is ready, by its last report."""

    id: str
    role: str
    ready_s: float
    """Since it became ready in this role, as far as was seen."""
    worked: bool
    """Whether it computed anything since the observation before: only then its speeds are new."""
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    prefill_tokens_s: float | None = None
    decode_step_s: float | None = None
    decode_batch: float | None = None
    kv_tokens: int = 0
    """Tokens whose KV it has room for."""


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """The workers of one role."""

    wanted: int
    ready: int
    starting: int = 0
    """Wanted and not ready yet: without a card, starting, or draining to take this role."""
    draining: int = 0
    """On their way out; no longer wanted."""
    short_s: float = 0.0
    """For how long fewer than wanted have been ready without one more becoming so."""
    turning: int = 0
    """Of those not ready yet: workers of the other role that are about to take this one."""


@dataclass(frozen=True, slots=True)
class ClassSeen:
    """Requests of one class since the observation before."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    arrived: int = 0
    attained: int = 0
    missed: int = 0
    missed_ttft: int = 0
    missed_tpot: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """What all routers were asked since the observation before, added up; see `fleet.demand.Demand`."""

    seconds: float
    arrived: int = 0
    prompt_tokens: int = 0
    prompt_squares: float = 0.0
    ended: int = 0
    ended_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    rejected: int = 0
    waiting: int = 0
    """Now, as the three below."""
    waiting_tokens: int = 0
    held: int = 0
    running: int = 0
    classes: dict[str, ClassSeen] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ages:
    """How old the oldest part of each kind of data is, seconds; None: there is none, which is not zero."""

    workers: float | None
    """The registry's picture of who is there."""
    demand: float | None
    """What routers say."""
    loads: float | None
    """What ready workers report."""


@dataclass(frozen=True, slots=True)
class Observation:
    """All that a decision is made from, besides what was learnt before."""

    mode: Mode
    budget: int | None
    """Of the operator; None: the settings' own."""
    prefill: PoolSeen
    decode: PoolSeen
    asked: Asked
    ages: Ages
    workers: tuple[WorkerSeen, ...] = ()
    cold_start_s: float | None = None
    """From wanted to ready, as it was measured last; None: not yet."""

    def pool(self, role: str) -> PoolSeen:
        return self.prefill if role == "prefill" else self.decode


@dataclass(frozen=True, slots=True)
class Plan:
    """What there should be from now on, and why."""

    prefill: int
    decode: int
    why: str
    next_at: float
    """When to decide again if nothing calls for it sooner."""
    turns: tuple[str, ...] = ()
    """Role that a worker of the other one is to take, once for each worker. The counts have them."""
    advice: str = ""
    """What would be better and is not done."""
    needs: tuple[int, int] | None = None
    """Prefill and decode workers that the load needs, before budget, limits and patience; None: unknown."""

    def of(self, role: str) -> int:
        return self.prefill if role == "prefill" else self.decode


@dataclass(frozen=True, slots=True)
class Targets:
    """What is wanted now, as the actuator read it."""

    desired: Desired
    version: int | str
    """Of that value: a change is applied to this one or not at all."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Proof of being the leader, which ends with it."""

    key: str
    token: int


class Actuator(Protocol):
    """Where wanted counts are kept: etcd, or a resource in Kubernetes."""

    async def current(self) -> Targets | None:
        """None: nobody has said yet what is wanted. Raises `Unavailable`."""
        ...

    async def apply(self, plan: Plan, seen: Targets, fence: Fence | None) -> bool:
        """Both counts in one change, and the turns; False: nothing was changed, for the fence does not hold
        any more, or somebody has changed what is wanted since `seen`. Raises `Unavailable`."""
        ...

    async def tell(self, plan: Plan, seen: Targets, fence: Fence | None) -> bool:
        """Shows a decision to operators that changes nothing. As `apply`."""
        ...


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """How many workers the planner may want, how much it trusts, and how patient it is."""

    interval_s: float = 5.0
    """Seconds between decisions; sooner where requests wait and nobody serves."""
    budget: int = 8
    """Most workers of both roles together, unless the operator said another number."""
    least_prefill: int = 1
    """Prefill workers that stay while the fleet serves; 0: decode workers may be alone."""
    least_decode: int = 1
    """Decode workers that stay while the fleet serves; at least 1."""
    target: float = 0.95
    """Share of requests that is to attain its objectives."""
    ttft_ms: float = 10_000.0
    """Time to the first token to plan for while classes that are asked for have none, ms."""
    tpot_ms: float = 300.0
    """Time per token to plan for while classes that are asked for have none, ms."""
    cold_start_s: float = 60.0
    """From wanting a worker until it serves, until that was measured, seconds."""
    ready_limit_s: float = 300.0
    """Seconds after which workers that were wanted and are not ready count as failing: no more of them are
    wanted then."""
    warm_up_s: float = 20.0
    """Seconds of a worker's life whose measured speeds are not learnt from: first steps are slow."""
    stale_s: float = 15.0
    """Age beyond which data counts as missing, seconds; with any missing nothing is reduced."""
    settle_s: float = 180.0
    """Seconds for which fewer workers must have been enough before there are fewer; doubled, up to an hour,
    where that turned out wrong."""
    turn_settle_s: float = 20.0
    """The same before a worker leaves a role for the other one, which takes seconds and not a cold start."""
    headroom: float = 1.15
    """Times the present load that those who stay must bear when one goes."""
    trials: bool = True
    """Whether one worker fewer than the model asks for is tried where next to no requests miss."""
    trial_again_s: float = 7200.0
    """Seconds for which what was tried in vain is not tried again at such a load."""
    utilisation: float = 0.85
    """Most of a prefill worker's time that is planned to be busy."""
    most_step: float = 0.5
    """Share of a pool's workers that one decision may add or, at most every interval, take; at least one."""
    idle_s: float = 600.0
    """Seconds without any request after which a fleet that may go to zero does."""
    scale_to_zero: bool = False
    """Whether an idle fleet gives up all workers; routers then hold requests until there are some again."""
    turns: bool = True
    """Whether workers may change their role where that is enough."""
    forecast: bool = True
    """Whether trend and season are planned for, besides what is asked now."""
    season_s: float = 86_400.0
    """Length of a season, seconds: what was asked at the same time of earlier ones is expected again."""

    def __post_init__(self) -> None:
        for item in fields(self):
            number = getattr(self, item.name)
            if isinstance(number, int | float) and number < 0:
                raise ValueError(f"{item.name} is {number}; it must not be negative")
        for name in ("interval_s", "ttft_ms", "tpot_ms", "stale_s", "season_s", "most_step", "ready_limit_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; a number above 0 is needed")
        if self.least_decode < 1:
            raise ValueError("least_decode is 0: a fleet without decode workers serves nothing")
        if self.least_prefill + self.least_decode > self.budget:
            raise ValueError(
                f"least_prefill and least_decode are {self.least_prefill} and {self.least_decode}, "
                f"more than the budget of {self.budget}"
            )
        if not 0 < self.target < 1 or not 0 < self.utilisation < 1:
            raise ValueError("target and utilisation are shares between 0 and 1")
        if self.headroom < 1:
            raise ValueError(f"headroom is {self.headroom}; at least 1 is needed")
