"""Decisions as lines of JSON, each with its observation, and whether they come out the same again. Pure.

A line with `settings` begins the life of a planner: what was learnt before is forgotten there, or is what the
line's `memory` says. A decision is a line before it is carried out; what came of it is another one after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from planner.decide import State, decide
from planner.memory import recalled
from planner.words import Observation, Plan, PlannerSettings


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A beginning, a decision, or what came of the decision before it."""

    at: float = 0.0
    """On the planner's clock, seconds."""
    settings: PlannerSettings | None = None
    observation: Observation | None = None
    plan: Plan | None = None
    leading: bool = False
    """Whether this planner led; one that stands by decides as well, to know as much."""
    outcome: str = ""
    """Of the decision before: applied, refused (the fence, or somebody else's change) or away (nobody could
    be asked). No such line: there was nothing to change, it was not its to do, or it ended meanwhile."""
    memory: Any = None
    """With `settings`: what had been learnt by then (`planner.memory`); none: nothing."""
    lost: int = 0
    """With `settings`: lines before it that could not be written."""


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
            try:
                state = State(line.settings) if line.memory is None else recalled(line.memory)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
        if line.observation is None:
            continue
        if state is None:
            raise ValueError(f"line {number} is a decision, and no line before it has the planner's settings")
        yield Replayed(number, line, decide(line.observation, state, line.at))
