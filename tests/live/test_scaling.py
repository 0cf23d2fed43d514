"""A real fleet that is handed to the planner: it grows under load, goes to zero after it and comes back for
who waits, and no request is lost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_fleet_under_load import FAILS_AFTER_S, Answer, Fleet, load

pytestmark = pytest.mark.live

PLANNER = {
    "interval-s": 0.5, "warm-up-s": 1, "cold-start-s": 5, "settle-s": 6, "turn-settle-s": 3, "idle-s": 5,
    "scale-to-zero": "true",
}  # fmt: skip
"""Quicker than usual, as is everything here."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet("", "latency", 60, tmp_path)
    planner = [f"--set=planner:planner.{name}={value}" for name, value in PLANNER.items()]
    ready = fleet.run(
        *("up", "--detach", "--port", "0", "--model", "latency:base=20,decode=6"),
        *("--auto", "--budget", "4", "--set=router:objectives.standard.tpot-ms=80", *planner),
    )
    try:
        yield Fleet(ready["url"], ready["model"], fleet.tokens, tmp_path)
    finally:
        fleet.run("down")


async def until(fleet: Fleet, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(FAILS_AFTER_S):
        while True:
            status = await asyncio.to_thread(fleet.run, "status")
            if what(status):
                return status
            await asyncio.sleep(0.3)


def ready(status: dict[str, Any], role: str) -> int:
    return sum(row["role"] == role and row["state"] == "ready" for row in status["workers"])


def test_the_planner_grows_a_fleet_shrinks_it_to_zero_and_back(fleet: Fleet) -> None:
    async def scenario() -> None:
        grown = 0

        async def until_it_has_grown() -> None:
            nonlocal grown
            status = await until(fleet, lambda status: ready(status, "decode") >= 2)
            grown = ready(status, "decode")
            assert status["planner"]["mode"] == "act"
            assert status["planner"]["decision"]["why"]

        answers: list[Answer] = await load(fleet, 14, until_it_has_grown)
        assert grown >= 2
        await until(fleet, lambda status: status["desired"] == {"prefill": 0, "decode": 0})
        gone = await until(fleet, lambda status: not status["workers"])
        assert (
            "nothing was asked" in gone["planner"]["decision"]["why"]
            or "nobody" in (gone["planner"]["decision"]["why"])
        )

        async def nothing() -> None: ...

        # Nobody is there: they wait at the router until somebody is.
        answers += await load(fleet, 3, nothing)
        for answer in answers:
            assert (answer.error, answer.finish, answer.tokens) == ("", "length", fleet.tokens)
        by_hand = await asyncio.to_thread(fleet.run, "scale", "prefill=1", "decode=1", "--wait")
        assert (by_hand["mode"], by_hand["settled"]) == ("off", True)
        status = await until(fleet, lambda status: len(status["workers"]) == 2)
        assert status["planner"]["mode"] == "off"

    asyncio.run(scenario())
    done = subprocess.run(
        [sys.executable, "-m", "planner", "replay", str(fleet.state / "decisions.jsonl")],
        capture_output=True, text=True, timeout=FAILS_AFTER_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 others" in done.stdout
