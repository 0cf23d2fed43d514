"""What all commands share: which fleet is meant, where it is, and how errors and results are said.

Exit codes: 0 done, 1 failed (the error names the next step), 2 wrong usage. With `--json` a command
prints one JSON object, also for an error: `{"error": {"type": …, "message": …}}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from fleet.errors import FleetError, Unavailable
from fleetctl.state import StateFolder, alive, default_folder
from fleetctl.words import WORKERS, FleetState


@dataclass(frozen=True, slots=True)
class Target:
    """The fleet that a command is about."""

    fleet: str
    folder: StateFolder
    given_etcd: str | None
    as_json: bool

    def state(self) -> FleetState | None:
        """Of a supervisor that lives on this machine; None where `--etcd` names another fleet's etcd."""
        if self.given_etcd is not None:
            return None
        state = self.folder.read()
        return state if state is not None and alive(state.pid, state.born) else None

    def etcd(self) -> str:
        """HOST:PORT. Raises `Unavailable` where there is neither a supervisor nor `--etcd`."""
        if self.given_etcd is not None:
            return self.given_etcd
        state = self.state()
        if state is not None:
            return state.etcd
        named = "" if self.fleet == "default" else f" --fleet {self.fleet}"
        died = "its supervisor died; " if self.folder.read() is not None else ""
        raise Unavailable(
            f"fleet {self.fleet!r} is not up on this machine ({died}state folder {self.folder.path}); "
            f"start it with `fleetctl up{named}`, or name the etcd of a fleet elsewhere with --etcd HOST:PORT"
        )

    def say(self, text: str, **fields: Any) -> None:
        """The result: `text` for people, the fields as one object with `--json`."""
        click.echo(json.dumps(fields) if self.as_json else text)


DRY_RUN = click.option("--dry-run", is_flag=True, help="Say what would happen, and change nothing.")
"""Of every command that changes something. What it says is computed as it is without; the object of `--json`
says in `dry_run` which of both it is."""


def fleet_options(etcd: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds `--fleet`, `--state-dir`, `--json` and `--etcd`; the command gets a `Target` first."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(
            fleet: str | None,
            state_dir: Path | None,
            as_json: bool,
            given_etcd: str | None = None,
            **rest: Any,
        ) -> Any:
            try:
                usual = default_folder(fleet or "default")
                folder = StateFolder(usual if state_dir is None else state_dir)
                state = folder.read() if given_etcd is None else None
                name = fleet or (state.fleet if state is not None else "default")
                return command(Target(name, folder, given_etcd, as_json), **rest)
            except FleetError as error:
                fail(error, as_json)

        options = [
            click.option("--fleet", metavar="NAME", help="Name of the fleet.  [default: default]"),
            click.option(
                "--state-dir",
                type=click.Path(file_okay=False, path_type=Path),
                envvar="PDFLEET_STATE_DIR",
                help="Folder of the fleet's state and logs.  [default: ~/.local/state/pdfleet/FLEET]",
            ),
            click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        ]
        if etcd:
            options.append(
                click.option(
                    "--etcd",
                    "given_etcd",
                    metavar="HOST:PORT",
                    help="The etcd of a fleet without a supervisor here.",
                )
            )
        return functools.reduce(lambda inner, option: option(inner), reversed(options), run)

    return decorate


@contextlib.contextmanager
def going_on(what: str) -> Iterator[None]:
    """Around waiting for what goes on without whoever waits: says so where that is interrupted."""
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise Unavailable(f"interrupted: {what}; `fleetctl status` shows how far it is") from None


def fail(error: FleetError, as_json: bool) -> NoReturn:
    """Exit 1, with the error where its reader looks."""
    if as_json:
        click.echo(json.dumps({"error": {"type": type(error).__name__, "message": error.message}}))
    else:
        click.secho(f"error: {error.message}", fg="red", err=True)
    raise SystemExit(1)


def complete_children(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of the processes of the fleet, for shell completion."""
    return [name for name in _children(context) if name.startswith(incomplete)]


def complete_workers(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    roles = tuple(f"{kind}-" for kind in WORKERS)
    return [name for name in _children(context) if name.startswith(incomplete) and name.startswith(roles)]


def _children(context: click.Context) -> list[str]:
    folder = context.params.get("state_dir") or default_folder(context.params.get("fleet") or "default")
    state = StateFolder(folder).read()
    return [child.name for child in state.children] if state else []
