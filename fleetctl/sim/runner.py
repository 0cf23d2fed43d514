"""A runner that computes nothing: steps take the time that a model of speed says, tokens mean nothing.

For simulations of long prompts, where the latency runner's exact KV would cost more than all the rest.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from engine.words import Batch, BatchResult
from fleet.kv_layout import Fingerprint, KvLayout
from fleet.virtual_time import true_time
from fleetctl.sim.speed import Speed, Work
from fleetctl.sim.words import Beside


def layout_of(block_size: int) -> KvLayout:
    """2 bytes a token: it stands for the real layout, whose bytes are only counted, by the links."""
    return KvLayout(layers=1, kv_heads=1, head_dim=1, block_size=block_size, dtype="uint8")


class Host:
    """Workers that slow each other down."""

    def __init__(self, beside: Beside) -> None:
        self._beside = beside
        self._until: dict[int, float] = {}
        """Worker → when its step ends, on the loop's true clock. Of one that was killed it passes, too."""

    def slowed(self, worker: int, now: float, seconds: float, work: Work) -> float:
        """How long a step takes that begins now."""
        if any(end > now for other, end in self._until.items() if other != worker):
            seconds *= self._beside.prompt if work.prompt else self._beside.decode
        self._until[worker] = now + seconds
        return seconds


class TimedRunner:
    """A `Runner`. Two of equal `name` may continue each other's sequences."""

    def __init__(
        self,
        name: str,
        layout: KvLayout,
        blocks: int,
        speed: Speed,
        max_tokens: int,
        host: Host | None = None,
    ) -> None:
        self.layout = layout
        self.blocks = blocks
        self.max_tokens = max_tokens
        self.fingerprint = Fingerprint.of(layout, model=name, tokenizer=name)
        self.busy_s = 0.0
        """Time of all steps so far."""
        self.busy_by_second: defaultdict[int, float] = defaultdict(float)
        """The same by the loop's whole seconds."""
        self._speed = speed
        self._host = host

    async def run(self, batch: Batch) -> BatchResult:
        work, now = Work.of(batch), true_time()
        seconds = self._speed.step_s(work)
        if self._host is not None:
            seconds = self._host.slowed(id(self), now, seconds, work)
        self._busy(now, seconds)
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
