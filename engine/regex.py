"""Regular expressions as constraints: what can be enforced, and how one reads on the text of a JSON string.

Pure. The parser is Python's own; expressions that it reads otherwise than ECMAScript (ECMA-262), the dialect
of JSON Schema, are refused. In a schema, a pattern speaks of a string's characters, while what is generated
is JSON text, in which quotes, backslashes and control characters are written by escapes.
"""

from __future__ import annotations

import re._constants as sre  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fleet.errors import BadConstraint

Ranges = tuple[tuple[int, int], ...]
"""Code points, first and last of each range, in order."""

_ALL: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = (
    *((0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_LINE_END: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_ESCAPED: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
"""What JSON writes by an escape."""
_SHORT = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}

_MOST_COPIES = 10_000
"""Of a group, by repetitions inside each other: about 2 s to compile."""
_MOST_OF_A_GROUP = 1_000


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern on the text between the quotes of a JSON string; it matches the whole of it."""

    text: str
    shortest: int
    """Characters of the string, before it is written as JSON."""
    longest: int | None
    """None: no limit."""


def check_regex(text: str) -> None:
    """BadConstraint where it holds what cannot be enforced."""
    _Writer(text).whole()


def json_pattern(text: str) -> Pattern:
    """Of a pattern as JSON Schema means it, held to the whole string: strings that match so match anyway."""
    writer = _Writer(text)
    written = writer.whole()
    low, high = writer.tree.getwidth()
    return Pattern(written, low, None if high >= sre.MAXREPEAT else high)


def any_string(shortest: int, longest: int | None) -> str:
    """Any text of so many characters that needs no escape in JSON."""
    return f"{_class(_minus(_ALL, _ESCAPED))}{{{shortest},{'' if longest is None else longest}}}"


class _Writer:
    def __init__(self, text: str) -> None:
        self._shown = text if len(text) < 100 else text[:100] + "…"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # on what a later Python may read otherwise
                self.tree = parser.parse(text)
        except (parser.error, OverflowError, RecursionError) as error:
            raise self._refused(f"cannot be read: {error}") from error
        if self.tree.state.flags & ~sre.SRE_FLAG_UNICODE:
            raise self._refused("has flags, which are not supported")

    def _refused(self, why: str) -> BadConstraint:
        return BadConstraint(f"the regular expression {self._shown!r} {why}")

    def whole(self) -> str:
        try:
            return self._sequence(self.tree, first=True, last=True, copies=1)
        except RecursionError as error:
            raise self._refused("is nested too deeply") from error

    def _sequence(self, items: Sequence[Any], *, first: bool, last: bool, copies: int) -> str:
        """`first`, `last`: whether nothing can stand before it, or after it."""
        written = []
        count = len(items)
        for place, (op, value) in enumerate(items):
            starts = first and all(items[before][0] is sre.AT for before in range(place))
            ends = last and all(items[after][0] is sre.AT for after in range(place + 1, count))
            written.append(self._item(op, value, first=starts, last=ends, copies=copies))
        return "".join(written)

    def _item(self, op: Any, value: Any, *, first: bool, last: bool, copies: int) -> str:
        if op is sre.LITERAL:
            return self._atom(((value, value),))
        if op is sre.NOT_LITERAL:
            return self._atom(_minus(_ALL, ((value, value),)))
        if op is sre.ANY:
            return self._atom(_minus(_ALL, _LINE_END))
        if op is sre.IN:
            return self._atom(self._set(value))
        if op is sre.AT:
            if (value in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING) and first) or (
                value in (sre.AT_END, sre.AT_END_STRING) and last
            ):
                return ""
            raise self._refused(
                "has an anchor or a word boundary inside; only ^ first and $ last are supported"
            )
        if op is sre.SUBPATTERN:
            _, added, removed, inner = value
            if added or removed:
                raise self._refused("has flags, which are not supported")
            return f"(?:{self._sequence(inner, first=first, last=last, copies=copies)})"
        if op is sre.BRANCH:
            branches = (self._sequence(b, first=first, last=last, copies=copies) for b in value[1])
            return f"(?:{'|'.join(branches)})"
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, inner = value
            return self._repeat(low, high, inner, copies)
        names = {
            sre.ASSERT: "look-around",
            sre.ASSERT_NOT: "look-around",
            sre.GROUPREF: "a back reference",
            sre.GROUPREF_EXISTS: "a condition",
        }
        raise self._refused(f"has {names.get(op, str(op).lower())}, which is not supported")

    def _repeat(self, low: int, high: int, inner: Sequence[Any], copies: int) -> str:
        count = low if high == sre.MAXREPEAT else high
        single = len(inner) == 1 and inner[0][0] in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)
        if not single:
            copies *= max(1, count)
            if copies > _MOST_COPIES or count > _MOST_OF_A_GROUP:
                raise self._refused(
                    f"repeats a group more than {_MOST_OF_A_GROUP} times, or groups in each other more than "
                    f"{_MOST_COPIES} times together"
                )
        body = self._sequence(inner, first=False, last=False, copies=copies)
        times = f"{{{low},{'' if high == sre.MAXREPEAT else high}}}"
        return f"(?:{body}){times}"

    def _set(self, items: Sequence[Any]) -> Ranges:
        negated = bool(items) and items[0][0] is sre.NEGATE
        found: list[tuple[int, int]] = []
        for op, value in items[negated:]:
            if op is sre.LITERAL:
                found.append((value, value))
            elif op is sre.RANGE:
                found.append(value)
            elif op is sre.CATEGORY:
                found += self._category(value)
            else:
                raise self._refused(f"has {str(op).lower()} in a set, which is not supported")
        merged = _merged(found)
        return _minus(_ALL, merged) if negated else merged

    def _category(self, category: Any) -> Ranges:
        known: dict[Any, Ranges] = {
            sre.CATEGORY_DIGIT: _DIGIT,
            sre.CATEGORY_NOT_DIGIT: _minus(_ALL, _DIGIT),
            sre.CATEGORY_WORD: _WORD,
            sre.CATEGORY_NOT_WORD: _minus(_ALL, _WORD),
            sre.CATEGORY_SPACE: _SPACE,
            sre.CATEGORY_NOT_SPACE: _minus(_ALL, _SPACE),
        }
        return known[category]

    def _atom(self, characters: Ranges) -> str:
        """One of these characters as JSON writes it. Where there are some that need no escape, these only:
        one class instead of a group keeps repetitions cheap."""
        if safe := _minus(_minus(characters, ((0xD800, 0xDFFF),)), _ESCAPED):
            return _class(safe)
        written = []
        for first, last in characters:
            for point in range(first, min(last, 0xFF) + 1):
                name = _SHORT.get(point)
                written.append(_literal("\\" + (name if name is not None else f"u{point:04x}")))
        if not written:
            raise self._refused("asks for a character that there is not")
        return f"(?:{'|'.join(written)})"


def _literal(text: str) -> str:
    return "".join(_point(ord(char)) for char in text)


def _point(point: int) -> str:
    char = chr(point)
    if point > 0xFFFF or (char.isascii() and char.isalnum()):
        return char
    return f"\\u{point:04x}"


def _class(ranges: Ranges) -> str:
    parts = (_point(a) if a == b else f"{_point(a)}-{_point(b)}" for a, b in ranges)
    return f"[{''.join(parts)}]"


def _merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)


def _minus(ranges: Ranges, less: Ranges) -> Ranges:
    found: list[tuple[int, int]] = []
    for first, last in ranges:
        for low, high in less:
            if high < first or low > last:
                continue
            if first < low:
                found.append((first, low - 1))
            first = high + 1
            if first > last:
                break
        if first <= last:
            found.append((first, last))
    return tuple(found)
