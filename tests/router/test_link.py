"""A link: one session kept open, its frames dealt out, and losses said to everybody who reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from scripted_worker import Script, ScriptedWorker, answer, card, request

from fleet import virtual_time
from fleet.errors import WorkerLost
from fleet.handoff import CancelReason, DecodeJob, Ended, PrefillJob, Token
from fleet.wire.memory import MemoryHub as WireHub
from fleet.wire.session import WireSettings
from router.link import Link, Stream
from router.roster import LinkState
from router.settings import WatchSettings

D1 = card("d1")
SETTINGS = WatchSettings(retry_min_s=0.1, retry_max_s=1.0)


def linked(body: Callable[[WireHub, Link, list[LinkState]], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        hub = WireHub(WireSettings(heartbeat_s=0.5))
        states: list[LinkState] = []
        link = Link(D1, hub.wire(), SETTINGS, lambda link, state, why: states.append(state))
        task = asyncio.create_task(link.run())
        try:
            await body(hub, link, states)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    virtual_time.run(whole(), horizon_s=600)


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.01)


def job(max_tokens: int = 4) -> DecodeJob:
    return DecodeJob(0, request(max_tokens=max_tokens))


async def tokens(stream: Stream) -> list[int]:
    return [said.token async for said in stream if isinstance(said, Token)]


def test_streams_of_one_session_do_not_mix() -> None:
    async def body(hub: WireHub, link: Link, states: list[LinkState]) -> None:
        hub.serve(ScriptedWorker(D1), D1.address)
        await until(lambda: link.state is LinkState.UP)
        streams = [link.dispatch(job(n)) for n in range(1, 20)]
        assert len({stream.number for stream in streams}) == 19
        answers = await asyncio.gather(*(tokens(stream) for stream in streams))
        assert answers == [[answer(p) for p in range(n)] for n in range(1, 20)]
        assert len(link) == 0

    linked(body)


def test_nothing_is_dispatched_without_a_session() -> None:
    async def body(hub: WireHub, link: Link, states: list[LinkState]) -> None:
        with pytest.raises(WorkerLost, match="no session with worker d1"):
            link.dispatch(job())
        assert len(link) == 0

    linked(body)


def test_a_lost_session_is_opened_again_with_growing_pauses() -> None:
    async def body(hub: WireHub, link: Link, states: list[LinkState]) -> None:
        worker = ScriptedWorker(D1)
        hub.serve(worker, D1.address)
        await until(lambda: link.state is LinkState.UP)
        stream = link.dispatch(job())
        await until(lambda: bool(worker.jobs))
        hub.kill(D1.address)
        with pytest.raises(WorkerLost, match="worker d1 was lost"):
            await tokens(stream)
        await asyncio.sleep(30)
        assert states == [LinkState.UP, LinkState.LOST], "said once, however often it is tried"
        hub.serve(worker, D1.address)
        at = asyncio.get_running_loop().time()
        await until(lambda: link.state is LinkState.UP)
        assert asyncio.get_running_loop().time() - at <= 1.1
        assert await tokens(link.dispatch(job(2))) == [answer(0), answer(1)]
        assert link.dispatch(job()).number == 3, "a number is never used twice"

    linked(body)


def test_what_came_before_a_loss_is_read_before_it() -> None:
    async def body(hub: WireHub, link: Link, states: list[LinkState]) -> None:
        worker = ScriptedWorker(D1, Script(die_at=3))
        worker.die = lambda: hub.kill(D1.address)
        hub.serve(worker, D1.address)
        await until(lambda: link.state is LinkState.UP)
        stream = link.dispatch(job(9))
        await until(lambda: link.state is LinkState.LOST)
        seen = []

        async def read() -> None:
            async for said in stream:
                if isinstance(said, Token):
                    seen.append(said.token)

        with pytest.raises(WorkerLost):
            await read()
        assert seen == [answer(n) for n in range(3)]

    linked(body)


def test_a_frozen_worker_is_lost_in_bounded_time() -> None:
    async def body(hub: WireHub, link: Link, states: list[LinkState]) -> None:
        hub.serve(ScriptedWorker(D1), D1.address)
        await until(lambda: link.state is LinkState.UP)
        stream = link.dispatch(job(10_000))
        await asyncio.sleep(1)
        hub.freeze(D1.address)
        at = asyncio.get_running_loop().time()
        with pytest.raises(WorkerLost):
            await tokens(stream)
        assert asyncio.get_running_loop().time() - at < 5
        hub.unfreeze(D1.address)
        await until(lambda: link.state is LinkState.UP)

    linked(body)


def test_a_dropped_stream_is_cancelled_once_and_later_words_are_nobodys() -> None:
    async def body(hub: WireHub, link: Link, states: list[LinkState]) -> None:
        worker = ScriptedWorker(D1)
        hub.serve(worker, D1.address)
        await until(lambda: link.state is LinkState.UP)
        stream = link.dispatch(job(1000))
        await asyncio.sleep(0.2)
        link.drop(stream, CancelReason.STOP_STRING)
        link.drop(stream, CancelReason.CLIENT)
        await asyncio.sleep(1)
        assert [(c.stream, c.reason) for c in worker.cancels] == [(1, CancelReason.STOP_STRING)]
        assert not worker.running
        ended = link.dispatch(job(1))
        said = [word async for word in ended]
        assert isinstance(said[-1], Ended)
        link.drop(ended, CancelReason.CLIENT)
        await asyncio.sleep(1)
        assert len(worker.cancels) == 1, "what has ended is not cancelled"

    linked(body)


def test_a_lease_that_came_unread_is_let_go_with_its_stream() -> None:
    async def body(hub: WireHub, link: Link, states: list[LinkState]) -> None:
        worker = ScriptedWorker(D1)
        hub.serve(worker, D1.address)
        await until(lambda: link.state is LinkState.UP)
        stream = link.dispatch(PrefillJob(0, request()))
        await until(lambda: stream.over)
        (lease,) = worker.leases
        link.drop(stream, CancelReason.CLIENT)
        link.drop(stream, CancelReason.CLIENT)
        await asyncio.sleep(1)
        assert worker.releases == [lease]
        assert not worker.cancels

    linked(body)


def test_an_interrupted_reader_is_woken_at_once_and_reads_nothing_more() -> None:
    async def body(hub: WireHub, link: Link, states: list[LinkState]) -> None:
        stream = Stream(1)
        stream.put(Token(1, 7), 0.0)
        stream.interrupt(ValueError("now"))
        with pytest.raises(ValueError, match="now"):
            await anext(stream)
        waiting = Stream(2)
        reader = asyncio.ensure_future(anext(waiting))
        await asyncio.sleep(0)
        waiting.interrupt(ValueError("now"))
        with pytest.raises(ValueError, match="now"):
            await reader

    linked(body)
