"""Tools and reasoning in chats: what is asked of the model, and what of its text becomes which field."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest
import xgrammar
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import Tokenizer

from fleet.request import Constraint, ConstraintKind
from router.openai.tools import ToolUse, held_to
from router.text.parts import CallArguments, CallBegun
from router.text.reasoning import ThinkSplitter
from router.text.split import Split
from router.text.tokenizer import ModelText, TextSettings
from router.text.tools.formats import FORMATS
from router.text.tools.parser import ToolParser

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}[TOOL_CALLS]{{ messages[-1].content }}"
)
THINKING = PLAIN + "{% set end = '</think>' %}"
OPENED = PLAIN + "<think>\n{% set end = '</think>' %}"

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Says it", "parameters": SCHEMA},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 😀"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "\\"B{}"}}\n</tool_call>'
TWO = f"Let me see.\n{ONE}\n{OTHER}"

Model = Callable[..., ModelText]


@pytest.fixture(scope="session")
def model_with(tokenizer_json: str) -> Model:
    """A model with this chat template, and perhaps some more control tokens."""

    def make(template: str, *specials: str, **settings: Any) -> ModelText:
        tokenizer = Tokenizer.from_str(tokenizer_json)
        tokenizer.add_special_tokens(list(specials))
        return ModelText(
            tokenizer.to_str(),
            end_tokens=(1,),
            context=4096,
            chat_template=template,
            settings=TextSettings(threads=1, **settings),
        )

    return make


def drawn(text: ModelText, answer: str) -> Any:
    tokens = text._encode(answer, False)
    return lambda request: [*tokens, 1]


def prompt_of(site: Any, text: ModelText) -> str:
    return text.decode(site.spine.runs[-1].request.prompt, skip_special=False)


def reassembled(chunks: list[Any]) -> dict[str, Any]:
    """As clients put a streamed answer together, by index."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finishes = []
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        assert set(choice) == {"index", "delta", "logprobs", "finish_reason"}
        assert choice["finish_reason"] is None or delta == {}
        finishes.append(choice["finish_reason"])
        for kind in ("content", "reasoning_content"):
            message[kind] += delta.get(kind) or ""
        for call in delta.get("tool_calls", ()):
            calls = message["tool_calls"]
            if "id" in call:
                assert call["index"] == len(calls)
                assert call["type"] == "function"
                calls.append([call["function"]["name"], call["function"]["arguments"]])
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
                assert call["index"] == len(calls) - 1
                calls[-1][1] += call["function"]["arguments"]
    assert finishes[:-1] == [None] * (len(finishes) - 1)
    return {**message, "finish": finishes[-1]}


def plain_form(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": [
            [call["function"]["name"], call["function"]["arguments"]]
            for call in message.get("tool_calls", ())
        ],
        "finish": choice["finish_reason"],
    }


async def both(site: Any, events: Any, **fields: Any) -> dict[str, Any]:
    """The answer, which must be the same streamed and whole."""
    response = await site.chat(**fields)
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json())
    whole = plain_form(response.json()["choices"][0])
    *chunks, done = events((await site.chat(**fields, stream=True)).text)
    assert done == "[DONE]"
    assert reassembled(chunks) == whole
    return whole


GOLDEN = "".join(
    'data: {"id":"chatcmpl-ID","created":0,"model":"tiny/model-1","object":"chat.completion.chunk","choices":'
    f'[{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}}}]}}\n\n'
    for delta, finish in (
        ('{"role":"assistant","content":""}', "null"),
        ('{"content":"Hello"}', "null"),
        (
            '{"tool_calls":[{"index":0,"id":"call_ID","type":"function",'
            '"function":{"name":"clock","arguments":""}}]}',
            "null",
        ),
        ('{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}', "null"),
        ('{"tool_calls":[{"index":0,"function":{"arguments":"}"}}]}', "null"),
        ("{}", '"tool_calls"'),
    )
) + "data: [DONE]\n\n"  # fmt: skip


def test_golden_stream_of_a_call(serve: Any, model_with: Model) -> None:
    text = model_with(HERMES)
    pieces = ("Hello", '<tool_call>{"name":"clock","arguments":', "{", "}", "}</tool_call>")
    tokens = [token for piece in pieces for token in text._encode(piece, False)]

    async def main() -> None:
        async with serve(lambda request: [*tokens, 1], model_text=text) as site:
            body = (await site.chat(stream=True, tools=TOOLS)).text
            body = re.sub(r'"created":\d+', '"created":0', re.sub(r"cmpl-[0-9a-f]{24}", "cmpl-ID", body))
            body = re.sub(r"call_[0-9a-f]{24}", "call_ID", body)
            assert body == GOLDEN

    asyncio.run(main())


