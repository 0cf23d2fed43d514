"""The plan of a step: one layout of tokens, blocks and lengths that every backend understands. Pure.

Made once a step with numpy, never a layer. Sequences lie in rows without padding, with the row at which each
begins, as in FlashAttention's variable-length form (Dao, 2023), and find their KV by block tables (Kwon et
al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.words import Chunk
from fleet.kv_layout import KvLayout

Ints = np.ndarray[Any, np.dtype[np.int64]]
ShortInts = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Rows of sequences with one row each (decodes) come first, the shortest context first, then prompts."""

    tokens: Ints
    """`[rows]`."""
    positions: Ints
    """`[rows]`: of each token in its sequence."""
    slots: Ints
    """`[rows]`: where each row's KV goes, as block * block_size + offset in it."""
    query_starts: ShortInts
    """`[sequences + 1]`: rows `[query_starts[i], query_starts[i + 1])` are sequence i's."""
    lengths: ShortInts
    """`[sequences]`: tokens with KV after this step; sequence i's first row is at position
    `lengths[i] - (query_starts[i + 1] - query_starts[i])`."""
    tables: ShortInts
    """`[sequences, width]`: block ids in order; past a sequence's last one its own first one, so that what
    reads too far reads numbers that are there."""
    decodes: int
    """How many sequences, the leading ones, have one row."""
    fresh: Ints
    """Blocks that begin to be filled."""
    sources: Ints
    """`[rows]`: the slot whose newest token is the row's own (`Chunk.carried`), -1 where `tokens` has it."""
    draws: Ints
    """Rows that draw, in the order of the batch's chunks."""
    scores: Ints
    """Rows whose next token is known and scored (`Chunk.targets`), in the order of the batch's chunks."""

    @property
    def sequences(self) -> int:
        return len(self.lengths)


def plan_step(chunks: Sequence[Chunk], layout: KvLayout) -> StepPlan:
    """Lays out a step of at least one chunk. Sorted by length, little of neighbouring decodes is padding."""
    size = layout.block_size
    order = sorted(range(len(chunks)), key=lambda i: (len(chunks[i].tokens) > 1, chunks[i].start))
    ordered = [chunks[i] for i in order]
    counts = [len(chunk.tokens) for chunk in ordered]
    decodes = sum(count == 1 for count in counts)
    starts = np.zeros(len(ordered) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    lengths = np.asarray([chunk.start + len(chunk.tokens) for chunk in ordered], dtype=np.int64)
    used = -(-lengths // size)
    tables = np.empty((len(ordered), int(used.max())), dtype=np.int32)
    for row, chunk, count in zip(tables, ordered, used.tolist(), strict=True):
        row[:count] = chunk.blocks[:count]
        row[count:] = chunk.blocks[0]
    rows = np.arange(int(starts[-1]))
    sequence = np.repeat(np.arange(len(ordered)), counts)
    positions = rows - starts[sequence] + (lengths - counts)[sequence]
    blocks = tables[sequence, positions // size].astype(np.int64)
    offsets = positions % size
    carried = [chunk.slot if chunk.carried else -1 for chunk in ordered]
    first_of = dict(zip(order, starts.tolist(), strict=False))
    draws = [first_of[i] + len(chunk.tokens) - 1 for i, chunk in enumerate(chunks) if chunk.draw]
    scores = [first_of[i] + k for i, chunk in enumerate(chunks) for k in range(len(chunk.targets))]
    return StepPlan(
        tokens=np.asarray([token for chunk in ordered for token in chunk.tokens], dtype=np.int64),
        positions=positions,
        slots=blocks * size + offsets,
        query_starts=starts.astype(np.int32),
        lengths=lengths.astype(np.int32),
        tables=tables,
        decodes=decodes,
        fresh=blocks[offsets == 0],
        sources=np.repeat(np.asarray(carried, dtype=np.int64), counts),
        draws=np.asarray(draws, dtype=np.int64),
        scores=np.asarray(scores, dtype=np.int64),
    )
