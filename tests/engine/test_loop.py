"""The whole engine over the latency runner: every text is the reference's, whatever happens on the way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.latency_runner import LatencyModel, LatencyRunner, ToyModel, reference_tokens
from engine.loop import Engine, Speeds
from engine.runner import Runner
from engine.settings import EngineSettings
from engine.words import (
    Batch,
    BatchResult,
    CancelledSequence,
    Chunk,
    Drawn,
    Finished,
    Held,
    NewSequence,
    Reservation,
    StepReport,
)
from fleet import virtual_time
from fleet.block_hash import HashKeys
from fleet.errors import BadRequest, Overloaded, Unavailable
from fleet.events import BlocksDropped, BlocksStored
from fleet.request import FinishReason, Sampling

SIZE = 4
KEYS = HashKeys("m", SIZE)


def new(id: str, prompt: Iterable[int], max_tokens: int = 8, **more: Any) -> NewSequence:
    sampling = Sampling(
        max_tokens,
        temperature=more.pop("temperature", 0.0),
        seed=more.pop("seed", 0),
        stop_token_ids=more.pop("stop", ()),
    )
    return NewSequence(id, tuple(prompt), sampling, more.pop("keys", KEYS), **more)


def fill(id: str) -> NewSequence:
    """Wants three blocks."""
    return new(id, range(12), generated=(1,), fill=True)


@dataclass
class Ear:
    """Listens to an engine, and lets tests wait for what it says."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    cached: set[int] = field(default_factory=set)
    on_report: Callable[[StepReport], None] | None = None
    _waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = field(default_factory=list)

    def hear(self, report: StepReport) -> None:
        self.started += report.started
        for drawn in report.drawn:
            assert isinstance(drawn, Drawn)
            self.tokens.setdefault(drawn.id, []).append(drawn.token)
        for held in report.held:
            assert held.id not in self.held
            self.held[held.id] = held
        for end in report.finished:
            assert end.id not in self.finished, "ended twice"
            self.finished[end.id] = end
        for event in report.events:
            if isinstance(event, BlocksStored):
                assert self.cached.isdisjoint(event.hashes)
                self.cached.update(event.hashes)
            else:
                assert isinstance(event, BlocksDropped)
                assert self.cached.issuperset(event.hashes)
                self.cached.difference_update(event.hashes)
        if self.on_report is not None:
            self.on_report(report)
        for condition, future in self._waiters:
            if not future.done() and condition():
                future.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        if condition():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((condition, future))
        await future

    async def end_of(self, *ids: str) -> None:
        await self.until(lambda: all(id in self.finished or id in self.held for id in ids))


@dataclass
class House:
    engine: Engine
    runner: LatencyRunner
    ear: Ear


@contextlib.asynccontextmanager
async def running(
    blocks: int = 64, *, runner: Runner | None = None, idle: bool = True, **overrides: Any
) -> AsyncIterator[House]:
    """An engine whose loop runs; at the end nothing may be left of any sequence."""
    values: dict[str, Any] = {"max_batch": 4, "max_step_tokens": 16, **overrides}
    toy = LatencyRunner.with_own_memory(blocks, SIZE)
    ear = Ear()
    engine = Engine(runner or toy, EngineSettings(**values), ear.hear)
    task = asyncio.create_task(engine.run())
    try:
        yield House(engine, toy, ear)
        if idle:
            engine.validate(idle=True)
            assert ear.cached == set(engine.cached())
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def copy_kv(source: House, held: Held, target: House, granted: Reservation) -> None:
    """What a transfer does, without the transfer."""
    for position in range(granted.cached, len(granted.blocks)):
        target.runner.memory[granted.blocks[position]] = source.runner.memory[held.blocks[position]]


prompts = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=40),  # Many common beginnings.
    st.integers(1, 45).map(lambda n: list(range(n))),
)
requests = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "max_tokens": st.integers(1, 20),
        "priority": st.integers(0, 2),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 3),
        "stop": st.sampled_from([(), (), tuple(range(32, 44))]),
    }
)
overlaps = st.sampled_from(["off", "on"])


