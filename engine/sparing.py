"""A step that a device has no memory for is computed in parts, and later ones are kept smaller. Pure.

Chunks of a batch know nothing of each other, and a prompt's chunk may end anywhere, so a batch can be
computed in parts that give the same result as a whole. What a failed try has written of KV is written again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from msgspec.structs import replace

from engine.words import Batch, BatchResult, Chunk
from fleet.errors import Overloaded
from fleet.request import TokenLogprobs

_REGAIN = 64
"""Steps without a failure after which twice as many tokens are tried again: what took the memory (another
process, a long prompt's scores) may be gone."""


T = TypeVar("T")


class OutOfMemory(Exception):
    """A step did not fit into the device's memory. Nothing is lost but the step."""


class Sparing(Generic[T]):
    """Runs steps, in parts where that is needed."""

    def __init__(self, step: Callable[[Batch], T]) -> None:
        """`step` raises `OutOfMemory`, after which it can be called again."""
        self._step = step
        self._limit: int | None = None
        """Tokens a part may have; None: any number."""
        self._good = 0
        self.splits = 0
        """How often a step or a part of one did not fit."""

    @property
    def limit(self) -> int | None:
        return self._limit

    def run(self, batch: Batch) -> list[tuple[Batch, T]]:
        """The parts, and what came of each. `Overloaded` where not even one token of a chunk can be computed:
        the worker goes on, and others may have room for it."""
        parts = [batch] if self._limit is None else split(batch, self._limit)
        results: list[tuple[Batch, T]] = []
        failed = False
        while parts:
            part = parts.pop(0)
            try:
                results.append((part, self._step(part)))
                continue
            except OutOfMemory as error:
                cause = str(error)
            # Outside of the handler, so that nothing of the failed try is kept alive.
            failed = True
            self.splits += 1
            tokens = sum(len(chunk.tokens) for chunk in part.chunks)
            if tokens == 1:
                raise Overloaded(f"this worker's device has no memory for a step of one token: {cause}")
            self._limit = -(-tokens // 2)
            parts = [piece for left in (part, *parts) for piece in split(left, self._limit)]
        self._good = 0 if failed else self._good + 1
        if self._limit is not None and self._good >= _REGAIN:
            self._good = 0
            doubled = 2 * self._limit
            self._limit = None if doubled >= sum(len(c.tokens) for c in batch.chunks) else doubled
        return results


def split(batch: Batch, limit: int) -> list[Batch]:
    """In parts of at most `limit` tokens, in order; a chunk that is cut draws with its last piece only."""
    parts: list[list[Chunk]] = [[]]
    room = limit
    for chunk in batch.chunks:
        while True:
            if not room:
                parts.append([])
                room = limit
            if len(chunk.tokens) <= room:
                parts[-1].append(chunk)
                room -= len(chunk.tokens)
                break
            parts[-1].append(
                replace(
                    chunk,
                    tokens=chunk.tokens[:room],
                    draw=False,
                    targets=chunk.targets[:room],
                    history=(),
                    matcher=None,
                )
            )
            chunk = replace(
                chunk, tokens=chunk.tokens[room:], start=chunk.start + room, targets=chunk.targets[room:]
            )
            room = 0
    return [Batch(tuple(part)) for part in parts if part]


def joined(batch: Batch, results: Sequence[tuple[Batch, BatchResult]]) -> BatchResult:
    """Of parts in order: a chunk's pieces follow each other, and the last one is its own."""
    if len(results) == 1:
        return results[0][1]
    pieces = [
        (
            len(chunk.tokens),
            result.tokens[place],
            result.logprobs[place] if result.logprobs else None,
            result.scores[place] if result.scores else (),
        )
        for part, result in results
        for place, chunk in enumerate(part.chunks)
    ]
    tokens, logprobs, scores = [], [], []
    each = iter(pieces)
    for chunk in batch.chunks:
        left = len(chunk.tokens)
        scored: list[TokenLogprobs] = []
        while left:
            count, token, found, some = next(each)
            left -= count
            scored += some
        tokens.append(token)
        logprobs.append(found)
        scores.append(tuple(scored))
    return BatchResult(
        tuple(tokens),
        tuple(logprobs) if any(logprobs) else (),
        tuple(scores) if any(scores) else (),
    )
