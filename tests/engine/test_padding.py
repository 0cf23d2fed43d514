"""Sizes of graphs, the choice among them, and what a padded step holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.padding import MOST, padded, parts_of, size_of, sizes_for
from engine.step_plan import plan_step
from engine.words import Chunk
from fleet.kv_layout import KvLayout
from fleet.request import Sampling

LAYOUT = KvLayout(layers=1, kv_heads=2, head_dim=8, block_size=4, dtype="float32")


def chunk(start: int, tokens: int = 1, draw: bool = True, targets: tuple[int, ...] = ()) -> Chunk:
    blocks = tuple(range(10, 10 + LAYOUT.blocks_for(start + tokens)))
    return Chunk(0, (7,) * tokens, start, blocks, draw, Sampling(9, temperature=0), targets=targets)


@given(st.integers(1, 2000))
def test_sizes_hold_the_batch_with_little_padding(max_batch: int) -> None:
    sizes = sizes_for(max_batch)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] >= min(max_batch, MOST)
    assert len(sizes) < 2 or sizes[-2] < max_batch
    for count in range(1, min(max_batch, MOST) + 1):
        size = size_of(plan_step([chunk(3)] * count, LAYOUT), sizes) if count < 20 else None
        assert size is None or count <= size < max(count + 8, 2 * count)


def test_small_batches_get_the_next_power_and_then_the_next_eight() -> None:
    sizes = sizes_for(64)
    found = [
        size_of(plan_step([chunk(3)] * count, LAYOUT), sizes) for count in (1, 2, 3, 5, 9, 16, 57, 64, 65)
    ]
    assert found == [1, 2, 4, 8, 16, 16, 64, 64, None]


@pytest.mark.parametrize(
    "chunks",
    [[chunk(3), chunk(0, 5)], [chunk(3), chunk(4, draw=False)], [chunk(3, targets=(5,))]],
    ids=["a prompt", "a row that does not draw", "a row that is scored"],
)
def test_other_steps_run_eagerly(chunks: list[Chunk]) -> None:
    assert size_of(plan_step(chunks, LAYOUT), sizes_for(32)) is None


def test_padding_writes_nothing_and_sees_nothing() -> None:
    plan = plan_step([chunk(9), chunk(3), chunk(5)], LAYOUT)
    tokens, sources, positions, slots, lengths, sizes, tables = padded(plan, 8, 128)
    assert tokens.tolist() == [7] * 3 + [0] * 5
    assert sources.tolist() == [-1] * 8
    assert positions.tolist() == [3, 5, 9] + [0] * 5
    assert slots.tolist() == [43, 45, 49] + [-1] * 5
    assert lengths.tolist() == [4, 6, 10] + [0] * 5
    assert sizes.tolist() == [128, 3]
    assert tables.shape == (3, 3), "as close as this step allows"
    assert [array.dtype for array in (tokens, slots, lengths, tables)] == [
        np.int64,
        np.int64,
        np.int32,
        np.int32,
    ]


def test_few_sequences_are_split_further() -> None:
    assert parts_of(1, 8, 132) == 64
    assert parts_of(64, 8, 132) == 4
    assert parts_of(8, 8, 132) == 33
