"""Membership: the card a worker shows, and the states it passes through. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fleet.ids import Incarnation, WorkerId
from fleet.kv_layout import Fingerprint


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class MemberState(StrEnum):
    STARTING = "starting"
    """Loading; takes no work."""
    READY = "ready"
    DRAINING = "draining"
    """No new work; what runs finishes, leased KV waits to be pulled."""
    STALLED = "stalled"
    """In reports only, never on a card: work waits and no step ends, so new work would wait too."""
    LEFT = "left"


_NEXT: dict[MemberState, frozenset[MemberState]] = {
    MemberState.STARTING: frozenset({MemberState.READY, MemberState.LEFT}),
    MemberState.READY: frozenset({MemberState.DRAINING, MemberState.LEFT}),
    MemberState.DRAINING: frozenset({MemberState.READY, MemberState.LEFT}),
    MemberState.STALLED: frozenset(),
    MemberState.LEFT: frozenset(),
}
"""DRAINING → READY is a role change: the same process serves again in another role."""


def step(state: MemberState, to: MemberState) -> MemberState:
    """The new state; ValueError names a step that is not allowed."""
    if to not in _NEXT[state]:
        raise ValueError(f"a member cannot go from {state} to {to}")
    return to


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """What a worker registers in etcd under its lease, at `/fleet/<name>/workers/<id>`.

    One incarnation may change its role; its blocks and their events stay its own.
    """

    id: WorkerId
    incarnation: Incarnation
    role: Role
    state: MemberState
    address: str
    """Of its control server: `HOST:PORT`."""
    sessions: str
    """Where it takes sessions, of jobs and tokens: `HOST:PORT`."""
    transfer: str
    """Of its transfer layer, with schemes; see `KvTicket.address`."""
    model: str
    """Name it is served under."""
    fingerprint: Fingerprint
    blocks: int
    """KV blocks in its pool."""
    max_tokens: int
    """Longest sequence, prompt and answer, it can hold."""
    version: str
    pid: int
    host: str
    metrics: str = ""
    """Where Prometheus reads its figures, `HOST:PORT`; empty: nowhere."""
    revision: str = ""
    """Of what it was started (`chassis.revision`): figures of requests are told by it."""
    turning: Role | None = None
    """The role it will have after its drain; None where a drain ends in leaving."""


def workers_prefix(fleet: str) -> str:
    return f"/fleet/{fleet}/workers/"


def worker_key(fleet: str, worker: str) -> str:
    return workers_prefix(fleet) + worker


def desired_key(fleet: str) -> str:
    """JSON `{"prefill": n, "decode": m}`: how many of each role there should be."""
    return f"/fleet/{fleet}/desired"
