"""The prefix index: which worker caches which block, as far as it has been proven. Pure.

A dict from 64-bit block name to a bitmask of workers. Each life of a worker has a slot, which is one bit;
forgetting a worker gives up its slot at once, and the bits are swept out later, so that losing a
hundred workers' events in one moment does not stall the router. A worker's entries are trusted while
its events came without a gap and its digests agree; else it is *unproven* until a snapshot is loaded,
and meanwhile it is matched by what this router itself sent there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from fleet.events import BlocksDropped, BlocksStored, Cleared, KvDigest, KvEvents, KvSnapshot, Tier
from fleet.ids import Incarnation, WorkerId
from router.settings import IndexSettings


class Outcome(StrEnum):
    """What became of an event message, a digest or a snapshot."""

    APPLIED = "applied"
    OLD = "old"
    """A duplicate, or of an earlier life: nothing changed."""
    WAITING = "waiting"
    """Kept until the worker's snapshot is there."""
    UNPROVEN = "unproven"
    """It showed that the index is wrong: a snapshot is needed."""
    STRANGER = "stranger"
    """Of a worker that is not known here."""


@dataclass(slots=True)
class _Worker:
    incarnation: Incarnation
    slot: int
    """Bit in the masks."""
    sequence: int = 0
    """Last event that is in the index."""
    why: str | None = "new"
    """Why it is unproven; None: proven."""
    tail: dict[int, KvEvents] = field(default_factory=dict)
    """By sequence: what came while unproven."""
    blocks: int = 0
    xor: int = 0
    capped: bool = False
    """Some of its blocks were forgotten to stay within the cap: its digest cannot agree any more."""
    promised: int = 0
    """The last event that a digest spoke of; not here by the next digest, it is lost."""
    past: deque[Incarnation] = field(default_factory=lambda: deque(maxlen=4))


