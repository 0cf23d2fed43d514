"""/v1/responses: the newer shape of a chat. A body becomes one for chat, so that both answer the same.

Nothing is stored: what refers to an earlier response is refused.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta

from fleet.errors import BadRequest, FleetError, Overloaded
from fleet.request import Usage
from router.openai import chat
from router.openai.chat_layout import PartedLayout, shown_tokens
from router.openai.job import Endpoint
from router.openai.messages import ChatBody, Count, decode, parse
from router.openai.stream import Choice, Job
from router.text.answer import LoggedToken
from router.text.detokenize import Vocabulary
from router.text.parts import CallArguments, CallBegun, Content, Part, Reasoning
from router.text.split import Split
from router.text.tokenizer import ModelText

_encode = msgspec.json.Encoder().encode


class TextOptions(msgspec.Struct, frozen=True):
    format: dict[str, Any] | None = None


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None

    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    truncation: str | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    max_tool_calls: int | None = None

    @property
    def logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())


_DECODER = msgspec.json.Decoder(ResponsesBody)
_SAME = ("temperature", "top_p", "stream", "seed", "stop", "ignore_eos", "min_tokens", "parallel_tool_calls")
_RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
_MESSAGE = re.compile(r"messages\[(\d+)\](\.tool_call_id)?")
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = ("reasoning.encrypted_content", _LOGPROBS)
"""The first asks for what is never there; clients of reasoning models send it always."""


def decode_responses(data: bytes) -> ResponsesBody:
    """The body. BadRequest names what is wrong, or asks for more than is kept here."""
    body = parse(_DECODER, data)
    if body.store:
        _refuse("store", "responses are not stored: leave store out or set it to false")
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            _refuse(name, f"{name}: responses are not stored; send the whole conversation as input")
    if body.background:
        _refuse("background", "background is not supported; use stream")
    if body.truncation not in (None, "disabled"):
        _refuse("truncation", "truncation must be disabled: no part of an input is left out")
    for name in body.include or ():
        if name not in _INCLUDED:
            _refuse("include", f"include: {name[:50]!r} is not supported; {', '.join(_INCLUDED)} are")
    if body.top_logprobs and not body.logprobs:
        _refuse("top_logprobs", f'top_logprobs needs include to be ["{_LOGPROBS}"]')
    for name in ("prompt", "max_tool_calls"):
        if getattr(body, name) is not None:
            _refuse(name, f"{name} is not supported; leave it out")
    return body


def _refuse(name: str, why: str) -> NoReturn:
    raise BadRequest(why, param=name)


async def prepare(body: ResponsesBody, text: ModelText, endpoint: Endpoint) -> Job:
    """BadRequest names the field; nothing has been started."""
    messages, places = _messages(body)
    try:
        job = await chat.prepare(as_chat(body, messages), text, endpoint)
    except BadRequest as error:
        raise _in_our_words(error, places) from error
    split = job.layout.splits[0] if isinstance(job.layout, PartedLayout) else None
    if body.logprobs and split is not None:
        _refuse("include", "include: logprobs are not shown beside tools or reasoning here, but in a chat's")
    id = f"resp_{job.choices[0].request.id}"
    layout = ResponsesLayout(id, endpoint.created, body, split, text.vocabulary)
    return Job(layout, job.choices, job.stream, include_usage=True, done=b"", failed=layout.failed)


def as_chat(body: ResponsesBody, messages: list[dict[str, Any]]) -> ChatBody:
    """The same request as a chat's body, checked as such."""
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    fields |= {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _format(body.text.format)
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
    return decode(ChatBody, _encode(fields))


def _in_our_words(error: BadRequest, places: Sequence[str]) -> BadRequest:
    def place(found: re.Match[str]) -> str:
        return places[int(found[1])] + ("" if found[2] is None else ".call_id")

    param = _MESSAGE.sub(place, error.param or "")
    message = _MESSAGE.sub(place, error.message)
    for theirs, ours in _RENAMED.items():
        if param == theirs or param.startswith((f"{theirs}.", f"{theirs}[")):
            param = ours + param.removeprefix(theirs)
            message = message.replace(theirs, ours)
            break
    return type(error)(message, param=param or None, code=error.code)


def _messages(body: ResponsesBody) -> tuple[list[dict[str, Any]], list[str]]:
    """The turns, and of each where in the body it begins."""
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
        places.append("instructions")
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}], [*places, "input"]
    if not body.input:
        _refuse("input", "input must hold at least one item")
    for at, item in enumerate(body.input):
        where = f"input[{at}]"
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"), where)})
        elif kind == "function_call":
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            # Calls of one turn are items of their own here, and one message there.
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            output = _content(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind != "reasoning":  # what was thought in earlier turns is no part of a prompt
            _refuse(
                f"{where}.type",
                f"{where}.type is {str(kind)[:50]!r}; message, function_call, function_call_output and "
                "reasoning are supported",
            )
        places += [where] * (len(messages) - len(places))
    return messages, places


def _content(content: Any, where: str) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text"):
            _refuse(
                f"{where}.content[{at}]",
                f"{where}.content[{at}]: only parts of type input_text and output_text are supported",
            )
        parts.append({"type": "text", "text": part.get("text")})
    return parts


def _format(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if k != "type"}}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        _refuse(f"{where}.type", f"{where}.type must be function: no tools run on this server")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice(choice: str | dict[str, Any]) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


