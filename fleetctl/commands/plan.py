"""`plan`: how many prefill and decode workers a workload wants, or whether to keep both together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleet.errors import BadRequest
from fleetctl.commands.bench import JUDGED, WORKLOAD, options, plan_of
from fleetctl.options import Target, fleet_options

if TYPE_CHECKING:
    from fleetctl.sim.estimate import Device
    from fleetctl.sim.planning import Planning

_DEVICE = (
    click.option(
        "--model", default="llama-3.1-8b", show_default=True, metavar="NAME", help="What is served."
    ),
    click.option("--gpu", default="h100", show_default=True, metavar="NAME", help="a100, h100 or h200."),
    click.option(
        "--gpus", "widths", type=click.IntRange(1), multiple=True, metavar="N",
        help="Of a worker; several times: tries each.  [default: 1, 2, 4 and 8, where the model fits]",
    ),
    click.option(
        "--calibration", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
        help="Measured times instead of computed ones (as of `fleetctl sim`), with one --gpus.",
    ),
    click.option(
        "--kv-tokens", type=click.IntRange(1), metavar="N",
        help="Tokens whose KV a worker has room for.  [default: what the GPU's memory leaves]",
    ),
)  # fmt: skip
_SEARCH = (
    click.option(
        "--rate", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True, metavar="N",
        help="Conversations a second; of a trace --speed decides.",
    ),
    click.option(
        "--cached", "cached", type=click.FloatRange(0, 1, max_open=True), metavar="SHARE",
        help="Of each prompt, a beginning that it shares with others (one of --prefixes).",
    ),
    click.option(
        "--target", "wanted", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.95,
        show_default=True, metavar="SHARE", help="Share of requests that must attain their objectives.",
    ),
    click.option(
        "--most-gpus", type=click.IntRange(1), default=256, show_default=True, metavar="N",
        help="No plan has more.",
    ),
    click.option(
        "--requests", type=click.IntRange(20), metavar="N",
        help="Conversations of each simulation.  [default: 100 to 3,000, by rate, answers and --effort]",
    ),
    click.option(
        "--effort", "effort_s", type=click.FloatRange(1), default=60.0, show_default=True, metavar="SECONDS",
        help="Of a processor, about, for all simulations; what is found does not depend on its speed.",
    ),
    click.option(
        "--step-tokens", type=click.IntRange(2), default=8192, show_default=True,
        help="Tokens of a prefill worker's step; half and twice as many are tried in the end.",
    ),
    click.option("--max-batch", type=click.IntRange(1), default=256, show_default=True, help="Sequences."),
    click.option("--block-size", type=click.IntRange(1), default=64, show_default=True, help="Tokens."),
    click.option(
        "--estimate", "only_estimate", is_flag=True, help="Simulates nothing: what the work alone needs."
    ),
)  # fmt: skip


@click.command()
@fleet_options(etcd=False)
@options(_DEVICE, _SEARCH, WORKLOAD, JUDGED)
def plan(target: Target, only_estimate: bool, **given: Any) -> None:
    """Say what fleet a workload wants: prefill and decode workers, GPUs of each, tokens of a step.

    First by the work alone, then by short simulations of what is promising, prefill apart and aggregated. The
    same flags with the same --seed find the same.
    """
    from fleetctl.sim.plan_report import as_dict, table

    try:
        with Progress(target.as_json) as progress:
            planning = planning_of(given)
            if not only_estimate:
                planning.search(progress.show)
    except ValueError as error:
        raise BadRequest(str(error)) from None
    said = {"model": given["model"], "gpu": given["gpu"], **as_dict(planning)}
    if target.as_json:
        target.say("", **said)
        return
    from fleetctl.view import terminal

    terminal().print(table(said))


def planning_of(given: Mapping[str, Any]) -> Planning:
    """Raises `ValueError` and `BadRequest` for what cannot be."""
    from fleetctl.bench.play import trace_lines
    from fleetctl.sim.planning import Planning, Wanted

    usual = {"ramp_to": None, "lag_limit_ms": 1.0, "warm_up_s": 0.0}
    plan = plan_of({**given, **_shared(given), **usual})
    if plan.source.trace and given["cached"] is not None:
        raise BadRequest("--cached is for drawn workloads: what a trace shares stands in it")
    devices, kv_bytes = _devices(given)
    wanted = Wanted(
        given["wanted"],
        given["most_gpus"],
        given["step_tokens"],
        given["block_size"],
        given["requests"],
        given["warm_up_s"],
        given["effort_s"],
    )
    lines = trace_lines(plan.source.trace) if plan.source.trace else ()
    return Planning(plan, lines, devices, kv_bytes, wanted)


def _shared(given: Mapping[str, Any]) -> dict[str, Any]:
    """`--cached`: a part of each prompt becomes a beginning that others have, too."""
    share = given["cached"]
    if not share:
        return {}
    if given["prefix_tokens"] or given["kinds"]:
        raise BadRequest("--cached says the same as --prefix-tokens: give one of them, and no --kind")
    from fleet.workload import Amount

    amount = Amount.parse(given["prompt"])
    scaled = replace(
        amount,
        first=amount.first * (1 - share),
        # Of a lognormal it is the width of the logarithm.
        second=amount.second * (1 if amount.kind == "lognormal" else 1 - share),
        least=amount.least * (1 - share),
        most=amount.most * (1 - share),
    )
    prefix = round(amount.mean * share)
    count = given["prefixes"] if given["prefixes"] > 1 else 16
    return {"prompt": str(scaled), "prefix_tokens": prefix, "prefixes": count}


def _devices(given: Mapping[str, Any]) -> tuple[dict[int, Device], float]:
    """By GPUs of a worker; and bytes of a token's KV."""
    from fleetctl.commands.sim import device_of
    from fleetctl.sim.estimate import Device

    widths = given["widths"] or ((1, 2, 4, 8) if given["calibration"] is None else (1,))
    if given["calibration"] is not None and len(widths) > 1:
        raise BadRequest("--calibration is of one number of GPUs: give one --gpus")
    made: dict[int, Device] = {}
    kv_bytes, refused = 0.0, ""
    for width in widths:
        try:
            speed, kv_bytes, kv_tokens = device_of({**given, "gpus": width})
        except ValueError as error:
            refused = str(error)
            continue
        made[width] = Device(speed, kv_tokens, given["max_batch"])
    if not made:
        raise ValueError(refused)
    return made, kv_bytes


class Progress:
    """What is played, on the error output where that is a terminal."""

    def __init__(self, quiet: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        from fleetctl.view import terminal

        console = terminal(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
        shown = not quiet and console.is_terminal
        self._bar = Bar(*columns, console=console, transient=True, disable=not shown)
        self._task = self._bar.add_task("work alone", total=None)
        self._runs = 0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, title: str, ended: int, total: int) -> None:
        if ended == 1:
            self._runs += 1
        told = f"simulation {self._runs}: {title}"
        self._bar.update(self._task, description=told, completed=ended, total=total)
