"""Plays a fault schedule in virtual time, and judges it.

Whatever was drawn, every client must have fared as `_judge` says, and the fleet be whole again as
`_whole_again` and `_nothing_runs` say. The same seed plays the same way, message by message: see
`Outcome.trace`.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from faults import Play, grammars
from schedules import DEADLINE_S, END, SAFE_ROUTER, Client, Schedule
from whole_fleet import MODEL, Answer, Box

from engine.latency_runner import reference_tokens
from fleet.errors import BadRequest, DeadlineExceeded, Overloaded, Unavailable
from fleet.ids import RequestId, WorkerId
from fleet.member import MemberState
from fleet.request import FinishReason, Request, Sampling
from fleet.virtual_time import run, true_time

HEAL_LIMIT_S = 90.0
"""Virtual seconds after which a healed fleet must be idle, whole and proven."""
SETTLED_S = 0.5
"""Within so many seconds after all clients are gone nobody works for them any more, where nothing held a
message up."""
FAIR = (Unavailable, Overloaded, DeadlineExceeded)
"""What a client may be told in bad times; anything else is a defect."""
SILENT = ("freeze of a worker", "freeze of a router", "session", "crash of a router")
"""Faults by which a message may come late, or never, though both ends live."""
UNTOLD = {("kv", "slow"), ("kv partition", "")}
"""Beside those, by which a lease may run out: its reader cannot renew it, or say that it is done."""


@dataclass(slots=True)
class Outcome:
    schedule: Schedule
    problems: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    """How clients fared: `finished`, `left`, `router lost`, or the name of an error."""
    struck: Counter[str] = field(default_factory=Counter)
    """Faults that could happen, by kind."""
    counters: Counter[str] = field(default_factory=Counter)
    """Of all workers and routers that lived to the end, added up."""
    damaged: int = 0
    """Reads of KV whose bytes were made to differ."""
    seconds: float = 0.0
    """Virtual."""
    trace: list[tuple[object, ...]] = field(default_factory=list)
    """Every message, fault, choice and token, with its time."""

    def digest(self) -> str:
        """Of the trace: equal for equal runs. Lease names alone are drawn, as nobody is to guess them."""
        text = "\n".join(map(repr, self.trace))
        return hashlib.blake2b(re.sub(r"lease \w+", "lease", text).encode(), digest_size=8).hexdigest()


@contextmanager
def _defects(problems: list[str]) -> Iterator[None]:
    """What is logged as an error is a defect; all below is switched off, for speed."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            why = f": {record.exc_info[1]!r}" if record.exc_info else ""
            problems.append(f"logged: {record.getMessage()}{why}")

    root, keep, before = logging.getLogger(), Keep(logging.ERROR), logging.root.manager.disable
    root.addHandler(keep)
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
        root.removeHandler(keep)


def play(schedule: Schedule) -> Outcome:
    """Never raises: whatever goes wrong is among the problems."""
    outcome = Outcome(schedule)
    if not grammars.cache_info().currsize:
        grammars()
        # What was loaded so far is no garbage: the collector need not look at it again and again.
        gc.freeze()
    with _defects(outcome.problems):
        try:
            run(_play(schedule, outcome), horizon_s=600.0)
        except Exception as error:  # noqa: BLE001 — a seed that fails must be named, whatever fails in it
            outcome.problems.append(f"{type(error).__name__}: {error}")
    return outcome


