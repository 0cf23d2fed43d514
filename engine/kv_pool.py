"""The KV blocks of one replica, in memory given by others; backends of attention know what lies in them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.weights import torch_dtype
from fleet.kv_layout import KvLayout


class KvPool:
    """`memory` is uint8 `[blocks, block_bytes]`, contiguous, on the device that computes."""

    def __init__(self, layout: KvLayout, memory: Tensor) -> None:
        if memory.dtype != torch.uint8 or memory.shape[1:] != (layout.block_bytes,):
            raise ValueError(
                f"KV memory is {memory.dtype} {tuple(memory.shape)}; "
                f"wanted uint8 [blocks, {layout.block_bytes}]"
            )
        self.layout = layout
        self.memory = memory
        self.blocks: int = memory.shape[0]
        self.values: Tensor = memory.view(-1).view(torch_dtype(layout.dtype)).view(-1, *layout.block_shape)
        """The same memory, typed: `[blocks, layers, 2 (K, V), kv_heads, block_size, head_dim]`."""

    def clear(self, blocks: Tensor) -> None:
        """Zeroes these blocks, of all layers: those that a sequence begins to fill.

        A backend may read the end of a part-full block too, here or where the block is handed over to, and
        weigh it with zero: zero times an old NaN is not zero.
        """
        if self.memory.device.type == "cpu":
            for block in blocks.tolist():
                self.memory[block].zero_()
        elif len(blocks):
            self.memory.index_fill_(0, blocks, 0)
