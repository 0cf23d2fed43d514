"""Which tokens of which sequences are computed in the next step, and what follows from its result. Pure.

It knows no phases. Every sequence has tokens computed and tokens to compute: prompts, decodes, prefix hits,
recomputation after a preemption and KV brought from elsewhere differ in nothing else.

Between `plan` and `apply` (or `fail`) a step is in flight, and the blocks of its sequences stay as they are.
One more may be planned behind it: as if no sequence drew a token that ends it, and without what would have to
be taken back if that is wrong, such as a preemption. Of one that ended nevertheless the second step brings
nothing. Everything else may be called at any time.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Collection
from collections.abc import Sequence as Row
from dataclasses import dataclass
from itertools import islice

import numpy as np
from msgspec import Struct

from engine import policy
from engine.blocks import BlockPool, PoolCounts
from engine.loans import Loans
from engine.sequence import Sequence, State
from engine.settings import EngineSettings
from engine.words import (
    Batch,
    BatchResult,
    Chunk,
    Drawn,
    Finished,
    Held,
    Matcher,
    NewSequence,
    Ready,
    Reservation,
    Scored,
    StepReport,
)
from fleet.block_hash import BlockHash, BlockNamer, packed
from fleet.errors import BadConstraint, BadRequest, FleetError, Internal, Overloaded
from fleet.request import FinishReason


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of sequences that were started."""
    cached_tokens: int = 0
    """Of those, found in the prefix cache."""
    filled_tokens: int = 0
    """Brought from elsewhere."""
    computed_tokens: int = 0
    """Computed by the runner, all kinds."""
    discarded_tokens: int = 0
    """Not among them: computed of sequences that had ended when it was known what they drew before."""
    recomputed_tokens: int = 0
    """Of those, computed before and lost by preemption."""
    generated_tokens: int = 0
    preemptions: int = 0
    stalled_steps: int = 0
    """Steps in which a sequence had to wait for blocks that only others, outside the batch, can give back."""
    runner_failures: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0


class Plan(Struct, frozen=True):
    """A step. `report` is to be told before it runs."""

    batch: Batch
    """Without chunks when there is nothing to compute now."""
    report: StepReport
    why: tuple[str, ...] = ()
    """Decisions worth a line in the log."""


class _Flight(Struct):
    """A step that is planned and has not ended."""

    rows: list[tuple[Sequence, Chunk]]
    blocks: list[list[int]] = []
    """Chains that it may still read or write, though their sequences gave them up: free when it ends."""


@dataclass(slots=True)
class _GivenUp:
    """A reservation that was cancelled: blocks to which a transfer may still write."""

    blocks: list[int]
    names: list[BlockHash]
    """Of the whole sequence's full blocks."""
    first: int
    """Blocks of it before these, which were in the cache."""


