"""One worker process around a role: registry, bus, wire, signals. The same for every role."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

from fleet import __version__
from fleet.bus.nats_bus import NatsBus
from fleet.chassis import Chassis, ChassisSettings
from fleet.ids import WorkerId, new_incarnation, new_worker_id
from fleet.kv_layout import Fingerprint
from fleet.life import Life, run_process
from fleet.member import MemberState, Role, WorkerCard
from fleet.metrics import Family
from fleet.metrics_server import MetricsServer, MetricsSettings
from fleet.registry.etcd_registry import EtcdRegistry
from fleet.roles import Roles, WorkerRole, other_roles
from fleet.settings import ControlSettings, SettingsError, load_or_exit
from fleet.telemetry import page
from fleet.wire.network import serve
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
    def session_port(self) -> int: ...
    @property
    def other_role(self) -> str: ...
    @property
    def control(self) -> ControlSettings: ...
    @property
    def chassis(self) -> ChassisSettings: ...
    @property
    def wire(self) -> WireSettings: ...
    @property
    def metrics(self) -> MetricsSettings: ...
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

    def retune(self, settings: Any) -> None:
        """Sizes the steps by a role's `settings.engine`."""
        ...

    def families(self) -> list[Family]:
        """Its figures for Prometheus."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Makings:
    """What floor 2 offers to make a worker of. Words of other rooms pass through here unread."""

    allocate: Callable[[int, int], Any]
    """(blocks, block_bytes) → the transfer layer's region; its `array` is the engine's pool."""
    load: Callable[..., Awaitable[tuple[LoadedEngine, str]]]
    """(model, settings.engine, allocate → array, sink) → the engine, and the model's own name."""
    link: Callable[..., Awaitable[Any]]
    """`Transfer.start`."""


def start_worker(role: WorkerRole, makings: Makings, prog: str) -> NoReturn:
    """The whole of a worker's `__main__`."""
    settings = load_or_exit(role.settings, prog=prog)
    try:
        others = other_roles(role.role, settings.other_role)
    except SettingsError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    run_process(lambda life: run_worker(life, [(role, settings), *others], makings))


async def run_worker(life: Life, cast: Sequence[tuple[WorkerRole, Any]], makings: Makings) -> None:
    """From nothing to a served role, until it is drained. SIGTERM drains; a second one hurries.

    `cast`: the roles it can take with their settings. The first is the one it takes, and the settings of
    the process are those.
    """
    role, settings = _first(cast)
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
        roles = Roles(role)

        def allocate(blocks: int, block_bytes: int) -> Any:
            regions.append(makings.allocate(blocks, block_bytes))
            return regions[0].array

        engine, name = await makings.load(settings.model, settings.engine, allocate, roles.stepped)
        stack.push_async_callback(engine.close)
        transfer = await makings.link(
            worker=worker,
            incarnation=incarnation,
            fingerprint=engine.fingerprint.digest(),
            region=regions[0],
            settings=settings.transfer.listening(control.bind, control.advertise),
            on_end=roles.lease_ended,
            tls=control.tls(),
        )
        stack.push_async_callback(transfer.close)
        for one, its in cast:
            service = one.serve(chassis, engine, transfer, its)
            roles.add(one.role, service, partial(engine.retune, its.engine))
        server = await serve(
            chassis,
            control.bind,
            settings.port,
            settings.session_port,
            advertise=control.advertise,
            settings=settings.wire,
            tls=control.tls(),
        )
        stack.push_async_callback(server.close, 2.0)

        served = settings.served_model_name or name

        async def figures() -> bytes:
            told = [*chassis.families(), *engine.families(), *transfer.families()]
            return await page(told, settings.metrics.vllm_names, served)

        metrics = await MetricsServer.start(figures, settings.metrics)
        stack.push_async_callback(metrics.close)
        card = WorkerCard(
            id=worker,
            incarnation=incarnation,
            role=role,
            state=MemberState.STARTING,
            address=server.address,
            sessions=server.sessions,
            transfer=transfer.address,
            model=served,
            fingerprint=engine.fingerprint,
            blocks=engine.blocks,
            max_tokens=engine.max_tokens,
            version=__version__,
            pid=os.getpid(),
            host=socket.gethostname(),
            metrics=_address(settings.metrics.bind, control.advertised, metrics.port),
            revision=settings.chassis.revision,
        )
        log.info(
            "%s serves %s: control at %s, sessions at %s, KV at %s, metrics at %s",
            *(worker, card.model, card.address, card.sessions, card.transfer, card.metrics),
        )
        life.settled()
        async with asyncio.TaskGroup() as tasks:
            steps = tasks.create_task(_forever(engine.run, "the engine"))
            signals = tasks.create_task(_drain_on_signal(life, chassis, settings.chassis.drain_limit_s))
            stalls = tasks.create_task(_end_when_stalled(life, chassis))
            await chassis.run(card, roles, control.lease_ttl_s, roles.turns)
            log.info("%s has left: drained", worker)
            for task in (steps, signals, stalls):
                task.cancel()


def _address(bind: str, advertised: str, port: int) -> str:
    host = advertised if bind in ("0.0.0.0", "::") else bind
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _forever(run: Callable[[], Awaitable[None]], name: str) -> None:
    await run()
    raise RuntimeError(f"{name} has ended by itself")


def _first(cast: Sequence[tuple[WorkerRole, Any]]) -> tuple[Role, WorkerSettings]:
    return cast[0][0].role, cast[0][1]


async def _end_when_stalled(life: Life, chassis: Chassis) -> None:
    """Its routers go on elsewhere, and whoever supervises the process starts it again."""
    life.abort(await chassis.stalled())


async def _drain_on_signal(life: Life, chassis: Chassis, limit_s: float) -> None:
    await life.stopping.wait()
    chassis.begin_drain(limit_s)
    await life.hurrying.wait()
    chassis.begin_drain(0.0)
