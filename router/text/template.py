"""A chat template: messages to the text of a prompt, in a sandbox, by Hugging Face's conventions.

Templates come with the model; one from a request is rendered elsewhere (`given_template.py`). They see what
they see in `transformers`: `messages`, `tools`, `add_generation_prompt`, the special tokens by name,
`raise_exception`, `strftime_now`, `tojson`. A template that takes too long is ended: every turn of a loop,
every test of one and every call of a macro looks at the time, and what Python does in one go (repeating,
powers, ranges) is bounded.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fleet.errors import BadRequest


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Raised(Exception):
    """The template refuses the messages."""


def _raise_exception(message: object) -> NoReturn:
    raise _Raised(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, this one escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class OutOfTime(Exception):
    """The template took longer than it may."""


_MOST_REPEATED = 1 << 20
"""Items or characters that one multiplication may make."""


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.due = threading.local()
        """When the rendering on this thread must have ended, on the monotonic clock."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.body.insert(0, nodes.ExprStmt(self._call_of_tick()))
            if loop.test is not None:
                loop.test = nodes.And(self._call_of_tick(), loop.test)
        for macro in template.find_all(nodes.Macro):
            macro.body.insert(0, nodes.ExprStmt(self._call_of_tick()))
        for block in template.find_all(nodes.CallBlock):
            block.body.insert(0, nodes.ExprStmt(self._call_of_tick()))
        return template

    @staticmethod
    def _call_of_tick() -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)

    def tick(self) -> bool:
        if time.monotonic() > self.due.at:
            raise OutOfTime
        return True

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if abs(left) > _MOST_REPEATED or abs(right) > 64:
                raise ValueError("a power of such numbers is too large")
        else:
            for items, times in ((left, right), (right, left)):
                if hasattr(items, "__len__") and len(items) * times > _MOST_REPEATED:
                    raise ValueError("too long a repetition")
        return super().call_binop(context, operator, left, right)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template. Rendering changes nothing, so threads may share it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, most_characters: int) -> None:
        """`special_tokens` such as {"bos_token": "<s>"}. ValueError: the source is not a template."""
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the model's chat template is broken at line {error.lineno}: {error.message}"
            ) from error
        self._globals = dict(self._template.globals)
        """Jinja would put them together anew for each rendering."""
        self._special = dict(special_tokens)
        self._most = most_characters
        self.knows_tools = "tool_calls" in source
        """Whether it can show calls of tools in a history."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        limit_s: float = math.inf,
    ) -> str:
        """The prompt, ending where the assistant is to speak. `variables` are what clients may set besides.

        BadRequest when the template refuses; `OutOfTime` after `limit_s` seconds.
        """
        self._environment.due.at = time.monotonic() + limit_s
        parts: list[str] = []
        size = 0
        try:
            given = {
                **self._globals,
                **(variables or {}),
                **self._special,
                "messages": messages,
                "add_generation_prompt": True,
            }
            if tools:
                given["tools"] = tools
            for part in self._template.root_render_func(self._template.new_context(given, shared=True)):
                self._environment.tick()
                parts.append(part)
                size += len(part)
                if size > self._most:
                    raise _Raised(f"the prompt is longer than {self._most} characters")
        except (
            _Raised,
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            # Whatever these messages make the template do is for their sender to know.
            raise BadRequest(
                f"the model's chat template does not accept these messages: {error}", param="messages"
            ) from error
        return "".join(parts)
