"""Opens the real registry and wire; imported late, so that commands which need neither start fast."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from fleet.errors import BadRequest
from fleet.registry import Registry
from fleet.registry.etcd_registry import EtcdRegistry
from fleet.settings import ControlSettings, load
from fleet.wire import Wire
from fleet.wire.network import NetworkWire


@dataclass(frozen=True, slots=True)
class _Environment:
    """The settings of which an operator's command takes etcd's user, password and CA, and the wire's TLS."""

    control: ControlSettings = field(default_factory=ControlSettings)


@contextlib.asynccontextmanager
async def connected(etcd: str, own: bool = True) -> AsyncIterator[tuple[Registry, Wire]]:
    """To the etcd at HOST:PORT, and to whatever worker a card names.

    An etcd that is not the supervisor's `own` may want user, password and TLS: by the environment,
    `PDFLEET_CONTROL_ETCD_USER` and so on, as for all processes. So it is with mutual TLS to workers.
    """
    try:
        given = load(_Environment, [], os.environ).control
        control = replace(ControlSettings() if own else given, etcd=etcd)
        tls = given.tls()
    except ValueError as error:
        raise BadRequest(str(error), param="etcd") from None
    registry = EtcdRegistry.of(control)
    wire = NetworkWire(tls=tls)
    try:
        yield registry, wire
    finally:
        await wire.close()
        await registry.close()
