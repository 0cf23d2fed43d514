"""The whole way of an answer's text: first its reasoning is parted from it, then calls of tools. Pure."""

from __future__ import annotations

from router.text.parts import CallArguments, Content, Part, Reasoning
from router.text.reasoning import ThinkSplitter
from router.text.tools.parser import ToolParser


class Split:
    """See `router.text.parts.Splitter`. Neighbours of one kind come out as one part."""

    __slots__ = ("_thinking", "_tools")

    def __init__(self, thinking: ThinkSplitter | None, tools: ToolParser | None) -> None:
        self._thinking = thinking
        self._tools = tools

    @property
    def called(self) -> bool:
        """Whether the answer is one or more calls, all of them whole."""
        return self._tools is not None and self._tools.whole > 0 and not self._tools.broken

    def feed(self, text: str) -> list[Part]:
        return _joined(self._through(self._thinking.feed(text) if self._thinking else [Content(text)]))

    def end(self) -> list[Part]:
        parts = self._through(self._thinking.end() if self._thinking else [])
        return _joined(parts + (self._tools.end() if self._tools else []))

    def _through(self, parts: list[Part]) -> list[Part]:
        tools = self._tools
        if tools is None:
            return parts
        through: list[Part] = []
        for part in parts:
            through += tools.feed(part.text) if isinstance(part, Content) else [part]
        return through


def _joined(parts: list[Part]) -> list[Part]:
    if len(parts) < 2:
        return parts
    joined: list[Part] = []
    for part in parts:
        before = joined[-1] if joined else None
        match before, part:
            case (Content(), Content()):
                joined[-1] = Content(before.text + part.text)
            case (Reasoning(), Reasoning()):
                joined[-1] = Reasoning(before.text + part.text)
            case (CallArguments(), CallArguments()) if before.index == part.index:
                joined[-1] = CallArguments(before.index, before.text + part.text)
            case _:
                joined.append(part)
    return joined
