"""The systemd units: SIGTERM reaches the process itself, and it gets the time that its drain may take."""

from __future__ import annotations

from configparser import ConfigParser
from pathlib import Path

import pytest

from decode_worker.settings import DecodeWorkerSettings
from fleet.chassis import ChassisSettings
from fleet.settings import load
from planner.__main__ import PlannerProcessSettings
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
    drained = {"router": HttpSettings().drain_limit_s, "planner": 0.0}
    assert float(service["TimeoutStopSec"]) > drained.get(arguments[1], ChassisSettings().drain_limit_s)
    assert service["Restart"] == "on-failure", "one that ends itself because it is stalled comes again"


def test_there_is_a_unit_for_each_kind_of_process() -> None:
    kinds = ("router", "prefill", "decode", "planner")
    assert {unit.stem for unit in UNITS} == {f"pdfleet-{kind}@" for kind in kinds}


def test_the_planners_of_a_host_write_each_its_own_file() -> None:
    (unit,) = [unit for unit in UNITS if "planner" in unit.stem]
    assert "--decisions /var/lib/pdfleet/planner-%i.jsonl" in unit.read_text()
    assert "StateDirectory=pdfleet" in unit.read_text(), "which makes the folder, of that user"


@pytest.mark.parametrize(
    ("name", "settings"), [("planner", PlannerProcessSettings), ("decode", DecodeWorkerSettings)]
)
def test_the_examples_of_settings_are_read(name: str, settings: type) -> None:
    file = UNITS[0].parent / f"{name}.toml"
    load(settings, ["--config", str(file)], {})
