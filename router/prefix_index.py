"""The prefix index: which worker caches which block at which tier, as far as it has been proven. Pure.

For each worker the table that it keeps itself (`fleet/kv_log.py`), folded from the same events. It is
trusted while the events came without a gap and its digests agree; else the worker is *unproven* until a
snapshot is loaded, and meanwhile it is matched by what this router itself sent there.

A lookup touches few blocks: a worker that holds a block holds those before it (caches evict from the leaf),
so the depth of a prefix is found by halving, for workers of the same depth once. Were a cache to have a
hole, that could overstate: the answer is a hint, and workers look for themselves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import compress, repeat
from operator import contains, gt, not_

from fleet.block_hash import PromptNames
from fleet.events import Cleared, KvDigest, KvEvents, KvSnapshot, Tier
from fleet.ids import Incarnation, WorkerId
from fleet.kv_log import PART_BLOCKS, KvTable
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


_LONG = 128
"""Blocks of a prompt, all of which are rather not worked out."""
_FEW = 12
"""Workers of different depths of which each is looked up by itself."""
_MISSED = 3
"""Prompts in a row that were never told of: one may have been given up, or evicted at once."""
_Holders = tuple[list[WorkerId], list[Container[int]]]
"""Workers, and of each what it holds, in the same order."""


@dataclass(slots=True)
class _Worker:
    incarnation: Incarnation
    table: KvTable = field(default_factory=KvTable)
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
    hints: tuple[dict[int, None], dict[int, None]] = field(default_factory=lambda: ({}, {}))
    """What was sent there while it was unproven, in this period and in the last one."""


class PrefixIndex:
    def __init__(self, settings: IndexSettings) -> None:
        self._settings = settings
        self._workers: dict[WorkerId, _Worker] = {}
        self._holders: _Holders | None = None
        """What proven workers hold on the device; None: to be collected again."""
        self._unproven: dict[WorkerId, _Worker] = {}
        self._hinted = 0
        """Blocks in this period's hints, at most."""
        self._hints_since = 0.0
        self._bin: list[dict[int, int]] = []
        """Tables given up. To free a large one takes milliseconds, so that is done bit by bit."""
        self.size = 0
        """Blocks in all tables; one that three workers hold, or one worker at three tiers, counts thrice."""
        self.forgotten = 0
        """Blocks dropped to stay within the cap."""

    # -- membership

    def add_worker(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """It is unproven until a snapshot is loaded. The same life again changes nothing."""
        known = self._workers.get(worker)
        if known is None:
            self._workers[worker] = self._unproven[worker] = _Worker(incarnation)
        elif known.incarnation != incarnation:
            self._reborn(worker, known, incarnation)

    def remove_worker(self, worker: WorkerId) -> None:
        """All that was known of it is gone at once."""
        known = self._workers.pop(worker, None)
        if known is not None:
            self._unproven.pop(worker, None)
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
        known.hints = ({}, {})
        del self._unproven[worker]
        self._holders = None
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
        hints = known.hints[0]
        before = len(hints)
        hints.update(dict.fromkeys(names))
        self._hinted += len(hints) - before
        if self._hinted > self._settings.max_hints // 2:
            self._next_hints(now)

    def match(self, names: Sequence[int], now: float, tier: Tier = Tier.DEVICE) -> dict[WorkerId, int]:
        """Leading blocks that each worker is believed to hold at `tier` or a nearer one; workers with none
        are absent. Of lower tiers only what is proven is known."""
        if not len(names):
            return {}
        depths = _depths(self._collect() if tier is Tier.DEVICE else self._reach(tier), names)
        if self._unproven:
            self._turn_hints(now)
            for period in (1, 0):
                hints: list[Container[int]] = [worker.hints[period] for worker in self._unproven.values()]
                for id, depth in _depths((list(self._unproven), hints), names).items():
                    depths[id] = max(depths.get(id, 0), depth)
        return depths

    def tidy(self, now: float, budget: int = 20_000) -> None:
        """Forgets old hints, frees up to `budget` blocks of tables given up; to be called now and then."""
        self._turn_hints(now)
        for worker in self._workers.values():
            if worker.looked_for is not None and now - worker.looked_at > self._settings.told_s:
                worker.looked_for = None
                worker.missed += 1
        while self._bin and budget > 0:
            table = self._bin[-1]
            count = min(budget, len(table))
            for _ in range(count):
                table.popitem()
            budget -= count
            if not table:
                self._bin.pop()

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
            assert worker.why is not None or not (worker.tail or any(worker.hints) or worker.loaded)
        if self._holders is not None:
            true = {id: worker.table.held[0] for id, worker in self._workers.items() if worker.why is None}
            assert list(true) == self._holders[0], "lookups see other workers than events"
            seen = zip(true.values(), self._holders[1], strict=True)
            assert all(table is held for table, held in seen), "lookups see other tables than events"

    # -- how

    def _apply(self, worker: _Worker, message: KvEvents) -> int:
        """Returns how many blocks it named, and one."""
        worker.sequence = message.sequence
        named, grown = 1, 0
        for event in message.events:
            if isinstance(event, Cleared):
                grown -= self._give_up(worker)
            else:
                grown += worker.table.apply(event)
                named += len(event.hashes)
        if grown > 0:
            self._grow(grown)
        else:
            self.size += grown
        if worker.looked_for is not None:
            self._look(worker)
        return named

    @staticmethod
    def _look(worker: _Worker) -> None:
        if any(worker.looked_for in held for held in worker.table.held):
            worker.looked_for, worker.missed = None, 0

    def _grow(self, blocks: int) -> None:
        """Above the cap the largest tables lose their oldest, a sixteenth at a time."""
        self.size += blocks
        while self.size > self._settings.max_blocks:
            largest, tier = max(
                ((worker, tier) for worker in self._workers.values() for tier in Tier),
                key=lambda at: len(at[0].table.at(at[1])),
            )
            count = len(largest.table.at(tier)) // 16 + 1
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
        self._bin += [held for held in worker.table.held if len(held) > PART_BLOCKS]
        self._holders = None
        return worker.table.clear()

    def _lose(self, id: WorkerId, worker: _Worker, why: str) -> None:
        if worker.why is None:
            self._empty(worker)
            self._unproven[id] = worker
            worker.looked_for = None
        worker.why = why

    def _reborn(self, id: WorkerId, worker: _Worker, incarnation: Incarnation) -> None:
        self._lose(id, worker, "another life of the worker")
        self._empty(worker)
        worker.incarnation = incarnation
        worker.sequence = worker.missed = 0
        worker.tail.clear()
        worker.hints = ({}, {})

    def _keep(self, worker: _Worker, message: KvEvents) -> None:
        worker.tail[message.sequence] = message
        if len(worker.tail) > self._settings.max_tail:
            del worker.tail[min(worker.tail)]

    def _collect(self) -> _Holders:
        if self._holders is None:
            self._holders = self._reach(Tier.DEVICE)
        return self._holders

    def _reach(self, lowest: Tier) -> _Holders:
        reached = list(Tier).index(lowest) + 1
        proven = {
            id: worker.table.held[:reached] for id, worker in self._workers.items() if worker.why is None
        }
        return list(proven), [held[0] if reached == 1 else _Any(held) for held in proven.values()]

    def _turn_hints(self, now: float) -> None:
        age = now - self._hints_since
        if age >= self._settings.hint_s:
            self._next_hints(now)
            if age >= 2 * self._settings.hint_s:
                self._next_hints(now)

    def _next_hints(self, now: float) -> None:
        for worker in self._unproven.values():
            worker.hints = ({}, worker.hints[0])
        self._hinted = 0
        self._hints_since = now


class _Any:
    """Several tables of one worker."""

    __slots__ = ("_tables",)

    def __init__(self, tables: Sequence[Container[int]]) -> None:
        self._tables = tables

    def __contains__(self, name: object) -> bool:
        return any(name in table for table in self._tables)


def _depths(holders: _Holders, names: Sequence[int]) -> dict[WorkerId, int]:
    """Leading blocks of each that has the first one.

    Workers often share a depth: some are looked at block by block, the others compared with them. Where
    all of those differ each is halved by itself, in C.

    Names that are still to be worked out cost more than looking them up, so that then, for many workers, only
    the last of each grain is: depths are whole grains, too small by less than 8 blocks or, of a long prompt,
    a 32nd of it. The deepest are exact.
    """
    first, count = names[0], len(names)
    rest, begun = holders, False
    found: dict[WorkerId, int] = {}
    while rest[0]:
        ids, tables = rest
        sample = tables[:: len(tables) // 3 + 1]
        if not begun and not all(first in table for table in sample):
            rest, begun = _those(rest, list(map(contains, tables, repeat(first)))), True
            continue
        some = [0]
        for table in sample:
            some.append(_depth(table, names, some[-1]))
        del some[0]
        if len(set(some)) == len(some) < len(tables):
            if not begun:
                ids, tables = _those(rest, list(map(contains, tables, repeat(first))))
            if not isinstance(names, PromptNames) or count < _LONG:
                depths = _halved(tables, names[::-1])
            elif len(tables) > _FEW:
                depths = _grained(tables, names)
            else:
                depths = [_depth(table, names, 0) for table in tables]
            found.update(zip(ids, depths, strict=True))
            break
        depth = max(some, key=some.count)
        # Who holds the last of them holds the first: that needs no look.
        same = list(map(contains, tables, repeat(names[depth - 1])))
        if depth < count:
            same = list(map(gt, same, map(contains, tables, repeat(names[depth]))))
        found.update(zip(compress(ids, same), repeat(depth)))
        rest = _those(rest, list(map(not_, same)))
    return found


def _those(holders: _Holders, wanted: list[bool]) -> _Holders:
    ids, tables = holders
    return list(compress(ids, wanted)), list(compress(tables, wanted))


def _halved(tables: Sequence[Container[int]], backwards: Sequence[int]) -> list[int]:
    count = len(backwards)
    return [count - bisect_left(backwards, True, key=table.__contains__) for table in tables]


def _grained(tables: Sequence[Container[int]], names: PromptNames) -> list[int]:
    grain = names.grain
    grains = _halved(tables, names.coarse()[::-1])
    most = max(grains)
    low, high = max(1, most * grain), min((most + 1) * grain, len(names) + 1)
    return [
        _between(table, names, low, high) if full == most else max(1, full * grain)
        for table, full in zip(tables, grains, strict=True)
    ]


def _depth(table: Container[int], names: Sequence[int], guess: int) -> int:
    """Leading blocks of one that has the first: as many as guessed, or doubled until one is missing and
    then halved, so that names far behind are not worked out for nothing."""
    low, high, count = 1, 2, len(names)
    if guess and names[guess - 1] in table and (guess == count or names[guess] not in table):
        return guess
    while high <= count and names[high - 1] in table:
        low, high = high, 2 * high
    return _between(table, names, low, min(high, count + 1))


def _between(table: Container[int], names: Sequence[int], low: int, high: int) -> int:
    """Leading blocks of one that has `low` of them, and fewer than `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        if names[middle - 1] in table:
            low = middle
        else:
            high = middle
    return low
