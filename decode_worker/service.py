"""The decode role: reserve blocks, bring the KV that is lacking or compute it, write tokens to the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace

from msgspec import structs

from engine.borrowing import Borrowing
from engine.intake import Intake
from engine.loop import Engine
from engine.tell import figures, tell
from engine.words import Matcher, NewSequence, Reservation, StepReport
from fleet.block_hash import HashKeys
from fleet.chassis import Chassis, Stream
from fleet.errors import BadRequest, FleetError, LeaseExpired, TransferFailed
from fleet.events import LoadReport
from fleet.handoff import CancelReason, DecodeJob, KvTicket
from fleet.ids import LeaseId
from fleet.stages import Stage
from kv_transfer.plan import lacking
from kv_transfer.transfer import Transfer

log = logging.getLogger(__name__)

COUNTERS = (
    "pulls_recomputed",
    "pulled_tokens",
    "pull_hit_tokens",
    "local_prefills",
    "early_reservations",
    "pulled_early_blocks",
)
"""Pulls that became local computing; prompt tokens brought, and found here; jobs without a ticket; jobs whose
prompt was still being computed, and blocks brought of it before its first token was known."""


@dataclass(slots=True)
class _Here:
    """Of how many leading tokens of a sequence the KV is here and proven."""

    tokens: int


class DecodeService:
    """`DecodeJob` in; tokens out. KV that does not come, or not proven, is computed here: never guessed."""

    def __init__(self, chassis: Chassis, engine: Engine, transfer: Transfer, pull_limit_s: float) -> None:
        self._chassis = chassis
        self._engine = engine
        self._intake = Intake(engine)
        self._transfer = transfer
        self._borrowing = Borrowing(engine, self._intake, transfer, transfer.settings.borrow_limit_s)
        transfer.lend = self._borrowing.lend
        self._pull_limit_s = pull_limit_s
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._first: dict[str, asyncio.Future[tuple[int, ...]]] = {}
        """By stream: the first tokens of a prompt that is still being computed."""
        self._model = engine.fingerprint.digest()

    def accept(self, stream: Stream) -> None:
        job = stream.job
        if not isinstance(job, DecodeJob):
            raise BadRequest("a decode worker takes DecodeJob only; send PrefillJob to a prefill worker")
        request = job.request
        new = NewSequence(
            id=stream.id,
            prompt=request.prompt,
            sampling=request.sampling,
            keys=HashKeys(self._model, self._engine.layout.block_size, request.adapter, request.salt),
            generated=job.generated,
            priority=request.priority,
            fill=job.ticket is not None,
        )
        if job.ticket is None:
            self._counters["local_prefills"] += 1
            self._borrowing.add(stream, new, job.holder)
            return
        if job.ticket.tokens != len(request.prompt):
            raise BadRequest(
                f"the ticket covers {job.ticket.tokens} tokens, the prompt has {len(request.prompt)}"
            )
        if job.generated:
            self._intake.start(stream, self._bring(stream, new, job.ticket))
            return
        self._counters["early_reservations"] += 1
        first = self._first[stream.id] = asyncio.get_running_loop().create_future()
        self._intake.start(stream, self._follow(stream, new, job.ticket, first))

    async def _bring(self, stream: Stream, new: NewSequence, ticket: KvTicket) -> None:
        """From ticket to runnable sequence. The lease is renewed from now on, also while this one queues."""
        async with self._transfer.keep(ticket):
            ready = await self._intake.constrained(stream, new)
            if ready is None:
                return
            reservation = await self._engine.reserve(ready)
            here = _Here(reservation.cached * self._engine.layout.block_size)
            try:
                self._lacking(stream, await self._pull(stream, reservation, ticket, None, here))
            finally:
                # Also after a cancel: the pull has ended for sure, so the blocks may be used again, and what
                # came is worth caching.
                self._engine.filled(new.id, here.tokens)

    async def _follow(
        self,
        stream: Stream,
        new: NewSequence,
        ticket: KvTicket,
        first: asyncio.Future[tuple[int, ...]],
    ) -> None:
        """Like `_bring`, of a prompt that is still being computed: its first tokens come last."""
        reservation: Reservation | None = None
        here = _Here(0)
        generated: tuple[int, ...] = ()
        matcher: Matcher | None = None
        compiling = self._compile(stream)
        try:
            async with self._transfer.keep(ticket):
                reservation = await self._engine.reserve(new)
                error = await self._pull(stream, reservation, ticket, first, here)
            generated = await first
            # Not before: a prompt that was given up ends its lease, too.
            self._lacking(stream, error)
            ready = await self._intake.constrained(stream, structs.replace(new, generated=generated))
            if ready is None:
                self._engine.cancel(new.id)
            else:
                matcher = ready.matcher
        except BaseException as error:
            if isinstance(error, FleetError):
                stream.failed(error)  # Before the engine says that it was cancelled.
            self._engine.cancel(new.id)
            raise
        finally:
            self._first.pop(stream.id, None)
            if compiling is not None:
                compiling.cancel()
            if reservation is not None:
                self._engine.filled(new.id, here.tokens, generated, matcher)

    async def _pull(
        self,
        stream: Stream,
        reservation: Reservation,
        ticket: KvTicket,
        first: asyncio.Future[tuple[int, ...]] | None,
        here: _Here,
    ) -> FleetError | None:
        """Brings the blocks that are lacking; with `first`, which is done when the prompt is, part by part as
        they become final. Returns why not all came. `here` is kept up to date, whatever ends this."""
        size = self._engine.layout.block_size
        cached, have, needed = reservation.cached, reservation.cached, -(-ticket.tokens // size)
        here.tokens = cached * size
        self._counters["pull_hit_tokens"] += min(cached * size, ticket.tokens)
        try:
            while have < needed:
                ready = needed if first is None else await self._transfer.ready(ticket, have)
                if ready <= have:
                    raise TransferFailed(f"{ticket.worker} lends {ready} of {needed} blocks, and no more")
                pairs = lacking(reservation.blocks, have, min(ready * size, ticket.tokens), size)
                if have == cached:
                    stream.started(Stage.PULL_STARTED)
                await self._transfer.pull(ticket, pairs, self._pull_limit_s)
                if self._engine.staged:
                    await self._engine.from_host([own for _, own in pairs])
                have += len(pairs)
                here.tokens = have * size if have < needed else max(ticket.tokens, cached * size)
                if first is not None and not first.done():
                    self._counters["pulled_early_blocks"] += len(pairs)
        except (LeaseExpired, TransferFailed, BadRequest) as error:
            return error
        finally:
            self._counters["pulled_tokens"] += max(0, here.tokens - cached * size)
        if have > cached:
            stream.started(Stage.PULL_ENDED)
        return None

    def _lacking(self, stream: Stream, error: FleetError | None) -> None:
        if error is not None:
            self._counters["pulls_recomputed"] += 1
            id = stream.job.request.id
            why = "request %s: KV did not come, computing it here: %s"
            log.warning(why, id, error, extra={"request": id})

    def _compile(self, stream: Stream) -> asyncio.Task[None] | None:
        """The request's constraint, while its prompt is being computed: it is there when it is wanted."""
        constraint = stream.job.request.constraint
        if constraint is None:
            return None

        async def ahead() -> None:
            with contextlib.suppress(FleetError):  # Told when it is wanted.
                await self._engine.matcher(constraint, ())

        return asyncio.get_running_loop().create_task(ahead())

    def proceed(self, stream: Stream, generated: tuple[int, ...]) -> None:
        first = self._first.get(stream.id)
        if first is None or first.done():
            return
        if generated:
            first.set_result(generated)
        else:
            first.set_exception(BadRequest("Proceed comes with the first token that was drawn"))

    def cancel(self, stream: Stream, reason: CancelReason) -> None:
        self._first.pop(stream.id, None)
        self._intake.cancel(stream)

    def release(self, lease: LeaseId) -> None:
        self._transfer.release(lease)

    def renew(self, lease: LeaseId) -> None:
        """Routers know of no lease of this role's."""

    def lease_ended(self, lease: LeaseId, why: str) -> None:
        self._borrowing.lease_ended(lease)

    def stepped(self, report: StepReport) -> None:
        """The engine's sink."""
        tell(report, self._chassis.stream)
        self._chassis.publish(report.events)

    def report(self, base: LoadReport) -> LoadReport:
        counters = {**self._transfer.counters(), **self._borrowing.counters, **self._counters}
        report = figures(base, self._engine.load(), counters)
        return replace(report, pull_bytes_s=self._transfer.pull_bytes_s)

    def busy(self) -> bool:
        load = self._engine.load()
        return bool(load.running or load.waiting or self._intake)

    def idle(self) -> bool:
        return not (self.busy() or self._engine.loans)
