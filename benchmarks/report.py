"""One JSON line a benchmark case: what ran, where, with which settings, and percentiles of its samples."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the closest ranks of ascending samples; `share` in 0…1."""
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def emit(case: str, unit: str, samples: Sequence[float], **settings: object) -> None:
    """Prints the line. `samples` are in `unit`, at least one; `settings` are JSON values."""
    if not samples:
        raise ValueError(f"case {case!r} has no samples")
    ordered = sorted(samples)
    line = {
        "case": case,
        "unit": unit,
        "samples": len(ordered),
        "min": _round(ordered[0]),
        "p50": _round(percentile(ordered, 0.5)),
        "p90": _round(percentile(ordered, 0.9)),
        "p99": _round(percentile(ordered, 0.99)),
        "max": _round(ordered[-1]),
        "settings": settings,
        "commit": _commit(),
        "machine": _machine(),
        "load_1m": _round(os.getloadavg()[0]),
    }
    print(json.dumps(line), flush=True)


def _round(value: float) -> float:
    """Four significant digits: more would claim what no run here can show."""
    return float(f"{value:.4g}")


@functools.cache
def _commit() -> str:
    """Short name of the tree's commit, `+` when tracked files differ from it; `unknown` outside git."""
    git = ["git", "-C", str(_ROOT)]
    try:
        name = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if dirty else "")


@functools.cache
def _machine() -> dict[str, object]:
    cpu = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count()
    return {"cpu": cpu, "cores": cores, "python": platform.python_version(), "system": platform.system()}
