"""Decodes padded to a size that a graph was captured for: which size, and what fills its buffers. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.step_plan import StepPlan

Array = np.ndarray[Any, np.dtype[Any]]

MOST = 512
"""Sequences of the largest graph; larger steps are long enough to hide their launches."""

_PARTS_LEAST, _PARTS_MOST = 4, 64


def sizes_for(max_batch: int) -> tuple[int, ...]:
    """1, 2, 4, then steps of 8 to 128 and of 32 beyond, until they hold `max_batch` sequences: little of a
    step is padding, and few graphs are kept."""
    sizes = [1, 2, 4, *range(8, 129, 8), *range(160, MOST + 1, 32)]
    last = bisect_left(sizes, min(max_batch, MOST))
    return tuple(sizes[: last + 1])


def size_of(plan: StepPlan, sizes: Sequence[int]) -> int | None:
    """The graph that a step runs as, or None where none fits: with prompt tokens in it, with rows that are
    scored or do not draw, or with more sequences than the largest has."""
    count = plan.sequences
    if plan.decodes != count or len(plan.scores) or len(plan.draws) != count:
        return None
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else None


def parts_of(size: int, kv_heads: int, processors: int) -> int:
    """Parts that a graph of this size splits contexts into at most: it is captured once for all lengths, so
    there are enough for long ones; those that a short context leaves empty cost next to nothing."""
    return max(_PARTS_LEAST, min(_PARTS_MOST, 16 * processors // (size * kv_heads)))


def regions(size: int) -> list[Array]:
    """What comes before the block tables in a graph's buffer, empty: tokens, their sources, positions, slots
    (int64), lengths (int32), and the span of a part with the width of the tables (int32)."""
    return [
        np.zeros(size, dtype=np.int64),
        np.full(size, -1, dtype=np.int64),
        np.zeros(size, dtype=np.int64),
        np.full(size, -1, dtype=np.int64),
        np.zeros(size, dtype=np.int32),
        np.zeros(2, dtype=np.int32),
    ]


def padded(plan: StepPlan, size: int, span: int) -> list[Array]:
    """A step for a graph's buffer. Rows of padding write nothing (slot -1) and see nothing (length 0).

    Tables lie as close as this step's width allows, so that short contexts are short copies.
    """
    arrays = regions(size)
    rows = (plan.tokens, plan.sources, plan.positions, plan.slots, plan.lengths)
    for array, given in zip(arrays, rows, strict=False):
        array[: plan.sequences] = given
    arrays[-1][:] = span, plan.tables.shape[1]
    return [*arrays, plan.tables]
