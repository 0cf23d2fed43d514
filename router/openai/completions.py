"""/v1/completions: prompts as text or tokens, and answers in the older layout."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from fleet.errors import BadRequest, FleetError
from fleet.handoff import CancelReason
from fleet.request import FinishReason, Usage
from router.openai.job import Endpoint, choices_of, usage_object
from router.openai.messages import CompletionBody
from router.openai.prompt_scores import LOWEST, echoed, listed
from router.openai.sampling import check_sequences
from router.openai.stream import Choice, Job
from router.run import RunEnd, RunToken
from router.text.answer import LoggedToken
from router.text.detokenize import Detokenizer, Vocabulary
from router.text.tokenizer import ModelText

_encode = msgspec.json.Encoder().encode


async def prepare(body: CompletionBody, text: ModelText, endpoint: Endpoint) -> Job:
    """BadRequest names the field; nothing has been started."""
    n = body.n or 1
    prompts = _prompts(body)
    share = check_sequences(len(prompts), n, body.max_tokens, endpoint.settings)
    logprobs = -1 if body.logprobs is None else body.logprobs
    if body.max_tokens == 0 and not body.echo:
        raise BadRequest("max_tokens must be at least 1, unless echo is true", param="max_tokens")
    # Log-probabilities of a prompt come of its computation, which draws one token whether wanted or not.
    silent = body.max_tokens == 0 and (logprobs >= 0 or body.prompt_logprobs is not None)
    most = 1 if silent else body.max_tokens
    choices: list[Choice] = []
    for at, prompt in enumerate(prompts):
        where = f"prompt[{at}]" if isinstance(body.prompt, list) and len(prompts) > 1 else "prompt"
        tokens = await _tokens(prompt, text, where)
        group = choices_of(
            body, text, endpoint, at, tokens, n, max_tokens=most, share=share, logprobs=logprobs
        )
        for choice in group:
            if body.echo:
                choice.echo = prompt if isinstance(prompt, str) else _whole_characters(tokens, text)
            choice.silent = silent
            if body.max_tokens == 0 and not silent:
                choice.run = _NothingToDraw(len(tokens))
        choices += group
    layout = CompletionLayout(
        f"cmpl-{choices[0].request.id}",
        endpoint.created,
        body.model,
        text.vocabulary,
        usage_null=endpoint.include_usage,
        logprobs=logprobs >= 0,
        prompt_logprobs=body.prompt_logprobs,
    )
    return Job(layout, choices, bool(body.stream), endpoint.include_usage)


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    """One entry a prompt, as text or as tokens."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise BadRequest("prompt must not be an empty list", param="prompt")
    tokens = [item for item in prompt if isinstance(item, int)]
    if len(tokens) == len(prompt):
        return [tokens]
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(prompt) not in (len(texts), len(lists)):
        raise BadRequest(
            "prompt must be a string, a list of strings, a list of tokens or a list of lists of tokens, "
            "not a mixture",
            param="prompt",
        )
    return [*texts, *lists]


async def _tokens(prompt: str | list[int], text: ModelText, where: str) -> tuple[int, ...]:
    if isinstance(prompt, str):
        tokens = await text.encode(prompt, add_special=True, param=where)
    else:
        tokens = prompt
        if tokens and max(tokens) >= len(text.vocabulary):
            raise BadRequest(
                f"{where}: there is no token {max(tokens)}; ids go from 0 to {len(text.vocabulary) - 1}",
                param=where,
            )
    if not tokens:
        raise BadRequest(f"{where} is empty; at least one token is needed", param=where)
    return tuple(tokens)


def _whole_characters(tokens: tuple[int, ...], text: ModelText) -> str:
    """Text of a prompt up to its last whole character: one that the answer completes stands in the answer."""
    detokenizer = Detokenizer(text.vocabulary)
    return "".join(detokenizer.feed(token) for token in tokens)


