"""The supervisor with real processes, etcd and NATS; workers are stand-ins without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleet.member import desired_key
from fleet.registry.etcd_registry import EtcdRegistry
from fleet.targets import LastDecision, decision_key
from fleetctl.state import StateFolder, alive
from fleetctl.words import FleetState

pytestmark = pytest.mark.live

FAILS_AFTER_S = 90.0
"""Nothing here takes so long; beyond, the test fails."""


class Fleet:
    """One supervised fleet, its lines, and the real command line on it."""

    def __init__(self, state: Path, **given: Any) -> None:
        self.folder = StateFolder(state)
        self.control = state / "control"
        command = [
            sys.executable,
            str(Path(__file__).with_name("standin_up.py")),
            str(state),
            json.dumps(given),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def line(self, pattern: str) -> re.Match[str]:
        """Reads on to the next line that matches."""
        until = time.monotonic() + FAILS_AFTER_S
        while True:
            with contextlib.suppress(queue.Empty):
                line = self._queue.get(timeout=max(0.01, until - time.monotonic()))
                if line is None:
                    break
                self.lines.append(line)
                if found := re.search(pattern, line):
                    return found
            if time.monotonic() > until:
                break
        pytest.fail("no line {!r} in:\n{}".format(pattern, "\n".join(self.lines)))

    def run(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """The object that `fleetctl ARGUMENTS --json` prints."""
        command = [
            sys.executable,
            "-m",
            "fleetctl",
            *arguments,
            "--json",
            "--state-dir",
            str(self.folder.path),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=FAILS_AFTER_S)
        assert done.returncode == code, (done.stdout, done.stderr, self.lines)
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        return found

    def state(self) -> FleetState:
        state = self.folder.read()
        assert state is not None
        return state

    def pids(self, kind: str = "") -> dict[str, int]:
        return {one.name: one.pid for one in self.state().children if one.pid and one.name.startswith(kind)}

    def end(self) -> int:
        self.process.terminate()
        return self.ended()

    def ended(self) -> int:
        code = self.process.wait(FAILS_AFTER_S)
        self._reader.join()
        while (line := self._queue.get_nowait()) is not None:
            self.lines.append(line)
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    fleets: list[Fleet] = []

    def start(prefill: int = 1, decode: int = 1, **given: Any) -> Fleet:
        fleets.append(Fleet(tmp_path / "state", desired=[prefill, decode], **given))
        return fleets[-1]

    yield start
    for fleet in fleets:
        fleet.process.kill()
        fleet.process.wait()
        fleet._reader.join()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + FAILS_AFTER_S
    while not condition():
        assert time.monotonic() < end, "condition not met"
        time.sleep(0.05)


def test_up_scale_drain_crash_and_down(start: Callable[..., Fleet]) -> None:
    fleet = start(prefill=1, decode=3)
    fleet.line("fleet +ready")
    fleet.line("curl http")

    # Status tells of all of them.
    status = fleet.run("status")
    assert [row["role"] for row in status["workers"]] == ["prefill", "decode", "decode", "decode"]
    assert {row["state"] for row in status["workers"]} == {"ready"}
    assert status["router"]["state"] == "ready"
    assert status["desired"] == {"prefill": 1, "decode": 3}
    assert {row["id"]: row["pid"] for row in status["workers"]} == {
        **fleet.pids("prefill"),
        **fleet.pids("decode"),
    }

    # Scale-down ends exactly the least loaded one, and only after its drain.
    before = fleet.pids()
    one, two, three = (row["id"] for row in status["workers"] if row["role"] == "decode")
    for name, load in ((one, 7), (two, 2), (three, 5)):
        (fleet.control / f"{name}.load").write_text(str(load))
    busy = fleet.control / f"{two}.busy"
    busy.touch()
    assert fleet.run("scale", "decode=2", "--dry-run")["drain"] == [two]
    fleet.run("scale", "decode=2")
    fleet.line(rf"{two} +stop .*least loaded, 2 requests")
    until(lambda: "draining" in {row["state"] for row in fleet.run("status")["workers"]})
    assert alive_pid(before[two])
    busy.unlink()
    fleet.line(rf"{two} +gone +left, exit code 0")
    del before[two]
    until(lambda: two not in fleet.pids())
    assert fleet.pids() == before

    # Scale-up starts new ones and leaves the others alone.
    done = fleet.run("scale", "prefill=2", "--wait")
    assert done["desired"] == {"prefill": 2, "decode": 2}
    assert before.items() <= fleet.pids().items()
    assert len(fleet.pids("prefill")) == 2

    # A worker that an operator drains is replaced under another name.
    assert fleet.run("drain", one, "--wait")["state"] == "left"
    fleet.line(rf"{one} +gone")
    until(lambda: len(fleet.pids("decode")) == 2 and one not in fleet.pids())
    wrong = fleet.run("drain", "decode-nobody", code=1)
    assert "decode-nobody" in wrong["error"]["message"]
    assert three in wrong["error"]["message"]

    # Of decode workers one stays, or nobody would answer until the next one serves.
    fleet.run("scale", "decode=1", "--wait")
    (last,) = fleet.pids("decode")
    assert "only decode worker" in fleet.run("drain", last, code=1)["error"]["message"]
    assert fleet.run("drain", last, "--force", "--wait")["state"] == "left"
    fleet.line(rf"{last} +gone")
    fleet.run("scale", "decode=2", "--wait")
    three = next(iter(fleet.pids("decode")))

    # A worker that is killed comes back under its name, and serves again.
    os.kill(fleet.pids()[three], signal.SIGKILL)
    fleet.line(rf"{three} +crash +ended, SIGKILL; starts again")
    fleet.line(rf"{three} +ready")

    # So do the servers, on the same ports, and no worker is lost over it.
    workers = fleet.pids("decode")
    for server in ("nats", "etcd"):
        address = getattr(fleet.state(), server)
        os.kill(fleet.pids()[server], signal.SIGKILL)
        fleet.line(rf"{server} +crash")
        fleet.line(rf"{server} +ready")
        assert getattr(fleet.state(), server) == address
    assert fleet.run("scale", "decode=2", "--wait")["settled"]
    assert fleet.pids("decode") == workers

    # Looked at before: nobody ends for it, and one that is up is not started again.
    everybody = fleet.pids()
    (fleet.control / f"{three}.load").write_text("4")
    looked = {row["name"]: row for row in fleet.run("down", "--dry-run")["end"]}
    assert {name: row["pid"] for name, row in looked.items()} == everybody
    assert looked[three]["running"] == 4
    assert "is up already" in fleet.run("up", "--dry-run", code=1)["error"]["message"]
    assert fleet.pids() == everybody

    # Down: the router first, etcd last, and nobody stays.
    assert fleet.run("down")["was_up"]
    assert fleet.ended() == 0
    gone = [line.split()[1] for line in fleet.lines if " gone " in line][-len(everybody) :]
    for order in (gone, [*looked]):
        assert order[0] == "router"
        assert order[-2:] == ["nats", "etcd"]
    assert not any(alive_pid(pid) for pid in everybody.values())
    assert fleet.folder.read() is None
    assert fleet.run("down")["was_up"] is False


def test_a_role_changes_in_place_and_the_counts_with_it(start: Callable[..., Fleet]) -> None:
    fleet = start(prefill=2, decode=1)
    fleet.line("fleet +ready")
    before = fleet.pids()
    (one, _), (only,) = fleet.pids("prefill"), fleet.pids("decode")

    # Nothing is changed by looking, nor where nobody would be left to answer.
    looked = fleet.run("role", one, "decode", "--dry-run")
    assert (looked["changed"], looked["before"], looked["role"]) == (False, "prefill", "decode")
    assert fleet.run("role", one, "prefill")["changed"] is False
    refused = fleet.run("role", only, "prefill", code=1)
    assert "only decode worker" in refused["error"]["message"]
    assert "nobody" in fleet.run("role", "nobody", "decode", code=1)["error"]["message"]

    # While it drains it is counted in its new role, and nobody is started or stopped.
    busy = fleet.control / f"{one}.busy"
    busy.touch()
    assert fleet.run("role", one, "decode")["state"] == "draining"
    fleet.line(rf"{one} +role +prefill → decode; wanted from now on: prefill=1 decode=2")
    fleet.line(rf"{one} +turning")
    until(lambda: fleet.run("status")["desired"] == {"prefill": 1, "decode": 2})
    rows = {row["id"]: (row["role"], row["state"]) for row in fleet.run("status")["workers"]}
    assert rows[one] == ("decode", "turning")
    assert fleet.pids() == before

    # Called off, and asked for again.
    assert fleet.run("role", one, "prefill", "--wait")["state"] == "ready"
    fleet.line(rf"{one} +role +decode → prefill; wanted from now on: prefill=2 decode=1")
    assert fleet.run("role", one, "decode")["state"] == "draining"
    busy.unlink()
    fleet.line(rf"{one} +ready")
    done = fleet.run("role", one, "decode", "--wait")
    assert (done["role"], done["state"]) == ("decode", "ready")
    status = fleet.run("status")
    assert status["desired"] == {"prefill": 1, "decode": 2}
    assert {row["id"]: row["role"] for row in status["workers"]}[one] == "decode"
    assert fleet.pids() == before
    assert not any(" stop " in line for line in fleet.lines)

    # A crash starts it in its new role; the counts stay.
    os.kill(before[one], signal.SIGKILL)
    fleet.line(rf"{one} +crash")
    fleet.line(rf"{one} +ready")
    rows = {row["id"]: row for row in fleet.run("status")["workers"]}
    assert rows[one]["role"] == "decode"
    assert rows[one]["pid"] != before[one]
    assert len(rows) == 3

    # Counts that were moved are changed like any.
    assert fleet.run("scale", "decode=1", "--wait")["settled"]
    assert fleet.run("scale", "prefill=2", "decode=1", "--wait")["settled"]
    assert len(fleet.pids("prefill")) + len(fleet.pids("decode")) == 3
    assert fleet.end() == 0


def alive_pid(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_worker_that_crashes_before_it_is_ready_fails_the_start_with_its_last_lines(
    start: Callable[..., Fleet],
) -> None:
    fleet = start(flags={"prefill": ["--behave", "crash"]}, policy={"back_off_s": 0.05})
    assert fleet.ended() == 1
    said = "\n".join(fleet.lines)
    assert re.search(r"error: prefill-\w+ did not become ready, after 3 failures", said)
    assert "    the weights are torn" in said
    assert fleet.folder.read() is None


def test_a_worker_that_never_becomes_ready_fails_the_start(start: Callable[..., Fleet]) -> None:
    fleet = start(flags={"decode": ["--behave", "hang"]}, policy={"ready_limit_s": 4.0, "hurry_limit_s": 1.0})
    assert fleet.ended() == 1
    said = "\n".join(fleet.lines)
    assert "not ready after 4 s" in said
    assert re.search(r"error: decode-\w+ did not become ready", said)


def test_settings_that_a_worker_refuses_are_an_error_at_once(start: Callable[..., Fleet]) -> None:
    fleet = start(flags={"prefill": ["--no-such-setting=1"]})
    assert fleet.ended() == 1
    said = "\n".join(fleet.lines)
    assert "there is no setting --no-such-setting" in said
    assert len(re.findall(r"prefill-\w+ +start ", said)) == 1


def test_one_that_hears_no_sigterm_is_killed(start: Callable[..., Fleet]) -> None:
    fleet = start(flags={"decode": ["--behave", "deaf"]}, policy={"drain_limit_s": 0.5})
    fleet.line("fleet +ready")
    assert fleet.end() == 0
    said = "\n".join(fleet.lines)
    assert re.search(r"decode-\w+ +kill +still running 0.5 s after SIGTERM", said)


def test_a_second_signal_hurries(start: Callable[..., Fleet]) -> None:
    fleet = start(policy={"hurry_limit_s": 0.5})
    fleet.line("fleet +ready")
    (name,) = fleet.pids("decode")
    (fleet.control / f"{name}.busy").touch()
    fleet.process.send_signal(signal.SIGINT)
    fleet.line(rf"{name} +stop")
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.ended() == 0
    assert re.search(rf"{name} +kill", "\n".join(fleet.lines))


def test_a_frozen_worker_is_replaced(start: Callable[..., Fleet]) -> None:
    fleet = start(policy={"silent_limit_s": 2.0}, flags={"decode": ["--control.lease-ttl-s", "1"]})
    fleet.line("fleet +ready")
    ((name, pid),) = fleet.pids("decode").items()
    os.kill(pid, signal.SIGSTOP)
    fleet.line(rf"{name} +kill +frozen")
    fleet.line(rf"{name} +ready")
    assert fleet.pids("decode")[name] != pid
    assert fleet.end() == 0


def test_scale_down_lets_the_frozen_one_go_and_waits_for_its_end(start: Callable[..., Fleet]) -> None:
    fleet = start(decode=2, policy={"drain_limit_s": 1.0}, flags={"decode": ["--control.lease-ttl-s", "1"]})
    fleet.line("fleet +ready")
    (frozen, pid), (serving, _) = [*fleet.pids("decode").items()]
    (fleet.control / f"{serving}.load").write_text("4")
    os.kill(pid, signal.SIGSTOP)

    def states() -> dict[str, str]:
        return {row["id"]: row["state"] for row in fleet.run("status")["workers"] if row["role"] == "decode"}

    until(lambda: states() == {frozen: "silent", serving: "ready"})
    assert fleet.run("scale", "decode=1", "--dry-run")["drain"] == [frozen]
    assert fleet.run("scale", "decode=1", "--wait")["settled"]
    assert [*fleet.pids("decode")] == [serving]
    # Its load is unknown at once, its silence when its lease has run out.
    fleet.line(rf"{frozen} +stop +2 decode, 1 wanted; this one (shows no sign of life|is the youngest)")
    assert fleet.end() == 0


def test_who_waits_for_counts_hears_that_others_want_others(start: Callable[..., Fleet]) -> None:
    fleet = start(decode=2)
    fleet.line("fleet +ready")
    for name in fleet.pids("decode"):
        (fleet.control / f"{name}.busy").touch()
    waiting: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: waiting.append(fleet.run("scale", "decode=1", "--wait", code=1)))
    thread.start()
    fleet.line(r"decode-\w+ +stop ")
    # More of the other role is no contradiction; what it waits for is that, too.
    fleet.run("scale", "prefill=2")
    fleet.line(r"prefill-\w+ +ready")
    assert thread.is_alive()
    fleet.run("scale", "decode=3")
    thread.join(FAILS_AFTER_S)
    assert (
        "others have changed what is wanted meanwhile: prefill=2 decode=3" in waiting[0]["error"]["message"]
    )
    for busy in fleet.control.glob("*.busy"):
        busy.unlink()
    assert fleet.end() == 0


def test_who_stops_waiting_hears_what_goes_on(start: Callable[..., Fleet]) -> None:
    fleet = start(decode=2)
    fleet.line("fleet +ready")
    for name in fleet.pids("decode"):
        (fleet.control / f"{name}.busy").touch()
    asked = fleet.run("drain", next(iter(fleet.pids("decode"))), "--dry-run")
    assert (asked["dry_run"], asked["state"]) == (True, "ready")
    said = _interrupted(fleet, "scale", "decode=1", "--wait")
    assert "interrupted: set decode 2 → 1, and that stays; `fleetctl status` shows" in said
    assert fleet.run("scale", "decode=1", "--dry-run")["before"] == {"prefill": 1, "decode": 1}
    assert "interrupted: fleet default drains all the same" in _interrupted(fleet, "down")
    for busy in fleet.control.glob("*.busy"):
        busy.unlink()
    assert fleet.ended() == 0


def _interrupted(fleet: Fleet, *arguments: str) -> str:
    """What a command says that is interrupted after its first word."""
    command = [sys.executable, "-m", "fleetctl", *arguments, "--state-dir", str(fleet.folder.path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline(), "it says what it is at"
        if arguments == ("down",):
            fleet.line("the fleet goes down")
        waiting.send_signal(signal.SIGINT)
        said = waiting.stderr.read()
        assert waiting.wait(FAILS_AFTER_S) == 1
    return said


def test_of_changes_at_the_same_time_each_says_what_it_changed(start: Callable[..., Fleet]) -> None:
    fleet = start(prefill=1, decode=1)
    fleet.line("fleet +ready")
    said: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda one=one: said.append(fleet.run("scale", one)))
        for one in ("prefill=2", "decode=2", "prefill=3")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FAILS_AFTER_S)
    # One after another, whatever their order: each begins where another one ended.
    changes = {(*one["before"].values(), *one["desired"].values()) for one in said}
    at = (1, 1)
    while changes:
        (change,) = [one for one in changes if one[:2] == at]
        changes.remove(change)
        at = change[2:]
    assert fleet.run("status")["desired"] == dict(zip(("prefill", "decode"), at, strict=True))
    assert fleet.end() == 0


def test_what_holds_a_change_up_is_named(start: Callable[..., Fleet]) -> None:
    fleet = start(decode=2)
    fleet.line("fleet +ready")
    for name in fleet.pids("decode"):
        (fleet.control / f"{name}.busy").touch()
    said = fleet.run("scale", "decode=1", "--wait", "--limit", "2", code=1)["error"]["message"]
    leaving = fleet.line(r"(decode-\w+) +stop ")[1]
    assert re.search(rf"not settled after 2 s: .*decode 1/1.*; {leaving}, stop: 2 decode, 1 wanted", said)
    elsewhere = ("--etcd", fleet.state().etcd, "--wait", "--limit", "0.1")
    said = fleet.run("scale", "decode=1", *elsewhere, code=1)["error"]["message"]
    assert "nobody supervises this fleet here" in said
    for busy in fleet.control.glob("*.busy"):
        busy.unlink()
    assert fleet.end() == 0


def test_a_full_disk_costs_what_would_be_written_there_and_no_process(start: Callable[..., Fleet]) -> None:
    fleet = start()
    fleet.line("fleet +ready")
    before = fleet.pids()
    ((name, pid),) = fleet.pids("decode").items()
    state, log = fleet.folder.path / "state.new", fleet.folder.log(name)
    state.symlink_to("/dev/full")
    log.unlink()
    log.symlink_to("/dev/full")
    os.kill(pid, signal.SIGKILL)
    fleet.line("state +old .*No space left")
    fleet.line(rf"{name} +start")
    fleet.line(rf"{name} +ready")
    assert fleet.pids() == before
    state.unlink()
    until(lambda: fleet.pids()[name] != pid)
    assert {**fleet.pids(), name: pid} == before
    assert fleet.end() == 0


def test_nothing_outlives_a_supervisor_that_is_killed_and_the_next_one_starts_clean(
    start: Callable[..., Fleet],
) -> None:
    fleet = start()
    fleet.line("fleet +ready")
    second = start()
    assert second.ended() == 1
    assert "is up already" in "\n".join(second.lines)
    children = fleet.state().children
    fleet.process.kill()
    fleet.ended()
    until(lambda: not any(alive(child.pid, child.born) for child in children))
    again = start()
    again.line("fleet +ready")
    assert {row["id"] for row in again.run("status")["workers"]}.isdisjoint(
        {child.name for child in children}
    )
    assert again.end() == 0


def test_a_decision_is_a_new_one_whatever_the_clock_says(start: Callable[..., Fleet]) -> None:
    fleet = start()
    fleet.line("fleet +ready")
    ahead = LastDecision(9, 9, "made when the clock was an hour ahead", "act", True, time.time() + 3600)

    async def write() -> None:
        registry = EtcdRegistry(fleet.state().etcd)
        await registry.put(decision_key("default"), msgspec.json.encode(ahead))
        await registry.close()

    asyncio.run(write())
    said = fleet.run("scale", "auto", "--wait", "--limit", "60")
    assert said["mode"] == "act"
    decided = fleet.run("status")["planner"]["decision"]
    for decision in (said["decision"], decided):
        assert (decision["prefill"], decision["decode"]) == (1, 1)
    assert fleet.end() == 0


def test_counts_nobody_can_read_change_nothing(start: Callable[..., Fleet]) -> None:
    fleet = start()
    fleet.line("fleet +ready")
    before = fleet.pids()

    async def write(data: bytes) -> None:
        registry = EtcdRegistry(fleet.state().etcd)
        await registry.put(desired_key("default"), data)
        await registry.close()

    asyncio.run(write(b'{"prefill": 0}'))
    fleet.line("desired +ignored .*no count for 'decode'")
    # Who looks sees the rest, and who says all writes over it.
    assert fleet.run("status")["desired"] is None
    assert "give both" in fleet.run("scale", "decode=2", code=1)["error"]["message"]
    done = fleet.run("scale", "prefill=2", "decode=1", "--wait")
    assert (done["desired"], done["settled"]) == ({"prefill": 2, "decode": 1}, True)
    fleet.line("desired +changed +prefill=2 decode=1")
    assert before.items() <= fleet.pids().items()
    assert fleet.end() == 0


def test_a_paused_etcd_costs_no_worker_and_status_still_answers(start: Callable[..., Fleet]) -> None:
    fleet = start()
    fleet.line("fleet +ready")
    # The counts are written beside the start, and may come after it.
    until(lambda: fleet.run("status")["desired"] == {"prefill": 1, "decode": 1})
    before = fleet.pids()
    os.kill(before["etcd"], signal.SIGSTOP)
    try:
        status = fleet.run("status")
        refused = fleet.run("scale", "decode=2", code=1)["error"]
    finally:
        os.kill(before["etcd"], signal.SIGCONT)
    assert status["etcd"]["state"] == "silent"
    assert refused["type"] == "Unavailable"
    assert f"etcd at {fleet.state().etcd} does not answer; is the fleet up" in refused["message"]
    assert {row["id"] for row in status["workers"]} == {*fleet.pids("prefill"), *fleet.pids("decode")}
    assert fleet.run("scale", "decode=1", "--wait")["settled"]
    assert fleet.pids() == before
    assert fleet.end() == 0


def test_detached_returns_when_ready_and_the_fleet_stays(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)

    def detach(**given: Any) -> subprocess.CompletedProcess[str]:
        """In a process of its own, which ends while the fleet goes on."""
        program = str(Path(__file__).with_name("standin_up.py"))
        command = [sys.executable, program, str(tmp_path), json.dumps({"desired": [1, 1], **given})]
        script = (
            "from pathlib import Path\n"
            "from fleetctl.commands.up import detach_until_ready\n"
            "from fleetctl.options import Target\n"
            "from fleetctl.state import StateFolder\n"
            f"target = Target('default', StateFolder(Path({str(tmp_path)!r})), None, True)\n"
            f"detach_until_ready(target, {command!r})\n"
        )
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    ready = json.loads(detach().stdout)
    assert (ready["ready"], ready["dry_run"]) == (True, False)
    state = folder.read()
    assert state is not None
    assert (ready["pid"], ready["url"]) == (state.pid, f"{state.router}/v1")
    assert alive(state.pid, state.born)
    os.kill(state.pid, signal.SIGTERM)
    until(lambda: not alive(state.pid, state.born))
    assert folder.read() is None

    failed = detach(flags={"decode": ["--no-such-setting=1"]})
    assert failed.returncode == 1
    assert "there is no setting --no-such-setting" in failed.stderr
    assert not folder.held()
