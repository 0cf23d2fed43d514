"""Tools of a chat: what a body offers and demands, checked, and what holds the generation to it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fleet.errors import BadRequest
from fleet.request import Constraint, ConstraintKind
from router.openai.constraints import shallow
from router.openai.messages import ChatBody, Tool
from router.openai.settings import HttpSettings
from router.text.reasoning import BEGIN, END
from router.text.tokenizer import ModelText
from router.text.tools.formats import Format
from router.text.tools.generic import plain, with_description

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MOST_SPACE = 32
"""Spaces in a row in arguments that are held to a schema: also a model that likes spaces comes to an end."""

Shape = dict[str, Any]
"""A format of xgrammar's structural tags."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the model may and must do with tools."""

    shown: tuple[dict[str, Any], ...]
    """All tools, as chat templates take them."""
    schemas: dict[str, dict[str, Any]]
    """Of the arguments, by the names that may be called."""
    free: bool
    """Whether the model may do as it likes: nothing is strict, required or left out."""
    required: bool
    parallel: bool
    form: Format
    loose: frozenset[str] = frozenset()
    """Names of those that are not strict: where their schema cannot be enforced, any object will do."""

    def shape(self) -> Shape:
        """Calls and nothing else."""
        return _sequence([_text(self.form.opening), self._calls(), _text(self.form.closing)])

    def loose_shape(self) -> Shape:
        """Text in which there may be calls, or, where they need no marker, either text or calls."""
        form = self.form
        if form.bare:
            text = {"type": "any_text", "excludes": [mark for mark in (form.marker, END) if mark]}
            start = {"type": "regex", "pattern": r"[^\s{\[]"}
            return {"type": "or", "elements": [self.shape(), _sequence([start, text])]}
        tags = self._tags()
        if form.opening:
            tags = [{"type": "tag", "begin": form.opening, "content": self._calls(), "end": form.closing}]
        return {
            "type": "triggered_tags",
            "triggers": [form.marker],
            "tags": tags,
            "at_least_one": False,
            "stop_after_first": not self.parallel,
        }

    def _calls(self) -> Shape:
        return {
            "type": "tags_with_separator",
            "tags": self._tags(),
            "separator": self.form.between,
            "at_least_one": True,
            "stop_after_first": not self.parallel,
        }

    def _tags(self) -> list[Shape]:
        form = self.form
        return [
            {"type": "tag", "begin": form.begin(name), "content": self._arguments(name), "end": form.after}
            for name in self.schemas
        ]

    def _arguments(self, name: str) -> Shape:
        shape = _json(self.schemas[name])
        return {**shape, "strict": False} if name in self.loose else shape


