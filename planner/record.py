"""Decisions as lines of JSON, each with its observation, and whether they come out the same again. Pure.

A line with `settings` begins the life of a planner: what was learnt before is forgotten there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from planner.decide import State, decide
from planner.words import Observation, Plan, PlannerSettings


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """Either a beginning or a decision."""

    at: float = 0.0
    """On the planner's clock, seconds."""
    settings: PlannerSettings | None = None
    observation: Observation | None = None
    plan: Plan | None = None
    leading: bool = False
    """Whether this planner led; one that stands by decides as well, to know as much."""
    outcome: str = ""
    """applied, refused (the fence, or somebody else's change), away (nobody could be asked), or empty: there
    was nothing to change, or it was not this planner's to do."""


@dataclass(frozen=True, slots=True)
class Replayed:
    number: int
    """Of the line, from 1."""
    line: Line
    again: Plan

    @property
    def same(self) -> bool:
        return self.line.plan == self.again


def encode_line(line: Line) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def replay(lines: Iterable[bytes | str]) -> Iterator[Replayed]:
    """Every decision again, by this program. ValueError names the line that cannot be read."""
    state: State | None = None
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=Line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"line {number} is no decision of a planner: {error}") from None
        if line.settings is not None:
            state = State(line.settings)
        if line.observation is None:
            continue
        if state is None:
            raise ValueError(f"line {number} is a decision, and no line before it has the planner's settings")
        yield Replayed(number, line, decide(line.observation, state, line.at))
