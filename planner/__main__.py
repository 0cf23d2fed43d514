"""Starts a planner: `python -m planner --help`; `python -m planner replay FILE` decides anew what one did."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from fleet.bus.nats_bus import NatsBus
from fleet.cluster import KubernetesApi
from fleet.life import Life, run_process
from fleet.registry.etcd_registry import EtcdRegistry
from fleet.settings import ControlSettings, load_or_exit
from fleet.wire.network import NetworkWire
from planner.cluster import ClusterActuator, Shown
from planner.decisions import LEAST_BYTES, DecisionsFile
from planner.etcd import EtcdActuator
from planner.record import replay
from planner.run import Planner
from planner.words import PlannerSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannerProcessSettings:
    """The planner of a fleet: how many prefill and decode workers there are to be, and why."""

    planner: PlannerSettings = field(default_factory=PlannerSettings)
    control: ControlSettings = field(default_factory=ControlSettings)
    kubernetes: str = ""
    """NAMESPACE/NAME of an InferenceFleet whose counts it plans; empty: those in etcd."""
    decisions: Path | None = None
    """File to which every decision is added as a line of JSON, with what it was made from."""
    decisions_bytes: int = 64 << 20
    """Longest such file; then it is kept once under the same name and .1, and begun anew. At least 65536."""

    def __post_init__(self) -> None:
        if self.decisions_bytes < LEAST_BYTES:
            raise ValueError(f"decisions_bytes is {self.decisions_bytes}; at least {LEAST_BYTES} is needed")
        namespace, slash, name = self.kubernetes.partition("/")
        if self.kubernetes and not (namespace and slash and name and "/" not in name):
            raise ValueError(
                f"kubernetes is {self.kubernetes!r}; NAMESPACE/NAME is needed, as in default/demo"
            )


async def run(life: Life, settings: PlannerProcessSettings) -> None:
    control = settings.control
    name = f"planner-{secrets.token_hex(3)}"
    card = {"id": name, "pid": os.getpid(), "host": socket.gethostname()}
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        registry = EtcdRegistry.of(control)
        stack.push_async_callback(registry.close)
        bus = NatsBus(control.nats, control.nats_tls())
        stack.push_async_callback(bus.close)
        wire = NetworkWire(tls=control.tls())
        stack.push_async_callback(wire.close)
        keep: Callable[[bytes], None] = lambda line: None  # noqa: E731
        file: DecisionsFile | None = None
        if settings.decisions is not None:
            file = DecisionsFile(settings.decisions, settings.decisions_bytes, settings.planner)
            stack.callback(file.close)
            keep = file.keep
        planner = Planner(
            settings.planner,
            control.fleet,
            registry,
            bus,
            name=name,
            card=json.dumps(card).encode(),
            lease_ttl_s=control.lease_ttl_s,
            keep=keep,
        )
        if file is not None:
            file.state = lambda: planner.state
        planner.actuator = EtcdActuator(control.fleet, registry, wire, planner.observer.least_loaded)
        if settings.kubernetes:
            api = await KubernetesApi.connect()
            stack.push_async_callback(api.close)
            namespace, _, fleet = settings.kubernetes.partition("/")
            lease = await registry.lease(control.lease_ttl_s)
            stack.push_async_callback(lease.close)
            shown = Shown(registry, lease, control.fleet)
            planner.actuator = ClusterActuator(api, namespace, fleet, shown)
        planning = tasks.create_task(planner.run())
        log.info("%s plans for the fleet %s", name, control.fleet)
        life.settled()
        await life.stopping.wait()
        planning.cancel()


def replayed(path: str) -> int:
    """Exit code: 0, all came out the same; 1, some did not; 2, the file cannot be read."""
    same = differ = 0
    try:
        with open(path, "rb") as lines:
            for one in replay(lines):
                same += one.same
                differ += not one.same
                if not one.same:
                    print(f"line {one.number}: was {one.line.plan}, is {one.again}")
    except (OSError, ValueError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    print(f"{same + differ} decisions: {same} the same, {differ} others")
    return int(differ > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["replay"]:
        if len(sys.argv) != 3:
            sys.exit("python -m planner replay FILE: one file of decisions is needed")
        sys.exit(replayed(sys.argv[2]))
    chosen = load_or_exit(PlannerProcessSettings, prog="python -m planner")
    run_process(lambda life: run(life, chosen))
