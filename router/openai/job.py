"""What all endpoints do to make a body's answers: requests, seeds, texts; and usage as JSON."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

from fleet.errors import BadRequest
from fleet.ids import new_request_id
from fleet.request import Request, Usage
from router.openai.callers import ANYBODY, Caller
from router.openai.constraints import constraint_of
from router.openai.messages import Body
from router.openai.prompt_scores import wanted
from router.openai.sampling import sampling, stop_strings
from router.openai.settings import HttpSettings
from router.openai.stream import Choice
from router.text.answer import Answer
from router.text.tokenizer import ModelText


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What besides the body a job is made from."""

    settings: HttpSettings
    context: int
    """Longest sequence, in tokens, that the fleet can hold now."""
    created: int
    """Seconds since 1970, to be shown."""
    include_usage: bool
    caller: Caller = ANYBODY
    """Salt, priority and deadline come from here alone, whatever a body says."""


def include_usage(body: Body) -> bool:
    """Whether a stream ends with a chunk of usage: only if asked for in so many words."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise BadRequest("stream_options needs stream to be true", param="stream_options")
    return body.stream_options.include_usage is True


def choices_of(
    body: Body,
    text: ModelText,
    endpoint: Endpoint,
    at: int,
    prompt: tuple[int, ...],
    n: int,
    *,
    max_tokens: int | None,
    share: int,
    logprobs: int,
    keep: frozenset[int] = frozenset(),
) -> list[Choice]:
    """The `n` answers to prompt number `at`; their seeds follow one another. `keep`: see `Detokenizer`."""
    stops = stop_strings(body, endpoint.settings)
    first = sampling(
        body,
        endpoint.settings,
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        context=endpoint.context,
        vocabulary=len(text.vocabulary),
        end_tokens=text.end_tokens,
        logprobs=logprobs,
        seed=secrets.randbits(63),
        share=share,
    )
    scored = wanted(body, logprobs, endpoint.settings)
    if scored >= 0:
        first = replace(first, prompt_logprobs=scored)
    constraint, field = constraint_of(body, endpoint.settings)
    # What is whole ends also where ends are to be ignored.
    ends = first.stop_token_ids if constraint is None else (*first.stop_token_ids, *text.end_tokens)
    skip_special = body.skip_special_tokens is not False
    choices = []
    for k in range(n):
        request = Request(
            new_request_id(),
            body.model,
            prompt,
            replace(first, seed=(first.seed + k) % 2**63) if k else first,
            salt=endpoint.caller.salt,
            priority=endpoint.caller.terms.objectives.priority,
            deadline_s=min(endpoint.settings.deadline_s, endpoint.caller.deadline_s),
            constraint=constraint,
        )
        answer = Answer(
            text.vocabulary,
            prompt=prompt,
            stops=stops,
            end_tokens=ends,
            min_tokens=first.min_tokens,
            skip_special=skip_special,
            keep=keep,
        )
        choices.append(Choice(at * n + k, at, k == 0, request, answer, constrained_by=field or "tools"))
    return choices


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
