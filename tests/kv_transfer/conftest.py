"""Two transfers of one process over any transport, and waiting for what must come true."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from fleet.ids import Incarnation, LeaseId, WorkerId, new_incarnation
from fleet.tls import Tls
from kv_transfer.loopback import LoopbackHub
from kv_transfer.region import Region
from kv_transfer.settings import TransferSettings
from kv_transfer.transfer import Transfer

GIVE_UP_S = 30.0


async def until(condition: Callable[[], bool], what: str = "condition") -> None:
    """Wait until it holds; the limit is only for a test that would fail anyway."""
    loop = asyncio.get_running_loop()
    end = loop.time() + GIVE_UP_S
    while loop.time() < end:
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{what} did not come true in {GIVE_UP_S} s")


@dataclass
class Side:
    transfer: Transfer
    region: Region
    ends: list[tuple[LeaseId, str]] = field(default_factory=list)

    def ended(self, lease: LeaseId) -> list[str]:
        return [why for name, why in self.ends if name == lease]


@dataclass
class Bench:
    """Opens sides; `region` content is random and differs from side to side."""

    transport: str
    hub: LoopbackHub | None
    sides: list[Side] = field(default_factory=list)

    async def side(
        self,
        name: str,
        *,
        blocks: int = 64,
        block_bytes: int = 4096,
        fingerprint: str = "same",
        incarnation: str = "",
        tls: Tls | None = None,
        **settings: Any,
    ) -> Side:
        region = Region.allocate(blocks, block_bytes)
        random = np.random.default_rng([len(self.sides), *name.encode()])
        region.array[:] = random.integers(0, 256, region.array.shape, dtype=np.uint8)
        ends: list[tuple[LeaseId, str]] = []
        transfer = await Transfer.start(
            worker=WorkerId(name),
            incarnation=Incarnation(incarnation or new_incarnation()),
            fingerprint=fingerprint,
            region=region,
            settings=TransferSettings(transport=self.transport, **settings),
            on_end=lambda lease, why: ends.append((lease, why)),
            loopback=self.hub,
            tls=tls,
        )
        side = Side(transfer, region, ends)
        self.sides.append(side)
        return side

    async def idle(self) -> None:
        """Everything that was begun has ended, on all sides."""
        for side in self.sides:
            await until(lambda side=side: not side.transfer.leases, "no lease")
            side.transfer.validate(idle=True)


@contextlib.asynccontextmanager
async def open_bench(transport: str) -> AsyncIterator[Bench]:
    bench = Bench(transport, LoopbackHub() if transport == "loopback" else None)
    try:
        yield bench
        await bench.idle()
    finally:
        for side in bench.sides:
            await side.transfer.close()
            side.transfer.validate(idle=True)
            side.region.close()


@pytest.fixture(params=["loopback", "shm", "ucx"])
def each_transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["shm", "ucx"])
def real_transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bench() -> Callable[[str], contextlib.AbstractAsyncContextManager[Bench]]:
    return open_bench


@pytest.fixture
def eventually() -> Callable[..., Any]:
    return until
