"""Tools for models whose chat template knows none: their description, calls and results as plain messages.

Pure. The description goes to the end of the system prompt, or becomes one, or, with templates that have no
place for one, stands before the user's first words; calls in a history are written as
the model is told to write them; results become the user's words, those of one turn in one message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.text.tools.formats import Format

Turn = dict[str, Any]


def description(tools: Sequence[Mapping[str, Any]], form: Format) -> str:
    """What the model is told; one tool a line."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    call = form.write([("NAME", '{"ARGUMENT": "VALUE"}')])
    return (
        "# Tools\n\nYou can call these functions. Each line describes one, its parameters as a JSON schema:\n"
        f"<tools>\n{lines}\n</tools>\n\n"
        f"To call a function, write its name and its arguments in exactly this form:\n{call}\n"
        "You are told the result then. Call a function only if it helps; otherwise answer in plain words."
    )


def with_description(
    turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], form: Format, *, system: bool
) -> list[Turn]:
    """`system`: whether the template takes a system prompt; without, the first words of the user get it."""
    text = description(tools, form)
    if not system:
        for at, turn in enumerate(turns):
            if turn["role"] == "user":
                asked = {**turn, "content": f"{text}\n\n{turn['content']}"}
                return [*turns[:at], asked, *turns[at + 1 :]]
        return [{"role": "user", "content": text}, *turns]
    if turns and turns[0]["role"] == "system":
        first = turns[0]
        return [
            {**first, "content": f"{first['content']}\n\n{text}" if first["content"] else text},
            *turns[1:],
        ]
    return [{"role": "system", "content": text}, *turns]


def plain(turns: Sequence[Turn], form: Format) -> list[Turn]:
    """The same conversation without `tool_calls` and the role `tool`."""
    made: list[Turn] = []
    results = False
    for turn in turns:
        if turn["role"] == "tool":
            result = f"<tool_response>\n{turn['content']}\n</tool_response>"
            if results:
                made[-1]["content"] += "\n" + result
            else:
                made.append({"role": "user", "content": result})
            results = True
            continue
        results = False
        calls = turn.get("tool_calls")
        if calls:
            written = form.write(
                [(call["function"]["name"], _text(call["function"]["arguments"])) for call in calls]
            )
            content = f"{turn['content']}\n{written}" if turn["content"] else written
            turn = {key: value for key, value in turn.items() if key != "tool_calls"} | {"content": content}
        made.append(turn)
    return made


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
