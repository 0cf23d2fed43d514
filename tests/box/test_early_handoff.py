"""Decode brings the KV of a prompt while prefill computes it: right texts, whatever happens to either."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from whole_fleet import LATENCY, Answer, Box, Memory, Replica, workload

from engine.bounds import GrammarSettings
from engine.grammar import Grammars, Vocabulary
from engine.latency_runner import LatencyRunner
from engine.runner import Runner
from engine.settings import EngineSettings
from fleet.errors import DeadlineExceeded, Internal
from fleet.handoff import CancelReason
from fleet.ids import WorkerId
from fleet.kv_layout import KvLayout
from fleet.member import Role
from fleet.request import Constraint, ConstraintKind, FinishReason, Sampling
from fleet.stages import Stage, Timeline
from fleet.virtual_time import run
from kv_transfer.settings import TransferSettings
from router.record import HandoffState
from router.settings import AdmissionMode, AdmissionSettings, CostSettings, FlowSettings, RouterSettings

EARLY = RouterSettings(cost=CostSettings(local_prefill_tokens=0, local_advantage=1e9))
LATE = replace(EARLY, flow=FlowSettings(early_handoff=False))
STEPS = EngineSettings(block_size=16, max_batch=16, max_step_tokens=128)
"""A prompt of 1,000 tokens takes 8 steps, 0.24 s."""
PROMPT = range(1000)
ANSWER = Sampling(max_tokens=20, temperature=1.0, seed=3)


def box_of(prefill: int = 1, decode: int = 1, router: RouterSettings = EARLY, **settings: object) -> Box:
    given = {"engine": STEPS, "router": router, **settings}
    return Box(prefill, decode, **given)  # type: ignore[arg-type]


def counter(box: Box, name: str) -> int:
    return sum(worker.load().counters.get(name, 0) for worker in box.workers.values())


def counter_of(box: Box, worker: str, name: str) -> int:
    return box.workers[WorkerId(worker)].load().counters.get(name, 0)


def right(box: Box, answer: Answer, prompt: range | list[int] = PROMPT, sampling: Sampling = ANSWER) -> None:
    assert answer.error is None, answer.error
    assert answer.tokens == box.truth(box.request(prompt, sampling, 0))
    assert answer.ends == 1


def states(box: Box, answer: Answer) -> list[HandoffState]:
    record = box.router.flow.records.get(answer.request)
    assert record is not None
    return [step.state for step in record.transitions]


def test_kv_goes_over_while_the_prompt_is_computed() -> None:
    gaps = {}

    async def main(router: RouterSettings) -> None:
        async with box_of(router=router) as box:
            answer = await box.ask(box.request(PROMPT, ANSWER, 1))
            right(box, answer)
            gaps[router.flow.early_handoff] = answer.times[1] - answer.times[0]
            early = router.flow.early_handoff
            assert counter(box, "lent_early") == counter(box, "early_reservations") == early
            assert counter(box, "pulled_tokens") == 1000
            assert counter(box, "pulls_recomputed") == counter(box, "local_prefills") == 0
            assert counter(box, "leases_granted") == counter(box, "leases_released") == 1
            middle = [HandoffState.LENDING] if early else []
            assert states(box, answer) == [
                HandoffState.RESERVED,
                HandoffState.PREFILLING,
                *middle,
                HandoffState.READY,
                HandoffState.PULLING,
                HandoffState.DONE,
            ]
            assert answer.timeline is not None
            marks = answer.timeline.marks
            assert marks[Stage.FIRST_TOKEN] <= marks[Stage.PULL_STARTED] <= marks[Stage.PULL_ENDED]
            # Seven of eight steps' blocks are there before the first token is.
            assert counter(box, "pulled_early_blocks") == (56 if early else 0)
            assert box.router.flow.counters["early_handoffs"] == early

    for router in (EARLY, LATE):
        run(main(router), horizon_s=60)
    # The whole prompt is 63 blocks of 360 KiB at 1 GB/s.
    assert gaps[False] - gaps[True] > 0.9 * 56 * 360 * 1024 / 1e9


def test_a_prompt_of_one_step_is_handed_off_as_ever() -> None:
    async def main() -> None:
        async with box_of() as box:
            right(box, await box.ask(box.request(range(100), ANSWER, 1)), range(100))
            assert counter(box, "lent_early") == 0
            assert box.router.flow.counters["early_legs"] == 0
            assert box.router.flow.counters["handoffs"] == 1

    run(main(), horizon_s=60)


@pytest.mark.parametrize("blocks", [2048, 160])
def test_many_at_once_are_right(blocks: int) -> None:
    """Also where both pools are nearly full: who lends stays, others give way."""

    async def main() -> None:
        async with box_of(2, 2, blocks=blocks) as box:

            async def client(number: int, at: float, prompt: list[int], sampling: Sampling) -> None:
                await asyncio.sleep(at)
                right(box, await box.ask(box.request(prompt, sampling, number)), prompt, sampling)

            rows = workload(120, seed=21)
            await asyncio.gather(*(client(i, *row) for i, row in enumerate(rows)))
            assert box.router.flow.counters["early_handoffs"] > 20
            assert counter(box, "pulls_recomputed") == 0

    run(main(), horizon_s=3600)


def test_a_second_turn_brings_only_what_decode_lacks() -> None:
    async def main() -> None:
        async with box_of() as box:
            first = await box.ask(box.request(PROMPT, ANSWER, 1))
            prompt = [*PROMPT, *first.tokens, *range(2000, 2300)]
            pulled = counter(box, "pulled_tokens")
            right(box, await box.ask(box.request(prompt, ANSWER, 2)), prompt)
            assert box.router.flow.counters["early_handoffs"] == 2
            # Decode has 1,019 tokens of it: 63 blocks.
            assert counter(box, "pulled_tokens") - pulled == len(prompt) - 63 * 16

    run(main(), horizon_s=60)


TIMES = [0.0, 0.02, 0.035, 0.06, 0.1, 0.15, 0.2, 0.235, 0.24, 0.245, 0.25, 0.255, 0.26, 0.28]
"""Before anything, between steps, about the last one, and after."""


@pytest.mark.parametrize("how", ["cancel", "vanish", "deadline"])
def test_a_request_that_is_given_up_at_any_time_leaves_nothing_anywhere(how: str) -> None:
    async def main() -> None:
        async with box_of() as box:
            for number, after_s in enumerate(TIMES):
                prompt = [number, *PROMPT]
                if how == "deadline":
                    answer = await box.ask(box.request(prompt, ANSWER, number, deadline_s=after_s + 0.001))
                    assert isinstance(answer.error, DeadlineExceeded)
                else:
                    request = box.request(prompt, ANSWER, number)
                    flow = box.router.flow.start(request, Timeline(asyncio.get_running_loop().time()))

                    async def read(flow: object = flow) -> None:
                        async for _ in flow:  # type: ignore[attr-defined]
                            pass

                    reader = asyncio.create_task(read())
                    await asyncio.sleep(after_s)
                    if how == "vanish":
                        reader.cancel()
                    else:
                        await flow.stop(CancelReason.CLIENT)
                    await asyncio.gather(reader, return_exceptions=True)
                    await flow.stop(CancelReason.CLIENT)
                await asyncio.sleep(0.1)
                box.validate()
            assert box.router.flow.counters["early_legs"] >= len(TIMES) - 3

    run(main(), horizon_s=600)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_worker_lost_at_any_time_costs_latency_only(victim: str, how: str) -> None:
    async def main(after_s: float) -> int:
        # Two of the other role, so that there is a choice; of the victim's role one more comes later.
        async with box_of(2, 2, transfer=TransferSettings(lease_s=2.0)) as box:
            other = victim.replace("-0", "-1")
            await box.kill(other)
            asked = asyncio.create_task(box.ask(box.request(PROMPT, ANSWER, 1)))
            await asyncio.sleep(0.001)
            box.start(Role(victim.partition("-")[0]), other)
            await asyncio.sleep(after_s)
            frozen = box.workers[victim].process  # type: ignore[index]
            if how == "kill":
                await box.kill(victim)
            else:
                frozen.stop()
            right(box, await asked)
            frozen.resume()
            await box.until(box.ready)
            return box.router.flow.counters["early_legs"]

    assert sum(run(main(after_s), horizon_s=600) for after_s in TIMES[::2]) > 0


@pytest.mark.parametrize("others", [0, 1])
def test_what_was_brought_of_a_prompt_whose_worker_dies_is_not_brought_or_computed_again(others: int) -> None:
    async def main() -> None:
        async with box_of(1 + others, 1) as box:
            asked = asyncio.create_task(box.ask(box.request(PROMPT, ANSWER, 1)))
            await box.until(lambda: counter(box, "pulled_early_blocks") >= 32)
            victim = next(w for w in ("prefill-0", "prefill-1") if counter_of(box, w, "lent_early"))
            await box.kill(victim)
            right(box, await asked)
            if others:
                assert counter_of(box, "decode-0", "pull_hit_tokens") >= 512
            else:
                # Its first step begins before the pull that was given up has ended.
                assert counter_of(box, "decode-0", "cached_tokens") >= 512 - STEPS.max_step_tokens

    run(main(), horizon_s=60)


@pytest.mark.parametrize("fault", ["corrupt", "cut", "drop"])
def test_kv_that_does_not_come_is_brought_anew_or_computed_from_the_last_proven_block_on(fault: str) -> None:
    """Anew where the loan has ended meanwhile: the whole is under another lease then."""

    async def main() -> None:
        async with box_of(transfer=TransferSettings(lease_s=2.0), pull_limit_s=0.05) as box:
            source = box.workers["prefill-0"].transfer.address  # type: ignore[index]
            asked = asyncio.create_task(box.ask(box.request(PROMPT, ANSWER, 1)))
            await box.until(lambda: counter(box, "pulled_early_blocks") >= 24)
            if fault == "cut":
                box.hub.cut(source)
            else:
                getattr(box.hub, fault)(source)
            right(box, await asked)
            anew = fault != "drop"
            assert counter(box, "pulls_recomputed") == (not anew)
            assert counter_of(box, "prefill-0", "leases_expired") == 0
            decode = box.workers["decode-0"].load().counters  # type: ignore[index]
            assert 384 <= decode["pulled_tokens"] <= 1000
            assert decode["computed_tokens"] == 1000 - decode["pulled_tokens"] + 19
            assert (decode["pulled_tokens"] == 1000) == anew

    run(main(), horizon_s=600)


def test_a_loan_that_ends_while_it_is_read_and_more_is_computed_costs_latency_only() -> None:
    """As when a reader that gave up says so while the source still serves a read of another, or its own."""

    async def main() -> None:
        async with box_of(pull_limit_s=10.0) as box:
            box.hub.bytes_s = 1e7  # The first blocks take longer to read than all others to be computed.
            worker = box.workers[WorkerId("prefill-0")]
            source, free = worker.transfer, worker.engine.load().blocks_free
            asked = asyncio.create_task(box.ask(box.request(PROMPT, ANSWER, 1)))
            await box.until(lambda: bool(source._grants._aborts))
            (lease,) = source._grants._aborts
            source.release(lease)
            assert source.leases == 1, "it is read"
            await box.until(lambda: counter(box, "leases_granted") == 2 and source.leases == 1)
            assert worker.engine.load().blocks_free == free - 63, "under the second lease"
            right(box, await asked)
            assert counter(box, "pulled_tokens") == 1000

    run(main(), horizon_s=600)


def test_a_decode_worker_that_refuses_is_in_the_record_and_costs_nothing() -> None:
    async def main() -> None:
        engine = EngineSettings(block_size=16, max_batch=2, max_step_tokens=128, max_waiting=1)
        router = replace(EARLY, admission=AdmissionSettings(AdmissionMode.OFF))
        async with box_of(1, 1, engine=engine, router=router) as box:
            # Two that run and one that waits: its queue is full until one of them ends.
            long = Sampling(max_tokens=150)
            before = []
            for n in range(3):
                before.append(asyncio.create_task(box.ask(box.request(range(n, 40), long, 10 + n))))
                await asyncio.sleep(0.05)
            await box.until(lambda: box.workers["decode-0"].load().waiting == 1)  # type: ignore[index]
            answer = await box.ask(box.request(PROMPT, ANSWER, 1))
            right(box, answer)
            record = box.router.flow.records.get(answer.request)
            assert record is not None
            notes = [step for step in record.transitions if "wait already" in step.why]
            assert notes
            assert notes[0].state is HandoffState.PREFILLING, "found before the prefill was spent"
            for number, task in enumerate(before):
                right(box, await task, range(number, 40), long)

    run(main(), horizon_s=600)


def test_without_room_at_decode_nobody_begins_early() -> None:
    async def main() -> None:
        async with box_of(1, 1, blocks=100) as box:
            long = Sampling(max_tokens=200)
            before = asyncio.create_task(box.ask(box.request(range(700, 1400), long, 1)))
            await box.until(lambda: box.router.flow.counters["handoffs"] == 1)
            await asyncio.sleep(0.5)  # The next report.
            answer = await box.ask(box.request(PROMPT, ANSWER, 2))
            right(box, answer)
            assert states(box, answer)[:4] == [
                HandoffState.RESERVED,
                HandoffState.PREFILLING,
                HandoffState.PREFILLING,
                HandoffState.READY,
            ]
            right(box, await before, range(700, 1400), long)

    run(main(), horizon_s=600)


def test_kv_waits_for_a_decode_worker_longer_than_a_lease() -> None:
    async def main() -> None:
        async with box_of(transfer=TransferSettings(lease_s=1.0)) as box:
            asked = asyncio.create_task(box.ask(box.request(PROMPT, ANSWER, 1)))
            await asyncio.sleep(0.1)
            await box.kill("decode-0")
            await asyncio.sleep(8.0)
            box.start(Role.DECODE, "decode-0")
            right(box, await asked)
            assert counter(box, "pulled_tokens") == 1000
            assert counter(box, "leases_expired") == 0

    run(main(), horizon_s=600)


END = 1001
VOCABULARY = Vocabulary(
    (*(bytes([token]) if token < 128 else b"" for token in range(END)), b""), (END,), END + 1
)
LIST = Constraint(
    ConstraintKind.JSON_SCHEMA,
    json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 5, "maxItems": 8}),
)


@pytest.mark.parametrize("lost", [None, "decode-0"])
def test_a_constraint_holds_across_an_early_hand_off(lost: str | None) -> None:
    grammars = Grammars(VOCABULARY, GrammarSettings())

    async def compiled() -> None:
        await grammars.matcher(LIST)

    asyncio.run(compiled())  # Virtual time knows no threads.

    async def main(router: RouterSettings) -> list[int]:
        async with box_of(1, 2, router=router, constrain=grammars.matcher) as box:
            sampling = Sampling(max_tokens=300, seed=5)
            request = replace(box.request(PROMPT, sampling, 1), constraint=LIST)
            asked = asyncio.create_task(box.ask(request))
            if lost is not None:
                await asyncio.sleep(0.26)
                await box.kill(lost)
            answer = await asked
            assert answer.error is None
            assert answer.end is not None
            assert answer.end.finish is FinishReason.STOP
            assert box.router.flow.counters["early_handoffs"] == router.flow.early_handoff
            return answer.tokens

    early, late = (run(main(router), horizon_s=60) for router in (EARLY, LATE))
    assert early == late
    assert 5 <= len(json.loads(bytes(early[:-1]))) <= 8


class Device(LatencyRunner):
    """A pool of its own: blocks are copied to where others read them, in time and in turn."""

    host: Memory
    broken = False

    @property
    def staged(self) -> bool:
        return True

    async def to_host(self, blocks: Sequence[int]) -> None:
        await asyncio.sleep(0.003)
        if self.broken:
            raise OSError("the device is gone")
        self.host[list(blocks)] = self.memory[list(blocks)]

    async def from_host(self, blocks: Sequence[int]) -> None:
        self.memory[list(blocks)] = self.host[list(blocks)]


def devices(made: list[Device]) -> Replica:
    def replica(settings: EngineSettings) -> tuple[KvLayout, Callable[[Memory], Runner]]:
        layout = LatencyRunner.layout_of(settings.block_size)

        def make(memory: Memory) -> Runner:
            device = Device(np.zeros_like(memory), layout, LATENCY)
            device.host = memory
            made.append(device)
            return device

        return layout, make

    return replica


@pytest.mark.parametrize("after_s", [None, 0.03, 0.034, 0.1, 0.236, 0.25])
def test_pools_in_devices_hand_over_early_and_leave_nothing(after_s: float | None) -> None:
    async def main() -> None:
        async with box_of(replica=devices([])) as box:
            request = box.request(PROMPT, ANSWER, 1)
            if after_s is None:
                right(box, await box.ask(request))
                assert counter(box, "pulled_early_blocks") == 56
                return
            asked = asyncio.create_task(box.ask(request))
            await asyncio.sleep(after_s)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    run(main(), horizon_s=60)


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.22])
def test_a_device_that_breaks_while_its_blocks_are_lent_costs_that_request_only(after_s: float) -> None:
    made: list[Device] = []

    async def main() -> None:
        async with box_of(replica=devices(made)) as box:
            asked = asyncio.create_task(box.ask(box.request(PROMPT, ANSWER, 1)))
            await asyncio.sleep(after_s)
            made[0].broken = True
            assert isinstance((await asked).error, Internal)
            made[0].broken = False
            right(box, await box.ask(box.request(range(1, 900), ANSWER, 2)), range(1, 900))

    run(main(), horizon_s=60)
