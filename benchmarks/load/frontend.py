"""A frontend over workers that cost nothing: requests/s, streamed tokens/s, serial latency, from outside; and
the processor time of each kind of process, which tells something also where others use the machine.

Without `--url` it starts a fleet of latency-model workers. With it, it measures that server, so that another
system's frontend over its own mock workers does the same work in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import uvloop

from benchmarks.load.fleet import started
from benchmarks.report import emit

WORKERS = ["engine.max-batch=64", f"engine.kv-memory-bytes={16384 * 128}"]
"""16,384 blocks each, as mock workers of others: tables of the millions that 1 GiB of this toy's KV holds
would be what is measured."""
TEXT = "What is the capital of France, and why? " * 6


class Frontend:
    def __init__(self, url: str, model: str) -> None:
        place = urlparse(url)
        self._host, self._port = place.hostname or "127.0.0.1", place.port or 80
        self._model = model

    def _post(self, tokens: int, stream: bool, number: int, close: bool) -> bytes:
        body = json.dumps(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": f"{number} {TEXT}"}],
                "max_tokens": tokens,
                "min_tokens": tokens,
                "ignore_eos": True,
                "stream": stream,
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n" + ("Connection: close\r\n\r\n" if close else "\r\n")
        )
        return head.encode() + body

    async def whole(self, count: int, clients: int) -> tuple[float, list[float]]:
        """Answers of one token on connections that stay open: requests/s, and seconds of each."""
        numbers, took = iter(range(count)), []

        async def client() -> None:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            for number in numbers:
                start = time.perf_counter()
                writer.write(self._post(1, False, number, False))
                await _answer(reader)
                took.append(time.perf_counter() - start)
            writer.close()

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return count / (time.perf_counter() - start), took

    async def streams(self, count: int, clients: int, tokens: int) -> float:
        """Events with a token a second, over all streams."""
        numbers, events = iter(range(count)), 0

        async def client() -> None:
            nonlocal events
            for number in numbers:
                reader, writer = await asyncio.open_connection(self._host, self._port)
                writer.write(self._post(tokens, True, number, True))
                last = b""
                while data := await reader.read(1 << 16):
                    joined = last + data
                    events += joined.count(b'"delta"') - last.count(b'"delta"')
                    last = joined[-16:]
                writer.close()

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        seconds = time.perf_counter() - start
        if events < count * tokens * 0.5:
            raise SystemExit(f"only {events} events for {count * tokens} tokens")
        return min(events, count * tokens) / seconds


_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Processor:
    """What processes have used, by kind, and this one as the client. Seconds of one core; Linux only."""

    def __init__(self, processes: Mapping[str, Sequence[int]]) -> None:
        self._processes = processes
        self._before = self._used()

    def _used(self) -> dict[str, float]:
        used = {"client": time.process_time()}
        for kind, pids in self._processes.items():
            used[kind] = 0.0
            for pid in pids:
                figures = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                used[kind] += _TICK_S * (int(figures[11]) + int(figures[12]))
        return used

    def since(self, units: float) -> dict[str, float]:
        """Microseconds a unit since it was made, by kind, rounded."""
        return {
            f"{kind}_us": round((now - self._before[kind]) / units * 1e6, 1)
            for kind, now in self._used().items()
        }


def _kind_and_pids(given: str) -> tuple[str, list[int]]:
    kind, _, pids = given.partition("=")
    return kind, [int(pid) for pid in pids.split(",")]


async def _answer(reader: asyncio.StreamReader) -> None:
    status = int((await reader.readline()).split()[1])
    length = None
    chunked = False
    while line := (await reader.readline()).strip().lower():
        if line.startswith(b"content-length:"):
            length = int(line.split(b":")[1])
        chunked = chunked or (line.startswith(b"transfer-encoding:") and b"chunked" in line)
    if chunked:
        while size := int((await reader.readline()).strip() or b"0", 16):
            await reader.readexactly(size + 2)
        await reader.readline()
    else:
        data = await reader.readexactly(length or 0)
        if status != 200:
            raise SystemExit(f"status {status}: {data[:300]!r}")


def _processes(said: Mapping[str, Any]) -> dict[str, list[int]]:
    """Of a fleet that was just started."""
    place = ["--fleet", said["fleet"], "--state-dir", said["state_dir"], "--json"]
    command = [sys.executable, "-m", "fleetctl", "status", *place]
    status = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {
        "router": [router["pid"] for router in status["routers"]],
        "workers": [worker["pid"] for worker in status["workers"]],
        "bus": [status["nats"]["pid"]],
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks load/frontend", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--url")
    parser.add_argument("--model", default="")
    parser.add_argument("--name", default="peer", help="what to call the server of --url in the output")
    parser.add_argument(
        "--process",
        action="append",
        default=[],
        type=_kind_and_pids,
        metavar="KIND=PID,PID",
        help="whose processor time to tell, of the server of --url; several times",
    )
    given = parser.parse_args(argv)
    scale = 4 if given.quick else 1

    def measure(url: str, model: str, name: str, processes: Mapping[str, Sequence[int]]) -> None:
        frontend = Frontend(url, model)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(frontend.whole(200, 8))
            for clients in (1, 32):
                count = 2000 // scale // (3 if clients == 1 else 1)
                processor = Processor(processes)
                rate, took = runner.run(frontend.whole(count, clients))
                emit(f"{name}/requests_s", "requests/s", [rate], clients=clients, **processor.since(count))
                emit(f"{name}/request", "s", took, clients=clients)
            runner.run(frontend.streams(32, 16, 32))
            processor, count = Processor(processes), 512 // scale
            rate = runner.run(frontend.streams(count, 64, 128))
            used = processor.since(count * 128)
            emit(f"{name}/streamed_tokens_s", "tokens/s", [rate], clients=64, tokens=128, **used)

    if given.url:
        measure(given.url, given.model, given.name, dict(given.process))
        return
    with started(0, 4, WORKERS, model="latency") as said:
        measure(said["url"], said["model"], "frontend", _processes(said))


if __name__ == "__main__":
    main(sys.argv[1:])
