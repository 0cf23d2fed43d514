"""Blocks between a device's pool and the host memory that mirrors it: pinned, in overlapping pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_PIECE = 32 << 20
"""Bytes of a pinned piece. While one is copied by the device, the host copies the other."""


class Mirror:
    """`pool` on a device and `host`, both uint8 `[blocks, block_bytes]`. One thread uses it."""

    def __init__(self, pool: Tensor, host: Tensor, *, piece: int = _PIECE) -> None:
        self._pool, self._host = pool, host
        self._count = max(1, piece // pool.shape[1])
        self._pinned: list[Tensor] = []

    def out(self, blocks: Sequence[int]) -> None:
        """Host blocks become what the pool's are; returns when they are."""
        waiting: tuple[Tensor, Tensor, Any] | None = None
        for turn, index in enumerate(self._pieces(blocks)):
            pinned = self._buffer(turn)[: len(index)]
            pinned.copy_(self._pool.index_select(0, self._to_device(index)), non_blocking=True)
            copied = (index, pinned, self._mark())
            if waiting is not None:
                self._land(*waiting)
            waiting = copied
        if waiting is not None:
            self._land(*waiting)

    def into(self, blocks: Sequence[int]) -> None:
        """The other way; in order with what the device does next."""
        marks: list[Any] = [None, None]
        for turn, index in enumerate(self._pieces(blocks)):
            if marks[turn % 2] is not None:
                marks[turn % 2].synchronize()
            pinned = self._buffer(turn)[: len(index)]
            torch.index_select(self._host, 0, index, out=pinned)
            moved = pinned.to(self._pool.device, non_blocking=True)
            self._pool.index_copy_(0, self._to_device(index), moved)
            marks[turn % 2] = self._mark()
        for mark in marks:
            # The pinned pieces are filled anew by whoever comes next.
            if mark is not None:
                mark.synchronize()

    def _pieces(self, blocks: Sequence[int]) -> list[Tensor]:
        return list(torch.split(torch.tensor(blocks, dtype=torch.int64), self._count)) if blocks else []

    def _land(self, index: Tensor, pinned: Tensor, copied: Any) -> None:
        if copied is not None:
            copied.synchronize()
        self._host.index_copy_(0, index, pinned)

    def _buffer(self, turn: int) -> Tensor:
        while len(self._pinned) < 2:
            shape = (self._count, self._pool.shape[1])
            pin = self._pool.device.type == "cuda"
            self._pinned.append(torch.empty(shape, dtype=torch.uint8, pin_memory=pin))
        return self._pinned[turn % 2]

    def _to_device(self, index: Tensor) -> Tensor:
        return index.to(self._pool.device)

    def _mark(self) -> Any:
        if self._pool.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event
