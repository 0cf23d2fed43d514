"""`logs`: the last lines of the fleet's processes, and what they go on to write."""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path

import click

from fleet.errors import NotFound
from fleetctl.options import Target, complete_children, fleet_options

COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")


@click.command()
@click.argument("name", required=False, shell_complete=complete_children)
@fleet_options(etcd=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written from now on.")
@click.option(
    "--lines", type=click.IntRange(0), default=20, show_default=True, help="Of each process, from the end."
)
def logs(target: Target, name: str | None, follow: bool, lines: int) -> None:
    """Show the logs of process NAME, of all of a kind (decode), or of all.

    With --json, one object a line: {"name": …, "line": …}.
    """
    folder = target.folder.logs
    if not chosen(folder, name):
        known = ", ".join(sorted(path.stem for path in folder.glob("*.log"))) or "none"
        raise NotFound(
            f"no log of {name!r} in {folder}; there are: {known}" if name else f"no logs in {folder}"
        )
    ends: dict[Path, int] = {}
    for path in chosen(folder, name):
        text, ends[path] = _read(path, 0)
        for line in deque(text.splitlines(), maxlen=lines):
            _show(target, path, line, bare=name == path.stem)
    try:
        while follow:
            # Polled: new logs appear as workers come, and a tenth of a second is soon enough for eyes.
            time.sleep(0.1)
            for path in chosen(folder, name):
                text, ends[path] = _read(path, ends.get(path, 0))
                for line in text.splitlines():
                    _show(target, path, line, bare=name == path.stem)
    except KeyboardInterrupt:
        return  # This is how one ends it.


def chosen(folder: Path, name: str | None) -> list[Path]:
    """Log files of the process `name`, or of the kind `name`, or all."""
    found = sorted(folder.glob("*.log"))
    if name is None:
        return found
    return [path for path in found if path.stem == name or path.stem.startswith(f"{name}-")]


def _read(path: Path, start: int) -> tuple[str, int]:
    """Whole lines from byte `start` on, and where they end. A shorter file was begun anew."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0 if size < start else start)
            begin, data = file.tell(), file.read()
    except FileNotFoundError:
        return "", 0
    whole = data[: data.rfind(b"\n") + 1]
    return whole.decode(errors="replace"), begin + len(whole)


def _show(target: Target, path: Path, line: str, bare: bool) -> None:
    if target.as_json:
        click.echo(json.dumps({"name": path.stem, "line": line}))
    elif bare:
        click.echo(line)
    else:
        colour = COLOURS[sum(path.stem.encode()) % len(COLOURS)]
        click.echo(click.style(f"{path.stem:<14} ", fg=colour) + line)
