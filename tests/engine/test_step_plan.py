"""The plan of a step: rows, slots and tables as every backend expects them."""

from __future__ import annotations

import numpy as np

from engine.step_plan import plan_step
from engine.words import Chunk
from fleet.kv_layout import KvLayout
from fleet.request import Sampling

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, block_size=4, dtype="float32")
GREEDY = Sampling(max_tokens=1, temperature=0)


def test_decodes_lead_by_length_then_prompts() -> None:
    plan = plan_step(
        [
            Chunk(0, (11, 12, 13), 2, (7, 5), True, GREEDY, targets=(12, 13)),
            Chunk(1, (21,), 8, (1, 2, 3), True, GREEDY),
            Chunk(2, (31,), 4, (9, 8, 6), True, GREEDY),
            Chunk(3, (41, 42), 0, (4,), False, GREEDY),
        ],
        LAYOUT,
    )
    assert plan.decodes == 2
    assert plan.sequences == 4
    assert plan.tokens.tolist() == [31, 21, 41, 42, 11, 12, 13]
    assert plan.positions.tolist() == [4, 8, 0, 1, 2, 3, 4]
    assert plan.slots.tolist() == [32, 12, 16, 17, 30, 31, 20]
    assert plan.query_starts.tolist() == [0, 1, 2, 4, 7]
    assert plan.lengths.tolist() == [5, 9, 2, 5]
    # As wide as the longest; past its end a sequence repeats its first block, not one it does not use yet.
    assert plan.tables.tolist() == [[9, 8, 9], [1, 2, 3], [4, 4, 4], [7, 5, 7]]
    assert plan.fresh.tolist() == [8, 3, 4, 5]
    assert plan.draws.tolist() == [6, 1, 0]
    assert plan.scores.tolist() == [4, 5]
    for ints in (plan.query_starts, plan.lengths, plan.tables):
        assert ints.dtype == np.int32
        assert ints.flags.c_contiguous