async def _play(schedule: Schedule, outcome: Outcome) -> None:
    loop = asyncio.get_running_loop()
    game = Play(schedule)
    box = game.box

    def unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        outcome.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    loop.set_exception_handler(unhandled)
    outcome.trace, outcome.struck = game.trace, game.struck
    game.problems = outcome.problems
    game.tap()
    await box.__aenter__()
    try:
        at_rest = _tasks(box)
        game.open = True
        for fault in schedule.faults:
            if not fault.link:
                loop.call_later(fault.at, game.strike, fault)
        asking = [asyncio.create_task(_client(game, client)) for client in schedule.clients]
        looking = [asyncio.create_task(_pools_are_sound(game, asking))] if schedule.rush else []
        longest = max((fault.lasts for fault in schedule.faults), default=0.0) + 2.0
        if schedule.seed % 4:
            # Nobody is left to notice more: saves most of the time. Else faults last as long as drawn.
            await asyncio.wait(asking, timeout=longest)
        else:
            await asyncio.sleep(longest)
        game.heal()
        answers = await asyncio.wait_for(asyncio.gather(*asking), DEADLINE_S + HEAL_LIMIT_S)
        await asyncio.gather(*looking)
        await _settled(game)
        for client, answer in zip(schedule.clients, answers, strict=True):
            outcome.ends[await _judge(game, client, answer)] += 1
        await _whole_again(game)
        for number, name in enumerate(box.routers):
            await _serves(box, name, number)
        await _whole_again(game)
        box.validate()
        _nothing_runs(box, at_rest, outcome.problems)
        for router in box.routers.values():
            outcome.counters.update(router.router.flow.counters)
            outcome.counters.update(router.router.counters)
            for record in router.router.flow.records.ended:
                game.trace.append((record.as_dict(loop.time()),))
        for worker in box.workers.values():
            outcome.counters.update(worker.load().counters)
    finally:
        outcome.damaged = box.hub.damaged
        outcome.seconds = loop.time()
        if game.undoing:
            game.heal()
        await box.close()


async def _client(game: Play, client: Client) -> Answer:
    answer = Answer(client.request.id)
    await asyncio.sleep(client.at)
    if client.router not in game.box.routers:
        answer.lost = True  # nobody listens there
        return answer
    asked = true_time()
    asking = asyncio.create_task(game.box.ask_over(client.router, client.request, answer, client.stop_after))
    game.asking[client.request.id] = asking
    await asyncio.wait({asking}, timeout=client.vanish_after)
    asking.cancel()
    await asyncio.wait({asking})
    if not asking.cancelled():
        asking.result()
    late_s = true_time() - asked - client.request.deadline_s
    if late_s > 0.1 and not any(fault.kind == "freeze of a router" for fault in game.schedule.faults):
        game.problems.append(f"{client.request.id} ended {late_s:.1f} s after its deadline")
    game.trace.append((true_time(), "client", client.request.id, tuple(answer.tokens), tuple(answer.times)))
    return answer


# -- judging


async def _truth(game: Play, request: Request, count: int | None = None) -> list[int]:
    """What the answer must be, or its first `count` tokens."""
    constraint = request.constraint
    matcher = None if constraint is None else await grammars().matcher(constraint)
    most = request.sampling.max_tokens if count is None else min(count, request.sampling.max_tokens)
    return reference_tokens(request.prompt, request.sampling, most, game.box.model, matcher)


async def _judge(game: Play, client: Client, answer: Answer) -> str:
    """How the client fared; what is wrong with it goes to the problems."""
    request, schedule, problems = client.request, game.schedule, game.problems
    room = schedule.blocks * schedule.engine.block_size + 1 - len(request.prompt)
    # Of one that did not come to its end no more than its tokens is looked at.
    count = None if answer.end is not None and answer.error is None else len(answer.tokens)
    if answer.end is not None and answer.end.finish is FinishReason.CANCELLED:
        count = len(answer.tokens)
    truth = (await _truth(game, request, count))[: max(0, room)]
    who = f"{request.id} at {client.router}"
    if answer.tokens != truth[: len(answer.tokens)]:
        problems.append(f"{who}: wrong text {answer.tokens}, not {truth}")
    if answer.lost:
        return "router lost"
    leaves = request.id in game.vanished or client.vanish_after is not None or client.stop_after is not None
    if not answer.ends and leaves:
        return "left"
    if answer.ends != 1:
        problems.append(f"{who}: {answer.ends} ends")
    if answer.error is not None:
        name = type(answer.error).__name__
        if room < 1 and isinstance(answer.error, BadRequest):
            return "too long"
        due = schedule.safe and client.router == SAFE_ROUTER and request.deadline_s == DEADLINE_S
        if due or not isinstance(answer.error, FAIR):
            problems.append(f"{who}: {name}: {answer.error}")
        return name
    assert answer.end is not None
    if answer.end.finish is FinishReason.CANCELLED:
        if not leaves:
            problems.append(f"{who}: cancelled by nobody")
        return "left"
    drawn, sampling = len(truth), request.sampling
    stop = truth[-1] == END or (truth[-1] in sampling.stop_token_ids and drawn > sampling.min_tokens)
    good = FinishReason.STOP if stop else FinishReason.LENGTH
    if answer.tokens != truth or answer.end.finish is not good:
        problems.append(f"{who}: {answer.end.finish} after {len(answer.tokens)} tokens of {len(truth)}")
    usage = answer.end.usage
    if (usage.prompt_tokens, usage.completion_tokens) != (len(request.prompt), len(truth)):
        problems.append(f"{who}: usage {usage}")
    return "finished"