class PrefixIndex:
    def __init__(self, settings: IndexSettings) -> None:
        self._settings = settings
        self._table: dict[int, int] = {}
        self._workers: dict[WorkerId, _Worker] = {}
        self._owner: dict[int, WorkerId] = {}
        """Slot bit → worker."""
        self._live = 0
        """Bits of slots in use."""
        self._unproven = 0
        self._retired = 0
        """Bits given up since the current sweep began, or before it and still to be swept."""
        self._sweeping = 0
        """Bits that the current sweep clears."""
        self._sweep: deque[int] = deque()
        """Names the current sweep has still to look at."""
        self._hints: tuple[dict[int, int], dict[int, int]] = ({}, {})
        """What was sent to unproven workers: this period's and the last one's."""
        self._hints_since = 0.0
        self._stale_hints = (0, 0)
        """Bits given up that may still stand in either of them."""
        self.forgotten = 0
        """Blocks dropped to stay within the cap."""

    # -- membership

    def add_worker(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """It is unproven until a snapshot is loaded. The same life again changes nothing."""
        known = self._workers.get(worker)
        if known is None:
            self._workers[worker] = _Worker(incarnation, self._take_slot(worker))
        elif known.incarnation != incarnation:
            self._reborn(worker, known, incarnation)

    def remove_worker(self, worker: WorkerId) -> None:
        """All that was known of it is gone at once."""
        known = self._workers.pop(worker, None)
        if known is not None:
            self._give_up(known)

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
            if message.incarnation in worker.past:
                return Outcome.OLD
            self._reborn(message.worker, worker, message.incarnation)
            self._keep(worker, message)
            return Outcome.UNPROVEN
        if worker.why is not None:
            self._keep(worker, message)
            return Outcome.WAITING
        if message.sequence <= worker.sequence:
            return Outcome.OLD
        if message.sequence != worker.sequence + 1:
            self._lose(message.worker, worker, f"event {message.sequence} came after event {worker.sequence}")
            self._keep(worker, message)
            return Outcome.UNPROVEN
        self._apply(message.worker, worker, message)
        return Outcome.APPLIED

    def load_snapshot(self, snapshot: KvSnapshot) -> Outcome:
        """Replaces all that is known of the worker, then applies the events that came meanwhile.

        A gap among those leaves it unproven.
        """
        worker = self._workers.get(snapshot.worker)
        if worker is None:
            return Outcome.STRANGER
        if snapshot.incarnation != worker.incarnation:
            if snapshot.incarnation in worker.past:
                return Outcome.OLD
            self._reborn(snapshot.worker, worker, snapshot.incarnation)
        elif worker.why is None and snapshot.sequence <= worker.sequence:
            return Outcome.OLD
        self._renew(snapshot.worker, worker)
        worker.why = None
        self._unproven &= ~worker.slot
        worker.sequence = snapshot.sequence
        self._store(worker, snapshot.hashes)
        tail, worker.tail = worker.tail, {}
        for sequence in sorted(tail):
            if self.apply(tail[sequence]) is Outcome.UNPROVEN:
                worker.tail = {n: kept for n, kept in tail.items() if n > worker.sequence}
                return Outcome.UNPROVEN
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
        if not known.capped and (digest.blocks, digest.xor) != (known.blocks, known.xor):
            self._lose(
                worker, known, f"digest of {known.blocks} blocks differs from the worker's {digest.blocks}"
            )
            return Outcome.UNPROVEN
        return Outcome.APPLIED

    # -- what this router does

    def sent(self, worker: WorkerId, hashes: Sequence[int], now: float) -> None:
        """A prompt of these blocks went there. Remembered only while the worker is unproven."""
        known = self._workers.get(worker)
        if known is None or known.why is None:
            return
        self._turn_hints(now)
        hints, bit = self._hints[0], known.slot
        for name in hashes:
            hints[name] = hints.get(name, 0) | bit
        if len(hints) > self._settings.max_hints // 2:
            self._next_hints(now)

    def match(self, hashes: Sequence[int], now: float) -> dict[WorkerId, int]:
        """Leading blocks each worker is believed to hold; workers with none are absent.

        A worker that holds a block holds those before it (caches evict from the leaf), so that few
        depths are found by halving the runs whose ends differ, many by walking. Were a cache to have a
        hole behind its first block, halving could overstate: the answer is a hint.
        """
        depths = self._depths(self._table, hashes, self._live & ~self._unproven) if hashes else {}
        if self._unproven and hashes:
            self._turn_hints(now)
            for hints in self._hints:
                for bit, depth in self._depths(hints, hashes, self._unproven).items():
                    depths[bit] = max(depths.get(bit, 0), depth)
        owner = self._owner
        return {owner[bit]: depth for bit, depth in depths.items()}

    def tidy(self, now: float, budget: int = 20_000) -> None:
        """Sweeps given-up bits out of up to `budget` entries; to be called now and then."""
        self._turn_hints(now)
        if not self._sweep:
            if self._sweeping:
                self._retired &= ~self._sweeping
                self._sweeping = 0
            if not self._retired:
                return
            self._sweeping = self._retired
            self._sweep.extend(self._table)
        keep, table, sweep = ~self._sweeping, self._table, self._sweep
        for _ in range(min(budget, len(sweep))):
            name = sweep.popleft()
            mask = table.get(name)
            if mask is None or not mask & self._sweeping:
                continue
            if mask & keep:
                table[name] = mask & keep
            else:
                del table[name]

    # -- what is known

    @property
    def size(self) -> int:
        """Blocks in the table, those to be swept included."""
        return len(self._table)

    def blocks(self, worker: WorkerId) -> int:
        known = self._workers.get(worker)
        return known.blocks if known is not None else 0

    def unproven(self) -> dict[WorkerId, str]:
        """Workers that need a snapshot, and why."""
        return {id: worker.why for id, worker in self._workers.items() if worker.why is not None}

    def holds(self, worker: WorkerId) -> frozenset[int]:
        """All blocks believed to be there; slow, for tests and operators."""
        known = self._workers.get(worker)
        if known is None:
            return frozenset()
        return frozenset(name for name, mask in self._table.items() if mask & known.slot)

    def validate(self) -> None:
        """AssertionError on a broken invariant."""
        slots = [worker.slot for worker in self._workers.values()]
        assert len(set(slots)) == len(slots), "two workers share a slot"
        assert sum(slots) == self._live, "live bits are not those of the workers"
        assert not self._live & self._retired, "a slot is live and retired"
        assert not self._sweeping & ~self._retired, "a slot is swept and was never given up"
        assert self.size <= self._settings.max_blocks, "the table is over its cap"
        for id, worker in self._workers.items():
            held = self.holds(id)
            xor = 0
            for name in held:
                xor ^= name
            assert (len(held), xor) == (worker.blocks, worker.xor), f"{id}: count or xor is off"
            assert bool(self._unproven & worker.slot) == (worker.why is not None), f"{id}: proven bit is off"
            assert worker.why is None or not held, f"{id}: unproven and holds blocks"
        for mask in self._table.values():
            assert mask, "an entry of nobody"
            assert not mask & ~(self._live | self._retired), "a bit without an owner"

    # -- how

    def _apply(self, id: WorkerId, worker: _Worker, message: KvEvents) -> None:
        worker.sequence = message.sequence
        for event in message.events:
            match event:
                case BlocksStored(hashes, Tier.DEVICE):
                    self._store(worker, hashes)
                case BlocksDropped(hashes, Tier.DEVICE):
                    self._drop(worker, hashes)
                case Cleared():
                    self._renew(id, worker)
                case _:
                    pass  # Lower tiers are not indexed: what is only there must be brought back first.

    def _store(self, worker: _Worker, hashes: Sequence[int]) -> None:
        table, bit, xor, new = self._table, worker.slot, 0, 0
        for name in hashes:
            mask = table.get(name, 0)
            if not mask & bit:
                table[name] = mask | bit
                xor ^= name
                new += 1
        worker.blocks += new
        worker.xor ^= xor
        if len(table) > self._settings.max_blocks:
            self._forget_oldest()

    def _drop(self, worker: _Worker, hashes: Sequence[int]) -> None:
        table, bit, xor, gone = self._table, worker.slot, 0, 0
        for name in hashes:
            mask = table.get(name, 0)
            if mask & bit:
                mask ^= bit
                if mask:
                    table[name] = mask
                else:
                    del table[name]
                xor ^= name
                gone += 1
        worker.blocks -= gone
        worker.xor ^= xor

    def _forget_oldest(self) -> None:
        """In portions: taking the first key of a dict one by one walks over all the holes before it."""
        excess = len(self._table) - self._settings.max_blocks
        for name in list(islice(self._table, excess + self._settings.max_blocks // 16)):
            mask = self._table.pop(name) & self._live
            self.forgotten += 1
            while mask:
                bit = mask & -mask
                mask ^= bit
                worker = self._workers[self._owner[bit]]
                worker.blocks -= 1
                worker.xor ^= name
                worker.capped = True

    def _take_slot(self, id: WorkerId) -> int:
        """A bit that stands in no entry; the worker begins unproven."""
        free = ~(self._live | self._retired | self._stale_hints[0] | self._stale_hints[1])
        slot = free & -free
        self._live |= slot
        self._unproven |= slot
        self._owner[slot] = id
        return slot

    def _give_up(self, worker: _Worker) -> None:
        slot = worker.slot
        self._live &= ~slot
        self._unproven &= ~slot
        del self._owner[slot]
        if worker.blocks:
            self._retired |= slot
        if self._hints[0] or self._hints[1]:
            self._stale_hints = (self._stale_hints[0] | slot, self._stale_hints[1])
        worker.blocks = worker.xor = 0
        worker.capped = False

    def _renew(self, id: WorkerId, worker: _Worker) -> None:
        """Empties the worker's entries, proven or not; its hints stay if it is unproven."""
        if not worker.blocks:
            return
        proven = worker.why is None
        self._give_up(worker)
        worker.slot = self._take_slot(id)
        if proven:
            self._unproven &= ~worker.slot

    def _lose(self, id: WorkerId, worker: _Worker, why: str) -> None:
        if worker.why is None:
            self._renew(id, worker)
            self._unproven |= worker.slot
            worker.promised = 0
            worker.capped = False
            worker.tail.clear()
        worker.why = why

    def _reborn(self, id: WorkerId, worker: _Worker, incarnation: Incarnation) -> None:
        self._give_up(worker)
        worker.slot = self._take_slot(id)
        worker.past.append(worker.incarnation)
        worker.incarnation = incarnation
        worker.sequence = worker.promised = 0
        worker.tail.clear()
        worker.why = "another life of the worker"

    def _keep(self, worker: _Worker, message: KvEvents) -> None:
        worker.tail[message.sequence] = message
        if len(worker.tail) > self._settings.max_tail:
            del worker.tail[min(worker.tail)]

    def _turn_hints(self, now: float) -> None:
        age = now - self._hints_since
        if age >= self._settings.hint_s:
            self._next_hints(now)
            if age >= 2 * self._settings.hint_s:
                self._next_hints(now)

    def _next_hints(self, now: float) -> None:
        self._hints = ({}, self._hints[0])
        self._stale_hints = (0, self._stale_hints[0])
        self._hints_since = now

    @staticmethod
    def _depths(table: dict[int, int], hashes: Sequence[int], among: int) -> dict[int, int]:
        """Slot bit → leading blocks, for the bits `among` that have the first block."""
        first = table.get(hashes[0], 0) & among
        if not first:
            return {}
        return _halve(table, hashes, first) or _walk(table, hashes, first)


def _halve(table: dict[int, int], hashes: Sequence[int], first: int) -> dict[int, int] | None:
    """Halves the runs whose ends differ. None when there are so many depths that walking is faster."""
    get = table.get
    depths: dict[int, int] = {}
    full = first & get(hashes[-1], 0)
    spans = [(0, len(hashes) - 1, first, full)]
    looks = len(hashes) // 24 + 8
    while spans:
        low, high, at_low, at_high = spans.pop()
        lost = at_low & ~at_high
        if not lost:
            continue
        if high - low == 1:
            _put(depths, lost, high)
            continue
        looks -= 1
        if not looks:
            return None
        middle = (low + high) // 2
        at_middle = at_low & get(hashes[middle], 0)
        full &= at_middle | ~at_low
        spans.append((middle, high, at_middle, at_middle & at_high))
        spans.append((low, middle, at_low, at_middle))
    _put(depths, full, len(hashes))
    return depths


def _walk(table: dict[int, int], hashes: Sequence[int], first: int) -> dict[int, int]:
    get, here = table.get, first
    depths: dict[int, int] = {}
    for depth, name in enumerate(hashes):
        if (still := here & get(name, 0)) != here:
            _put(depths, here & ~still, depth)
            here = still
            if not here:
                return depths
    _put(depths, here, len(hashes))
    return depths


def _put(depths: dict[int, int], bits: int, depth: int) -> None:
    while bits:
        bit = bits & -bits
        bits ^= bit
        depths[bit] = depth
