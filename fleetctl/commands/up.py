"""`up` and `down`: a whole fleet on this machine, in the foreground with a live view, or detached."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from fleet.errors import FleetError, Unavailable
from fleet.targets import MOST_BUDGET, MOST_WORKERS, Desired, Mode
from fleetctl.commands.model import fetch, plan_fields, plan_text
from fleetctl.commands.operate import look
from fleetctl.machine import memory
from fleetctl.options import DRY_RUN, Target, fleet_options, going_on
from fleetctl.reconcile import CLOSING_ORDER, first_starts
from fleetctl.state import StateFolder, alive
from fleetctl.words import SERVERS, WORKERS, FleetState, Kind, Policy

if TYPE_CHECKING:
    from fleet.model_files import ModelPlan
    from fleetctl.supervisor import FleetPlan, Notice, Supervisor

LATENCY = "latency"
"""The model without weights, which needs no files; times may follow: `latency:base=5,decode=0.2`."""

Say = Callable[[dict[str, Any]], None]


@click.command()
@fleet_options(etcd=False)
@click.option(
    "--model", default="smollm2", show_default=True, help="smollm2, owner/name, folder or .gguf file."
)
@click.option("--served-model-name", "model_name", help="Name clients use.  [default: the model's own]")
@click.option(
    "--prefill", type=click.IntRange(0, MOST_WORKERS), default=1, show_default=True, help="Workers."
)
@click.option("--decode", type=click.IntRange(1, MOST_WORKERS), default=1, show_default=True, help="Workers.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address the router listens on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Of the router; 0 = a free one.",
)
@click.option("--auto", is_flag=True, help="The planner decides how many workers there are.")
@click.option("--budget", type=click.IntRange(1, MOST_BUDGET), help="Most workers it may want. With --auto.")
@click.option("--detach", is_flag=True, help="Return when it is ready, and leave it running.")
@DRY_RUN
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="[KIND:]NAME=VALUE",
    help="A setting of the workers, such as engine.block-size=32; KIND: router, planner, prefill or "
    "decode. Repeat.",
)
@click.option("--report-fd", type=int, hidden=True)
def up(
    target: Target,
    model: str,
    model_name: str | None,
    prefill: int,
    decode: int,
    host: str,
    port: int,
    auto: bool,
    budget: int | None,
    detach: bool,
    dry_run: bool,
    sets: Sequence[str],
    report_fd: int | None,
) -> None:
    """Serve a model on this machine: NATS, etcd, a router, prefill and decode workers.

    Ctrl-C drains and ends it; a second Ctrl-C hurries. What crashes is started again.
    """
    if budget is not None and not auto:
        raise click.UsageError("--budget goes with --auto")
    if budget is not None and prefill + decode > budget:
        raise click.UsageError(f"--prefill {prefill} and --decode {decode} are more than --budget {budget}")
    flags = _flags(sets)
    target.folder.check()
    desired = Desired(prefill, decode, Mode.ACT if auto else Mode.OFF, budget)
    if target.folder.held():
        with target.folder.locked():
            pass  # raises, and says who it is
    from fleetctl.servers import check_free, free_ports
    from fleetctl.supervisor import FleetPlan, default_commands

    check_free(host, port)  # before a model is fetched for an hour, too
    commands = default_commands()
    if dry_run:
        _say_start(target, _look(model), model_name, host, port, desired, flags)
        return
    source, name = _source(model, model_name)
    if detach:
        again = ["--fleet", target.fleet, "--state-dir", str(target.folder.path)]
        again += ["--model", source, "--served-model-name", name]
        again += ["--host", host, "--port", str(port)]
        again += ["--prefill", str(prefill), "--decode", str(decode), *(f"--set={one}" for one in sets)]
        again += ["--auto"] if auto else []
        again += ["--budget", str(budget)] if budget is not None else []
        detach_until_ready(target, [sys.executable, "-P", "-m", "fleetctl", "up", *again])
        return
    with target.folder.locked():
        port = port or free_ports(1, host)[0]
        check_free(host, port)
        plan = FleetPlan(target.fleet, host, port, source, name, desired, commands, flags)
        run_plan(plan, target, report_fd)


def _source(model: str, model_name: str | None) -> tuple[str, str]:
    """What the workers load, brought here first, and the name it is served under."""
    if _is_latency(model):
        return model, model_name or LATENCY
    files = fetch(model)
    return str(files.folder), model_name or files.name


def _is_latency(model: str) -> bool:
    return model.partition(":")[0] == LATENCY


def _look(model: str) -> ModelPlan | None:
    """None: it needs no files."""
    from fleet.model_files import look

    return None if _is_latency(model) else look(model)


def _say_start(
    target: Target,
    files: ModelPlan | None,
    model_name: str | None,
    host: str,
    port: int,
    desired: Desired,
    flags: dict[Kind, tuple[str, ...]],
) -> None:
    """What `up` would do. Ids and ports that are drawn at the start are not known before."""
    kinds = first_starts(desired, Policy())
    router = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    places = {Kind.ROUTER: router, **dict.fromkeys(SERVERS, "127.0.0.1:0")}
    orphans = [child.name for child in target.folder.orphans()]
    there = files.folder.glob("*.safetensors") if files and files.there else ()
    weights = sum(file.stat().st_size for file in there)
    free, name = memory().get("MemAvailable"), model_name or (files.name if files else LATENCY)
    lines = [f"would start fleet {target.fleet}, with etcd and NATS of its own:"]
    for kind in dict.fromkeys(kinds):
        count = kinds.count(kind)
        where, _, its_port = places.get(kind, "").rpartition(":")
        place = f"{where}, a free port" if its_port == "0" else places.get(kind, "")
        if kind in WORKERS:
            place = f"{count} worker{'s' * (count > 1)}"
        lines.append(f"  {kind:<9}{place}".rstrip())
        lines += [f"           {flag}" for flag in flags.get(kind, ())]
    lines.append(f"model    {name}" + (f"\n  {plan_text(files)}" if files else ", which needs no files"))
    if weights and free is not None:
        have, each = free / (1 << 30), weights / (1 << 30)
        lines.append(f"memory   {have:.1f} GiB free; a worker takes {each:.1f} GiB of weights, and its KV")
    lines.append(f"state    {target.folder.path}")
    if orphans:
        lines.append(f"would end first what a killed supervisor left: {', '.join(orphans)}")
    target.say(
        "\n".join(lines),
        fleet=target.fleet,
        dry_run=True,
        start=[
            {
                "id": None if kind in WORKERS else str(kind),
                "kind": str(kind),
                "address": places.get(kind),
                "settings": flags.get(kind, ()),
            }
            for kind in kinds
        ],
        desired={str(kind): desired.of(kind) for kind in WORKERS},
        model=name,
        files=plan_fields(files) if files else None,
        weights_bytes=weights or None,
        memory_free_bytes=free,
        mode=str(desired.mode),
        budget=desired.budget,
        state_dir=str(target.folder.path),
        logs=str(target.folder.logs),
        end=orphans,
    )


def _flags(sets: Sequence[str]) -> dict[Kind, tuple[str, ...]]:
    """`engine.block-size=32` for both roles, `router:flow.max-requests=9` for one kind."""
    flags: dict[Kind, list[str]] = {}
    kinds = {str(kind): (kind,) for kind in (Kind.ROUTER, Kind.PLANNER, *WORKERS)}
    for one in sets:
        name, equals, value = one.partition("=")
        kind, colon, setting = name.rpartition(":")
        if not equals or not setting or (colon and kind not in kinds):
            raise click.BadParameter(
                f"{one!r} is not NAME=VALUE or KIND:NAME=VALUE with KIND one of {', '.join(kinds)}",
                param_hint="--set",
            )
        for each in kinds.get(kind, WORKERS):
            flags.setdefault(each, []).append(f"--{setting.replace('_', '-')}={value}")
    return {kind: tuple(given) for kind, given in flags.items()}


def run_plan(plan: FleetPlan, target: Target, report_fd: int | None = None) -> None:
    """The fleet in this process, until it is closed. Raises `StartFailed`."""
    from fleetctl.supervisor import Supervisor

    report = os.fdopen(report_fd, "w", buffering=1) if report_fd is not None else None

    def say(event: dict[str, Any]) -> None:
        if report is not None:
            # The one that waited may be gone; the fleet is not to end for that.
            with suppress(BrokenPipeError, ValueError):
                report.write(json.dumps(event) + "\n")
                if "ready" in event:
                    report.close()

    # What the supervisor says and does is a log like any other; the terminal has the picture.
    keep = logging.FileHandler(target.folder.log("supervisor"), delay=True)
    keep.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(keep)
    logging.getLogger().setLevel(logging.INFO)
    # On a full disk each line would become a traceback in the terminal.
    logging.raiseExceptions = False
    show = _View(target, plan, say)
    supervisor = Supervisor(plan, target.folder, show.notice)
    try:
        asyncio.run(_run(supervisor, show))
    except FleetError as error:
        say({"error": error.message})
        raise


async def _run(supervisor: Supervisor, show: _View) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.close)
    drawing = asyncio.create_task(show.draw(supervisor))
    try:
        await supervisor.run()
    finally:
        drawing.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await drawing


class _View:
    """What `up` shows: a live picture below scrolling lines in a terminal, else plain lines."""

    def __init__(self, target: Target, plan: FleetPlan, say: Say) -> None:
        from fleetctl.view import terminal

        self._target = target
        self._plan = plan
        self._say = say
        # With --json stdout is for the one object.
        self._console = terminal(stderr=target.as_json)
        self._ready: dict[str, Any] | None = None

    def notice(self, notice: Notice) -> None:
        # A closed terminal or pipe must not end the fleet before its drain.
        with suppress(OSError):
            self._notice(notice)

    def _notice(self, notice: Notice) -> None:
        from rich.text import Text

        from fleetctl.view import try_line

        line = f"{time.strftime('%T')}  {notice.name:<14} {notice.what:<9} {notice.why}"
        self._say({"line": line})
        style = {"crash": "yellow", "kill": "red", "failed": "red", "ready": "green"}.get(notice.what, "")
        self._console.print(Text(line, style=style, overflow="fold"), soft_wrap=True)
        if notice.name == "fleet" and notice.what == "ready":
            url = notice.why.removesuffix("/v1")
            self._ready = ready_fields(self._target, self._plan, url)
            self._say({"ready": self._ready})
            if self._target.as_json:
                click.echo(json.dumps(self._ready))
            else:
                for text in ready_lines(url, try_line(url, self._plan.model_name)):
                    self._console.print(Text(text), soft_wrap=True)

    async def draw(self, supervisor: Supervisor) -> None:
        if not self._console.is_terminal:
            return
        from rich.console import Group
        from rich.live import Live
        from rich.text import Text

        from fleetctl.view import draw

        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                hint = {
                    "no": "Ctrl-C drains and ends the fleet",
                    "orderly": "draining; Ctrl-C again hurries",
                    "hurried": "ending at once",
                }[supervisor.closing]
                live.update(
                    Group(Text(), draw(supervisor.picture()), Text(), Text(hint, style="dim")), refresh=True
                )
                await asyncio.sleep(0.5)


def ready_fields(target: Target, plan: FleetPlan, url: str) -> dict[str, Any]:
    return {
        "fleet": target.fleet,
        "ready": True,
        "dry_run": False,
        "url": f"{url}/v1",
        "model": plan.model_name,
        "pid": os.getpid(),
        "state_dir": str(target.folder.path),
        "logs": str(target.folder.logs),
    }


def ready_lines(url: str, command: str) -> list[str]:
    return ["", f"Ready: {url}/v1 — try:", f"  {command}", ""]


def detach_until_ready(target: Target, command: list[str]) -> None:
    """Runs `command`, a supervisor, on its own, and returns at its word that the fleet is ready.

    Raises `Unavailable` with its last lines where it ends before. `--report-fd N` is added to the command.
    """
    from fleetctl.view import try_line

    target.folder.make()
    own_log = target.folder.path / "detached.log"
    receive, send = os.pipe()
    with own_log.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--report-fd", str(send)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(send,),
            start_new_session=True,
        )
    os.close(send)
    with os.fdopen(receive) as events:
        try:
            for line in events:
                event = json.loads(line)
                if "ready" in event:
                    ready = event["ready"]
                    url = ready["url"].removesuffix("/v1")
                    lines = [
                        *ready_lines(url, try_line(url, ready["model"])),
                        "It goes on in the background: `fleetctl status` shows it, `fleetctl down` ends it.",
                    ]
                    target.say("\n".join(lines), **ready)
                    return
                if "error" in event:
                    process.wait()
                    raise Unavailable(event["error"])
                if not target.as_json:
                    click.echo(event["line"])
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
    process.wait()
    last = own_log.read_text(errors="replace").splitlines()[-15:]
    raise Unavailable("\n    ".join([f"the supervisor ended before the fleet was ready ({own_log}):", *last]))


@click.command()
@fleet_options(etcd=False)
@click.option("--now", is_flag=True, help="Do not wait for running requests.")
@click.option(
    "--limit", type=click.FloatRange(0), default=120.0, show_default=True, help="Longest to wait, seconds."
)
@DRY_RUN
def down(target: Target, now: bool, limit: float, dry_run: bool) -> None:
    """End the fleet on this machine: drain, then stop all its processes."""
    folder = target.folder
    # One that starts this moment holds the lock and has written nothing yet.
    _wait(lambda: folder.read() is not None or not folder.held(), 5.0)
    state = folder.read()
    if state is None or not alive(state.pid, state.born):
        orphans = 0 if state is None else len(folder.orphans()) if dry_run else _clear(folder)
        ended = "would end" if dry_run else "ended"
        rest = f"; {ended} {orphans} processes that its killed supervisor left" if orphans else ""
        target.say(f"fleet {target.fleet} is not up{rest}",
                   fleet=target.fleet, was_up=False, orphans=orphans, dry_run=dry_run)  # fmt: skip
        return
    if dry_run:
        _say_end(target, state, now)
        return
    if not target.as_json:
        click.echo(f"draining fleet {target.fleet} …", err=True)
    os.kill(state.pid, signal.SIGTERM)
    if now:
        # Two signals at once may arrive as one: the second follows when the first was acted upon.
        _wait(lambda: _leaving(folder) or not alive(state.pid, state.born), 5.0)
        with suppress(ProcessLookupError):
            os.kill(state.pid, signal.SIGTERM)
    with going_on(f"fleet {target.fleet} drains all the same"):
        gone = _wait(lambda: not alive(state.pid, state.born), limit)
    if not gone:
        left = folder.read()
        names = ", ".join(child.name for child in left.children) if left else "its supervisor"
        raise Unavailable(
            f"fleet {target.fleet} still drains after {limit:g} s ({names}); wait, or hurry with --now"
        )
    target.say(f"fleet {target.fleet} is down", fleet=target.fleet, was_up=True, orphans=0, dry_run=False)


def _say_end(target: Target, state: FleetState, now: bool) -> None:
    """What `down` would do, in its order."""
    rows = {row.id: row for row in asyncio.run(look(target)).workers}
    stages = [kind for stage in CLOSING_ORDER for kind in stage]
    lines, end = [], []
    for child in sorted(state.children, key=lambda child: stages.index(child.kind)):
        row = rows.get(child.name)
        running, waiting = (row.running, row.waiting) if row else (None, None)
        does = ""
        if child.kind in WORKERS:
            does = f"{running} requests run, {waiting} wait" if running is not None else "does not answer"
        where = "no process" if child.pid is None else f"pid {child.pid}"
        lines.append(f"  {child.name:<16} {where:<12} {does}".rstrip())
        end.append({"name": child.name, "kind": child.kind, "pid": child.pid,
                    "running": running, "waiting": waiting})  # fmt: skip
    how = "without waiting for its requests" if now else "its requests first"
    target.say(
        "\n".join([f"would end fleet {target.fleet}, {how}:", *lines]),
        fleet=target.fleet, was_up=True, orphans=0, dry_run=True, end=end,
    )  # fmt: skip


def _leaving(folder: StateFolder) -> bool:
    state = folder.read()
    return state is None or any(child.phase == "stopping" for child in state.children)


def _clear(folder: StateFolder) -> int:
    with folder.locked():
        return len(folder.clear_orphans())


def _wait(done: Callable[[], bool], limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
