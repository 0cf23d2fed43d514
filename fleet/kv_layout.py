"""How KV lies in a block, and the fingerprint two workers compare before the first byte moves. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

from fleet.block_hash import HASH_SPEC

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """One block is one contiguous run: `[layers, 2 (K, V), kv_heads, block_size, head_dim]`."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    """Tokens a block."""
    dtype: str

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2, self.kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """All that must agree for KV of one worker to mean the same on another."""

    model: str
    """Digest of config and weights, not a name: two revisions differ."""
    tokenizer: str
    """Digest of the tokenizer file."""
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    layout: str = "block:layers,2,heads,tokens,dim/1"
    hash_spec: str = HASH_SPEC
    rope: str = ""
    """Rotary settings as the model was loaded with."""

    @classmethod
    def of(cls, layout: KvLayout, *, model: str, tokenizer: str, rope: str = "") -> Fingerprint:
        return cls(
            model=model,
            tokenizer=tokenizer,
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            dtype=layout.dtype,
            rope=rope,
        )

    def mismatch(self, other: Fingerprint) -> str | None:
        """The first field that differs, as `name: mine != theirs`; None when all agree."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if mine != theirs:
                return f"{item.name}: {mine} != {theirs}"
        return None

    def digest(self) -> str:
        """32 hex digits over every field, length-prefixed."""
        digest = hashlib.blake2b(digest_size=16, person=b"pdfleet-print")
        for item in fields(self):
            value = str(getattr(self, item.name)).encode()
            digest.update(len(value).to_bytes(8, "little") + value)
        return digest.hexdigest()
