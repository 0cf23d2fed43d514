"""Compiled tables of what workers hold (`router/prefix_tables.py`), and which kind there is here.

The C beside this file is compiled once a machine (`fleet/native.py`), in about a second, when a process makes
its first index; that is waited for. Python's lock is held throughout: calls take microseconds.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p, py_object
from pathlib import Path
from typing import Any, overload

from fleet.block_hash import HashKeys
from fleet.events import Tier
from fleet.ids import WorkerId
from fleet.native import Source, Unusable, load
from router.prefix_tables import Lookup, PlainTables, Tables

log = logging.getLogger(__name__)

INDEX = Source(
    name="prefix index",
    file=Path(__file__).with_name("index.c"),
    gain="choosing workers takes a half to a third of the time",
    limit_s=20.0,
)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "draw": (None, (c_uint64,)),
    "table_new": (c_void_p, ()),
    "table_free": (None, (c_void_p,)),
    "table_clear": (None, (c_void_p,)),
    "table_expect": (None, (c_void_p, c_int, c_uint64)),
    "table_change": (c_int64, (c_void_p, c_int, c_int, py_object)),
    "table_drop_oldest": (c_int64, (c_void_p, c_int, c_int64)),
    "table_count": (c_int64, (c_void_p, c_int)),
    "table_blocks": (c_int64, (c_void_p,)),
    "table_xor": (c_uint64, (c_void_p,)),
    "table_has": (c_int, (c_void_p, c_uint64)),
    "table_names": (c_int64, (c_void_p, c_int, c_void_p, c_int64)),
    "table_valid": (c_int, (c_void_p,)),
    "table_follow": (c_int64, (c_void_p, c_char_p, c_int64, c_int64, c_uint64)),
    "group_new": (c_void_p, (c_int, c_int, c_void_p)),
    "group_free": (None, (c_void_p,)),
    "group_match": (c_int, (c_void_p, c_void_p, py_object, py_object, py_object)),
    "group_match_names": (c_int, (c_void_p, py_object, py_object, py_object)),
    "prompt_new": (c_void_p, (c_uint32, c_uint32, c_char_p)),
    "prompt_free": (None, (c_void_p,)),
    "prompt_names": (c_void_p, (c_void_p, py_object, c_uint32)),
}
_REFUSED = -(1 << 63)
_PLACE = {tier: place for place, tier in enumerate(Tier)}
_MOST = 1 << 24
"""Names or tokens in one call; no message or prompt has as many."""


def tables() -> Tables[Any]:
    """Compiled ones where they can be had, else plain ones."""
    found = _library()
    return NativeTables(found) if isinstance(found, ctypes.PyDLL) else PlainTables()


@functools.cache
def _library() -> ctypes.PyDLL | str:
    try:
        library = load_library()
    except Unusable as why:
        log.info("prefix index in Python: %s", why)
        return str(why)
    return library


def load_library() -> ctypes.PyDLL:
    """Raises `Unusable`."""
    library = load(INDEX, ctypes.PyDLL)
    try:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise Unusable(f"the prefix index cannot be loaded: {error}") from error
    library.draw(secrets.randbits(64))
    return library


class NativeTable:
    """A `Table`."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        self.address = _there(library.table_new())

    def __del__(self) -> None:
        if (address := getattr(self, "address", None)) is not None:
            self._library.table_free(address)

    def expect(self, count: int) -> None:
        self._library.table_expect(self.address, _PLACE[Tier.DEVICE], min(count, _MOST))

    def store(self, names: Sequence[int], tier: Tier = Tier.DEVICE) -> int:
        found: int = self._library.table_change(self.address, _PLACE[tier], 1, _tuple(names))
        return found

    def drop(self, names: Sequence[int], tier: Tier = Tier.DEVICE) -> int:
        found: int = self._library.table_change(self.address, _PLACE[tier], 0, _tuple(names))
        return found

    def drop_oldest(self, tier: Tier, count: int) -> int:
        found: int = self._library.table_drop_oldest(self.address, _PLACE[tier], count)
        return found

    def clear(self) -> int:
        before = self.blocks
        self._library.table_clear(self.address)
        return before

    def at(self, tier: Tier) -> list[int]:
        room = self.count(tier)
        names = (c_uint64 * room)()
        self._library.table_names(self.address, _PLACE[tier], names, room)
        return names[:]

    def count(self, tier: Tier) -> int:
        found: int = self._library.table_count(self.address, _PLACE[tier])
        return found

    def has(self, name: int) -> bool:
        return bool(self._library.table_has(self.address, name))

    @property
    def blocks(self) -> int:
        found: int = self._library.table_blocks(self.address)
        return found

    @property
    def xor(self) -> int:
        found: int = self._library.table_xor(self.address)
        return found

    def follow(self, data: bytes, start: int, sequence: int) -> int | None:
        grown: int = self._library.table_follow(self.address, data, start, len(data), sequence)
        return None if grown == _REFUSED else grown

    def validate(self) -> None:
        assert self._library.table_valid(self.address), "a compiled table is broken"
        for tier in Tier:
            assert len(self.at(tier)) == self.count(tier) == len(set(self.at(tier)))


