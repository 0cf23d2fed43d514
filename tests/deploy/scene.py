"""A cluster with the controller in virtual time: the real controller over a store, pods that only pretend."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from cluster_nodes import Behaviour, PretendKubelet, Workloads, is_ready
from cluster_store import GROUPS, MONITORS, Kind, Store, StoreApi

from deploy.controller.controller import Controller, ControllerSettings
from deploy.controller.crd import definitions
from deploy.controller.words import Judged
from fleet.cluster import FLEETS, JSON, MERGE, POOLS, Object

EPOCH = 1_790_000_000.0
SPEC: Object = {
    "image": "pdfleet:1",
    "model": {"path": "/models/m", "name": "m"},
    "control": {"etcd": "etcd:2379", "nats": "nats://nats:4222"},
    "prefill": {"replicas": 1},
    "decode": {"replicas": 2},
}


class ToldLooks:
    """What pods say, as a test sets it."""

    def __init__(self) -> None:
        self.load: dict[str, float] = {}
        self.attainment: dict[str, Judged] | None = None

    async def loads(self, pages: Mapping[str, str]) -> dict[str, float]:
        return {pod: self.load[pod] for pod in pages if pod in self.load}

    async def judged(self, pages: Sequence[str]) -> dict[str, Judged] | None:
        return self.attainment


class Scene:
    def __init__(self, kinds: tuple[Kind, ...] = (MONITORS, GROUPS)) -> None:
        self.store = Store(lambda: EPOCH + asyncio.get_running_loop().time(), kinds)
        self.api = StoreApi(self.store)
        self.looks = ToldLooks()
        self.behaviours: Callable[[Object], Behaviour] = lambda pod: Behaviour()
        self.room: Callable[[Object], bool] = lambda pod: True
        self.workloads = Workloads(
            self.store, PretendKubelet(lambda pod: self.behaviours(pod)), lambda pod: self.room(pod)
        )
        self.controller: Controller
        self._acting: asyncio.Task[None] | None = None
        for one in definitions():
            path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            self.store.handle("POST", path, {}, one, JSON)

    def start_controller(self) -> None:
        self.controller = Controller(self.api, self.looks, ControllerSettings(), self.store.clock)
        self._acting = asyncio.ensure_future(self.controller.run())

    async def stop_controller(self) -> None:
        assert self._acting is not None
        self._acting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._acting
        self._acting = None

    def create(self, name: str = "demo", **changes: Any) -> Object:
        body = {"metadata": {"name": name}, "spec": {**SPEC, **changes}}
        return self.store.handle("POST", FLEETS.path("default"), {}, body, JSON)

    def change(self, name: str = "demo", **changes: Any) -> Object:
        return self.store.handle("PATCH", FLEETS.path("default", name), {}, {"spec": changes}, MERGE)

    def scale(self, pool: str, replicas: int) -> Object:
        body = {"spec": {"replicas": replicas}}
        return self.store.handle("PATCH", POOLS.path("default", pool, "scale"), {}, body, MERGE)

    def fleet(self, name: str = "demo") -> Object:
        found = self.store.one("inferencefleets", name)
        assert found is not None, f"there is no fleet {name}"
        return found

    def condition(self, type: str, name: str = "demo") -> Object:
        found: list[Object] = self.fleet(name).get("status", {}).get("conditions", [])
        return next((one for one in found if one["type"] == type), {})

    def pods(self, role: str, fleet: str = "demo", revision: str = "") -> list[Object]:
        return [
            pod
            for pod in self.store.all("pods")
            if pod["metadata"]["labels"].get("pdfleet.dev/role") == role
            and pod["metadata"]["labels"].get("pdfleet.dev/fleet") == fleet
            and revision in ("", pod["metadata"]["labels"].get("pdfleet.dev/revision"))
        ]

    def ready(self, role: str, fleet: str = "demo", revision: str = "") -> int:
        return sum(is_ready(pod) for pod in self.pods(role, fleet, revision))

    async def until(self, condition: Callable[[], object], limit_s: float = 120.0, what: str = "") -> None:
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    await asyncio.sleep(0.2)
        except TimeoutError:
            fleets = [
                (one["metadata"]["name"], one.get("status")) for one in self.store.all("inferencefleets")
            ]
            pods = [
                (pod["metadata"]["name"], is_ready(pod), "deletionTimestamp" in pod["metadata"])
                for pod in self.store.all("pods")
            ]
            raise AssertionError(f"not so after {limit_s} s: {what}\n{fleets}\n{pods}") from None

    def settled(self, name: str = "demo") -> bool:
        status, fleet = self.fleet(name).get("status", {}), self.fleet(name)
        return bool(
            status.get("observedGeneration") == fleet["metadata"]["generation"]
            and self.condition("Progressing", name).get("status") == "False"
        )

    async def settle(self, name: str = "demo", limit_s: float = 300.0) -> None:
        await self.until(lambda: self.settled(name), limit_s, f"{name} is settled")


@contextlib.asynccontextmanager
async def scene(kinds: tuple[Kind, ...] = (MONITORS, GROUPS)) -> AsyncIterator[Scene]:
    """With nodes and a controller that run."""
    made = Scene(kinds)
    nodes = asyncio.ensure_future(made.workloads.run())
    made.start_controller()
    try:
        yield made
    finally:
        if made._acting is not None:
            await made.stop_controller()
        nodes.cancel()
        await asyncio.gather(nodes, return_exceptions=True)
