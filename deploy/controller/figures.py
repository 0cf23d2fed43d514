"""What the controller counts of itself, and whether it gets on: for Prometheus and for probes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from deploy.controller.words import Action
from fleet.cluster import Object
from fleet.metrics import WHOLE_S, Buckets, Family, Kind, counter, gauge, histogram, value

STUCK_S = 300.0
"""A turn of a fleet is made of requests that end within half a minute each; one that takes so long hangs."""
_CONDITIONS = ("Available", "Progressing", "Degraded", "RolledBack")


class Figures:
    """Since start. `now`: the loop's clock, seconds."""

    def __init__(self) -> None:
        self._turns: Counter[str] = Counter()
        self._actions: Counter[str] = Counter()
        self._seconds = Buckets(WHOLE_S)
        self._since: dict[str, float] = {}

    def begin(self, key: str, now: float) -> float:
        """Somebody looks after that fleet from `now` on, which is returned."""
        self._since[key] = now
        return now

    def end(self, key: str, result: str, seconds: float) -> None:
        """`result`: done, conflict, failed or defect."""
        self._since.pop(key, None)
        self._turns[result] += 1
        self._seconds.observe(seconds)

    def acted(self, action: Action) -> None:
        self._actions[type(action).__name__.lower()] += 1

    def stuck(self, now: float) -> str:
        """Why it does not get on; empty: it does."""
        for key, since in self._since.items():
            if now - since > STUCK_S:
                return f"{key} has been looked after for {now - since:.0f} s"
        return ""

    def families(self, fleets: Sequence[Object], waiting: int, refused: int) -> list[Family]:
        """`waiting`: fleets whose turn it is; `refused`: fleets of which the API server refuses something."""
        true: Counter[str] = Counter(
            one["type"]
            for fleet in fleets
            for one in fleet.get("status", {}).get("conditions", [])
            if one.get("status") == "True"
        )
        return [
            value("pdfleet_controller_fleets", "Fleets that it looks after.", Kind.GAUGE, len(fleets)),
            gauge(
                "pdfleet_controller_conditions", "Fleets of which a condition is true.", ("condition",),
                {(name,): true[name] for name in _CONDITIONS},
            ),
            value("pdfleet_controller_waiting", "Fleets whose turn it is.", Kind.GAUGE, waiting),
            value(
                "pdfleet_controller_refused", "Fleets of which the API server refuses something.",
                Kind.GAUGE, refused,
            ),
            counter(
                "pdfleet_controller_turns", "Looks at a fleet, and how they ended.", ("result",),
                {(name,): self._turns[name] for name in ("done", "conflict", "failed", "defect")},
            ),
            histogram(
                "pdfleet_controller_turn_seconds", "How long a look at a fleet took, with what was done.", (),
                {(): self._seconds},
            ),
            counter(
                "pdfleet_controller_actions", "What it did, by kind.", ("action",),
                {(name,): count for name, count in self._actions.items()},
            ),
        ]  # fmt: skip
