"""The systemd units: SIGTERM reaches the process itself, and it gets the time that its drain may take."""

from __future__ import annotations

from configparser import ConfigParser
from pathlib import Path

import pytest

from fleet.chassis import ChassisSettings
from router.openai.settings import HttpSettings

UNITS = sorted((Path(__file__).parents[2] / "deploy" / "systemd").glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_drains_before_it_is_killed(unit: Path) -> None:
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(unit)
    service = parser["Service"]
    program, *arguments = service["ExecStart"].split()
    # Exec form: a shell in between would keep the signal to itself.
    assert Path(program).name == "python"
    assert arguments[0] == "-m"
    assert not set("|&;$`") & set(service["ExecStart"])
    assert service["KillSignal"] == "SIGTERM"
    longest = HttpSettings() if arguments[1] == "router" else ChassisSettings()
    assert float(service["TimeoutStopSec"]) > longest.drain_limit_s
    assert service["Restart"] == "on-failure", "one that ends itself because it is stalled comes again"


def test_there_is_a_unit_for_each_kind_of_process() -> None:
    assert {unit.stem for unit in UNITS} == {"pdfleet-router@", "pdfleet-prefill@", "pdfleet-decode@"}
