"""A router's picture of a crowd of workers that are not there, with requests as they could have gone.

For what shows fleets. `python tests/box/crowd.py 1000` serves it on a port until it is interrupted."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fleet.api_keys import ApiKey
from fleet.events import KvDigest, LoadReport
from fleet.goodput import End, Outcome, attains
from fleet.ids import Incarnation, RequestId, WorkerId
from fleet.kv_layout import Fingerprint
from fleet.member import MemberState, Role, WorkerCard
from fleet.stages import Stage
from router.flow import Flow
from router.live import Live
from router.openai.asgi import Ingress
from router.openai.server import HttpServer
from router.openai.settings import HttpSettings
from router.prefix_index import PrefixIndex
from router.record import HandoffRecord, HandoffState
from router.roster import LinkState, Roster
from router.run import Terms
from router.settings import RouterSettings

PRINT = Fingerprint("model", "tokenizer", 2, 2, 16, 16, "float32")
BLOCKS = 4096


def card(name: str, role: Role, model: str = "toy") -> WorkerCard:
    return WorkerCard(
        id=WorkerId(name), incarnation=Incarnation(f"{name}.1"), role=role, state=MemberState.READY,
        address=f"{name}:1", sessions=f"{name}:2", transfer=f"loop:{name}", model=model, fingerprint=PRINT,
        blocks=BLOCKS, max_tokens=8192, version="0", pid=1, host="here",
    )  # fmt: skip


class Crowd:
    """`workers` of them, a quarter for prefill. The figures are drawn from `seed`; all have sessions."""

    def __init__(self, workers: int, seed: int = 1, names: Mapping[Role, str] = {}) -> None:
        settings = RouterSettings()
        self.chance = random.Random(seed)
        self.roster = Roster(settings.unknown)
        self.flow = Flow(settings, self.roster, PrefixIndex(settings.index), {})
        self.live = Live(self.flow, router="router-1", fleet="crowd", version="0")
        self.cards = [
            card(f"{names.get(role, role.value)}-{n}", role)
            for n in range(workers)
            for role in [Role.PREFILL if n % 4 == 0 else Role.DECODE]
        ]
        self.roster.apply_view({one.id: one for one in self.cards})
        for one in self.cards:
            self.roster.apply_link(one.id, one.incarnation, LinkState.UP)
        self._requests = 0

    def report(self, share: float = 1.0, now: float = 0.0, **fields: int) -> None:
        """A share of the workers tells new figures."""
        for one in self.chance.sample(self.cards, round(share * len(self.cards))):
            used = self.chance.randrange(BLOCKS + 1)
            report = LoadReport(
                one.id, one.incarnation, MemberState.READY, self.chance.randrange(32), 0, 0, BLOCKS,
                BLOCKS - used, KvDigest(0, 0, 0), 9000.0, 0.021, 12.0, 1e9,
                counters={"pulled_bytes": self.chance.randrange(1 << 40), "generated_tokens": 1 << 30},
            )  # fmt: skip
            waiting = self.chance.choice([0, 0, 0, 3])
            self.roster.apply_load(
                replace(report, waiting=waiting, queued_tokens=waiting * 300, **fields), now
            )

    def finish(self, slo_class: str, now: float, ttft_s: float = 0.2, id: str = "") -> HandoffRecord:
        """A request that was handed off and ends now, two seconds after its first token."""
        self._requests += 1
        began = now - ttft_s - 2.0
        record = HandoffRecord(RequestId(id or f"request-{self._requests}"), "toy", 500, began, slo_class)
        later = [ttft_s + seconds for seconds in (0.0, 0.01, 0.02, 0.1, 0.1, 2.0)]
        marks = (0.0, 0.001, 0.002, ttft_s / 2, *later)
        record.stages = dict(zip(Stage, marks, strict=True))
        self.flow.records.open(record)
        prefill, decode = self.cards[0].id, self.cards[1].id
        for state, at, worker in (
            (HandoffState.RESERVED, 0.001, None),
            (HandoffState.PREFILLING, 0.002, prefill),
            (HandoffState.READY, ttft_s, prefill),
            (HandoffState.PULLING, ttft_s + 0.01, decode),
            (HandoffState.DONE, ttft_s + 2.0, None),
        ):
            record.move(state, began + at, f"why it was {state}", worker)
        outcome = Outcome(End.FINISHED, ttft_s + 2.0, [ttft_s + 0.05 * n for n in range(41)], record.stages)
        objectives = self.flow.settings.objectives[slo_class]
        verdict = attains(outcome, objectives)
        self.flow.judged(Terms(slo_class, objectives), outcome, verdict, now)
        record.outcome = {"attained": verdict.attained, "why": verdict.why, **outcome.as_dict()}
        self.flow.records.close(record)
        return record

    async def serve(self, keys: Sequence[ApiKey] = (), port: int = 0) -> HttpServer:
        settings = HttpSettings(port=port)
        ingress = Ingress(self.flow, {}, settings, keys=keys, records=self.flow.records, name="router-1")
        ingress.live = self.live
        return await HttpServer.start(ingress, settings)


async def main(workers: int, port: int) -> None:
    crowd = Crowd(workers)
    server = await crowd.serve(port=port)
    print(f"http://127.0.0.1:{server.port}/dashboard", flush=True)
    clock = asyncio.get_running_loop().time
    crowd.report()
    if workers > 10:
        crowd.roster.apply_link(crowd.cards[7].id, crowd.cards[7].incarnation, LinkState.LOST)
    while True:
        if workers:
            crowd.report(0.5, clock())
            for _ in range(crowd.chance.randrange(20)):
                slo_class = crowd.chance.choice(["interactive", "standard", "standard", "batch"])
                crowd.finish(slo_class, clock(), crowd.chance.expovariate(1 / 0.6))
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
