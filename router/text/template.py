"""The model's chat template: messages to the text of a prompt, in a sandbox, by Hugging Face's conventions.

Templates come with the model, never from a request. They see what they see in `transformers`:
`messages`, `add_generation_prompt`, the special tokens by name, `raise_exception`, `strftime_now`, `tojson`.
"""

from __future__ import annotations

import json
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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template. Rendering changes nothing, so threads may share it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, most_characters: int) -> None:
        """`special_tokens` such as {"bos_token": "<s>"}. ValueError: the source is not a template."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the model's chat template is broken at line {error.lineno}: {error.message}"
            ) from error
        self._special = dict(special_tokens)
        self._most = most_characters
        self.knows_tools = "tool_calls" in source
        """Whether it can show calls of tools in a history."""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, ending where the assistant is to speak. BadRequest when the template refuses."""
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(
                **self._special, messages=messages, add_generation_prompt=True
            ):
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
