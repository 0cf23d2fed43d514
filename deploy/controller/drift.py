"""Whether an object of the cluster is as it was applied, and where it is not. Pure."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_UNITS = {
    "": Decimal(1),
    "n": Decimal("0.000000001"),
    "u": Decimal("0.000001"),
    "m": Decimal("0.001"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}
_QUANTITY = re.compile(r"\+?([0-9]+\.?[0-9]*|\.[0-9]+)(?:([eE][+-]?[0-9]{1,3})|([kMGTPE]i?|Ki|[num]|))")


def quantity(text: str) -> Decimal | None:
    """`1000m`, `1e0` and `1` are the same; None: no quantity."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    if match[2]:
        return Decimal(match[1] + match[2])
    return Decimal(match[1]) * _UNITS[match[3]] if match[3] in _UNITS else None


def differs(wanted: Any, live: Any, path: str = "") -> str | None:
    """The first field of `wanted` that `live` has not, as `path: live ≠ wanted`; what only `live` has, such
    as defaults, does not matter. None: as it was applied."""
    if isinstance(wanted, dict):
        if not isinstance(live, dict):
            return None if not wanted and live is None else f"{path}: {_short(live)} ≠ {_short(wanted)}"
        for key, value in wanted.items():
            found = differs(value, live.get(key), f"{path}.{key}" if path else key)
            if found:
                return found
        return None
    if isinstance(wanted, list) and path == "metadata.ownerReferences":
        # Others may own it as well.
        by = {one.get("uid"): one for one in live or ()}
        return next(filter(None, (differs(one, by.get(one["uid"]), path) for one in wanted)), None)
    if isinstance(wanted, list):
        if not isinstance(live, list) or len(live) != len(wanted):
            return None if not wanted and live is None else f"{path}: {_short(live)} ≠ {_short(wanted)}"
        for at, (one, other) in enumerate(zip(wanted, live, strict=True)):
            if found := differs(one, other, f"{path}[{at}]"):
                return found
        return None
    if wanted == live and isinstance(wanted, bool) == isinstance(live, bool):
        return None
    if live is None and wanted in ("", False, 0):
        return None
    ours, theirs = quantity(str(wanted)), quantity(str(live))
    if ours is not None and ours == theirs and not isinstance(wanted, bool):
        return None
    return f"{path}: {_short(live)} ≠ {_short(wanted)}"


def as_made(wanted: Any, live: Any) -> Any:
    """`wanted`, with what the cluster made of it in each place: what is to be looked for from then on."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        return {key: as_made(value, live.get(key)) for key, value in wanted.items()}
    return live


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
