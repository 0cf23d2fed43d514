"""The prefill role: compute a prompt, draw one token, lend the KV until it was pulled."""

from __future__ import annotations

import asyncio
import logging

from engine.intake import Intake
from engine.loop import Engine
from engine.tell import figures, tell
from engine.words import Drawn, Held, NewSequence, StepReport
from fleet.block_hash import HashKeys
from fleet.chassis import Chassis, Stream
from fleet.errors import BadRequest, Internal
from fleet.events import LoadReport
from fleet.handoff import CancelReason, PrefillJob
from fleet.ids import LeaseId
from kv_transfer.transfer import Transfer

log = logging.getLogger(__name__)


class PrefillService:
    """`PrefillJob` in; `Prefilled` with a ticket out. Keeps a sequence's blocks while its lease lives."""

    def __init__(self, chassis: Chassis, engine: Engine, transfer: Transfer) -> None:
        self._chassis = chassis
        self._engine = engine
        self._intake = Intake(engine)
        self._transfer = transfer
        self._lent: dict[LeaseId, str] = {}
        self._staging: set[asyncio.Task[None]] = set()
        self._model = engine.fingerprint.digest()

    def accept(self, stream: Stream) -> None:
        job = stream.job
        if not isinstance(job, PrefillJob):
            raise BadRequest("a prefill worker takes PrefillJob only; send DecodeJob to a decode worker")
        request = job.request
        self._intake.add(
            stream,
            NewSequence(
                id=stream.id,
                prompt=request.prompt,
                sampling=request.sampling,
                keys=HashKeys(self._model, self._engine.layout.block_size, request.adapter, request.salt),
                priority=request.priority,
                hold=True,
            ),
        )

    def cancel(self, stream: Stream, reason: CancelReason) -> None:
        self._intake.cancel(stream)

    def release(self, lease: LeaseId) -> None:
        self._transfer.release(lease)

    def stepped(self, report: StepReport) -> None:
        """The engine's sink."""
        drawn = tell(report, self._chassis.stream)
        for held in report.held:
            if self._engine.staged and held.finish is None:
                task = asyncio.create_task(self._stage(held, drawn[held.id]))
                self._staging.add(task)
                task.add_done_callback(self._staging.discard)
            else:
                self._hand_out(held, drawn[held.id])
        self._chassis.publish(report.events)

    async def _stage(self, held: Held, first: Drawn) -> None:
        """The device's blocks to where readers can reach them, then as always."""
        try:
            await self._engine.to_host(held.blocks)
        except Exception as error:
            # Whatever a device breaks of costs this request only, and its blocks come back.
            log.exception("blocks of %s cannot be copied from the device", held.id)
            self._engine.release(held.id)
            if (stream := self._chassis.stream(held.id)) is not None:
                stream.failed(Internal(f"KV cannot be copied from the device: {type(error).__name__}"))
        else:
            self._hand_out(held, first)

    def _hand_out(self, held: Held, first: Drawn) -> None:
        stream = self._chassis.stream(held.id)
        ticket = None
        if stream is None or held.finish is not None:
            # Nobody waits, or nothing is left to decode: the KV stays in the prefix cache only.
            self._engine.release(held.id)
        else:
            ticket = self._transfer.grant(held.blocks, held.tokens)
            self._lent[ticket.lease] = held.id
        if stream is not None:
            stream.prefilled(first.token, first.logprobs, ticket, held.cached_tokens, held.finish)

    def lease_ended(self, lease: LeaseId, why: str) -> None:
        """The transfer layer's word that no read touches the blocks any more."""
        sequence = self._lent.pop(lease, None)
        if sequence is not None:
            self._engine.release(sequence)

    def report(self, base: LoadReport) -> LoadReport:
        return figures(base, self._engine.load(), {**self._transfer.counters(), "leases": len(self._lent)})

    def _counters(self) -> dict[str, int]:
        return {**self._transfer.counters(), "leases": len(self._lent), "lent_early": self._early}

    def busy(self) -> bool:
        load = self._engine.load()
        return bool(load.running or load.waiting or self._intake or self._staging)

    def idle(self) -> bool:
        return not (self.busy() or self._lent)