@pytest.mark.parametrize("template", [HERMES, PLAIN])
def test_calls_in_an_answer(serve: Any, model_with: Model, events: Any, template: str) -> None:
    text = model_with(template)

    async def main() -> None:
        async with serve(drawn(text, TWO), model_text=text) as site:
            answer = await both(site, events, tools=TOOLS)
            assert answer == {
                "content": "Let me see.\n",
                "reasoning_content": "",
                "tool_calls": [["weather", '{"city": "Zürich 😀"}'], ["weather", '{"city": "\\"B{}"}']],
                "finish": "tool_calls",
            }
            several = (await site.chat(tools=TOOLS, n=2)).json()["choices"]
            assert [plain_form(choice) for choice in several] == [answer, answer]
            ids = {call["id"] for choice in several for call in choice["message"]["tool_calls"]}
            assert len(ids) == 4
            untouched = await both(site, events)
            assert untouched["content"] == TWO
            assert (await both(site, events, tools=TOOLS, tool_choice="none"))["content"] == TWO

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_with_the_official_client(
    serve: Any, model_with: Model, model: str, stream: bool
) -> None:
    text = model_with(PLAIN)
    answers = iter([ONE, "It rains in Zürich."])

    def script(request: Any) -> Any:
        return [*text._encode(next(answers), False), 1]

    async def main() -> None:
        async with serve(script, model_text=text) as site:
            api = openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{site.port}/v1", api_key="none", max_retries=0, timeout=30
            )
            messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]

            async def ask() -> Any:
                if not stream:
                    answer = await api.chat.completions.create(model=model, messages=messages, tools=TOOLS)  # type: ignore[call-overload]
                    return answer.choices[0]
                async with api.chat.completions.stream(model=model, messages=messages, tools=TOOLS) as chunks:  # type: ignore[arg-type]
                    return (await chunks.get_final_completion()).choices[0]

            async with api:
                first = await ask()
                assert first.finish_reason == "tool_calls"
                (call,) = first.message.tool_calls
                assert call.function.name == "weather"
                assert json.loads(call.function.arguments) == {"city": "Zürich 😀"}
                assert not first.message.content
                messages += [
                    first.message.model_dump(exclude_none=True),
                    {"role": "tool", "tool_call_id": call.id, "content": "rain"},
                ]
                second = await ask()
            assert (second.finish_reason, second.message.content) == ("stop", "It rains in Zürich.")
            prompt = prompt_of(site, text)
            assert '{"name": "weather", "description": "Says it"' in prompt
            assert f"<|im_start|>assistant\n{ONE}<|im_end|>" in prompt
            assert "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>" in prompt

    asyncio.run(main())


def test_a_template_that_knows_tools_gets_them(serve: Any, model_with: Model) -> None:
    text = model_with(HERMES)
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": [1]}'}}
    messages = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]

    async def main() -> None:
        async with serve(drawn(text, "ok"), model_text=text) as site:
            assert (await site.chat(messages=messages, tools=[CLOCK])).status_code == 200
            empty = {"type": "object", "properties": {}}
            shown = json.dumps({"type": "function", "function": {"name": "clock", "parameters": empty}})
            assert prompt_of(site, text) == (
                f"<tools>{shown}</tools><|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n"
                '<tool_call>{"name": "clock", "arguments": {"zone": [1]}}</tool_call><|im_end|>\n'
                "<|im_start|>tool\nnoon#c1<|im_end|>\n<|im_start|>assistant"
            )
            assert (await site.chat(messages=messages, tools=[CLOCK], tool_choice="none")).status_code == 200
            assert "<tools>" not in prompt_of(site, text)

    asyncio.run(main())


def test_results_of_one_turn_stand_together_and_the_system_prompt_keeps_its_words(
    serve: Any, model_with: Model
) -> None:
    text = model_with(PLAIN)
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "clock", "arguments": "{}"}} for n in (1, 2)
    ]
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "Well.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
    ]

    async def main() -> None:
        async with serve(drawn(text, "ok"), model_text=text) as site:
            assert (await site.chat(messages=messages, tools=TOOLS)).status_code == 200
            prompt = prompt_of(site, text)
            assert prompt.startswith("<|im_start|>system\nBe kind.\n\n# Tools")
            assert prompt.count("<|im_start|>system") == 1
            call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
            assert prompt.endswith(
                f"<|im_start|>assistant\nWell.\n{call}\n{call}<|im_end|>\n<|im_start|>user\n"
                "<tool_response>\ntwo\n</tool_response>\n<tool_response>\none\n</tool_response><|im_end|>\n"
                "<|im_start|>assistant\n"
            )

    asyncio.run(main())


