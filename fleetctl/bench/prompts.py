"""Texts of a given number of tokens, the same for the same piece of a workload. Pure.

A text is made of words that are one token each with a space before them, as common short words are in every
large vocabulary; so its length is known without encoding it, and pieces can be put together. With the model's
own tokenizer the words are proven to be so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fleet.workload import Piece

COUNT = 256
"""Words in use: one byte of noise chooses one."""

_COMMON = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end member law car city community
name president team minute idea body information back parent face others level office door health
person art war history party result change morning reason research girl guy moment air teacher force
education foot boy age policy music market sense nation plan college interest death experience
effect use class control field development role effort rate heart drug show leader light voice wife
police mind price report decision son view relationship town road arm difference value building
action season society tax director position player record paper space ground form event official
matter center couple site project activity star table need court oil situation cost industry figure
street image phone data picture practice piece land product doctor wall patient worker news test
movie north love step skill film tree source hair window culture chance brother energy period course
summer plant opportunity term letter condition choice rule south husband floor campaign material
population call economy hospital church risk fire future bank stone river west sport board subject
officer rest behavior performance top goal second bed order author blood agency nature color store
sound sign song page race start middle east animal staff green deep small large early young long
high great good old new big public white black real best free full open clear sure strong whole
human local late hard major better economic able low
"""
COMMON: tuple[str, ...] = tuple(_COMMON.split())
"""Candidates."""


def words_for(count: Callable[[str], int], candidates: Sequence[str] = COMMON) -> tuple[str, ...]:
    """256 of the candidates that a tokenizer takes as one token each after another word. `count` gives the
    number of tokens of a text. Raises `ValueError` where there are too few."""
    found: list[str] = []
    one = count(" time")
    for word in dict.fromkeys(candidates):
        if count(f" time {word} {word}") == one + 2:
            found.append(word)
        if len(found) == COUNT:
            return tuple(found)
    raise ValueError(
        f"only {len(found)} of {len(candidates)} known words are single tokens for this tokenizer; without "
        "--tokenizer words are counted as they are, and the server's usage tells the truth"
    )


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What texts are made of."""

    words: tuple[str, ...] = COMMON[:COUNT]
    tokens_per_word: float = 1.0
    """On average: more where the server's vocabulary is a small one."""

    def __post_init__(self) -> None:
        if len(self.words) != COUNT or not self.tokens_per_word > 0:
            raise ValueError(f"{COUNT} words are needed, of more than 0 tokens each")


class Texts:
    """Makes texts of pieces."""

    def __init__(self, words: Vocabulary) -> None:
        spaced = [f" {word}" for word in words.words]
        self._per_word = words.tokens_per_word
        # Blocks of traces come again and again; a MiB or so of text is kept.
        self._made = lru_cache(maxsize=512)(lambda key, count: _text(spaced, key, count))

    def piece(self, piece: Piece) -> str:
        """Of as many tokens, at least a word; a shorter piece of one key is the beginning of a longer one."""
        return self._made(piece.key, max(1, round(piece.tokens / self._per_word)))

    def pieces(self, pieces: Sequence[Piece]) -> str:
        return "".join(map(self.piece, pieces))


def _text(words: Sequence[str], key: str, count: int) -> str:
    noise = hashlib.shake_128(key.encode()).digest(count)
    return "".join(map(words.__getitem__, noise))
