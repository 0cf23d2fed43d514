"""Follows JSON a character at a time, as strictly as RFC 8259, and a call written as a JSON object. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

_SPACE = frozenset(" \t\n\r")
_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}


class State(Enum):
    VALUE = auto()
    FIRST_VALUE = auto()
    """A value, or the end of an empty array."""
    KEY = auto()
    FIRST_KEY = auto()
    """A key, or the end of an empty object."""
    COLON = auto()
    AFTER = auto()
    """Behind a value."""
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    NUMBER = auto()


_NUMBER: dict[str, dict[str, str]] = {
    "-": {"0": "0", "digit": "1"},
    "0": {".": ".", "e": "e"},
    "1": {"0": "1", "digit": "1", ".": ".", "e": "e"},
    ".": {"0": "f", "digit": "f"},
    "f": {"0": "f", "digit": "f", "e": "e"},
    "e": {"0": "x", "digit": "x", "sign": "s"},
    "s": {"0": "x", "digit": "x"},
    "x": {"0": "x", "digit": "x"},
}
"""Where in a number one stands, and where each kind of character leads."""
_WHOLE_NUMBERS = frozenset("01fx")


class JsonScan:
    """One JSON value. Memory grows with the depth only."""

    __slots__ = ("_number", "_open", "_rest", "is_key", "state")

    def __init__(self) -> None:
        self.state = State.VALUE
        self.is_key = False
        """Whether the string that was met last is a key."""
        self._open: list[str] = []
        self._rest = ""
        self._number = ""

    @property
    def depth(self) -> int:
        return len(self._open)

    @property
    def ended(self) -> bool:
        """Whether the value is whole; of a number this is not known before the next character."""
        return self.state is State.AFTER and not self._open

    def push(self, char: str) -> bool:
        """False: no JSON goes on like this. Nothing may be pushed any more then."""
        state = self.state
        if state is State.STRING:
            if char == '"':
                self.state = State.COLON if self.is_key else State.AFTER
            elif char == "\\":
                self.state = State.ESCAPE
            else:
                return char >= " "
            return True
        if state is State.NUMBER:
            kind = _kind(char)
            if kind in _NUMBER[self._number]:
                self._number = _NUMBER[self._number][kind]
                return True
            if self._number not in _WHOLE_NUMBERS:
                return False
            self.state = state = State.AFTER
        elif state is State.ESCAPE:
            if char == "u":
                self.state, self._rest = State.HEX, "0000"
                return True
            self.state = State.STRING
            return char in _ESCAPES
        elif state is State.HEX:
            self._rest = self._rest[1:]
            if not self._rest:
                self.state = State.STRING
            return char in _HEX
        elif state is State.LITERAL:
            if not self._rest.startswith(char):
                return False
            self._rest = self._rest[1:]
            if not self._rest:
                self.state = State.AFTER
            return True
        return char in _SPACE or self._structure(state, char)

    def _structure(self, state: State, char: str) -> bool:
        if state is State.COLON:
            self.state = State.VALUE
            return char == ":"
        if state is State.AFTER:
            if char == "," and self._open:
                self.state = State.KEY if self._open[-1] == "}" else State.VALUE
                return True
            return self._close(char)
        if state in (State.KEY, State.FIRST_KEY):
            if char == '"':
                self.state, self.is_key = State.STRING, True
                return True
            return state is State.FIRST_KEY and self._close(char)
        if char == '"':
            self.state, self.is_key = State.STRING, False
        elif char == "{":
            self._open.append("}")
            self.state = State.FIRST_KEY
        elif char == "[":
            self._open.append("]")
            self.state = State.FIRST_VALUE
        elif char in _LITERALS:
            self.state, self._rest = State.LITERAL, _LITERALS[char]
        elif char == "-" or char in _DIGITS:
            self.state, self._number = State.NUMBER, char if char in "-0" else "1"
        else:
            return state is State.FIRST_VALUE and self._close(char)
        return True

    def _close(self, char: str) -> bool:
        if not self._open or self._open.pop() != char:
            return False
        self.state = State.AFTER
        return True


def _kind(char: str) -> str:
    if char in ("0", "."):
        return char
    if char in _DIGITS:
        return "digit"
    if char in ("e", "E"):
        return "e"
    return "sign" if char in ("+", "-") else ""


_KEYS = {
    "name": "name",
    "arguments": "arguments",
    "parameters": "arguments",
    "type": "type",
    "id": "id",
}
"""Keys that a call may have before its arguments are known, and what they mean."""


_MOST_ESCAPED = 400
"""Characters of a name, with escapes, or of an id."""


class CallObject:
    """A call: `{"name": …, "arguments": {…}}`, or, where the name is known already, only the arguments.

    It has begun as soon as the name of a known tool and the first character of the arguments are known;
    from then on pieces of the arguments come out as they come in. Arguments that stand before the name,
    or are an object inside a string, as some models write them, wait until they are whole.
    """

    __slots__ = (
        "_key",
        "_names",
        "_pieces",
        "_scan",
        "_seen",
        "_sure",
        "_token",
        "_waiting",
        "begun",
        "name",
        "whole",
    )

    def __init__(self, names: Collection[str], *, name: str = "", sure: bool = True) -> None:
        """`sure`: it can be nothing else. If not, an object must be a call from its first key on, so that
        an answer in JSON is not held up, and without arguments it is none."""
        self._names = names
        self._sure = sure
        self._scan = JsonScan()
        self._seen: set[str] = set()
        self._key = ""
        """The key whose value is due."""
        self._token: list[str] = []
        """What of a key or a value has been read."""
        self._waiting = ""
        """Whole arguments without a name yet."""
        self._pieces: list[str] = []
        self.name = name
        self.begun = False
        self.whole = False
        """Whether the arguments are."""

    @property
    def ended(self) -> bool:
        return self._scan.ended

    def take(self) -> str:
        """Arguments that have come since the last time."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def push(self, char: str) -> bool:
        """False: no call goes on like this. Nothing may be pushed any more then."""
        scan = self._scan
        if not (scan.depth or char == "{") or not scan.push(char):
            return False
        if self.whole:
            return True  # what else the object holds only has to be JSON
        if self.begun:
            self._pieces.append(char)
            self.whole = scan.depth == (1 if self._seen else 0)
            return True
        if scan.state is State.FIRST_KEY and scan.depth == 1:
            return not self.name or self._begin(char)
        if self._token:
            self._token.append(char)
            if scan.depth == 1 and scan.state in (State.COLON, State.AFTER):
                return self._take()
            return self._key == "arguments" or self._may_fit()
        if scan.ended:
            return self._sure and bool(self.name) and self._begin("{}", whole=True)
        if char in _SPACE or char in ",:":
            return True
        if self._key == "arguments" and char == "{" and self.name:
            return self._begin(char)
        self._token.append(char)
        return not self._key or char == '"' or (self._key == "arguments" and char in "{n")

    def _begin(self, arguments: str, *, whole: bool = False) -> bool:
        self._pieces.append(arguments)
        self.begun, self.whole = True, whole
        return True

    def _may_fit(self) -> bool:
        """Whether the beginning of a key or value can become one that is looked for: else nothing waits."""
        text = "".join(self._token[1:])
        if "\\" in text or self._key == "id":
            return len(text) <= _MOST_ESCAPED
        known = self._names if self._key == "name" else ("function",) if self._key else _KEYS
        return any(word.startswith(text) for word in known)

    def _take(self) -> bool:
        text = "".join(self._token)
        self._token.clear()
        key, self._key = self._key, ""
        if not key:
            self._key = _KEYS.get(json.loads(text), "")
            fits = bool(self._key) and self._key not in self._seen
            self._seen.add(self._key)
            return fits and (self._sure or bool(self.name) or self._key in ("name", "type"))
        if key == "arguments":
            self._waiting = _object(text)
            if not self._waiting:
                return False
        elif key == "name":
            self.name = json.loads(text)
            if self.name not in self._names:
                return False
        elif key == "type" and json.loads(text) != "function":
            return False
        return not (self.name and self._waiting) or self._begin(self._waiting, whole=True)


def _object(value: str) -> str:
    """Arguments written as an object, as a string that holds one, or as null; empty: as anything else."""
    if value == "null":
        return "{}"
    text = json.loads(value).strip() if value.startswith('"') else value
    scan = JsonScan()
    return text if text.startswith("{") and all(map(scan.push, text)) and scan.ended else ""
