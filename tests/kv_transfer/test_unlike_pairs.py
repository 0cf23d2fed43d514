"""Workers whose pools are cut otherwise: KV goes over element by element, or not one byte of it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from fleet.errors import BadRequest
from fleet.kv_layout import Fingerprint, KvLayout

HEADS, LAYERS, DIM, TOKENS = 4, 2, 8, 48
CUTS = [(shards, block_size) for shards in (1, 2, 4) for block_size in (8, 16)]
"""How many workers would share the heads of a model, and tokens a block."""


def layout_of(shards: int, block_size: int) -> KvLayout:
    return KvLayout(LAYERS, HEADS // shards, DIM, block_size, "float32")


def whole_kv(layout: KvLayout) -> np.ndarray:
    """Blocks `[n, layers, 2, heads, tokens, dim]` of the first shard, each element a name of its own."""
    blocks = layout.blocks_for(TOKENS)
    layer, side, head, token, dim = np.meshgrid(
        range(LAYERS), range(2), range(layout.kv_heads), range(TOKENS), range(DIM), indexing="ij"
    )
    named = (((layer * 2 + side) * HEADS + head) * TOKENS + token) * DIM + dim + 1
    cut = named.reshape(LAYERS, 2, layout.kv_heads, blocks, layout.block_size, DIM)
    return np.moveaxis(cut, 3, 0).astype(np.float32)


@pytest.mark.parametrize("theirs", CUTS)
@pytest.mark.parametrize("mine", CUTS)
def test_every_element_arrives_or_the_pair_is_refused(bench, theirs, mine):
    source_layout, own_layout = layout_of(*theirs), layout_of(*mine)

    async def test():
        async with bench("loopback") as world:
            sides = [
                await world.side(
                    name,
                    blocks=16,
                    block_bytes=layout.block_bytes,
                    fingerprint=Fingerprint.of(layout, model="m", tokenizer="t").digest(),
                )
                for name, layout in (("p", source_layout), ("d", own_layout))
            ]
            source, reader = sides
            kv = whole_kv(source_layout)
            held = list(range(3, 3 + len(kv)))
            source.region.array[held] = kv.reshape(len(kv), -1).view(np.uint8)
            reader.region.array[:] = 0xEE
            ticket = source.transfer.grant(held, TOKENS)
            own = list(range(15, 15 - own_layout.blocks_for(TOKENS), -1))
            pairs = list(enumerate(own))
            if theirs == mine:
                async with reader.transfer.keep(ticket):
                    await reader.transfer.pull(ticket, pairs, 10)
                come = reader.region.array[own].view(np.float32).reshape(-1, *own_layout.block_shape)
                assert (come == whole_kv(own_layout)).all()
            else:
                with pytest.raises(BadRequest, match="fingerprint") as refused:
                    await reader.transfer.pull(ticket, pairs, 10)
                assert refused.value.param == "fingerprint"
                assert (reader.region.array == 0xEE).all(), "a byte has moved"
                source.transfer.release(ticket.lease)

    asyncio.run(test())


def test_the_order_within_a_block_is_part_of_what_is_compared() -> None:
    layout = layout_of(1, 16)
    one = Fingerprint.of(layout, model="m", tokenizer="t")
    other = Fingerprint(
        **{name: getattr(one, name) for name in Fingerprint.__slots__ if name != "layout"},
        layout="block:layers,2,tokens,heads,dim/1",
    )
    assert one.digest() != other.digest()
    assert one.mismatch(other) == f"layout: {one.layout} != {other.layout}"
