"""The pull plan: what is lacking, explicit pairs, bounded requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import BadRequest
from kv_transfer.plan import lacking, plan_pull


@pytest.mark.parametrize("cached", range(6))
def test_cached_blocks_shift_nothing(cached: int) -> None:
    table = (9, 8, 7, 6, 5)
    assert lacking(table, cached, tokens=73, block_size=16) == tuple(
        (position, table[position]) for position in range(cached, 5)
    )


def test_a_table_that_is_too_short_is_an_error() -> None:
    with pytest.raises(ValueError, match="need 5 blocks; the table has 4"):
        lacking((1, 2, 3, 4), 0, tokens=65, block_size=16)


@pytest.mark.parametrize(
    ("pairs", "what"),
    [
        ([(-1, 0)], "position -1"),
        ([(0, 0), (0, 1)], "position 0"),
        ([(0, 8)], "outside the 8"),
        ([(0, -1)], "outside the 8"),
        ([(0, 3), (1, 3)], "written twice"),
    ],
)
def test_bad_pairs_are_named(pairs: list[tuple[int, int]], what: str) -> None:
    with pytest.raises(BadRequest, match=what):
        plan_pull(pairs, own_blocks=8, block_bytes=100, chunk_bytes=1000)


@given(count=st.integers(0, 40), block_bytes=st.integers(1, 5000), chunk_bytes=st.integers(4096, 20000))
def test_requests_cover_the_pairs_in_order_and_are_bounded(
    count: int, block_bytes: int, chunk_bytes: int
) -> None:
    pairs = [(number, 39 - number) for number in range(count)]
    chunks = plan_pull(pairs, own_blocks=40, block_bytes=block_bytes, chunk_bytes=chunk_bytes)
    assert [
        pair for chunk in chunks for pair in zip(chunk.positions, chunk.destinations, strict=True)
    ] == pairs
    assert all(
        len(chunk.positions) == 1 or len(chunk.positions) * block_bytes <= chunk_bytes for chunk in chunks
    )
