"""The way of a request through the fleet, in virtual time, over scripted workers: every token once, one end,
and nothing left behind on either leg, whatever fails and whenever it is stopped."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import uvloop
from router_fleet import REMOTE, Answer, Fleet, ask, ask_and_settle, in_fleet
from scripted_worker import PRINT, Script, ScriptedWorker, answer, card, request

from fleet.errors import (
    BadRequest,
    DeadlineExceeded,
    Internal,
    NotFound,
    Overloaded,
    Unavailable,
    WorkerLost,
)
from fleet.handoff import CancelReason, DecodeJob, PrefillJob
from fleet.ids import WorkerId
from fleet.member import Role
from fleet.request import FinishReason, Sampling
from fleet.stages import Stage, Timeline
from router.openai.stream import Choice, follow_all
from router.record import HandoffRecord, HandoffState, Transition
from router.run import RunEnd, RunToken
from router.settings import FlowSettings
from router.text.answer import Answer as Writing
from router.text.detokenize import Vocabulary


def test_prefill_then_decode_with_the_ticket() -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request(prompt=100, max_tokens=8))
        assert len(got.tokens) == 8
        assert got.end.finish is FinishReason.LENGTH
        assert (got.end.usage.prompt_tokens, got.end.usage.completion_tokens) == (100, 8)
        (prefill,), (decode,) = fleet.workers[WorkerId("p1")].jobs, fleet.workers[WorkerId("d1")].jobs
        assert isinstance(prefill, PrefillJob)
        assert isinstance(decode, DecodeJob)
        assert decode.ticket is not None
        assert decode.generated == (answer(0),)
        assert fleet.workers[WorkerId("p1")].releases == [decode.ticket.lease]
        marks = got.timeline.marks
        order = [
            Stage.PREFILL_SENT,
            Stage.PREFILL_STARTED,
            Stage.FIRST_TOKEN,
            Stage.DECODE_SENT,
            Stage.PULL_STARTED,
            Stage.PULL_ENDED,
            Stage.SECOND_TOKEN,
            Stage.ENDED,
        ]
        assert [marks[stage] for stage in order] == sorted(marks[stage] for stage in order)
        told = fleet.router.explain(request().id)
        assert told is not None
        assert [step["state"] for step in told["transitions"]] == [
            "reserved",
            "prefilling",
            "ready",
            "pulling",
            "done",
        ]
        assert "queued tokens" in told["transitions"][1]["why"]

    in_fleet(body)


def test_decode_workers_alone_serve() -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request())
        assert len(got.tokens) == 8
        (job,) = fleet.workers[WorkerId("d1")].jobs
        assert isinstance(job, DecodeJob)
        assert job.ticket is None

    in_fleet(body, prefill=())


def test_an_answer_that_ends_with_its_first_token_needs_no_decode_worker() -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request())
        assert (got.tokens, got.end.finish) == ([answer(0)], FinishReason.STOP)
        assert fleet.workers[WorkerId("d1")].jobs == []

    in_fleet(body, prefill=(Script(finish_with_first=FinishReason.STOP),))


def test_the_first_token_is_said_before_the_second_is_made_and_decode_does_not_wait_for_the_client() -> None:
    async def body(fleet: Fleet) -> None:
        run = fleet.router.flow.start(request(), Timeline(asyncio.get_running_loop().time()))
        events = aiter(run)
        first = await anext(events)
        assert first == RunToken(answer(0))
        await fleet.until(lambda: bool(fleet.workers[WorkerId("d1")].jobs))
        rest = [event async for event in events]
        assert len(rest) == 8
        await run.stop(CancelReason.CLIENT)

    in_fleet(body)


@pytest.mark.parametrize("die_at", range(8))
def test_a_worker_that_dies_at_any_token_costs_nothing_but_time(die_at: int) -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request(max_tokens=8))
        assert len(got.tokens) == 8
        assert got.end.finish is FinishReason.LENGTH
        assert got.end.usage.completion_tokens == 8
        assert fleet.router.flow.counters["failovers"] == 1

    dying = Script(die_at=die_at)
    # One of two; the cost makes the first choice sure: the other is far slower until it is needed.
    if die_at == 0:
        in_fleet(body, prefill=(dying,))
    else:

        async def with_spare(fleet: Fleet) -> None:
            (first,) = [w for w in fleet.workers.values() if w.script is dying]
            task = asyncio.create_task(body(fleet))
            await fleet.until(lambda: bool(first.jobs))
            await fleet.add(card("d2"))
            await task

        in_fleet(with_spare, decode=(dying,), settings=replace(REMOTE, flow=FlowSettings(worker_wait_s=5.0)))


def test_two_decode_workers_lost_in_turn() -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request(max_tokens=12))
        assert len(got.tokens) == 12
        assert fleet.router.flow.counters["failovers"] == 2
        (last,) = fleet.workers[WorkerId("d3")].jobs
        assert isinstance(last, DecodeJob)
        assert last.ticket is None
        assert len(last.generated) == 7
        told = fleet.router.explain(request().id)
        assert told is not None
        assert [step["state"] for step in told["transitions"]] == [
            "reserved", "prefilling", "ready", "pulling", "reserved", "prefilling", "reserved", "prefilling",
            "done",
        ]  # fmt: skip

    async def in_turn(fleet: Fleet) -> None:
        task = asyncio.create_task(body(fleet))
        for n in (2, 3):
            await fleet.until(lambda n=n: bool(fleet.workers[WorkerId(f"d{n - 1}")].jobs))  # type: ignore[misc]
            await fleet.add(card(f"d{n}"), Script(die_at=7) if n == 2 else Script())
        await task

    in_fleet(
        in_turn, decode=(Script(die_at=4),), settings=replace(REMOTE, flow=FlowSettings(worker_wait_s=9))
    )


def test_a_decode_worker_lost_before_it_pulled_is_followed_with_the_same_ticket() -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request())
        assert len(got.tokens) == 8
        jobs = [job for w in fleet.workers.values() for job in w.jobs if isinstance(job, DecodeJob)]
        assert len(jobs) == 2
        assert jobs[0].ticket == jobs[1].ticket is not None

    # Whichever of the two is taken first, it is the one that dies.
    async def either(fleet: Fleet) -> None:
        workers = [fleet.workers[WorkerId(f"d{n}")] for n in (1, 2)]

        def die_first(worker: ScriptedWorker) -> None:
            for other in workers:
                other.script = Script()
            fleet.kill(worker.card.id)

        for worker in workers:
            worker.die = lambda worker=worker: die_first(worker)  # type: ignore[misc]
        await body(fleet)

    in_fleet(either, decode=(Script(die_at=1), Script(die_at=1)))


def test_a_broken_session_is_used_again_when_it_is_open_again() -> None:
    async def body(fleet: Fleet) -> None:
        worker = fleet.workers[WorkerId("d1")]
        job = asyncio.create_task(ask(fleet, request(max_tokens=100)))
        await fleet.until(lambda: bool(worker.jobs))
        await asyncio.sleep(0.3)
        fleet.wire.kill(worker.card.address)
        await asyncio.sleep(1.0)
        fleet.wire.serve(worker, worker.card.address)
        assert len((await job).tokens) == 100
        first, second = worker.jobs
        assert isinstance(first, DecodeJob)
        assert isinstance(second, DecodeJob)
        assert len(second.generated) > 20
        await fleet.settle()
        fleet.check_idle()

    in_fleet(body, settings=replace(REMOTE, flow=FlowSettings(worker_wait_s=10.0)))


@pytest.mark.parametrize("turns", range(8))
def test_a_session_that_ends_as_a_job_is_sent_is_used_again_too(turns: int) -> None:
    """In one of these turns of the loop the session has ended and its link does not know it yet."""

    async def body(fleet: Fleet) -> None:
        worker = fleet.workers[WorkerId("d1")]
        fleet.wire.kill(worker.card.address)
        for _ in range(turns):
            await asyncio.sleep(0)
        job = asyncio.create_task(ask(fleet, request()))
        await asyncio.sleep(1.0)
        fleet.wire.serve(worker, worker.card.address)
        got = await job
        assert (got.error, len(got.tokens)) == (None, 8)
        await fleet.settle()
        fleet.check_idle()

    in_fleet(body, prefill=(), settings=replace(REMOTE, flow=FlowSettings(worker_wait_s=10.0)))


def test_a_prefill_that_kept_no_kv_is_computed_again_by_the_decode_worker() -> None:
    async def body(fleet: Fleet) -> None:
        assert len((await ask_and_settle(fleet, request())).tokens) == 8
        (job,) = fleet.workers[WorkerId("d1")].jobs
        assert isinstance(job, DecodeJob)
        assert (job.ticket, job.generated) == (None, (answer(0),))

    in_fleet(body, prefill=(Script(keep=False),))


def test_a_lease_too_old_is_not_offered_again() -> None:
    async def body(fleet: Fleet) -> None:
        workers = [fleet.workers[WorkerId(f"d{n}")] for n in (1, 2)]

        def die_first(worker: ScriptedWorker) -> None:
            for other in workers:
                other.script = Script()
            fleet.kill(worker.card.id)

        for worker in workers:
            worker.die = lambda worker=worker: die_first(worker)  # type: ignore[misc]
        got = await ask_and_settle(fleet, request())
        assert len(got.tokens) == 8
        jobs = [job for w in workers for job in w.jobs if isinstance(job, DecodeJob)]
        assert sorted(job.ticket is None for job in jobs) == [False, True]

    slow = Script(die_at=1, step_s=2.5)
    in_fleet(body, prefill=(Script(lease_s=3.0),), decode=(slow, slow))


def test_when_only_the_end_was_lost_nobody_is_asked_again() -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request(max_tokens=5))
        assert (len(got.tokens), got.end.finish) == (5, FinishReason.LENGTH)
        assert fleet.router.flow.counters["failovers"] == 0

    in_fleet(body, decode=(Script(lose_end=True),))


def test_a_stop_token_whose_end_was_lost_is_a_stop() -> None:
    async def body(fleet: Fleet) -> None:
        sampling = Sampling(max_tokens=50, stop_token_ids=(answer(3),))
        got = await ask_and_settle(fleet, request(sampling=sampling))
        assert (len(got.tokens), got.end.finish) == (4, FinishReason.STOP)

    in_fleet(body, decode=(Script(die_at=4),))


def test_a_refusal_goes_to_another_worker_and_all_refusals_to_the_client() -> None:
    async def refused(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request())
        assert isinstance(got.error, Overloaded)
        assert got.error.retry_after_s == 7.0, "what the worker said"
        assert fleet.router.flow.counters["refusals"] == 3

    in_fleet(refused, prefill=(Script(refuse=True), Script(refuse=True)), decode=(Script(refuse=True),))

    async def taken(fleet: Fleet) -> None:
        for n in range(10):
            assert len((await ask_and_settle(fleet, request(f"r{n}"))).tokens) == 8
        assert fleet.router.flow.counters["refusals"] > 0

    in_fleet(taken, prefill=(Script(refuse=True), Script()), decode=(Script(refuse=True), Script()))


def test_decode_workers_that_refuse_after_prefill_leave_no_lease_behind() -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request())
        assert got.tokens == [answer(0)]
        assert isinstance(got.error, Overloaded)

    in_fleet(body, decode=(Script(refuse=True),))


def states(fleet: Fleet) -> list[str]:
    told = fleet.router.explain(request().id)
    assert told is not None
    return [step["state"] for step in told["transitions"]]


def test_a_decode_worker_begins_while_the_prompt_is_computed_and_is_told_its_first_token() -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request())
        assert len(got.tokens) == 8
        (job,) = [job for w in fleet.workers.values() for job in w.jobs if isinstance(job, DecodeJob)]
        assert job.generated == ()
        assert states(fleet) == ["reserved", "prefilling", "lending", "ready", "pulling", "done"]
        assert fleet.router.flow.counters["early_handoffs"] == fleet.router.flow.counters["handoffs"] == 1

    in_fleet(body, prefill=(Script(lend=True),))


def test_early_hand_off_can_be_switched_off() -> None:
    async def body(fleet: Fleet) -> None:
        assert len((await ask_and_settle(fleet, request())).tokens) == 8
        assert "lending" not in states(fleet)

    settings = replace(REMOTE, flow=FlowSettings(early_handoff=False))
    in_fleet(body, prefill=(Script(lend=True),), settings=settings)


@pytest.mark.parametrize("error", ["BadRequest", "Overloaded", "Internal", "WorkerLost"])
def test_an_early_leg_that_fails_costs_the_request_nothing(error: str) -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request())
        assert len(got.tokens) == 8, got.error
        assert states(fleet) == [
            "reserved", "prefilling", "lending", "prefilling", "ready", "pulling", "done"
        ]  # fmt: skip
        counters = fleet.router.flow.counters
        assert (counters["early_legs"], counters["early_handoffs"], counters["handoffs"]) == (1, 0, 1)
        assert counters["failovers"] == counters["refusals"] == 0

    in_fleet(body, prefill=(Script(lend=True),), decode=(Script(early_error=error),))


def test_an_early_leg_whose_loan_has_ended_makes_way_for_one_that_reads_the_whole() -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request())
        assert len(got.tokens) == 8, got.error
        jobs = [job for w in fleet.workers.values() for job in w.jobs if isinstance(job, DecodeJob)]
        early, late = [job.ticket for job in jobs]
        assert early is not None
        assert late is not None
        assert late.lease == f"{early.lease}/anew"
        assert [job.generated for job in jobs] == [(), (answer(0),)]
        counters = fleet.router.flow.counters
        assert (counters["early_handoffs"], counters["handoffs"], counters["failovers"]) == (0, 1, 0)

    in_fleet(body, prefill=(Script(lend=True, lend_anew=True),))


def test_every_decode_worker_is_asked_once_to_begin_early() -> None:
    async def body(fleet: Fleet) -> None:
        assert len((await ask_and_settle(fleet, request())).tokens) == 8
        asked = [len(fleet.workers[WorkerId(name)].jobs) for name in ("d1", "d2")]
        assert sorted(asked) == [1, 2]
        assert fleet.router.flow.counters["early_legs"] == 2

    full = Script(early_error="Overloaded")
    in_fleet(body, prefill=(Script(lend=True),), decode=(full, full))


@pytest.mark.parametrize("lost", [1, 2])
def test_a_prefill_worker_that_dies_while_it_lends_takes_its_early_leg_along(lost: int) -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request())
        assert len(got.tokens) == 8, got.error
        decode = fleet.workers[WorkerId("d1")]
        assert len(decode.cancels) == lost
        assert fleet.router.flow.counters["failovers"] == lost
        assert states(fleet)[:4] == ["reserved", "prefilling", "lending", "reserved"]

    in_fleet(body, prefill=(Script(lend=True, die_lending=True),) * lost)


def test_a_client_that_leaves_ends_both_legs() -> None:
    async def body(fleet: Fleet) -> None:
        flow = fleet.router.flow
        run = flow.start(request(), Timeline(asyncio.get_running_loop().time()))

        async def read() -> None:
            async for _ in run:
                pass

        reader = asyncio.create_task(read())
        await fleet.until(lambda: flow.counters["early_legs"] == 1)
        await run.stop(CancelReason.CLIENT)
        await reader
        await fleet.settle()
        fleet.check_idle()
        assert [len(worker.cancels) for worker in fleet.workers.values()] == [1, 1]

    in_fleet(body, prefill=(Script(lend=True, prefill_s=1.0),))


def test_an_error_of_the_request_itself_is_not_tried_elsewhere() -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request())
        assert isinstance(got.error, Internal)
        assert got.error.message == "as the script says"
        assert len(got.tokens) == 3
        assert sum(len(w.jobs) for w in fleet.workers.values()) == 2

    in_fleet(body, decode=(Script(fail_at=3), Script(fail_at=3)))


def test_failovers_are_bounded() -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request())
        assert isinstance(got.error, WorkerLost)
        assert fleet.router.flow.counters["failovers"] == 3
        assert sum(len(w.jobs) for w in fleet.workers.values()) == 3

    in_fleet(
        body,
        prefill=(),
        decode=tuple(Script(fail_at=0, error="WorkerLost") for _ in range(6)),
        settings=replace(REMOTE, flow=FlowSettings(max_failovers=2)),
    )


@pytest.mark.parametrize("hang_at", [0, 1, 4])
def test_a_worker_that_goes_silent_is_left_within_the_limit(hang_at: int) -> None:
    limits = FlowSettings(first_token_timeout_s=4.0, token_timeout_s=1.0)

    async def body(fleet: Fleet) -> None:
        hanging = {w.card.id for w in fleet.workers.values() if w.script.hang_at is not None}
        start = asyncio.get_running_loop().time()
        got = await ask(fleet, request())
        assert len(got.tokens) == 8
        limit = 4.0 if hang_at < 2 else 1.0
        assert limit <= asyncio.get_running_loop().time() - start < limit + 0.5
        await fleet.settle()
        fleet.check_idle()
        for worker in hanging:
            for cancel in fleet.workers[worker].cancels:
                assert cancel.reason is CancelReason.MOVED

    hang = Script(hang_at=hang_at)
    settings = replace(REMOTE, flow=replace(limits, worker_wait_s=9.0))
    if hang_at == 0:
        in_fleet(body, prefill=(hang,), settings=settings)
    else:

        async def with_spare(fleet: Fleet) -> None:
            task = asyncio.create_task(body(fleet))
            await fleet.until(lambda: bool(fleet.workers[WorkerId("d1")].jobs))
            await fleet.add(card("d2"))
            await task

        in_fleet(with_spare, decode=(hang,), settings=settings)


@pytest.mark.parametrize(
    "script", [Script(hang_at=4), Script(fail_at=4, error="WorkerLost")], ids=["silent", "failed"]
)
@pytest.mark.parametrize("mends", [True, False])
def test_a_worker_that_is_the_only_one_left_is_asked_again(script: Script, mends: bool) -> None:
    """After a pause, whatever it did to this request, and no more often than failovers are allowed."""
    limits = FlowSettings(first_token_timeout_s=2.0, token_timeout_s=2.0, retry_after_s=1.0, max_failovers=2)

    async def body(fleet: Fleet) -> None:
        worker = fleet.workers[WorkerId("d1")]
        start = asyncio.get_running_loop().time()
        asked = asyncio.create_task(ask(fleet, request()))
        await fleet.until(lambda: fleet.router.flow.counters["failovers"] == 1)
        if mends:
            worker.script = Script()
        got = await asked
        took = asyncio.get_running_loop().time() - start
        assert got.tokens == [answer(n) for n in range(8 if mends else 4)]
        if mends:
            assert got.error is None
            assert len(worker.jobs) == 2
            assert 1.0 <= took < 3.5
        else:
            assert isinstance(got.error, WorkerLost)
            assert len(worker.jobs) == 3
            assert 2.0 <= took < 8.5
        await fleet.settle()
        fleet.check_idle()

    in_fleet(body, decode=(script,), settings=replace(REMOTE, flow=limits))


@pytest.mark.parametrize("hang_at", [0, 1, 4])
def test_the_deadline_ends_it_in_every_phase_and_cancels_both_legs(hang_at: int) -> None:
    async def body(fleet: Fleet) -> None:
        start = asyncio.get_running_loop().time()
        got = await ask(fleet, request(deadline_s=3.0))
        assert asyncio.get_running_loop().time() - start == pytest.approx(3.0)
        assert isinstance(got.error, DeadlineExceeded)
        assert len(got.tokens) == hang_at
        await fleet.settle()
        fleet.check_idle()
        (cancel,) = [c for w in fleet.workers.values() for c in w.cancels]
        assert cancel.reason is CancelReason.DEADLINE

    hang = Script(hang_at=hang_at)
    in_fleet(body, prefill=(hang,) if hang_at == 0 else (Script(),), decode=(hang,))


def test_a_deadline_may_pass_at_any_moment_on_the_loop_that_serves() -> None:
    """uvloop counts milliseconds, and a timer that is due at once has no time that it could be asked for."""

    async def main() -> None:
        fleet = await Fleet(REMOTE).start()
        try:
            script = Script(prefill_s=0.01, step_s=0.002)
            await fleet.add(card("p1", Role.PREFILL), script)
            await fleet.add(card("d1"), script)
            workers = fleet.router.roster.workers
            await fleet.until(lambda: sum(w.usable and w.report is not None for w in workers()) == 2)
            for turn in range(40):
                # They pass while first tokens come, in the middle of a millisecond.
                made = [
                    request(f"r{turn}.{n}", prompt=2, deadline_s=0.0102 + 0.001 * n, max_tokens=4)
                    for n in range(6)
                ]
                for got in await asyncio.gather(*(ask(fleet, one) for one in made)):
                    assert got.error is None or isinstance(got.error, DeadlineExceeded)
        finally:
            await fleet.stop()

    uvloop.run(main())


def test_a_defect_is_counted_as_a_failure_of_ours_and_leaves_nothing() -> None:
    async def body(fleet: Fleet) -> None:
        flow = fleet.router.flow

        def broken(record: HandoffRecord, step: Transition | None) -> None:
            if step is not None and step.state is HandoffState.READY:
                raise ZeroDivisionError

        flow.records.followers.append(broken)
        with pytest.raises(ZeroDivisionError):
            await ask(fleet, request())
        await fleet.settle()
        fleet.check_idle()
        assert flow.counters["failed_Internal"] == 1
        (record,) = flow.records.ended
        assert record.outcome is not None
        assert (record.outcome["end"], record.outcome["attained"]) == ("failed", False)

    in_fleet(body)


@pytest.mark.parametrize("whose", ["its own", "another's"])
@pytest.mark.parametrize("of", ["a worker", "ours"])
def test_an_answer_that_the_ingress_finds_to_be_none_was_not_given_up_by_its_client(
    of: str, whose: str
) -> None:
    """A worker that leaves out what was asked for, of one answer, or a defect of the ingress as it shows it;
    the other one goes down with it."""

    async def body(fleet: Fleet) -> None:
        flow = fleet.router.flow

        def choice(id: str, logprobs: int) -> Choice:
            asked = request(id, sampling=Sampling(max_tokens=8, logprobs=logprobs))
            run = flow.start(asked, Timeline(asyncio.get_running_loop().time()))
            return Choice(0, 0, True, asked, Writing(Vocabulary(())), run=run)

        def show(choice: Choice, *_: object) -> None:
            if choice.request.id == "r1":
                raise ZeroDivisionError

        async def flush() -> None:
            pass

        logprobs, failure = (0, Internal) if of == "a worker" else (-1, (ZeroDivisionError, ExceptionGroup))
        choices = [choice("r1", logprobs)] + [choice("r2", -1)] * (whose == "another's")
        with pytest.raises(failure):
            await follow_all(choices, show, flush, asyncio.get_running_loop().time)
        await fleet.settle()
        fleet.check_idle()
        assert (flow.counters["cancelled"], flow.counters["failed_Internal"]) == (0, len(choices))

    in_fleet(body)


def test_a_worker_is_told_what_is_left_of_the_deadline() -> None:
    async def body(fleet: Fleet) -> None:
        await ask_and_settle(fleet, request(deadline_s=60.0))
        (prefill,), (decode,) = fleet.workers[WorkerId("p1")].jobs, fleet.workers[WorkerId("d1")].jobs
        assert prefill.request.deadline_s == pytest.approx(60.0, abs=0.01)
        assert decode.request.deadline_s == pytest.approx(58.0, abs=0.1)

    in_fleet(body, prefill=(Script(prefill_s=2.0),))


@pytest.mark.parametrize("after", range(1, 9))
def test_stopped_after_any_token_both_legs_are_told(after: int) -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request(max_tokens=8), stop_after=after)
        assert len(got.tokens) == after, "nothing comes after a stop"
        assert got.end.finish is FinishReason.CANCELLED
        (job,) = fleet.workers[WorkerId("d1")].jobs
        assert isinstance(job, DecodeJob)
        assert job.ticket is not None
        assert fleet.workers[WorkerId("p1")].releases == [job.ticket.lease]
        if after < 8:
            assert [c.reason for c in fleet.workers[WorkerId("d1")].cancels] == [CancelReason.CLIENT]

    in_fleet(body)


def test_a_stop_string_is_a_good_end() -> None:
    async def body(fleet: Fleet) -> None:
        await ask_and_settle(fleet, request(), stop_after=3, reason=CancelReason.STOP_STRING)
        assert fleet.router.flow.counters["finished_stop"] == 1
        told = fleet.router.explain(request().id)
        assert told is not None
        assert told["state"] == HandoffState.DONE

    in_fleet(body)


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.02, 0.0499, 0.05, 0.0501, 0.055, 0.06, 0.0605, 0.09, 0.2])
@pytest.mark.parametrize("way", ["stop", "cancel", "leave"])
def test_stopped_at_any_time_nothing_is_left(delay: float, way: str) -> None:
    """`stop` while it is read; the reading task cancelled; the reader gone without a word."""

    async def body(fleet: Fleet) -> None:
        fleet.wire.to_worker_s = fleet.wire.to_router_s = 0.0004
        loop = asyncio.get_running_loop()
        run = fleet.router.flow.start(request(), Timeline(loop.time()))
        seen: list[RunToken | RunEnd] = []

        async def read() -> None:
            async for event in run:
                seen.append(event)
                if way == "leave" and loop.time() >= start + delay:
                    break

        start = loop.time()
        reader = asyncio.create_task(read())
        await asyncio.sleep(delay)
        if way == "cancel":
            reader.cancel()
        elif way == "stop":
            await run.stop(CancelReason.CLIENT)
            await run.stop(CancelReason.CLIENT)
        await asyncio.gather(reader, return_exceptions=True)
        await run.stop(CancelReason.CLIENT)
        if way == "stop":
            assert isinstance(seen[-1], RunEnd)
        await fleet.settle()
        fleet.check_idle()

    in_fleet(body)


def test_a_run_never_read_or_stopped_first_leaves_nothing() -> None:
    async def body(fleet: Fleet) -> None:
        run = fleet.router.flow.start(request("a"), Timeline(0.0))
        await run.stop(CancelReason.CLIENT)
        events = [event async for event in run]
        assert [type(event) for event in events] == [RunEnd]
        await fleet.settle()
        fleet.check_idle()
        assert all(not w.jobs for w in fleet.workers.values())

    in_fleet(body)


def test_a_first_token_that_crosses_the_cancel_leaves_no_lease() -> None:
    """The worker has said its last word and cannot be cancelled: what it leased is let go all the same."""

    async def body(fleet: Fleet) -> None:
        fleet.wire.to_router_s = 0.5
        await asyncio.sleep(1)
        run = fleet.router.flow.start(request(), Timeline(asyncio.get_running_loop().time()))
        reader = asyncio.create_task(anext(aiter(run)))  # type: ignore[arg-type]
        await fleet.until(lambda: bool(fleet.workers[WorkerId("p1")].leases))
        await run.stop(CancelReason.CLIENT)
        assert isinstance(await reader, RunEnd)
        await fleet.settle()
        fleet.check_idle()
        assert len(fleet.workers[WorkerId("p1")].releases) == 1

    in_fleet(body)


def test_a_lease_is_let_go_when_a_broken_session_is_open_again() -> None:
    async def body(fleet: Fleet) -> None:
        worker = fleet.workers[WorkerId("p1")]
        job = asyncio.create_task(ask(fleet, request(deadline_s=2.0)))
        await fleet.until(lambda: bool(fleet.workers[WorkerId("d1")].jobs))
        fleet.wire.kill(worker.card.address)
        assert isinstance((await job).error, DeadlineExceeded)
        assert len(worker.leases) == 1
        fleet.wire.serve(worker, worker.card.address)
        await fleet.until(lambda: not worker.leases)
        await fleet.settle()
        fleet.check_idle()

    in_fleet(body, decode=(Script(hang_at=1),))


def test_without_a_worker_it_fails_at_once_or_waits_as_told() -> None:
    async def at_once(fleet: Fleet) -> None:
        start = asyncio.get_running_loop().time()
        got = await ask_and_settle(fleet, request())
        assert isinstance(got.error, Unavailable)
        assert got.timeline.marks[Stage.ENDED] == 0.0
        assert asyncio.get_running_loop().time() - start == 2.0
        assert fleet.router.flow.ready() == "no worker is known"

    in_fleet(at_once, prefill=(), decode=())

    async def waits(fleet: Fleet) -> None:
        job = asyncio.create_task(ask(fleet, request()))
        await asyncio.sleep(3)
        await fleet.add(card("d1"))
        assert len((await job).tokens) == 8
        late = await ask(fleet, request("x", model="m2"))
        assert isinstance(late.error, NotFound)

    settings = replace(REMOTE, flow=FlowSettings(worker_wait_s=10.0))
    in_fleet(waits, prefill=(), decode=(), settings=settings)


def test_a_model_nobody_has_is_not_found_and_one_whose_workers_are_away_is_unavailable() -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request("a", model="other"))
        assert isinstance(got.error, NotFound)
        assert fleet.router.flow.ready() is None
        fleet.kill(WorkerId("d1"))
        await fleet.until(lambda: fleet.router.flow.ready() is not None)
        got = await ask_and_settle(fleet, request("b"))
        assert type(got.error) is Unavailable
        assert "no decode worker that is ready" in got.error.message
        assert fleet.router.flow.models() == ("m",)

    in_fleet(body)


def test_a_prompt_longer_than_any_worker_holds_is_the_clients_error() -> None:
    async def body(fleet: Fleet) -> None:
        got = await ask_and_settle(fleet, request(prompt=4096))
        assert isinstance(got.error, BadRequest)
        assert got.error.code == "context_length_exceeded"
        assert "4096 tokens; m takes at most 4095" in got.error.message

    in_fleet(body)


def test_a_full_router_refuses() -> None:
    async def body(fleet: Fleet) -> None:
        answers = await asyncio.gather(*(ask(fleet, request(f"r{n}")) for n in range(5)))
        assert sum(isinstance(got.error, Overloaded) for got in answers) == 2
        await fleet.settle()
        fleet.check_idle()

    in_fleet(body, settings=replace(REMOTE, flow=FlowSettings(max_requests=3)))


def test_workers_of_two_revisions_are_never_paired_and_a_stream_keeps_its_weights() -> None:
    other = replace(PRINT, model="weights2")

    async def body(fleet: Fleet) -> None:
        await fleet.add(card("p8", Role.PREFILL, fingerprint=other))
        await fleet.add(card("d8", fingerprint=other))
        await fleet.until(lambda: sum(w.usable for w in fleet.router.roster.workers()) == 4)
        await asyncio.gather(*(ask(fleet, request(f"r{n}")) for n in range(30)))
        digests = {w.card.fingerprint.digest(): w.card.fingerprint for w in fleet.workers.values()}
        for worker in fleet.workers.values():
            assert worker.jobs
            for job in worker.jobs:
                if isinstance(job, DecodeJob) and job.ticket is not None:
                    assert digests[job.ticket.fingerprint] == worker.card.fingerprint
        await fleet.settle()
        fleet.check_idle()

    in_fleet(body)

    async def loses(fleet: Fleet) -> None:
        job = asyncio.create_task(ask(fleet, request()))
        await fleet.until(lambda: bool(fleet.workers[WorkerId("d1")].jobs))
        await fleet.add(card("d8", fingerprint=other))
        got = await job
        assert isinstance(got.error, WorkerLost), "other weights must not go on with it"
        assert fleet.workers[WorkerId("d8")].jobs == []

    settings = replace(REMOTE, flow=FlowSettings(worker_wait_s=2.0))
    in_fleet(loses, decode=(Script(die_at=5, step_s=0.1),), settings=settings)


def test_many_requests_through_failing_workers_all_end_properly() -> None:
    async def body(fleet: Fleet) -> None:
        async def restart(worker: str, role: Role) -> None:
            for life in range(2, 6):
                await asyncio.sleep(0.2)
                fleet.kill(WorkerId(worker))
                await asyncio.sleep(0.1)
                await fleet.add(card(worker, role, life=str(life)))

        async def one(n: int) -> Answer:
            await asyncio.sleep(n * 0.005)
            return await ask(fleet, request(f"r{n}", prompt=50 + n, max_tokens=20))

        chaos = asyncio.gather(restart("p1", Role.PREFILL), restart("d1", Role.DECODE))
        answers = await asyncio.gather(*(one(n) for n in range(300)))
        await chaos
        assert [got.error for got in answers if got.error is not None] == []
        assert all(len(got.tokens) == 20 for got in answers)
        assert fleet.router.flow.counters["failovers"] > 10
        await fleet.settle()
        fleet.check_idle()

    settings = replace(REMOTE, flow=FlowSettings(max_failovers=10))
    in_fleet(body, prefill=(Script(), Script()), decode=(Script(), Script(), Script()), settings=settings)