@given(
    mix=st.lists(st.tuples(requests, st.integers(0, 5)), min_size=1, max_size=14),
    blocks=st.integers(17, 40),
    step_tokens=st.integers(5, 40),
    share=st.sampled_from([0.0, 0.25, 0.5]),
    cache=st.booleans(),
    cancels=st.dictionaries(st.integers(0, 13), st.integers(0, 40), max_size=4),
    overlap=overlaps,
)
@settings(max_examples=160, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_text_is_the_reference_whatever_is_chunked_preempted_shared_or_cancelled(
    mix: list[tuple[dict[str, Any], int]],
    blocks: int,
    step_tokens: int,
    share: float,
    cache: bool,
    cancels: dict[int, int],
    overlap: str,
) -> None:
    async def go() -> None:
        async with running(
            blocks,
            max_step_tokens=step_tokens,
            short_prompt_share=share,
            prefix_cache=cache,
            overlap=overlap,
        ) as house:
            reports = 0

            def cancel_some(_: StepReport) -> None:
                nonlocal reports
                reports += 1
                for number, when in cancels.items():
                    if when == reports:
                        house.engine.cancel(f"r{number}")
                house.engine.validate()

            house.ear.on_report = cancel_some
            for number, (request, pause) in enumerate(mix):
                house.engine.add(new(f"r{number}", **request))
                for _ in range(pause):
                    await asyncio.sleep(0)
            await house.ear.end_of(*(f"r{number}" for number in range(len(mix))))
            for number, (request, _) in enumerate(mix):
                id = f"r{number}"
                said, end = house.ear.tokens.get(id, []), house.ear.finished[id]
                sampling = new(id, **request).sampling
                expected = reference_tokens(request["prompt"], sampling)
                if end.finish is FinishReason.CANCELLED:
                    assert number in cancels
                    assert said == expected[: len(said)]
                else:
                    stopped = expected[-1] in sampling.stop_token_ids
                    assert end.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
                    assert said == expected
                    assert end.completion_tokens == len(said)

    virtual_time.run(go())


@given(
    mix=st.lists(
        st.tuples(requests, st.integers(0, 4), st.sampled_from(["whole", "part", "nothing", "cancel"])),
        min_size=1,
        max_size=8,
    ),
    blocks=st.integers(17, 40),
    overlap=overlaps,
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_sequence_handed_from_one_engine_to_another_goes_on_with_the_same_text(
    mix: list[tuple[dict[str, Any], int, str]], blocks: int, overlap: str
) -> None:
    async def hand_off(source: House, target: House, id: str, request: dict[str, Any], how: str) -> None:
        source.engine.add(new(id, hold=True, **request))
        await source.ear.end_of(id)
        held = source.ear.held[id]
        (first,) = source.ear.tokens[id]
        expected = reference_tokens(request["prompt"], new(id, **request).sampling)
        assert first == expected[0]
        assert held.tokens == len(request["prompt"])
        try:
            if held.finish is not None:
                assert len(expected) == 1
                return
            granted = await target.engine.reserve(new(id, fill=True, generated=(first,), **request))
            await asyncio.sleep(0)
            if how == "cancel":
                assert target.engine.cancel(id)
                await target.ear.end_of(id)
                copy_kv(source, held, target, granted)  # It comes late, and harms nobody.
                target.engine.filled(id, granted.tokens)
                return
            if how == "whole":
                copy_kv(source, held, target, granted)
            part = {"whole": granted.tokens, "part": granted.cached * SIZE, "nothing": 0}[how]
            target.engine.filled(id, part)
            await target.ear.end_of(id)
            assert [first, *target.ear.tokens[id]] == expected
            assert target.ear.finished[id].completion_tokens == len(expected)
        finally:
            source.engine.release(id)

    async def go() -> None:
        async with (
            running(blocks, overlap=overlap) as source,
            running(blocks, overlap=overlap) as target,
            asyncio.TaskGroup() as group,
        ):
            for number, (request, pause, how) in enumerate(mix):
                group.create_task(hand_off(source, target, f"r{number}", request, how))
                for _ in range(pause):
                    await asyncio.sleep(0)

    virtual_time.run(go())


def test_the_text_is_the_same_through_preemption_and_prefix_hits() -> None:
    async def go() -> None:
        async with running(18, max_batch=6) as house:
            requests = {f"r{n}": new(f"r{n}", [*range(8), n, n], 20 + n, temperature=1.0) for n in range(10)}
            for request in requests.values():
                house.engine.add(request)
            await house.ear.end_of(*requests)
            for id, request in requests.items():
                assert house.ear.tokens[id] == reference_tokens(request.prompt, request.sampling)
            counters = house.engine.load().counters
            assert counters["preemptions"] > 0
            assert counters["recomputed_tokens"] > 0
            assert counters["block_hits"] > 0
            assert counters["block_evictions"] > 0

    virtual_time.run(go())


def test_continuing_with_generated_tokens_and_no_kv_gives_the_same_text() -> None:
    async def go() -> None:
        async with running() as house:
            prompt = range(30, 47)
            whole = reference_tokens(tuple(prompt), new("x", prompt, 12, temperature=1.0, seed=9).sampling)
            for cut in (0, 1, 5, 11):
                id = f"c{cut}"
                house.engine.add(new(id, prompt, 12, temperature=1.0, seed=9, generated=tuple(whole[:cut])))
                await house.ear.end_of(id)
                assert house.ear.tokens[id] == whole[cut:]

    virtual_time.run(go())


def test_stale_kv_would_be_noticed() -> None:
    """The proof that the tests above can fail: unfilled blocks called filled give another text."""

    async def go() -> None:
        async with running() as house:
            prompt = tuple(range(20))
            granted = await house.engine.reserve(new("a", prompt, 9, generated=(50,), fill=True))
            house.engine.filled("a", granted.tokens)
            await house.ear.end_of("a")
            assert house.ear.tokens["a"] != reference_tokens((*prompt, 50), new("a", prompt, 8).sampling)

    virtual_time.run(go())


@dataclass
class BrokenOnce:
    """A real runner whose device fails in one step."""

    inner: LatencyRunner
    fail_at: int
    error: Exception
    steps: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def run(self, batch: Batch) -> BatchResult:
        self.steps += 1
        if self.steps == self.fail_at:
            raise self.error
        return await self.inner.run(batch)


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize(
    ("error", "name"), [(RuntimeError("secret"), "Internal"), (Unavailable("device away"), "Unavailable")]
)
def test_a_failure_of_the_runner_ends_its_batch_only(error: Exception, name: str, overlap: str) -> None:
    async def go() -> None:
        broken = BrokenOnce(LatencyRunner.with_own_memory(64, SIZE), 3, error)
        async with running(runner=broken, max_batch=2, overlap=overlap) as house:
            for id in "abc":
                house.engine.add(new(id, range(5)))
            await house.ear.end_of("a", "b", "c")
            ends = [house.ear.finished[id] for id in "abc"]
            assert [end.finish for end in ends] == [FinishReason.FAILED] * 2 + [FinishReason.LENGTH]
            assert ends[0].error == name
            assert "secret" not in ends[0].message
            assert house.engine.load().counters["runner_failures"] == 1

    virtual_time.run(go())


def test_a_runner_that_answers_too_little_fails_its_batch() -> None:
    class Silent(BrokenOnce):
        async def run(self, batch: Batch) -> BatchResult:
            return BatchResult(())

    async def go() -> None:
        runner = Silent(LatencyRunner.with_own_memory(8, SIZE), 0, RuntimeError())
        async with running(runner=runner) as house:
            house.engine.add(new("a", range(5)))
            await house.ear.end_of("a")
            assert "answered 0 of 1" in house.ear.finished["a"].message

    virtual_time.run(go())


def test_refusals_are_raised_at_once() -> None:
    async def go() -> None:
        async with running(4, max_waiting=1) as house:
            with pytest.raises(BadRequest) as error:
                house.engine.add(new("a", range(17)))
            assert error.value.code == "context_length_exceeded"
            with pytest.raises(BadRequest):
                await house.engine.reserve(new("a", range(17), fill=True))
            house.engine.add(new("a", range(5)))
            with pytest.raises(Overloaded):
                house.engine.add(new("b", range(5)))
            with pytest.raises(ValueError, match="reserved, not added"):
                house.engine.add(new("b", range(5), fill=True))
            with pytest.raises(ValueError, match="to be filled"):
                await house.engine.reserve(new("b", range(5)))
            await house.ear.end_of("a")

    virtual_time.run(go())


def test_a_sequence_that_fills_all_blocks_ends_by_its_length() -> None:
    """As at the model's own limit: a good end, and whoever asks for the longest sequence is told this one."""

    async def go() -> None:
        async with running(6) as house:
            assert house.engine.max_tokens == 6 * SIZE + 1
            for id, length in (("long", 6 * SIZE - 3), ("longest", 6 * SIZE)):
                house.engine.add(new(id, range(length), 20))
                await house.ear.end_of(id)
                assert house.ear.finished[id].finish is FinishReason.LENGTH
                count = 6 * SIZE + 1 - length
                assert house.ear.tokens[id] == reference_tokens(range(length), Sampling(20), count)
            with pytest.raises(BadRequest):
                house.engine.add(new("longer", range(6 * SIZE + 1)))

    virtual_time.run(go())


def test_a_reservation_cancelled_while_it_waits_raises_and_ends_once() -> None:
    async def go() -> None:
        async with running(4) as house:
            first = await house.engine.reserve(fill("first"))
            assert len(first.blocks) == 3
            second = asyncio.create_task(house.engine.reserve(fill("second")))
            await asyncio.sleep(0)
            assert house.engine.cancel("second")
            with pytest.raises(CancelledSequence):
                await second
            await house.ear.end_of("second")
            house.engine.filled("first", 0)
            await house.ear.end_of("first")

    virtual_time.run(go())


def test_a_caller_that_goes_away_while_it_waits_leaves_nothing_behind() -> None:
    async def go() -> None:
        async with running(4) as house:
            await house.engine.reserve(fill("first"))
            waiting = asyncio.create_task(house.engine.reserve(fill("second")))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            house.engine.filled("first", 0)
            await house.ear.end_of("first", "second")

    virtual_time.run(go())


def test_a_caller_that_goes_away_in_the_moment_of_the_grant_leaves_nothing_behind() -> None:
    async def go() -> None:
        async with running(4) as house:
            await house.engine.reserve(fill("first"))
            waiting = asyncio.create_task(house.engine.reserve(fill("second")))
            await asyncio.sleep(0)

            def leave(report: StepReport) -> None:
                if any(end.id == "first" for end in report.finished):
                    assert house.engine.load().waiting == 1
                    waiting.cancel()

            house.ear.on_report = leave
            house.engine.cancel("first")
            house.engine.filled("first", 0)
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await house.ear.end_of("first", "second")
            assert house.engine.load().counters["filled_tokens"] == 0

    virtual_time.run(go())


def test_a_stopped_engine_lets_nobody_wait_for_ever() -> None:
    async def go() -> None:
        async with running(4, idle=False) as house:
            await house.engine.reserve(fill("first"))
            second = asyncio.create_task(house.engine.reserve(fill("second")))
            await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="stopped"):
            await second

    virtual_time.run(go())


def test_load_tells_the_state_of_work_and_its_speed_and_unknown_is_none() -> None:
    async def go() -> None:
        latency = LatencyModel(base_s=0.5, per_prompt_token_s=0.05, per_decode_s=0.25)
        toy = LatencyRunner.with_own_memory(64, SIZE, latency)
        async with running(runner=toy, max_batch=2) as house:
            load = house.engine.load()
            assert (load.running, load.waiting, load.queued_tokens, load.stalled_s) == (0, 0, 0, 0.0)
            assert (load.prefill_tokens_s, load.decode_step_s, load.decode_batch) == (None, None, None)
            assert load.blocks_total == load.blocks_free == 64
            for id in "ab":
                house.engine.add(new(id, (ord(id),) * 8, 10))
            assert house.engine.load().queued_tokens == 16
            await house.ear.until(lambda: sorted(house.ear.started) == ["a", "b"])
            load = house.engine.load()
            assert (load.running, load.waiting, load.blocks_free) == (2, 0, 60)
            await house.ear.end_of("a", "b")
            load = house.engine.load()
            assert load.prefill_tokens_s == pytest.approx(16 / (0.5 + 16 * 0.05))
            assert load.decode_step_s == pytest.approx(0.5 + 2 * 0.25)
            assert load.decode_batch == 2
            assert load.counters["steps"] == 10
            assert load.counters["prompt_tokens"] == 16
            assert load.counters["generated_tokens"] == 20
            assert load.counters["computed_tokens"] == 16 + 2 * 9
        assert asyncio.get_running_loop().time() == pytest.approx(1.3 + 9 * 1.0)

    virtual_time.run(go())


def test_a_step_planned_ahead_takes_its_own_time_and_begins_when_the_one_before_has_ended() -> None:
    async def go() -> None:
        toy = LatencyRunner.with_own_memory(64, SIZE, LatencyModel(base_s=0.5, per_prompt_token_s=0.25))
        async with running(runner=toy, overlap="on") as house:
            house.engine.add(new("a", range(8), 10))
            await asyncio.sleep(2.4)
            assert house.engine.load().counters["steps"] == 2, "the second is planned, the first not over"
            await house.ear.end_of("a")
            load = house.engine.load()
            assert load.prefill_tokens_s == pytest.approx(8 / 2.5)
            assert load.decode_step_s == pytest.approx(0.5)
            assert load.counters["steps"] == 10
        assert asyncio.get_running_loop().time() == pytest.approx(2.5 + 9 * 0.5)

    virtual_time.run(go())


def test_two_steps_are_asked_for_at_once_where_the_runner_is_asynchronous_or_it_is_set() -> None:
    class Device(LatencyRunner):
        asynchronous = True  # type: ignore[assignment]

    async def planned(kind: type[LatencyRunner], overlap: str) -> int:
        runner = kind.with_own_memory(64, SIZE, LatencyModel(base_s=1.0))
        async with running(runner=runner, idle=False, overlap=overlap) as house:
            house.engine.add(new("a", range(8), 10))
            await asyncio.sleep(0.5)
            return house.engine.load().counters["steps"]

    async def go() -> None:
        for kind, auto in ((LatencyRunner, 1), (Device, 2)):
            assert await planned(kind, "auto") == auto
            assert (await planned(kind, "off"), await planned(kind, "on")) == (1, 2)

    virtual_time.run(go())


def test_steps_are_sized_anew_while_sequences_run() -> None:
    async def go() -> None:
        wide = EngineSettings(block_size=SIZE, max_batch=4, max_step_tokens=64)
        narrow = EngineSettings(block_size=SIZE, max_batch=2, max_step_tokens=8)
        toy = LatencyRunner.with_own_memory(64, SIZE, LatencyModel(base_s=1.0))
        async with running(runner=toy, max_step_tokens=64) as house:
            for name in "abcd":
                house.engine.add(new(name, range(4), 8))
            await asyncio.sleep(1.5)
            assert house.engine.load().running == 4
            house.engine.retune(narrow)
            told = house.engine.load()
            assert (told.prefill_tokens_s, told.decode_step_s, told.decode_batch) == (None, None, None)
            house.engine.add(new("e", range(24), 2))
            await house.ear.end_of("a")
            # They ended in one batch, though it is larger than a new one may be.
            assert set(house.ear.finished) == set("abcd")
            house.engine.validate()
            await house.ear.end_of("e")
            assert house.engine.load().counters["steps"] == 8 + 4, "24 tokens at 8 a step, then one"
            house.engine.retune(wide)
            for name in "fghi":
                house.engine.add(new(name, range(4), 8))
            await asyncio.sleep(1.5)
            assert house.engine.load().running == 4
            await house.ear.end_of(*"fghi")

    virtual_time.run(go())


def test_no_progress_shows_only_while_there_is_work() -> None:
    async def go() -> None:
        toy = LatencyRunner.with_own_memory(4, SIZE, LatencyModel(base_s=60.0))
        async with running(runner=toy) as house:
            await asyncio.sleep(100)
            house.engine.add(new("a", range(5), 2))
            assert house.engine.load().stalled_s == 0
            await asyncio.sleep(59)
            assert house.engine.load().stalled_s == 59
            await asyncio.sleep(2)
            assert house.engine.load().stalled_s == 1
            await house.ear.end_of("a")
            await asyncio.sleep(100)
            assert house.engine.load().stalled_s == 0
            # What waits for blocks that others have is not stalled: they give them back in their time.
            house.engine.add(new("held", range(20, 33), hold=True))
            await house.ear.end_of("held")
            house.engine.add(new("b", range(5), 1))
            await asyncio.sleep(50)
            assert (house.engine.load().waiting, house.engine.load().stalled_s) == (1, 0)
            house.engine.release("held")
            await asyncio.sleep(59)
            assert house.engine.load().stalled_s == 59
            await house.ear.end_of("b")

    virtual_time.run(go())


def test_an_idle_engine_does_nothing_until_it_is_woken() -> None:
    """In virtual time anything that polls would be found out: nothing is ready, no timer is set."""

    async def go() -> None:
        async with running(4) as house:
            await asyncio.get_running_loop().create_future()
            raise AssertionError(house)

    with pytest.raises(virtual_time.Deadlock):
        virtual_time.run(go())


def test_two_models_that_agree_continue_each_other_and_others_do_not() -> None:
    prompt, sampling = tuple(range(9)), new("x", range(9)).sampling
    assert reference_tokens(prompt, sampling, model=ToyModel(tokens=50)) != reference_tokens(prompt, sampling)


def test_a_process_that_stood_still_for_a_moment_has_not_become_slow() -> None:
    decode = Batch((Chunk(0, (1,), 3, (9,), True, Sampling(max_tokens=9)),))
    prompt = Batch((Chunk(0, tuple(range(100)), 0, (1, 2, 3), False, Sampling(max_tokens=9)),))
    speeds = Speeds()
    for batch, usual_s in ((decode, 0.01), (prompt, 0.1)):
        for seconds in (usual_s, usual_s, 8.0):
            speeds.add(batch, seconds)
    assert speeds.decode_step_s is not None
    assert speeds.decode_step_s < 0.02
    assert speeds.prefill_tokens_s is not None
    assert speeds.prefill_tokens_s > 500
    for _ in range(60):  # but one that is slow from now on is soon known to be
        speeds.add(decode, 0.5)
    assert speeds.decode_step_s > 0.4
