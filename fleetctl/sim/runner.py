"""A runner that computes nothing: steps take the time that a model of speed says, tokens mean nothing.

For simulations of long prompts, where the latency runner's exact KV would cost more than all the rest.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from engine.words import Batch, BatchResult
from fleet.kv_layout import Fingerprint, KvLayout
from fleetctl.sim.speed import Speed, Work


def layout_of(block_size: int) -> KvLayout:
    """2 bytes a token: it stands for the real layout, whose bytes are only counted, by the links."""
    return KvLayout(layers=1, kv_heads=1, head_dim=1, block_size=block_size, dtype="uint8")


class TimedRunner:
    """A `Runner`. Two of equal `name` may continue each other's sequences."""

    def __init__(self, name: str, layout: KvLayout, blocks: int, speed: Speed, max_tokens: int) -> None:
        self.layout = layout
        self.blocks = blocks
        self.max_tokens = max_tokens
        self.fingerprint = Fingerprint.of(layout, model=name, tokenizer=name)
        self.busy_s = 0.0
        """Time of all steps so far."""
        self.busy_by_second: defaultdict[int, float] = defaultdict(float)
        """The same by the loop's whole seconds."""
        self._speed = speed

    async def run(self, batch: Batch) -> BatchResult:
        seconds = self._speed.step_s(Work.of(batch))
        self._busy(asyncio.get_running_loop().time(), seconds)
        await asyncio.sleep(seconds)
        # A list first: it needs no frame of its own for each element.
        drawn = [
            (chunk.start + len(chunk.tokens) + chunk.sampling.seed) & 0x7FFFFFFF if chunk.draw else None
            for chunk in batch.chunks
        ]
        return BatchResult(tuple(drawn))

    def _busy(self, start: float, seconds: float) -> None:
        self.busy_s += seconds
        end = start + seconds
        for second in range(int(start), int(end) + 1):
            self.busy_by_second[second] += max(0.0, min(end, second + 1) - max(start, second))

    @property
    def staged(self) -> bool:
        return False

    async def to_host(self, blocks: Sequence[int]) -> None:
        """There is nothing to copy."""

    async def from_host(self, blocks: Sequence[int]) -> None:
        """There is nothing to copy."""

    async def close(self) -> None:
        """Nothing to close."""