class _NothingToDraw:
    """The run of a request for no tokens: only the echo of its prompt is wanted."""

    def __init__(self, prompt_tokens: int) -> None:
        self._usage = Usage(prompt_tokens, 0)

    async def __aiter__(self) -> AsyncIterator[RunToken | RunEnd]:
        yield RunEnd(FinishReason.LENGTH, self._usage)

    @property
    def more(self) -> bool:
        return False

    async def stop(self, reason: CancelReason, because: FleetError | None = None) -> None:
        pass


class CompletionLayout:
    """`text_completion`, whole and in pieces alike."""

    def __init__(
        self,
        id: str,
        created: int,
        model: str,
        vocabulary: Vocabulary,
        *,
        usage_null: bool,
        logprobs: bool,
        prompt_logprobs: int | None = None,
    ) -> None:
        """`prompt_logprobs`: how many of the most likely tokens to list at each token of the prompt."""
        self._vocabulary = vocabulary
        self._prompt_logprobs = prompt_logprobs
        self._logprobs = logprobs
        self._head = {"id": id, "object": "text_completion", "created": created, "model": model}
        common = b"data: " + _encode(self._head)[:-1]
        self._start = common + b',"choices":[{"index":'
        self._stop = b"}]" + (b',"usage":null' if usage_null else b"") + b"}\n\n"
        self._no_logprobs = b',"logprobs":null,"finish_reason":null' + self._stop
        self._unfinished = b',"finish_reason":null' + self._stop
        self._usage = common + b',"choices":[],"usage":'

    def opening(self, choice: Choice) -> bytes:
        if not choice.echo:
            return b""
        start = self._start + b'%d,"text":' % choice.index + _encode(choice.echo)
        if not self._logprobs:
            return start + self._no_logprobs
        return start + b',"logprobs":' + _encode(self._log(choice, echo=True)) + self._unfinished

    def delta(self, choice: Choice, text: str, logged: Sequence[LoggedToken]) -> bytes:
        start = self._start + b'%d,"text":' % choice.index + _encode(text)
        if not self._logprobs:
            return start + self._no_logprobs
        return start + b',"logprobs":' + _encode(self._log(choice, logged)) + self._unfinished

    def closing(self, choice: Choice, logged: Sequence[LoggedToken]) -> bytes:
        return (
            self._start
            + b'%d,"text":"","logprobs":' % choice.index
            + (_encode(self._log(choice, logged)) if logged else b"null")
            + b',"finish_reason":'
            + _encode(choice.finish)
            + self._stop
        )

    def usage(self, usage: Usage) -> bytes:
        return self._usage + _encode(usage_object(usage)) + b"}\n\n"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return _encode(
            {
                **self._head,
                "choices": [
                    {
                        "index": choice.index,
                        "text": choice.echo + "".join(choice.text),
                        "logprobs": (
                            self._log(choice, choice.logged, echo=bool(choice.echo))
                            if self._logprobs
                            else None
                        ),
                        "finish_reason": choice.finish,
                        **self._scores(choice),
                    }
                    for choice in choices
                ],
                "usage": usage_object(usage),
            }
        )

    def _scores(self, choice: Choice) -> dict[str, Any]:
        if self._prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": listed(choice, self._prompt_logprobs, self._vocabulary)}

    def _log(
        self, choice: Choice, logged: Sequence[LoggedToken] = (), *, echo: bool = False
    ) -> dict[str, Any]:
        rows = echoed(choice, self._vocabulary) if echo else []
        before, count = len(choice.echo), choice.request.sampling.logprobs
        rows += [(item.token, item.logprobs, before + item.offset) for item in logged]
        return {
            "tokens": [self._text(token) for token, _, _ in rows],
            "token_logprobs": [found and max(found.logprob, LOWEST) for _, found, _ in rows],
            "top_logprobs": [
                found and {self._text(token): max(value, LOWEST) for token, value in found.top[:count]}
                for _, found, _ in rows
            ],
            "text_offset": [offset for _, _, offset in rows],
        }

    def _text(self, token: int) -> str:
        piece = self._vocabulary.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            # As OpenAI writes them: two parts of characters must not become the same key.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
