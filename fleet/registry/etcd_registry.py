"""The registry over etcd's v3 API; `aetcd` brings the messages and methods, the channel is our own.

Leases are renewed by one short call each instead of a stream kept open: a stream that broke unnoticed, or
raised what nobody expected when written to, has cost others their membership.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from aetcd import rpc

from fleet.registry.limits import CALL_LIMIT_S
from fleet.registry.session import StoreRegistry
from fleet.registry.store import (
    Change,
    Changes,
    Compacted,
    Condition,
    Entry,
    LeaseGone,
    Listing,
    StoreAway,
)
from fleet.settings import ControlSettings
from fleet.tls import Tls

_IDLE_S = 2.0
"""Silence of a watch after which the server is asked whether it is there."""

_OPTIONS = [
    # The defaults wait up to two minutes between two tries to connect.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", int(CALL_LIMIT_S * 1000)),  # in truth how long one try may take
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),
    # Else a new channel takes over the dead connection that the old one was given up for.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]

_LEADER = ("hasleader", "true")
"""Asks a member that is cut off from its cluster to say so instead of keeping a watch silent."""


class EtcdRegistry(StoreRegistry):
    """`address` is HOST:PORT, or several with commas, tried in turn. Waits for nothing; to be made on a
    running loop. With `ca`, a PEM file of trusted authorities, etcd is spoken to over TLS; then it is shown
    the certificate of `tls`, if there is one."""

    def __init__(
        self,
        address: str,
        *,
        user: str = "",
        password: str = "",
        ca: Path | None = None,
        tls: Tls | None = None,
    ) -> None:
        super().__init__(EtcdStore(address, user, password, ca, tls), random.random)

    @classmethod
    def of(cls, control: ControlSettings) -> EtcdRegistry:
        return cls(
            control.etcd,
            user=control.etcd_user,
            password=control.etcd_password,
            ca=control.etcd_ca,
            tls=control.tls(),
        )


class EtcdStore:
    """A `fleet.registry.store.Store`."""

    def __init__(
        self, address: str, user: str, password: str, ca: Path | None, tls: Tls | None = None
    ) -> None:
        self._addresses = [part.strip() for part in address.split(",") if part.strip()]
        self._user = user
        self._password = password
        self._ca, self._tls = ca, tls
        self._trusted = b""
        self._token: str | None = None
        self._turn = 0
        self._closed = False
        self._open()

    def _open(self) -> None:
        address = self._addresses[self._turn % len(self._addresses)]
        if self._ca is None:
            self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            credentials = self._credentials(self._ca)
            self._channel = grpc.aio.secure_channel(address, credentials, options=_OPTIONS)
        self._opened = asyncio.get_running_loop().time()
        self._token = None
        self._keys = rpc.KVStub(self._channel)
        self._leases = rpc.LeaseStub(self._channel)
        self._watches = rpc.WatchStub(self._channel)
        self._users = rpc.AuthStub(self._channel)

    def _credentials(self, ca: Path) -> grpc.ChannelCredentials:
        """Of the files as they are by now: certificates are renewed while a process runs."""
        try:
            self._trusted = ca.read_bytes()
        except OSError:
            if not self._trusted:
                raise
        own = None if self._tls is None else self._tls.now()
        pair = (None, None) if own is None else (own.key, own.cert)
        return grpc.ssl_channel_credentials(self._trusted, *pair)

    async def renew(self) -> None:
        """A connection to a host that is gone would be used for many minutes: after failures it is made
        anew, to the next address."""
        self._token = None
        if not self._closed and asyncio.get_running_loop().time() - self._opened > CALL_LIMIT_S:
            old = self._channel
            self._turn += 1
            self._open()
            await old.close()

    async def close(self) -> None:
        self._closed = True
        await self._channel.close()

    async def grant(self, ttl_s: float) -> tuple[int, float]:
        reply = await self._call(lambda: self._leases.LeaseGrant, rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s)))
        return reply.ID, reply.TTL

    async def keep_alive(self, lease: int) -> float:
        async def one() -> AsyncIterator[Any]:
            yield rpc.LeaseKeepAliveRequest(ID=lease)

        with _failures():
            stream = self._leases.LeaseKeepAlive(one(), metadata=await self._metadata())
            try:
                reply = await stream.read()
            finally:
                stream.cancel()
        if reply is grpc.aio.EOF:
            raise StoreAway("the stream ended without an answer")
        if reply.TTL <= 0:
            raise LeaseGone
        return float(reply.TTL)

    async def attached(self, lease: int) -> frozenset[str]:
        request = rpc.LeaseTimeToLiveRequest(ID=lease, keys=True)
        reply = await self._call(lambda: self._leases.LeaseTimeToLive, request)
        if reply.TTL <= 0:
            raise LeaseGone
        return frozenset(key.decode() for key in reply.keys)

    async def revoke(self, lease: int) -> None:
        await self._call(lambda: self._leases.LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease))

    async def put(self, key: str, value: bytes, lease: int = 0) -> None:
        await self._call(lambda: self._keys.Put, rpc.PutRequest(key=key.encode(), value=value, lease=lease))

    async def get(self, key: str) -> bytes | None:
        reply = await self._call(lambda: self._keys.Range, rpc.RangeRequest(key=key.encode()))
        return bytes(reply.kvs[0].value) if reply.kvs else None

    async def entry(self, key: str) -> Entry | None:
        reply = await self._call(lambda: self._keys.Range, rpc.RangeRequest(key=key.encode()))
        if not reply.kvs:
            return None
        pair = reply.kvs[0]
        return Entry(bytes(pair.value), pair.create_revision, pair.mod_revision)

    async def put_if(
        self, conditions: Sequence[Condition], puts: Mapping[str, bytes], lease: int = 0
    ) -> int | None:
        compare = []
        for one in conditions:
            key = one.key.encode()
            if one.created is not None:
                compare.append(rpc.Compare(target=rpc.Compare.CREATE, key=key, create_revision=one.created))
            if one.modified is not None:
                compare.append(rpc.Compare(target=rpc.Compare.MOD, key=key, mod_revision=one.modified))
        success = [
            rpc.RequestOp(request_put=rpc.PutRequest(key=key.encode(), value=value, lease=lease))
            for key, value in puts.items()
        ]
        reply = await self._call(lambda: self._keys.Txn, rpc.TxnRequest(compare=compare, success=success))
        return int(reply.header.revision) if reply.succeeded else None

    async def delete(self, key: str) -> None:
        await self._call(lambda: self._keys.DeleteRange, rpc.DeleteRangeRequest(key=key.encode()))

    async def list(self, prefix: str) -> Listing:
        request = rpc.RangeRequest(key=prefix.encode(), range_end=_after(prefix))
        reply = await self._call(lambda: self._keys.Range, request)
        values = {pair.key.decode(): bytes(pair.value) for pair in reply.kvs}
        return Listing(values, reply.header.revision, reply.header.cluster_id)

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[Changes, None]:
        create = rpc.WatchCreateRequest(
            key=prefix.encode(), range_end=_after(prefix), start_revision=revision
        )
        stream: Any = None
        reading: asyncio.Task[Any] | None = None
        try:
            with _failures():
                stream = self._watches.Watch(metadata=await self._metadata())
                await stream.write(rpc.WatchRequest(create_request=create))
            asked = False
            while True:
                with _failures():
                    # A read that is cancelled cancels the whole stream, so it is waited for from outside.
                    reading = reading or asyncio.create_task(stream.read())
                    await asyncio.wait({reading}, timeout=CALL_LIMIT_S if asked else _IDLE_S)
                    if not reading.done():
                        if asked:
                            raise StoreAway("the watch is silent")
                        asked = True
                        progress = rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())
                        await stream.write(progress)
                        continue
                    reply, reading, asked = reading.result(), None, False
                if reply is grpc.aio.EOF:
                    raise StoreAway("the watch was ended by the server")
                if reply.compact_revision:
                    raise Compacted(f"history before revision {reply.compact_revision} is gone")
                if reply.canceled:
                    raise StoreAway(f"the watch was cancelled: {reply.cancel_reason or 'no reason given'}")
                if reply.events:
                    yield Changes(reply.header.revision, tuple(_change(event) for event in reply.events))
        finally:
            if stream is not None:
                stream.cancel()
            if reading is not None:
                await asyncio.wait({reading})
                if not reading.cancelled():
                    reading.exception()

    async def _call(self, method: Callable[[], Any], request: Any) -> Any:
        with _failures():
            try:
                return await method()(request, metadata=await self._metadata())
            except grpc.aio.AioRpcError as error:
                if not self._user or not _forgotten(error):
                    raise
                # Tokens end, and a restarted server knows none.
                self._token = None
                return await method()(request, metadata=await self._metadata())

    async def _metadata(self) -> tuple[tuple[str, str], ...]:
        if not self._user:
            return (_LEADER,)
        if self._token is None:
            request = rpc.AuthenticateRequest(name=self._user, password=self._password)
            self._token = (await self._users.Authenticate(request)).token
        return (_LEADER, ("token", self._token))


@contextlib.contextmanager
def _failures() -> Any:
    """Whatever a call can fail with, as one of the store's errors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            raise LeaseGone from error
        raise StoreAway(f"{error.code().name}: {error.details()}") from error
    except (asyncio.InvalidStateError, grpc.aio.UsageError, grpc.aio.InternalError) as error:
        # What grpc raises when a finished stream is written to, or a closed channel is used.
        raise StoreAway(f"{type(error).__name__}: {error}") from error
    except asyncio.CancelledError as error:
        # A call whose channel is closed under it ends as if its task had been cancelled.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise StoreAway("the connection was given up") from error


def _forgotten(error: grpc.aio.AioRpcError) -> bool:
    details = error.details() or ""
    return error.code() is grpc.StatusCode.UNAUTHENTICATED or "revision in header is old" in details


def _change(event: Any) -> Change:
    deleted = event.type == event.DELETE
    return Change(event.kv.key.decode(), None if deleted else bytes(event.kv.value))


def _after(prefix: str) -> bytes:
    """The first key that no longer begins with the prefix; the prefix ends in `/`, never in 0xff."""
    raw = prefix.encode()
    return raw[:-1] + bytes([raw[-1] + 1])
