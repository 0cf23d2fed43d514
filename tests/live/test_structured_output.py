"""Structured output over HTTP, with the official client and the demo model, prefilled here and there."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = [pytest.mark.live, pytest.mark.model]

SHORT: Any = [{"role": "user", "content": "Give me an example."}]
LONG: Any = [{"role": "user", "content": "Consider this. " + "one two three four. " * 12 + "An example?"}]


class Pet(BaseModel):
    name: str = Field(max_length=12)
    kind: Literal["cat", "dog"]


class Owner(BaseModel):
    pets: list[Pet] = Field(min_length=1, max_length=2)
    age: int = Field(ge=0, le=120)
    note: str | None = Field(max_length=20)


def schema(number: int) -> dict[str, Any]:
    """Sixteen that differ, so that each is compiled."""
    parts: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 8 + number},
        {"type": "integer", "minimum": -number, "maximum": 10 * number},
        {"enum": ["red", "green", number]},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        {"anyOf": [{"type": "null"}, {"const": f"c{number}"}]},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "string", "pattern": "^[a-z]{2}-[0-9]{2}$"},
        {"$ref": "#/$defs/d"},
    ]
    chosen = {f"p{place}": parts[(number + place) % len(parts)] for place in range(3)}
    return {
        "$defs": {"d": {"type": "object", "properties": {"k": parts[2]}, "required": ["k"]}},
        "type": "object",
        "properties": chosen,
        "required": list(chosen),
        "additionalProperties": False,
    }


def run(
    demo_fleet: dict[str, Any], main: Callable[[openai.AsyncOpenAI, str], Coroutine[Any, Any, None]]
) -> None:
    async def with_client() -> None:
        async with openai.AsyncOpenAI(
            base_url=demo_fleet["url"], api_key="none", max_retries=0, timeout=240
        ) as client:
            await main(client, str(demo_fleet["model"]))

    asyncio.run(with_client())


@pytest.mark.parametrize("messages", [SHORT, LONG], ids=["short", "long"])
def test_a_pydantic_model_comes_back(demo_fleet: dict[str, Any], messages: Any) -> None:
    async def main(client: openai.AsyncOpenAI, model: str) -> None:
        answer = await client.chat.completions.parse(
            model=model, messages=messages, response_format=Owner, max_tokens=200, seed=4
        )
        owner = answer.choices[0].message.parsed
        assert owner is not None
        assert 1 <= len(owner.pets) <= 2

    run(demo_fleet, main)


def test_sixteen_schemas_at_once_whole_and_streamed(demo_fleet: dict[str, Any]) -> None:
    async def main(client: openai.AsyncOpenAI, model: str) -> None:
        async def one(number: int) -> None:
            form: Any = {
                "type": "json_schema",
                "json_schema": {"name": f"n{number}", "schema": schema(number), "strict": True},
            }
            asked: Any = {
                "model": model,
                "messages": LONG if number % 2 else SHORT,
                "response_format": form,
                "max_tokens": 250,
                "seed": number,
            }
            answer = await client.chat.completions.create(**asked)
            text = answer.choices[0].message.content
            if answer.choices[0].finish_reason == "stop":
                jsonschema.validate(json.loads(text), schema(number))
            streamed = "".join(
                [
                    chunk.choices[0].delta.content or ""
                    async for chunk in await client.chat.completions.create(stream=True, **asked)
                ]
            )
            # Sums of floating-point numbers differ by who else is in the batch: the form does not.
            jsonschema.validate(json.loads(streamed), schema(number))

        await asyncio.gather(*(one(number) for number in range(1, 17)))

    run(demo_fleet, main)


def test_regular_expressions_choices_grammars_and_any_object(demo_fleet: dict[str, Any]) -> None:
    async def main(client: openai.AsyncOpenAI, model: str) -> None:
        async def text(**extra: Any) -> str:
            answer = await client.completions.create(
                model=model, prompt="An answer:", max_tokens=120, seed=2, extra_body=extra
            )
            assert answer.choices[0].finish_reason == "stop"
            return answer.choices[0].text

        assert re.fullmatch(r"[A-Z]{3}-\d{4}", await text(guided_regex=r"[A-Z]{3}-\d{4}"))
        assert await text(guided_choice=["über", 'quo"te', "line\nend"]) in ("über", 'quo"te', "line\nend")
        grammar = 'root ::= "a" b "c"\nb ::= "b" | "bb"'
        assert await text(structured_outputs={"grammar": grammar}) in ("abc", "abbc")
        assert await text(guided_regex="x{5}", ignore_eos=True, min_tokens=50) == "xxxxx"
        small = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
        assert json.loads(
            await text(guided_json=small, ignore_eos=True, skip_special_tokens=False)
        ).keys() == {"ok"}

    run(demo_fleet, main)


def test_bad_ones_among_good_ones(demo_fleet: dict[str, Any]) -> None:
    """Each bad one is 400 with its field, each good one an answer."""
    bad: list[dict[str, Any]] = [{"guided_regex": "(" * (n + 1)} for n in range(10)]
    bad += [{"guided_grammar": f'root ::= "a" r{n}'} for n in range(10)]
    bad += [{"guided_json": {"type": f"nope{n}"}} for n in range(10)]
    bad += [{"guided_json": {"type": "object", "not": {"const": n}}} for n in range(10)]
    bad += [{"structured_outputs": {"structural_tag": {"format": {"type": f"x{n}"}}}} for n in range(5)]
    bad += [{"guided_json": {"$ref": f"#/$defs/{n}"}} for n in range(5)]
    assert len(bad) == 50

    async def main(client: openai.AsyncOpenAI, model: str) -> None:
        async def refused(extra: dict[str, Any], messages: Any) -> None:
            with pytest.raises(openai.BadRequestError) as error:
                await client.chat.completions.create(
                    model=model, messages=messages, max_tokens=5, extra_body=extra
                )
            assert str(error.value.param).startswith(next(iter(extra)))

        async def answered(number: int) -> None:
            answer = await client.chat.completions.create(
                model=model,
                messages=SHORT,
                max_tokens=9,
                extra_body={"guided_regex": f"y{{{number % 5 + 1}}}"},
            )
            assert answer.choices[0].message.content == "y" * (number % 5 + 1)

        ways: list[Any] = []
        for number, extra in enumerate(bad):
            ways.append(refused(extra, LONG if number % 2 else SHORT))
            ways.append(answered(number))
        await asyncio.gather(*ways)

    run(demo_fleet, main)