def tool_use(body: ChatBody, text: ModelText, settings: HttpSettings) -> ToolUse | None:
    """None: there are no tools, or none is to be called. BadRequest names what was wrong."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise BadRequest("tool_choice needs tools", param="tool_choice")
        return None
    functions = _functions(body.tools, settings)
    mode, allowed = _choice(choice, functions)
    if mode == "none":
        return None
    if text.tool_format is None:
        raise BadRequest(
            "tools are not supported with this model: its chat template shows a form of calls that is not "
            "known here (setting text.tool_parser)",
            param="tools",
        )
    parallel = body.parallel_tool_calls is not False
    loose = {tool.function.name for tool in body.tools if tool.function and not tool.function.strict}
    required = mode != "auto"
    return ToolUse(
        tuple({"type": "function", "function": function} for function in functions.values()),
        {name: functions[name]["parameters"] for name in allowed},
        free=not required and parallel and len(loose) == len(body.tools) and len(allowed) == len(functions),
        required=required,
        parallel=parallel and mode != "named",
        form=text.tool_format,
        loose=frozenset(loose),
    )


def _functions(tools: Sequence[Tool], settings: HttpSettings) -> dict[str, dict[str, Any]]:
    """By name, with what templates look at."""
    if len(tools) > settings.max_tools:
        raise BadRequest(
            f"tools: {len(tools)}; the limit is {settings.max_tools} (setting http.max_tools)", param="tools"
        )
    for at, tool in enumerate(tools):
        if tool.function is not None:
            where = f"tools[{at}].function.parameters"
            shallow(tool.function.parameters, where, settings.max_schema_depth)
    size = len(msgspec.json.encode(tools))
    if size > settings.max_tool_bytes:
        raise BadRequest(
            f"tools have {size} bytes; the limit is {settings.max_tool_bytes} (setting http.max_tool_bytes)",
            param="tools",
        )
    functions: dict[str, dict[str, Any]] = {}
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        if tool.type != "function":
            raise BadRequest(
                f"{where}.type is {tool.type[:50]!r}; only function is supported", param=f"{where}.type"
            )
        if tool.function is None:
            raise BadRequest(f"{where}.function is missing", param=f"{where}.function")
        name = tool.function.name
        if not _NAME.fullmatch(name):
            raise BadRequest(
                f"{where}.function.name must be 1 to 64 of the characters a-z, A-Z, 0-9, _ and -",
                param=f"{where}.function.name",
            )
        if name in functions:
            raise BadRequest(f"{where}.function.name: {name} is there twice", param=f"{where}.function.name")
        parameters = tool.function.parameters or {"type": "object", "properties": {}}
        if parameters.get("type", "object") != "object":
            raise BadRequest(
                f'{where}.function.parameters must be the schema of an object: its type must be "object"',
                param=f"{where}.function.parameters",
            )
        function: dict[str, Any] = {"name": name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        functions[name] = {**function, "parameters": {"type": "object", **parameters}}
    return functions


def _choice(choice: str | dict[str, Any] | None, functions: dict[str, Any]) -> tuple[str, list[str]]:
    """none, auto, required or named; and the names that may be called."""
    if choice is None:
        return "auto", list(functions)
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise BadRequest(
                'tool_choice must be none, auto, required or {"type": "function", "function": {"name": "…"}}',
                param="tool_choice",
            )
        return choice, list(functions)
    if choice.get("type") == "function":
        return "named", [_named(choice, functions, "tool_choice")]
    allowed = choice.get("allowed_tools")
    if choice.get("type") == "allowed_tools" and isinstance(allowed, dict):
        mode, listed = allowed.get("mode"), allowed.get("tools")
        if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
            raise BadRequest(
                "tool_choice.allowed_tools must have a mode, auto or required, and tools",
                param="tool_choice.allowed_tools",
            )
        where = "tool_choice.allowed_tools.tools[{}]"
        names = [_named(tool, functions, where.format(at)) for at, tool in enumerate(listed)]
        return mode, list(dict.fromkeys(names))
    raise BadRequest("tool_choice.type must be function or allowed_tools", param="tool_choice.type")


def _named(choice: Any, functions: dict[str, Any], where: str) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in functions:
        raise BadRequest(
            f"{where}.function.name must be the name of one of the tools", param=f"{where}.function.name"
        )
    return name


def turns_for(
    turns: list[dict[str, Any]], use: ToolUse | None, text: ModelText
) -> tuple[list[dict[str, Any]], tuple[dict[str, Any], ...] | None]:
    """Messages and tools as this model's template can show them: what it does not know becomes plain text."""
    form, template = text.tool_format, text.template
    if form is not None and template is not None and not template.knows_tools:
        turns = plain(turns, form)
    if use is None:
        return turns, None
    if text.shows_tools:
        return turns, use.shown
    return with_description(turns, use.shown, use.form, system=text.takes_system), None


def held_to(
    use: ToolUse | None, answer: Constraint | None, field: str = "", *, thinks: bool, inside: bool
) -> Constraint | None:
    """What holds the whole generation, where `answer` holds only what is neither reasoning nor a call.

    `field` of the body says what the answer must form; `thinks`: reasoning may come first; `inside`: it has
    begun already. BadRequest: calls are required and so is a form of the answer.
    """
    if use is not None and use.required:
        if answer is not None:
            raise BadRequest(
                f"{field} and calls of tools that are required by tool_choice exclude each other", param=field
            )
        shape = use.shape()
    elif use is not None and answer is not None:
        shape = {"type": "or", "elements": [use.shape(), _shape(answer, field)]}
    elif use is not None and not use.free:
        shape = use.loose_shape()
    elif answer is not None and thinks:
        shape = _shape(answer, field)
    else:
        return answer
    if thinks:
        thought = {
            "type": "tag",
            "begin": "" if inside else BEGIN,
            "content": {"type": "any_text"},
            "end": END + "\n\n",
        }
        shape = _sequence([thought if inside else {"type": "optional", "content": thought}, shape])
    tag = {"type": "structural_tag", "format": shape}
    return Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(tag))


def _shape(constraint: Constraint, field: str) -> Shape:
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return _json({"type": "object"})
        case ConstraintKind.JSON_SCHEMA:
            return _json(json.loads(constraint.text))
        case ConstraintKind.REGEX:
            return {"type": "regex", "pattern": constraint.text}
        case ConstraintKind.GRAMMAR:
            return {"type": "grammar", "grammar": constraint.text}
        case ConstraintKind.STRUCTURAL_TAG:
            shape = json.loads(constraint.text).get("format")
            if not isinstance(shape, dict):
                raise BadRequest(
                    f"{field} must have a format to stand beside tools or reasoning", param=field
                )
            return shape


def _json(schema: Any) -> Shape:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MOST_SPACE}


def _text(value: str) -> Shape:
    return {"type": "const_string", "value": value}


def _sequence(elements: list[Shape]) -> Shape:
    elements = [item for item in elements if item.get("value") != ""]
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}
