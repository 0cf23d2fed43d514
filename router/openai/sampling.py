"""From the sampling fields of a body to `Sampling`, within the limits. Pure."""

from __future__ import annotations

from fleet.errors import BadRequest
from fleet.request import Sampling
from router.openai.messages import Body
from router.openai.settings import HttpSettings


def stop_strings(body: Body, settings: HttpSettings) -> tuple[str, ...]:
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    _at_most(len(stops), settings.max_stops, "stop", "max_stops")
    for stop in stops:
        if not stop:
            raise BadRequest("stop: a stop string must not be empty", param="stop")
        if len(stop) > settings.max_stop_characters:
            raise BadRequest(
                f"stop: a stop string has {len(stop)} characters; the limit is "
                f"{settings.max_stop_characters} (setting http.max_stop_characters)",
                param="stop",
            )
    return stops


def sampling(
    body: Body,
    settings: HttpSettings,
    *,
    prompt_tokens: int,
    max_tokens: int | None,
    context: int,
    vocabulary: int,
    end_tokens: tuple[int, ...],
    logprobs: int,
    seed: int,
    share: int,
) -> Sampling:
    """For the first of the answers to one prompt; the others differ in the seed.

    `context` is the longest sequence in tokens, `vocabulary` the number of token ids, `logprobs` as in
    `Sampling`, `seed` the one to take if the body gives none, `share` the most tokens of an answer whose
    body does not limit them.
    """
    if prompt_tokens > settings.max_prompt_tokens:
        param = "messages" if hasattr(body, "messages") else "prompt"
        _at_most(prompt_tokens, settings.max_prompt_tokens, param, "max_prompt_tokens")
    if prompt_tokens >= context:
        raise BadRequest(
            f"the prompt has {prompt_tokens} tokens; the model's context is {context} tokens, "
            "the answer included",
            param="messages" if hasattr(body, "messages") else "prompt",
            code="context_length_exceeded",
        )
    rest = context - prompt_tokens
    if max_tokens is not None and max_tokens > rest:
        raise BadRequest(
            f"max_tokens is {max_tokens} and the prompt has {prompt_tokens} tokens; the model's context is "
            f"{context} tokens: ask for at most {rest}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    most = min(rest, share) if max_tokens is None else max_tokens
    least = body.min_tokens or 0
    if least > most:
        raise BadRequest(f"min_tokens is {least}, above max_tokens, which is {most}", param="min_tokens")
    stop_ids = tuple(body.stop_token_ids or ())
    _at_most(len(stop_ids), settings.max_stop_token_ids, "stop_token_ids", "max_stop_token_ids")
    for token in stop_ids:
        _is_token(token, vocabulary, "stop_token_ids")
    if not body.ignore_eos:
        stop_ids = tuple(dict.fromkeys((*end_tokens, *stop_ids)))
    if logprobs > settings.max_logprobs:
        param = "top_logprobs" if hasattr(body, "messages") else "logprobs"
        _at_most(logprobs, settings.max_logprobs, param, "max_logprobs")
    return Sampling(
        max_tokens=most,
        min_tokens=least,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=_or(body.min_p, 0.0),
        seed=(seed if body.seed is None else body.seed) % 2**63,
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body, settings, vocabulary),
        stop_token_ids=stop_ids,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
    )


def check_sequences(prompts: int, n: int, max_tokens: int | None, settings: HttpSettings) -> int:
    """Before anything is made `n` times. Returns the most tokens that each answer may have."""
    if prompts * n > settings.max_sequences:
        raise BadRequest(
            f"n: {prompts} prompts × n = {n} are {prompts * n} answers; the limit is "
            f"{settings.max_sequences} (setting http.max_sequences)",
            param="n" if n > 1 else "prompt",
        )
    share = settings.max_answer_tokens // (prompts * n)
    if max_tokens is not None and max_tokens > share:
        raise BadRequest(
            f"max_tokens: {prompts} prompts × n = {n} × max_tokens = {max_tokens} are "
            f"{prompts * n * max_tokens} tokens; the limit is {settings.max_answer_tokens} "
            "(setting http.max_answer_tokens)",
            param="max_tokens",
        )
    return max(1, share)


def _logit_bias(body: Body, settings: HttpSettings, vocabulary: int) -> tuple[tuple[int, float], ...]:
    if not body.logit_bias:
        return ()
    _at_most(len(body.logit_bias), settings.max_logit_bias, "logit_bias", "max_logit_bias")
    bias = []
    for key, value in body.logit_bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            shown = key if len(key) < 50 else key[:50] + "…"
            raise BadRequest(f"logit_bias: {shown!r} is not a token id", param="logit_bias")
        _is_token(int(key), vocabulary, "logit_bias")
        bias.append((int(key), value))
    return tuple(bias)


def _is_token(token: int, vocabulary: int, param: str) -> None:
    if not 0 <= token < vocabulary:
        raise BadRequest(
            f"{param}: there is no token {token}; ids go from 0 to {vocabulary - 1}", param=param
        )


def _at_most(count: int, limit: int, param: str, setting: str) -> None:
    if count > limit:
        raise BadRequest(f"{param}: {count}; the limit is {limit} (setting http.{setting})", param=param)


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)
