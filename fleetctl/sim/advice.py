"""What fleet a workload wants: arrangements by estimate, the promising ones searched, one recommended. Pure.

An arrangement is GPUs a worker, prefill apart or not, and tokens of a step; only the number of its workers is
searched by simulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetctl.sim.estimate import Demand, Device, apart, together
from fleetctl.sim.search import Search, Shape, Trial

CHUNKS = (512, 1024, 2048, 4096)
"""Tokens of an aggregated worker's step that are considered."""
NEAR = 1.25
"""Times the fewest GPUs: what needs more by its work alone is not simulated."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    gpus: int
    """Of a worker."""
    apart: bool
    step_tokens: int
    """Of prefill workers' steps, or of aggregated ones'."""
    alone: float = 1.0
    """Share of the requests that meet their objectives where nobody else asks."""
    least: Shape | None = None
    """By its work alone; None: no number of such workers does."""

    @property
    def least_gpus(self) -> int | None:
        return None if self.least is None else self.least.workers * self.gpus

    def __str__(self) -> str:
        kind = "prefill and decode apart" if self.apart else "aggregated"
        return f"{kind}, steps of {self.step_tokens}, {self.gpus} GPU{'s' * (self.gpus > 1)} a worker"


def arrangements(
    demand: Demand, devices: Mapping[int, Device], step_tokens: int, rate: float | None = None
) -> list[Arrangement]:
    """All that are considered, those that need fewest GPUs by estimate first. `devices`: by GPUs a worker;
    `rate`: None takes the demand's."""
    made = []
    rate = demand.rate if rate is None else rate
    for gpus, device in devices.items():
        alone = device.alone(demand, step_tokens)
        split = apart(demand, device, step_tokens, rate)
        made.append(Arrangement(gpus, True, step_tokens, alone, Shape(*split) if split else None))
        for chunk in CHUNKS:
            count = together(demand, device, chunk, rate)
            least = Shape(0, count) if count else None
            made.append(Arrangement(gpus, False, chunk, device.alone(demand, chunk), least))
    return sorted(
        made, key=lambda one: (one.least_gpus is None, one.least_gpus or 0, one.gpus, not one.apart)
    )


def promising(made: Sequence[Arrangement], target: float, most_gpus: int) -> list[Arrangement]:
    """Those to be searched, so that both ways are compared: of each the number of GPUs a worker that needs
    fewest, and one more if it is near; of aggregated workers, for each, two step sizes that need fewest."""
    able = [
        one
        for one in made
        if one.least_gpus is not None and one.least_gpus <= most_gpus and one.alone >= target
    ]
    chosen: list[Arrangement] = []
    for split, each in ((True, 1), (False, 2)):
        kind = [one for one in able if one.apart is split]
        least = min((one.least_gpus or 0 for one in kind), default=0)
        near = [one for one in kind if (one.least_gpus or 0) <= NEAR * least]
        widths = list(dict.fromkeys(one.gpus for one in near))[:2]
        for width in widths:
            # Of equals the smaller steps: they hold up running streams less.
            chosen += [one for one in kind if one.gpus == width][:each]
    return sorted(chosen, key=lambda one: (one.least_gpus or 0, not one.apart))


@dataclass(slots=True)
class Found:
    """An arrangement and what simulations said of it."""

    arrangement: Arrangement
    search: Search
    skipped: str = ""
    """Why fewer GPUs than those that another needs cannot come of it; empty: they may."""
    unfinished: str = ""
    """Why it was not searched to its end; empty: it was."""

    @property
    def best(self) -> Trial | None:
        return self.search.best

    @property
    def gpus(self) -> int | None:
        return None if self.best is None else self.best.shape.workers * self.arrangement.gpus


@dataclass(frozen=True, slots=True)
class Advice:
    found: Found | None
    """None: nothing attains."""
    why: str


def advise(founds: Sequence[Found], target: float) -> Advice:
    """Fewest GPUs; of as many, the highest attainment."""
    passed = [(one.gpus, one.best, one) for one in founds if one.gpus is not None and one.best is not None]
    if not passed:
        if any(one.unfinished for one in founds):
            return Advice(None, f"nothing that was simulated attains {target:.0%}, and --effort is used up")
        return Advice(None, f"no fleet of as many GPUs as are allowed attains {target:.0%}")
    gpus, best, chosen = min(passed, key=lambda one: (one[0], -one[1].attainment))
    why = f"{gpus} GPUs, and {best.attainment:.1%} attain"
    rivals = [one for one in passed if one[2].arrangement.apart is not chosen.arrangement.apart]
    mine, other = ("apart", "aggregated") if chosen.arrangement.apart else ("aggregated", "apart")
    if rivals:
        least, rival, _ = min(rivals, key=lambda one: (one[0], -one[1].attainment))
        if least > gpus:
            why += f"; {other} needs {least}: {least / gpus - 1:.0%} more"
        else:
            why += f"; {other} needs as many, and {rival.attainment:.1%} attain there: little between them"
    elif any(one.arrangement.apart is not chosen.arrangement.apart and one.skipped for one in founds):
        why += f"; {other} would need more by its work alone"
    elif any(one.arrangement.apart is not chosen.arrangement.apart and one.unfinished for one in founds):
        why += f"; of {other} none was found that does, in the effort that was allowed"
    else:
        why += f"; {other} does not attain {target:.0%}"
    if chosen.unfinished:
        why += "; fewer may do: --effort was used up"
    return Advice(chosen, f"{mine}: {why}")


def nothing(considered: Sequence[Arrangement], target: float, most_gpus: int) -> str:
    """Why nothing is worth a simulation; empty where something is."""
    if promising(considered, target, most_gpus):
        return ""
    most = max((one.alone for one in considered), default=0.0)
    if most < target:
        return (
            f"no such fleet attains {target:.0%}: even where nobody else asks, at most {most:.1%} of the "
            "requests meet their objectives; a worker of more or faster GPUs is needed, or other objectives"
        )
    if all(one.least is None for one in considered):
        return f"no number of such workers attains {target:.0%}: a step takes longer than TPOT allows"
    return f"the work alone needs more than the {most_gpus} GPUs that are allowed"


def crossing(
    demand: Demand,
    devices: Mapping[int, Device],
    step_tokens: int,
    factors: Sequence[float] = (0.125, 0.25, 0.5, 1, 2, 4, 8),
) -> list[dict[str, Any]]:
    """GPUs that are needed by the work alone, at multiples of the rate: where which way needs fewer."""
    rows = []
    for factor in factors:
        rate = demand.rate * factor
        able = [one for one in arrangements(demand, devices, step_tokens, rate) if one.least_gpus is not None]
        row: dict[str, Any] = {"rate": round(rate, 4)}
        for split, name in ((True, "apart"), (False, "aggregated")):
            counts = [one.least_gpus for one in able if one.apart is split and one.least_gpus is not None]
            if counts:
                row[name] = min(counts)
        rows.append(row)
    return rows
