"""`fleetctl`: the operator's command line. Only wiring; each command is in `fleetctl/commands`."""

from __future__ import annotations

import json
import logging
import platform
import sys
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import get_completion_class

from fleet import __version__
from fleetctl.commands.bench import bench
from fleetctl.commands.doctor import doctor
from fleetctl.commands.explain import explain, trace
from fleetctl.commands.key import key
from fleetctl.commands.logs import logs
from fleetctl.commands.manifests import manifests
from fleetctl.commands.model import model
from fleetctl.commands.operate import drain, role, status
from fleetctl.commands.plan import plan
from fleetctl.commands.scale import scale
from fleetctl.commands.sim import sim
from fleetctl.commands.top import top
from fleetctl.commands.up import down, up

EPILOG = """Exit codes: 0 done, 1 failed (the error says what to do next), 2 wrong usage.
Every command takes --json, and every one that changes something --dry-run."""


class InOrder(click.Group):
    """Lists commands in the order in which one meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """With `--json` also wrong usage, and an interrupt, are told as an object."""
        given = list(sys.argv[1:] if args is None else args)
        if "--json" not in given or not extra.get("standalone_mode", True):
            return super().main(args, *rest, **extra)
        try:
            code = super().main(given, *rest, **{**extra, "standalone_mode": False})
        except click.ClickException as error:
            code = _said(type(error).__name__, error.format_message(), error.exit_code)
        except click.Abort:
            code = _said("Interrupted", "interrupted before it was done", 1)
        sys.exit(code if isinstance(code, int) else 0)


def _said(kind: str, message: str, code: int) -> int:
    click.echo(json.dumps({"error": {"type": kind, "message": message}}))
    return code


@click.group(
    cls=InOrder,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, message=f"pdfleet %(version)s (Python {platform.python_version()})")
def main() -> None:
    """Run and operate a fleet that serves large language models, prefill and decode apart."""
    # A command says what failed in its error; the libraries' own words beside it would say it twice.
    logging.getLogger().addHandler(logging.NullHandler())


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def version(as_json: bool) -> None:
    """Print the version."""
    said = {"version": __version__, "python": platform.python_version()}
    click.echo(json.dumps(said) if as_json else f"pdfleet {__version__} (Python {said['python']})")


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def completion(shell: str, as_json: bool) -> None:
    """Print what makes SHELL complete commands: eval "$(fleetctl completion bash)"."""
    found = get_completion_class(shell)
    assert found is not None, "the choices are click's own"
    script = found(main, {}, "fleetctl", "_FLEETCTL_COMPLETE").source()
    click.echo(json.dumps({"shell": shell, "script": script}) if as_json else script)


for command in (
    up,
    status,
    top,
    scale,
    role,
    drain,
    explain,
    trace,
    logs,
    doctor,
    down,
    model,
    key,
    bench,
    sim,
    plan,
    manifests,
):
    main.add_command(command)
for last in ("version", "completion"):
    main.commands[last] = main.commands.pop(last)

if __name__ == "__main__":
    main(prog_name="fleetctl")
