"""/v1/chat/completions: messages to a prompt, and answers in the chat layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fleet.errors import BadRequest
from fleet.request import Usage
from router.openai.job import Endpoint, choices_of, usage_object
from router.openai.messages import ChatBody, Message
from router.openai.prompt_scores import LOWEST, listed
from router.openai.sampling import check_sequences
from router.openai.settings import HttpSettings
from router.openai.stream import Choice, Job
from router.text.answer import LoggedToken
from router.text.detokenize import Vocabulary
from router.text.tokenizer import ModelText

_encode = msgspec.json.Encoder().encode


async def prepare(body: ChatBody, text: ModelText, endpoint: Endpoint) -> Job:
    """BadRequest names the field; nothing has been started."""
    settings = endpoint.settings
    n = body.n or 1
    if not body.messages:
        raise BadRequest("messages must hold at least one message", param="messages")
    if len(body.messages) > settings.max_messages:
        raise BadRequest(
            f"messages: {len(body.messages)}; the limit is {settings.max_messages} "
            "(setting http.max_messages)",
            param="messages",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if (
        body.max_tokens is not None
        and body.max_completion_tokens is not None
        and body.max_tokens != body.max_completion_tokens
    ):
        raise BadRequest(
            "max_tokens and max_completion_tokens differ; max_tokens is the old name of the other",
            param="max_completion_tokens",
        )
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    share = check_sequences(1, n, max_tokens, settings)
    if max_tokens == 0:
        raise BadRequest("max_completion_tokens must be at least 1", param="max_completion_tokens")
    rendered = await text.render(history(body.messages, text), variables=template_variables(body, settings))
    prompt = await text.encode(rendered, add_special=False, param="messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    choices = choices_of(
        body, text, endpoint, 0, tuple(prompt), n, max_tokens=max_tokens, share=share, logprobs=logprobs
    )
    layout = ChatLayout(
        f"chatcmpl-{choices[0].request.id}",
        endpoint.created,
        body.model,
        text.vocabulary,
        usage_null=endpoint.include_usage,
        logprobs=logprobs >= 0,
        prompt_logprobs=body.prompt_logprobs,
    )
    return Job(layout, choices, bool(body.stream), endpoint.include_usage)


def template_variables(body: ChatBody, settings: HttpSettings) -> dict[str, Any]:
    """What the body sets for the chat template. BadRequest: a name that clients may not set."""
    given = body.chat_template_kwargs or {}
    for name in given:
        if name not in settings.template_kwargs:
            shown = name if len(name) < 50 else name[:50] + "…"
            raise BadRequest(
                f"chat_template_kwargs: {shown!r} cannot be set; allowed are "
                f"{', '.join(settings.template_kwargs) or 'none'} (setting http.template_kwargs)",
                param="chat_template_kwargs",
            )
    return given


def history(messages: Sequence[Message], text: ModelText) -> list[dict[str, Any]]:
    """Messages as templates know them: one each, content always text. BadRequest names the message."""
    return [_turn(message, f"messages[{at}]", text) for at, message in enumerate(messages)]


def _turn(message: Message, where: str, text: ModelText) -> dict[str, Any]:
    # Many templates know no "developer" and would drop the message without a word; it is the newer "system".
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": _content(message, f"{where}.content")}
    if message.function_call is not None:
        raise BadRequest(
            f"{where}.function_call is not supported; use tool_calls", param=f"{where}.function_call"
        )
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if message.role != "assistant":
            raise BadRequest(
                f"{where}.tool_calls: only an assistant calls tools", param=f"{where}.tool_calls"
            )
        if text.template is not None and not text.template.knows_tools:
            raise BadRequest(
                f"{where}.tool_calls: the model's chat template cannot show calls of tools",
                param=f"{where}.tool_calls",
            )
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return turn


def _content(message: Message, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = []
        for at, part in enumerate(content):
            if part.type != "text":
                raise BadRequest(
                    f"{where}[{at}].type is {part.type[:50]!r}; only text parts are supported",
                    param=f"{where}[{at}].type",
                )
            if part.text is None:
                raise BadRequest(f"{where}[{at}].text is missing", param=f"{where}[{at}].text")
            texts.append(part.text)
        return "\n".join(texts)
    if message.role == "assistant":
        return ""  # it said nothing, or only called tools
    state = "missing" if content is msgspec.UNSET else "null"
    raise BadRequest(
        f"{where} is {state}; a string or a list of text parts is needed (role {message.role})", param=where
    )


def _arguments(text: str) -> Any:
    """Templates take an object where the model wrote one."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


class ChatLayout:
    """`chat.completion` and `chat.completion.chunk`."""

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
        self._head = {"id": id, "created": created, "model": model}
        common = _encode({**self._head, "object": "chat.completion.chunk"})[:-1]
        self._start = b"data: " + common + b',"choices":[{"index":'
        self._stop = b"]" + (b',"usage":null' if usage_null else b"") + b"}\n\n"
        self._no_logprobs = b'},"logprobs":null,"finish_reason":null}' + self._stop
        self._usage = b"data: " + common + b',"choices":[],"usage":'

    def opening(self, choice: Choice) -> bytes:
        return self._start + b'%d,"delta":{"role":"assistant","content":""' % choice.index + self._no_logprobs

    def delta(self, choice: Choice, text: str, logged: Sequence[LoggedToken]) -> bytes:
        start = self._start + b'%d,"delta":{"content":' % choice.index + _encode(text)
        if not self._logprobs:
            return start + self._no_logprobs
        return start + b'},"logprobs":' + self._log(logged) + b',"finish_reason":null}' + self._stop

    def closing(self, choice: Choice, logged: Sequence[LoggedToken]) -> bytes:
        return (
            self._start
            + b'%d,"delta":{},"logprobs":' % choice.index
            + (self._log(logged) if logged else b"null")
            + b',"finish_reason":'
            + _encode(choice.finish)
            + b"}"
            + self._stop
        )

    def usage(self, usage: Usage) -> bytes:
        return self._usage + _encode(usage_object(usage)) + b"}\n\n"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return _encode(
            {
                **self._head,
                "object": "chat.completion",
                "choices": [
                    {
                        "index": choice.index,
                        "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                        "logprobs": msgspec.Raw(self._log(choice.logged)) if self._logprobs else None,
                        "finish_reason": choice.finish,
                    }
                    for choice in choices
                ],
                "usage": usage_object(usage),
                **self._scores(choices[0]),
            }
        )

    def _scores(self, choice: Choice) -> dict[str, Any]:
        if self._prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": listed(choice, self._prompt_logprobs, self._vocabulary)}

    def _log(self, logged: Sequence[LoggedToken]) -> bytes:
        return _encode({"content": [self._entry(item) for item in logged], "refusal": None})

    def _entry(self, item: LoggedToken) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in item.logprobs.top]
        return {**self._token(item.token, item.logprobs.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._vocabulary.piece(token)
        return {
            "token": piece.decode("utf-8", "replace"),
            "logprob": max(logprob, LOWEST),
            "bytes": list(piece),
        }
