"""The hand-off record: where one request's KV is and was, why it moved, and who else was weighed. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from msgspec import Struct

from fleet.ids import RequestId, WorkerId
from fleet.stages import Stage
from router.cost import Considered


class HandoffState(StrEnum):
    RESERVED = "reserved"
    """Taken on; no worker computes it yet, or none any more."""
    PREFILLING = "prefilling"
    """A worker computes the prompt. Once more: what came of looking for a decode worker meanwhile."""
    LENDING = "lending"
    """A worker computes the prompt, and a decode worker brings what of its KV is final."""
    READY = "ready"
    """The prompt's KV waits under a lease."""
    PULLING = "pulling"
    """A decode worker has the ticket: it brings the KV, then goes on with the answer."""
    DONE = "done"
    FAILED = "failed"
    RELEASED = "released"
    """Given up on the client's wish."""


_ENDS = frozenset({HandoffState.DONE, HandoffState.FAILED, HandoffState.RELEASED})
_NEXT: dict[HandoffState, frozenset[HandoffState]] = {
    HandoffState.RESERVED: _ENDS | {HandoffState.PREFILLING},
    HandoffState.PREFILLING: _ENDS
    | {HandoffState.RESERVED, HandoffState.PREFILLING, HandoffState.LENDING, HandoffState.READY},
    HandoffState.LENDING: _ENDS | {HandoffState.RESERVED, HandoffState.PREFILLING, HandoffState.READY},
    HandoffState.READY: _ENDS | {HandoffState.RESERVED, HandoffState.PULLING},
    HandoffState.PULLING: _ENDS | {HandoffState.RESERVED, HandoffState.READY},
    HandoffState.DONE: frozenset(),
    HandoffState.FAILED: frozenset(),
    HandoffState.RELEASED: frozenset(),
}
"""Back to READY: the decode worker was lost, the lease stands. Back to RESERVED: all is computed again."""


class Transition(Struct, frozen=True):
    state: HandoffState
    at: float
    """Seconds since the request was accepted."""
    why: str
    worker: WorkerId | None = None
    considered: Considered | None = None
    """Where the worker was chosen: from whom."""

    def as_dict(self) -> dict[str, Any]:
        said = {"state": self.state.value, "at_s": round(self.at, 6), "why": self.why, "worker": self.worker}
        return said if self.considered is None else {**said, "considered": self.considered.as_dict()}


@dataclass(slots=True)
class HandoffRecord:
    request: RequestId
    model: str
    prompt_tokens: int
    accepted: float
    """On the router's clock."""
    slo_class: str = ""
    tenant: str = ""
    stages: Mapping[Stage, float] = field(default_factory=dict)
    """Those that it has reached: the request's own timeline, not a copy."""
    transitions: list[Transition] = field(default_factory=list)
    admission: list[dict[str, Any]] = field(default_factory=list)
    """What was decided about it, with reasons and forecasts: at its arrival, and after waiting."""
    outcome: dict[str, Any] | None = None
    """How it ended, and whether it attained its objectives."""
    moved: Callable[[HandoffRecord, Transition], None] | None = None
    """Is told of each transition."""

    @property
    def state(self) -> HandoffState:
        return self.transitions[-1].state if self.transitions else HandoffState.RESERVED

    @property
    def ended(self) -> bool:
        return self.state in _ENDS

    @property
    def seconds(self) -> float:
        """From acceptance to its last transition: of one that has ended, all of it."""
        return self.transitions[-1].at if self.transitions else 0.0

    def took(self, now: float) -> float:
        """From acceptance to its end, or until now."""
        return self.seconds if self.ended else now - self.accepted

    @property
    def place(self) -> str:
        """How it ended, or where it is: waiting, prefilling, moving or decoding. A worker that computed the
        prompt itself goes on without another transition."""
        if self.ended:
            return self.state.value
        if Stage.FIRST_TOKEN not in self.stages:
            return "prefilling" if Stage.PREFILL_SENT in self.stages else "waiting"
        handed = self.state in (HandoffState.READY, HandoffState.PULLING)
        here = Stage.SECOND_TOKEN in self.stages or Stage.PULL_ENDED in self.stages
        return "moving" if handed and not here else "decoding"

    def move(
        self,
        state: HandoffState,
        now: float,
        why: str,
        worker: WorkerId | None = None,
        considered: Considered | None = None,
    ) -> None:
        """ValueError names a step that is not allowed: a record ends once."""
        if self.transitions and state not in _NEXT[self.state]:
            raise ValueError(f"request {self.request} cannot go from {self.state} to {state} ({why})")
        step = Transition(state, now - self.accepted, why, worker, considered)
        self.transitions.append(step)
        if self.moved is not None:
            self.moved(self, step)

    def _head(self, now: float) -> dict[str, Any]:
        return {
            "request": self.request,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "class": self.slo_class,
            "tenant": self.tenant,
            "state": self.place,
            "seconds": round(self.took(now), 6),
        }

    def as_dict(self, now: float) -> dict[str, Any]:
        return {
            **self._head(now),
            "stages": {stage.value: round(at, 6) for stage, at in self.stages.items()},
            "admission": self.admission,
            "outcome": self.outcome,
            "transitions": [step.as_dict() for step in self.transitions],
        }

    def summary(self, now: float) -> dict[str, Any]:
        """One line of a list."""
        return {
            **self._head(now),
            "ttft_s": None if (at := self.stages.get(Stage.FIRST_TOKEN)) is None else round(at, 6),
            "attained": None if self.outcome is None else self.outcome["attained"],
            "workers": list(dict.fromkeys(step.worker for step in self.transitions if step.worker)),
        }


Follower = Callable[[HandoffRecord, Transition | None], None]
"""Told of a transition of a request, and once, without one, of its end."""


class Records:
    """The last records, by request; bounded: the oldest ended ones go first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._running: dict[RequestId, HandoffRecord] = {}
        self._ended: OrderedDict[RequestId, HandoffRecord] = OrderedDict()
        self.followers: list[Follower] = []

    def open(self, record: HandoffRecord) -> None:
        self._running[record.request] = record
        record.moved = self._moved

    def close(self, record: HandoffRecord) -> None:
        if self._running.pop(record.request, None) is None:
            return
        self._ended[record.request] = record
        while len(self._ended) > self.limit:
            self._ended.popitem(last=False)
        self._moved(record, None)

    def _moved(self, record: HandoffRecord, step: Transition | None) -> None:
        for follower in self.followers:
            follower(record, step)

    def newest(self) -> Iterator[HandoffRecord]:
        """Running ones, then those that ended, each from the newest on."""
        yield from reversed(self._running.values())
        yield from reversed(self._ended.values())

    def get(self, request: RequestId) -> HandoffRecord | None:
        return self._running.get(request) or self._ended.get(request)

    @property
    def running(self) -> tuple[HandoffRecord, ...]:
        return tuple(self._running.values())

    @property
    def ended(self) -> tuple[HandoffRecord, ...]:
        """Oldest first."""
        return tuple(self._ended.values())
