"""One worker process around a role: registry, bus, wire, signals. The same for every role."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from fleet import __version__
from fleet.bus.nats_bus import NatsBus
from fleet.chassis import Chassis, ChassisSettings, RoleService
from fleet.ids import LeaseId, WorkerId, new_incarnation, new_worker_id
from fleet.kv_layout import Fingerprint
from fleet.life import Life
from fleet.member import MemberState, Role, WorkerCard
from fleet.registry.etcd_registry import EtcdRegistry
from fleet.settings import ControlSettings
from fleet.wire.rpc import serve
from fleet.wire.session import WireSettings

log = logging.getLogger(__name__)


class WorkerSettings(Protocol):
    """What the process reads of a role's settings; `engine` and `transfer` are passed on unread."""

    @property
    def model(self) -> str: ...
    @property
    def served_model_name(self) -> str: ...
    @property
    def worker_id(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def control(self) -> ControlSettings: ...
    @property
    def chassis(self) -> ChassisSettings: ...
    @property
    def wire(self) -> WireSettings: ...
    @property
    def engine(self) -> Any: ...
    @property
    def transfer(self) -> Any: ...


class LoadedEngine(Protocol):
    @property
    def fingerprint(self) -> Fingerprint: ...
    @property
    def blocks(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...

    async def run(self) -> None:
        """Ends only with the process."""
        ...

    async def close(self) -> None: ...


class ProcessService(RoleService, Protocol):
    """A role's service, with what its engine and transfer layer call."""

    def stepped(self, report: Any) -> None: ...

    def lease_ended(self, lease: LeaseId, why: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Makings:
    """What floor 2 offers and a role makes a worker of. Words of other rooms pass through here unread."""

    allocate: Callable[[int, int], Any]
    """(blocks, block_bytes) → the transfer layer's region; its `array` is the engine's pool."""
    load: Callable[..., Awaitable[tuple[LoadedEngine, str]]]
    """(model, settings.engine, allocate → array, sink) → the engine, and the model's own name."""
    link: Callable[..., Awaitable[Any]]
    """`Transfer.start`."""
    serve: Callable[[Chassis, Any, Any], ProcessService]
    """(chassis, engine, transfer) → the role's service."""


async def run_worker(life: Life, role: Role, settings: WorkerSettings, makings: Makings) -> None:
    """From nothing to a served role, until it is drained. SIGTERM drains; a second one hurries."""
    control = settings.control
    worker = WorkerId(settings.worker_id) if settings.worker_id else new_worker_id(role)
    incarnation = new_incarnation()
    async with AsyncExitStack() as stack:
        registry = EtcdRegistry.of(control)
        stack.push_async_callback(registry.close)
        bus = NatsBus(control.nats, control.nats_tls())
        stack.push_async_callback(bus.close)
        chassis = Chassis(control.fleet, settings.chassis, registry, bus)
        log.info("%s worker %s starts, incarnation %s", role, worker, incarnation)

        regions: list[Any] = []
        service: ProcessService

        def allocate(blocks: int, block_bytes: int) -> Any:
            regions.append(makings.allocate(blocks, block_bytes))
            return regions[0].array

        engine, name = await makings.load(
            settings.model, settings.engine, allocate, lambda report: service.stepped(report)
        )
        stack.push_async_callback(engine.close)
        transfer = await makings.link(
            worker=worker,
            incarnation=incarnation,
            fingerprint=engine.fingerprint.digest(),
            region=regions[0],
            settings=settings.transfer.listening(control.bind, control.advertise),
            on_end=lambda lease, why: service.lease_ended(lease, why),
            tls=control.tls(),
        )
        stack.push_async_callback(transfer.close)
        service = makings.serve(chassis, engine, transfer)
        server = await serve(
            chassis,
            control.bind,
            settings.port,
            advertise=control.advertise,
            settings=settings.wire,
            tls=control.tls(),
        )
        stack.push_async_callback(server.close, 2.0)
        card = WorkerCard(
            id=worker,
            incarnation=incarnation,
            role=role,
            state=MemberState.STARTING,
            address=server.address,
            transfer=transfer.address,
            model=settings.served_model_name or name,
            fingerprint=engine.fingerprint,
            blocks=engine.blocks,
            max_tokens=engine.max_tokens,
            version=__version__,
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        log.info("%s serves %s at %s, KV at %s", worker, card.model, card.address, card.transfer)
        async with asyncio.TaskGroup() as tasks:
            steps = tasks.create_task(_forever(engine.run, "the engine"))
            signals = tasks.create_task(_drain_on_signal(life, chassis, settings.chassis.drain_limit_s))
            await chassis.run(card, service, control.lease_ttl_s)
            log.info("%s has left: drained", worker)
            steps.cancel()
            signals.cancel()


async def _forever(run: Callable[[], Awaitable[None]], name: str) -> None:
    await run()
    raise RuntimeError(f"{name} has ended by itself")


async def _drain_on_signal(life: Life, chassis: Chassis, limit_s: float) -> None:
    await life.stopping.wait()
    chassis.begin_drain(limit_s)
    await life.hurrying.wait()
    chassis.begin_drain(0.0)
