"""Words: what an answer's text consists of, and how it is split into that as it comes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Words for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model wrote for itself before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool; its arguments follow."""

    index: int
    """0 for the first call of the answer, and so on."""
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments; joined they are a JSON object, unless the answer was cut off."""

    index: int
    text: str


Part = Content | Reasoning | CallBegun | CallArguments


class Splitter(Protocol):
    """Text in, parts out. What comes out, joined, does not depend on how the text was cut into pieces."""

    def feed(self, text: str) -> list[Part]:
        """What is certain now."""
        ...

    def end(self) -> list[Part]:
        """No more comes: what was held back."""
        ...


def overlap(text: str, marker: str) -> int:
    """Length of the longest proper prefix of `marker` that `text` ends with."""
    at = text.find(marker[:1], max(0, len(text) - len(marker) + 1)) if marker else -1
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0
