"""A device runs out of memory: the step is computed in parts, answers are the same, and the worker lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.latency_runner import LatencyModel, LatencyRunner
from engine.loop import Engine
from engine.settings import EngineSettings
from engine.sparing import OutOfMemory, Sparing, joined, split
from engine.torch_runner import TorchRunner
from engine.words import Batch, BatchResult, Chunk, Drawn, Finished, NewSequence, StepReport
from fleet.block_hash import HashKeys
from fleet.errors import Overloaded
from fleet.request import FinishReason, Sampling, TokenLogprobs


def chunk(slot: int, tokens: int, draw: bool = True, scored: bool = False) -> Chunk:
    given = tuple(range(100 * slot, 100 * slot + tokens))
    return Chunk(
        slot, given, 5, (0,), draw, Sampling(4), targets=tuple(t + 1 for t in given) if scored else ()
    )


class Device:
    """Computes what cannot be mistaken for anything else, of at most `room` tokens at once."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.ran: list[int] = []

    def __call__(self, batch: Batch) -> BatchResult:
        tokens = sum(len(chunk.tokens) for chunk in batch.chunks)
        if tokens > self.room:
            raise OutOfMemory(f"no room for {tokens}")
        self.ran.append(tokens)
        drawn = tuple(c.start + len(c.tokens) + 1000 * c.slot if c.draw else None for c in batch.chunks)
        found = tuple(TokenLogprobs(-float(token)) if token is not None else None for token in drawn)
        scores = tuple(tuple(TokenLogprobs(-float(t)) for t in c.targets) for c in batch.chunks)
        return BatchResult(drawn, found if any(found) else (), scores if any(scores) else ())


@given(
    st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 60),
)
def test_parts_give_what_the_whole_gives(shapes: list[tuple[int, bool, bool]], room: int) -> None:
    batch = Batch(tuple(chunk(slot, *shape) for slot, shape in enumerate(shapes)))
    assert joined(batch, Sparing(Device(room)).run(batch)) == Device(10**6)(batch)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 50))
def test_a_split_keeps_every_token_in_order(lengths: list[int], limit: int) -> None:
    batch = Batch(tuple(chunk(slot, length) for slot, length in enumerate(lengths)))
    parts = split(batch, limit)
    assert all(0 < sum(len(c.tokens) for c in part.chunks) <= limit for part in parts)
    for whole in batch.chunks:
        pieces = [c for part in parts for c in part.chunks if c.slot == whole.slot]
        assert sum((piece.tokens for piece in pieces), ()) == whole.tokens
        assert [piece.draw for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        starts = [piece.start for piece in pieces]
        assert starts == [5 + sum(len(p.tokens) for p in pieces[:i]) for i in range(len(pieces))]


def test_later_steps_are_kept_small_and_grow_again() -> None:
    device = Device(16)
    sparing = Sparing(device)
    batch = Batch((chunk(0, 40),))
    sparing.run(batch)
    assert (sparing.limit, sparing.splits) == (10, 2)
    device.ran.clear()
    sparing.run(batch)
    assert device.ran == [10] * 4, "nothing is tried that failed before"
    device.room = 100
    for _ in range(200):
        sparing.run(batch)
    assert sparing.limit is None
    assert device.ran[-1] == 40
    assert sparing.splits == 2


def test_without_room_for_one_token_the_step_fails_and_the_next_may_not() -> None:
    device = Device(0)
    sparing = Sparing(device)
    with pytest.raises(Overloaded, match=r"no memory for a step of one token: no room for 1"):
        sparing.run(Batch((chunk(0, 5),)))
    device.room = 9
    batch = Batch((chunk(0, 5),))
    assert joined(batch, sparing.run(batch)).tokens == (10,)


def test_an_engine_on_a_scarce_device_answers_everybody() -> None:
    """The latency model's tokens depend on all KV before them: what is lost would show."""

    def served(room: int) -> dict[str, list[int]]:
        texts: dict[str, list[int]] = {}
        ended: dict[str, FinishReason] = {}
        inner = LatencyRunner.with_own_memory(64, 16, LatencyModel(0.0, 0.0, 0.0, 0.0))

        def step(batch: Batch) -> BatchResult:
            if sum(len(chunk.tokens) for chunk in batch.chunks) > room:
                raise OutOfMemory("none left")
            computing = inner.run(batch)
            while True:
                try:
                    computing.send(None)
                except StopIteration as done:
                    result: BatchResult = done.value
                    return result

        sparing = Sparing(step)

        class Scarce:
            def __getattr__(self, name: str) -> object:
                return getattr(inner, name)

            async def run(self, batch: Batch) -> BatchResult:
                return joined(batch, sparing.run(batch))

        def sink(report: StepReport) -> None:
            for drawn in report.drawn:
                assert isinstance(drawn, Drawn)
                texts.setdefault(drawn.id, []).append(drawn.token)
            for end in report.finished:
                assert isinstance(end, Finished)
                ended[end.id] = end.finish

        async def main() -> None:
            settings = EngineSettings(max_batch=4, max_step_tokens=64)
            engine = Engine(Scarce(), settings, sink)  # type: ignore[arg-type]
            running = asyncio.ensure_future(engine.run())
            for number, length in enumerate((3, 90, 40, 200)):
                prompt = tuple(range(2, 2 + length))
                engine.add(NewSequence(str(number), prompt, Sampling(6, temperature=0), HashKeys("m", 16)))
            while len(ended) < 4:
                await asyncio.sleep(0)
            engine.validate(idle=True)
            running.cancel()

        asyncio.run(main())
        assert set(ended.values()) == {FinishReason.LENGTH}
        return texts

    assert served(room=7) == served(room=10**6)


def test_a_model_says_the_same_in_parts(small_runner: Callable[..., TorchRunner]) -> None:
    def answered(room: int) -> list[BatchResult]:
        runner = small_runner()

        def step(batch: Batch) -> BatchResult:
            if sum(len(chunk.tokens) for chunk in batch.chunks) > room:
                raise OutOfMemory("none left")
            return runner.step(batch)

        sparing = Sparing(step)
        greedy = Sampling(9, temperature=0, prompt_logprobs=1)
        prompt = tuple(range(3, 43))
        first = Chunk(0, prompt, 0, (4, 2, 7), True, greedy, targets=prompt[1:])
        other = Chunk(1, (9,), 0, (5,), True, greedy)
        batch = Batch((first, other))
        return [joined(batch, sparing.run(batch))]

    whole, parts = answered(10**6), answered(6)
    assert parts[0].tokens == whole[0].tokens
    wanted = [found.logprob for found in whole[0].scores[0]]
    assert [found.logprob for found in parts[0].scores[0]] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no memory for the scores of a step"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
        ),
    ],
    ids=["kernels", "torch"],
)
def test_a_host_without_memory_is_a_device_without(
    error: Exception, small_runner: Callable[..., TorchRunner]
) -> None:
    def answered(room: int) -> BatchResult:
        runner = small_runner()
        attend = runner._attention.attend

        def scarce(layer: int, queries: Tensor, *given: Any) -> Tensor:
            if len(queries) > room:
                raise error
            found: Tensor = attend(layer, queries, *given)
            return found

        runner._attention.attend = scarce  # type: ignore[method-assign]
        chunk = Chunk(0, tuple(range(3, 43)), 0, (4, 2, 7), True, Sampling(9, temperature=0))
        return asyncio.run(runner.run(Batch((chunk,))))

    assert answered(7).tokens == answered(100).tokens
    error = RuntimeError("a defect")
    with pytest.raises(RuntimeError, match="a defect"):
        answered(7)
