"""UCX through ucxx, two-sided: the source checks the lease and sends by tag straight from its pool's blocks
into the reader's blocks; where there is RDMA or NVLink, UCX's rendezvous lets the hardware copy.

The talk runs over a TCP socket of ours, which binds one interface (ucxx's listener binds all) and notices
a dead process at once; the UCX worker addresses travel in the greeting, after both ends have proven
themselves where the fleet has TLS. The bytes themselves are UCX's affair, and not encrypted. Each side has
a UCX worker of its own for each peer, so that giving up one path harms no other. Endpoints are made in
peer-error mode.

Fence: `close_blocking` with a period is the one way of ucxx that ends matched receives whose sender is
frozen (`close()` and `cancel_inflight_requests` leave them, and their bytes arrive later). A read ends
only when each of its requests is complete; if some is not even then, its worker is never progressed
again, and without progress nothing is written.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol

from fleet.errors import BadRequest, TransferFailed
from fleet.ids import LeaseId
from fleet.tls import Tls
from kv_transfer.caller import Caller, greet
from kv_transfer.control import ControlServer
from kv_transfer.messages import Done, Granted, Hello, Read
from kv_transfer.plan import Chunk
from kv_transfer.region import Region
from kv_transfer.settings import TransferSettings
from kv_transfer.streams import opened, tune
from kv_transfer.transport import Peer, Reading, Source, settled, verify_off_loop

logger = logging.getLogger(__name__)

_SLICE_S = 0.001
"""Longest stretch of progress before the event loop gets its turn."""
_WATCH_S = 0.05
"""Progress at least this often while requests are open, should the event descriptor miss one."""
_CLOSE_NS = 500_000_000
"""Longest that a forced close may take; 1 ms was seen with a frozen peer."""
_TAG_BITS = 20
"""Low bits of a tag: index within the read; above it the read's number, used once a connection."""

_LAST_ROUNDS = 200
"""Of progress, after which a closed path's requests have ended; microseconds each."""
_retired: list[Any] = []
"""Workers whose requests would not end: kept for ever and never progressed, because ucxx progresses a
worker when it is destroyed."""


class _Request(Protocol):
    completed: bool

    def check_error(self) -> None: ...


def available() -> str:
    """Why UCX cannot be used here; empty when it can."""
    try:
        _api()
    except ImportError as error:
        return f"ucxx does not load: {error}"
    return ""


def _api() -> Any:
    # ucxx sets UCX_MEMTYPE_CACHE, and a UCX without CUDA then warns on stdout about its own packaging.
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    import ucxx  # noqa: F401 - loads the UCX libraries; slow, so only where UCX is used
    from ucxx._lib import libucxx

    return libucxx


def _version() -> bytes:
    return ".".join(map(str, _api().get_ucx_version())).encode() + b"/"


class _NotPosted:
    """Stands for a request that UCX would not take."""

    completed = True

    def __init__(self, error: Exception) -> None:
        self._error = error

    def check_error(self) -> None:
        raise self._error


def _post(
    operation: Callable[[Any, Any], _Request], region: Region, blocks: Sequence[int], number: int
) -> list[_Request]:
    """One tagged request a block, until UCX takes no more."""
    from ucxx._lib.arr import Array

    tag = _api().UCXXTag
    requests: list[_Request] = []
    for index, block in enumerate(blocks):
        try:
            requests.append(operation(Array(region.array[block]), tag((number << _TAG_BITS) + index)))
        except Exception as error:  # noqa: BLE001 - ucxx makes its exception classes at run time
            requests.append(_NotPosted(error))
            break
    return requests


class _Batch:
    """Requests of one read; they complete mostly in order, so only the first open one is looked at."""

    def __init__(self, requests: Sequence[_Request]) -> None:
        self._requests = requests
        self._next = 0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def look(self) -> bool:
        while self._next < len(self._requests) and self._requests[self._next].completed:
            self._next += 1
        if self._next < len(self._requests):
            return False
        if not self.over.done():
            self.over.set_result(None)
        return True

    def check(self) -> None:
        """TransferFailed when one did not succeed."""
        for request in self._requests:
            if not request.completed:
                raise TransferFailed("UCX: a request was given up")
            try:
                request.check_error()
            except Exception as error:  # noqa: BLE001 - ucxx makes its exception classes at run time
                raise TransferFailed(f"UCX: {error}") from None


