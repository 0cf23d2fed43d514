"""Cached blocks that are held for others to read, by names, beside all sequences. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.blocks import BlockPool
from fleet.block_hash import BlockHash


class Loans:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._loans: dict[str, list[int]] = {}
        """Blocks of each, in chain order."""
        self._loaned: Counter[int] = Counter()
        """How many loans hold each of them."""

    def __len__(self) -> int:
        return len(self._loans)

    def lend(self, loan: str, names: Sequence[BlockHash], have: int, share: float) -> tuple[int, ...]:
        """Holds the cached blocks of these names, from a sequence's first on, until `take_back`: as many in a
        row as are here, and as that share of the pool has room for, all loans together. Returns those after
        the first `have`; none: nothing is held."""
        if loan in self._loans:
            raise ValueError(f"{loan} is a loan already")
        blocks = self._pool.cached_chain(names)
        room = int(share * self._pool.blocks) - len(self._loaned)
        for position, block in enumerate(blocks):
            room -= block not in self._loaned
            if room < 0:
                del blocks[position:]
                break
        if len(blocks) <= have:
            return ()
        self._pool.hold(blocks)
        self._loans[loan] = blocks
        self._loaned.update(blocks)
        return tuple(blocks[have:])

    def take_back(self, loan: str) -> bool:
        """Nobody reads the blocks of a loan any more; False when there is none such."""
        blocks = self._loans.pop(loan, None)
        if blocks is None:
            return False
        self._pool.release(blocks)
        for block in blocks:
            self._loaned[block] -= 1
            if not self._loaned[block]:
                del self._loaned[block]
        return True

    def validate(self) -> Counter[int]:
        """How many loans hold each block. AssertionError on a broken invariant."""
        assert self._loaned == sum(map(Counter, self._loans.values()), Counter()), "loans are miscounted"
        return self._loaned
