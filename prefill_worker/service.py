"""The prefill role: compute a prompt, draw one token, lend the KV until it was pulled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine.borrowing import Borrowing
from engine.intake import Intake
from engine.loop import Engine
from engine.tell import figures, tell
from engine.words import Drawn, Held, NewSequence, Ready, StepReport
from fleet.block_hash import HashKeys
from fleet.chassis import Chassis, Stream
from fleet.errors import BadRequest, Internal
from fleet.events import LoadReport
from fleet.handoff import CancelReason, KvTicket, PrefillJob
from fleet.ids import LeaseId
from kv_transfer.transfer import Transfer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Loan:
    """KV that is lent while its prompt is being computed."""

    ticket: KvTicket
    blocks: int
    """That are under the lease so far."""
    over: bool = False
    """The lease has ended before the prompt: nobody wants the rest early."""


class PrefillService:
    """`PrefillJob` in; `Prefilled` with a ticket out, and `Lent` before it where a prompt takes several
    steps. Keeps a sequence's blocks while its lease lives."""

    def __init__(self, chassis: Chassis, engine: Engine, transfer: Transfer) -> None:
        self._chassis = chassis
        self._engine = engine
        self._intake = Intake(engine)
        self._transfer = transfer
        self._borrowing = Borrowing(engine, self._intake, transfer, transfer.settings.borrow_limit_s)
        transfer.lend = self._borrowing.lend
        self._lent: dict[LeaseId, str] = {}
        self._loans: dict[str, _Loan] = {}
        """By sequence, until it has its last word."""
        self._staging: dict[str, asyncio.Task[None]] = {}
        """The last copy from the device that each sequence waits for."""
        self._early = 0
        self._model = engine.fingerprint.digest()

    def accept(self, stream: Stream) -> None:
        job = stream.job
        if not isinstance(job, PrefillJob):
            raise BadRequest("a prefill worker takes PrefillJob only; send DecodeJob to a decode worker")
        request = job.request
        self._borrowing.add(
            stream,
            NewSequence(
                id=stream.id,
                prompt=request.prompt,
                sampling=request.sampling,
                keys=HashKeys(self._model, self._engine.layout.block_size, request.adapter, request.salt),
                priority=request.priority,
                hold=True,
                lend=job.lend,
            ),
            job.holder,
        )

    def cancel(self, stream: Stream, reason: CancelReason) -> None:
        self._intake.cancel(stream)

    def proceed(self, stream: Stream, generated: tuple[int, ...]) -> None:
        """This role waits for no tokens."""

    def release(self, lease: LeaseId) -> None:
        self._transfer.release(lease)

    def renew(self, lease: LeaseId) -> None:
        self._transfer.renew(lease)

    def stepped(self, report: StepReport) -> None:
        """The engine's sink."""
        drawn = tell(report, self._chassis.stream)
        for ready in report.ready:
            self._when_there(ready.id, ready.blocks, partial(self._lend, ready))
        for held in report.held:
            blocks = held.blocks if held.finish is None else ()
            self._when_there(held.id, blocks, partial(self._hand_out, held, drawn[held.id]))
        for end in report.finished:
            if end.id in self._loans or end.id in self._staging:
                self._when_there(end.id, (), partial(self._let_go, end.id))
        self._chassis.publish(report.events)

    def _when_there(self, id: str, blocks: Sequence[int], then: Callable[[], None]) -> None:
        """When these blocks are where readers can reach them: at once, or when the device has copied them,
        and in the order of the calls for one sequence."""
        if not self._engine.staged:
            then()
            return
        loan = self._loans.get(id)
        new = blocks[loan.blocks :] if loan is not None else blocks
        task = asyncio.create_task(self._stage(id, self._staging.get(id), new, then))
        self._staging[id] = task
        task.add_done_callback(lambda done: self._staged(id, done))

    def _staged(self, id: str, task: asyncio.Task[None]) -> None:
        if self._staging.get(id) is task:
            del self._staging[id]

    async def _stage(
        self, id: str, before: asyncio.Task[None] | None, blocks: Sequence[int], then: Callable[[], None]
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        try:
            if blocks:
                await self._engine.to_host(blocks)
        except Exception as error:
            # Whatever a device breaks of costs this request only, and its blocks come back.
            request = id.rpartition("/")[0]
            log.exception("blocks of %s cannot be copied from the device", id, extra={"request": request})
            if (stream := self._chassis.stream(id)) is not None:
                stream.failed(Internal(f"KV cannot be copied from the device: {type(error).__name__}"))
            self._engine.cancel(id)
            self._let_go(id)
        else:
            then()

    def _lend(self, ready: Ready) -> None:
        """Part of a prompt can be read; the first time its router is told."""
        loan, stream = self._loans.get(ready.id), self._chassis.stream(ready.id)
        if stream is None:
            self._let_go(ready.id)
        elif loan is None:
            ticket = self._transfer.open(ready.blocks, len(stream.job.request.prompt))
            self._lent[ticket.lease] = ready.id
            self._loans[ready.id] = _Loan(ticket, len(ready.blocks))
            self._early += 1
            stream.lent(ticket)
        elif self._transfer.grows(loan.ticket.lease):
            self._transfer.extend(loan.ticket.lease, ready.blocks[loan.blocks :])
            loan.blocks = len(ready.blocks)

    def _hand_out(self, held: Held, first: Drawn) -> None:
        stream, loan = self._chassis.stream(held.id), self._loans.get(held.id)
        ticket = None
        if stream is None or held.finish is not None:
            # Nobody waits, or nothing is left to decode: the KV stays in the prefix cache only.
            self._let_go(held.id)
        elif loan is None or not self._transfer.grows(loan.ticket.lease):
            self._loans.pop(held.id, None)
            ticket = self._transfer.grant(held.blocks, held.tokens)
            self._lent[ticket.lease] = held.id
        else:
            del self._loans[held.id]
            ticket = loan.ticket
            self._transfer.extend(ticket.lease, held.blocks[loan.blocks :])
            self._transfer.seal(ticket.lease)
        if stream is not None:
            stream.prefilled(first.token, first.logprobs, ticket, held.cached_tokens, held.finish)

    def _let_go(self, id: str) -> None:
        """Nobody will go on with it: its blocks are free when no read touches them any more."""
        loan = self._loans.pop(id, None)
        if loan is None or loan.over:
            self._engine.release(id)
        else:
            self._transfer.release(loan.ticket.lease)

    def lease_ended(self, lease: LeaseId, why: str) -> None:
        """The transfer layer's word that no read touches the blocks any more."""
        self._borrowing.lease_ended(lease)
        sequence = self._lent.pop(lease, None)
        if sequence is None:
            return
        if (loan := self._loans.get(sequence)) is not None:
            loan.over = True
        if sequence not in self._lent.values():  # Else a lease that came after stands, or one before is read.
            self._engine.release(sequence)

    def report(self, base: LoadReport) -> LoadReport:
        report = figures(base, self._engine.load(), self._counters())
        return replace(report, pull_bytes_s=self._transfer.pull_bytes_s)

    def _counters(self) -> dict[str, int]:
        own = {**self._transfer.counters(), **self._borrowing.counters}
        return {**own, "leases": len(self._lent), "lent_early": self._early}

    def busy(self) -> bool:
        load = self._engine.load()
        return bool(load.running or load.waiting or self._intake or self._staging)

    def idle(self) -> bool:
        return not (self.busy() or self._lent or self._engine.loans)
