"""Asks the routers of a fleet over HTTP: one answer, or a stream of events. HTTP/1.0: an answer ends with its
connection, and nothing else needs to be known of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from fleet.errors import BadRequest, Unavailable

KEY = "PDFLEET_API_KEY"
"""Environment variable of the key to show to routers that want one."""
_MOST_BYTES = 64 << 20
"""Of one answer; 500 records are a tenth of it."""


@dataclass(frozen=True, slots=True)
class RouterAddress:
    id: str
    url: str


@dataclass(frozen=True, slots=True)
class Said:
    """What a router answered."""

    router: RouterAddress
    status: int
    body: bytes

    def error(self) -> str:
        """Its own words for what was wrong."""
        try:
            return str(msgspec.json.decode(self.body)["error"]["message"])
        except (msgspec.MsgspecError, KeyError, TypeError):
            return f"HTTP status {self.status}"


class Asker:
    """Shows the key of the environment, and so asks nobody over https whose certificate is not proven."""

    def __init__(self, ca: Path | None, key: str | None = None) -> None:
        """`ca`: of the routers' certificates; None: those that the system trusts. Raises BadRequest."""
        self._key = os.environ.get(KEY, "") if key is None else key
        if any(letter.isspace() for letter in self._key):
            raise BadRequest(f"{KEY} holds a space or a line break; it is to be one key", param=KEY)
        self._ca = ca
        try:
            self._tls = ssl.create_default_context(cafile=None if ca is None else str(ca))
        except OSError as error:
            raise BadRequest(f"--ca {ca}: {error.strerror or error}", param="ca") from None

    async def get(self, router: RouterAddress, path: str, limit_s: float) -> Said:
        """Raises `Unavailable` where there is no whole answer in time."""
        try:
            async with asyncio.timeout(limit_s), self._opened(router, path) as (status, reader):
                parts, size = list[bytes](), 0
                while part := await reader.read(1 << 20):
                    parts.append(part)
                    size += len(part)
                    if size > _MOST_BYTES:
                        raise Unavailable(f"router {router.id} at {router.url} says more than any record is")
                return Said(router, status, b"".join(parts))
        except TimeoutError:
            raise Unavailable(f"router {router.id} at {router.url} does not answer") from None

    @contextlib.asynccontextmanager
    async def events(
        self, router: RouterAddress, path: str, limit_s: float
    ) -> AsyncIterator[Said | AsyncIterator[bytes]]:
        """The data of its server-sent events, or, where it has none to send, what it says instead.
        `limit_s`: until it begins to answer."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(limit_s):
                    status, reader = await stack.enter_async_context(self._opened(router, path))
                    if status != 200:
                        yield Said(router, status, await reader.read(_MOST_BYTES))
                        return
            except TimeoutError:
                raise Unavailable(f"router {router.id} at {router.url} does not answer") from None
            yield self._data(router, reader)

    async def _data(self, router: RouterAddress, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        try:
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    yield line[len(b"data: ") :].strip()
        except (OSError, ValueError) as error:
            raise Unavailable(f"the stream of router {router.id} broke: {error}") from None

    @contextlib.asynccontextmanager
    async def _opened(
        self, router: RouterAddress, path: str
    ) -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
        """Its status, and what follows the headers."""
        parts = urlsplit(router.url)
        host, tls = parts.hostname or "", self._tls if parts.scheme == "https" else None
        where = f"router {router.id} at {router.url}"
        try:
            reader, writer = await asyncio.open_connection(host, parts.port or 0, ssl=tls, limit=1 << 20)
        except ssl.SSLCertVerificationError as error:
            raise Unavailable(
                f"the certificate of {where} is not proven ({error.verify_message}); "
                "name the file of its authority with --ca"
            ) from None
        except OSError as error:
            raise Unavailable(f"{where} does not answer: {error.strerror or error}") from None
        try:
            key = f"Authorization: Bearer {self._key}\r\n" if self._key else ""
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n{key}\r\n".encode())
            status = (await reader.readline()).split()
            if len(status) < 2 or not status[1].isdigit():
                raise Unavailable(f"{where} answers no HTTP")
            while (await reader.readline()).strip():
                pass
            yield int(status[1]), reader
        except (OSError, ValueError) as error:
            raise Unavailable(f"{where} broke off: {error}") from None
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
