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
