"""Cached KV between workers, for every role: lent to who names it, brought from who holds it.

What does not come in the time it takes to compute it here, or not proven, is computed here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from msgspec.structs import replace

from engine.intake import Intake
from engine.loop import Engine
from engine.words import NewSequence, Reservation
from fleet.block_hash import BlockHash, block_hashes
from fleet.chassis import Stream
from fleet.errors import BadRequest, LeaseExpired, TransferFailed
from fleet.handoff import Holder, KvTicket
from fleet.ids import LeaseId

log = logging.getLogger(__name__)

COUNTERS = ("borrows", "borrowed_tokens", "borrows_failed")
"""Prompts whose beginning was asked for elsewhere; tokens that came; of those prompts, how many had to be
computed from an earlier block on than was hoped."""
_PART = 64
"""Blocks brought at once: those that came before something broke are kept."""


class Peers(Protocol):
    """The transfer layer, as far as it is needed here."""

    def borrow(
        self, holder: Holder, names: Sequence[bytes], have: int, limit_s: float
    ) -> AbstractAsyncContextManager[tuple[KvTicket, int]]: ...

    async def pull(self, ticket: KvTicket, pairs: Sequence[tuple[int, int]], deadline_s: float) -> object: ...


class Borrowing:
    def __init__(self, engine: Engine, intake: Intake, peers: Peers, limit_s: float) -> None:
        """`limit_s`: longest that bringing a beginning may take; 0: never."""
        self._engine = engine
        self._intake = intake
        self._peers = peers
        self._limit_s = limit_s
        self.counters = dict.fromkeys(COUNTERS, 0)

    async def lend(self, lease: LeaseId, names: Sequence[bytes], have: int) -> Sequence[int]:
        """What the transfer layer asks when another worker wants cached blocks."""
        return await self._engine.lend(lease, [BlockHash(name) for name in names], have)

    def lease_ended(self, lease: LeaseId) -> None:
        """Of whatever lease: of those that are no loans, nothing."""
        self._engine.take_back(lease)

    def add(self, stream: Stream, new: NewSequence, holder: Holder | None) -> None:
        """Queues a sequence, like `Intake.add`; with a holder its beginning is brought first."""
        # A prompt that is scored is computed from its start.
        scored = new.sampling.prompt_logprobs >= 0 and not new.generated
        if holder is None or scored or not self._limit_s:
            self._intake.add(stream, new)
        else:
            self._intake.start(stream, self._bring(stream, new, holder))

    async def _bring(self, stream: Stream, new: NewSequence, holder: Holder) -> None:
        ready = await self._intake.constrained(stream, new)
        if ready is None:
            return
        reservation = await self._engine.reserve(replace(ready, fill=True))
        size = self._engine.layout.block_size
        have = [reservation.cached]
        try:
            await self._borrow(new, reservation, holder, have)
        finally:
            # Also after a cancel: what was pulled has ended for sure.
            self._engine.filled(new.id, have[0] * size)

    async def _borrow(
        self, new: NewSequence, reservation: Reservation, holder: Holder, have: list[int]
    ) -> None:
        """Keeps `have[0]` at the number of leading blocks that are here and proven."""
        size, loop = self._engine.layout.block_size, asyncio.get_running_loop()
        known = (*new.prompt, *new.generated)
        cached, wanted = have[0], min(holder.blocks, (len(known) - 1) // size)
        if wanted <= cached:
            return  # It came here meanwhile.
        names = block_hashes(known[: wanted * size], new.keys)
        limit_s = self._worth_s((wanted - cached) * size, holder)
        until = loop.time() + limit_s
        self.counters["borrows"] += 1
        try:
            async with self._peers.borrow(holder, names, cached, limit_s) as (ticket, lent):
                while have[0] < cached + lent:
                    part = range(have[0], min(have[0] + _PART, cached + lent))
                    pairs = [(block - cached, reservation.blocks[block]) for block in part]
                    left_s = until - loop.time()
                    if left_s <= 0:
                        raise TransferFailed(f"to compute it takes no longer than {limit_s:.3f} s")
                    await self._peers.pull(ticket, pairs, left_s)
                    if self._engine.staged:
                        await self._engine.from_host([own for _, own in pairs])
                    have[0] = part.stop
        except (LeaseExpired, TransferFailed, BadRequest) as error:
            log.info("%s: %s lends no more than %d blocks: %s", new.id, holder.worker, have[0], error)
        self.counters["borrowed_tokens"] += (have[0] - cached) * size
        if have[0] < wanted:
            self.counters["borrows_failed"] += 1

    def _worth_s(self, tokens: int, holder: Holder) -> float:
        """No longer than to compute them: by what was measured here, if anything was."""
        speed = self._engine.load().prefill_tokens_s
        return min(self._limit_s, tokens / speed if speed else holder.compute_s)
