"""Options of `sim` by which a planner scales the simulated fleet, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from fleetctl.sim.words import Scaling

SCALING = (
    click.option(
        "--planner", is_flag=True,
        help="The planner decides how many workers there are; it begins with --prefill and --decode.",
    ),
    click.option("--budget", type=click.IntRange(1), metavar="N", help="Most workers it may want."),
    click.option(
        "--cold-start", type=click.FloatRange(0), default=60.0, show_default=True, metavar="SECONDS",
        help="From a worker's start until it serves.",
    ),
    click.option(
        "--planner-set", "planner_sets", multiple=True, metavar="NAME=VALUE",
        help="A setting of the planner, such as settle-s=60; see python -m planner --help. Repeat.",
    ),
    click.option(
        "--decisions", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
        help="Write every decision, with what it was made from: python -m planner replay FILE.",
    ),
)  # fmt: skip


def scaling_of(given: Mapping[str, Any]) -> Scaling | None:
    """None: the fleet stays as it is. Raises `ValueError` for what cannot be."""
    if not given.get("planner"):
        for name, flag in (("budget", "budget"), ("planner_sets", "planner-set"), ("decisions", "decisions")):
            if given.get(name):
                raise ValueError(f"--{flag} goes with --planner")
        return None
    from fleet.settings import load
    from fleetctl.sim.words import PlannerOnly, Scaling

    wrong = [one for one in given["planner_sets"] if "=" not in one]
    if wrong:
        raise ValueError(f"--planner-set {wrong[0]!r} is not NAME=VALUE")
    cold_s = given["cold_start"]
    flags = [f"--planner.{one.replace('_', '-')}" for one in given["planner_sets"]]
    settings = load(PlannerOnly, [f"--planner.cold-start-s={cold_s}", *flags], {}).planner
    return Scaling(settings, given["budget"], cold_s, given["decisions"])
