"""Parts what a model thinks, between `<think>` and `</think>`, from what it answers. Pure.

So write Qwen 3, DeepSeek R1 and models made from them: at most once, and only where the answer begins. With
some the chat template opens the tag itself, so that the answer begins inside it.
"""

from __future__ import annotations

from router.text.parts import Content, Part, Reasoning, overlap

BEGIN, END = "<think>", "</think>"
_MOST_SPACE = 32
"""Spaces that are held back before and dropped behind a tag."""


def thinks(template: str) -> bool:
    """Whether a model with this chat template is one that thinks in these tags."""
    return END in template


def opened(prompt: str) -> bool:
    """Whether the prompt ends inside the tag."""
    return prompt[-64:].rstrip().endswith(BEGIN)


class ThinkSplitter:
    """One answer. See `router.text.parts.Splitter`. Spaces beside the tags belong to neither side."""

    __slots__ = ("_dropped", "_place", "_rest")

    def __init__(self, *, inside: bool = False) -> None:
        """`inside`: the prompt has opened the tag."""
        self._place = "inside" if inside else "before"
        self._rest = ""
        self._dropped = 0 if inside else _MOST_SPACE
        """Spaces dropped since the tag; from `_MOST_SPACE` on no more are."""

    def feed(self, text: str) -> list[Part]:
        if self._place == "behind" and self._dropped >= _MOST_SPACE:
            return [Content(text)] if text else []
        self._rest += text
        parts: list[Part] = []
        if self._place == "before":
            start = self._rest.lstrip()
            if start.startswith(BEGIN):
                self._go("inside", start[len(BEGIN) :])
            elif not BEGIN.startswith(start) or len(self._rest) - len(start) > _MOST_SPACE:
                self._place = "behind"
            else:
                return parts
        if self._place == "inside":
            self._drop()
            at = self._rest.find(END)
            shown = at if at >= 0 else len(self._rest) - overlap(self._rest, END)
            if shown:
                parts.append(Reasoning(self._rest[:shown]))
            self._rest = self._rest[shown:]
            if at >= 0:
                self._go("behind", self._rest[len(END) :])
        if self._place == "behind":
            self._drop()
            if self._rest:
                parts.append(Content(self._rest))
                self._rest = ""
        return parts

    def end(self) -> list[Part]:
        rest, self._rest = self._rest, ""
        if not rest:
            return []
        return [Reasoning(rest) if self._place == "inside" else Content(rest)]

    def _go(self, place: str, rest: str) -> None:
        self._place, self._rest, self._dropped = place, rest, 0

    def _drop(self) -> None:
        if self._dropped < _MOST_SPACE and self._rest:
            text = self._rest.lstrip()
            self._dropped += len(self._rest) - len(text)
            self._rest = text
            if text:
                self._dropped = _MOST_SPACE
