"""How many workers of which revision there are to be next, of both roles in proportion. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Side:
    """One role: workers of the revision that is to be, and of all others."""

    wanted: int
    new: int = 0
    """Asked for, of the revision that is to be."""
    new_there: int = 0
    """Those that exist, also on their way out."""
    new_ready: int = 0
    old: int = 0
    """Asked for, of all others."""
    old_there: int = 0
    """Of all others, those whose place is not free yet, also on their way out."""
    old_stuck: int = 0
    """Of all others, those that will not serve: worth nothing."""


@dataclass(frozen=True, slots=True)
class Step:
    new: Mapping[str, int]
    old: Mapping[str, int]
    step: int
    """How many steps both roles have behind them."""
    steps: int
    complete: bool
    """All are of the revision that is to be, ready, and no other is left."""
    why: str


def part(percent: int, wanted: int) -> int:
    """Of `wanted`; at least one where `percent` is above 0."""
    return max(1, wanted * percent // 100) if percent and wanted else 0


def next_step(
    sides: Mapping[str, Side],
    surge_percent: int,
    unavailable_percent: int,
    paused: bool = False,
    most: int | None = None,
) -> Step:
    """Absolute numbers: acting on an old picture twice is acting on it once. `most`: steps that may count as
    done, as routers are not ready for more; None: all."""
    surge = {role: part(surge_percent, side.wanted) for role, side in sides.items()}
    missing = {role: part(unavailable_percent, side.wanted) for role, side in sides.items()}
    steps = max(
        (-(-side.wanted // max(1, surge[role] + missing[role])) for role, side in sides.items()), default=0
    )

    def goal(role: str, step: int) -> int:
        return -(-step * sides[role].wanted // steps) if steps else 0

    done = max(
        step
        for step in range(steps + 1)
        if all(side.new_ready >= goal(role, step) for role, side in sides.items())
    )
    held = most is not None and done > most
    done = done if most is None else min(done, most)
    alone = all(side.old == 0 and side.old_there == 0 for side in sides.values())
    if alone:
        new = {role: side.wanted for role, side in sides.items()}
        complete = all(side.new_ready == side.new == side.new_there == side.wanted for side in sides.values())
        over = any(side.new_there > side.wanted for side in sides.values())
        why = "as wanted" if complete else "workers leave" if over else "workers start"
        return Step(new, dict.fromkeys(sides, 0), steps if complete else done, steps, complete, why)
    ahead = done if paused else min(done + 1, steps)
    new, old = {}, {}
    for role, side in sides.items():
        stays = side.wanted - goal(role, done)
        if not paused:
            # Where some may be missing, they make room before their successors are ready.
            stays = max(side.wanted - goal(role, ahead), stays - missing[role])
        if side.old_stuck and not paused:
            stays = min(stays, side.old - side.old_stuck)
        old[role] = max(0, stays)
        room = side.wanted + surge[role] - side.old_there
        started = min(side.new, side.wanted)
        new[role] = started if paused else min(side.wanted, max(started, min(goal(role, ahead), room)))
    if paused:
        why = f"paused after step {done} of {steps}"
    elif held:
        why = f"step {ahead} of {steps}: waiting for a router to be ready"
    elif done == steps:
        why = "the last of the old ones leave"
    elif any(new[role] < goal(role, ahead) for role in sides):
        why = f"step {ahead} of {steps}: old ones leave before new ones find room"
    else:
        why = f"step {ahead} of {steps}: waiting for new workers of both roles to be ready"
    return Step(new, old, done, steps, False, why)


def shrink(there: Mapping[str, int], goal: int, proven: str) -> dict[str, int]:
    """How `goal` workers are made up of old revisions: those that never served alone go first, and what is
    missing is of the proven one; without it, of whichever has most."""
    left = dict(there)
    for revision in sorted(left, key=lambda name: (name == proven, name)):
        over = sum(left.values()) - goal
        left[revision] -= min(max(over, 0), left[revision])
    short = goal - sum(left.values())
    if short > 0 and left:
        best = proven if proven in left else max(left, key=lambda name: (left[name], name))
        left[best] += short
    return left
