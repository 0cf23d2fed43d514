"""The stages of one request and when each was reached; the same everywhere, live and simulated. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Stage(StrEnum):
    """In the order in which a request meets them; any may be missing, and a missing one is absent."""

    ACCEPTED = "accepted"
    """Body read and valid."""
    TOKENIZED = "tokenized"
    PREFILL_SENT = "prefill_sent"
    """Dispatched to the worker that computes the prompt."""
    PREFILL_STARTED = "prefill_started"
    """First chunk scheduled there."""
    FIRST_TOKEN = "first_token"
    """First token reached the router."""
    DECODE_SENT = "decode_sent"
    PULL_STARTED = "pull_started"
    """Decode worker holds blocks and asked for the KV."""
    PULL_ENDED = "pull_ended"
    SECOND_TOKEN = "second_token"
    ENDED = "ended"


@dataclass(slots=True)
class Timeline:
    """Seconds since acceptance at which each stage was first reached, on the router's clock."""

    start: float
    marks: dict[Stage, float] = field(default_factory=dict)

    def mark(self, stage: Stage, now: float) -> None:
        """Keeps the first time only, so that a retry never hides a delay."""
        self.marks.setdefault(stage, now - self.start)

    def between(self, first: Stage, second: Stage) -> float | None:
        """Seconds, or None when either stage was never reached."""
        a, b = self.marks.get(first), self.marks.get(second)
        return None if a is None or b is None else b - a
