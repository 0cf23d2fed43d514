"""`sim`: the fleet on another clock: what a fleet of this shape would make of a workload."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleet.errors import BadRequest
from fleetctl.commands.bench import HTML, JUDGED, RATE, WORKLOAD, check_writable, options, plan_of
from fleetctl.commands.sim_scaling import SCALING, scaling_of
from fleetctl.options import Target, fleet_options

if TYPE_CHECKING:
    from fleetctl.bench.plan import Plan
    from fleetctl.sim.speed import Speed
    from fleetctl.sim.words import Setup

DEVICE = (
    click.option(
        "--model", default="llama-3.1-8b", show_default=True, metavar="NAME",
        help="What is served: its size decides how long steps take and what KV weighs.",
    ),
    click.option("--gpu", default="h100", show_default=True, metavar="NAME", help="a100, h100 or h200."),
    click.option(
        "--gpus", type=click.IntRange(1), default=1, show_default=True, help="Of each worker."
    ),
    click.option(
        "--calibration", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
        help="Times that were measured, instead of those computed from model and GPU: lines of `python -m "
        "benchmarks engine`, or Splitwise's CSV.",
    ),
    click.option(
        "--kv-tokens", type=click.IntRange(1), metavar="N",
        help="Tokens whose KV a worker has room for.  [default: what the GPU's memory leaves]",
    ),
)  # fmt: skip
FLEET = (
    click.option("--prefill", type=click.IntRange(0), default=1, show_default=True, help="0: aggregated."),
    click.option("--decode", type=click.IntRange(1), default=1, show_default=True, help="Decode workers."),
    click.option("--routers", type=click.IntRange(1), default=1, show_default=True, help="In turns."),
    click.option(
        "--policy", type=click.Choice(["precise", "approximate", "least_loaded", "round_robin", "random"]),
        default="precise", show_default=True,
        help="How routers choose workers: as they serve, or otherwise, to compare.",
    ),
    click.option(
        "--admission", type=click.Choice(["off", "observe", "enforce"]), default="enforce", show_default=True,
        help="Whether routers let requests wait, and refuse them.",
    ),
    click.option(
        "--step-tokens", type=click.IntRange(2), default=8192, show_default=True,
        help="Tokens of a prefill worker's step.",
    ),
    click.option(
        "--decode-step-tokens", type=click.IntRange(2), default=1024, show_default=True,
        help="Tokens of a decode worker's step, prompts beside running streams.",
    ),
    click.option("--max-batch", type=click.IntRange(1), default=256, show_default=True, help="Sequences."),
    click.option("--block-size", type=click.IntRange(1), default=64, show_default=True, help="Tokens."),
    click.option(
        "--link-gbits", type=click.FloatRange(0, min_open=True), default=400.0, show_default=True,
        help="Of a host's link.",
    ),
    click.option("--workers-per-host", type=click.IntRange(1), default=8, show_default=True, help="On it."),
    click.option(
        "--fault", "faults", multiple=True, metavar="TEXT",
        help="crash:decode-0@30+10: killed at second 30, another life 10 s later; freeze:prefill-1@60+5.",
    ),
)  # fmt: skip


@click.command()
@fleet_options(etcd=False)
@options(DEVICE, FLEET, SCALING, RATE, WORKLOAD, JUDGED, HTML)
def sim(target: Target, html: Path | None, records: Path | None, **given: Any) -> None:
    """Play a workload on a fleet that is not there, and say how many requests met their objectives.

    The router, the services and the schedulers that serve run in virtual time; only how long a step takes is
    a model. The same flags with the same --seed always find the same.
    """
    from fleetctl.sim.play import simulate
    from fleetctl.sim.report import report, table

    check_writable(html, records)
    try:
        plan = plan_of({**given, "lag_limit_ms": 1.0})
        setup = setup_of(given, plan)
        from fleetctl.bench.play import trace_lines

        lines = trace_lines(plan.source.trace) if plan.source.trace else ()
        with _Progress(target.as_json) as progress:
            played = simulate(setup, plan.source.conversations(lines), progress.show)
    except ValueError as error:
        raise BadRequest(str(error)) from None
    if records is not None:
        records.write_text("".join(json.dumps(one.as_dict()) + "\n" for one in played.asked))
    said = {**report(setup, played), "workload": plan.as_dict()}
    if html is not None:
        from fleetctl.sim.page import sim_page

        html.write_text(sim_page(said, plan, played), encoding="utf-8")
    if target.as_json:
        target.say("", **said)
        return
    from fleetctl.view import terminal

    terminal().print(table(said))
    for path in (html, records):
        if path is not None:
            click.echo(f"written: {path}")


def setup_of(given: Mapping[str, Any], plan: Plan) -> Setup:
    """Raises `ValueError` for what cannot be."""
    from fleetctl.sim.policies import Policy
    from fleetctl.sim.words import Fault, Setup

    speed, kv_bytes, kv_tokens = device_of(given)
    usual = "default"
    return Setup(
        speed=speed,
        kv_bytes=kv_bytes,
        kv_tokens=given["kv_tokens"] or kv_tokens,
        prefill=given["prefill"],
        decode=given["decode"],
        routers=given["routers"],
        policy=Policy(given["policy"]),
        admission=given["admission"],
        objectives={**plan.objectives, usual: plan.default},
        default_class=usual,
        block_size=given["block_size"],
        max_batch=given["max_batch"],
        step_tokens=given["step_tokens"],
        decode_step_tokens=given["decode_step_tokens"],
        link_bytes_s=given["link_gbits"] * 1e9 / 8,
        workers_per_host=given["workers_per_host"],
        faults=tuple(map(Fault.parse, given["faults"])),
        scaling=scaling_of(given),
        warm_up_s=plan.warm_up_s,
        seed=plan.source.seed,
    )


def device_of(given: Mapping[str, Any]) -> tuple[Speed, float, int]:
    """Speed of a worker, bytes of a token's KV, and how many tokens have room."""
    from fleetctl.sim.devices import GPUS, MODELS
    from fleetctl.sim.speed import Roofline, benchmark_samples, fit, splitwise_samples

    model, gpu = _known(given["model"], MODELS, "model"), _known(given["gpu"], GPUS, "GPU")
    roofline = Roofline(model, gpu, given["gpus"])
    kv_tokens = given["kv_tokens"] or roofline.kv_tokens()
    if not kv_tokens:
        raise ValueError(
            f"{given['model']} does not fit {given['gpus']} {given['gpu']}: give a worker more with --gpus"
        )
    path: Path | None = given["calibration"]
    if path is None:
        return roofline, model.kv_bytes, kv_tokens
    try:
        lines = path.read_text().splitlines()
        if lines and lines[0].startswith("model,hardware"):
            samples = splitwise_samples(lines, given["model"], f"{given['gpu']}-80gb", given["gpus"])
        else:
            samples = benchmark_samples(lines)
        return fit(samples), model.kv_bytes, kv_tokens
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--calibration {path}: {error}; it takes what `python -m benchmarks engine` printed, or "
            "Splitwise's CSV"
        ) from None


def _known(name: str, table: Mapping[str, Any], what: str) -> Any:
    if name not in table:
        raise ValueError(f"{name!r} is no {what} that is known here; there are: {', '.join(table)}")
    return table[name]


class _Progress:
    """On the error output, where that is a terminal."""

    def __init__(self, quiet: bool) -> None:
        from rich.progress import Progress

        from fleetctl.view import terminal

        console = terminal(stderr=True)
        shown = not quiet and console.is_terminal
        self._bar = Progress(console=console, transient=True, auto_refresh=False, disable=not shown)
        self._task = self._bar.add_task("simulated", total=None)
        self._seen = 0

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, asked: int, ended: int, now: float) -> None:
        self._seen += 1
        if self._seen % 100 == 0:
            self._bar.update(self._task, description=f"{now:,.0f} s: {ended:,} of {asked:,} asked have ended")
            self._bar.refresh()
