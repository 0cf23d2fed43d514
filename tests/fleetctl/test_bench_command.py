"""`fleetctl bench` by its command line: what is wrong is said before anything is asked; interrupts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner

from fleetctl.__main__ import main


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(main, ["bench", *arguments], prog_name="fleetctl")
    return done.exit_code, done.stdout, done.stderr


class Server(ThreadingHTTPServer):
    """An OpenAI server that streams what it is asked for, and counts."""

    daemon_threads = True
    asked = 0


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        self.server.asked += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = body["max_tokens"]
        choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
        events: list[Any] = [{"choices": [choice]} for _ in range(count)]
        words = len(body["messages"][-1]["content"].split())
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        usage = {"prompt_tokens": 3 + 2 * words, "completion_tokens": count}
        events.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._send("".join([*lines, "data: [DONE]\n\n"]).encode())

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[tuple[Server, str]]:
    server = Server(("127.0.0.1", 0), Answers)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", "many"], "is no amount"),
        (["--output", "5..1"], "ends before it begins"),
        (["--kind", "class=batch shares=3"], "known are class="),
        (["--slo", "ttft=soon"], "is no objective"),
        (["--ramp-to", "5", "--requests", "5"], "needs a --duration"),
        (["--warm-up", "30", "--duration", "30"], "nothing would be judged"),
        (["--header", "Accept"], "NAME:VALUE"),
        (["--class", "a\nb: c"], "no name of a class"),
        (["--map-class", "a=B"], "no name of a class"),
        (["--url", "ftp://x"], "base URL"),
        (["--html", "/nowhere/at/all.html"], "no folder"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_asked(arguments: list[str], said: str) -> None:
    # Nobody listens there: it would be said, had it been asked.
    code, _, err = run("--url", "http://127.0.0.1:9", *arguments)
    assert (code, said in err) == (1, True), err


def test_without_a_server_the_next_step_is_told(tmp_path: Path) -> None:
    code, _, err = run("--state-dir", str(tmp_path))
    assert code == 1
    assert "fleetctl up" in err
    assert "--url" in err
    code, _, err = run("--url", "http://127.0.0.1:9")
    assert code == 1
    assert "does not list its models" in err


def test_a_trace_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text("hello\n")
    code, _, err = run("--url", "http://127.0.0.1:9", "--trace", str(path))
    assert (code, "unknown trace" in err) == (1, True)
    path.write_bytes(b"\x1f\x8bnot gzip")
    code, _, err = run("--url", "http://127.0.0.1:9", "--trace", str(path))
    assert (code, "cannot be read" in err) == (1, True)


def test_flags_of_a_search_stand_behind_its_name() -> None:
    code, _, err = run("--cv", "2", "find")
    assert code == 2
    assert "bench find --cv" in err


def test_a_run_by_hand(tmp_path: Path) -> None:
    with serving() as (server, url):
        page = tmp_path / "report.html"
        arguments = ("--url", url, "--rate", "100", "--requests", "20", "--output", "3", "--prompt", "40")
        code, out, err = run(*arguments, "--html", str(page))
    assert code == 0, err
    # Its words are two tokens each, which the first two requests found out.
    assert "prompts of 43 tokens" in out
    assert "100.0%" in out
    assert server.asked == 22
    assert "<svg" in page.read_text()


def test_an_interrupt_ends_with_what_there_is(tmp_path: Path) -> None:
    with serving() as (server, url):
        command = [sys.executable, "-m", "fleetctl", "bench", "--url", url, "--rate", "50", "--json"]
        process = subprocess.Popen([*command, "--duration", "3600"], stdout=subprocess.PIPE, text=True)
        try:
            asyncio.run(_until(server, 10))
            process.send_signal(signal.SIGINT)
            said = _what_it_found(process)
        finally:
            process.kill()
    assert said["requests"]["ends"] == {"finished": said["requests"]["sent"]}
    assert said["requests"]["sent"] == server.asked - 2 >= 8


def test_a_terminals_interrupt_may_come_while_the_generator_starts(tmp_path: Path) -> None:
    """It goes to both processes, and the other one is importing then."""
    with serving() as (server, url):
        command = [sys.executable, "-m", "fleetctl", "bench", "--url", url, "--rate", "50", "--json"]
        process = subprocess.Popen(
            [*command, "--duration", "3600"], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            asyncio.run(_until(server, 2))
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            while not children.read_text().split() and process.poll() is None:
                time.sleep(0.001)  # polled
            os.killpg(process.pid, signal.SIGINT)
            _what_it_found(process)
        finally:
            process.kill()


def _what_it_found(process: subprocess.Popen[str]) -> dict[str, Any]:
    """When it was interrupted."""
    said: dict[str, Any] = json.loads(process.communicate()[0])
    assert process.returncode == 0
    assert said["interrupted"] == "interrupted"
    return said


async def _until(server: Server, asked: int) -> None:
    while server.asked < asked:
        await asyncio.sleep(0.02)
