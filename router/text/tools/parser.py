"""Finds calls of tools in an answer as its text comes, in any of the formats. Pure.

Nothing is held back but what may still turn out to be the beginning of a call: a prefix of the marker, and
behind it the call's name. What turns out to be none is content, to the character. So is what follows where
a call breaks off; its arguments then stay as far as they were right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from router.text.parts import CallArguments, CallBegun, Content, Part, overlap
from router.text.tools.formats import Format
from router.text.tools.json_scan import CallObject

_MOST_SPACE = 32
"""Spaces that are held back where a call may begin."""
_NAMED = re.compile(r"([A-Za-z0-9_-]{1,64})(?:\[CALL_ID\][A-Za-z0-9_-]{1,64})?(?:\[ARGS\])?\s*(?=\{)")
_MOST_NAMED = 192


class ToolParser:
    """One answer. See `router.text.parts.Splitter`."""

    __slots__ = (
        "_call",
        "_ended",
        "_form",
        "_in_list",
        "_index",
        "_names",
        "_raw",
        "_rest",
        "_state",
        "_sure",
        "_told",
        "broken",
        "whole",
    )

    def __init__(self, form: Format, names: Collection[str]) -> None:
        """`names` of the tools that may be called; a call of any other is content."""
        self._form = form
        self._names = frozenset(names)
        self._rest = ""
        """Not understood yet."""
        self._raw = ""
        """Understood as the beginning of a call that has not begun yet."""
        self._call: CallObject | None = None
        self._index = -1
        self._told = False
        """Whether the call that is being read has been reported."""
        self._sure = False
        """Whether the marker was met before it."""
        self._ended = True
        """Whether the end of the last call was met, or none is due."""
        self._in_list = False
        self._state: Callable[[list[Part], bool], bool] = self._edge
        self.whole = 0
        """Calls whose arguments are whole."""
        self.broken = False
        """Whether a call broke off."""

    def feed(self, text: str) -> list[Part]:
        self._rest += text
        parts: list[Part] = []
        while self._state(parts, False):
            pass
        return parts

    def end(self) -> list[Part]:
        parts: list[Part] = []
        while self._state(parts, True):
            pass
        return parts

    # -- states: each takes what it can from the rest and says whether the next one is to go on

    def _edge(self, parts: list[Part], last: bool) -> bool:
        """Where the answer begins, or behind a call."""
        form, rest = self._form, self._rest
        text = rest.lstrip()
        if not text:
            if last and self._index >= 0:
                self._rest = ""
            return self._to_content() if last or len(rest) > _MOST_SPACE else False
        if self._index >= 0:
            if not self._ended and text.startswith(form.end):
                self._rest = text[len(form.end) :]
                self._ended = True
                return True
            if (not self._ended and form.end.startswith(text)) or form.separator == text.rstrip() != "":
                if last:
                    self._rest = ""
                return last or (len(rest) > _MOST_SPACE and self._to_content())
            if form.separator:
                text = text.removeprefix(form.separator).lstrip()
        if form.marker and text.startswith(form.marker):
            self._sure = True
            return self._open_behind(len(rest) - len(text) + len(form.marker))
        if form.bare and (text[:1] == "{" or (text[:1] == "[" and form.lists)):
            self._sure = False
            return self._open_behind(len(rest) - len(text))
        if form.marker.startswith(text) and not last:
            return False
        return self._to_content()

    def _content(self, parts: list[Part], last: bool) -> bool:
        marker, rest = self._form.marker, self._rest
        at = rest.find(marker) if marker else -1
        shown = at if at >= 0 else len(rest) - (0 if last else overlap(rest, marker))
        if shown:
            parts.append(Content(rest[:shown]))
            self._rest = rest[shown:]
        self._sure = True
        return at >= 0 and self._open_behind(len(marker))

    def _open(self, parts: list[Part], last: bool) -> bool:
        """Behind a marker, or a comma of a list: a call has to follow."""
        form, text = self._form, self._rest.lstrip()
        if not text:
            return (last or len(self._rest) > _MOST_SPACE) and self._fail(parts)
        space = len(self._rest) - len(text)
        if form.named:
            found = _NAMED.match(text)
            if found and found[1] in self._names:
                return self._start(space + found.end(), CallObject(self._names, name=found[1]))
            waits = not last and not found and "{" not in text and len(text) <= _MOST_NAMED
            return not waits and self._fail(parts)
        if text[0] == "{":
            return self._start(space, CallObject(self._names, sure=self._sure))
        if text[0] == "[" and form.lists and not self._in_list:
            self._in_list = True
            return self._open_behind(space + 1)
        return self._fail(parts)

    def _in_call(self, parts: list[Part], last: bool) -> bool:
        call, rest = self._call, self._rest
        assert call is not None
        fits, used = True, 0
        for char in rest:
            fits = call.push(char)
            if not fits:
                break
            used += 1
            if call.ended:
                break
        self._rest = rest[used:]
        if not call.begun:
            self._raw += rest[:used]
        elif not self._told:
            self._told = True
            self._raw = ""
            self._index += 1
            parts.append(CallBegun(self._index, call.name))
        if text := call.take():
            parts.append(CallArguments(self._index, text))
        if fits and not call.ended:
            if not last:
                return False
            if not call.begun:
                return self._fail(parts)
            self.broken = not call.whole
        elif not call.begun:
            return self._fail(parts)
        elif not call.whole:
            self.broken = True
            return self._to_content()
        self.whole += call.whole
        self._ended = not self._form.end
        self._state = self._listed if self._in_list else self._edge
        return True

    def _listed(self, parts: list[Part], last: bool) -> bool:
        """Behind a call in a list."""
        text = self._rest.lstrip()
        if not text:
            if last:
                self._rest = ""
            return len(self._rest) > _MOST_SPACE and self._to_content()
        if text[0] == ",":
            return self._open_behind(len(self._rest) - len(text) + 1)
        self._in_list = False
        if text[0] != "]":
            return self._to_content()
        self._rest = text[1:]
        self._state = self._edge
        return True

    # -- ways between them

    def _open_behind(self, length: int) -> bool:
        self._raw += self._rest[:length]
        self._rest = self._rest[length:]
        self._state = self._open
        return True

    def _start(self, behind: int, call: CallObject) -> bool:
        self._raw += self._rest[:behind]
        self._rest = self._rest[behind:]
        self._call = call
        self._told = False
        self._state = self._in_call
        return True

    def _to_content(self) -> bool:
        self._in_list = False
        self._state = self._content
        return True

    def _fail(self, parts: list[Part]) -> bool:
        """It was no call after all."""
        parts.append(Content(self._raw))
        self._raw = ""
        return self._to_content()
