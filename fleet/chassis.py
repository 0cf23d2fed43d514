"""What every worker stands on: sessions and streams, its card, its reports, drain. Knows no engine.

A role plugs in as a `RoleService`. The chassis answers the wire, keeps the card in the registry
under a lease, numbers and publishes KV events, reports load, and ends when a drain is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from fleet.bus import Bus
from fleet.card_codec import encode_card
from fleet.errors import BadRequest, FleetError, Overloaded, Unavailable, WorkerLost
from fleet.events import KvEvent, KvSnapshot, LoadReport, kv_subject, load_subject
from fleet.handoff import (
    Cancel,
    CancelReason,
    DecodeJob,
    Ended,
    Frame,
    KvTicket,
    Lent,
    Prefilled,
    PrefillJob,
    Proceed,
    Release,
    Renew,
    Scored,
    Started,
    Token,
    ToWorker,
)
from fleet.ids import LeaseId, RequestId
from fleet.kv_log import KvLog
from fleet.member import MemberState, Role, WorkerCard, step, worker_key
from fleet.metrics import Family, Labels
from fleet.registry import Lease, Registry
from fleet.request import FinishReason, TokenLogprobs, Usage
from fleet.stages import Stage
from fleet.wire import WorkerEnd
from fleet.wire.codec import encode_kv_events, encode_load_report
from fleet.worker_page import families

log = logging.getLogger(__name__)

_STARTED_WAITS_S = 0.002
"""How long the word that something has started waits for a token to travel with: nobody waits for it."""
_CHANGES = 1024
"""KV events that one message takes."""


@dataclass(frozen=True, slots=True)
class ChassisSettings:
    """How a worker shows itself, and how it leaves."""

    report_s: float = 0.25
    """Seconds between load reports. Routers correct for what they sent since; shorter costs bus traffic."""
    drain_limit_s: float = 60.0
    """Longest a drain by signal waits for running work, seconds; what still runs then moves elsewhere."""
    stalled_limit_s: float = 30.0
    """Seconds that work may wait without a step's end: beyond, the worker says that it is stalled and routers
    choose others; after twice as long its process ends, to be started again. Longer than any step."""
    event_s: float = 0.01
    """Seconds between messages of KV events: changes meanwhile travel together. What a router sent itself it
    expects to be there; shorter costs every router, longer delays what others sent."""
    revision: str = ""
    """Name of what it was started of, such as a rollout's; routers count by it how many requests met their
    objectives. Empty: not counted so."""
    event_backlog: int = 4096
    """KV event messages kept for a slow bus; more are dropped, and routers ask for a snapshot."""

    def __post_init__(self) -> None:
        if self.report_s <= 0:
            raise ValueError(f"report_s must be above 0, not {self.report_s}")
        if self.event_s < 0:
            raise ValueError(f"event_s must not be negative, not {self.event_s}")
        if self.stalled_limit_s <= 0:
            raise ValueError(f"stalled_limit_s must be above 0, not {self.stalled_limit_s}")
        if self.drain_limit_s < 0:
            raise ValueError(f"drain_limit_s must not be negative, not {self.drain_limit_s}")


class Stream:
    """One request on one session, as its worker sees it. What is said in one turn of the loop travels
    together, so that an engine step is one frame a session."""

    __slots__ = ("_outlet", "ended", "id", "job", "number")

    def __init__(self, outlet: _Outlet, number: int, id: str, job: PrefillJob | DecodeJob) -> None:
        self._outlet = outlet
        self.number = number
        self.id = id
        """Of the engine's sequence: unique on this worker, whatever clients and routers choose."""
        self.job = job
        self.ended = False

    def started(self, stage: Stage) -> None:
        self._outlet.started.append(Started(self.number, stage))
        self._outlet.wake_later()

    def scored(self, start: int, logprobs: tuple[TokenLogprobs, ...]) -> None:
        self._outlet.scored.append(Scored(self.number, start, logprobs))
        self._outlet.wake()

    def token(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        self._outlet.tokens.append(Token(self.number, token, logprobs))
        self._outlet.wake()

    def lent(self, ticket: KvTicket) -> None:
        self._outlet.lent.append(Lent(self.number, ticket))
        self._outlet.wake()

    def prefilled(
        self,
        token: int,
        logprobs: TokenLogprobs | None,
        ticket: KvTicket | None,
        cached_tokens: int,
        finish: FinishReason | None,
    ) -> None:
        """The last word on a prefill stream."""
        if not self._end("prefilled" if finish is None else str(finish)):
            return
        self._outlet.prefilled.append(Prefilled(self.number, token, logprobs, ticket, cached_tokens, finish))
        self._outlet.wake()

    def finished(self, finish: FinishReason, usage: Usage | None, error: str = "", message: str = "") -> None:
        """The last word; a second one is not said."""
        self._last(Ended(self.number, finish, usage, error, message))

    def failed(self, error: FleetError) -> None:
        after_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
        name = type(error).__name__
        self._last(Ended(self.number, FinishReason.FAILED, None, name, error.message, after_s))

    def _last(self, word: Ended) -> None:
        if not self._end(word.error or str(word.finish)):
            return
        self._outlet.ended.append(word)
        self._outlet.wake()

    def _end(self, how: str) -> bool:
        if self.ended:
            return False
        self.ended = True
        self._outlet.chassis.jobs_ended[(how,)] += 1
        self._outlet.forget(self)
        return True


class RoleService(Protocol):
    """What a role does with its engine and transfer layer."""

    def accept(self, stream: Stream) -> None:
        """Take on `stream.job`; a FleetError raised here is the stream's end."""
        ...

    def cancel(self, stream: Stream, reason: CancelReason) -> None:
        """Everything of it is let go within a step; the chassis says the stream's last word."""
        ...

    def proceed(self, stream: Stream, generated: tuple[int, ...]) -> None:
        """The first tokens of a job that was taken on without them."""
        ...

    def release(self, lease: LeaseId) -> None: ...

    def renew(self, lease: LeaseId) -> None:
        """Of a lease that is over: nothing."""
        ...

    def report(self, base: LoadReport) -> LoadReport:
        """`base` with the figures of engine and transfer filled in."""
        ...

    def busy(self) -> bool:
        """A sequence, or something on its way to or from one: work that another role could not go on with."""
        ...

    def idle(self) -> bool:
        """Not busy and no lease: the process could leave without anybody noticing."""
        ...


class _Outlet:
    """What is to be said to one router, until the end of this turn of the loop."""

    def __init__(self, chassis: Chassis, end: WorkerEnd) -> None:
        self.chassis = chassis
        self.end = end
        self.open = True
        self.streams: dict[int, Stream] = {}
        self.started: list[Started] = []
        self.scored: list[Scored] = []
        self.lent: list[Lent] = []
        self.prefilled: list[Prefilled] = []
        self.tokens: list[Token] = []
        self.ended: list[Ended] = []
        self._loop = asyncio.get_running_loop()
        self._waking = False
        self._later: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        if self.open and not self._waking:
            self._waking = True
            self._loop.call_soon(self._flush)

    def wake_later(self) -> None:
        if self.open and not self._waking and self._later is None:
            self._later = self._loop.call_later(_STARTED_WAITS_S, self._flush)

    def _flush(self) -> None:
        self._waking = False
        if self._later is not None:
            self._later.cancel()
            self._later = None
        frame = Frame(
            tuple(self.started),
            tuple(self.prefilled),
            tuple(self.tokens),
            tuple(self.ended),
            tuple(self.scored),
            tuple(self.lent),
        )
        for pending in (self.started, self.scored, self.lent, self.prefilled, self.tokens, self.ended):
            pending.clear()
        if self.open:
            self.end.send(frame)

    def forget(self, stream: Stream) -> None:
        if self.streams.get(stream.number) is stream:
            del self.streams[stream.number]
        self.chassis.forget(stream)


class Chassis:
    """One worker as routers, registry and bus see it. Implements `fleet.wire.WorkerService`."""

    def __init__(self, fleet: str, settings: ChassisSettings, registry: Registry, bus: Bus) -> None:
        self.fleet = fleet
        self.settings = settings
        self._registry = registry
        self._bus = bus
        self._role: RoleService | None = None
        self._card: WorkerCard | None = None
        self._kv: KvLog | None = None
        self._lease: Lease | None = None
        self._outlets: dict[int, _Outlet] = {}
        self._streams: dict[str, Stream] = {}
        self._count = 0
        self.jobs: Counter[Labels] = Counter()
        """Jobs since start, by kind."""
        self.jobs_ended: Counter[Labels] = Counter()
        """Of those, the ones that had their last word, by how: prefilled, stop, length, cancelled, or the
        name of an error."""
        self._changes: list[KvEvent] = []
        """Not numbered yet: no digest has them."""
        self._events: deque[bytes] = deque(maxlen=settings.event_backlog)
        self._changed = asyncio.Event()
        self._turns: Mapping[Role, Callable[[], None]] = {}
        self._asked = asyncio.Event()
        """To leave, to take another role, or to stay after all: the card says which."""
        self._drain_until = 0.0

    # -- life

    async def run(
        self,
        card: WorkerCard,
        role: RoleService,
        lease_ttl_s: float,
        turns: Mapping[Role, Callable[[], None]] | None = None,
    ) -> None:
        """Shows the card as READY, serves, and returns when a drain is done. Cancelled: leaves at once.

        `turns` makes `role` the service of each role that it can take; called when it is not busy.
        """
        self._role = role
        self._turns = turns or {}
        self._kv = KvLog(card.id, card.incarnation, card.blocks)
        self._card = replace(card, state=step(MemberState.STARTING, MemberState.READY))
        self._lease = await self._registry.lease(lease_ttl_s)
        background = [asyncio.create_task(self._publish_events()), asyncio.create_task(self._report_load())]
        leave = asyncio.create_task(self._serve_until_left())
        try:
            await self._show()
            await asyncio.wait({*background, leave}, return_when=asyncio.FIRST_COMPLETED)
            for task in (*background, leave):
                if task.done():
                    task.result()
        finally:
            for task in (*background, leave):
                task.cancel()
            await asyncio.gather(*background, leave, return_exceptions=True)
            self._card = replace(self._card, state=MemberState.LEFT)
            await self._lease.close()

    @property
    def card(self) -> WorkerCard:
        assert self._card is not None, "the chassis does not run yet"
        return self._card

    def begin_drain(self, limit_s: float) -> MemberState:
        """No new work from now on, and then it leaves; a second call may only shorten the limit."""
        return self._drain(limit_s, None)

    def begin_turn(self, role: Role, limit_s: float) -> MemberState:
        """READY when it has that role; otherwise no new work until it has it, as soon as nothing runs.

        A second call may only shorten the limit; one for the role that it still has calls the change off.
        Raises `Unavailable` when it is leaving, `BadRequest` when it cannot take that role.
        """
        card = self.card
        if card.state is MemberState.DRAINING and card.turning is None:
            raise Unavailable(f"worker {card.id} is leaving; ask another one")
        if role is not card.role:
            if role not in self._turns:
                raise BadRequest(
                    f"worker {card.id} cannot be a {role} worker: that role is not installed there"
                )
            return self._drain(limit_s, role)
        if card.state is MemberState.DRAINING:
            log.info("stays a %s worker after all", role)
            self._card = replace(card, state=step(card.state, MemberState.READY), turning=None)
            self._asked.set()
        return self.card.state

    def _drain(self, limit_s: float, turning: Role | None) -> MemberState:
        card, until = self.card, asyncio.get_running_loop().time() + limit_s
        anew = card.state is MemberState.DRAINING and card.turning is not turning
        if card.state is MemberState.READY or anew:
            self._card = replace(card, state=MemberState.DRAINING, turning=turning)
            then = f"then a {turning} worker" if turning else "then gone"
            log.info("draining, %s: %d streams run, limit %.0f s", then, len(self._streams), limit_s)
            self._drain_until = until
        self._drain_until = min(self._drain_until, until)
        self._asked.set()
        return self.card.state

    async def _serve_until_left(self) -> None:
        clock = asyncio.get_running_loop().time
        assert self._role is not None
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self._show()
            while self.card.state is MemberState.DRAINING and not self._asked.is_set():
                late = clock() >= self._drain_until
                if late:
                    self._hand_over()
                if self.card.turning is None:
                    if late or (self._role.idle() and not self._streams):
                        return
                elif not self._role.busy() and not self._streams:
                    # What it lent it goes on lending: engine and blocks stay.
                    self._turn(self.card.turning)
                    continue
                await asyncio.sleep(min(0.05, self.settings.report_s))

    def _hand_over(self) -> None:
        """Routers go on elsewhere with what still runs, as if this worker had died."""
        assert self._role is not None
        for stream in list(self._streams.values()):
            stream.failed(WorkerLost(f"worker {self.card.id} drained before the request was done"))
            self._role.cancel(stream, CancelReason.MOVED)

    def _turn(self, role: Role) -> None:
        self._turns[role]()
        log.info("a %s worker from now on", role)
        self._card = replace(
            self.card, role=role, state=step(self.card.state, MemberState.READY), turning=None
        )
        self._asked.set()

    async def stalled(self) -> str:
        """Returns when no step has ended for so long that none will: what is the matter."""
        limit_s = 2 * self.settings.stalled_limit_s
        while (report := self.status()).stalled_s < limit_s:
            await asyncio.sleep(limit_s / 60)
        return (
            f"stalled: {report.running} sequences run, {report.waiting} wait, "
            f"and no step has ended for {report.stalled_s:.0f} s"
        )

    async def _show(self) -> None:
        assert self._lease is not None
        await self._lease.put(worker_key(self.fleet, self.card.id), encode_card(self.card))

    # -- what the role says

    def publish(self, events: tuple[KvEvent, ...]) -> None:
        """Sends the changes of one engine step to all routers."""
        if events:
            self._changes += events
            if len(self._changes) >= _CHANGES:
                self._number_changes()
            self._changed.set()

    def _number_changes(self) -> None:
        assert self._kv is not None
        message = self._kv.record(self._changes)
        self._changes.clear()
        if message is not None:
            self._events.append(encode_kv_events(message))

    @property
    def streams(self) -> Iterable[Stream]:
        return self._streams.values()

    def stream(self, id: str) -> Stream | None:
        """The stream of an engine sequence; None when it has had its last word."""
        return self._streams.get(id)

    def forget(self, stream: Stream) -> None:
        self._streams.pop(stream.id, None)

    # -- WorkerService

    def opened(self, end: WorkerEnd) -> None:
        self._outlets[id(end)] = _Outlet(self, end)

    def closed(self, end: WorkerEnd) -> None:
        outlet = self._outlets.pop(id(end), None)
        if outlet is None:
            return
        outlet.open = False
        for stream in list(outlet.streams.values()):
            self._cancel(stream, CancelReason.CLIENT)

    def received(self, end: WorkerEnd, message: ToWorker) -> None:
        outlet = self._outlets.get(id(end))
        if outlet is None or self._role is None:
            return
        match message:
            case PrefillJob() | DecodeJob():
                self._accept(outlet, message)
            case Proceed(number, generated):
                if (stream := outlet.streams.get(number)) is not None:
                    self._role.proceed(stream, generated)
            case Cancel(number, reason):
                if (stream := outlet.streams.get(number)) is not None:
                    self._cancel(stream, reason)
            case Release(lease):
                self._role.release(lease)
            case Renew(lease):
                self._role.renew(lease)

    def _accept(self, outlet: _Outlet, job: PrefillJob | DecodeJob) -> None:
        assert self._role is not None
        self._count += 1
        self.jobs[("prefill" if isinstance(job, PrefillJob) else "decode",)] += 1
        stream = Stream(outlet, job.stream, f"{job.request.id}/{self._count}", job)
        if job.stream in outlet.streams:
            stream.failed(BadRequest(f"stream {job.stream} is in use on this session; take a new number"))
            return
        outlet.streams[job.stream] = stream
        self._streams[stream.id] = stream
        try:
            if self.card.state is not MemberState.READY:
                raise Overloaded(
                    f"worker {self.card.id} is {self.card.state}; take another", retry_after_s=0.1
                )
            wanted = Role.PREFILL if isinstance(job, PrefillJob) else Role.DECODE
            if self.card.role is not wanted:
                # The router's picture of a worker that took another role is a moment old.
                raise Overloaded(
                    f"worker {self.card.id} is a {self.card.role} worker now; take another", retry_after_s=0.1
                )
            self._role.accept(stream)
        except FleetError as error:
            stream.failed(error)

    def _cancel(self, stream: Stream, reason: CancelReason) -> None:
        assert self._role is not None
        self._role.cancel(stream, reason)
        stream.finished(FinishReason.CANCELLED, None)

    def snapshot(self, part: int = 0) -> KvSnapshot:
        assert self._kv is not None
        self._number_changes()
        try:
            return self._kv.snapshot(part)
        except ValueError as error:
            raise BadRequest(str(error)) from None

    def status(self) -> LoadReport:
        assert self._role is not None
        assert self._kv is not None
        requests: dict[RequestId, None] = {stream.job.request.id: None for stream in self._streams.values()}
        base = LoadReport(
            worker=self.card.id,
            incarnation=self.card.incarnation,
            state=self.card.state,
            running=0,
            waiting=0,
            queued_tokens=0,
            blocks_total=0,
            blocks_free=0,
            kv=self._kv.digest(),
            streams=tuple(requests),
        )
        report = self._role.report(base)
        if report.state == MemberState.READY and report.stalled_s >= self.settings.stalled_limit_s:
            return replace(report, state=MemberState.STALLED)
        return report

    def families(self) -> list[Family]:
        """For Prometheus; nothing before it runs."""
        if self._card is None or self._kv is None:
            return []
        return list(families(self._card, self.status(), self.jobs, self.jobs_ended))

    async def drain(self, limit_s: float) -> MemberState:
        return self.begin_drain(limit_s)

    async def take_role(self, role: Role, limit_s: float) -> MemberState:
        return self.begin_turn(role, limit_s)

    # -- beside the path

    async def _publish_events(self) -> None:
        subject = kv_subject(self.fleet, self.card.id)
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._number_changes()
            while self._events:
                await self._bus.publish(subject, self._events.popleft())
            await asyncio.sleep(self.settings.event_s)

    async def _report_load(self) -> None:
        subject = load_subject(self.fleet, self.card.id)
        while True:
            await self._bus.publish(subject, encode_load_report(self.status()))
            await asyncio.sleep(self.settings.report_s)
