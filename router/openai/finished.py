"""One HTTP request that is over, for those who write it down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fleet.errors import ERRORS
from router.openai.stream import Choice, Job
from router.record import HandoffRecord, Records
from router.run import Terms


@dataclass(frozen=True, slots=True)
class Finished:
    """Times are those of the event loop's clock, seconds."""

    id: str
    """As its client was told."""
    route: str
    status: int
    """0: nobody was left to be told one."""
    outcome: str
    """As in the metrics: stop, length, tool_calls, cancelled or the name of an error."""
    began: float
    ended: float
    terms: Terms
    job: Job | None
    """None: refused before it was one."""
    records: Records | None

    @property
    def ours(self) -> bool:
        """Whether the failure, if it is one, is not the client's. One in mid-stream has no status to tell."""
        row = ERRORS.get(self.outcome)
        return self.outcome == "defect" or (self.status if row is None else row.http) >= 500

    def answers(self) -> Iterator[tuple[Choice, HandoffRecord | None]]:
        """Each with its way through the fleet, where that is known."""
        for choice in self.job.choices if self.job is not None else ():
            record = self.records.get(choice.request.id) if self.records is not None else None
            yield choice, record
