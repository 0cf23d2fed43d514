"""Plots as SVG, from numbers alone: axes, lines, points and a legend. Pure.

Colours are those of the page's style sheet (`.series-0` …), so that light and dark both work; every series is
also told apart by its dashes or its marks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 14, 44
_LEAST_SPAN = 1e-200
"""An axis spans more, so that a fifth of it is still a number."""


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    line: bool = True
    """Joined; else marks alone."""
    marks: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """A straight line at one value: an objective, a target."""

    name: str
    at: float
    vertical: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    title: str
    logarithmic: bool = False
    """Only where all values are above 0."""
    least: float | None = None
    most: float | None = None


def plot(title: str, x: Axis, y: Axis, series: Sequence[Series], rules: Sequence[Rule] = ()) -> str:
    """One plot, with `title` for those who do not see it. No points at all: a plot that says so."""
    shown = [one for one in series if one.points]
    xs = [point[0] for one in shown for point in one.points] + [one.at for one in rules if one.vertical]
    ys = [point[1] for one in shown for point in one.points] + [one.at for one in rules if not one.vertical]
    across = _Scale(x, xs, _LEFT, WIDTH - _RIGHT)
    up = _Scale(y, ys, HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">',
        *_axes(x, y, across, up),
        *_rules(rules, across, up),
    ]
    for number, one in enumerate(shown):
        places = [(across.place(a), up.place(b)) for a, b in one.points]
        kind = f"series-{number % 6}"
        if one.line:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in _thinned(places))
            parts.append(f'<polyline class="{kind} line" points="{path}"/>')
        if one.marks or not one.line:
            radius = 3 if one.marks else 1.6
            parts += [
                f'<circle class="{kind} mark" cx="{a:.1f}" cy="{b:.1f}" r="{radius}"/>' for a, b in places
            ]
    if not shown:
        parts.append(f'<text class="none" x="{WIDTH / 2}" y="{HEIGHT / 2}">nothing was measured</text>')
    legend = ""
    if len(shown) > 1:
        keys = (
            f'<span><i class="key series-{number % 6}"></i>{escape(one.name)}</span>'
            for number, one in enumerate(shown)
        )
        legend = f"<figcaption>{''.join(keys)}</figcaption>"
    return f"<figure><h3>{escape(title)}</h3>{''.join(parts)}</svg>{legend}</figure>"


def cdf(values: Sequence[float], points: int = 200) -> list[tuple[float, float]]:
    """(value, share of the values that it is not below), at most so many points: the tail is all there."""
    ordered = sorted(values)
    total = len(ordered)
    if total <= points:
        return [(value, (rank + 1) / total) for rank, value in enumerate(ordered)]
    # Even steps for the middle; every value of the last percent, up to a quarter of the points.
    tail = min(points // 4, max(1, total // 100))
    ranks = {round(step * (total - 1) / (points - tail - 1)) for step in range(points - tail)}
    ranks |= set(range(total - tail, total))
    return [(ordered[rank], (rank + 1) / total) for rank in sorted(ranks)]


class _Scale:
    """From values to places on the picture."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        usable = [value for value in values if math.isfinite(value) and (value > 0 or not axis.logarithmic)]
        low = min(usable, default=1.0 if axis.logarithmic else 0.0) if axis.least is None else axis.least
        high = max(usable, default=low + 1) if axis.most is None else axis.most
        if not axis.logarithmic and axis.least is None:
            low = min(low, 0.0)
        if high - low <= max(_LEAST_SPAN, 1e-9 * max(abs(low), abs(high))):
            high = low * 2 if low > _LEAST_SPAN else low + 1
        self.logarithmic = axis.logarithmic
        self.ticks = list(_decades(low, high) if axis.logarithmic else _steps(low, high))
        if axis.most is None and not axis.logarithmic:
            high = max(high, self.ticks[-1])
        if axis.logarithmic and sum(low <= tick <= high for tick in self.ticks) < 2:
            # So little lies apart that no two round numbers are between: those around it are shown.
            low = max((tick for tick in self.ticks if tick <= low), default=low)
            high = min((tick for tick in self.ticks if tick >= high), default=high)
        self._low, self._high = self._value(low), self._value(high)
        self._start, self._end = start, end
        self.ticks = [tick for tick in self.ticks if low <= tick * (1 + 1e-9) and tick <= high * (1 + 1e-9)]

    def place(self, value: float) -> float:
        if self.logarithmic and value <= 0:
            return self._start
        share = (self._value(value) - self._low) / (self._high - self._low)
        return self._start + min(1.0, max(0.0, share)) * (self._end - self._start)

    def _value(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value


def _steps(low: float, high: float) -> Iterator[float]:
    """About five round numbers."""
    raw = (high - low) / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    for number in range(first, first + math.ceil((high - low) / step - 1e-9) + 1):
        yield number * step


def _decades(low: float, high: float) -> Iterator[float]:
    """1, 2 and 5 of each decade, or the decades alone where there are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1,) if last - first > 4 else (1, 2, 5)
    for decade in range(first, last + 1):
        for factor in factors:
            yield float(factor * 10**decade) if decade >= 0 else factor / 10**-decade


def _axes(x: Axis, y: Axis, across: _Scale, up: _Scale) -> Iterator[str]:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    for tick in across.ticks:
        at = across.place(tick)
        yield f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}"/>'
        yield f'<text class="tick middle" x="{at:.1f}" y="{bottom + 16}">{_number(tick)}</text>'
    for tick in up.ticks:
        at = up.place(tick)
        yield f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>'
        yield f'<text class="tick end" x="{_LEFT - 6}" y="{at + 4:.1f}">{_number(tick)}</text>'
    yield f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>'
    yield f'<text class="title middle" x="{(_LEFT + right) / 2}" y="{HEIGHT - 8}">{escape(x.title)}</text>'
    middle = (_TOP + bottom) / 2
    turned = f'transform="rotate(-90 14 {middle})"'
    yield f'<text class="title middle" x="14" y="{middle}" {turned}>{escape(y.title)}</text>'


def _rules(rules: Sequence[Rule], across: _Scale, up: _Scale) -> Iterator[str]:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    for number, rule in enumerate(rules):
        name = escape(rule.name)
        if rule.vertical:
            at = across.place(rule.at)
            # Near the right edge the name stands on the other side of its line; several, one below the other.
            side, shift = ("end", -5) if at > WIDTH * 0.75 else ("start", 5)
            yield f'<line class="rule" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}"/>'
            y = bottom - 8 - 14 * number
            yield f'<text class="tick {side}" x="{at + shift:.1f}" y="{y}">{name}</text>'
        else:
            at = up.place(rule.at)
            yield f'<line class="rule" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>'
            yield f'<text class="tick start" x="{_LEFT + 6}" y="{at + 13:.1f}">{name}</text>'


def _thinned(places: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Without those that stand where the one before does."""
    last: tuple[float, float] | None = None
    for place in places:
        rounded = (round(place[0], 1), round(place[1], 1))
        if rounded != last:
            yield place
        last = rounded


def _number(value: float) -> str:
    if value and abs(value) < 1e-3:
        return f"{value:.0e}"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.6g}"
