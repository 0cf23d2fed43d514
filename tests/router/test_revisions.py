"""Routers tell by revision whether requests met their objectives; the controller reads it on their page."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from router_fleet import Fleet, ask_and_settle, in_fleet
from scripted_worker import card, request

from deploy.controller.looks import judged, together
from deploy.controller.words import Judged
from fleet.ids import WorkerId
from fleet.member import Role
from fleet.metrics import Family
from fleet.objectives import Objectives
from fleet.telemetry import page
from router.exposition import families
from router.run import Terms


def test_a_request_counts_for_all_that_had_a_part_in_it() -> None:
    async def body(fleet: Fleet) -> list[list[Family]]:
        async def served(worker: str, role: Role) -> list[Family]:
            """Two requests more: one attains."""
            await fleet.add(replace(card(worker, role), revision=worker.partition("-")[2]))
            await fleet.until(
                lambda: all(
                    (one := fleet.router.roster.get(name)) is not None and one.usable and one.report
                    for name in fleet.workers
                )
            )
            for number, limit_ms in enumerate((60_000.0, 1e-6)):
                terms = Terms("c", Objectives(ttft_ms=limit_ms))
                await ask_and_settle(fleet, request(f"{worker}.{number}"), terms=terms)
            return list(families(fleet.router.flow, fleet.router.counters, asyncio.get_running_loop().time()))

        def leave(worker: WorkerId) -> None:
            fleet.kill(worker)
            del fleet.workers[worker]

        told = [await served("d-", Role.DECODE)]
        leave(WorkerId("d-"))
        told += [await served("d-abc", Role.DECODE), await served("p-abc", Role.PREFILL)]
        leave(WorkerId("d-abc"))
        return [*told, await served("d-def", Role.DECODE)]

    told = [judged(asyncio.run(page(one)).decode()) for one in in_fleet(body, prefill=(), decode=())]
    assert told == [
        {},
        {"abc": Judged(1, 2)},
        {"abc": Judged(2, 4)},
        {"abc": Judged(2, 4), "abc+def": Judged(1, 2)},
    ]
    assert together(told) == {"abc": Judged(5, 10), "abc+def": Judged(1, 2)}
