"""The prefix index: which worker caches which block at which tier, as far as it has been proven. Pure.

For each worker the table that it keeps itself (`fleet/kv_log.py`), folded from the same events. It is
trusted while the events came without a gap and its digests agree; else the worker is *unproven* until a
snapshot is loaded, and meanwhile it is matched by what this router itself sent there.

The tables themselves, and looking prompts up in them, are behind `router/prefix_tables.py`: compiled where
there is a compiler, else in Python. What is trusted, and when, is decided here for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fleet.block_hash import HashKeys
from fleet.events import BlocksStored, Cleared, KvDigest, KvEvents, KvSnapshot, Tier
from fleet.ids import Incarnation, WorkerId
from fleet.kv_log import PART_BLOCKS
from fleet.wire.codec import encode_kv_events
from router.native.tables import tables as tables_here
from router.prefix_tables import Lookup, Table, Tables
from router.settings import IndexSettings


class Outcome(StrEnum):
    """What became of an event message, a digest or a part of a snapshot."""

    APPLIED = "applied"
    OLD = "old"
    """A duplicate, of an earlier life, or not the part that was to come: nothing changed."""
    WAITING = "waiting"
    """More is to come: the worker's snapshot or its next part, or the rest of the events kept meanwhile."""
    UNPROVEN = "unproven"
    """It showed that the index is wrong: a snapshot is needed."""
    STRANGER = "stranger"
    """Of a worker that is not known here, or of another life of it."""


_MISSED = 3
"""Prompts in a row that were never told of: one may have been given up, or evicted at once."""


@dataclass(slots=True)
class _Worker:
    incarnation: Incarnation
    table: Table
    head: bytes
    """With what its messages of events begin."""
    sequence: int = 0
    """Last event that is in the table."""
    why: str | None = "new"
    """Why it is unproven; None: proven."""
    tail: dict[int, KvEvents] = field(default_factory=dict)
    """By sequence: what came while unproven."""
    next_part: int = 0
    """Of the snapshot that is being loaded."""
    loaded: bool = False
    """All parts of it are here; the tail is to follow."""
    known: int = 0
    """Its parts contain something of the events up to this one: only from there on can digests agree."""
    capped: bool = False
    """Some of its blocks were forgotten to stay within the cap: its digest cannot agree any more."""
    promised: int = 0
    """The last event that a digest spoke of; not here by the next digest, it is lost."""
    looked_for: int | None = None
    """First block of a prompt that went there and is to be told of."""
    looked_at: float = 0.0
    missed: int = 0
    """Prompts in a row whose first block was never told of."""
    hints: tuple[Table, ...] = ()
    """What was sent there while it was unproven, in this period and in the last one; or nothing was."""


