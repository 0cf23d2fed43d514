"""Blocks go out and come back whole, in one piece or many, and no other is touched."""

from __future__ import annotations

import pytest
import torch

from engine.mirror import Mirror

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("count", [0, 1, 4, 5, 13])
def test_named_blocks_and_only_they_move(count: int) -> None:
    chance = torch.Generator().manual_seed(count)
    pool, host = (torch.randint(0, 256, (20, 24), dtype=torch.uint8, generator=chance) for _ in range(2))
    there = pool.clone().to(DEVICE)
    mirror = Mirror(there, host, piece=4 * 24)
    blocks = torch.randperm(20, generator=chance)[:count].tolist()
    wanted = host.clone()
    wanted[blocks] = pool[blocks]
    mirror.out(blocks)
    assert torch.equal(host, wanted)
    host ^= 255
    mirror.into(blocks)
    back = pool.clone()
    back[blocks] = pool[blocks] ^ 255
    assert torch.equal(there.cpu(), back)


def test_pieces_follow_each_other_any_number_of_times() -> None:
    pool, host = (
        torch.arange(60, dtype=torch.uint8).view(20, 3).to(DEVICE),
        torch.zeros(20, 3, dtype=torch.uint8),
    )
    mirror = Mirror(pool, host, piece=6)
    for first in range(10):
        mirror.out(range(first, first + 10))
    assert torch.equal(host[:19], pool.cpu()[:19])
