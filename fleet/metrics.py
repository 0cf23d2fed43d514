"""Figures for Prometheus as words: counters, gauges, histograms and their buckets. Pure.

Whoever counts gives `Family` objects, cheap copies of what it holds; `fleet/telemetry.py` writes them.
Label values come from closed sets only: nothing a client sends is one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

FIRST_S = (
    *(0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 15.0, 30.0, 60.0, 120.0),
)
"""Buckets of the time to the first token and of what it is made of, seconds: dense where objectives lie."""
BETWEEN_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)
"""Of the time between two tokens, and of an engine step."""
WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Of a whole request."""
STAGE_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8),
    *(1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Of the parts of a request's life: the same for all of them, or no sum over them could be read."""
SHORT_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0),
)
"""Of a pull of KV."""
SEQUENCES = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 512.0)
"""Of sequences in a step."""
TOKENS = tuple(float(1 << bits) for bits in range(15))
"""Of tokens in a step: 1 to 16384."""


class Buckets:
    """Counts by bucket. Only grows."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """What is negative, or no number, was never measured: it is left out, or one would spoil the sum."""
        if value >= 0:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        bounds, counts = self.bounds, self.counts
        for value in values:  # Hundreds at once: a gap each token.
            if value >= 0:
                counts[bisect_left(bounds, value)] += 1
                self.sum += value

    def copy(self) -> Buckets:
        other = Buckets(self.bounds)
        other.counts = self.counts.copy()
        other.sum = self.sum
        return other

    @property
    def total(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus has them: each counts all that is not above its bound."""
        total, buckets = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return buckets


class Kind(StrEnum):
    COUNTER = "counter"
    """A total since start; its name gets `_total` when it is written."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One name and all its series, as they were at one moment."""

    name: str
    kind: Kind
    help: str
    labels: Labels
    """Their names."""
    series: Mapping[Labels, float | Buckets]
    """By values of the labels. What was never measured is not there."""


def counter(name: str, help: str, labels: Labels, series: Mapping[Labels, float]) -> Family:
    return Family(name, Kind.COUNTER, help, labels, dict(series))


def gauge(name: str, help: str, labels: Labels, series: Mapping[Labels, float]) -> Family:
    return Family(name, Kind.GAUGE, help, labels, dict(series))


def histogram(name: str, help: str, labels: Labels, series: Mapping[Labels, Buckets]) -> Family:
    copies: dict[Labels, float | Buckets] = {key: buckets.copy() for key, buckets in series.items()}
    return Family(name, Kind.HISTOGRAM, help, labels, copies)


def value(name: str, help: str, kind: Kind, number: float | None) -> Family:
    """Of a family without labels; None: unknown, so absent."""
    return Family(name, kind, help, (), {} if number is None else {(): number})


def add(families: Sequence[Family], labels: Mapping[str, str]) -> list[Family]:
    """The same with labels that all series have."""
    names, values = tuple(labels), tuple(labels.values())
    return [
        Family(
            family.name,
            family.kind,
            family.help,
            (*names, *family.labels),
            {(*values, *key): number for key, number in family.series.items()},
        )
        for family in families
    ]
