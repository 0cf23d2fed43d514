"""How models write calls of tools: the formats, and which one a chat template uses. Pure.

Each format is read by `parser.ToolParser` and written, for histories and for what generation is held to,
by this module: `opening`, then `before` + arguments + `after` of each call with `between` between them,
then `closing`. Sources: the chat templates of NousResearch Hermes, Qwen 2.5 and 3 (hermes), Meta Llama 3.1
to 3.3 (llama), Mistral 7B v0.3 (mistral) and Mistral Small 3 (mistral_args).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    marker: str
    """Behind it stand calls, wherever it is met; empty: there is none."""
    before: str
    """`{name}` is the name of the tool."""
    after: str
    between: str
    opening: str = ""
    closing: str = ""
    end: str = ""
    """May follow a call, and says nothing then."""
    separator: str = ""
    """May stand between calls, and says nothing then."""
    bare: bool = False
    """Whether a call may do without the marker where the answer, or what follows a call, begins."""
    lists: bool = False
    """Whether calls may stand in a JSON array."""
    named: bool = False
    """Whether the name stands outside the JSON, which is only the arguments."""
    specials: tuple[str, ...] = ()
    """Control tokens that must stay in the text, or nothing would be found."""
    id_length: int = 0
    """Length of a call's id where the template insists on one; 0: any."""

    def begin(self, name: str) -> str:
        return self.before.replace("{name}", name)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each a name and its arguments as JSON, as the model would write them."""
        written = self.between.join(self.begin(name) + arguments + self.after for name, arguments in calls)
        return self.opening + written + self.closing


_JSON_CALL = '{"name": "{name}", "arguments": '

HERMES = Format(
    "hermes",
    marker="<tool_call>",
    before=f"<tool_call>\n{_JSON_CALL}",
    after="}\n</tool_call>",
    between="\n",
    end="</tool_call>",
    specials=("<tool_call>", "</tool_call>"),
)
LLAMA = Format(
    "llama",
    marker="<|python_tag|>",
    before='{"name": "{name}", "parameters": ',
    after="}",
    between="; ",
    separator=";",
    bare=True,
    specials=("<|python_tag|>",),
)
MISTRAL = Format(
    "mistral",
    marker="[TOOL_CALLS]",
    opening="[TOOL_CALLS][",
    before=_JSON_CALL,
    after="}",
    between=", ",
    closing="]",
    lists=True,
    specials=("[TOOL_CALLS]",),
    id_length=9,
)
MISTRAL_ARGS = Format(
    "mistral_args",
    marker="[TOOL_CALLS]",
    before="[TOOL_CALLS]{name}[ARGS]",
    after="",
    between="",
    named=True,
    specials=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    id_length=9,
)
JSON = Format(
    "json",
    marker="",
    opening="[",
    before=_JSON_CALL,
    after="}",
    between=", ",
    closing="]",
    bare=True,
    lists=True,
)

FORMATS = {form.name: form for form in (HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, JSON)}

_FOREIGN = re.compile(r"<function=|<\uff5ctool|<\|tool_calls?_|<arg_key>|<tool_calls?>\s*\[|<\|channel\|>")
"""Marks of formats that are not read here, some of which look like one that is."""


def format_of(template: str) -> Format | None:
    """The format in which a model with this chat template writes calls; None: one that is not known here.
    A template that shows no tools is given their description in the system prompt, in Hermes' format."""
    if not shows_tools(template) and "tool_calls" not in template:
        return HERMES
    if _FOREIGN.search(template):
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        return HERMES
    if "python_tag" in template or '"parameters":' in template:
        return LLAMA
    if '"arguments"' in template:
        return JSON
    return None if shows_tools(template) else HERMES


def shows_tools(template: str) -> bool:
    """Whether the template describes the tools that it is given."""
    return re.search(r"\btools\b", template) is not None
