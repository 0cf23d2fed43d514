"""The one name of a KV block, for every cache tier and the router: a keyed hash chain. Pure.

BLAKE2b (RFC 7693) in keyed mode. The key is a digest of the tagged, length-prefixed extra
keys (model, adapter, tenant salt, block size), so no two of them can be confused and a tenant
cannot craft a block of another's chain. Only full blocks have a name.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

HASH_SPEC = "blake2b-256-chain/1"
"""Announced by every worker; a router refuses a worker with another."""

BlockHash = bytes
"""32 bytes. Workers compare all of it."""


@dataclass(frozen=True, slots=True)
class HashKeys:
    """What besides its tokens makes a block another block."""

    model: str
    """Digest of model, weights revision and KV format (`Fingerprint.digest()`)."""
    block_size: int
    adapter: str = ""
    salt: str = ""

    def root(self) -> bytes:
        """Key of the chain, 32 bytes."""
        return _root(self)


@lru_cache(maxsize=4096)
def _root(keys: HashKeys) -> bytes:
    digest = hashlib.blake2b(digest_size=32, person=b"pdfleet-root")
    fields = (HASH_SPEC, keys.model, str(keys.block_size), keys.adapter, keys.salt)
    for tag, text in enumerate(fields):
        value = text.encode()
        digest.update(tag.to_bytes(2, "little") + len(value).to_bytes(8, "little") + value)
    return digest.digest()


def block_hashes(
    tokens: Sequence[int], keys: HashKeys, *, parent: BlockHash = b"", skip: int = 0
) -> list[BlockHash]:
    """Names of the full blocks of `tokens`, after the first `skip` blocks, whose last is `parent`."""
    size = keys.block_size
    count = len(tokens) // size
    if count <= skip:
        return []
    data = array("I", tokens[skip * size : count * size])
    if sys.byteorder == "big":
        data.byteswap()
    text, step = data.tobytes(), size * 4
    keyed = hashlib.blake2b(key=keys.root(), digest_size=32)
    names: list[BlockHash] = []
    for start in range(0, len(text), step):
        block = keyed.copy()
        block.update(parent + text[start : start + step])
        parent = block.digest()
        names.append(parent)
    return names


def short(name: BlockHash) -> int:
    """First 64 bits: what events carry and the router indexes, as a hint only."""
    return int.from_bytes(name[:8], "little")


def short_names(names: Sequence[BlockHash]) -> list[int]:
    """`short` of each, in a tenth of the time."""
    return list(struct.unpack("<" + "Q24x" * len(names), b"".join(names)))
