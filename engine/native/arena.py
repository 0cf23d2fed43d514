"""Memory for weights in large pages, handed out in the order in which it will be read."""

from __future__ import annotations

import mmap
from threading import Lock

import torch
from torch import Tensor

_PIECE = 64 << 20
"""Bytes asked of the system at a time."""

_ALIGN = 4096


class Arena:
    """A step reads all weights once: with small pages, finding them takes a tenth of its time and more."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)
        self._lock = Lock()

    def take(self, count: int) -> Tensor:
        """uint8 `[count]`, not cleared; it lives as long as anybody holds it. From any thread."""
        with self._lock:
            return self._take(count)

    def _take(self, count: int) -> Tensor:
        size = -(-count // _ALIGN) * _ALIGN
        if len(self._left) < size:
            memory = mmap.mmap(-1, max(_PIECE, size))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._left = torch.frombuffer(memory, dtype=torch.uint8)
        taken, self._left = self._left[:count], self._left[size:]
        return taken