class NativeTables:
    """`Tables` that are compiled."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library

    def table(self) -> NativeTable:
        return NativeTable(self._library)

    def clear(self, table: NativeTable) -> int:
        return table.clear()

    def lookup(self, tables: Mapping[WorkerId, NativeTable], lowest: Tier) -> Lookup:
        return _Lookup(self._library, tables, lowest)

    def names(self, tokens: Sequence[int], keys: HashKeys) -> NativeNames:
        return NativeNames(self._library, tokens, keys)

    def tidy(self, budget: int) -> None:
        """They are freed at once: it takes microseconds."""


class _Lookup:
    def __init__(self, library: ctypes.PyDLL, tables: Mapping[WorkerId, NativeTable], lowest: Tier) -> None:
        self._library = library
        self._match, self._match_names = library.group_match, library.group_match_names
        self._ids = tuple(tables)
        self._tables = tuple(tables.values())
        addresses = (c_void_p * len(tables))(*[table.address for table in self._tables])
        self._address = _there(library.group_new(len(tables), _PLACE[lowest] + 1, addresses))

    def __del__(self) -> None:
        if (address := getattr(self, "_address", None)) is not None:
            self._library.group_free(address)

    def __call__(self, names: Sequence[int]) -> dict[WorkerId, int]:
        depths: dict[WorkerId, int] = {}
        if isinstance(names, NativeNames):
            self._match(self._address, names.address, names.tokens, self._ids, depths)
        else:
            self._match_names(self._address, _tuple(names), self._ids, depths)
        return depths

    def sees(self, tables: Mapping[WorkerId, NativeTable]) -> bool:
        mine = zip(self._ids, self._tables, strict=True)
        return all(a == b and mine is true for (a, mine), (b, true) in zip(mine, tables.items(), strict=True))


class NativeNames(Sequence[int]):
    """`short_names(block_hashes(tokens, keys))`, worked out as far as they are looked at.

    OverflowError or TypeError when one is looked at whose tokens are no numbers of 32 bits.
    """

    def __init__(self, library: ctypes.PyDLL, tokens: Sequence[int], keys: HashKeys) -> None:
        self._library = library
        self.tokens = _tuple(tokens)
        self._count = len(self.tokens) // keys.block_size
        self.address = _there(library.prompt_new(self._count, keys.block_size, keys.root()))

    def __del__(self) -> None:
        if (address := getattr(self, "address", None)) is not None:
            self._library.prompt_free(address)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return self._first(self._count)[index]
        place = index + self._count if index < 0 else index
        if not 0 <= place < self._count:
            raise IndexError(f"block {index} of {self._count}")
        return self._first(place + 1)[place]

    def _first(self, count: int) -> ctypes.Array[c_uint64]:
        at = _there(self._library.prompt_names(self.address, self.tokens, count))
        return (c_uint64 * count).from_address(at)


def _tuple(numbers: Sequence[int]) -> tuple[int, ...]:
    if len(numbers) > _MOST:
        raise ValueError(f"{len(numbers)} numbers at once; at most {_MOST} are taken")
    return tuple(numbers)


def _there(address: int | None) -> int:
    if address is None:
        raise MemoryError("no memory for the prefix index")
    return address
