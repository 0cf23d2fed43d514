"""The ingress alone: requests/s and streamed frames/s over a fleet in memory that draws at once.

Server and client are two processes; the client speaks raw HTTP/1.1, so that the server is what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import uvloop

from benchmarks.report import emit
from fleet.errors import FleetError
from fleet.handoff import CancelReason
from fleet.request import FinishReason, Request, Usage
from fleet.stages import Timeline
from router.openai.asgi import Ingress
from router.openai.server import HttpServer
from router.openai.settings import HttpSettings
from router.run import RunEnd, RunToken, Terms
from router.text.tokenizer import ModelText

MODEL = "bytes"
PROMPT = "What is the capital of France? " * 4


class _Run:
    """Gives the loop a turn before each token, as a frame from a worker would."""

    def __init__(self, request: Request) -> None:
        self._request = request

    async def __aiter__(self) -> AsyncIterator[RunToken | RunEnd]:
        token = RunToken(ord("x"))
        count = self._request.sampling.max_tokens
        for _ in range(count):
            await asyncio.sleep(0)
            yield token
        yield RunEnd(FinishReason.LENGTH, Usage(len(self._request.prompt), count, 0))

    @property
    def more(self) -> bool:
        return False

    async def stop(self, reason: CancelReason, because: FleetError | None = None) -> None:
        pass


class _Spine:
    def start(self, request: Request, timeline: Timeline, terms: Terms | None = None) -> _Run:
        return _Run(request)

    def models(self) -> tuple[str, ...]:
        return (MODEL,)

    def ready(self) -> str | None:
        return None


async def _serve() -> None:
    settings = HttpSettings(port=0)
    server = await HttpServer.start(Ingress(_Spine(), {MODEL: ModelText.of_bytes()}, settings), settings)
    print(server.port, flush=True)
    await server.serve()


class _Client(asyncio.Protocol):
    """One connection: sends the request again as soon as its answer is complete."""

    def __init__(self, request: bytes, stream: bool) -> None:
        self._request = request
        self._end = b"0\r\n\r\n" if stream else b'"cached_tokens":0}}}'
        self._tail = b""
        self._sent = 0.0
        self.requests = self.frames = 0
        self.seconds: list[float] = []
        self.first: list[float] = []
        self._waiting = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._ask()

    def _ask(self) -> None:
        self._sent = time.perf_counter()
        self._waiting = True
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._waiting:
            self._waiting = False
            self.first.append(time.perf_counter() - self._sent)
            if not data.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(data.decode(errors="replace"))
        self.frames += data.count(b"data: ")
        self._tail = (self._tail + data)[-32:]
        if self._tail.endswith(self._end):
            self.requests += 1
            self.seconds.append(time.perf_counter() - self._sent)
            self._tail = b""
            self._ask()


def _request(stream: bool, tokens: int, ids: bool = False) -> bytes:
    """`ids`: a prompt of tokens, so that neither template nor tokenizer is in the figure."""
    route = "/v1/completions" if ids else "/v1/chat/completions"
    prompt = {"prompt": list(PROMPT.encode())} if ids else {"messages": [{"role": "user", "content": PROMPT}]}
    body = json.dumps({"model": MODEL, **prompt, "max_tokens": tokens, "stream": stream}).encode()
    head = (
        f"POST {route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _cpu_s(port: int) -> float:
    """What the server has used so far: true also where others use the machine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    page = (await reader.read()).decode()
    writer.close()
    return float(page.partition("\nprocess_cpu_seconds_total ")[2].partition("\n")[0])


async def _load(
    port: int, case: str, stream: bool, tokens: int, ids: bool, connections: int, windows: int
) -> None:
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(connections):
        _, client = await loop.create_connection(
            lambda: _Client(_request(stream, tokens, ids), stream), "127.0.0.1", port
        )
        clients.append(client)
    await asyncio.sleep(1.0)  # warm
    rates, costs = [], []
    for client in clients:
        client.seconds.clear()
        client.first.clear()
    for _ in range(windows):
        cpu, began = await _cpu_s(port), time.perf_counter()
        before = sum(c.frames if stream else c.requests for c in clients)
        await asyncio.sleep(1.0)
        done = sum(c.frames if stream else c.requests for c in clients) - before
        rates.append(done / (time.perf_counter() - began))
        costs.append((await _cpu_s(port) - cpu) / max(1, done) * 1e6)
    for client in clients:
        client.transport.abort()
    settings = {"connections": connections, "tokens": tokens, "prompt_characters": len(PROMPT)}
    emit(case, "frames/s" if stream else "requests/s", rates, **settings)
    emit(f"{case}/server_cpu", f"us/{'frame' if stream else 'request'}", costs, **settings)
    kind = "first_frame" if stream else "answer"
    samples = [s * 1e3 for c in clients for s in (c.first if stream else c.seconds)]
    if samples:
        emit(f"{case}/{kind}", "ms", samples, **settings)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        uvloop.run(_serve())
        return 0
    windows = 2 if options.quick else 8
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.load.ingress", "--serve"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        for case, stream, tokens, ids, connections in (
            ("ingress/serial", False, 1, False, 1),
            ("ingress/chat", False, 1, False, 64),
            ("ingress/token_prompt", False, 1, True, 64),
            ("ingress/stream", True, 128, False, 64),
        ):
            uvloop.run(_load(port, case, stream, tokens, ids, connections, windows))
    finally:
        server.terminate()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
