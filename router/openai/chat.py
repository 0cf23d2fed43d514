"""/v1/chat/completions: messages to a prompt, and answers in the chat layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from fleet.errors import BadRequest
from router.openai.chat_layout import ChatLayout, PartedLayout
from router.openai.job import Endpoint, choices_of
from router.openai.messages import ChatBody, Message
from router.openai.sampling import check_sequences
from router.openai.settings import HttpSettings
from router.openai.stream import Job
from router.openai.tools import ToolUse, held_to, tool_use, turns_for
from router.text.reasoning import ThinkSplitter, opened
from router.text.split import Split
from router.text.tokenizer import ModelText
from router.text.tools.parser import ToolParser


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
    use = tool_use(body, text, settings)
    rendered = await _rendered(body, use, text, settings)
    prompt = await text.encode(rendered, add_special=False, param="messages")
    if not prompt:
        field = "chat_template" if body.chat_template else "messages"
        raise BadRequest(f"{field}: the chat template makes an empty prompt of these messages", param=field)
    logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    parted = use is not None or text.thinks
    choices = choices_of(
        body,
        text,
        endpoint,
        0,
        tuple(prompt),
        n,
        max_tokens=max_tokens,
        share=share,
        logprobs=logprobs,
        keep=text.marks if parted else frozenset(),
    )
    id = f"chatcmpl-{choices[0].request.id}"
    usage_null = endpoint.include_usage
    if not parted:
        layout = ChatLayout(
            id,
            endpoint.created,
            body.model,
            text.vocabulary,
            usage_null=usage_null,
            logprobs=logprobs >= 0,
            prompt_logprobs=body.prompt_logprobs,
        )
        return Job(layout, choices, bool(body.stream), endpoint.include_usage)
    inside = text.thinks and opened(rendered)
    first = choices[0]
    held = held_to(use, first.request.constraint, first.constrained_by, thinks=text.thinks, inside=inside)
    for choice in choices:
        choice.request = replace(choice.request, constraint=held)
    splits = [
        Split(
            ThinkSplitter(inside=inside) if text.thinks else None,
            ToolParser(use.form, use.schemas) if use else None,
        )
        for _ in choices
    ]
    layout = PartedLayout(
        id,
        endpoint.created,
        body.model,
        text.vocabulary,
        splits,
        usage_null=usage_null,
        logprobs=logprobs >= 0,
        prompt_logprobs=body.prompt_logprobs,
        id_length=use.form.id_length if use else 0,
    )
    return Job(layout, choices, bool(body.stream), endpoint.include_usage)


async def _rendered(body: ChatBody, use: ToolUse | None, text: ModelText, settings: HttpSettings) -> str:
    turns, variables = history(body.messages), template_variables(body, settings)
    if given := body.chat_template:
        if not settings.client_templates:
            raise BadRequest(
                "chat_template cannot be set; the model's own is used (setting http.client_templates)",
                param="chat_template",
            )
        if len(given) > settings.max_template_characters:
            raise BadRequest(
                f"chat_template has {len(given)} characters; the limit is "
                f"{settings.max_template_characters} (setting http.max_template_characters)",
                param="chat_template",
            )
        return await text.given.render(given, turns, use.shown if use else None, variables)
    turns, tools = turns_for(turns, use, text)
    return await text.render(turns, tools, variables)


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


def history(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates know them: one each, content always text. BadRequest names the message."""
    called: dict[str, str] = {}
    turns = [_turn(message, f"messages[{at}]", called) for at, message in enumerate(messages)]
    answered = {message.tool_call_id for message in messages if message.role == "tool"}
    for id, where in called.items():
        if id not in answered:
            # A model that sees its call unanswered makes the result up.
            shown = id if len(id) < 50 else id[:50] + "…"
            raise BadRequest(
                f"{where}: the call {shown!r} is answered by no message of role tool", param=where
            )
    return turns


def _turn(message: Message, where: str, called: dict[str, str]) -> dict[str, Any]:
    """`called`: ids of the calls so far and where they are; those of this message are added."""
    # Many templates know no "developer" and would drop the message without a word; it is the newer "system".
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": _content(message, f"{where}.content")}
    if message.function_call is not None:
        raise BadRequest(
            f"{where}.function_call is not supported; use tool_calls", param=f"{where}.function_call"
        )
    if message.name is not None:
        turn["name"] = message.name
    if message.role == "tool":
        if message.tool_call_id not in called:
            state = "missing" if message.tool_call_id is None else "not the id of a call before it"
            raise BadRequest(f"{where}.tool_call_id is {state}", param=f"{where}.tool_call_id")
        turn["tool_call_id"] = message.tool_call_id
    if message.role == "assistant" and message.reasoning_content:
        turn["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        if message.role != "assistant":
            raise BadRequest(
                f"{where}.tool_calls: only an assistant calls tools", param=f"{where}.tool_calls"
            )
        called.update(dict.fromkeys((call.id for call in message.tool_calls), f"{where}.tool_calls"))
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
