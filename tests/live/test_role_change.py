"""A worker of a real fleet with the real model takes another role and comes back, while clients stream."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.live, pytest.mark.model]

FAILS_AFTER_S = 240.0
TOKENS = 24
LONG = "The harbour lay quiet that morning, and nobody had yet come down to the boats. " * 8


def fleetctl(fleet: dict[str, Any], *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fleetctl", *arguments, "--json", "--state-dir", fleet["state_dir"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FAILS_AFTER_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


async def ask(fleet: dict[str, Any], client: httpx.AsyncClient, prompt: str) -> tuple[str, int]:
    """A greedy answer, and how many tokens of the prompt were found in a cache."""
    body = {
        "model": fleet["model"],
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, finish, cached = "", "", 0
    async with client.stream("POST", "/completions", json=body) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            if event.get("usage"):
                cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                assert event["usage"]["completion_tokens"] == TOKENS
            for choice in event["choices"]:
                text += choice["text"]
                finish = choice["finish_reason"] or finish
    assert finish == "length"
    return text, cached


@dataclass
class Stream:
    """Requests without a pause, each prompt again and again: every answer must be the first one's."""

    fleet: dict[str, Any]
    client: httpx.AsyncClient
    texts: dict[str, str] = field(default_factory=dict)
    count: int = 0
    over: bool = False

    async def run(self, number: int) -> None:
        while not self.over:
            prompt = f"List {number + 3} facts about the number {number}:"
            text, _ = await ask(self.fleet, self.client, prompt)
            assert self.texts.setdefault(prompt, text) == text, prompt
            self.count += 1


@pytest.fixture
def fleet(demo_fleet: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield demo_fleet
    # As it was found, whatever a test did.
    for row in fleetctl(demo_fleet, "status")["workers"]:
        own = row["id"].partition("-")[0]
        if row["role"] != own:
            fleetctl(demo_fleet, "role", row["id"], own, "--wait", "--force")


def test_a_role_changes_and_comes_back_under_a_stream_of_requests(fleet: dict[str, Any]) -> None:
    async def scenario() -> None:
        def rows() -> dict[str, dict[str, Any]]:
            return {row["id"]: row for row in fleetctl(fleet, "status")["workers"]}

        before = rows()
        (name,) = (id for id, row in before.items() if row["role"] == "prefill")
        limits = httpx.Timeout(FAILS_AFTER_S)
        async with (
            asyncio.timeout(FAILS_AFTER_S),
            httpx.AsyncClient(base_url=fleet["url"], timeout=limits) as client,
        ):
            # Cached at the prefill worker; the decode worker has it too, so it is asked for what it lacks.
            text, _ = await ask(fleet, client, LONG)
            stream = Stream(fleet, client)
            asking = [asyncio.create_task(stream.run(number)) for number in range(3)]

            async def more(count: int) -> None:
                until = stream.count + count
                while stream.count < until:
                    assert not any(task.done() for task in asking), await asyncio.gather(*asking)
                    await asyncio.sleep(0.05)

            await more(4)
            for role in ("decode", "prefill"):
                done = await asyncio.to_thread(fleetctl, fleet, "role", name, role, "--wait")
                assert (done["role"], done["state"], done["changed"]) == (role, "ready", True)
                there = await asyncio.to_thread(rows)
                assert {id: row["pid"] for id, row in there.items()} == {
                    id: row["pid"] for id, row in before.items()
                }
                assert there[name]["role"] == role
                # Nothing was loaded anew: what it cached before the change is there.
                assert there[name]["counters"]["prompt_tokens"] >= before[name]["counters"]["prompt_tokens"]
                again, cached = await ask(fleet, client, LONG)
                assert again == text
                assert cached > 100, "the prefix is not found any more"
                await more(4)
            stream.over = True
            await asyncio.gather(*asking)
        wanted = (await asyncio.to_thread(fleetctl, fleet, "status"))["desired"]
        assert wanted == {"prefill": 1, "decode": 1}

    asyncio.run(scenario())
