"""Worker processes told to leave, told to hurry, and killed: what becomes of requests and of files."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import httpx
import pytest
from processes import Fleet, Plan, Process, Watcher, all_up, running, until

pytestmark = pytest.mark.live

TOKENS = 150


async def ask(client: httpx.AsyncClient, number: int) -> str:
    """One greedy stream, whole; its text."""
    body = {
        "model": "latency",
        "prompt": f"List {number + 3} facts about the number {number}:",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    text, finish = "", ""
    async with client.stream("POST", "/completions", json=body) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["text"]
                    finish = choice["finish_reason"] or finish
    assert finish == "length"
    return text


async def streams_at(watcher: Watcher, worker: str) -> set[str]:
    report = await watcher.report(worker)
    return set(report.streams) if report is not None else set()


async def left(process: Process) -> int | None:
    await until(lambda: not process.alive, 90.0, process.tail)
    return process.stopped()


async def under_load(
    fleet: Fleet, watcher: Watcher, client: httpx.AsyncClient, victim: str
) -> list[asyncio.Task[str]]:
    """Twenty streams, some of them at the victim."""
    asking = [asyncio.create_task(ask(client, number)) for number in range(20)]

    async def served() -> bool:
        return len(await streams_at(watcher, victim)) > 3

    await until(served, 60.0, fleet.logs)
    return asking


def test_workers_leave_hurry_and_die_without_a_request_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, Plan("latency:base=20", 1, 2, 1)) as (fleet, watcher):
            host, port = fleet.address("router-0")
            url = f"http://{host}:{port}/v1"
            async with httpx.AsyncClient(base_url=url, timeout=None) as client:
                quiet = await asyncio.gather(*(ask(client, number) for number in range(20)))
                await drained_under_load(fleet, watcher, client, quiet)
                await hurried_under_load(fleet, watcher, client, quiet)
            await killed_and_its_folder_gone(fleet, watcher)

    asyncio.run(main())


async def drained_under_load(
    fleet: Fleet, watcher: Watcher, client: httpx.AsyncClient, quiet: list[str]
) -> None:
    """SIGTERM: its card says so, nothing new comes, what runs ends there, and it leaves with code 0. All that
    while it is registered and answers: the control plane is let go of last."""
    victim = fleet.processes["decode-0"]
    asking = await under_load(fleet, watcher, client, "decode-0")
    victim.signal(signal.SIGTERM)

    async def draining() -> bool:
        card, report = await watcher.card("decode-0"), await watcher.report("decode-0")
        return card is not None and report is not None and card.state == report.state == "draining"

    await until(draining, 30.0, victim.tail)
    held = await streams_at(watcher, "decode-0")
    assert held, "nothing ran there any more"
    late = [asyncio.create_task(ask(client, number)) for number in range(4)]
    while victim.alive and (now := await streams_at(watcher, "decode-0")):
        assert now <= held, "a new request came to a worker that drains"
        await asyncio.sleep(0.1)
    assert await left(victim) == 0
    assert await watcher.card("decode-0") is None
    assert await asyncio.gather(*asking, *late) == [*quiet, *quiet[:4]]
    victim.start()
    await all_up(fleet, watcher)


async def hurried_under_load(
    fleet: Fleet, watcher: Watcher, client: httpx.AsyncClient, quiet: list[str]
) -> None:
    """A second SIGTERM: it leaves at once, with code 0; its requests go on elsewhere, to the same texts."""
    victim = fleet.processes["decode-0"]
    asking = await under_load(fleet, watcher, client, "decode-0")
    victim.signal(signal.SIGTERM)
    await until(lambda: "draining" in victim.since_start(), 30.0, victim.tail)
    victim.signal(signal.SIGTERM)
    assert await left(victim) == 0
    assert not all(task.done() for task in asking), "it did not hurry"
    assert await asyncio.gather(*asking) == quiet
    victim.start()
    await all_up(fleet, watcher)


async def killed_and_its_folder_gone(fleet: Fleet, watcher: Watcher) -> None:
    """SIGKILL leaves a folder behind, which the next worker of this host that starts removes."""
    card = await watcher.card("prefill-0")
    assert card is not None
    path = next(one for one in card.transfer.split(",") if one.startswith("shm:"))
    folder = Path(path.split(":", 2)[2]).parent
    assert folder.is_dir()
    fleet.processes["prefill-0"].kill()
    assert folder.is_dir()
    fleet.processes["prefill-0"].start()
    await all_up(fleet, watcher)
    assert not folder.exists()


def test_a_worker_whose_steps_do_not_end_ends_itself_to_be_started_again(tmp_path: Path) -> None:
    async def main() -> None:
        # A step takes a hundred seconds: for a worker that allows one second, it does not end.
        flags = {"decode": ("--chassis.stalled-limit-s", "1")}
        async with running(tmp_path, Plan("latency:base=100000", 0, 1, 1, flags)) as (fleet, _):
            host, port = fleet.address("router-0")
            victim = fleet.processes["decode-0"]
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}/v1", timeout=None) as client:
                asking = asyncio.create_task(ask(client, 1))
                assert await left(victim) == 1
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            assert "ended: stalled: " in victim.since_start()

    asyncio.run(main())
