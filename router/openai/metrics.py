"""What the ingress counts, and the router's page for Prometheus. Counting is a dictionary entry a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from fleet.metrics import WHOLE_S, Buckets, Family, Kind, Labels, counter, histogram, value
from fleet.telemetry import page

OTHER = "other"
"""Stands for every path that is no route."""


class Metrics:
    """Written on the event loop only. HTTP requests are counted here; the answers that they ask for are
    counted where they are made (`router.meters`), and told with `beside`."""

    def __init__(self, vllm_names: bool = False) -> None:
        self.received: Counter[str] = Counter()
        """By route."""
        self.requests: Counter[Labels] = Counter()
        """By (route, outcome): stop, length, cancelled or the name of an error."""
        self.running = 0
        self.whole: dict[Labels, Buckets] = {}
        self.beside: list[Callable[[], Iterable[Family]]] = []
        """Who else tells something on this page; asked on the event loop, for copies."""
        self._vllm_names = vllm_names

    def began(self, route: str) -> None:
        self.received[route] += 1
        self.running += 1

    def ended(self, route: str, outcome: str, seconds: float) -> None:
        self.running -= 1
        self.requests[route, outcome] += 1
        buckets = self.whole.get((route,))
        if buckets is None:
            buckets = self.whole[(route,)] = Buckets(WHOLE_S)
        buckets.observe(seconds)

    async def page(self) -> bytes:
        """In the text format. Figures are copied here, and written in a thread."""
        return await page(
            [*self.families(), *(one for tell in self.beside for one in tell())], self._vllm_names
        )

    def families(self) -> list[Family]:
        return [
            counter("pdfleet_http_requests_received", "HTTP requests for answers and tokens.",
                    ("route",), {(route,): count for route, count in self.received.items()}),
            counter("pdfleet_http_requests", "Of those, the ones that ended: stop, length, tool_calls, "
                    "cancelled or the name of an error.", ("route", "outcome"), self.requests),
            value("pdfleet_http_requests_running", "Of those, the ones that have not ended.",
                  Kind.GAUGE, self.running),
            histogram("pdfleet_http_request_seconds", "Headers read to last byte written, however it ended.",
                      ("route",), self.whole),
        ]  # fmt: skip