class _Worker:
    """A UCX worker, progressed on the event loop when UCX's event descriptor says so."""

    def __init__(self, context: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self.ucx = _api().UCXWorker(context)
        self.ucx.init_blocking_progress_mode()
        self.address = _version() + bytes(self.ucx.address)
        self._batches: list[_Batch] = []
        self._scheduled: asyncio.Handle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._closed = False
        self._fd: int = self.ucx.epoll_file_descriptor
        self._loop.add_reader(self._fd, self.kick)
        self.kick()

    def kick(self) -> None:
        """Progress soon: after anything was posted, because posting can swallow events."""
        if self._scheduled is None and not self._closed:
            self._scheduled = self._loop.call_soon(self._progress)

    def watch(self, requests: Sequence[_Request]) -> _Batch:
        batch = _Batch(requests)
        self._batches.append(batch)
        self.kick()
        return batch

    def _progress(self) -> None:
        self._scheduled = None
        if self._closed:
            return
        until = self._loop.time() + _SLICE_S
        busy = True
        while busy and self._loop.time() < until:
            busy = self.ucx.progress_once()
        self._batches = [batch for batch in self._batches if not batch.look()]
        if busy or not self.ucx.arm():
            self.kick()
        elif self._batches and self._watch is None:
            self._watch = self._loop.call_later(_WATCH_S, self._look_again)

    def _look_again(self) -> None:
        self._watch = None
        self.kick()

    async def fenced(self, batch: _Batch) -> None:
        """After a forced close of its endpoint: return when nothing of this batch can be written any more."""
        if not batch.look():
            self.ucx.cancel_inflight_requests()  # The close alone does not end each of them.
            self.kick()
            await asyncio.wait({batch.over}, timeout=1.0)
            if not batch.over.done():
                logger.error("UCX requests did not end after a forced close; their worker is retired")
                self.retire()

    def retire(self) -> None:
        _retired.append((self.ucx, self._batches))
        self._stop()
        for batch in self._batches:
            if not batch.over.done():
                batch.over.set_result(None)

    def close(self) -> None:
        if self._closed:
            return
        self._stop()
        # A path that broke leaves requests of UCX's own behind, and each keeps endpoint, worker and their ten
        # descriptors, for ever if it is not told.
        self.ucx.cancel_inflight_requests()
        for _ in range(_LAST_ROUNDS):
            self.ucx.progress_once()
        self.ucx, self._batches = None, []

    def _stop(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._fd)
        for handle in (self._scheduled, self._watch):
            if handle is not None:
                handle.cancel()


def _force_close(endpoint: Any) -> None:
    try:
        endpoint.close_blocking(period=_CLOSE_NS, max_attempts=1)
    except Exception as error:  # noqa: BLE001 - ucxx makes its exception classes at run time
        logger.warning("closing a UCX endpoint: %s", error)


def _leave_open(endpoint: Any) -> None:
    """Keep it for ever, past the interpreter's end: UCX 1.21 dies of a bad pointer when an endpoint is closed
    or destroyed whose peer went while the two were still finding each other."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(endpoint))


class UcxTransport:
    name = "ucx"

    def __init__(
        self, region: Region, settings: TransferSettings, threads: Executor, tls: Tls | None
    ) -> None:
        self._region = region
        self._settings = settings
        self._threads = threads
        self._tls = tls
        api = _api()
        # Loopback stays loopback: UCX's own listening sockets too.
        local = settings.bind in ("127.0.0.1", "localhost", "::1") and "UCX_NET_DEVICES" not in os.environ
        self._context = api.UCXContext(
            {"NET_DEVICES": "lo"} if local else {}, feature_flags=(api.Feature.TAG, api.Feature.WAKEUP)
        )
        self._server: ControlServer | None = None
        self.address = ""

    @classmethod
    async def start(
        cls,
        source: Source,
        region: Region,
        settings: TransferSettings,
        threads: Executor,
        tls: Tls | None = None,
    ) -> UcxTransport:
        loop = asyncio.get_running_loop()
        family, kind, protocol, _, where = (
            await loop.getaddrinfo(settings.bind, 0, type=socket.SOCK_STREAM)
        )[0]
        transport = cls(region, settings, threads, tls)
        listener = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        try:
            listener.bind(where)
            listener.listen(128)
            transport._server = ControlServer(
                listener,
                source,
                lambda hello: _Serving(transport._context, region, hello),
                tls=tls,
                greeting_s=settings.connect_s,
            )
        except OSError:
            listener.close()
            raise
        host = settings.advertise or settings.bind
        host = f"[{host}]" if ":" in host else host
        transport.address = f"ucx:{host}:{listener.getsockname()[1]}"
        return transport

    def reaches(self, address: str) -> bool:
        return address.startswith("ucx:")

    async def connect(self, address: str, peer: Peer) -> UcxConnection:
        host, _, port = address[len("ucx:") :].rpartition(":")
        loop = asyncio.get_running_loop()
        host = host.strip("[]")
        worker = _Worker(self._context)
        sock: socket.socket | None = None
        writer: asyncio.StreamWriter | None = None
        try:
            try:
                async with asyncio.timeout(self._settings.connect_s):
                    family, kind, protocol, _, where = (
                        await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
                    )[0]
                    sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
                    await loop.sock_connect(sock, where)
                    tune(sock)
                    reader, writer = await opened(sock, self._tls, host)
            except (OSError, ValueError, TimeoutError) as error:
                raise TransferFailed(f"no source at {address}: {error or 'no answer'}") from error
            welcome = await greet(reader, writer, peer, worker.address, self._settings.connect_s)
            source = _checked(welcome.ucx)
        except BaseException:
            worker.close()
            if writer is not None:
                writer.transport.abort()
            elif sock is not None:
                sock.close()
            raise
        return UcxConnection(self._region, worker, source, self._settings, self._threads, reader, writer)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None


def _checked(address: bytes) -> bytes:
    """A peer's address without its version. UCX aborts the process on an address that is none, so it sees
    only those of a peer of the same version that knew this source's incarnation, which is random and told to
    members only, and that has shown a certificate where the fleet has TLS."""
    mine = _version()
    if not address.startswith(mine) or len(address) <= len(mine):
        theirs = address.partition(b"/")[0].decode(errors="replace")[:20]
        raise BadRequest(f"ucx: the peer has version {theirs!r}, this worker {mine[:-1].decode()!r}")
    return address[len(mine) :]


def _endpoint(worker: _Worker, address: bytes) -> Any:
    """To a checked address. Not before the first read: one whose peer goes while the two are still finding
    each other cannot be closed (`_leave_open`), and a path may wait long for its first read."""
    try:
        endpoint = worker.ucx.create_endpoint_from_worker_address(
            _api().UCXAddress.create_from_buffer(address), True
        )
    except Exception as error:  # noqa: BLE001 - ucxx makes its exception classes at run time
        raise TransferFailed(f"UCX cannot reach the peer: {error}") from None
    worker.kick()
    return endpoint


class _Serving:
    """Serving one reader: sends straight from the pool; each read ends when its sends are complete."""

    lists_blocks = False

    def __init__(self, context: Any, region: Region, hello: Hello) -> None:
        self._region = region
        self._reader = _checked(hello.ucx)
        self._worker = _Worker(context)
        self._endpoint: Any = None
        self._aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self.ucx = self._worker.address

    def start(self, number: int, reading: Reading, done: Callable[[bool], None]) -> None:
        if self._aborted.done():
            done(False)
            return
        try:
            if self._endpoint is None:
                self._endpoint = _endpoint(self._worker, self._reader)
        except TransferFailed as error:
            logger.warning("%s", error)
            done(False)
            return
        batch = self._worker.watch(_post(self._endpoint.tag_send, self._region, reading.blocks, number))
        task = asyncio.create_task(self._finish(batch, done))
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    async def _finish(self, batch: _Batch, done: Callable[[bool], None]) -> None:
        await asyncio.wait({batch.over, self._aborted}, return_when=asyncio.FIRST_COMPLETED)
        if not batch.look():
            await self._worker.fenced(batch)
        try:
            batch.check()
        except TransferFailed as error:
            logger.info("a KV read ended early: %s", error)
            done(False)
        else:
            done(True)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._rest()

    def _rest(self) -> None:
        if self._aborted.done() and not self._tasks:
            self._worker.close()
            self._endpoint = None

    def copied(self, number: int) -> None:
        pass

    def drop(self, number: int) -> bool:
        self.abort()
        return False

    def abort(self) -> None:
        if not self._aborted.done():
            self._aborted.set_result(None)
            if self._endpoint is not None:
                _force_close(self._endpoint)
            self._worker.kick()
            self._rest()


class UcxConnection:
    def __init__(
        self,
        region: Region,
        worker: _Worker,
        source: bytes,
        settings: TransferSettings,
        threads: Executor,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._region = region
        self._worker = worker
        self._source = source
        self._endpoint: Any = None
        self._settings = settings
        self._threads = threads
        self._reads = 0
        self._proven = False
        """Whether a read has come whole."""
        self._caller = Caller(reader, writer, self._broken)

    @property
    def closed(self) -> bool:
        return self._caller.closed

    def _broken(self) -> None:
        if self._endpoint is None:
            pass  # nothing was read, so nothing was begun
        elif self._caller.hung_up and not self._proven:
            logger.warning("a KV source went before its first read was through; its path is left unclosed")
            _leave_open(self._endpoint)
            self._worker.retire()
        else:
            _force_close(self._endpoint)
            self._worker.kick()
        self._rest()

    def _rest(self) -> None:
        """The worker goes when the path is closed and its last read has ended."""
        if self.closed and not self._reads:
            self._worker.close()
            self._endpoint = None

    async def read(self, lease: LeaseId, chunk: Chunk) -> None:
        await settled(
            self._exchange(lease, chunk),
            fence_s=self._settings.fence_s,
            abort=lambda: self._caller.shut("a read was given up"),
        )

    async def _exchange(self, lease: LeaseId, chunk: Chunk) -> None:
        call = self._caller.open()
        self._reads += 1
        try:
            self._caller.say(Read(call.number, lease, list(chunk.positions)))
            granted = await call.next(Granted)
            if granted.checksums and len(granted.checksums) != len(chunk.positions):
                raise TransferFailed("the source sent checksums for another number of blocks")
            if self.closed:
                raise TransferFailed("the source hung up")
            try:
                if self._endpoint is None:
                    self._endpoint = _endpoint(self._worker, self._source)
            except TransferFailed:
                self._caller.shut("a read could not begin")
                raise
            batch = self._worker.watch(
                _post(self._endpoint.tag_recv, self._region, chunk.destinations, call.number)
            )
            verdict = asyncio.ensure_future(call.next(Done))
            try:
                await self._arrival(batch, verdict)
            finally:
                if not batch.look():
                    self._caller.shut("a read failed")
                    await self._worker.fenced(batch)
                verdict.cancel()
                await asyncio.wait({verdict})
            self._proven = True
            await verify_off_loop(self._region, chunk, granted.checksums, self._threads)
        finally:
            self._caller.end(call)
            self._reads -= 1
            self._rest()

    async def _arrival(self, batch: _Batch, verdict: asyncio.Future[Done]) -> None:
        # A refusal, or the end of the path, may come while receives are open; done comes after all was sent.
        waits: set[asyncio.Future[Any]] = {batch.over, verdict}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if verdict.done():
            verdict.result()
            await asyncio.wait({batch.over, self._caller.gone}, return_when=asyncio.FIRST_COMPLETED)
        if not batch.look():
            raise TransferFailed("the source hung up")
        try:
            batch.check()
        except TransferFailed:
            # The source closes the path of a read whose lease is over, after it has said so.
            await asyncio.wait({verdict}, timeout=self._settings.fence_s)
            if verdict.done():
                verdict.result()
            raise
        await verdict

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
