"""A router that only says whether it is ready: `/ready` is 503 while the file `unready` is in `--folder`."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field
from pathlib import Path

from fleet.settings import ControlSettings, load_or_exit


@dataclass(frozen=True, slots=True)
class HttpPart:
    """Where it listens."""

    port: int = 0


@dataclass(frozen=True, slots=True)
class StandInRouterSettings:
    """What the supervisor gives a router, and what the test adds."""

    folder: Path
    model: str
    served_model_name: str
    http: HttpPart = field(default_factory=HttpPart)
    control: ControlSettings = field(default_factory=ControlSettings)


async def main(settings: StandInRouterSettings) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        said = "503 Service Unavailable" if (settings.folder / "unready").exists() else "200 OK"
        writer.write(f"HTTP/1.1 {said}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with await asyncio.start_server(answer, settings.control.bind, settings.http.port):
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(load_or_exit(StandInRouterSettings)))
