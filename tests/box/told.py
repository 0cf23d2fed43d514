"""All that a router and a worker tell Prometheus, from a fleet in virtual time: names, labels, meanings."""

from __future__ import annotations

import asyncio
import io
from functools import cache

from whole_fleet import Box

from fleet.metrics import Family
from fleet.request import Sampling
from fleet.virtual_time import run
from router.exposition import families
from router.openai.access_log import AccessLog
from router.openai.metrics import Metrics


def told_by_router() -> list[Family]:
    return list(_told()[0])


def told_by_worker() -> list[Family]:
    """Those of a prefill worker, and what a decode worker has beside."""
    return list(_told()[1])


@cache
def _told() -> tuple[tuple[Family, ...], tuple[Family, ...]]:
    async def main() -> tuple[tuple[Family, ...], tuple[Family, ...]]:
        async with Box(1, 1) as box:
            await box.ask(box.request(range(200), Sampling(8), 1))
            told = families(box.router.flow, box.router.counters, asyncio.get_running_loop().time())
            by_name: dict[str, Family] = {}
            for worker in box.workers.values():
                of_worker = worker.process.call(worker.chassis.families)
                for family in (*of_worker, *worker.engine.families(), *worker.transfer.families()):
                    by_name.setdefault(family.name, family)
            written = AccessLog(io.BytesIO())
            written.close()
            return (*Metrics().families(), *written.families(), *told), tuple(by_name.values())

    return run(main())