class Scheduler:
    def __init__(
        self,
        *,
        blocks: int,
        block_size: int,
        max_tokens: int,
        settings: EngineSettings,
        vocabulary: int = 1 << 32,
    ) -> None:
        """`blocks` of `block_size` tokens; `max_tokens`: longest sequence the model allows; `vocabulary`: its
        token ids are below this."""
        self.pool = BlockPool(blocks, caching=settings.prefix_cache)
        self.counters = Counters()
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._vocabulary = vocabulary
        self._settings = settings
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._filling: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}
        self._quarantine: dict[str, _GivenUp] = {}
        self._loans = Loans(self.pool)
        self._slots = list(range(settings.max_batch - 1, -1, -1))
        self._arrivals = 0
        self._flights: deque[_Flight] = deque()
        """In order; at most two."""
        self._started: list[str] = []
        self._finished: list[Finished] = []
        self._reservations: list[Reservation] = []
        self._why: list[str] = []

    # What others ask for, at any time.

    def add(self, new: NewSequence) -> None:
        """Queues it. BadRequest when it could never run here, Overloaded when the queue is full."""
        tokens = self._checked(new)
        sequence = Sequence.of(new, self._arrivals)
        self._arrivals += 1
        if self.pool.caching:
            full = len(sequence.tokens) // self._block_size * self._block_size
            sequence.namer = BlockNamer(sequence.keys)
            sequence.names = sequence.namer.extend_packed(tokens[: 4 * full])
        self._sequences[new.id] = sequence
        insort(self._waiting, sequence, key=policy.turn)
        if new.fill:
            self._reserve()

    def take_reservations(self) -> tuple[Reservation, ...]:
        """Granted since the last call."""
        if not self._reservations:
            return ()
        granted, self._reservations = tuple(self._reservations), []
        return granted

    def filled(
        self, id: str, tokens: int, generated: tuple[int, ...] = (), matcher: Matcher | None = None
    ) -> None:
        """The KV of the first `tokens` tokens of a reservation is valid, and nothing writes to its blocks
        any more; the rest is computed here. Once for each reservation, also after `cancel`: what came is
        cached then.

        `generated`: what was drawn elsewhere since it was reserved, with the matcher that has accepted it.
        """
        if id in self._quarantine:
            self._end_quarantine(self._quarantine.pop(id), tokens // self._block_size)
            return
        sequence = self._filling.get(id)
        if sequence is None:
            raise ValueError(f"{id} is not a reservation that waits to be filled")
        known = len(sequence.tokens) + len(generated)
        if not 0 <= tokens < known:
            raise ValueError(f"{id}: {tokens} tokens filled; at most {known - 1} can be")
        if generated and self._blocks_for(known - 1) > len(sequence.blocks):
            raise ValueError(f"{id}: {known} tokens; {len(sequence.blocks)} blocks were reserved")
        del self._filling[id]
        sequence.tokens += generated
        sequence.matcher = matcher or sequence.matcher
        self.counters.filled_tokens += max(0, tokens - sequence.computed)
        sequence.computed = max(sequence.computed, tokens)
        if known == sequence.prompt_length:  # Else its prompt was computed elsewhere, for this request.
            sequence.cached_tokens = max(sequence.cached_tokens, tokens)
        sequence.fill = False
        sequence.state = State.RUNNING
        self._running[id] = sequence
        self._name_full_blocks(sequence)

    def cancel(self, id: str) -> bool:
        """Ends a sequence in any phase; False when there is none, or it has had its last word (held)."""
        sequence = self._sequences.get(id)
        if sequence is None or sequence.cancelled or sequence.state is State.HELD:
            return False
        if sequence.in_flight:
            sequence.cancelled = True
        else:
            self._finish(sequence, FinishReason.CANCELLED)
        return True

    def release(self, id: str) -> None:
        """Nobody reads the blocks of a held or lent sequence any more. Idempotent."""
        sequence = self._sequences.get(id)
        if sequence is None:
            return
        sequence.lend, sequence.lent = False, 0
        if sequence.state is State.HELD:
            self._let_go(sequence)

    def lend(self, loan: str, names: Row[BlockHash], have: int) -> tuple[int, ...]:
        """Holds the cached blocks of these names for others to read; see `Loans.lend`."""
        return self._loans.lend(loan, names, have, self._settings.lend_share)

    def take_back(self, loan: str) -> bool:
        """Nobody reads the blocks of a loan any more; False when there is none such."""
        return self._loans.take_back(loan)

    def retune(self, settings: EngineSettings) -> None:
        """Sizes the steps by these from the next one on; what else they say is not looked at."""
        used = {s.slot for s in self._sequences.values() if s.slot >= 0}
        # Slots beyond a smaller batch are given up as their sequences end.
        self._slots = [slot for slot in range(settings.max_batch - 1, -1, -1) if slot not in used]
        self._settings = settings

    # The step.

    def plan(self) -> Plan:
        """The next step; and who started, or ended without one. With one in flight: the step behind it, or
        none where that cannot be planned yet."""
        assert len(self._flights) < 2, "two steps are in flight"
        rows: list[tuple[Sequence, Chunk]] = []
        running = self._going_on() if self._flights else self._running.values()
        if running is not None and self._grow(running):
            prompts: list[tuple[Sequence, int]] = []
            for sequence in running:
                if (left := sequence.left()) == 1:
                    rows.append(self._chunk(sequence, 1))
                else:
                    prompts.append((sequence, left))
            if prompts or self._waiting:
                rows += self._prompt_chunks(prompts, self._settings.max_step_tokens - len(rows))
        if rows:
            self._flights.append(_Flight(rows))
            self.counters.steps += 1
        why, self._why = tuple(self._why), []
        return Plan(Batch(tuple([chunk for _, chunk in rows])), self._report(), why)

    def apply(self, result: BatchResult) -> StepReport:
        """What the first step in flight brought. Raises `Internal`, changing nothing, when the result does
        not fit the batch; it is then to be failed."""
        assert self._flights, "no step is in flight"
        rows, size = self._flights[0].rows, self._block_size
        _check_fits(result, rows)
        scores = result.scores or ((),) * len(rows)
        self._end_flight()
        drawn: list[Drawn] = []
        held: list[Held] = []
        scored: list[Scored] = []
        ready: list[Ready] = []
        logprobs = result.logprobs or (None,) * len(rows)
        running = State.RUNNING
        for (sequence, chunk), token, logprob, found in zip(
            rows, result.tokens, logprobs, scores, strict=True
        ):
            if sequence.state is not running:
                self.counters.discarded_tokens += len(chunk.tokens)
                continue
            self._computed(sequence, chunk)
            if sequence.cancelled:
                self._finish(sequence, FinishReason.CANCELLED)
                continue
            if found and (new := found[max(0, sequence.scored - chunk.start - 1) :]):
                scored.append(Scored(sequence.id, sequence.scored, new))
                sequence.scored += len(new)
            if chunk.matcher is not None and (refused := _refused(chunk.matcher, token)) is not None:
                self._finish(sequence, FinishReason.FAILED, refused)
            elif chunk.draw and token is not None:
                sequence.tokens.append(token)
                drawn.append(Drawn(sequence.id, token, logprob))
                finish = sequence.ends_with(self._max_tokens)
                if sequence.hold:
                    held.append(self._held(sequence, finish))
                elif finish is not None:
                    self._finish(sequence, finish)
            elif sequence.lend and sequence.computed // size > sequence.lent:
                ready.append(self._ready(sequence))
        self.counters.generated_tokens += len(drawn)
        return self._report(tuple(drawn), tuple(held), tuple(scored), tuple(ready))

    def fail(self, error: FleetError) -> StepReport:
        """The first step in flight failed: so do its sequences, and only they."""
        self.counters.runner_failures += 1
        for sequence, _ in self._end_flight():
            if sequence.state is not State.RUNNING:
                continue
            if sequence.cancelled:
                self._finish(sequence, FinishReason.CANCELLED)
            else:
                self._finish(sequence, FinishReason.FAILED, error)
        return self._report()

    def _end_flight(self) -> list[tuple[Sequence, Chunk]]:
        assert self._flights, "no step is in flight"
        flight = self._flights.popleft()
        for blocks in flight.blocks:
            self.pool.release(blocks)
        for sequence, chunk in flight.rows:
            sequence.ahead -= len(chunk.tokens)
            sequence.coming -= chunk.draw
        return flight.rows

    # What others look at.

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Queued, or being filled."""
        return len(self._waiting) + len(self._filling)

    @property
    def queued_tokens(self) -> int:
        waiting = sum(s.pending for s in self._waiting if not s.fill)
        return waiting + sum(s.pending for s in self._running.values() if s.pending > 1)

    @property
    def has_work(self) -> bool:
        """Whether a step could be wanted now; what is only being filled or held waits for others."""
        return bool(self._running or self._waiting)

    @property
    def in_flight(self) -> bool:
        """Whether a step is being computed."""
        return bool(self._flights)

    @property
    def others_have_blocks(self) -> bool:
        """Whether blocks are held, lent, being filled or in quarantine: others give them back, in their
        time."""
        own = len(self._running) + len(self._waiting)
        return bool(self._quarantine or len(self._loans)) or len(self._sequences) > own

    @property
    def loans(self) -> int:
        return len(self._loans)

    def totals(self) -> dict[str, int]:
        # Not `asdict`: it copies deeply, and this is asked for with every report.
        own = {name: getattr(self.counters, name) for name in Counters.__slots__}
        return own | {f"block_{name}": getattr(self.pool.counts, name) for name in PoolCounts.__slots__}

    def validate(self, idle: bool = False) -> None:
        """AssertionError on any broken invariant; `idle`: also when anything is left of any sequence."""
        size = self._block_size
        holders: Counter[int] = Counter()
        for sequence in self._sequences.values():
            holders.update(sequence.blocks)
            assert len(set(sequence.blocks)) == len(sequence.blocks), f"{sequence.id} holds a block twice"
            assert sequence.computed + sequence.ahead <= len(sequence.blocks) * size or not sequence.blocks
            assert sequence.table == tuple(sequence.blocks)
            assert sequence.lent * size <= sequence.computed, f"{sequence.id} has lent what is not computed"
            assert not sequence.lent or sequence.lend
        flying = [row for flight in self._flights for row in flight.rows]
        for sequence, _ in flying:
            chunks = [chunk for other, chunk in flying if other is sequence]
            assert sequence.ahead == sum(len(chunk.tokens) for chunk in chunks)
            assert sequence.coming == sum(chunk.draw for chunk in chunks)
        given_up = [blocks for flight in self._flights for blocks in flight.blocks]
        for blocks in given_up:
            holders.update(blocks)
        holders.update(self._loans.validate())
        self.pool.validate(holders)
        for state, group in (
            (State.WAITING, self._waiting),
            (State.FILLING, self._filling.values()),
            (State.RUNNING, self._running.values()),
        ):
            assert all(s.state is state and self._sequences[s.id] is s for s in group)
            assert len(list(group)) == sum(s.state is state for s in self._sequences.values())
        assert all(not s.blocks and s.slot < 0 and not s.computed and not s.lent for s in self._waiting)
        assert self._waiting == sorted(self._waiting, key=policy.turn), "the queue is out of order"
        slots = [s.slot for s in self._sequences.values() if s.slot >= 0] + self._slots
        assert len(set(slots)) == len(slots), "a slot is used twice"
        assert set(range(self._settings.max_batch)) <= set(slots), "a slot is lost"
        assert self.pool.quarantined == sum(len(given_up.blocks) for given_up in self._quarantine.values())
        if idle:
            assert not self._sequences, f"left over: {sorted(self._sequences)}"
            assert not self._loans, f"{len(self._loans)} loans were not taken back"
            assert not self._quarantine, f"never filled: {sorted(self._quarantine)}"
            assert self.pool.available + len(set().union(*given_up)) == self.pool.blocks, "blocks are lost"
            assert not self._finished, "an end was not told"

    # Blocks for the running.

    def _going_on(self) -> list[Sequence] | None:
        """Who runs and will when the step in flight has ended, unless it draws a token that stops it; None
        where somebody's next step cannot be planned before that token is known. All wait for it then: apart
        from the others it would have every second step only."""
        going: list[Sequence] = []
        for sequence in self._running.values():
            goes_on = sequence.goes_on(self._max_tokens)
            if goes_on is None:
                return None
            if goes_on:
                going.append(sequence)
        return going

    def _grow(self, running: Collection[Sequence]) -> bool:
        """A block for each running sequence whose next token opens one. The lowest give way, and no more
        of them than needed, since each that does brings the need and the blocks closer by one at least.
        The lent do not: others read their blocks. Nor do they need any, so with them the last one that
        does gives way too.

        False when only one is left and still finds none: all other blocks are held, being filled, or in
        quarantine. They come back, or become a running sequence that can give way; until then it stalls.
        False, too, behind a step in flight, whose sequences cannot give way, where there are too few.
        """
        size = self._block_size
        need = [s for s in running if len(s.tokens) + s.coming > len(s.blocks) * size]
        if not need:
            return True
        if self._flights and len(need) > self.pool.available:
            return False
        for sequence in [s for s in need if self._blocks_for(len(s.tokens)) > self.pool.blocks]:
            need.remove(sequence)
            self._finish(
                sequence,
                FinishReason.FAILED,
                Overloaded(
                    f"the sequence has {len(sequence.tokens)} tokens; "
                    f"all KV blocks of this worker hold {self.pool.blocks * size}"
                ),
            )
        while len(need) > self.pool.available and len(self._running) > 1:
            able = [sequence for sequence in self._running.values() if not sequence.lent]
            chosen = policy.victim(able, needed=len(need), available=self.pool.available)
            self._why.append(chosen.why)
            self._preempt(chosen.sequence)
            if chosen.sequence in need:
                need.remove(chosen.sequence)
        if len(need) > self.pool.available:
            self.counters.stalled_steps += 1
            self._why.append(f"stall {need[0].id}: no block is available, and nobody runs who could give way")
            return False
        for sequence in need:
            sequence.blocks += self.pool.allocate(1)
            sequence.blocks_changed()
        return True

    def _preempt(self, sequence: Sequence) -> None:
        del self._running[sequence.id]
        self.pool.release(sequence.blocks)
        self._free_slot(sequence)
        sequence.furthest = max(sequence.furthest, sequence.computed)
        sequence.blocks, sequence.computed, sequence.registered = [], 0, 0
        sequence.blocks_changed()
        sequence.preemptions += 1
        sequence.state = State.WAITING
        self.counters.preemptions += 1
        insort(self._waiting, sequence, key=policy.turn)

    # Blocks for the waiting.

    def _reserve(self) -> list[tuple[Sequence, int]]:
        """Grants reservations in turn, and returns the prompts that may be admitted, with the tokens each
        has left to compute: the longest beginning of the queue for which there is room altogether, so that
        in whatever order they are admitted, nobody takes what an earlier one needs."""
        prompts: list[tuple[Sequence, int]] = []
        if not self._waiting:
            return prompts
        growing = sum(not s.hold for s in self._running.values())
        room, slots = self.pool.available, len(self._slots)
        for sequence in list(islice(self._waiting, policy.LOOK_AHEAD)):
            total, hits = self._wanted(sequence)
            room -= total - hits
            slots -= 1
            if slots < 0 or room < policy.spare_blocks(growing, sequence.preemptions):
                break
            growing += not sequence.hold
            if not sequence.fill:
                prompts.append((sequence, len(sequence.tokens) - hits * self._block_size))
            elif not self._admit(sequence):
                break
        return prompts

    def _wanted(self, sequence: Sequence) -> tuple[int, int]:
        """Blocks for all known tokens of a waiting sequence, and how many of them are in the cache."""
        known = len(sequence.tokens)
        # At least the last token is computed, because its logits are needed.
        most = 0 if sequence.scoring() else (known - 1) // self._block_size
        hits = self.pool.lookup(sequence.names, most)
        # Of the last token of those drawn elsewhere no KV comes; a prompt's may come whole.
        come = sequence.fill and known > sequence.prompt_length
        return self._blocks_for(known - 1 if come else known), hits

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence a slot and blocks for all its known tokens, those found in the cache
        included; False, changing nothing, when it has to wait."""
        if not self._slots:
            return False
        total, hits = self._wanted(sequence)
        growing = sum(not s.hold for s in self._running.values())
        wanted = total - hits + policy.spare_blocks(growing, sequence.preemptions)
        if self.pool.available < wanted:
            return False
        blocks = self.pool.acquire(sequence.names[:hits])
        if self.pool.available < wanted:
            self.pool.release(blocks)
            return False
        sequence.blocks = blocks + self.pool.allocate(total - hits)
        sequence.blocks_changed()
        sequence.slot = self._slots.pop()
        sequence.registered = hits
        sequence.computed = hits * self._block_size
        if not sequence.preemptions:
            self.counters.prompt_tokens += sequence.prompt_length
        self._count_cached(sequence, 0)
        del self._waiting[bisect_left(self._waiting, policy.turn(sequence), key=policy.turn)]
        if sequence.fill:
            sequence.state = State.FILLING
            self._filling[sequence.id] = sequence
            self._reservations.append(
                Reservation(sequence.id, sequence.table, hits, len(sequence.tokens) - 1)
            )
        else:
            sequence.state = State.RUNNING
            self._running[sequence.id] = sequence
        return True

    # Tokens for the prompts.

    def _prompt_chunks(
        self, prompts: list[tuple[Sequence, int]], budget: int
    ) -> list[tuple[Sequence, Chunk]]:
        """Shares what the decodes left between running prompts and, if they can be admitted, waiting ones."""
        prompts = prompts + self._reserve()
        if not prompts:
            return []
        order = policy.prompt_order(prompts, budget, self._settings.short_prompt_share)
        if order.first.state is State.WAITING and not self._admit(order.first):
            # Nobody is admitted before the first in turn.
            prompts = [pair for pair in prompts if pair[0].state is State.RUNNING]
            if not prompts:
                return []
            order = policy.prompt_order(prompts, budget, self._settings.short_prompt_share)
        closed = False
        taken: dict[Sequence, int] = {}

        def give(sequence: Sequence, limit: int) -> int:
            """Lets it have up to `limit` tokens more, admitting it if need be; returns how many it took."""
            nonlocal closed
            if limit <= 0:
                return 0
            if sequence.state is State.WAITING:
                if closed or not self._admit(sequence):
                    closed = True
                    return 0
            elif sequence not in taken and not self._skip_cached(sequence):
                return 0
            took = min(limit, sequence.left() - taken.get(sequence, 0))
            taken[sequence] = taken.get(sequence, 0) + took
            return took

        share = order.share
        for sequence in order.others:
            used = give(sequence, share)
            share -= used
            budget -= used
            if share <= 0:
                break
        budget -= give(order.first, budget)
        for sequence in order.others:
            budget -= give(sequence, budget)
            if budget <= 0:
                break
        return [self._chunk(sequence, tokens) for sequence, tokens in taken.items()]

    def _skip_cached(self, sequence: Sequence) -> bool:
        """Takes over blocks that others have computed since it was admitted, instead of computing them.
        False: there are such, to be taken over when the step in flight has ended."""
        size = self._block_size
        start, rest = divmod(sequence.computed + sequence.ahead, size)
        if rest or not self.pool.caching or sequence.scoring():
            return True
        end = self.pool.lookup(sequence.names, (len(sequence.tokens) - 1) // size, start)
        if end > start:
            if sequence.in_flight:
                return False
            own = sequence.blocks[start:end]
            sequence.blocks[start:end] = self.pool.acquire(sequence.names[start:end])
            sequence.blocks_changed()
            self.pool.release(own)
            sequence.registered = end
            sequence.computed = end * size
            self._count_cached(sequence, start * size)
        return True

    def _count_cached(self, sequence: Sequence, before: int) -> None:
        """Tokens from `before` to `computed` were found; after a preemption they are its own again."""
        if not sequence.preemptions:
            found = min(sequence.computed, sequence.prompt_length) - min(before, sequence.prompt_length)
            sequence.cached_tokens += found
            self.counters.cached_tokens += found

    def _chunk(self, sequence: Sequence, count: int) -> tuple[Sequence, Chunk]:
        """Its next tokens, in flight from now on."""
        start, known = sequence.computed + sequence.ahead, sequence.tokens
        end = start + count
        carried = sequence.coming > 0
        draw = end == len(known) + carried
        sequence.ahead += count
        sequence.coming += draw
        if not sequence.started:
            sequence.started = True
            self._started.append(sequence.id)
        return sequence, Chunk(
            sequence.slot,
            (0,) if carried else tuple(known[start:end]),
            start,
            sequence.table,
            draw,
            sequence.sampling,
            # Costs O(context) a step.
            tuple(known) if draw and sequence.penalised else (),
            sequence.prompt_length,
            tuple(known[start + 1 : min(end + 1, sequence.prompt_length)]) if sequence.scoring() else (),
            sequence.matcher if draw else None,
            carried,
        )

    # What a step brought.

    def _computed(self, sequence: Sequence, chunk: Chunk) -> None:
        count = len(chunk.tokens)
        self.counters.computed_tokens += count
        if chunk.start < sequence.furthest:
            self.counters.recomputed_tokens += min(count, sequence.furthest - chunk.start)
        sequence.computed = chunk.start + count
        if sequence.computed // self._block_size > sequence.registered:
            self._name_full_blocks(sequence)

    def _name_full_blocks(self, sequence: Sequence) -> None:
        """Puts the blocks that are full now into the cache; where it has one already, uses that."""
        if not self.pool.caching:
            return
        size, names, flying = self._block_size, sequence.names, sequence.in_flight
        swapped = False
        for position in range(sequence.registered, sequence.computed // size):
            parent = names[position - 1] if position else b""
            if position == len(names):
                assert sequence.namer is not None, "a sequence of a pool that caches has a namer"
                names += sequence.namer.extend(sequence.tokens[position * size : (position + 1) * size])
            if flying:
                # The step in flight reads this one, also where the cache has the same already.
                self.pool.hold(own := sequence.blocks[position : position + 1])
                self._flights[-1].blocks.append(own)
            block = self.pool.register(sequence.blocks[position], names[position], parent)
            if block != sequence.blocks[position]:
                sequence.blocks[position] = block
                swapped = True
            sequence.registered = position + 1
        if swapped:
            sequence.blocks_changed()

    def _end_quarantine(self, given_up: _GivenUp, valid: int) -> None:
        """Of the sequence's full blocks the first `valid` hold what their names say: the next one finds them,
        if those before them still are in the cache."""
        first, names = given_up.first, given_up.names[:valid]
        before = self.pool.cached_chain(names[:first])
        come = given_up.blocks[: max(0, len(names) - first)] if len(before) == first else []
        self.pool.end_quarantine(given_up.blocks[len(come) :])
        if not come:
            return
        self.pool.hold(before)
        self.pool.take_from_quarantine(come)
        chain = before
        for position, block in enumerate(come, first):
            chain.append(self.pool.register(block, names[position], names[position - 1] if position else b""))
        self.pool.release(chain)

    def _ready(self, sequence: Sequence) -> Ready:
        """Blocks before `computed` are full and have their names: nothing swaps them any more."""
        sequence.lent = sequence.computed // self._block_size
        return Ready(sequence.id, sequence.table[: sequence.lent])

    def _held(self, sequence: Sequence, finish: FinishReason | None) -> Held:
        del self._running[sequence.id]
        self._free_slot(sequence)
        sequence.state = State.HELD
        self.counters.finished += 1
        return Held(sequence.id, sequence.table, sequence.computed, sequence.cached_tokens, finish)

    def _finish(self, sequence: Sequence, finish: FinishReason, error: FleetError | None = None) -> None:
        if sequence.state is State.WAITING:
            del self._waiting[bisect_left(self._waiting, policy.turn(sequence), key=policy.turn)]
        elif sequence.state is State.FILLING:
            del self._filling[sequence.id]
            cached = sequence.computed // self._block_size
            # A transfer may still write to the others.
            self.pool.quarantine(sequence.blocks[cached:])
            self._quarantine[sequence.id] = _GivenUp(sequence.blocks[cached:], sequence.names, cached)
            del sequence.blocks[cached:]
        else:
            del self._running[sequence.id]
        if sequence.slot >= 0:
            self._free_slot(sequence)
        if sequence.lent:
            sequence.state = State.HELD
        else:
            self._let_go(sequence)
        if finish is FinishReason.CANCELLED:
            self.counters.cancelled += 1
        elif finish is FinishReason.FAILED:
            self.counters.failed += 1
        else:
            self.counters.finished += 1
        self._finished.append(
            Finished(
                sequence.id,
                finish,
                prompt_tokens=sequence.prompt_length,
                completion_tokens=len(sequence.tokens) - sequence.prompt_length,
                cached_tokens=sequence.cached_tokens,
                error=type(error).__name__ if error else "",
                message=error.message if error else "",
            )
        )

    def _let_go(self, sequence: Sequence) -> None:
        if sequence.in_flight:
            self._flights[-1].blocks.append(sequence.blocks)
        else:
            self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.blocks_changed()
        sequence.state = State.FINISHED
        del self._sequences[sequence.id]

    def _free_slot(self, sequence: Sequence) -> None:
        if sequence.slot < self._settings.max_batch:
            self._slots.append(sequence.slot)
        sequence.slot = -1

    def _report(
        self,
        drawn: tuple[Drawn, ...] = (),
        held: tuple[Held, ...] = (),
        scored: tuple[Scored, ...] = (),
        ready: tuple[Ready, ...] = (),
    ) -> StepReport:
        started, self._started = tuple(self._started), []
        finished, self._finished = tuple(self._finished), []
        return StepReport(started, drawn, held, finished, self.pool.take_events(), scored, ready)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _checked(self, new: NewSequence) -> bytes:
        """Its known tokens, packed, if it could run here."""
        known = len(new.prompt) + len(new.generated)
        if new.id in self._sequences or new.id in self._quarantine:
            raise BadRequest(f"a sequence {new.id} is here already; ids must differ")
        if not new.prompt:
            raise BadRequest("the prompt is empty; it must have at least one token", param="prompt")
        if new.keys.block_size != self._block_size:
            raise BadRequest(
                f"block size {new.keys.block_size} in the hash keys; it is {self._block_size} here"
            )
        try:
            tokens = packed(new.prompt + new.generated)
        except struct.error:
            raise BadRequest("token ids must be between 0 and 2**32 - 1", param="prompt") from None
        highest = int(np.frombuffer(tokens, "<u4").max())
        if highest >= self._vocabulary:
            # In a step it would end all sequences of its batch.
            raise BadRequest(
                f"there is no token {highest} in this model; ids go from 0 to {self._vocabulary - 1}",
                param="prompt",
            )
        if len(new.generated) >= new.sampling.max_tokens:
            raise BadRequest(
                f"{len(new.generated)} tokens are generated already; "
                f"max_tokens ({new.sampling.max_tokens}) must be more",
                param="max_tokens",
            )
        longest = min(self._max_tokens - 1, self.pool.blocks * self._block_size)
        if known > longest:
            raise BadRequest(
                f"the prompt has {known} tokens; this model and worker take at most {longest}",
                param="prompt",
                code="context_length_exceeded",
            )
        if len(self._waiting) >= self._settings.max_waiting:
            raise Overloaded(f"{len(self._waiting)} sequences wait already (setting engine.max_waiting)")
        return tokens


def _check_fits(result: BatchResult, rows: list[tuple[Sequence, Chunk]]) -> None:
    """Raises Internal when it is no answer to these chunks."""
    count = len(rows)
    if len(result.tokens) != count or {len(result.logprobs), len(result.scores)} - {0, count}:
        raise Internal(f"the runner answered {len(result.tokens)} of {count} chunks")
    if None in result.tokens:
        for (_, chunk), token in zip(rows, result.tokens, strict=True):
            if token is None and chunk.draw and chunk.matcher is None:
                raise Internal("the runner drew no token where one was to be drawn")
    if result.scores or [chunk for _, chunk in rows if chunk.targets]:
        for (_, chunk), found in zip(rows, result.scores or ((),) * count, strict=True):
            if len(found) != len(chunk.targets):
                raise Internal(f"the runner scored {len(found)} of {len(chunk.targets)} prompt tokens")


def _refused(matcher: Matcher, token: int | None) -> FleetError | None:
    """Lets a sequence's constraint follow what was drawn; why the sequence cannot go on, if it cannot."""
    if token is None:
        return BadConstraint("the constraint leaves no token of this model that could come next")
    if not matcher.accept(token):
        return Internal("the token drawn is not one that the constraint allows")
    return None
