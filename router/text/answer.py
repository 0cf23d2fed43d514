"""One answer as its tokens come: detokenized, without end tokens, cut at stop strings. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fleet.request import FinishReason, TokenLogprobs
from router.text.detokenize import Detokenizer, Vocabulary
from router.text.stop import StopStrings


@dataclass(frozen=True, slots=True)
class LoggedToken:
    """A token whose log-probabilities were asked for."""

    token: int
    logprobs: TokenLogprobs
    offset: int
    """Characters of the answer before it."""


class Answer:
    """Streamed or not, the text is made here, so both give the same.

    An end token is kept until it is known whether it ended the answer: only then it is no text.
    """

    __slots__ = (
        "_detokenizer",
        "_end_tokens",
        "_held",
        "_min_tokens",
        "_offset",
        "_stops",
        "logged",
        "tokens",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        prompt: Sequence[int] = (),
        stops: Sequence[str] = (),
        end_tokens: Collection[int] = (),
        min_tokens: int = 0,
        skip_special: bool = True,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = Detokenizer(vocabulary, prompt=prompt, skip_special=skip_special, keep=keep)
        self._stops = StopStrings(stops) if stops else None
        self._end_tokens = frozenset(end_tokens)
        self._min_tokens = min_tokens
        self._held: tuple[int, TokenLogprobs | None] | None = None
        self._offset = 0
        self.tokens = 0
        """Drawn so far, end tokens included."""
        self.logged: list[LoggedToken] = []
        """Log-probabilities not yet taken; whoever shows the text empties it."""

    @property
    def matched(self) -> bool:
        """Whether a stop string was met: the answer is over, whatever comes."""
        return self._stops is not None and self._stops.matched is not None

    def feed(self, token: int, logprobs: TokenLogprobs | None = None) -> str:
        """Text that can be shown now."""
        self.tokens += 1
        if self._held is None and token not in self._end_tokens:
            return self._show(token, logprobs)
        text = self._show(*self._held) if self._held is not None else ""
        if token in self._end_tokens:
            self._held = token, logprobs
            return text
        self._held = None
        return text + self._show(token, logprobs)

    def end(self, finish: FinishReason) -> str:
        """What was held back, now that no more comes."""
        text = ""
        if self._held is not None and finish is not FinishReason.STOP:
            text = self._show(*self._held)
        self._held = None
        rest = self._detokenizer.flush()
        if self._stops is None:
            return text + rest
        return text + self._stops.feed(rest) + self._stops.flush()

    def _show(self, token: int, logprobs: TokenLogprobs | None) -> str:
        text = self._detokenizer.feed(token)
        if logprobs is not None and not self.matched:
            self.logged.append(LoggedToken(token, logprobs, self._offset))
        self._offset += len(text)
        if self._stops is None or self.tokens < self._min_tokens:
            return text
        return self._stops.feed(text)
