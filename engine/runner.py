"""The runner: what computes a step on a device, or pretends to; written for by the engine's loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.words import Batch, BatchResult
from fleet.kv_layout import Fingerprint, KvLayout


class Runner(Protocol):
    """Holds weights and the KV pool."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def fingerprint(self) -> Fingerprint: ...

    @property
    def max_tokens(self) -> int:
        """Longest sequence the model allows."""
        ...

    @property
    def blocks(self) -> int:
        """KV blocks in the pool it was given."""
        ...

    async def run(self, batch: Batch) -> BatchResult:
        """Off the event loop where it takes real time. An exception fails the sequences of this batch
        only: the engine goes on.

        It may be called again while one is under way, not more: the second step is computed behind the first,
        and its carried tokens (`Chunk.carried`) are any tokens of the model where the first one failed."""
        ...

    @property
    def asynchronous(self) -> bool:
        """Whether a device computes what this process only asks for, so that it waits for each step that is
        not planned while the one before runs."""
        ...

    @property
    def staged(self) -> bool:
        """Whether the pool lies in a device's own memory, and the memory that was given (and that other
        workers read and fill) only mirrors it, block by block: `to_host` and `from_host` then copy."""
        ...

    async def to_host(self, blocks: Sequence[int]) -> None:
        """Returns when these blocks are in the memory that was given as they are in the pool."""
        ...

    async def from_host(self, blocks: Sequence[int]) -> None:
        """The other way. In turn with `run`: what is asked for later happens later, cancelled or not."""
        ...

    async def close(self) -> None: ...
