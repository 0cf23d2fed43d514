"""Answers under a constraint, through the whole fleet and its faults: the same as without any."""

from __future__ import annotations

import asyncio
import json
import random
import re
from dataclasses import replace

import jsonschema
import pytest
from whole_fleet import Answer, Box, workload

from engine.bounds import GrammarSettings
from engine.grammar import Grammars, Vocabulary
from engine.settings import EngineSettings
from fleet.errors import BadConstraint
from fleet.member import Role
from fleet.request import Constraint, ConstraintKind, FinishReason, Request, Sampling
from fleet.virtual_time import run
from router.settings import CostSettings, RouterSettings

END = 1001
VOCABULARY = Vocabulary(
    (*(bytes([token]) if token < 128 else b"" for token in range(END)), b""), (END,), END + 1
)
"""Of ASCII, above it tokens that prompts hold and nothing writes."""
REMOTE = RouterSettings(cost=CostSettings(local_prefill_tokens=0, local_advantage=1e9))

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 10**6},
        "tags": {
            "type": "array",
            "items": {"enum": ["alpha", "beta", "gamma"]},
            "minItems": 3,
            "maxItems": 9,
        },
        "note": {"type": "string", "minLength": 10, "maxLength": 60},
        "next": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["id", "tags", "note", "next"],
}
CONSTRAINTS = [
    Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    Constraint(ConstraintKind.REGEX, r"([a-f]{4}-){5,20}[0-9]{3}"),
    Constraint(ConstraintKind.GRAMMAR, 'root ::= "yes" | "no" | "perhaps"'),
    None,
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    """All compiled: no thread is needed any more, and so virtual time will do."""
    made = Grammars(VOCABULARY, GrammarSettings())

    async def compile_all() -> None:
        for constraint in filter(None, CONSTRAINTS):
            await made.matcher(constraint)

    asyncio.run(compile_all())
    return made


def requests(box: Box, count: int, seed: int) -> list[tuple[float, Request]]:
    rows = []
    for number, (at, prompt, sampling) in enumerate(workload(count, seed, max_prompt=400)):
        constraint = CONSTRAINTS[number % len(CONSTRAINTS)]
        if constraint is not None:
            sampling = replace(sampling, max_tokens=400, ignore_eos=number % 3 == 0)
        rows.append((at, replace(box.request(prompt, sampling, number), constraint=constraint)))
    return rows


async def clients(box: Box, count: int, seed: int) -> list[asyncio.Task[Answer]]:
    async def client(at: float, request: Request) -> Answer:
        await asyncio.sleep(at)
        return await box.ask(request)

    return [asyncio.create_task(client(*row)) for row in requests(box, count, seed)]


def fits(constraint: Constraint | None, tokens: list[int]) -> None:
    if constraint is None:
        return
    assert tokens[-1] == END
    text = bytes(tokens[:-1]).decode()
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        jsonschema.validate(json.loads(text), SCHEMA)
    elif constraint.kind is ConstraintKind.REGEX:
        assert re.fullmatch(constraint.text, text)
    else:
        assert text in ("yes", "no", "perhaps")


def undisturbed(grammars: Grammars, count: int, seed: int) -> list[list[int]]:
    """One decode worker with room for all: no hand-off, no preemption."""
    found: list[list[int]] = []

    async def main() -> None:
        async with Box(0, 1, blocks=1 << 14, constrain=grammars.matcher) as box:
            for answer in await asyncio.gather(*await clients(box, count, seed)):
                assert answer.error is None, answer.error
                found.append(answer.tokens)

    run(main(), horizon_s=3600)
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_hand_off_preemption_and_lost_workers_keep_the_state(grammars: Grammars, seed: int) -> None:
    count = 60
    expected = undisturbed(grammars, count, seed)
    engine = EngineSettings(block_size=16, max_batch=24, max_step_tokens=256)

    async def main() -> None:
        async with Box(2, 2, blocks=56, engine=engine, router=REMOTE, constrain=grammars.matcher) as box:
            asked = await clients(box, count, seed)
            chance = random.Random(seed)
            for victim in ("decode-0", "prefill-0", "decode-1"):
                await asyncio.sleep(0.2 + chance.random() * 0.3)
                await box.kill(victim)
                await asyncio.sleep(0.3)
                box.start(Role(victim.partition("-")[0]), victim)
            answers = await asyncio.gather(*asked)
            for (_, request), answer, tokens in zip(
                requests(box, count, seed), answers, expected, strict=True
            ):
                assert answer.error is None, answer.error
                assert answer.tokens == tokens, request.id
                fits(request.constraint, answer.tokens)
                assert answer.end is not None
                if request.constraint is not None:
                    assert answer.end.finish is FinishReason.STOP
            counters = [worker.load().counters for worker in box.workers.values()]
            assert sum(found["preemptions"] for found in counters) > 0
            assert box.router.flow.counters["failovers"] > 0
            assert box.router.flow.counters["handoffs"] > 0

    run(main(), horizon_s=3600)


def test_what_cannot_be_compiled_ends_before_anything_runs(grammars: Grammars) -> None:
    async def main() -> None:
        async with Box(1, 1, router=REMOTE, constrain=grammars.matcher) as box:
            for number in range(20):
                bad = Constraint(ConstraintKind.REGEX, "(" * (number + 1))
                request = replace(box.request(range(200), Sampling(max_tokens=9), number), constraint=bad)
                answer = await box.ask(request)
                assert isinstance(answer.error, BadConstraint)
                assert not answer.tokens
            assert all(worker.load().counters["steps"] == 0 for worker in box.workers.values())
            assert box.router.flow.counters["failovers"] == 0

    run(main(), horizon_s=60)


def test_a_worker_without_a_vocabulary_refuses() -> None:
    async def main() -> None:
        async with Box(1, 1) as box:
            request = replace(box.request([1], Sampling(max_tokens=9), 1), constraint=CONSTRAINTS[0])
            assert isinstance((await box.ask(request)).error, BadConstraint)

    run(main(), horizon_s=60)


def test_clients_that_leave_while_their_constraint_is_compiled_leave_nothing() -> None:
    """In real time: compiling is done by a thread."""
    grammars = Grammars(VOCABULARY, GrammarSettings())

    async def main() -> None:
        async with Box(1, 1, router=REMOTE, constrain=grammars.matcher) as box:
            for number in range(8):
                slow = Constraint(ConstraintKind.REGEX, f"(a|b|cd){{1,{100 + number}}}x.{{0,50}}")
                request = replace(box.request(range(100), Sampling(max_tokens=50), number), constraint=slow)
                task = asyncio.create_task(box.ask(request))
                for _ in range(number):
                    await asyncio.sleep(0.001)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
