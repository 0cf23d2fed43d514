"""What the ingress counts, and its page for Prometheus. Counting is a list index; labels stay few."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator

from prometheus_client import PROCESS_COLLECTOR, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from fleet.request import Usage
from fleet.stages import Stage, Timeline

FIRST_S = (
    0.01,
    0.02,
    0.05,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.6,
    0.8,
    1.0,
    1.5,
    2.0,
    3.0,
    5.0,
    8.0,
    15.0,
    30.0,
    60.0,
)
"""Buckets of the time to the first token, seconds: dense where objectives lie."""
BETWEEN_S = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.0,
)
"""Of the time between two tokens."""
WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Of a whole request."""

_STAGES = {
    "tokenize": (Stage.ACCEPTED, Stage.TOKENIZED),
    "queue": (Stage.PREFILL_SENT, Stage.PREFILL_STARTED),
    "prefill": (Stage.PREFILL_STARTED, Stage.FIRST_TOKEN),
    "transfer": (Stage.PULL_STARTED, Stage.PULL_ENDED),
    "second_token": (Stage.FIRST_TOKEN, Stage.SECOND_TOKEN),
}
"""Parts of a request's life that are shown, each with where it begins and ends."""


class Histogram:
    """Counts by bucket; seconds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus has them: each counts all that is not above its bound."""
        total, buckets = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return buckets


class Metrics:
    """Written on the event loop only."""

    def __init__(self) -> None:
        self.requests: defaultdict[tuple[str, str], int] = defaultdict(int)
        """By (route, outcome): stop, length, cancelled or the name of an error."""
        self.running = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.first = Histogram(FIRST_S)
        self.between = Histogram(BETWEEN_S)
        self.whole = Histogram(WHOLE_S)
        self.stages = {name: Histogram(FIRST_S) for name in _STAGES}

    def used(self, usage: Usage) -> None:
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens

    def lived(self, timeline: Timeline) -> None:
        for name, (begin, end) in _STAGES.items():
            seconds = timeline.between(begin, end)
            if seconds is not None:
                self.stages[name].observe(seconds)

    async def page(self) -> bytes:
        """In the text format. Figures are copied here, and written in a thread: that takes milliseconds."""
        page: bytes = await asyncio.to_thread(generate_latest, _Copy(list(self._families())))
        return page

    def _families(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "pdfleet_requests", "HTTP requests for answers that ended.", labels=("route", "outcome")
        )
        for labels, count in self.requests.items():
            requests.add_metric(labels, count)
        yield requests
        yield GaugeMetricFamily("pdfleet_requests_running", "HTTP requests for answers now.", self.running)
        for name, help, value in (
            ("pdfleet_prompt_tokens", "Tokens of prompts that were answered.", self.prompt_tokens),
            ("pdfleet_cached_tokens", "Those of them whose KV was found.", self.cached_tokens),
            ("pdfleet_completion_tokens", "Tokens drawn.", self.completion_tokens),
        ):
            yield CounterMetricFamily(name, help, value)
        for name, help, histogram in (
            ("pdfleet_time_to_first_token_seconds", "Request read to first frame written.", self.first),
            ("pdfleet_inter_token_seconds", "Between two frames of one answer.", self.between),
            ("pdfleet_request_seconds", "Request read to last byte written.", self.whole),
        ):
            yield HistogramMetricFamily(name, help, histogram.buckets(), histogram.sum)
        stages = HistogramMetricFamily(
            "pdfleet_stage_seconds", "Parts of a request's life.", labels=("stage",)
        )
        for name, histogram in self.stages.items():
            stages.add_metric((name,), histogram.buckets(), histogram.sum)
        yield stages


class _Copy(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        yield from self._families
        yield from PROCESS_COLLECTOR.collect()