class PrefixIndex:
    def __init__(self, settings: IndexSettings, tables: Tables[Any] | None = None) -> None:
        """`tables`: of which kind; None: the quickest that there is here."""
        self._settings = settings
        self._tables: Tables[Any] = tables or tables_here()
        self._workers: dict[WorkerId, _Worker] = {}
        self._proven: dict[bytes, _Worker] = {}
        """By `head`."""
        self._lookups: dict[Tier, Lookup] = {}
        """In the tables of proven workers, down to a tier; forgotten when those change."""
        self._hinted_at: list[Lookup] = []
        """In the hints of the last period and of this one, likewise."""
        self._unproven: dict[WorkerId, _Worker] = {}
        self._hinted = 0
        """Blocks in this period's hints, at most."""
        self._hints_since = 0.0
        self.size = 0
        """Blocks in all tables; one that three workers hold, or one worker at three tiers, counts thrice."""
        self.forgotten = 0
        """Blocks dropped to stay within the cap."""

    # -- membership

    def add_worker(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """It is unproven until a snapshot is loaded. The same life again changes nothing."""
        known = self._workers.get(worker)
        if known is None:
            made = _Worker(incarnation, self._tables.table(), _head(worker, incarnation))
            self._workers[worker] = self._unproven[worker] = made
        elif known.incarnation != incarnation:
            self._reborn(worker, known, incarnation)

    def remove_worker(self, worker: WorkerId) -> None:
        """All that was known of it is gone at once."""
        known = self._workers.pop(worker, None)
        if known is not None:
            self._proven.pop(known.head, None)
            if self._unproven.pop(worker, None) is not None:
                self._hinted_at.clear()
            self._empty(known)

    def doubt(self, worker: WorkerId, why: str) -> None:
        """Its entries are not to be trusted any more, for a reason seen elsewhere."""
        known = self._workers.get(worker)
        if known is not None:
            self._lose(worker, known, why)

    # -- what workers say

    def apply(self, message: KvEvents) -> Outcome:
        worker = self._workers.get(message.worker)
        if worker is None:
            return Outcome.STRANGER
        if message.incarnation != worker.incarnation:
            # Only the registry says which life is the present one: what a dead one said may come late.
            return Outcome.STRANGER
        if worker.why is not None:
            self._keep(worker, message)
            return Outcome.WAITING
        if message.sequence <= worker.sequence:
            return Outcome.OLD
        if message.sequence != worker.sequence + 1:
            self._lose(message.worker, worker, f"event {message.sequence} came after event {worker.sequence}")
            self._keep(worker, message)
            return Outcome.UNPROVEN
        self._apply(worker, message)
        return Outcome.APPLIED

    def follow(self, data: bytes) -> bool:
        """Takes in an encoded message, in a fraction of the time, if it is a proven worker's next one and in
        its usual form. Else nothing has changed: it is to be decoded and given to `apply`."""
        try:
            start = 4 + data[1] + data[3 + data[1]]
        except IndexError:
            return False
        worker = self._proven.get(data[:start])
        if worker is None:
            return False
        grown = worker.table.follow(data, start, worker.sequence + 1)
        if grown is None:
            return False
        worker.sequence += 1
        self._grow(grown)
        if worker.looked_for is not None:
            self._look(worker)
        return True

    def load_snapshot(self, part: KvSnapshot) -> Outcome:
        """The first part replaces all that is known of the worker; the last one is followed by the events
        that came since the first, see `catch_up`. Until then the worker is unproven."""
        worker = self._workers.get(part.worker)
        if worker is None:
            return Outcome.STRANGER
        if part.incarnation != worker.incarnation:
            return Outcome.STRANGER
        if worker.why is None and part.sequence <= worker.sequence:
            return Outcome.OLD
        if part.part == 0:
            self._lose(part.worker, worker, worker.why or "a newer snapshot")
            self._empty(worker)
            worker.sequence, worker.next_part = part.sequence, 0
            coming = part.parts * len(part.hashes)
            worker.table.expect(min(coming + coming // 16, self._settings.max_blocks))
        elif worker.loaded or part.part != worker.next_part:
            return Outcome.OLD
        worker.next_part += 1
        worker.known = part.sequence
        store = worker.table.store
        self._grow(store(part.hashes) + store(part.host, Tier.HOST) + store(part.disk, Tier.DISK))
        if worker.next_part < part.parts:
            return Outcome.WAITING
        worker.loaded = True
        return self.catch_up(part.worker)

    def catch_up(self, worker: WorkerId, budget: int = PART_BLOCKS) -> Outcome:
        """Takes in about `budget` blocks of the events kept since the first part of a snapshot. WAITING:
        there are more, call it again. A gap among them leaves the worker unproven."""
        known = self._workers.get(worker)
        if known is None:
            return Outcome.STRANGER
        if not known.loaded:
            return Outcome.OLD
        while (message := known.tail.pop(known.sequence + 1, None)) is not None:
            budget -= self._apply(known, message)
            if budget < 0:
                return Outcome.WAITING
        known.tail = {n: kept for n, kept in known.tail.items() if n > known.sequence}
        if known.tail:
            self._empty(known)
            known.why = f"event {min(known.tail)} came after event {known.sequence}"
            return Outcome.UNPROVEN
        known.why = None
        known.loaded = False
        known.hints = ()
        del self._unproven[worker]
        self._proven[known.head] = known
        self._lookups.clear()
        self._hinted_at.clear()
        return Outcome.APPLIED

    def check(self, worker: WorkerId, incarnation: Incarnation, digest: KvDigest) -> Outcome:
        """Compares what the worker says it holds with the index.

        Events travel beside load reports: a digest ahead of them is a promise, broken when the next
        digest finds them still missing.
        """
        known = self._workers.get(worker)
        if known is None:
            return Outcome.STRANGER
        if incarnation != known.incarnation or digest.sequence < known.sequence:
            return Outcome.OLD
        if known.why is not None:
            return Outcome.WAITING
        if digest.sequence > known.sequence:
            if known.promised > known.sequence:
                self._lose(worker, known, f"events up to {known.promised} never came")
                return Outcome.UNPROVEN
            known.promised = digest.sequence
            return Outcome.WAITING
        if digest.sequence < known.known:
            return Outcome.WAITING
        table = known.table
        if not known.capped and (digest.blocks, digest.xor) != (table.blocks, table.xor):
            self._lose(
                worker, known, f"digest of {table.blocks} blocks differs from the worker's {digest.blocks}"
            )
            return Outcome.UNPROVEN
        return Outcome.APPLIED

    # -- what this router does

    def sent(self, worker: WorkerId, names: Sequence[int], now: float) -> None:
        """A prompt of these blocks went there. Remembered only while the worker is unproven; of a proven one
        it is looked now and then whether it tells of what it was sent, see `unfound`."""
        known = self._unproven.get(worker)
        if known is None:
            if (proven := self._workers.get(worker)) is not None and proven.looked_for is None and len(names):
                proven.looked_for, proven.looked_at = names[0], now
                self._look(proven)
            return
        self._turn_hints(now)
        if not known.hints:
            known.hints = self._tables.table(), self._tables.table()
            self._hinted_at.clear()
        self._hinted += known.hints[0].store(names)
        if self._hinted > self._settings.max_hints // 2:
            self._next_hints(now)

    def match(self, names: Sequence[int], now: float, tier: Tier = Tier.DEVICE) -> dict[WorkerId, int]:
        """Leading blocks that each worker is believed to hold at `tier` or a nearer one; workers with none
        are absent. Of lower tiers only what is proven is known."""
        if not len(names):
            return {}
        lookup = self._lookups.get(tier)
        if lookup is None:
            proven = {id: worker.table for id, worker in self._workers.items() if worker.why is None}
            lookup = self._lookups[tier] = self._tables.lookup(proven, tier)
        depths = lookup(names)
        if self._unproven:
            self._turn_hints(now)
            for lookup in self._hinted_at or self._look_at_hints():
                for id, depth in lookup(names).items():
                    depths[id] = max(depths.get(id, 0), depth)
        return depths

    def names(self, tokens: Sequence[int], keys: HashKeys) -> Sequence[int]:
        """Short names of a prompt's full blocks, in the form that is matched quickest."""
        return self._tables.names(tokens, keys)

    def tidy(self, now: float, budget: int = 20_000) -> None:
        """Forgets old hints, frees up to `budget` blocks of tables given up; to be called now and then."""
        self._turn_hints(now)
        for worker in self._workers.values():
            if worker.looked_for is not None and now - worker.looked_at > self._settings.told_s:
                worker.looked_for = None
                worker.missed += 1
        self._tables.tidy(budget)

    # -- what is known

    def blocks(self, worker: WorkerId) -> int:
        known = self._workers.get(worker)
        return known.table.blocks if known is not None and known.why is None else 0

    def doubted(self, worker: WorkerId) -> str | None:
        """Why it needs a snapshot; None: it does not, or is not known."""
        known = self._unproven.get(worker)
        return known.why if known is not None else None

    def unproven(self) -> dict[WorkerId, str]:
        """Workers that need a snapshot, and why."""
        return {id: worker.why or "" for id, worker in self._unproven.items()}

    def unfound(self) -> frozenset[WorkerId]:
        """Proven workers that tell of other blocks than those that they are sent: either they cache nothing,
        or they name blocks otherwise than this router, and no prompt will ever be found there."""
        return frozenset(id for id, worker in self._workers.items() if worker.missed >= _MISSED)

    def holds(self, worker: WorkerId, tier: Tier = Tier.DEVICE) -> frozenset[int]:
        """All blocks believed to be there, for tests and operators."""
        known = self._workers.get(worker)
        if known is None or known.why is not None:
            return frozenset()
        return frozenset(known.table.at(tier))

    def validate(self) -> None:
        """AssertionError on a broken invariant."""
        assert self.size == sum(worker.table.blocks for worker in self._workers.values()), "size is off"
        assert self.size <= self._settings.max_blocks, "the index is over its cap"
        for id, worker in self._workers.items():
            worker.table.validate()
            assert (worker.why is None) != (id in self._unproven), f"{id}: proven and not"
            assert worker.why is None or worker.next_part or not worker.table.blocks
            assert worker.why is not None or not (worker.tail or worker.hints or worker.loaded)
            assert (worker.why is None) == (self._proven.get(worker.head) is worker), f"{id}: followed or not"
        assert len(self._proven) + len(self._unproven) == len(self._workers)
        true = {id: worker.table for id, worker in self._workers.items() if worker.why is None}
        for lookup in self._lookups.values():
            assert lookup.sees(true), "lookups see other tables than events"
        for lookup, period in zip(self._hinted_at, (1, 0), strict=False):
            hinted = {id: worker.hints[period] for id, worker in self._unproven.items() if worker.hints}
            assert lookup.sees(hinted), "lookups see other hints than were made"

    # -- how

    def _apply(self, worker: _Worker, message: KvEvents) -> int:
        """Returns how many blocks it named, and one."""
        worker.sequence = message.sequence
        named, grown = 1, 0
        for event in message.events:
            if isinstance(event, Cleared):
                grown -= self._give_up(worker)
                continue
            if isinstance(event, BlocksStored):
                grown += worker.table.store(event.hashes, event.tier)
            else:
                grown -= worker.table.drop(event.hashes, event.tier)
            named += len(event.hashes)
        self._grow(grown)
        if worker.looked_for is not None:
            self._look(worker)
        return named

    @staticmethod
    def _look(worker: _Worker) -> None:
        if worker.looked_for is not None and worker.table.has(worker.looked_for):
            worker.looked_for, worker.missed = None, 0

    def _grow(self, blocks: int) -> None:
        """Or shrinks. Above the cap the largest tables lose their oldest, a sixteenth at a time."""
        self.size += blocks
        while self.size > self._settings.max_blocks:
            largest, tier = max(
                ((worker, tier) for worker in self._workers.values() for tier in Tier),
                key=lambda at: at[0].table.count(at[1]),
            )
            count = largest.table.count(tier) // 16 + 1
            forgotten = largest.table.drop_oldest(tier, min(count, PART_BLOCKS))
            largest.capped = True
            self.forgotten += forgotten
            self.size -= forgotten

    def _empty(self, worker: _Worker) -> None:
        """Nothing is known of what it holds, nor is a snapshot under way."""
        self.size -= self._give_up(worker)
        worker.next_part = 0
        worker.loaded = worker.capped = False
        worker.promised = worker.known = 0

    def _give_up(self, worker: _Worker) -> int:
        """Returns how many blocks those were."""
        self._lookups.clear()
        return self._tables.clear(worker.table)

    def _lose(self, id: WorkerId, worker: _Worker, why: str) -> None:
        if worker.why is None:
            self._empty(worker)
            self._proven.pop(worker.head, None)
            self._unproven[id] = worker
            worker.looked_for = None
        worker.why = why

    def _reborn(self, id: WorkerId, worker: _Worker, incarnation: Incarnation) -> None:
        self._lose(id, worker, "another life of the worker")
        self._empty(worker)
        worker.incarnation, worker.head = incarnation, _head(id, incarnation)
        worker.sequence = worker.missed = 0
        worker.tail.clear()
        worker.hints = ()
        self._hinted_at.clear()

    def _keep(self, worker: _Worker, message: KvEvents) -> None:
        worker.tail[message.sequence] = message
        if len(worker.tail) > self._settings.max_tail:
            del worker.tail[min(worker.tail)]

    def _look_at_hints(self) -> list[Lookup]:
        hinted = {id: worker.hints for id, worker in self._unproven.items() if worker.hints}
        if hinted:
            self._hinted_at += [
                self._tables.lookup({id: hints[period] for id, hints in hinted.items()}, Tier.DEVICE)
                for period in (1, 0)
            ]
        return self._hinted_at

    def _turn_hints(self, now: float) -> None:
        age = now - self._hints_since
        if age >= self._settings.hint_s:
            self._next_hints(now)
            if age >= 2 * self._settings.hint_s:
                self._next_hints(now)

    def _next_hints(self, now: float) -> None:
        for worker in self._unproven.values():
            if worker.hints:
                last = worker.hints[0]
                worker.hints = (self._tables.table(), last) if last.blocks else ()
        self._hinted_at.clear()
        self._hinted = 0
        self._hints_since = now


def _head(worker: WorkerId, incarnation: Incarnation) -> bytes:
    """With what each message of that life begins: what is zero or empty is not written."""
    try:
        return encode_kv_events(KvEvents(worker, incarnation, 0, ()))
    except ValueError:  # It cannot be said, so nothing will begin so.
        return f"{worker} {incarnation}".encode(errors="replace")
