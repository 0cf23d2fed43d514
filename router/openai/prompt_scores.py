"""Log-probabilities of a prompt's tokens: how many are wanted, and how answers show them. Pure."""

from __future__ import annotations

from typing import Any

from fleet.errors import BadRequest
from fleet.request import TokenLogprobs
from router.openai.messages import Body
from router.openai.settings import HttpSettings
from router.openai.stream import Choice
from router.text.detokenize import Detokenizer, Vocabulary

LOWEST = -9999.0
"""JSON knows no infinity; OpenAI writes this for a token that cannot be."""


def wanted(body: Body, logprobs: int, settings: HttpSettings) -> int:
    """As in `Sampling.prompt_logprobs`. An echoed prompt shows what `logprobs` asks for the answer."""
    asked = -1 if body.prompt_logprobs is None else body.prompt_logprobs
    if asked > settings.max_logprobs:
        raise BadRequest(
            f"prompt_logprobs: {asked}; the limit is {settings.max_logprobs} (setting http.max_logprobs)",
            param="prompt_logprobs",
        )
    if asked >= 0 and body.stream:
        raise BadRequest("prompt_logprobs are not streamed; leave out stream", param="prompt_logprobs")
    return max(asked, logprobs if getattr(body, "echo", None) else -1)


def listed(choice: Choice, count: int, vocabulary: Vocabulary) -> list[dict[str, Any] | None]:
    """One entry a token of the prompt, as vLLM lays them out: by token id, the token itself first."""
    entries: list[dict[str, Any] | None] = [None]
    for token, found in zip(choice.request.prompt[1:], choice.prompt_logprobs, strict=True):
        top = found.top[:count]
        ranks = {other: rank for rank, (other, _) in enumerate(top, 1)}
        entries.append(
            {
                str(other): {
                    "logprob": max(value, LOWEST),
                    "rank": ranks.get(other),
                    "decoded_token": vocabulary.piece(other).decode("utf-8", "replace"),
                }
                for other, value in {token: found.logprob, **dict(top)}.items()
            }
        )
    return entries


def echoed(choice: Choice, vocabulary: Vocabulary) -> list[tuple[int, TokenLogprobs | None, int]]:
    """(token, its log-probabilities, characters before it) of an echoed prompt; the first has none."""
    detokenizer, offset, rows = Detokenizer(vocabulary), 0, []
    scores = (None, *choice.prompt_logprobs)
    for token, found in zip(choice.request.prompt, scores, strict=True):
        rows.append((token, found, offset))
        offset += len(detokenizer.feed(token))
    return rows
