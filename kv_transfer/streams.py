"""The sockets on which reader and source talk: tuned, opened and accepted, and frames read from them.

One stream socket a reader and source: Unix, or TCP, which has mutual TLS where the fleet has it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl

from fleet.tls import Tls
from kv_transfer.messages import length_in
from kv_transfer.transport import settle

GOODBYE_S = 1.0
"""How long a peer is waited for to end TLS in order, when nothing is left to say to it."""


async def frame_from(reader: asyncio.StreamReader) -> bytes:
    """The body of the next frame. ValueError: it is longer than allowed; EOFError and OSError."""
    return await reader.readexactly(length_in(await reader.readexactly(4)))


async def frame_with_descriptor(sock: socket.socket) -> tuple[bytes, int]:
    """The body of the next frame on a non-blocking Unix socket, and the descriptor sent with it (-1: none).
    Nothing behind it is read. ValueError and OSError, as `frame_from`."""
    head, fd = await _receive_fd(sock)
    try:
        return await _receive(sock, length_in(head)), fd
    except BaseException:
        if fd >= 0:
            socket.close(fd)
        raise


def tune(sock: socket.socket) -> None:
    """No delay for small messages; a peer whose host vanished without a word is noticed within 25 s."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


async def opened(
    sock: socket.socket, tls: Tls | None = None, host: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams on a connected socket, the reader's end. With `tls` the source must prove that it is `host`,
    or of the fleet; that it does not believe our own certificate is only noticed by the first answer.
    OSError."""
    if sock.family == socket.AF_UNIX:
        return await asyncio.open_unix_connection(sock=sock)
    if tls is None:
        return await asyncio.open_connection(sock=sock)
    return await asyncio.open_connection(
        sock=sock, ssl=tls.client(), server_hostname=tls.expects(host), ssl_shutdown_timeout=GOODBYE_S
    )


async def accepted(
    sock: socket.socket, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams on an accepted socket, the source's end; with `tls` the peer has shown its certificate."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.connect_accepted_socket(  # with TLS, uvloop gives its own protocol back
        lambda: protocol,
        sock,
        ssl=tls,
        ssl_shutdown_timeout=None if tls is None else GOODBYE_S,
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _receive(sock: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        part = await loop.sock_recv(sock, count - len(data))
        if not part:
            raise ConnectionResetError("the peer hung up")
        data += part
    return data


async def _receive_fd(sock: socket.socket) -> tuple[bytes, int]:
    """The first 4 bytes of the answer and the descriptor sent with them (-1: none)."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, settle, readable)
    try:
        await readable
    finally:
        loop.remove_reader(sock)
    head, fds, _, _ = socket.recv_fds(sock, 4, 1)
    fd = fds[0] if fds else -1
    try:
        return head + await _receive(sock, 4 - len(head)), fd
    except BaseException:
        if fd >= 0:
            socket.close(fd)
        raise
