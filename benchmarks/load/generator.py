"""The load generator itself: streaming requests/s that one core plays, against a server that costs little.

The server answers each request with a stream that was made before, a token an event, in as many writes as
`--writes` says. Processor time of the generator a request is what counts: the server runs beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from contextlib import suppress
from typing import cast

import uvloop

from benchmarks.report import emit
from fleet.workload import Amount, Arrivals, Kind, Shape
from fleetctl.bench.plan import Plan, Source
from fleetctl.bench.play import Run, in_process
from fleetctl.bench.words import Server

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(event: object) -> bytes:
    data = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def _answer(tokens: int) -> list[bytes]:
    """One chunk a token, and the last one, as an OpenAI server writes them."""
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "trivial"}
    chunks = [
        _chunk({**base, "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]})
        for _ in range(tokens)
    ]
    finish = {"index": 0, "delta": {}, "finish_reason": "length"}
    usage = {"prompt_tokens": 32, "completion_tokens": tokens, "total_tokens": 32 + tokens}
    end = _chunk({**base, "choices": [finish]}) + _chunk({**base, "choices": [], "usage": usage})
    return [*chunks, end + _chunk(b"[DONE]") + b"0\r\n\r\n"]


class _Trivial(asyncio.Protocol):
    """Reads whole requests by their content-length and writes the answer in parts, a while apart."""

    def __init__(self, writes: list[bytes], apart_s: float) -> None:
        self._writes, self._apart_s = writes, apart_s
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head = self._buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        length = int(self._buffer[:head].lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or b"0")
        if len(self._buffer) >= head + 4 + length:
            self._buffer = b""
            self._write(0)

    def _write(self, part: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(self._writes[part])
        if part + 1 < len(self._writes):
            asyncio.get_running_loop().call_later(self._apart_s, self._write, part + 1)


async def _serve(tokens: int, writes: int, apart_s: float) -> None:
    chunks = _answer(tokens)
    step = max(1, len(chunks) // writes)
    parts = [b"".join(chunks[at : at + step]) for at in range(0, len(chunks), step)]
    parts[0] = HEAD + parts[0]
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Trivial(parts, apart_s), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    with suppress(asyncio.CancelledError):
        await server.serve_forever()


def _measure(port: int, rate: float, seconds: float, tokens: int) -> Run:
    kind = Kind(prompt=Amount("constant", 32), output=Amount("constant", tokens))
    source = Source(arrivals=Arrivals.steady(rate), kinds=(kind,), shape=Shape(duration_s=seconds))
    return in_process(Server(f"http://127.0.0.1:{port}", model="trivial"), Plan(source))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks load/generator", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--writes", type=int, default=16, help="writes an answer; tokens between are merged")
    parser.add_argument("--rates", type=float, nargs="+", default=[500.0, 1000.0, 1500.0, 2000.0])
    given = parser.parse_args(argv)
    if given.serve:
        uvloop.run(_serve(given.tokens, given.writes, 0.004))
        return
    if given.quick:
        given.seconds, given.rates = 2.0, [200.0]
    shape = ["--tokens", str(given.tokens), "--writes", str(given.writes)]
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.load.generator", "--serve", *shape],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        for rate in given.rates:
            run = _measure(port, rate, given.seconds, given.tokens)
            good = sum(one.failure is None for one in run.records)
            settings = {
                "rate": rate,
                "tokens": given.tokens,
                "writes": given.writes,
                "failed": len(run.records) - good,
            }
            emit("generator/finished", "requests/s", [good / run.total_s], **settings)
            emit("generator/cpu", "us/request", [run.cpu_s / len(run.records) * 1e6], **settings)
            emit("generator/cpu_share", "cores", [run.cpu_s / run.total_s], **settings)
            emit("generator/lag", "ms", [one.lag_s * 1e3 for one in run.records], **settings)
    finally:
        server.terminate()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()


if __name__ == "__main__":
    main(sys.argv[1:])
