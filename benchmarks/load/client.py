"""A lean streaming client for benchmarks: one socket a request, so that it does not measure itself."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from fleet.goodput import End, Outcome


@dataclass(slots=True)
class Heard:
    """One streamed answer, times in seconds on the loop's clock."""

    started: float
    status: int = 0
    tokens: list[float] = field(default_factory=list)
    """When each chunk with text arrived."""
    text: str = ""
    finish: str | None = None
    error: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    ended: float = 0.0

    @property
    def outcome(self) -> Outcome:
        """As the fleet itself judges, of any server, from where the client sits."""
        if self.error is None and self.finish:
            end = End.FINISHED
        elif self.status == 429:
            end = End.REJECTED
        else:
            end = End.INVALID if 400 <= self.status < 500 else End.FAILED
        return Outcome(end, self.ended - self.started, [at - self.started for at in self.tokens])

    @property
    def ttft(self) -> float | None:
        return self.outcome.ttft_s

    @property
    def tpot(self) -> float | None:
        return self.outcome.tpot_s

    @property
    def gaps(self) -> list[float]:
        return self.outcome.gaps


async def stream(host: str, port: int, path: str, body: dict[str, Any], limit_s: float = 600.0) -> Heard:
    """One streamed completion or chat, read to its end; never raises for what the server does."""
    loop = asyncio.get_running_loop()
    heard = Heard(loop.time())
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(head.encode() + data)
                await _read(reader, heard, loop)
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
        heard.error = f"{type(error).__name__}: {error}"
    heard.ended = loop.time()
    return heard


async def _read(reader: asyncio.StreamReader, heard: Heard, loop: asyncio.AbstractEventLoop) -> None:
    heard.status = int((await reader.readline()).split()[1])
    while (await reader.readline()).strip():
        pass
    if heard.status != 200:
        heard.error = (await reader.read()).decode(errors="replace")
        return
    # Chunk sizes and blank lines are lines too: whatever does not begin with `data: ` is passed over.
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            heard.error = json.dumps(event["error"])
            continue
        heard.usage = event.get("usage") or heard.usage
        for choice in event["choices"]:
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if text:
                heard.tokens.append(loop.time())
                heard.text += text
            heard.finish = choice.get("finish_reason") or heard.finish
