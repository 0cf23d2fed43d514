"""A table of the JSON lines on standard input: what was measured, against what, whether the target holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

SHOWN = ("batch", "sequences", "context", "tokens", "before", "dim", "block", "pair", "overlap")


def rows(lines: Iterable[str]) -> Iterator[tuple[str, ...]]:
    for line in lines:
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        if not isinstance(found, dict) or "case" not in found:
            continue
        settings = found.get("settings", {})
        what = " ".join(f"{key}={settings[key]}" for key in SHOWN if key in settings)
        ratio, target = settings.get("ratio"), settings.get("target")
        verdict = "" if target is None or ratio is None else ("holds" if ratio >= target else "MISSED")
        yield (
            found["case"],
            what,
            f"{found['p50']:g} {found['unit']}",
            "" if "limit" not in settings else f"{settings['limit']:.4g}",
            "" if ratio is None else f"{ratio:.1%}",
            "" if target is None else f"{target:.0%}",
            verdict,
        )


def main() -> int:
    heads = ("case", "of", "p50", "limit", "ratio", "target", "")
    table = [heads, *rows(sys.stdin)]
    widths = [max(len(row[i]) for row in table) for i in range(len(heads))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0 if len(table) > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
