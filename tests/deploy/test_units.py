"""The systemd units: SIGTERM reaches the process itself, and it gets the time that its drain may take."""

from __future__ import annotations

import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from decode_worker.settings import DecodeWorkerSettings
from fleet.chassis import ChassisSettings
from fleet.settings import load
from planner.__main__ import PlannerProcessSettings
from prefill_worker.settings import PrefillWorkerSettings
from router.__main__ import RouterProcessSettings
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
    assert service["KillMode"] == "mixed", "a chat template's process is not to end before who waits for it"
    drained = {"router": HttpSettings().drain_limit_s, "planner": 0.0}
    assert float(service["TimeoutStopSec"]) > drained.get(arguments[1], ChassisSettings().drain_limit_s)
    assert service["Restart"] == "on-failure", "one that ends itself because it is stalled comes again"


def test_there_is_a_unit_for_each_kind_of_process() -> None:
    kinds = ("router", "prefill", "decode", "planner")
    assert {unit.stem for unit in UNITS} == {f"pdfleet-{kind}@" for kind in kinds}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_a_unit(unit: Path, tmp_path: Path) -> None:
    here = tmp_path / unit.name.replace("@", "@0")
    here.write_text(unit.read_text().replace("/opt/pdfleet/.venv/bin/python", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True)
    # It looks at units of this machine too, and they are not ours.
    said = [line for line in (done.stdout + done.stderr).splitlines() if "pdfleet" in line]
    assert (done.returncode, said) == (0, [])


def test_the_planners_of_a_host_write_each_its_own_file() -> None:
    (unit,) = [unit for unit in UNITS if "planner" in unit.stem]
    assert "--decisions /var/lib/pdfleet/planner-%i.jsonl" in unit.read_text()
    assert "StateDirectory=pdfleet" in unit.read_text(), "which makes the folder, of that user"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("router", RouterProcessSettings),
        ("decode", PrefillWorkerSettings),
        ("decode", DecodeWorkerSettings),
        ("planner", PlannerProcessSettings),
    ],
)
def test_the_examples_of_settings_are_read(name: str, settings: type) -> None:
    file = UNITS[0].parent / f"{name}.toml"
    load(settings, ["--config", str(file)], {})
