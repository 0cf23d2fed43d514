"""What this machine has."""

from __future__ import annotations

from pathlib import Path


def memory() -> dict[str, int]:
    """Bytes, by the kernel's names; empty where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines)
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[0].startswith(("Mem", "Swap"))}
