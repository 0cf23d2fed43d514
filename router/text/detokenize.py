"""Tokens back to text, one at a time: whole characters as soon as they are whole. Pure.

Every token stands for some bytes, wherever it is met; the text is those bytes decoded as UTF-8. So a delta
costs the bytes of its token and never looks back, at most the three bytes of an unfinished character wait,
and text of the prompt cannot come out again. A maximal ill-formed run becomes one U+FFFD (Unicode, "U+FFFD
Substitution of Maximal Subparts"), in Python's decoder as in the one of the `tokenizers` library.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from dataclasses import dataclass

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

    __slots__ = ("_pieces", "_rest", "_skip")

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        prompt: Sequence[int] = (),
        skip_special: bool = True,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """`prompt` is looked at from its end only, for a character that it leaves unfinished; `keep` are
        control tokens that are text even if others are skipped."""
        self._pieces = vocabulary.pieces
        special = vocabulary.special - keep if keep else vocabulary.special
        self._skip: frozenset[int] = special if skip_special else frozenset()
        self._rest = b""
        """Bytes of a character that is not whole yet."""
        if prompt:
            self._decode(self._last_bytes(prompt))

    def _last_bytes(self, prompt: Sequence[int]) -> bytes:
        """A leading byte always begins anew, so no more than these decide what is unfinished."""
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
        piece = self._pieces[token]
        return self._decode(self._rest + piece if self._rest else piece)

    def _decode(self, data: bytes) -> str:
        text, used = utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def flush(self) -> str:
        """The end: a character still unfinished becomes U+FFFD."""
        rest, self._rest = self._rest, b""
        return rest.decode("utf-8", "replace")
