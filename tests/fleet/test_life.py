"""The life of a process, shown by real processes that are signalled and that fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

HEAD = """
import asyncio, sys
from fleet.life import Life, run_process
from fleet.errors import Unavailable
def say(text): print(text, flush=True)
"""


@contextmanager
def process(body: str, first: str = "", **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A process whose `main` is the body, after `first`; it is killed at the end whatever happened."""
    indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
    code = f"{HEAD}\n{first}\nasync def main(life):\n{indented}\nrun_process(main)\n"
    started = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def said(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline().strip()


def ended(started: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what was logged."""
    _, log = started.communicate(timeout=60)
    return started.returncode, log


def test_a_main_that_returns_is_a_good_end_and_takes_the_roots_along() -> None:
    body = """
async def forever():
    try:
        await asyncio.Event().wait()
    finally:
        say("root cancelled")
life.root("forever", forever())
await asyncio.sleep(0)
say("main")
"""
    with process(body) as started:
        assert said(started) == "main"
        assert said(started) == "root cancelled"
        assert ended(started) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_drain_then_hurry(number: signal.Signals) -> None:
    body = """
say("up")
await life.stopping.wait()
say("draining")
await life.hurrying.wait()
say("hurrying")
"""
    with process(body) as started:
        assert said(started) == "up"
        started.send_signal(number)
        assert said(started) == "draining"
        started.send_signal(number)
        assert said(started) == "hurrying"
        assert ended(started)[0] == 0


def test_the_third_signal_ends_what_does_not_listen() -> None:
    body = """
say("up")
await life.stopping.wait()
say("one")
await life.hurrying.wait()
say("two")
await asyncio.Event().wait()
"""
    with process(body) as started:
        for line in ("up", "one", "two"):
            assert said(started) == line
            started.send_signal(signal.SIGTERM)
        code, log = ended(started)
        assert code == 128 + signal.SIGTERM
        assert "third" in log


def test_a_root_that_ends_by_itself_ends_the_process() -> None:
    body = """
async def short(): say("short")
life.root("the short one", short())
try:
    await asyncio.Event().wait()
finally:
    say("main cancelled")
"""
    with process(body) as started:
        assert said(started) == "short"
        assert said(started) == "main cancelled"
        code, log = ended(started)
        assert code == 1
        assert "the short one has ended by itself" in log


def test_a_root_may_end_when_the_process_stops() -> None:
    body = """
async def listener(): await life.stopping.wait()
life.root("listener", listener())
say("up")
await life.stopping.wait()
await asyncio.sleep(0.05)
"""
    with process(body) as started:
        assert said(started) == "up"
        started.send_signal(signal.SIGTERM)
        assert ended(started)[0] == 0


def test_a_defect_is_logged_with_its_trace() -> None:
    with process("raise KeyError('what was missing')") as started:
        code, log = ended(started)
    assert code == 1
    assert "Traceback" in log
    assert "KeyError: 'what was missing'" in log


def test_an_error_with_a_clear_text_is_one_line() -> None:
    body = """
async def fail(): raise Unavailable("no etcd at 1.2.3.4:2379")
life.root("root", fail())
await asyncio.Event().wait()
"""
    with process(body) as started:
        code, log = ended(started)
    assert code == 1
    assert log.strip().endswith("ended: Unavailable: no etcd at 1.2.3.4:2379")
    assert log.count("\n") == 1


def test_log_settings_come_from_the_environment() -> None:
    with process("raise OSError('port in use')", PDFLEET_LOG_FORMAT="json") as started:
        assert '"message": "ended: OSError: port in use"' in ended(started)[1]
    with process("say('up')", PDFLEET_LOG_LEVEL="loud") as started:
        code, log = ended(started)
    assert code == 2
    assert "PDFLEET_LOG_LEVEL is 'loud'; one of debug, info, warning, error is needed" in log


def test_an_abort_ends_the_process_though_a_thread_hangs() -> None:
    body = """
import threading
threading.Thread(target=threading.Event().wait).start()
say("up")
life.abort("no step ends")
"""
    with process(body) as started:
        assert said(started) == "up"
        code, log = ended(started)
        assert code == 1
        assert log.strip().endswith("ended: no step ends")


def test_what_the_interpreter_keeps_of_what_was_freed_is_given_back_from_time_to_time() -> None:
    body = """
import fleet.life, gc, weakref
fleet.life.TIDY_S = 0.05
life.settled()
for turn in range(2):
    class Ring: pass
    ring = Ring()
    ring.ring, gone = ring, asyncio.Event()
    weakref.finalize(ring, gone.set)
    gc.collect()
    many = [tuple([number] * 7) for number in range(2000)]
    del ring, many
    before = sys.getallocatedblocks()
    await asyncio.wait_for(gone.wait(), 30)
    say(before - sys.getallocatedblocks() > 1500)
"""
    with process(body) as started:
        assert [said(started), said(started)] == ["True", "True"]
        assert ended(started)[0] == 0


def test_more_descriptors_may_be_open_than_the_few_that_shells_give() -> None:
    first = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
"""
    with process("say(resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64)", first) as started:
        assert said(started) == "True"
