"""What each worker holds, and prompts looked up in it: the prefix index's one seam, and its plain half. Pure.

There are two kinds of tables: these, in Python, and compiled ones (`native/tables.py`), which are several
times faster. They differ in nothing but time, except where a prompt's names are still to be worked out: here
depths may then be told a little too small (`_grained`).

A lookup touches few blocks: a worker that holds a block holds those before it (caches evict from the leaf),
so the depth of a prefix is found by halving, for workers of the same depth once. Were a cache to have a
hole, that could overstate: the answer is a hint, and workers look for themselves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import compress, repeat
from operator import contains, gt, not_
from typing import Any, Protocol, TypeVar

from fleet.block_hash import HashKeys, PromptNames
from fleet.events import Tier
from fleet.ids import WorkerId
from fleet.kv_log import PART_BLOCKS, KvTable

T = TypeVar("T")
_Holders = tuple[list[WorkerId], list[Container[int]]]
"""Workers, and of each what it holds, in the same order."""


class Lookup(Protocol):
    """In tables as they are whenever it is called."""

    def __call__(self, names: Sequence[int]) -> dict[WorkerId, int]:
        """Of names of a prompt's blocks, how many leading ones each worker holds. With none it is absent."""

    def sees(self, tables: Mapping[WorkerId, Any]) -> bool:
        """Whether it is made for just these."""


class Table(Protocol):
    """What one worker holds, as `fleet.kv_log.KvTable` keeps it. Names are numbers of 64 bits."""

    def expect(self, count: int) -> None:
        """So many are about to be stored on the device: room for all at once, not bit by bit."""

    def store(self, names: Sequence[int], tier: Tier = Tier.DEVICE) -> int: ...
    def drop(self, names: Sequence[int], tier: Tier = Tier.DEVICE) -> int: ...
    def drop_oldest(self, tier: Tier, count: int) -> int: ...
    def at(self, tier: Tier) -> Iterable[int]:
        """The oldest first."""

    def count(self, tier: Tier) -> int: ...
    def has(self, name: int) -> bool:
        """At any tier."""

    @property
    def blocks(self) -> int: ...
    @property
    def xor(self) -> int: ...
    def follow(self, data: bytes, start: int, sequence: int) -> int | None:
        """Takes in an encoded `KvEvents` of that number, which is read from `start` on, behind its two ids;
        returns by how many blocks the table has grown. None, and nothing has changed: it has another number,
        or it is to be decoded."""

    def validate(self) -> None: ...


class Tables(Protocol[T]):
    """One kind of them. Those of one kind are never given to the other."""

    def table(self) -> T: ...
    def clear(self, table: T) -> int:
        """Returns how many blocks it had. Lookups in it are to be made anew."""

    def lookup(self, tables: Mapping[WorkerId, T], lowest: Tier) -> Lookup:
        """In these tables, of each down to that tier."""

    def names(self, tokens: Sequence[int], keys: HashKeys) -> Sequence[int]:
        """Short names of a prompt's full blocks, in the form that is looked up quickest."""

    def tidy(self, budget: int) -> None:
        """Frees up to so many blocks of tables that were cleared."""


class PlainTable(KvTable):
    __slots__ = ()

    def expect(self, count: int) -> None:
        """A dict cannot be told."""

    def count(self, tier: Tier) -> int:
        return len(self.at(tier))

    def has(self, name: int) -> bool:
        return any(name in held for held in self.held)

    def follow(self, data: bytes, start: int, sequence: int) -> int | None:
        return None


class PlainTables:
    def __init__(self) -> None:
        self._bin: list[dict[int, int]] = []
        """To free a large one takes milliseconds, so that is done bit by bit."""

    def table(self) -> PlainTable:
        return PlainTable()

    def clear(self, table: PlainTable) -> int:
        self._bin += [held for held in table.held if len(held) > PART_BLOCKS]
        return table.clear()

    def lookup(self, tables: Mapping[WorkerId, PlainTable], lowest: Tier) -> Lookup:
        return _PlainLookup(tables, list(Tier).index(lowest) + 1)

    def names(self, tokens: Sequence[int], keys: HashKeys) -> Sequence[int]:
        return PromptNames(tokens, keys)

    def tidy(self, budget: int) -> None:
        while self._bin and budget > 0:
            table = self._bin[-1]
            count = min(budget, len(table))
            for _ in range(count):
                table.popitem()
            budget -= count
            if not table:
                self._bin.pop()


_LONG = 128
"""Blocks of a prompt, all of which are rather not worked out."""
_FEW = 12
"""Workers of different depths of which each is looked up by itself."""


class _PlainLookup:
    def __init__(self, tables: Mapping[WorkerId, PlainTable], reached: int) -> None:
        self._held = [table.held[:reached] for table in tables.values()]
        holders: list[Container[int]] = [held[0] if reached == 1 else _Any(held) for held in self._held]
        self._holders = list(tables), holders

    def __call__(self, names: Sequence[int]) -> dict[WorkerId, int]:
        return _depths(self._holders, names)

    def sees(self, tables: Mapping[WorkerId, PlainTable]) -> bool:
        pairs = zip(self._held, tables.values(), strict=True)
        return list(tables) == self._holders[0] and all(
            mine is true for held, table in pairs for mine, true in zip(held, table.held, strict=False)
        )


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
