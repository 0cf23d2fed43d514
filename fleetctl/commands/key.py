"""`key new`: draws an API key, shows it once, and gives or appends the line that lets it in."""

from __future__ import annotations

import errno
import json
import os
import secrets
from pathlib import Path

import click

from fleet.api_keys import ApiKey, digest, read_file
from fleet.errors import BadRequest, FleetError, Unavailable
from fleetctl.options import DRY_RUN, fail


@click.group()
def key() -> None:
    """API keys of the ingress."""


@key.command("new")
@click.option("--tenant", required=True, metavar="NAME", help="Whose key it is.")
@click.option(
    "--class",
    "slo_class",
    metavar="NAME",
    default="",
    help="Objectives and priority of its requests: interactive, standard, batch or one of your own; without "
    "it, the routers' default.",
)
@click.option("--weight", type=float, default=1.0, help="Share of the fleet against other tenants.")
@click.option("--requests-per-minute", type=click.IntRange(0), default=0, help="0: no limit.")
@click.option("--tokens-per-minute", type=click.IntRange(0), default=0, help="0: no limit.")
@click.option("--concurrent-requests", type=click.IntRange(0), default=0, help="0: no limit.")
@click.option("--admin", is_flag=True, help="It shows the requests of all tenants, not only its own.")
@click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append the line to this keys file; made if there is none, readable by you alone.",
)
@DRY_RUN
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def new_command(
    tenant: str,
    slo_class: str,
    weight: float,
    requests_per_minute: int,
    tokens_per_minute: int,
    concurrent_requests: int,
    admin: bool,
    file: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Draw a key. It is printed once and kept nowhere; a keys file holds only its hash."""
    drawn = f"sk-pdfleet-{secrets.token_urlsafe(32)}"
    try:
        try:
            line = ApiKey(
                sha256=digest(drawn),
                tenant=tenant,
                slo_class=slo_class,
                weight=weight,
                requests_per_minute=requests_per_minute,
                tokens_per_minute=tokens_per_minute,
                concurrent_requests=concurrent_requests,
                admin=admin,
            ).line()
        except ValueError as error:
            raise BadRequest(str(error), param="tenant") from None
        if file is not None:
            _append(file, line, dry_run)
    except FleetError as error:
        fail(error, as_json)
    said = {"file": str(file) if file else None, "dry_run": dry_run}
    if dry_run:
        # Without key and hash: the next one is drawn anew, and this one lets nobody in.
        entry = {name: value for name, value in json.loads(line).items() if name != "sha256"}
        where = f"append its line to {file}" if file else "print its line"
        text = f"would draw a key and {where}; of its holder it says\n{json.dumps(entry)}"
        click.echo(json.dumps({"key": None, "line": None, "entry": entry, **said}) if as_json else text)
        return
    if as_json:
        click.echo(json.dumps({"key": drawn, "line": line, **said}))
        return
    click.echo(f"key, shown only now: {drawn}")
    click.echo(f"appended to {file}" if file else f"line to add to the keys file:\n{line}")
    click.echo("routers read the file that --http.keys-file names when they start and when it changes")


def _append(file: Path, line: str, dry_run: bool) -> None:
    try:
        held = file.read_text("utf-8") if file.exists() else ""
        if held.strip():
            read_file(held)  # a line behind broken ones would only look as if it were good
        if dry_run:
            place = file if file.exists() else file.parent.resolve(strict=True)
            if not os.access(place, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(handle, "a", encoding="utf-8") as out:
            out.write(("" if not held or held.endswith("\n") else "\n") + line + "\n")
    except OSError as error:
        raise Unavailable(f"{file} cannot be written: {error.strerror}") from None
    except ValueError as error:
        raise BadRequest(f"{file}: {error}", param="file") from None
