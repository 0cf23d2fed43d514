"""Admission: how many requests this router takes on at once, and when each is overdue. Pure."""

from __future__ import annotations

from fleet.errors import Overloaded
from fleet.ids import RequestId
from fleet.request import Request
from router.settings import FlowSettings


class Admission:
    """A bounded set of requests under way."""

    def __init__(self, settings: FlowSettings) -> None:
        self._settings = settings
        self._due: dict[RequestId, float] = {}

    def __len__(self) -> int:
        return len(self._due)

    def enter(self, request: Request, accepted: float) -> float:
        """Takes it on; returns when it is overdue, on the clock of `accepted`.

        Raises `Overloaded` when the router is full, at once: a queue here would only hide the wait.
        """
        if len(self._due) >= self._settings.max_requests:
            raise Overloaded(
                f"{len(self._due)} requests are under way here, the limit (setting flow.max_requests)",
                retry_after_s=self._settings.retry_after_s,
            )
        assert request.id not in self._due, f"request {request.id} is under way already"
        self._due[request.id] = accepted + request.deadline_s
        return self._due[request.id]

    def leave(self, request: RequestId) -> None:
        """Idempotent."""
        self._due.pop(request, None)

    def overdue(self, now: float) -> tuple[RequestId, ...]:
        """Those that should have ended by now: always empty, or something hangs."""
        return tuple(request for request, due in self._due.items() if due < now)
