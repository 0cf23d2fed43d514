"""The decode role: reserve blocks, bring the KV that is lacking or compute it, write tokens to the end."""

from __future__ import annotations

import logging
from dataclasses import replace

from engine.intake import Intake
from engine.loop import Engine
from engine.tell import figures, tell
from engine.words import NewSequence, StepReport
from fleet.block_hash import HashKeys
from fleet.chassis import Chassis, Stream
from fleet.errors import BadRequest, LeaseExpired, TransferFailed
from fleet.events import LoadReport
from fleet.handoff import CancelReason, DecodeJob, KvTicket
from fleet.ids import LeaseId
from fleet.stages import Stage
from kv_transfer.plan import lacking
from kv_transfer.transfer import Transfer

log = logging.getLogger(__name__)

COUNTERS = ("pulls_recomputed", "pulled_tokens", "pull_hit_tokens", "local_prefills")
"""Pulls that became local computing; prompt tokens brought, and found here; jobs without a ticket."""


class DecodeService:
    """`DecodeJob` in; tokens out. KV that does not come, or not proven, is computed here: never guessed."""

    def __init__(self, chassis: Chassis, engine: Engine, transfer: Transfer, pull_limit_s: float) -> None:
        self._chassis = chassis
        self._engine = engine
        self._intake = Intake(engine)
        self._transfer = transfer
        self._pull_limit_s = pull_limit_s
        self._counters = {
            "pulls_recomputed": 0,
            "pulled_tokens": 0,
            "pull_hit_tokens": 0,
            "local_prefills": 0,
        }
        self._pull_bytes_s: float | None = None
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
            self._intake.add(stream, new)
            return
        if job.ticket.tokens != len(request.prompt):
            raise BadRequest(
                f"the ticket covers {job.ticket.tokens} tokens, the prompt has {len(request.prompt)}"
            )
        if not job.generated:
            raise BadRequest("a ticket comes with the first token that was drawn from its KV")
        self._intake.start(stream, self._bring(stream, new, job.ticket))

    async def _bring(self, stream: Stream, new: NewSequence, ticket: KvTicket) -> None:
        """From ticket to runnable sequence. The lease is renewed from now on, also while this one queues."""
        async with self._transfer.keep(ticket):
            ready = await self._intake.constrained(stream, new)
            if ready is None:
                return
            reservation = await self._engine.reserve(ready)
            size = self._engine.layout.block_size
            proven = reservation.cached * size
            try:
                pairs = lacking(reservation.blocks, reservation.cached, ticket.tokens, size)
                self._counters["pull_hit_tokens"] += min(proven, ticket.tokens)
                if pairs:
                    stream.started(Stage.PULL_STARTED)
                    pulled = await self._transfer.pull(ticket, pairs, self._pull_limit_s)
                    if self._engine.staged:
                        await self._engine.from_host([own for _, own in pairs])
                    stream.started(Stage.PULL_ENDED)
                    self._measure(pulled.bytes, pulled.seconds)
                    self._counters["pulled_tokens"] += max(0, ticket.tokens - proven)
                proven = max(proven, ticket.tokens)
            except (LeaseExpired, TransferFailed, BadRequest) as error:
                self._counters["pulls_recomputed"] += 1
                log.warning(
                    "request %s: KV did not come, computing it here: %s", stream.job.request.id, error
                )
            finally:
                # Also after a cancel: the pull has ended for sure, so the blocks may be used again.
                self._engine.filled(new.id, proven)

    def _measure(self, count: int, seconds: float) -> None:
        if seconds > 0:
            rate = count / seconds
            self._pull_bytes_s = rate if self._pull_bytes_s is None else 0.8 * self._pull_bytes_s + 0.2 * rate

    def cancel(self, stream: Stream, reason: CancelReason) -> None:
        self._intake.cancel(stream)

    def release(self, lease: LeaseId) -> None:
        self._transfer.release(lease)

    def lease_ended(self, lease: LeaseId, why: str) -> None:
        """This role lends nothing."""

    def stepped(self, report: StepReport) -> None:
        """The engine's sink."""
        tell(report, self._chassis.stream)
        self._chassis.publish(report.events)

    def report(self, base: LoadReport) -> LoadReport:
        report = figures(base, self._engine.load(), {**self._transfer.counters(), **self._counters})
        return replace(report, pull_bytes_s=self._pull_bytes_s)

    def busy(self) -> bool:
        load = self._engine.load()
        return bool(load.running or load.waiting or self._intake)

    def idle(self) -> bool:
        return not self.busy()
