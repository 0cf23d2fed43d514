"""A step's numbers to the device in one copy, and what it brings back without a wait for it.

Packed on the host in memory that stays, unpacked as views: many small arrays would each take a copy and, from
pageable memory, a wait. On a CPU nothing is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]

_ALIGNED = 16
"""Bytes: what a kernel loads at a time at most."""

_BUFFERS = 16
"""Copies that may be under way at once without a wait: the few of the step that runs, which come in turn with
its work, and those of the step that is asked for behind it."""


def offsets(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Where each array begins in a packed buffer, and the buffer's bytes."""
    places: list[int] = []
    end = 0
    for array in arrays:
        places.append(end)
        end += -(-array.nbytes // _ALIGNED) * _ALIGNED
    return places, end


def pack(arrays: Sequence[Array], buffer: Array) -> list[int]:
    """Copies arrays into a uint8 buffer, one after the other; returns where each begins."""
    places, _ = offsets(arrays)
    for array, place in zip(arrays, places, strict=True):
        buffer[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return places


class Landing:
    """Tensors on their way to the host, in order with the device's work; whoever asked need not wait."""

    def __init__(self, *tensors: Tensor) -> None:
        """All of one device."""
        self._host = tensors
        self._landed: Any = None
        if tensors[0].device.type == "cpu":
            return
        self._host = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors)
        for host, tensor in zip(self._host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._landed.record()

    def wait(self) -> list[Any]:
        """Their values as lists, once they are there. In any thread."""
        if self._landed is not None:
            self._landed.synchronize()
        return [host.tolist() for host in self._host]


class Staging:
    """Uploads of one stream of steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * _BUFFERS
        self._copied: list[Any] = [None] * _BUFFERS
        self._turn = 0

    def upload(self, *arrays: Array) -> list[Tensor]:
        """The arrays as tensors on the device, of the same types and shapes; in order with its work."""
        if self._device.type == "cpu":
            return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        _, size = offsets(arrays)
        host = self._host(size)
        places = pack(arrays, host.numpy())
        packed = host[:size].to(self._device, non_blocking=True)
        self._mark()
        return [
            packed[place : place + array.nbytes]
            .view(torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype)
            .view(array.shape)
            for place, array in zip(places, arrays, strict=True)
        ]

    def into(self, target: Tensor, *arrays: Array) -> None:
        """The same into the beginning of a uint8 tensor that stays, as a captured graph reads it."""
        _, size = offsets(arrays)
        if size > len(target):
            raise ValueError(f"{size} bytes into {len(target)}")
        if target.device.type == "cpu":
            pack(arrays, target.numpy())
            return
        host = self._host(size)
        pack(arrays, host.numpy())
        target[:size].copy_(host[:size], non_blocking=True)
        self._mark()

    def _host(self, size: int) -> Tensor:
        """Pinned memory from which no copy is under way any more."""
        self._turn = (self._turn + 1) % _BUFFERS
        if self._copied[self._turn] is not None:
            self._copied[self._turn].synchronize()
        if len(self._buffers[self._turn]) < size:
            self._buffers[self._turn] = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        return self._buffers[self._turn]

    def _mark(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._copied[self._turn] = event


@functools.cache
def staging_of(device: torch.device) -> Staging:
    """One for all that draws on a device."""
    return Staging(device)
