"""Calls of tools by the demo model, whose template knows none: described to it, required, carried out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.live, pytest.mark.model]

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {
    "type": "function",
    "function": {
        "name": "set_clock",
        "parameters": {
            "type": "object",
            "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
            "required": ["hour"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "set_clock"}}
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture
def api(demo_fleet: dict[str, Any]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo_fleet["url"], api_key="none", max_retries=0, timeout=120) as client:
        yield client


def right(name: str, arguments: str) -> bool:
    value = json.loads(arguments)
    if name == "get_weather":
        return set(value) == {"city", "unit"} and value["unit"] in ("celsius", "fahrenheit")
    return name == "set_clock" and set(value) == {"hour"} and value["hour"] in range(24)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 5}], ids=["greedy", "hot"]
)
def test_a_demanded_call_is_made_streamed_or_not(
    api: openai.OpenAI, demo_fleet: dict[str, Any], choice: Any, sampling: Any
) -> None:
    fields: Any = {
        "model": demo_fleet["model"],
        "messages": ASK,
        "tools": [WEATHER, CLOCK],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 120,
        **sampling,
    }
    whole = api.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls or ()
    assert right(call.function.name, call.function.arguments)
    if choice is NAMED:
        assert call.function.name == "set_clock"
    with api.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    (same,) = streamed.message.tool_calls or ()
    assert streamed.finish_reason == "tool_calls"
    assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)


def test_a_round_trip(api: openai.OpenAI, demo_fleet: dict[str, Any]) -> None:
    messages = list(ASK)
    first = api.chat.completions.create(
        model=demo_fleet["model"],
        messages=messages,
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=200,
        temperature=0,
    )
    calls = first.choices[0].message.tool_calls or []
    assert calls
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"} for call in calls]
    second = api.chat.completions.create(
        model=demo_fleet["model"], messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=30
    )
    assert second.choices[0].message.content
    assert not second.choices[0].message.tool_calls
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > 20


def test_a_schema_that_cannot_be_enforced_is_refused_before_anything_runs(
    api: openai.OpenAI, demo_fleet: dict[str, Any]
) -> None:
    tool = json.loads(json.dumps(WEATHER))
    tool["function"]["strict"] = True
    tool["function"]["parameters"]["properties"]["city"] = {"type": "nonsense"}
    with pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(
            model=demo_fleet["model"], messages=ASK, tools=[tool], tool_choice="required"
        )
    assert refused.value.param == "tools"
