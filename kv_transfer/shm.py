"""Shared memory, same host: the reader maps the source's pool read-only and copies in a thread.

The talk runs over a Unix socket in a private folder (0700); the pool's memfd comes with the welcome. The
source cannot stop a reader that has its pool mapped, and need not: the reader asks before and after each
copy, and what it copied counts only if the lease stood after the last byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path

from fleet.errors import TransferFailed
from fleet.ids import LeaseId
from kv_transfer.caller import Caller, greet_for_memory
from kv_transfer.control import ControlServer
from kv_transfer.messages import Copied, Done, Granted, Hello, Read
from kv_transfer.plan import Chunk
from kv_transfer.region import Region, checksum
from kv_transfer.settings import TransferSettings
from kv_transfer.streams import opened
from kv_transfer.transport import INLINE_BYTES, ChecksumMismatch, Peer, Reading, Source, settled

_PREFIX = "pdfleet-kv-"


def _boot() -> str:
    """The same for all processes under one kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]


class ShmTransport:
    name = "shm"

    def __init__(self, region: Region, settings: TransferSettings, threads: Executor) -> None:
        self._region = region
        self._settings = settings
        self._threads = threads
        self._boot = _boot()
        self._server: ControlServer | None = None
        self._folder = ""
        self.address = ""

    @classmethod
    async def start(
        cls, source: Source, region: Region, settings: TransferSettings, threads: Executor
    ) -> ShmTransport:
        transport = cls(region, settings, threads)
        parent = settings.folder or tempfile.gettempdir()
        _sweep_dead(parent)
        transport._folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        path = os.path.join(transport._folder, "s")
        early = os.path.join(transport._folder, "early")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(early)
            listener.listen(128)
            # Only now may others judge by its answer whether we live.
            os.rename(early, path)
        except OSError:
            listener.close()
            shutil.rmtree(transport._folder, ignore_errors=True)
            raise
        transport._server = ControlServer(
            listener, source, _Serving, descriptor=region.read_only, greeting_s=settings.connect_s
        )
        transport.address = f"shm:{transport._boot}:{path}"
        return transport

    def reaches(self, address: str) -> bool:
        scheme, _, rest = address.partition(":")
        boot, _, path = rest.partition(":")
        return scheme == self.name and boot == self._boot and os.path.exists(path)

    async def connect(self, address: str, peer: Peer) -> ShmConnection:
        path = address.split(":", 2)[2]
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        fd = -1
        try:
            try:
                await asyncio.get_running_loop().sock_connect(sock, path)
            except (OSError, ValueError) as error:
                raise TransferFailed(f"no source at {address}: {error}") from error
            welcome, fd = await greet_for_memory(sock, peer, self._settings.connect_s)
            try:
                if fd < 0:
                    raise ValueError("no memory came with the welcome")
                remote, fd = Region.attach(fd, welcome.blocks, peer.block_bytes), -1
            except (OSError, ValueError) as error:
                raise TransferFailed(f"mapping the source's memory: {error}") from error
            remote.close()
            reader, writer = await opened(sock)
        except BaseException:
            sock.close()
            raise
        return ShmConnection(self._region, remote, self._settings, self._threads, reader, writer)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _sweep_dead(parent: str) -> None:
    """Remove the folders of our own processes that were killed: nobody answers at their sockets."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(parent)):
            if not entry.name.startswith(_PREFIX) or entry.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
                try:
                    probe.connect(os.path.join(entry.path, "s"))
                except ConnectionRefusedError:
                    shutil.rmtree(entry.path, ignore_errors=True)
                except OSError:
                    pass  # just being made, or busy


class _Serving:
    """Serving one peer: nothing to do but to remember which of its reads are under way."""

    ucx = b""
    lists_blocks = True

    def __init__(self, hello: Hello) -> None:
        self._reads: dict[int, Callable[[bool], None]] = {}

    def start(self, number: int, reading: Reading, done: Callable[[bool], None]) -> None:
        self._reads[number] = done

    def copied(self, number: int) -> None:
        done = self._reads.pop(number, None)
        if done is not None:
            done(True)

    def drop(self, number: int) -> bool:
        self.copied(number)
        return True

    def abort(self) -> None:
        for number in list(self._reads):
            self.copied(number)


class ShmConnection:
    def __init__(
        self,
        region: Region,
        remote: Region,
        settings: TransferSettings,
        threads: Executor,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._region = region
        self._remote: Region | None = remote
        self._remote_blocks = remote.blocks
        self._reads = 0
        self._settings = settings
        self._threads = threads
        self._stop = threading.Event()
        self._caller = Caller(reader, writer, self._broken)

    @property
    def closed(self) -> bool:
        return self._caller.closed

    async def read(self, lease: LeaseId, chunk: Chunk) -> None:
        await settled(
            self._exchange(lease, chunk),
            fence_s=self._settings.fence_s,
            abort=lambda: self._caller.shut("a read was given up"),
        )

    def _broken(self) -> None:
        self._stop.set()
        self._rest()

    def _rest(self) -> None:
        """A dead source's pool lives on until it is unmapped here too."""
        if self.closed and not self._reads:
            self._remote = None

    async def _exchange(self, lease: LeaseId, chunk: Chunk) -> None:
        call = self._caller.open()
        self._reads += 1
        try:
            self._caller.say(Read(call.number, lease, list(chunk.positions)))
            granted = await call.next(Granted)
            count = len(chunk.positions)
            if len(granted.blocks) != count or max(granted.blocks) >= self._remote_blocks:
                raise TransferFailed("the source named blocks that are not there")
            if granted.checksums and len(granted.checksums) != count:
                raise TransferFailed(f"{len(granted.checksums)} checksums for {count} blocks")
            if count * self._region.block_bytes <= INLINE_BYTES:
                wrong = self._copy(granted, chunk)
            else:
                wrong = await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._copy, granted, chunk
                )
            self._caller.say(Copied(call.number))
            # A lease that did not stand explains bytes that changed: asked first.
            await call.next(Done)
            if wrong is not None:
                raise ChecksumMismatch(f"block at lease position {wrong} is not what was promised (checksum)")
        finally:
            self._caller.end(call)
            self._reads -= 1
            self._rest()

    def _copy(self, granted: Granted, chunk: Chunk) -> int | None:
        """Copy and check block by block, while it is in the cache; the lease position of a wrong one, if any.

        Stops between blocks when the path breaks: the read fails then anyway. Runs in a thread, and is the
        only one that names the mapping: an exception's traceback would keep a dead source's pool.
        """
        remote = self._remote
        assert remote is not None
        for index, (block, own) in enumerate(zip(granted.blocks, chunk.destinations, strict=True)):
            if self._stop.is_set():
                return None
            target = self._region.array[own]
            target[:] = remote.array[block]
            if granted.checksums and checksum(target) != granted.checksums[index]:
                return chunk.positions[index]
        return None

    async def ready(self, lease: LeaseId, have: int, wait_s: float) -> tuple[int, bool]:
        return await self._caller.ready(lease, have, wait_s)

    async def borrow(self, names: Sequence[bytes], have: int, limit_s: float) -> tuple[LeaseId, int]:
        return await self._caller.borrow(names, have, limit_s)

    async def renew(self, lease: LeaseId) -> float:
        return await self._caller.renew(lease)

    def leave(self, lease: LeaseId) -> None:
        self._caller.leave(lease)

    async def close(self) -> None:
        await self._caller.close()
