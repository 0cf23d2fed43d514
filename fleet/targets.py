"""How many workers of each role are wanted, and who decides it: as it stands in etcd. Pure.

One value, so that one write changes both counts, the mode and the budget together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from fleet.errors import BadRequest

MOST_WORKERS = 256
"""Per role on one machine; more is a slip of the finger, not a wish."""
MOST_BUDGET = 2 * MOST_WORKERS


class Mode(StrEnum):
    """Who decides the counts."""

    OFF = "off"
    """An operator."""
    ADVISE = "advise"
    """An operator; the planner says what it would do."""
    ACT = "act"
    """The planner."""


@dataclass(frozen=True, slots=True)
class Desired:
    """How many workers of each role there should be."""

    prefill: int
    decode: int
    mode: Mode = Mode.OFF
    budget: int | None = None
    """Most workers of both roles together that the planner may want; None: that of its settings."""

    def turned(self, to: str) -> Desired:
        """One more of that role, and one less of the other: what is wanted when one worker changes."""
        shift = 1 if to == "prefill" else -1
        prefill, decode = (max(0, min(MOST_WORKERS, n)) for n in (self.prefill + shift, self.decode - shift))
        return replace(self, prefill=prefill, decode=decode)

    def __post_init__(self) -> None:
        for role, count, most in (
            ("prefill", self.prefill, MOST_WORKERS),
            ("decode", self.decode, MOST_WORKERS),
            ("budget", 0 if self.budget is None else self.budget, MOST_BUDGET),
        ):
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= most:
                raise BadRequest(f"{role}={count!r}: expected a whole number from 0 to {most}", param=role)

    def of(self, kind: str) -> int:
        """Of servers and the router there is always one; of the planner, where it has something to do."""
        if kind == "prefill":
            return self.prefill
        if kind == "planner":
            return int(self.mode is not Mode.OFF)
        return self.decode if kind == "decode" else 1


def parse_desired(data: bytes) -> Desired:
    """From the JSON under the fleet's desired key. `BadRequest` says what is wrong with it."""
    try:
        value = msgspec.json.decode(data, type=dict[str, int | str | None])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(
            f'desired counts are not of the form {{"prefill": 1, "decode": 1}}: {error}'
        ) from None
    unknown = sorted(set(value) - {"prefill", "decode", "mode", "budget"})
    missing = sorted({"prefill", "decode"} - set(value))
    if unknown or missing:
        wrong = f"unknown role {unknown[0]!r}" if unknown else f"no count for {missing[0]!r}"
        raise BadRequest(f"desired counts: {wrong}; the roles are prefill and decode")
    mode = value.get("mode", Mode.OFF)
    if mode not in tuple(Mode):
        raise BadRequest(f"desired counts: mode is {mode!r}; there are {', '.join(Mode)}")
    for name in ("prefill", "decode", "budget"):
        if isinstance(value.get(name), str):
            raise BadRequest(f"desired counts: {name} is {value[name]!r}, not a whole number")
    counts: dict[str, int | None] = {name: value.get(name) for name in ("prefill", "decode", "budget")}  # type: ignore[misc]
    prefill, decode, budget = counts["prefill"], counts["decode"], counts["budget"]
    if prefill is None or decode is None:
        raise BadRequest("desired counts: null is no count; the roles are prefill and decode")
    return Desired(prefill, decode, Mode(str(mode)), budget)


def format_desired(desired: Desired) -> bytes:
    """What says nothing is left out: an operator's counts are two numbers."""
    told: dict[str, int | str] = {"prefill": desired.prefill, "decode": desired.decode}
    if desired.mode is not Mode.OFF:
        told["mode"] = desired.mode.value
    if desired.budget is not None:
        told["budget"] = desired.budget
    return msgspec.json.encode(told)


def planner_prefix(fleet: str) -> str:
    """Below it are the leader's key, the planners' cards and the last decision."""
    return f"/fleet/{fleet}/planner/"


def leader_key(fleet: str) -> str:
    """Who leads: leased, so that it ends with its holder; its create revision is the fence."""
    return f"{planner_prefix(fleet)}leader"


def decision_key(fleet: str) -> str:
    """JSON of the planner's last decision (`LastDecision`)."""
    return f"{planner_prefix(fleet)}decision"


class LastDecision(msgspec.Struct, frozen=True):
    """What operators and routers see of a plan."""

    prefill: int
    decode: int
    why: str
    mode: str
    changed: bool
    """Whether it was a change of what was wanted before."""
    at: float
    """Unix time at which it was made, seconds."""
    turns: int = 0
    """Workers that were to change their role for it."""
    advice: str = ""
    """What else would be better, and is not the planner's to do."""


def parse_decision(data: bytes) -> LastDecision | None:
    """None: it is of another version."""
    try:
        return msgspec.json.decode(data, type=LastDecision)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
