"""Stop strings: cuts a growing text before the first one that becomes complete. Pure.

Of each stop string it follows how much of it the text ends with (Knuth, Morris, Pratt 1977), one step a
character. So the result depends on the text alone, not on how it was cut into pieces, and exactly the
longest suffix that may still become a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Joined, all `feed`s and the `flush` are the text up to where the first complete stop string begins.

    If several become complete with the same character, the longest one counts.
    """

    __slots__ = ("_borders", "_firsts", "_held", "_lengths", "_stops", "matched")

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        if not all(self._stops):
            raise ValueError("a stop string must not be empty")
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._lengths = [0] * len(self._stops)
        """Of each stop string: characters of it that the text ends with."""
        self._held = ""
        self.matched: str | None = None
        """The stop string that was met; nothing is let through any more."""

    def feed(self, text: str) -> str:
        """What may be shown now."""
        if self.matched is not None:
            return ""
        if not self._held and self._firsts.isdisjoint(text):
            return text
        lengths = self._lengths
        for at, char in enumerate(text):
            for index, stop in enumerate(self._stops):
                length, borders = lengths[index], self._borders[index]
                while length and stop[length] != char:
                    length = borders[length - 1]
                lengths[index] = length + (stop[length] == char)
            ended = [s for s, length in zip(self._stops, lengths, strict=True) if length == len(s)]
            if ended:
                self.matched = max(ended, key=len)
                whole = self._held + text[: at + 1]
                self._held = ""
                return whole[: len(whole) - len(self.matched)]
        whole = self._held + text
        shown = len(whole) - max(lengths)
        self._held = whole[shown:]
        return whole[:shown]

    def flush(self) -> str:
        """The text has ended: what was held back is no stop string."""
        held, self._held = self._held, ""
        self._lengths = [0] * len(self._stops)
        return held


def _borders(stop: str) -> tuple[int, ...]:
    """For each prefix: length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for char in stop[1:]:
        length = borders[-1]
        while length and stop[length] != char:
            length = borders[length - 1]
        borders.append(length + (stop[length] == char))
    return tuple(borders)
