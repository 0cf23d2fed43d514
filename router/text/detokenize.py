"""Tokens back to text, one at a time: whole characters as soon as they are whole. Pure.

Every token stands for some bytes, wherever it is met; the text is those bytes decoded as UTF-8. So a delta
costs the bytes of its token and never looks back, at most the three bytes of an unfinished character wait,
and text of the prompt cannot come out again. A maximal ill-formed run becomes one U+FFFD (Unicode, "U+FFFD
Substitution of Maximal Subparts"), in Python's decoder as in the one of the `tokenizers` library.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

_UTF8 = codecs.getincrementaldecoder("utf-8")
_TAIL = 3
"""Most bytes of a character that is not whole."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What each token stands for."""

    pieces: tuple[bytes, ...]
    """By token id; empty for ids that have no token."""
    special: frozenset[int] = frozenset()
    """Control tokens: no part of the text, unless asked for."""

    def __len__(self) -> int:
        return len(self.pieces)

    def piece(self, token: int) -> bytes:
        """A model's output may be wider than its vocabulary: what has no token has no bytes."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""


class Detokenizer:
    """The text of one answer. Joined, all `feed`s and the `flush` are the decoding of all tokens."""

    __slots__ = ("_decoder", "_pieces", "_skip")

    def __init__(
        self, vocabulary: Vocabulary, *, prompt: Sequence[int] = (), skip_special: bool = True
    ) -> None:
        """`prompt` is looked at from its end only, for a character that it leaves unfinished."""
        self._pieces = vocabulary.pieces
        self._skip: frozenset[int] = vocabulary.special if skip_special else frozenset()
        self._decoder = _UTF8("replace")
        if prompt:
            self._decoder.decode(self._unfinished(prompt))

    def _unfinished(self, prompt: Sequence[int]) -> bytes:
        """The last bytes of the prompt. A leading byte always begins anew, so no more are needed."""
        tail = b""
        for token in reversed(prompt):
            if len(tail) >= _TAIL:
                break
            if token not in self._skip and 0 <= token < len(self._pieces):
                tail = self._pieces[token] + tail
        return tail[-_TAIL:]

    def feed(self, token: int) -> str:
        """What this token adds: text that stays as it is, perhaps none yet."""
        if token in self._skip or not 0 <= token < len(self._pieces):
            return ""
        return self._decoder.decode(self._pieces[token])

    def flush(self) -> str:
        """The end: a character still unfinished becomes U+FFFD."""
        return self._decoder.decode(b"", True)
