"""The bus over core NATS: a connection made again for ever, and proven alive by a round trip each second.

The client library's own reconnection is off. It gives up for good on some errors of the server, and a
reader that fails inside leaves a connection that looks healthy and is silent; here whatever goes wrong
ends in the same place: the connection is thrown away and made anew, with every subscription.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import SlowConsumerError

from fleet.bus import BusMessage
from fleet.bus.mailbox import LIMIT, Mailbox

log = logging.getLogger(__name__)

_ROUND_TRIP_EVERY_S = 1.0
_ROUND_TRIP_LIMIT_S = 3.0
_CONNECT_LIMIT_S = 3.0
_CLOSE_LIMIT_S = 1.0
_RETRY_FIRST_S = 0.05
_RETRY_MOST_S = 1.0
_OUTBOX_BYTES = 16 * 1024 * 1024
"""Unsent bytes beyond which messages are dropped: a broker that does not read must not hold a publisher."""


class _TlsClient(Client):  # type: ignore[misc]  # the library has no types
    """Does not take a server's word that TLS is not needed: the library would go on in plain."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if not info.get("tls_required"):
            raise NatsError("the server offers no TLS, which the setting control.nats_ca asks for")
        await super()._process_info(info, initial_connection)


class NatsBus:
    """`lost` counts messages published in vain: no broker, or one that does not read."""

    def __init__(self, servers: str, tls: Callable[[], ssl.SSLContext] | None = None) -> None:
        """Of one URL or several with commas; with `tls`, which is asked for each connection, only over TLS.
        Must be called on a running loop; waits for nothing."""
        self._tls = tls
        self.lost = 0
        self.connections = 0
        """Times a connection was made."""
        self._servers = [server.strip() for server in servers.split(",") if server.strip()]
        self._client: Client | None = None
        """Set while a connection stands and every subscription was sent on it."""
        self._boxes: dict[Mailbox, tuple[Client, Subscription] | None] = {}
        """With the connection each was last sent on, and what it is there."""
        self._closing = False
        self._retry_s = _RETRY_FIRST_S
        self._task = asyncio.get_running_loop().create_task(self._stay_connected(), name="nats-connection")

    @property
    def connected(self) -> bool:
        return self._client is not None and bool(self._client.is_connected)

    async def publish(self, subject: str, data: bytes) -> None:
        client = self._client
        if client is None or not client.is_connected or client.pending_data_size + len(data) > _OUTBOX_BYTES:
            self.lost += 1
            return
        try:
            await client.publish(subject, data)
        except (NatsError, OSError, RuntimeError) as error:
            self.lost += 1
            log.warning("message on %s not published: %s", subject, error)

    async def subscribe(self, subject: str, limit: int = LIMIT) -> Mailbox:
        """Takes effect when there is a connection; holds at most `limit` messages for a slow reader."""
        box = Mailbox(subject, limit, self._forget)
        self._boxes[box] = None
        if self._client is not None:
            with contextlib.suppress(NatsError, OSError, RuntimeError):  # it is sent again on the next one
                await self._attach(self._client, box)
        return box

    async def close(self) -> None:
        self._closing = True
        self._task.cancel()
        await asyncio.wait({self._task})
        for box in list(self._boxes):
            await box.close()

    async def _stay_connected(self) -> None:
        # The flag is asked besides, as the client swallows a cancellation here and there.
        while not self._closing:
            try:
                await self._one_connection()
            except Exception as error:  # noqa: BLE001 — whatever fails in a connection, a new one is made
                level = logging.WARNING if self._retry_s == _RETRY_FIRST_S else logging.DEBUG
                log.log(level, "NATS at %s: %s: %s; trying again", self._shown(), type(error).__name__, error)
            await asyncio.sleep(self._retry_s * random.uniform(0.5, 1.0))
            self._retry_s = min(self._retry_s * 2, _RETRY_MOST_S)

    async def _one_connection(self) -> None:
        """Returns when a connection that stood has ended; raises when none could be made."""
        client = Client() if self._tls is None else _TlsClient()
        ended = asyncio.Event()

        async def on_end() -> None:
            ended.set()

        async def on_error(error: Exception) -> None:
            if isinstance(error, SlowConsumerError):
                for box in self._boxes:
                    if error.sub is not None and box.subject == error.sub.subject:
                        box.drop(1)
            else:
                log.debug("NATS: %s: %s", type(error).__name__, error)

        try:
            async with asyncio.timeout(_CONNECT_LIMIT_S):
                await client.connect(
                    self._servers,
                    name="pdfleet",
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0.05,
                    connect_timeout=_CONNECT_LIMIT_S,
                    pending_size=2 * _OUTBOX_BYTES,
                    closed_cb=on_end,
                    error_cb=on_error,
                    tls=None if self._tls is None else self._tls(),
                )
            while missing := [box for box, on in self._boxes.items() if on is None or on[0] is not client]:
                await self._attach(client, missing[0])
            self._client = client
            self.connections += 1
            self._retry_s = _RETRY_FIRST_S
            log.info("NATS at %s connected", self._shown())
            while not ended.is_set() and not self._closing:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), _ROUND_TRIP_EVERY_S)
                    break
                # Not `flush`: when the client's reading task is dead, that returns without a round trip.
                await client.rtt(timeout=_ROUND_TRIP_LIMIT_S)
        finally:
            stood = self._client is client
            self._client = None
            if not self._closing:
                _abort(client)
                if stood:
                    log.warning("NATS connection lost; events are missed until it is back")
            with contextlib.suppress(NatsError, OSError, RuntimeError, TimeoutError, AssertionError):
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    await client.close()
            _abort(client)

    async def _attach(self, client: Client, box: Mailbox) -> None:
        async def take(message: Msg) -> None:
            box.add(BusMessage(message.subject, message.data))

        subscription = await client.subscribe(box.subject, cb=take)
        if box in self._boxes:
            self._boxes[box] = (client, subscription)
        else:  # it was closed meanwhile
            await subscription.unsubscribe()

    async def _forget(self, box: Mailbox) -> None:
        on = self._boxes.pop(box, None)
        if on is not None and on[0] is self._client:
            with contextlib.suppress(NatsError, OSError, RuntimeError):
                await on[1].unsubscribe()

    def _shown(self) -> str:
        """The servers without what could be a password."""
        return ", ".join(server.rpartition("@")[2].rpartition("//")[2] for server in self._servers)


def _abort(client: Client) -> None:
    """Drops the socket at once: closing it politely would wait for a frozen broker to read what is unsent."""
    stream = getattr(getattr(client, "_transport", None), "_io_writer", None)
    if stream is not None:
        stream.transport.abort()