def _tasks(box: Box) -> dict[str, Counter[str]]:
    """Names of what runs in each process, with counts."""
    return {
        one.process.name: Counter(str(task.get_coro().__qualname__) for task in one.process.tasks())
        for one in (*box.workers.values(), *box.routers.values())
    }


def _nothing_runs(box: Box, at_rest: dict[str, Counter[str]], problems: list[str]) -> None:
    for name, tasks in _tasks(box).items():
        if more := tasks - at_rest[name]:
            problems.append(f"still running in {name}: {dict(more)}")


async def _pools_are_sound(game: Play, asking: Sequence[asyncio.Task[Answer]]) -> None:
    """As long as anybody asks."""
    while not all(one.done() for one in asking):
        for worker in game.box.workers.values():
            if hasattr(worker, "service"):
                worker.engine.validate()
        await asyncio.sleep(0.1)


async def _settled(game: Play) -> None:
    """All clients are gone. Where no message was held up, nobody works for them any more, soon, and no lease
    had to run out: whoever was done with it has said so. A loan may: it ends as its borrower gives up."""
    kinds = {kind for kind, _ in game.happened}
    if kinds.isdisjoint(SILENT):
        await asyncio.sleep(SETTLED_S)
        for worker in game.box.workers.values():
            if not hasattr(worker, "service"):
                continue
            load = worker.load()
            if worker.service.busy() or load.streams:
                game.problems.append(f"{worker.id} still works: {load.running} run, streams {load.streams}")
            gone = load.counters["leases_expired"] - load.counters["loans_expired"]
            if gone and game.happened.isdisjoint(UNTOLD):
                game.problems.append(f"{worker.id}: {gone} leases ran out, as nobody said that he was done")
    for router in game.box.routers.values():
        failovers = router.router.flow.counters["failovers"]
        if failovers and not kinds - {"vanish"}:
            game.problems.append(f"{router.name}: {failovers} failovers, and there was no fault")


async def _whole_again(game: Play) -> None:
    """All is idle, everybody knows everybody, and every index is proven and true."""
    box, names = game.box, set(game.schedule.workers)

    def left() -> str:
        if (there := {str(name) for name in box.workers}) != names:
            return f"workers are {sorted(there)}"
        for worker in box.workers.values():
            if not hasattr(worker, "service") or not worker.service.idle():
                return f"{worker.id} is not idle"
            card = worker.chassis.card
            if (card.role, card.state) != (worker.role, MemberState.READY):
                return f"{worker.id} is {card.state}, a {card.role} worker"
        for router in box.routers.values():
            if not router.knows_all():
                return f"{router.name} does not know all workers"
            if strange := [name for name in game.strangers() if router.router.index.holds(WorkerId(name))]:
                return f"the index of {router.name} has blocks of {strange}, which are gone"
            if late := router.sent_by_others():
                # A message of a life that is over may come late; nobody counts it for long.
                return f"{router.name} counts {late} of other routers, which are over"
            if not router.proven():
                return (
                    f"the index of {router.name} is not the workers' table: {router.router.index.unproven()}"
                )
        return ""

    end = true_time() + HEAL_LIMIT_S
    while why := left():
        if true_time() > end:
            raise AssertionError(f"{HEAL_LIMIT_S:g} s after everything healed: {why}")
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)


async def _serves(box: Box, name: str, number: int) -> None:
    prompt = tuple(range(number, number + 9))
    request = Request(RequestId(f"after-{number}"), MODEL, prompt, Sampling(max_tokens=6), deadline_s=20.0)
    answer = Answer(request.id)
    await box.ask_over(name, request, answer)
    assert answer.error is None, f"healed, and {name} answers {answer.error!r}"
    assert answer.tokens == box.truth(request), f"healed, and {name} says the wrong thing"