@pytest.mark.parametrize("refuses", [True, False])
def test_tools_where_there_is_no_system_prompt(serve: Any, model_with: Model, refuses: bool) -> None:
    without = "{{ raise_exception('no such role') }}" if refuses else ""
    text = model_with(
        "{% for m in messages %}{% if m.role == 'system' %}" + without + "{% else %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )

    async def main() -> None:
        async with serve(drawn(text, ONE), model_text=text) as site:
            response = await site.chat(tools=TOOLS)
            assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
            prompt = prompt_of(site, text)
            assert prompt.startswith("<|im_start|>user\n# Tools")
            assert '{"name": "weather"' in prompt
            assert prompt.endswith("\n\nhi<|im_end|>\n")

    asyncio.run(main())


def test_cut_off_in_the_arguments(serve: Any, model_with: Model, events: Any) -> None:
    text = model_with(HERMES)

    async def main() -> None:
        async with serve(drawn(text, ONE), model_text=text) as site:
            for most in range(1, len(text._encode(ONE, False)), 7):
                answer = await both(site, events, tools=TOOLS, max_tokens=most)
                assert answer["finish"] == "length"
                if answer["tool_calls"]:
                    ((name, arguments),) = answer["tool_calls"]
                    assert name == "weather"
                    assert '{"city": "Zürich 😀"}'.startswith(arguments.rstrip("\ufffd"))
                    assert answer["content"] == ""
                else:
                    assert ONE.startswith(answer["content"].rstrip("\ufffd"))

    asyncio.run(main())


def test_stop_strings_and_log_probabilities(serve: Any, model_with: Model, events: Any) -> None:
    text = model_with(HERMES)

    async def main() -> None:
        async with serve(drawn(text, TWO), model_text=text) as site:
            assert (await both(site, events, tools=TOOLS, stop="see"))["content"] == "Let me "
            cut = await both(site, events, tools=TOOLS, stop="Zür")
            assert cut["tool_calls"] == [["weather", '{"city": "']]
            assert cut["finish"] == "stop"
            whole = (await site.chat(tools=TOOLS, logprobs=True)).json()["choices"][0]["logprobs"]["content"]
            chunks = events((await site.chat(tools=TOOLS, logprobs=True, stream=True)).text)[:-1]
            streamed = [
                entry
                for chunk in chunks
                for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
            ]
            assert streamed == whole
            assert bytes(byte for entry in streamed for byte in entry["bytes"]).decode() == TWO

    asyncio.run(main())


@pytest.mark.parametrize("marker", [True, False])
def test_marks_that_are_control_tokens(serve: Any, model_with: Model, events: Any, marker: bool) -> None:
    text = model_with(MISTRAL, "[TOOL_CALLS]", "[PAD]")
    answer = '[TOOL_CALLS][{"name": "clock", "arguments": {"a": 1}}]' if marker else "[PAD]Hello"

    async def main() -> None:
        async with serve(drawn(text, answer), model_text=text) as site:
            found = await both(site, events, tools=TOOLS)
            if marker:
                assert found["tool_calls"] == [["clock", '{"a": 1}']]
                whole = (await site.chat(tools=TOOLS)).json()["choices"][0]["message"]
                assert re.fullmatch(r"[A-Za-z0-9]{9}", whole["tool_calls"][0]["id"])
            assert found["content"] == ("" if marker else "Hello")
            assert "[TOOL_CALLS]" not in (await both(site, events))["content"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("template", "answer", "reasoning", "content", "calls"),
    [
        (THINKING, "<think>\nWhy?\n</think>\n\nSo.", "Why?\n", "So.", []),
        (THINKING, "So.", "", "So.", []),
        (OPENED, "Why?</think>So.", "Why?", "So.", []),
        (OPENED, f"{ONE}</think>{ONE}", ONE, "", [["weather", '{"city": "Zürich 😀"}']]),
        (OPENED, "Why? </thi", "Why? </thi", "", []),
    ],
)
def test_reasoning_is_a_field_of_its_own(
    serve: Any,
    model_with: Model,
    events: Any,
    template: str,
    answer: str,
    reasoning: str,
    content: str,
    calls: Any,
) -> None:
    text = model_with(template, "<think>", "</think>")
    off = model_with(template, reasoning_parser="none")

    async def main() -> None:
        async with serve(drawn(text, answer), model_text=text) as site:
            found = await both(site, events, **({"tools": TOOLS} if calls else {}))
            assert (found["reasoning_content"], found["content"]) == (reasoning, content)
            assert found["tool_calls"] == calls
            assert found["finish"] == ("tool_calls" if calls else "stop")
            if not calls:
                stopped = await both(site, events, stop="hy")
                assert stopped["reasoning_content"] == ("W" if reasoning else "")
        async with serve(drawn(off, answer), model_text=off) as site:
            assert (await both(site, events))["content"] == answer

    asyncio.run(main())


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": fields}]}


DEEP = json.loads('{"type": "object", "properties": {"a": ' + '{"items": ' * 400 + "{}" + "}" * 402)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        (function(), "tools[0].function.name"),
        (function(name=""), "tools[0].function.name"),
        (function(name="a b"), "tools[0].function.name"),
        (function(name="a" * 65), "tools[0].function.name"),
        (function(name="f", description=5), "tools[0].function.description"),
        (function(name="f", parameters=[]), "tools[0].function.parameters"),
        (function(name="f", parameters={"type": "string"}), "tools[0].function.parameters"),
        (function(name="f", strict="yes"), "tools[0].function.strict"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tools": [CLOCK] * 129}, "tools"),
        (function(name="f", description="x" * 300_000), "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "clock"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
         "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        (function(name="f", parameters=DEEP), "tools[0].function.parameters"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
         "response_format"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ({"tools": TOOLS, "response_format": {"type": "structural_tag", "format": 5}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_tools_is_said(serve: Any, model_with: Model, fields: Any, param: str) -> None:
    text = model_with(PLAIN)

    async def main() -> None:
        async with serve(drawn(text, "ok"), model_text=text) as site:
            response = await site.chat(**fields)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == param, error
            assert param in error["message"]
            assert not site.spine.runs

    asyncio.run(main())


def test_limits_and_unknown_forms_are_named(serve: Any, model_with: Model) -> None:
    text = model_with(PLAIN)
    foreign = model_with(HERMES + "<function=")

    async def main() -> None:
        async with serve(drawn(text, "ok"), model_text=text, max_tools=1, max_tool_bytes=100) as site:
            assert "http.max_tools" in (await site.chat(tools=TOOLS)).text
            assert "http.max_tool_bytes" in (await site.chat(tools=[WEATHER])).text
        async with serve(drawn(foreign, "ok"), model_text=foreign) as site:
            refused = await site.chat(tools=TOOLS)
            assert refused.status_code == 400
            assert "text.tool_parser" in refused.text
            assert (await site.chat(tools=TOOLS, tool_choice="none")).status_code == 200

    asyncio.run(main())


def test_what_holds_the_generation(serve: Any, model_with: Model) -> None:
    text = model_with(HERMES)
    named = {"type": "function", "function": {"name": "clock"}}
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]

    async def main() -> None:
        async with serve(drawn(text, "ok"), model_text=text) as site:
            for fields, held, names in (
                ({"tools": TOOLS}, False, ()),
                ({"tools": TOOLS, "tool_choice": "auto"}, False, ()),
                ({"tools": TOOLS, "tool_choice": "required"}, True, ("weather", "clock")),
                ({"tools": TOOLS, "tool_choice": named}, True, ("clock",)),
                ({"tools": TOOLS, "tool_choice": only}, True, ("clock",)),
                ({"tools": [strict, CLOCK]}, True, ("weather", "clock")),
                ({"tools": TOOLS, "parallel_tool_calls": False}, True, ("weather", "clock")),
                ({}, False, ()),
            ):
                assert (await site.chat(**fields)).status_code == 200
                constraint = site.spine.runs[-1].request.constraint
                assert (constraint is not None) == held, fields
                if constraint is not None:
                    assert constraint.kind is ConstraintKind.STRUCTURAL_TAG
                    for name in ("weather", "clock"):
                        assert (f'\\"name\\": \\"{name}\\"' in constraint.text) == (name in names)

    asyncio.run(main())


SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "}</tool_call>"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "g": {
        "type": "object",
        "properties": {"s": {"type": "string", "maxLength": 6}},
        "additionalProperties": False,
    },
}
VOCABULARY = [*(bytes([byte]) for byte in range(256)), b"<end>"]
END = 256


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo(VOCABULARY, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def generated(grammar: xgrammar.CompiledGrammar, chance: random.Random) -> str | None:
    """Bytes drawn as the mask allows, the end as soon as it does; None: it went on for too long."""
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, len(VOCABULARY))
    made = bytearray()
    while len(made) < 1500:
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8)[0], bitorder="little")
        allowed = np.flatnonzero(bits[: len(VOCABULARY)]).tolist()
        if END in allowed and (len(allowed) == 1 or chance.random() < 0.5):
            return made.decode(errors="replace")
        shown = [t for t in allowed if 32 <= t < 127] or [t for t in allowed if t != END]
        token = chance.choice(shown)
        assert matcher.accept_token(token)
        made.append(token)
    return None


@pytest.mark.parametrize("thinks", ["no", "may", "inside"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_required_calls_are_made_and_understood(
    compiler: xgrammar.GrammarCompiler, form: Any, parallel: bool, thinks: str
) -> None:
    use = ToolUse((), SCHEMAS, free=False, required=True, parallel=parallel, form=form)
    held = held_to(use, None, thinks=thinks != "no", inside=thinks == "inside")
    assert held is not None
    grammar = compiler.compile_structural_tag(held.text)
    two = form.write([("f", '{"a": 1, "b": "x"}'), ("g", "{}")])
    before = {"no": "", "may": "<think>\nhm</think>\n\n", "inside": "hm</think>\n\n"}[thinks]
    for text, right in ((two, parallel), (form.write([("g", "{}")]), True), ("Hello", False),
                        (form.write([("f", '{"a": "x"}')]), False)):  # fmt: skip
        matcher = xgrammar.GrammarMatcher(grammar)
        assert (matcher.accept_string(before + text) and matcher.is_completed()) == right, text
    chance = random.Random(7)
    if thinks == "inside":
        return  # reasoning drawn at random does not end
    made = [text for _ in range(4) if (text := generated(grammar, chance)) is not None]
    for text in made:
        tools = ToolParser(form, SCHEMAS)
        split = Split(ThinkSplitter(), tools)
        parts = split.feed(text) + split.end()
        calls: list[list[str]] = []
        for part in parts:
            if isinstance(part, CallBegun):
                calls.append([part.name, ""])
            elif isinstance(part, CallArguments):
                calls[part.index][1] += part.text
        assert split.called, text
        assert parallel or len(calls) == 1
        for name, arguments in calls:
            assert set(json.loads(arguments)) <= set(SCHEMAS[name]["properties"])  # type: ignore[call-overload]
    assert made or thinks == "may"


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_calls_that_are_made_keep_to_strict_schemas(
    compiler: xgrammar.GrammarCompiler, form: Any, thinks: bool
) -> None:
    use = ToolUse((), SCHEMAS, free=False, required=False, parallel=True, form=form)
    held = held_to(use, None, thinks=thinks, inside=False)
    assert held is not None
    grammar = compiler.compile_structural_tag(held.text)
    for text, right in (
        ("Hello", True),
        (form.write([("f", '{"a": 1, "b": "x"}'), ("g", "{}")]), True),
        (form.write([("f", '{"a": "x"}')]), False),
        (form.write([("h", "{}")]), False),
    ):
        for before in ("", "<think>hm</think>\n\n") if thinks else ("",):
            matcher = xgrammar.GrammarMatcher(grammar)
            assert (matcher.accept_string(before + text) and matcher.is_completed()) == right, before + text


@pytest.mark.parametrize(
    ("kind", "text", "good"),
    [
        (ConstraintKind.JSON_OBJECT, "", '{"a": 1}'),
        (
            ConstraintKind.JSON_SCHEMA,
            '{"type": "object", "properties": {"a": {"type": "integer"}}}',
            '{"a": 1}',
        ),
        (ConstraintKind.REGEX, "[0-9]+!", "42!"),
        (ConstraintKind.GRAMMAR, 'root ::= "yes" | "no"', "yes"),
    ],
)
def test_a_form_of_the_answer_beside_tools_and_reasoning(
    compiler: xgrammar.GrammarCompiler, kind: ConstraintKind, text: str, good: str
) -> None:
    answer = Constraint(kind, text)
    assert held_to(None, answer, thinks=False, inside=False) is answer
    form = FORMATS["hermes"]
    use = ToolUse((), SCHEMAS, free=True, required=False, parallel=True, form=form)
    call = form.write([("g", "{}")])
    for tools, thinks, inside in (
        (None, True, False),
        (None, True, True),
        (use, False, False),
        (use, True, True),
    ):
        held = held_to(tools, answer, thinks=thinks, inside=inside)
        assert held is not None
        grammar = compiler.compile_structural_tag(held.text)
        before = "" if not thinks else "hm</think>\n\n" if inside else "<think>hm</think>\n\n"
        for said, right in ((good, True), (call, tools is not None), ("Hello", False)):
            matcher = xgrammar.GrammarMatcher(grammar)
            assert (matcher.accept_string(before + said) and matcher.is_completed()) == right, before + said
