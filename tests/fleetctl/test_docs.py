"""What the pages for users name is there: commands and their options, settings, files and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from decode_worker.settings import DecodeWorkerSettings
from fleet.settings import help_text
from fleetctl.__main__ import main
from planner.__main__ import PlannerProcessSettings
from prefill_worker.settings import PrefillWorkerSettings
from router.__main__ import RouterProcessSettings

TREE = Path(__file__).parents[2]
PAGES = [TREE / "README.md", TREE / "CONTRIBUTING.md", *sorted((TREE / "docs").glob("*.md")),
         *sorted((TREE / "deploy").glob("**/README.md"))]  # fmt: skip
PROCESSES = {"router": RouterProcessSettings, "prefill_worker": PrefillWorkerSettings,
             "decode_worker": DecodeWorkerSettings, "planner": PlannerProcessSettings}  # fmt: skip
FLAGS = {
    name: {*re.findall(r"^  --([a-zA-Z0-9.-]+)", help_text(kind), re.MULTILINE), "config", "help"}
    for name, kind in PROCESSES.items()
}
SETTINGS = {flag.replace("-", "_") for flags in FLAGS.values() for flag in flags}
RESOURCE = {"planner.mode", "planner.settings"}
"""Fields of an InferenceFleet that look like settings; those with a capital do not."""


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(TREE)))
def page(request: pytest.FixtureRequest) -> Path:
    assert isinstance(request.param, Path)
    return request.param


def calls(text: str, program: str) -> Iterator[list[str]]:
    """The words behind each `program`, to the end of the code it stands in."""
    for block in re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL):
        for call in re.findall(rf"{program} ([^`\n#|;&]+)", block.replace("\\\n", " ")):
            yield re.sub(r'"[^"]*"', "TEXT", call).split()


def options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts} | {"--help", "-h"}


def test_commands_and_their_options_exist(page: Path) -> None:
    for words in calls(page.read_text(), "fleetctl"):
        command: click.Command = main
        known = options(main)
        for word in words:
            if isinstance(command, click.Group) and not word.startswith("-"):
                assert word in command.commands or command.name == "bench", f"fleetctl {' '.join(words)}"
                command = command.commands.get(word, command)
                known |= options(command)
            elif re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word):
                assert word.partition("=")[0] in known, f"fleetctl {' '.join(words)}: {word}"


def test_flags_of_processes_exist(page: Path) -> None:
    for words in calls(page.read_text(), "python -m"):
        for word in words[1:] if words[0] in FLAGS else ():
            if word.startswith("--"):
                assert word.removeprefix("--").partition("=")[0] in FLAGS[words[0]], " ".join(words)


def test_settings_exist(page: Path) -> None:
    sections = {name.partition(".")[0] for name in SETTINGS if "." in name} - {"objectives"}
    for name in re.findall(r"`(?:--)?([a-z_]+(?:\.[a-z0-9_-]+)+)(?:[ =][^`\n]*)?`", page.read_text()):
        if name.partition(".")[0] in sections and name not in RESOURCE:
            assert name.replace("-", "_") in SETTINGS, name


def test_files_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), link
    rooms = "|".join(one.name for one in TREE.iterdir() if one.is_dir() and not one.name.startswith("."))
    for name in re.findall(rf"`((?:{rooms})/[\w./-]+\.\w+)`", text):
        assert any((place / name).exists() for place in (TREE, TREE / "tests")) or "DEVICE" in name, name
