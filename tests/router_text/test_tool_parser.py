"""Calls of tools are found in every format, however the text is cut, and nothing else is taken for one."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.parts import CallArguments, CallBegun, Content, Part, Reasoning
from router.text.reasoning import ThinkSplitter
from router.text.split import Split
from router.text.tools.formats import FORMATS, Format
from router.text.tools.json_scan import JsonScan, State
from router.text.tools.parser import ToolParser

NAMES = ("weather", "get_time-2", "f")
FORMS = list(FORMATS.values())

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(
        ['"', "\\", "{", "}]", "</tool_call>", "<tool_call>", "[TOOL_CALLS]", "😀é\n", "; {", ""]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(max_size=6), values, max_size=4)
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)
dumps = st.sampled_from([{}, {"ensure_ascii": False}, {"indent": 2}, {"separators": (",", ":")}])


def whole(form: Format, text: str) -> list[Any]:
    return result(form, [text])


def result(form: Format, pieces: list[str], thinking: ThinkSplitter | None = None) -> list[Any]:
    """What a client puts together from the parts: runs of text, and calls as [name, arguments]."""
    tools = ToolParser(form, NAMES)
    split = Split(thinking, tools)
    parts: list[Part] = []
    for piece in pieces:
        parts += split.feed(piece)
    return [*together([*parts, *split.end()]), (tools.whole, tools.broken)]


def together(parts: list[Part]) -> list[Any]:
    found: list[Any] = []
    calls: list[list[str]] = []
    for part in parts:
        match part:
            case CallBegun(index, name):
                assert index == len(calls)
                calls.append([name, ""])
                found.append(calls[-1])
            case CallArguments(index, text):
                assert index == len(calls) - 1
                assert text
                calls[index][1] += text
            case Content(text) | Reasoning(text):
                assert text
                kind = type(part).__name__
                if found and isinstance(found[-1], dict) and kind in found[-1]:
                    found[-1][kind] += text
                else:
                    found.append({kind: text})
    return found


def cuts(text: str, draw: Any) -> list[str]:
    at = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@settings(deadline=None, max_examples=40)
@given(
    calls=calls,
    style=dumps,
    before=st.sampled_from(["", "Let me see. <tool", "\n\n", "x [TOOL"]),
    data=st.data(),
)
def test_calls_under_every_chunking(form: Format, calls: Any, style: Any, before: str, data: Any) -> None:
    if form.bare and before.strip():
        before = ""  # such a call is one only where the answer begins
    written = [(name, json.dumps(value, **style)) for name, value in calls]
    text = before + form.write(written)
    expected: list[Any] = [[name, value] for name, value in written]
    if before.strip():
        expected.insert(0, {"Content": before})
    expected.append((len(calls), False))
    assert whole(form, text) == expected
    assert result(form, list(text)) == expected
    assert result(form, cuts(text, data.draw)) == expected


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@settings(deadline=None, max_examples=40)
@given(calls=calls, data=st.data())
def test_cut_off_anywhere(form: Format, calls: Any, data: Any) -> None:
    written = [(name, json.dumps(value)) for name, value in calls]
    text = form.write(written)
    end = data.draw(st.integers(0, len(text)))
    *found, (complete, broken) = result(form, cuts(text[:end], data.draw))
    assert [*found, (complete, broken)] == result(form, list(text[:end]))
    called = [entry for entry in found if isinstance(entry, list)]
    for (name, value), (given_name, given_value) in zip(called, written, strict=False):
        assert name == given_name
        assert given_value.startswith(value)
    assert [value for _, value in called[:complete]] == [value for _, value in written[:complete]]
    assert len(called) == complete + broken
    if not called:
        assert "".join(entry["Content"] for entry in found) == text[:end]


fragments = st.lists(
    st.sampled_from(
        [
            "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "[", "]", "{", "}", ";", ",",
            '{"name": "f", "arguments": ', '{"name": "f", "parameters": {}}', '{"x": "é"}', '"', " ",
            "\\", "f", "\n", ":", '"name"', '"f"', '"arguments"', "1", "-", "e5", "true", "null", "hello",
            "<|python_tag|>", "😀", '{"arguments": {"a": [1, {"b": 2}]}, "name": "f"}',
            '{"name": "f"}', '{"name": "other"}',
            '{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"name": "f", "arguments": null}',
        ]
    ),
    max_size=8,
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@settings(deadline=None, max_examples=100)
@given(parts=fragments, data=st.data())
def test_nonsense_is_the_same_under_every_chunking_and_never_lost(
    form: Format, parts: Any, data: Any
) -> None:
    text = "".join(parts)
    expected = whole(form, text)
    assert result(form, list(text)) == expected
    assert result(form, cuts(text, data.draw)) == expected
    *found, (complete, broken) = expected
    called = [entry for entry in found if isinstance(entry, list)]
    if not called:
        assert "".join(entry["Content"] for entry in found) == text
    for name, value in called[: len(called) - broken]:
        assert name in NAMES
        assert isinstance(json.loads(value), dict)
    assert complete + broken == len(called)


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name":"f"}</tool_call>', [["f", "{}"], (1, False)]),
        ("hermes", '<tool_call>{"name":"f"}</tool_call>\n\n', [["f", "{}"], (1, False)]),
        ("hermes", '<tool_call>{"name":"f","name":"f","arguments":{}}',
         [{"Content": '<tool_call>{"name":"f","name":"f","arguments":{}}'}, (0, False)]),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":"x\ny"}}',
         [["f", '{"a":"x'], {"Content": '\ny"}}'}, (0, True)]),
        ("hermes", '<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>', [["f", '{"a":1}'], (1, False)]),
        ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}', [["f", '{"a":1}'], (1, False)]),
        ("hermes", '<tool_call>{"name":"f","arguments":{}}</tool_call> ok',
         [["f", "{}"], {"Content": " ok"}, (1, False)]),
        ("hermes", '<tool_call>{"name":"f","arguments":{}</tool_call>', [["f", "{}"], (1, False)]),
        ("hermes", '<tool_call>{"name":"g","arguments":{}}</tool_call>',
         [{"Content": '<tool_call>{"name":"g","arguments":{}}</tool_call>'}, (0, False)]),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":oh}}</tool_call>',
         [["f", '{"a":'], {"Content": "oh}}</tool_call>"}, (0, True)]),
        ("hermes", '<tool_call><tool_call>{"name":"f"}',
         [{"Content": "<tool_call>"}, ["f", "{}"], (1, False)]),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [["f", '{"a": 1}'], (1, False)]),
        ("llama", '{"type": "function", "name": "f", "parameters": {}}', [["f", "{}"], (1, False)]),
        ("llama", '{"name": "f", "age": 3}',
         [{"Content": '{"name": "f", "age": 3}'}, (0, False)]),
        ("llama", '{"name": "f"}', [{"Content": '{"name": "f"}'}, (0, False)]),
        ("llama", 'It is {"name": "f", "parameters": {}}',
         [{"Content": 'It is {"name": "f", "parameters": {}}'}, (0, False)]),
        ("mistral", '[TOOL_CALLS][{"name":"f","arguments":{"a":2},"id":"abcdefghi"}]',
         [["f", '{"a":2}'], (1, False)]),
        ("mistral", '[TOOL_CALLS] {"name":"f","arguments":{}}', [["f", "{}"], (1, False)]),
        ("mistral_args", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a":2}[TOOL_CALLS]weather{}',
         [["f", '{"a":2}'], ["weather", "{}"], (2, False)]),
        ("json", '{"name":"f","arguments":{"x":[]}}', [["f", '{"x":[]}'], (1, False)]),
        ("json", '[1, 2]', [{"Content": "[1, 2]"}, (0, False)]),
    ],
)  # fmt: skip
def test_one_by_one(form: str, text: str, expected: list[Any]) -> None:
    assert whole(FORMATS[form], text) == expected
    assert result(FORMATS[form], list(text)) == expected


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_text_that_can_be_no_call_does_not_wait(form: Format) -> None:
    tools = ToolParser(form, NAMES)
    for piece in ["Hello", " there,", " 1 > 0", "!", '\n{"answer": 42}', " yes."]:
        assert tools.feed(piece) == [Content(piece)]
    assert tools.end() == []


@pytest.mark.parametrize(
    ("held", "shown"),
    [
        ("{", '"answer'),
        ('{"n', 'ow": 1'),
        ('{ "name": "', "Alice"),
        ('{"type": "func', "y"),
        ('{"name": "f", "', "age"),
        ('{"name": "f", "arguments": ', "["),
    ],
)
def test_an_answer_in_json_is_not_held_up(held: str, shown: str) -> None:
    tools = Split(None, ToolParser(FORMATS["llama"], NAMES))
    assert tools.feed(held) == []
    assert tools.feed(shown) == [Content(held + shown)]
    assert tools.feed("42") == [Content("42")]


def test_arguments_come_as_they_are_written() -> None:
    tools = ToolParser(FORMATS["hermes"], NAMES)
    assert tools.feed('<tool_call>\n{"name": "f", "arguments": ') == []
    assert tools.feed('{"te') == [CallBegun(0, "f"), CallArguments(0, '{"te')]
    assert tools.feed('xt": "a') == [CallArguments(0, 'xt": "a')]
    assert tools.feed("\\") == [CallArguments(0, "\\")]
    assert tools.feed('""}}') == [CallArguments(0, '""}')]
    assert tools.feed("\n</tool_") == []
    assert tools.end() == []


def test_endless_spaces_are_shown_in_time() -> None:
    for form in FORMS:
        for start in ("", form.write([("f", "{}")]), form.marker):
            tools = ToolParser(form, NAMES)
            tools.feed(start)
            shown = "".join(
                part.text for _ in range(200) for part in tools.feed(" ") if isinstance(part, Content)
            )
            assert len(shown) > 160
    thinking = ThinkSplitter()
    shown = "".join(part.text for _ in range(200) for part in thinking.feed(" ") if isinstance(part, Content))
    assert len(shown) > 160


@settings(deadline=None, max_examples=100)
@given(value=values, style=dumps)
def test_all_json_is_followed(value: Any, style: Any) -> None:
    text = json.dumps(value, **style)
    scan = JsonScan()
    assert all(map(scan.push, text))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    assert scan.ended != number
    assert number == (scan.state is State.NUMBER)


@settings(deadline=None, max_examples=300)
@given(text=st.text(alphabet='{}[]:,"\\ntrue01-.eE+ a\n', max_size=12))
def test_no_more_than_json_is_followed(text: str) -> None:
    scan = JsonScan()
    fits = all(map(scan.push, text)) and (scan.ended or (scan.push(" ") and scan.ended))
    try:
        json.loads(text)
        expected = True
    except ValueError:
        expected = False
    assert fits == expected


@pytest.mark.parametrize("inside", [False, True])
@settings(deadline=None, max_examples=100)
@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", " ", "\n", "why", "so", "<", "😀"]),
        max_size=8,
    ),
    data=st.data(),
)
def test_reasoning_is_the_same_under_every_chunking(inside: bool, parts: Any, data: Any) -> None:
    text = "".join(parts)

    def run(pieces: list[str]) -> list[Any]:
        split = Split(ThinkSplitter(inside=inside), None)
        found = [part for piece in pieces for part in split.feed(piece)]
        return together([*found, *split.end()])

    expected = run([text])
    assert run(list(text)) == expected
    assert run(cuts(text, data.draw)) == expected
    found = None if inside else re.match(r"\s*<think>", text)
    if found is None and not inside:
        assert expected == ([{"Content": text}] if text else [])
        return
    thought, _, content = text[found.end() if found else 0 :].partition("</think>")
    halves = {"Reasoning": thought.lstrip(), "Content": content.lstrip()}
    assert expected == [{kind: half} for kind, half in halves.items() if half]


def test_reasoning_then_calls() -> None:
    text = '<think>\nI could write <tool_call>{"name": "f"}\n</think>\n\nWell: <tool_call>{"name": "f"}'
    text += "</tool_call>"
    expected = [
        {"Reasoning": 'I could write <tool_call>{"name": "f"}\n'},
        {"Content": "Well: "},
        ["f", "{}"],
        (1, False),
    ]
    for pieces in ([text], list(text)):
        assert result(FORMATS["hermes"], pieces, ThinkSplitter()) == expected
    inside = text.removeprefix("<think>\n")
    assert result(FORMATS["hermes"], list(inside), ThinkSplitter(inside=True)) == expected


def test_reasoning_without_an_end_and_answers_without_reasoning() -> None:
    for text, inside, expected in (
        ("<think>so it goes </thi", False, {"Reasoning": "so it goes </thi"}),
        ("so it goes", True, {"Reasoning": "so it goes"}),
        ("no <think>thought</think>", False, {"Content": "no <think>thought</think>"}),
        ("</think>\n\nyes", True, {"Content": "yes"}),
    ):
        assert result(FORMATS["hermes"], list(text), ThinkSplitter(inside=inside)) == [expected, (0, False)]
