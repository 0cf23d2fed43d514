"""What a run of the load generator is to do: workload, objectives, limits. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fleet.errors import BadRequest
from fleet.objectives import CLASS_NAME, CLASSES, STANDARD, Objectives
from fleet.workload import Amount, Arrivals, Conversation, Kind, Shape, drawn, trace


@dataclass(frozen=True, slots=True)
class Source:
    """Where the conversations come from: a trace, or arrivals and kinds."""

    trace: str = ""
    """Path of a trace; empty: drawn."""
    arrivals: Arrivals = field(default_factory=lambda: Arrivals.steady(1.0))
    kinds: tuple[Kind, ...] = (Kind(),)
    shape: Shape = field(default_factory=Shape)
    seed: int = 0
    """Also part of every text: another seed finds nothing of an earlier run's in a cache."""

    def conversations(self, lines: Iterable[str]) -> Iterator[Conversation]:
        """`lines` are the trace's; unused where there is none."""
        raw = trace(lines, self.seed) if self.trace else drawn(self.arrivals, self.kinds, self.seed)
        return self.shape.of(raw)

    def at_rate(self, rate: float, seed: int, natural: float | None = None) -> Source:
        """The same in kind, so many conversations a second. A trace, whose own rate is `natural`, is played
        faster or slower."""
        if natural is not None:
            return replace(self, shape=replace(self.shape, speed=rate / natural), seed=seed)
        return replace(self, arrivals=Arrivals.steady(rate, self.arrivals.cv), seed=seed)


@dataclass(frozen=True, slots=True)
class Plan:
    source: Source
    objectives: Mapping[str, Objectives] = field(default_factory=lambda: dict(CLASSES))
    """By class."""
    default: Objectives = CLASSES[STANDARD]
    """Of requests without a class, or of one that has none here."""
    warm_up_s: float = 0.0
    """What is due before this is asked and not judged."""
    ignore_eos: bool = True
    """Answers have exactly the length that was asked for."""
    answers_in_history: bool = True
    """Later turns repeat what the server answered; else nothing was answered."""
    lag_limit_ms: float = 25.0
    """A run whose sends were later than this at the 99th percentile says that it is not to be trusted."""
    misses_limit: int | None = None
    """After so many misses the run has failed and ends."""

    def of(self, service_class: str) -> Objectives:
        return self.objectives.get(service_class, self.default)

    def as_dict(self) -> dict[str, Any]:
        """The settings in a report."""
        source = self.source
        told: dict[str, Any] = {"seed": source.seed, "warm_up_s": self.warm_up_s}
        if source.trace:
            told["trace"] = source.trace
        else:
            told |= {
                "rate": [list(point) for point in source.arrivals.rate],
                "cv": source.arrivals.cv,
                "kinds": [_kind_dict(kind) for kind in source.kinds],
            }
        shape = source.shape
        told["shape"] = {
            one.name: _plain(getattr(shape, one.name))
            for one in fields(shape)
            if getattr(shape, one.name) != getattr(Shape(), one.name)
        }
        used = {kind.service_class for kind in source.kinds} | {""}
        told["objectives"] = {
            name or "default": objectives_dict(self.of(name))
            for name in sorted(used | (set(self.objectives) if source.trace else set()))
        }
        return told | {"ignore_eos": self.ignore_eos, "answers_in_history": self.answers_in_history}


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _kind_dict(kind: Kind) -> dict[str, Any]:
    return {
        one.name: str(value) if isinstance(value := getattr(kind, one.name), Amount) else value
        for one in fields(kind)
    }


_LIMITS = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


def objectives_dict(objectives: Objectives) -> dict[str, float]:
    return {name: limit for name in _LIMITS if (limit := getattr(objectives, name)) is not None}


def parse_objectives(text: str) -> tuple[str, Objectives]:
    """`ttft=2000,tpot=150`, or of one class `interactive:ttft=500,itl=60,itl_percentile=99`. Milliseconds."""
    name, colon, rest = text.partition(":")
    if not colon:
        name, rest = "", text
    elif not CLASS_NAME.fullmatch(name):
        raise BadRequest(f"{name!r} is no name of a class", param="slo")
    limits: dict[str, float] = {}
    for part in rest.split(","):
        key, equals, value = part.strip().partition("=")
        key = key.replace("-", "_").removesuffix("_ms")
        known = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2e": "e2e_ms"}
        known |= {"itl_percentile": "itl_percentile"}
        number = _number(value)
        if not equals or key not in known or number is None:
            raise BadRequest(
                f"{part!r} is no objective; write them as ttft=2000,tpot=150 (also itl, itl_percentile, e2e; "
                "milliseconds), those of one class as NAME:ttft=2000,tpot=150",
                param="slo",
            )
        limits[known[key]] = number
    try:
        return name, Objectives(**limits)  # type: ignore[arg-type]
    except ValueError as error:
        raise BadRequest(str(error), param="slo") from None


def parse_kind(text: str, usual: Kind) -> Kind:
    """`class=batch share=0.3 prompt=lognormal:2000,0.5 output=256 prefix-tokens=512 prefixes=4 turns=1..4`;
    what it does not say is as `usual`."""
    said: dict[str, Any] = {}
    for part in text.split():
        key, equals, value = part.partition("=")
        key = {"class": "service_class"}.get(key, key.replace("-", "_"))
        try:
            match key if equals else "":
                case "prompt" | "output" | "turns" | "think":
                    said[key] = Amount.parse(value)
                case "share" | "popularity":
                    said[key] = float(value)
                case "prefix_tokens" | "prefixes":
                    said[key] = int(value)
                case "service_class":
                    if not CLASS_NAME.fullmatch(value):
                        raise ValueError(f"{value!r} is no name of a class")
                    said[key] = value
                case _:
                    raise ValueError(
                        "known are class=, share=, prompt=, output=, prefix-tokens=, prefixes=, popularity=, "
                        "turns= and think="
                    )
        except ValueError as error:
            raise BadRequest(f"{part!r} in --kind: {error}", param="kind") from None
    try:
        return replace(usual, **said)
    except ValueError as error:
        raise BadRequest(str(error), param="kind") from None


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
