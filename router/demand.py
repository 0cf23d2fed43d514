"""What this router is asked: totals since its start, and what waits now, for whoever plans. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from fleet.demand import MOST_CLASSES, ClassDemand, Demand
from fleet.errors import Overloaded
from fleet.goodput import End, Outcome, Verdict
from fleet.ids import Incarnation, RequestId
from fleet.metrics import Family, Kind, value
from fleet.objectives import Objectives
from fleet.stages import Stage
from router.record import HandoffRecord
from router.run import Terms
from router.settings import FlowSettings


class Ledger:
    """Counts; knows no rates."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._squares = 0.0
        self._classes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._promised: dict[str, Objectives] = {}
        self._sequence = 0
        self.held: set[RequestId] = set()
        """Requests for which there is no worker at all."""
        self.resting = False
        """Whether a planner has let the fleet go to zero, and nobody serves yet: requests wake it."""
        self.scaling = False
        """Whether somebody is to bring workers when there are none."""

    def hold(self, request: RequestId, limits: FlowSettings) -> None:
        """It waits for any worker at all. Raises `Overloaded` where too many do."""
        if len(self.held) >= limits.max_held:
            raise Overloaded(
                f"{len(self.held)} requests wait for a first worker, the limit (setting flow.max_held)",
                retry_after_s=limits.held_retry_s,
            )
        self.held.add(request)

    def began(self, terms: Terms, prompt_tokens: int) -> None:
        self._totals["arrived"] += 1
        self._totals["prompt_tokens"] += prompt_tokens
        self._squares += float(prompt_tokens) ** 2
        self._classes[terms.slo_class]["arrived"] += 1
        self._promised[terms.slo_class] = terms.objectives

    def ended(
        self, terms: Terms, outcome: Outcome, verdict: Verdict, prompt_tokens: int, cached: int, output: int
    ) -> None:
        counted, totals = self._classes[terms.slo_class], self._totals
        if output:
            totals["ended"] += 1
            totals["ended_tokens"] += prompt_tokens
            totals["cached_tokens"] += cached
            totals["output_tokens"] += output
        if outcome.end is End.REJECTED or (outcome.end is End.FAILED and not output):
            totals["rejected"] += 1
        if verdict.attained is None:
            return
        counted["attained" if verdict.attained else "missed"] += 1
        if not verdict.attained:
            # Who never had a token waited for it in vain, whatever it is called.
            counted["missed_ttft"] += "ttft" in verdict.missed or not output
            counted["missed_tpot"] += "tpot" in verdict.missed or "itl" in verdict.missed

    def demand(self, router: str, life: Incarnation, up_s: float, running: Iterable[HandoffRecord]) -> Demand:
        """The next message."""
        self._sequence += 1
        under_way = list(running)
        waiting = [one for one in under_way if Stage.PREFILL_SENT not in one.stages]
        classes = {
            name: ClassDemand(promised.ttft_ms, promised.tpot_ms or promised.itl_ms, **self._classes[name])
            for name, promised in list(self._promised.items())[:MOST_CLASSES]
        }
        return Demand(
            router,
            life,
            self._sequence,
            round(up_s, 3),
            **self._totals,
            prompt_squares=self._squares,
            waiting=len(waiting),
            waiting_tokens=sum(one.prompt_tokens for one in waiting),
            held=len(self.held),
            running=len(under_way),
            classes=classes,
        )

    def families(self) -> Iterable[Family]:
        """For Prometheus: always there, whether anybody serves or not."""
        yield value("pdfleet_demand_requests", "Requests that came, served or not.",
                    Kind.COUNTER, self._totals["arrived"])  # fmt: skip
        yield value("pdfleet_demand_rejected", "Requests refused for load, or because nobody served.",
                    Kind.COUNTER, self._totals["rejected"])  # fmt: skip
        yield value("pdfleet_demand_held", "Requests that wait because no worker is there at all.",
                    Kind.GAUGE, len(self.held))  # fmt: skip
