"""How fast KV comes here, as long as that is recent news. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.2
"""Of the newest pull."""
_RECENT_S = 10.0
"""After so many seconds without a pull the speed is unknown again. Routers avoid a worker whose pulls are
slow; were it remembered for ever, one bad minute of the network would keep them away for good, and no pull
would ever show that it is over."""


@dataclass(slots=True)
class PullSpeed:
    """Averages sums, not rates: a pull counts by the time it took."""

    _bytes: float = 0.0
    _seconds: float = 0.0
    _at: float = 0.0

    def add(self, count: int, seconds: float, now: float) -> None:
        """`count` bytes came in `seconds`."""
        if seconds <= 0:
            return
        weight = _WEIGHT if self.bytes_s(now) is not None else 1.0
        self._bytes += weight * (count - self._bytes)
        self._seconds += weight * (seconds - self._seconds)
        self._at = now

    def bytes_s(self, now: float) -> float | None:
        """None: unknown."""
        if not self._seconds or now - self._at > _RECENT_S:
            return None
        return self._bytes / self._seconds