@dataclass(slots=True)
class _Item:
    """One item of the output as it grows."""

    kind: str
    """message, reasoning or function_call."""
    id: str
    name: str = ""
    """Of the function."""
    call_id: str = ""
    status: str = "in_progress"
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Of the tokens of the text, where they were asked for."""

    def shown(self) -> dict[str, Any]:
        text = "".join(self.text)
        head: dict[str, Any] = {"id": self.id, "type": self.kind, "status": self.status}
        if self.kind == "function_call":
            return {**head, "call_id": self.call_id, "name": self.name, "arguments": text}
        part = _reasoning_part(text) if self.kind == "reasoning" else _text_part(text, self.logprobs)
        content = [] if self.status == "in_progress" else [part]
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}


class ResponsesLayout:
    """`response`, and the events by which it grows: one answer, in items of words, reasoning and calls."""

    def __init__(
        self, id: str, created: int, body: ResponsesBody, split: Split | None, vocabulary: Vocabulary
    ) -> None:
        self._split = split
        self._vocabulary = vocabulary
        self._number = 0
        self._items: list[_Item] = []
        self._finish = ""
        self._response = {
            "id": id,
            "object": "response",
            "created_at": created,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": body.model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": None, "parameters": None, **tool} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def opening(self, choice: Choice) -> bytes:
        started = self._shown("in_progress")
        return self._event("response.created", response=started) + self._event(
            "response.in_progress", response=started
        )

    def delta(self, choice: Choice, text: str, logged: Sequence[LoggedToken]) -> bytes:
        parts: Sequence[Part] = self._split.feed(text) if self._split else [Content(text)]
        return self._grow(parts, shown_tokens(logged, self._vocabulary))

    def closing(self, choice: Choice, logged: Sequence[LoggedToken]) -> bytes:
        """The usage is not known yet: the very last event comes with it."""
        self._finish = choice.finish
        frames = self._grow(self._split.end() if self._split else [])
        if not self._items:
            frames += self._open(_Item("message", _id("msg")))
        # Of tokens that are no text, or are cut off with a stop string.
        self._items[-1].logprobs += shown_tokens(logged, self._vocabulary)
        return frames + self._close(self._status())

    def usage(self, usage: Usage) -> bytes:
        status = self._status()
        return self._event(f"response.{status}", response=self._shown(status, usage))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        self.delta(choices[0], "".join(choices[0].text), choices[0].logged)
        self.closing(choices[0], ())
        return _encode(self._shown(self._status(), usage))

    def failed(self, error: FleetError) -> bytes:
        """The last event of a stream that failed after it had begun."""
        self._close("incomplete")
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        told = {"code": code, "message": error.message}
        return self._event("response.failed", response=self._shown("failed") | {"error": told})

    def _grow(self, parts: Sequence[Part], logprobs: list[dict[str, Any]] | None = None) -> bytes:
        frames = b""
        for part in parts:
            match part:
                case Content(text):
                    if text:
                        frames += self._in("message", "msg")
                        frames += self._add("response.output_text.delta", text, logprobs=logprobs or [])
                case Reasoning(text):
                    if text:
                        frames += self._in("reasoning", "rs") + self._add(
                            "response.reasoning_text.delta", text
                        )
                case CallBegun(_, name):
                    call = _Item("function_call", _id("fc"), name, _id("call"))
                    frames += self._close("completed") + self._open(call)
                case CallArguments(_, text):
                    frames += self._add("response.function_call_arguments.delta", text)
        return frames

    def _in(self, kind: str, prefix: str) -> bytes:
        """Makes sure that the item that grows is of this kind."""
        if self._items and self._items[-1].kind == kind and self._items[-1].status == "in_progress":
            return b""
        return self._close("completed") + self._open(_Item(kind, _id(prefix)))

    def _open(self, item: _Item) -> bytes:
        self._items.append(item)
        frames = self._event(
            "response.output_item.added", output_index=len(self._items) - 1, item=item.shown()
        )
        if item.kind == "message":
            frames += self._event("response.content_part.added", **self._place(), part=_text_part(""))
        return frames

    def _add(self, kind: str, text: str, **more: list[dict[str, Any]]) -> bytes:
        self._items[-1].text.append(text)
        self._items[-1].logprobs += more.get("logprobs", ())
        return self._event(kind, **self._place(), delta=text, **more)

    def _close(self, status: str) -> bytes:
        if not self._items or self._items[-1].status != "in_progress":
            return b""
        item = self._items[-1]
        item.status = status
        text = "".join(item.text)
        if item.kind == "function_call":
            frames = self._event(
                "response.function_call_arguments.done", **self._place(), name=item.name, arguments=text
            )
        elif item.kind == "reasoning":
            frames = self._event("response.reasoning_text.done", **self._place(), text=text)
        else:
            place, logged = self._place(), item.logprobs
            frames = self._event("response.output_text.done", **place, text=text, logprobs=logged)
            frames += self._event("response.content_part.done", **place, part=_text_part(text, logged))
        return frames + self._event(
            "response.output_item.done", output_index=len(self._items) - 1, item=item.shown()
        )

    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _shown(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        return {
            **self._response,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [item.shown() for item in self._items],
            "usage": None if usage is None else _usage(usage),
        }

    def _place(self) -> dict[str, Any]:
        item = self._items[-1]
        place: dict[str, Any] = {"item_id": item.id, "output_index": len(self._items) - 1}
        return place if item.kind == "function_call" else place | {"content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = _encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _text_part(text: str, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}
