"""Words between the controller's core and shell: what is seen, and what is to be done and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from deploy.controller.resource import FleetPoolStatus, FleetStatus
from fleet.cluster import Object, Resource


@dataclass(frozen=True, slots=True)
class Judged:
    """Counters of routers, added up, of requests that were served by the same revisions."""

    attained: int
    judged: int

    def __add__(self, other: Judged) -> Judged:
        return Judged(self.attained + other.attained, self.judged + other.judged)

    def since(self, before: Judged) -> Judged:
        return Judged(self.attained - before.attained, self.judged - before.judged)

    def keeps(self, percent: int) -> bool:
        return self.attained * 100 >= self.judged * percent


@dataclass(frozen=True, slots=True)
class Observed:
    """One fleet at one moment."""

    fleet: Object
    owned: tuple[Object, ...]
    """What carries the fleet's label, of the kinds in `render.OWNED`."""
    pods: tuple[Object, ...]
    absent: frozenset[str] = frozenset()
    """Kinds that this cluster does not know."""
    loads: Mapping[str, float] = field(default_factory=dict)
    """Requests by pod, running and waiting; of a pod that did not say: nothing."""
    judged: Mapping[str, Judged] | None = None
    """By the revision of the workers that served, several with `+`. None: not known."""
    warnings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By pod, what its node says of volumes, of pods that have not started."""
    altered: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    """(kind, name) → what the cluster made of what was applied, where it makes something else of it."""
    refused: tuple[str, ...] = ()
    """What the API server said to the last plan's writes."""


@dataclass(frozen=True, slots=True)
class Apply:
    """By server-side apply."""

    object: Object
    why: str
    drift: bool = False
    """Somebody else had changed it."""


@dataclass(frozen=True, slots=True)
class Remove:
    resource: Resource
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Resize:
    """Only its count: the rest was applied by another version of this controller."""

    resource: Resource
    name: str
    count: int
    why: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A pod goes first, or as any other (cost None), when its pool shrinks."""

    pod: str
    cost: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Carry:
    """Counts that were asked of pools go to the fleet, in one write that fails if it changed meanwhile."""

    counts: Mapping[str, int]
    resource_version: str
    why: str


@dataclass(frozen=True, slots=True)
class TellPool:
    name: str
    status: FleetPoolStatus
    why: str


@dataclass(frozen=True, slots=True)
class TellFleet:
    status: FleetStatus
    why: str


@dataclass(frozen=True, slots=True)
class Say:
    """An event, for `kubectl describe`."""

    reason: str
    message: str
    kind: Literal["Normal", "Warning"] = "Normal"


Action = Apply | Resize | Remove | Mark | Carry | TellPool | TellFleet | Say


@dataclass(frozen=True, slots=True)
class Plan:
    actions: tuple[Action, ...]
    again_s: float
    """When to look again at the latest, though nothing has changed."""
