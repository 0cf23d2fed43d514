"""`fleetctl key new`: what it prints opens what it writes, and only there."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from fleet.api_keys import find, read_file
from fleetctl.__main__ import main


def test_a_new_key_is_found_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "keys.jsonl"
    said = []
    for tenant, more in (("acme", ["--class", "batch", "--tokens-per-minute", "9"]), ("zeta", ["--admin"])):
        arguments = ["key", "new", "--tenant", tenant, "--file", str(file), "--json", *more]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        said.append(json.loads(result.output))
    assert [one["dry_run"] for one in said] == [False, False]
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    keys = read_file(text)
    assert [find(keys, one["key"].encode()) for one in said] == list(keys)
    assert [(key.tenant, key.slo_class, key.tokens_per_minute) for key in keys] == [
        ("acme", "batch", 9),
        ("zeta", "", 0),
    ]
    assert [key.admin for key in keys] == [False, True]
    assert not [one for one in said if one["key"] in text]


def test_for_people_the_key_stands_beside_its_line() -> None:
    result = CliRunner().invoke(main, ["key", "new", "--tenant", "acme"])
    key = result.output.splitlines()[0].split(": ")[1]
    line = next(line for line in result.output.splitlines() if line.startswith("{"))
    assert find(read_file(line), key.encode()) is not None
    assert CliRunner().invoke(main, ["key", "new", "--tenant", "a b"]).exit_code == 1
    assert CliRunner().invoke(main, ["key", "new"]).exit_code == 2


def test_a_broken_file_is_not_written_to(tmp_path: Path) -> None:
    file = tmp_path / "keys.jsonl"
    file.write_text("sk-in-clear-text\n")
    result = CliRunner().invoke(main, ["key", "new", "--tenant", "acme", "--file", str(file)])
    assert result.exit_code == 1
    assert "line 1" in result.output
    assert file.read_text() == "sk-in-clear-text\n"


def test_a_dry_run_draws_nothing_and_checks_all(tmp_path: Path) -> None:
    def dry(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["key", "new", "--dry-run", *arguments])
        return result.exit_code, result.output

    file, broken = tmp_path / "keys.jsonl", tmp_path / "broken.jsonl"
    broken.write_text("sk-in-clear-text\n")
    given = ["--tenant", "acme", "--tokens-per-minute", "9", "--file", str(file)]
    code, out = dry(*given, "--json")
    said = json.loads(out)
    assert (code, said["dry_run"], said["key"], said["line"], said["file"]) == (
        0,
        True,
        None,
        None,
        str(file),
    )
    # What it says of the line is what the line says.
    assert CliRunner().invoke(main, ["key", "new", *given]).exit_code == 0
    assert {name: value for name, value in json.loads(file.read_text()).items() if name != "sha256"} == said[
        "entry"
    ]
    was = file.read_text()
    code, out = dry(*given)
    assert (code, f"append its line to {file}" in out, "sk-pdfleet" in out) == (0, True, False)
    assert file.read_text() == was
    assert dry("--tenant", "a b")[0] == 1
    assert "line 1" in dry("--tenant", "acme", "--file", str(broken))[1]
    nowhere = ["--tenant", "acme", "--file", str(tmp_path / "none" / "keys.jsonl")]
    assert dry(*nowhere) == (1, CliRunner().invoke(main, ["key", "new", *nowhere]).output)
