"""What a class of requests is promised: objectives, rank and share; and the classes by default. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

CLASS_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
"""What a class may be called: the name stands in headers, in files of settings and in flags."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """One class. An objective that is not given is not judged."""

    ttft_ms: float | None = None
    """Longest time to the first token, ms: from acceptance by the ingress to its bytes' being written,
    queueing included."""
    tpot_ms: float | None = None
    """Longest time per token after the first, ms: (last token - first token) / (tokens - 1)."""
    itl_ms: float | None = None
    """Longest gap between two tokens, ms, at `itl_percentile` of an answer's gaps: for those who hear or
    watch a stream, to whom a good average is no comfort."""
    itl_percentile: float = 95.0
    """Which percentile of an answer's gaps `itl_ms` bounds; 100: every gap."""
    e2e_ms: float | None = None
    """Longest time from acceptance to the last byte, ms."""
    priority: int = 0
    """Larger goes first, at the router and in the engines' queues."""
    sheddable: bool = False
    """Whether a request that would miss its objectives is refused at once, for the others' sake, and
    whether it gives way when the queue is full. Others are served late rather than not at all."""
    weight: float = 1.0
    """Share of the fleet against other classes of the same priority, where there is not enough for all."""

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}; a number of ms above 0 is needed")
        if not 0 < self.itl_percentile <= 100:
            raise ValueError(f"itl_percentile is {self.itl_percentile}; above 0 and at most 100 is needed")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight is {self.weight}; a number above 0 is needed")
        if not -100 <= self.priority <= 100:
            raise ValueError(f"priority is {self.priority}; -100 to 100 is possible")

    def tightened(self, *, ttft_ms: float | None = None, e2e_ms: float | None = None) -> Objectives:
        """With what a request asks for beyond its class; never looser."""
        return replace(self, ttft_ms=_least(self.ttft_ms, ttft_ms), e2e_ms=_least(self.e2e_ms, e2e_ms))


def _least(*limits: float | None) -> float | None:
    return min((limit for limit in limits if limit is not None), default=None)


INTERACTIVE, STANDARD, BATCH = "interactive", "standard", "batch"

CLASSES: Mapping[str, Objectives] = MappingProxyType(
    {
        INTERACTIVE: Objectives(ttft_ms=2_000, tpot_ms=150, priority=1),
        STANDARD: Objectives(ttft_ms=10_000, tpot_ms=300),
        BATCH: Objectives(ttft_ms=120_000, priority=-1, sheddable=True),
    }
)
"""By name. The figures are what a reader feels (two seconds to begin, faster than one reads), and within
reach of the demo model on a few cores."""
