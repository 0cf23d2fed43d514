"""A runner that computes nothing: steps take the time that a model of speed says, tokens mean nothing.

For simulations of long prompts, where the latency runner's exact KV would cost more than all the rest.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.words import Batch, BatchResult
from fleet.kv_layout import Fingerprint, KvLayout
from fleet.virtual_time import true_time
from fleetctl.sim.speed import Speed, Work
from fleetctl.sim.words import Beside


def layout_of(block_size: int) -> KvLayout:
    """2 bytes a token: it stands for the real layout, whose bytes are only counted, by the links."""
    return KvLayout(layers=1, kv_heads=1, head_dim=1, block_size=block_size, dtype="uint8")


@dataclass(slots=True, eq=False)
class _Step:
    slowed: float
    """How many times longer it takes while another worker computes."""
    left_s: float
    """Of it, alone."""
    since: float
    """When that was so, on the loop's true clock."""
    pace: float = 1.0
    """How many times longer it takes now."""
    until: float = 0.0
    """When it ends at this pace. Of a worker that was killed it passes, too."""
    wake: asyncio.Future[None] | None = None


class Host:
    """Workers that slow each other down for as long as they compute at the same time."""

    def __init__(self, beside: Beside) -> None:
        self._beside = beside
        self._steps: dict[_Step, None] = {}

    async def compute(self, seconds: float, work: Work) -> None:
        """Returns when a step that takes so long alone is done."""
        loop = asyncio.get_running_loop()
        slowed = self._beside.prompt if work.prompt else self._beside.decode
        step = _Step(slowed, seconds, true_time())
        self._steps[step] = None
        try:
            self._turn()
            while (left_s := step.until - true_time()) > 0:
                step.wake = loop.create_future()
                timer = loop.call_later(left_s, _settle, step.wake)
                try:
                    await step.wake
                finally:
                    timer.cancel()
        finally:
            del self._steps[step]
            self._turn()

    def _turn(self) -> None:
        """A step begins or has ended: the others get slower or faster from now on."""
        now = true_time()
        active = [step for step in self._steps if step.until > now or step.since == now]
        for step in active:
            step.left_s -= (now - step.since) / step.pace
            pace = step.slowed if len(active) > 1 else 1.0
            if pace != step.pace and step.wake is not None:
                _settle(step.wake)
            step.since, step.pace = now, pace
            step.until = now + step.left_s * pace


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


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
        if self._host is None:
            self._busy(now, seconds)
            await asyncio.sleep(seconds)
        else:
            await self._host.compute(seconds, work)
            self._busy(now, true_time() - now)
        # A list first: it needs no frame of its own for each element.
        drawn = [
            (chunk.start + len(chunk.tokens) + chunk.sampling.seed) & 0x7FFFFFFF if chunk.draw else None
            for chunk in batch.chunks
        ]
        return BatchResult(tuple(drawn))

    def _busy(self, start: float, seconds: float) -> None:
        self.busy_s += seconds
        end = start + seconds
        if int(start) == int(end):
            self.busy_by_second[int(start)] += end - start
            return
        for second in range(int(start), int(end) + 1):
            self.busy_by_second[second] += max(0.0, min(end, second + 1) - max(start, second))

    @property
    def asynchronous(self) -> bool:
        return False

    @property
    def staged(self) -> bool:
        return False

    async def to_host(self, blocks: Sequence[int]) -> None:
        """There is nothing to copy."""

    async def from_host(self, blocks: Sequence[int]) -> None:
        """There is nothing to copy."""

    async def close(self) -> None:
        """Nothing to close."""
