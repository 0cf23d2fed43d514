"""Opens the real registry and wire; imported late, so that commands which need neither start fast."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fleet.registry import Registry
from fleet.registry.etcd_registry import EtcdRegistry
from fleet.wire import Wire
from fleet.wire.rpc import GrpcWire


@contextlib.asynccontextmanager
async def connected(etcd: str) -> AsyncIterator[tuple[Registry, Wire]]:
    """To the etcd at HOST:PORT, and to whatever worker a card names."""
    registry = EtcdRegistry(etcd)
    wire = GrpcWire()
    try:
        yield registry, wire
    finally:
        await wire.close()
        await registry.close()
