"""The one name of a KV block, for every cache tier and the router: a keyed digest of all up to its end. Pure.

BLAKE2b (RFC 7693) in keyed mode over the tokens from the first to the block's last, so that equal names
mean equal prefixes. The key is a digest of the tagged, length-prefixed extra keys (model, adapter, tenant
salt, block size), so no two of them can be confused and a tenant cannot craft a block of another's. Only
full blocks have a name.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import overload

from msgspec import Struct

HASH_SPEC = "blake2b-256-prefix/2"
"""Announced by every worker; a router refuses a worker with another."""

BlockHash = bytes
"""32 bytes. Workers compare all of it."""


class HashKeys(Struct, frozen=True):
    """What besides its tokens makes a block another block."""

    model: str
    """Digest of model, weights revision and KV format (`Fingerprint.digest()`)."""
    block_size: int
    adapter: str = ""
    salt: str = ""

    def root(self) -> bytes:
        """Key of all names, 32 bytes."""
        return _root(self)


@lru_cache(maxsize=4096)
def _root(keys: HashKeys) -> bytes:
    digest = hashlib.blake2b(digest_size=32, person=b"pdfleet-root")
    fields = (HASH_SPEC, keys.model, str(keys.block_size), keys.adapter, keys.salt)
    for tag, text in enumerate(fields):
        value = text.encode()
        digest.update(tag.to_bytes(2, "little") + len(value).to_bytes(8, "little") + value)
    return digest.digest()


class BlockNamer:
    """Names the blocks of one growing run of tokens: one hash state, whose digest is taken at each
    block's end."""

    __slots__ = ("_size", "_state")

    def __init__(self, keys: HashKeys) -> None:
        self._size = keys.block_size
        self._state = hashlib.blake2b(key=keys.root(), digest_size=32)

    def extend(self, tokens: Sequence[int]) -> list[BlockHash]:
        """Names of the next blocks, which `tokens` fill exactly."""
        return self.extend_packed(packed(tokens))

    def extend_packed(self, data: bytes) -> list[BlockHash]:
        """The same of `packed` tokens."""
        step = self._size * 4
        if len(data) % step:
            raise ValueError(f"{len(data) // 4} tokens do not fill blocks of {self._size}")
        update, copy = self._state.update, self._state.copy
        names: list[BlockHash] = []
        for start in range(0, len(data), step):
            update(data[start : start + step])
            names.append(copy().digest())
        return names


def block_hashes(tokens: Sequence[int], keys: HashKeys) -> list[BlockHash]:
    """Names of the full blocks of `tokens`."""
    return BlockNamer(keys).extend(tokens[: len(tokens) // keys.block_size * keys.block_size])


def short(name: BlockHash) -> int:
    """First 64 bits: what events carry and the router indexes, as a hint only."""
    return int.from_bytes(name[:8], "little")


def short_names(names: Sequence[BlockHash]) -> list[int]:
    """`short` of each, in a tenth of the time."""
    return list(struct.unpack("<" + "Q24x" * len(names), b"".join(names)))


class PromptNames(Sequence[int]):
    """`short_names(block_hashes(tokens, keys))`, each worked out when it is first looked at.

    A lookup that halves looks at few of them, and a cold prompt only at the first: hashing on to a
    block costs a third of what the names of all blocks before it cost. Slicing and iterating work out
    all of them.
    """

    __slots__ = ("_all", "_count", "_data", "_few", "_keys", "_stops", "_tokens", "grain")

    def __init__(self, tokens: Sequence[int], keys: HashKeys) -> None:
        self._tokens = tokens
        self._keys = keys
        self._count = len(tokens) // keys.block_size
        self.grain = max(_GRAIN, 1 << (self._count // _GRAINS).bit_length() >> 1)
        """Blocks between two kept states of the hash: fewer cost more copies, more cost longer ways."""
        self._data = b""
        """Of the first tokens, as far as was needed."""
        self._stops = [hashlib.blake2b(key=keys.root(), digest_size=32)]
        """State before block 0, before block `grain`, and so on, likewise."""
        self._few: dict[int, int] = {}
        self._all: list[int] | None = None

    def coarse(self) -> Sequence[int]:
        """The last name of each whole grain: little more to work out than the very last of them."""
        if self._all is not None:
            return self._all[self.grain - 1 :: self.grain]
        grains = self._count // self.grain
        self._stop(grains)
        return short_names([stop.digest() for stop in self._stops[1 : grains + 1]])

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if self._all is not None:
            return self._all[index]
        if isinstance(index, slice):
            self._all = short_names(block_hashes(self._tokens, self._keys))
            return self._all[index]
        place = index + self._count if index < 0 else index
        if not 0 <= place < self._count:
            raise IndexError(f"block {index} of {self._count}")
        name = self._few.get(place)
        if name is None:
            name = self._few[place] = self._name(place)
        return name

    def _name(self, place: int) -> int:
        stop, more = divmod(place + 1, self.grain)
        state = self._stop(stop)
        if more:
            state = state.copy()
            state.update(self._bytes(stop * self.grain, place + 1))
        return short(state.digest())

    def _stop(self, number: int) -> hashlib.blake2b:
        """The state before that grain, not to be changed."""
        stops, grain = self._stops, self.grain
        while len(stops) <= number:
            state = stops[-1].copy()
            state.update(self._bytes((len(stops) - 1) * grain, len(stops) * grain))
            stops.append(state)
        return stops[number]

    def _bytes(self, start: int, stop: int) -> bytes:
        """Of the tokens of those blocks. They are packed many at a time, which is cheaper."""
        size, data = self._keys.block_size, self._data
        end = stop * size
        if len(data) < 4 * end:
            known = len(data) // 4
            data = self._data = data + packed(self._tokens[known : max(end, 2 * known)])
        return data[start * size * 4 : end * 4]


_GRAIN = 8
"""Blocks of a grain, at least."""
_GRAINS = 32
"""Grains of a long prompt, at least; not twice as many."""


def packed(tokens: Sequence[int]) -> bytes:
    """32 bits each, little end first; `struct.error` where one has no room in them. An array of them takes
    half as long again to be made."""
    return struct.pack(f"<{len(tokens)}I", *tokens)
