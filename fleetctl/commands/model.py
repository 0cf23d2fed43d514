"""`model fetch`: brings a model's files, with a progress bar; `up` does the same first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from fleet.errors import FleetError
from fleetctl.options import DRY_RUN, fail

if TYPE_CHECKING:
    from fleet.model_files import ModelFiles, ModelPlan


@click.group()
def model() -> None:
    """Models on this machine."""


@model.command("fetch")
@click.argument("name")
@DRY_RUN
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fetch_command(name: str, dry_run: bool, as_json: bool) -> None:
    """Bring model NAME: smollm2, a Hugging Face owner/name, a folder or a .gguf file."""
    try:
        if dry_run:
            from fleet.model_files import look

            plan = look(name)
            said, text = plan_fields(plan), plan_text(plan)
        else:
            files = fetch(name)
            said = {"name": files.name, "folder": str(files.folder)}
            text = f"{files.name} is at {files.folder}"
    except FleetError as error:
        fail(error, as_json)
    click.echo(json.dumps({**said, "dry_run": dry_run}) if as_json else text)


def plan_fields(plan: ModelPlan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "folder": str(plan.folder),
        "source": plan.source,
        "there": plan.there,
        "bytes": plan.size,
    }


def plan_text(plan: ModelPlan) -> str:
    if plan.there:
        return f"it is at {plan.folder} already"
    from rich.filesize import decimal

    size = "of unknown size" if plan.size is None else decimal(plan.size)
    how = f"convert {plan.source}" if plan.size == 0 else f"fetch {plan.source}, {size},"
    return f"would {how}\n  to {plan.folder}"


def fetch(name: str) -> ModelFiles:
    """As `fleet.model_files.resolve`, with a bar on stderr where that is a terminal."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        Task,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    from fleet.model_files import resolve
    from fleetctl.view import terminal

    class Amount(DownloadColumn):
        def render(self, task: Task) -> Text:
            if task.fields["stage"] == "convert":
                return Text(f"{task.completed:.0f}/{task.total or 0:.0f} tensors", style="progress.download")
            return super().render(task)

    console = terminal(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        Amount(),
        TimeRemainingColumn(),
    )
    label = name.rstrip("/").rpartition("/")[2]  # a whole path would leave no room for the bar
    stages: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(f"{label}: {stage}", total=total or None, stage=stage)
            bars.update(stages[stage], completed=done, total=total or None)

        return resolve(name, progress=progress)
