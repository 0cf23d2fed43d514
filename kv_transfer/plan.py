"""The pull plan: which blocks are lacking, checked pairs, and requests of bounded size. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request: the block at `positions[i]` of the lease goes to own block `destinations[i]`."""

    positions: tuple[int, ...]
    destinations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pulled:
    """A pull that is whole, verified and proven."""

    blocks: int
    bytes: int
    seconds: float
    transport: str
    why: str
    """Which path was taken and for what reason."""


def lacking(blocks: Sequence[int], cached: int, tokens: int, block_size: int) -> tuple[tuple[int, int], ...]:
    """Pairs (position in the lease, own block) for the KV of `tokens` tokens, less the first `cached` blocks.

    `blocks` is the reader's block table. ValueError when it is too short.
    """
    needed = -(-tokens // block_size)
    if len(blocks) < needed or not cached >= 0:
        raise ValueError(
            f"{tokens} tokens need {needed} blocks; the table has {len(blocks)}, {cached} cached"
        )
    return tuple((position, blocks[position]) for position in range(cached, needed))


def plan_pull(
    pairs: Sequence[tuple[int, int]], *, own_blocks: int, block_bytes: int, chunk_bytes: int
) -> tuple[Chunk, ...]:
    """Requests of at most `chunk_bytes` (or one block), in the given order.

    BadRequest names a pair that is out of range or repeated: two reads of one position are a mistake of
    the caller, two writes of one block a race.
    """
    positions: set[int] = set()
    destinations: set[int] = set()
    for position, destination in pairs:
        if position < 0 or position in positions:
            raise BadRequest(f"lease position {position} is negative or repeated", param="pairs")
        if not 0 <= destination < own_blocks:
            raise BadRequest(f"block {destination} is outside the {own_blocks} of this pool", param="pairs")
        if destination in destinations:
            raise BadRequest(f"block {destination} is written twice", param="pairs")
        positions.add(position)
        destinations.add(destination)
    each = max(1, chunk_bytes // block_bytes)
    return tuple(
        Chunk(
            tuple(position for position, _ in pairs[start : start + each]),
            tuple(destination for _, destination in pairs[start : start + each]),
        )
        for start in range(0, len(pairs), each)
    )
