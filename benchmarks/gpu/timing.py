"""Times of work on a device, by its own events; the two ceilings that all else is held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch


def device_of(dry: bool) -> torch.device:
    if dry:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device is here; --dry runs the same on a CPU at tiny sizes")
    return torch.device("cuda")


def name_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"


def seconds(run: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    """Of each of so many calls, after two that are not counted."""
    for _ in range(2):
        run()
    if device.type != "cuda":
        samples = []
        for _ in range(rounds):
            start = time.perf_counter()
            run()
            samples.append(time.perf_counter() - start)
        return samples
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in pairwise(events)]


def median(samples: list[float]) -> float:
    return sorted(samples)[len(samples) // 2]


def copy_rate(device: torch.device, size: int) -> float:
    """Bytes read and written a second by a copy on the device, of random bytes."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median(seconds(lambda: target.copy_(source), device, 10))


def product_rate(device: torch.device, side: int) -> float:
    """Operations a second of a bfloat16 matrix product, on random numbers."""
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    return 2 * side**3 / median(seconds(lambda: a @ b, device, 10))
