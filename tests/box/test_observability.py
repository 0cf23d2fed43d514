"""What a router tells of its requests, against what their clients saw: exact, monotone, never unbounded."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from whole_fleet import MODEL, Answer, Box, workload

from fleet.errors import DeadlineExceeded, FleetError, Overloaded
from fleet.handoff import CancelReason
from fleet.metrics import Buckets, Family, Kind
from fleet.request import Request, Sampling
from fleet.stages import Timeline
from fleet.telemetry import page
from fleet.virtual_time import run
from router.exposition import families
from router.run import RunEnd
from router.settings import CostSettings, RouterSettings

SPLIT = RouterSettings(cost=CostSettings(local_prefill_tokens=0, local_advantage=1e9))
"""No decode worker computes a prompt while there is a prefill worker."""


def scrape(box: Box) -> dict[str, Family]:
    now = asyncio.get_running_loop().time()
    found = families(box.router.flow, box.router.counters, now)
    assert len({family.name for family in found}) == len(found), "a name is told twice"
    return {family.name: family for family in found}


def total(family: Family, **labels: str) -> float:
    """Of all series with these labels; of histograms how often something was observed."""
    chosen = 0.0
    for key, number in family.series.items():
        if labels.items() <= dict(zip(family.labels, key, strict=True)).items():
            chosen += number.total if isinstance(number, Buckets) else number
    return chosen


@dataclass
class Watch:
    """Looks at every figure again and again: what may only grow has only grown."""

    looks: int = 0
    _seen: dict[tuple[str, tuple[str, ...]], list[float]] = field(default_factory=dict)

    async def look(self, box: Box) -> None:
        self.looks += 1
        self._look("router", scrape(box).values())
        for worker in box.workers.values():
            if hasattr(worker, "transfer"):
                told = [*worker.process.call(worker.chassis.families), *worker.engine.families()]
                told += worker.transfer.families()
                self._look(worker.incarnation, told)
                if self.looks % 10 == 0:
                    await readable(told)
        if self.looks % 10 == 0:
            await readable([*scrape(box).values()])

    def _look(self, life: str, told: Iterable[Family]) -> None:
        for family in told:
            name = f"{life}: {family.name}"
            for key, number in family.series.items():
                if family.kind is Kind.GAUGE:
                    assert not isinstance(number, Buckets)
                    assert number >= 0, f"{name}{key} is {number}"
                    continue
                now = [*number.counts, number.sum] if isinstance(number, Buckets) else [number]
                before = self._seen.get((name, key), [0.0] * len(now))
                assert all(old <= new for old, new in zip(before, now, strict=True)), f"{name}{key} fell"
                self._seen[name, key] = now


async def readable(told: Sequence[Family]) -> None:
    """Their page as Prometheus reads it: whole, buckets cumulative, nothing negative, each series once."""
    lines = (await page(told)).decode()
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    for family in text_string_to_metric_families(lines):
        buckets: dict[tuple[tuple[str, str], ...], float] = {}
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in seen, f"{key} is told twice"
            seen.add(key)
            assert sample.value >= 0, f"{key} is {sample.value}"
            if sample.name.endswith("_bucket"):
                others = tuple(pair for pair in key[1] if pair[0] != "le")
                assert buckets.get(others, 0.0) <= sample.value, f"{key} is not cumulative"
                buckets[others] = sample.value
    assert seen


async def ask(box: Box, request: Request, leaves_s: float | None) -> str:
    """One client; what it would say became of its request."""
    timeline = Timeline(asyncio.get_running_loop().time())
    flow = box.router.flow.start(request, timeline)
    try:
        async with asyncio.timeout(leaves_s):
            async for event in flow:
                if isinstance(event, RunEnd):
                    return str(event.finish)
                TOKENS[request.id] += 1
    except TimeoutError:
        return "cancelled"
    except Overloaded:
        return "rejected"
    except DeadlineExceeded:
        return "timed_out"
    except FleetError:
        return "failed"
    finally:
        await flow.stop(CancelReason.CLIENT)
    raise AssertionError("a run ended without its last word")


TOKENS: Counter[str] = Counter()


def test_every_request_is_counted_once_wherever_it_was_left() -> None:
    """Left while it waits, while its prompt is computed, while KV is brought, while it decodes; and while
    workers die. Nothing is observed that was not reached, no sum is larger than the time there was."""

    async def main() -> None:
        TOKENS.clear()
        async with Box(2, 2, router=SPLIT, blocks=512) as box:
            chance, watch, loop = random.Random(3), Watch(), asyncio.get_running_loop()
            began, asked = loop.time(), []
            for number, (at, prompt, sampling) in enumerate(workload(120, seed=7)):
                await asyncio.sleep(max(0.0, began + at - loop.time()))
                await watch.look(box)
                leaves = chance.choice([None, 0.0, chance.expovariate(30.0), chance.expovariate(3.0)])
                deadline_s = 0.05 if number % 9 == 0 else 600.0
                request = box.request(prompt, sampling, number, deadline_s)
                asked.append(loop.create_task(ask(box, request, leaves)))
                if number == 40:
                    await box.kill("decode-0")
                    await box.kill("prefill-1")
                if number == 60:
                    for role, name in (("decode", "decode-0"), ("prefill", "prefill-1")):
                        box.start(type(box.workers["decode-1"].role)(role), name)
            truth = Counter(await asyncio.gather(*asked))
            await box.until(box.ready)
            await box.rest()
            await watch.look(box)
            elapsed = loop.time() - began
            seen = scrape(box)
            assert watch.looks > 100
            ended = seen["pdfleet_requests_ended"]
            told = Counter({key[-1]: int(total(ended, end=key[-1])) for key in ended.series})
            assert told == truth
            assert min(told["cancelled"], told["length"], told["timed_out"]) >= 3, truth
            assert total(seen["pdfleet_requests_received"]) == total(ended)
            assert total(seen["pdfleet_requests_in_flight"]) == 0
            assert total(seen["pdfleet_requests_judged"]) == total(ended)
            assert total(seen["pdfleet_generation_tokens"]) == TOKENS.total()
            for family in seen.values():
                for key, number in family.series.items():
                    if isinstance(number, Buckets):
                        assert number.sum <= elapsed * number.total, f"{family.name}{key}: {number.sum} s"
                        longest = max((at for at, count in enumerate(number.counts) if count), default=0)
                        assert longest == 0 or number.bounds[longest - 1] < elapsed, family.name
            for worker in box.workers.values():
                shown = worker.process.call(worker.chassis.families) + worker.engine.families()
                said = {family.name: family for family in shown}
                assert total(said["pdfleet_worker_jobs_received"]) == total(said["pdfleet_worker_jobs_ended"])
                assert total(said["pdfleet_worker_jobs_running"]) == 0
                assert total(said["pdfleet_worker_blocks"]) == 512
                steps = total(said["pdfleet_worker_steps"])
                assert total(said["pdfleet_worker_step_seconds"]) == steps
                assert total(said["pdfleet_worker_step_sequences"]) == steps
            first = seen["pdfleet_time_to_first_token_seconds"]
            assert total(first) == sum(count > 0 for count in TOKENS.values())
            assert total(seen["pdfleet_inter_token_seconds"]) == sum(n - 1 for n in TOKENS.values() if n)
            assert total(seen["pdfleet_request_seconds"]) == told["stop"] + told["length"]
            stages = seen["pdfleet_stage_seconds"]
            assert total(stages, stage="transfer") <= total(stages, stage="prefill") <= total(first)

    run(main())


def test_hand_offs_and_forecasts_are_told() -> None:
    async def main() -> None:
        async with Box(1, 1, router=SPLIT) as box:
            for number in range(5):
                answer = await box.ask(box.request(range(number, number + 200), Sampling(8), number))
                assert answer.end is not None
            seen = scrape(box)
            assert total(seen["pdfleet_handoffs"], outcome="completed") == 5
            assert total(seen["pdfleet_router_decisions"], reason="remote") == 5
            assert total(seen["pdfleet_router_decisions"], reason="handoff") == 5
            await box.ask(box.request(range(7, 207), Sampling(1), 9))  # one token: it has no pace
            seen = scrape(box)
            for name, count in (("ttft", 6), ("tpot", 5)):
                assert total(seen[f"pdfleet_{name}_forecast_seconds"]) == count
                assert total(seen[f"pdfleet_{name}_forecast_error_seconds"]) == count
            assert seen["pdfleet_attainment_ratio"].series["standard", "5m"] == 1.0
            assert seen["pdfleet_burn_rate"].series["standard", "6h"] == 0.0
            assert seen["pdfleet_goodput"].series["standard", "5m"] > 0  # type: ignore[operator]
            for name in ("worker_usable", "worker_proven"):
                shown = seen[f"pdfleet_router_{name}"].series
                assert shown == {("prefill-0", "prefill", MODEL): 1.0, ("decode-0", "decode", MODEL): 1.0}

    run(main())


def test_a_worker_that_left_leaves_no_series() -> None:
    async def main() -> None:
        async with Box(1, 2) as box:

            def names() -> set[str]:
                return {
                    dict(zip(family.labels, key, strict=True))["worker"]
                    for family in scrape(box).values()
                    if "worker" in family.labels
                    for key in family.series
                }  # fmt: skip

            before = {name: len(family.series) for name, family in scrape(box).items()}
            for _ in range(12):
                await box.kill("decode-1")
                await box.until(lambda: names() == {"prefill-0", "decode-0"})
                box.start(box.workers["decode-0"].role, "decode-1")
                await box.until(box.ready)
            assert {name: len(family.series) for name, family in scrape(box).items()} == before

    run(main())


def test_models_that_nobody_serves_share_one_label() -> None:
    async def main() -> None:
        async with Box(1, 1) as box:
            answers: list[Answer] = []
            for number in range(300):
                made = box.request(range(20), Sampling(2), number)
                model = MODEL if number % 3 == 0 else f"invented-{number}"
                answers.append(await box.ask(Request(made.id, model, made.prompt, made.sampling)))
            assert sum(answer.error is not None for answer in answers) == 200
            ended = scrape(box)["pdfleet_requests_ended"]
            assert set(ended.series) == {(MODEL, "standard", "length"), ("other", "standard", "invalid")}
            assert total(ended, model="other") == 200

    run(main())
