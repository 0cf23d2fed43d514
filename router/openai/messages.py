"""Request bodies as msgspec structs, and how a body that does not fit is explained.

Fields that are not named here are ignored, as OpenAI does: among them everything internal, such as
transfer parameters, worker names and salts. Fields that would change the answer and are not supported
are named in `REFUSED`, so that nobody gets another answer than the one they asked for.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fleet.errors import BadRequest

Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0)] | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    best_of: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    include_stop_str_in_output: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None


class Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class ToolFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: ToolFunction
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | UnsetType | None = UNSET
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: Any = None


class FunctionSpec(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: str
    function: FunctionSpec | None = None


class ChatBody(Body, frozen=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    documents: Any = None
    web_search_options: Any = None
    echo: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None


class CompletionBody(Body, frozen=True, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None

    suffix: Any = None
    prompt_embeds: Any = None


B = TypeVar("B", ChatBody, CompletionBody)
T = TypeVar("T")

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
}
"""Values that ask for what is done anyway; see `_says_nothing` for those that are so everywhere."""

REFUSED: dict[type[Body], tuple[str, ...]] = {
    kind: tuple(field.name for field in msgspec.structs.fields(kind) if field.type is Any)
    for kind in (ChatBody, CompletionBody)
}
"""Fields that are only known in order to be refused."""

_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    ChatBody: msgspec.json.Decoder(ChatBody),
    CompletionBody: msgspec.json.Decoder(CompletionBody),
}

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<where>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")


def parse(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    """A body. BadRequest names the field, what was wrong and what would be right."""
    try:
        # The decoder skips fields it does not know unread; a body is UTF-8 as a whole or not JSON at all.
        data.decode()
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        _explain(str(error))
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not valid UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error


def decode(kind: type[B], data: bytes) -> B:
    """As `parse`; besides, what would change the answer and is not supported is refused."""
    body: B = parse(_DECODERS[kind], data)
    for name in REFUSED[kind]:
        value = getattr(body, name)
        if value is not None and not _says_nothing(body, name, value):
            _refuse(name, value)
    return body


def _explain(message: str) -> NoReturn:
    found = _PLACE.match(message)
    what, where = (found["what"], found["where"] or "") if found else (message, "")
    if missing := _MISSING.search(what):
        where = f"{where}.{missing['name']}" if where else missing["name"]
        raise BadRequest(f"{where} is missing", param=where)
    if not where:
        raise BadRequest(f"the body must be a JSON object: {what}")
    raise BadRequest(f"{where}: {what[:1].lower()}{what[1:].replace('`', '')}", param=where)


def _says_nothing(body: Body, name: str, value: Any) -> bool:
    if name == "best_of":
        return bool(value == (body.n or 1))
    if any(value == harmless for harmless in _HARMLESS.get(name, ())):
        return True
    if name == "add_generation_prompt":
        return False
    return value is False or value in ("", [], {})


def _refuse(name: str, value: Any) -> NoReturn:
    if name == "best_of":
        raise BadRequest("best_of must equal n: ranking of more answers is not supported", param=name)
    if name in ("functions", "function_call"):
        newer = "tools" if name == "functions" else "tool_choice"
        raise BadRequest(f"{name} is deprecated and not supported; use {newer}", param=name)
    raise BadRequest(f"{name} is not supported; leave it out", param=name)
