"""What an answer must form: read from a body, or refused with the field and the reason."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from fleet.errors import BadConstraint
from fleet.request import Constraint, ConstraintKind, FinishReason, Request
from router.openai.constraints import constraint_of
from router.openai.messages import ChatBody, decode
from router.openai.settings import HttpSettings

SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
SETTINGS = HttpSettings()


def wrapped(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", **fields}}}


def read(fields: dict[str, Any]) -> tuple[Constraint | None, str]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return constraint_of(decode(ChatBody, json.dumps(body).encode()), SETTINGS)


@pytest.mark.parametrize(
    ("fields", "kind", "text", "where"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        (wrapped(schema=SCHEMA, strict=True), "json_schema", SCHEMA, "response_format.json_schema.schema"),
        (wrapped(schema={}, strict=None), "json_schema", {}, "response_format.json_schema.schema"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"', "guided_grammar"),
        ({"guided_choice": ["a", 'b"\\\n', "a"]}, "grammar", r'root ::= "a" | "b\"\\\x0a"', "guided_choice"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "é"}}, "regex", "é", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["é"]}}, "grammar", 'root ::= "é"', "structured_outputs.choice"),
        (
            {"structured_outputs": {"grammar": "g", "regex": None}},
            "grammar",
            "g",
            "structured_outputs.grammar",
        ),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs.json_object"),
        (
            {"structured_outputs": {"structural_tag": '{"format":{}}', "disable_any_whitespace": False}},
            "structural_tag",
            {"format": {}},
            "structured_outputs.structural_tag",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            "structural_tag",
            {"type": "structural_tag", "format": {"type": "any_text"}},
            "response_format",
        ),
    ],
)
def test_every_way_to_ask(fields: dict[str, Any], kind: str, text: Any, where: str) -> None:
    constraint, field = read(fields)
    assert field == where
    assert constraint is not None
    assert constraint.kind is ConstraintKind(kind)
    if isinstance(text, str):
        assert constraint.text == text
    else:
        assert json.loads(constraint.text) == text


def test_properties_keep_their_order() -> None:
    constraint, _ = read({"guided_json": SCHEMA})
    assert constraint is not None
    assert list(json.loads(constraint.text)["properties"]) == ["z", "a"]


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
def test_nothing_asked(fields: dict[str, Any]) -> None:
    assert read(fields) == (None, "")


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json_object"}, "response_format", "object"),
    ({"response_format": []}, "response_format", "object"),
    ({"response_format": {}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": None}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": 5}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": ["text"]}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "JSON"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    (
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        "response_format.json_schema",
        "missing",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": None}},
        "response_format.json_schema",
        "object",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": []}},
        "response_format.json_schema",
        "object",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": "{}"}},
        "response_format.json_schema",
        "object",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        "response_format.json_schema.name",
        "characters",
    ),
    (wrapped(), "response_format.json_schema.schema", "missing"),
    (wrapped(schema=None), "response_format.json_schema.schema", "JSON schema"),
    (wrapped(schema=True), "response_format.json_schema.schema", "JSON schema"),
    (wrapped(schema="{}"), "response_format.json_schema.schema", "JSON schema"),
    (wrapped(schema=[SCHEMA]), "response_format.json_schema.schema", "JSON schema"),
    (wrapped(schema=SCHEMA, name=""), "response_format.json_schema.name", "characters"),
    (wrapped(schema=SCHEMA, name=5), "response_format.json_schema.name", "characters"),
    (wrapped(schema=SCHEMA, name="a b"), "response_format.json_schema.name", "characters"),
    (wrapped(schema=SCHEMA, name="a" * 65), "response_format.json_schema.name", "characters"),
    (wrapped(schema=SCHEMA, strict="yes"), "response_format.json_schema.strict", "true or false"),
    (wrapped(schema=SCHEMA, description=5), "response_format.json_schema.description", "string"),
    (wrapped(schema=deep(70)), "response_format.json_schema.schema", "http.max_schema_depth"),
    (wrapped(schema={"x": "y" * 65536}), "response_format.json_schema.schema", "http.max_schema_characters"),
    ({"guided_json": 5}, "guided_json", "got int"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_json": "[" * 100_000}, "guided_json", "JSON"),
    ({"guided_json": "[1]"}, "guided_json", "object"),
    ({"guided_json": '{"a":NaN}'}, "guided_json", "number"),
    ({"guided_regex": ""}, "guided_regex", "empty"),
    ({"guided_regex": 5}, "guided_regex", "str"),
    ({"guided_regex": "a" * 1025}, "guided_regex", "http.max_regex_characters"),
    ({"guided_grammar": "a" * 16385}, "guided_grammar", "http.max_grammar_characters"),
    ({"guided_grammar": {}}, "guided_grammar", "str"),
    ({"guided_choice": []}, "guided_choice", "list"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "empty"),
    ({"guided_choice": [1]}, "guided_choice[0]", "str"),
    ({"guided_choice": "ab"}, "guided_choice", "array"),
    ({"guided_choice": ["a"] * 1025}, "guided_choice", "http.max_choices"),
    ({"guided_choice": ["a" * 17000]}, "guided_choice", "http.max_grammar_characters"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "one of them"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "one of them"),
    ({"structured_outputs": {}}, "structured_outputs", "needs one"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "needs one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "one of them"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "regexp"),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs",
        "not supported",
    ),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "string"),
    ({"structured_outputs": {"json": []}}, "structured_outputs.json", "schema"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", "strings"),
    ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object", "true or false"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "JSON"),
    ({"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs.structural_tag", "object"),
]


def test_what_is_malformed_is_named(serve: Callable[..., Any]) -> None:
    async def main() -> None:
        async with serve(lambda request: [FinishReason.STOP]) as site:
            for fields, param, said in REFUSED:
                for response in (await site.chat(**fields), await site.complete(**fields)):
                    assert response.status_code == 400, (fields, response.text)
                    error = response.json()["error"]
                    assert error["param"] == param, (fields, error)
                    assert said in error["message"], (fields, error)
                    assert error["type"] == "invalid_request_error"
            assert site.spine.runs == [], "refused before anything ran"

    asyncio.run(main())


def test_the_constraint_travels_with_every_answer(serve: Callable[..., Any]) -> None:
    async def main() -> None:
        async with serve(lambda request: [FinishReason.STOP]) as site:
            assert (await site.chat(guided_regex="a+", n=2)).status_code == 200
            assert (await site.complete(prompt=["a", "b"], guided_regex="a+")).status_code == 200
            assert (await site.chat()).status_code == 200
            found = [run.request.constraint for run in site.spine.runs]
            assert found == [Constraint(ConstraintKind.REGEX, "a+")] * 4 + [None]

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_worker_cannot_compile_is_the_clients_fault(serve: Callable[..., Any], stream: bool) -> None:
    def script(request: Request) -> list[Any]:
        return [BadConstraint("the constraint cannot be compiled: Unclosed '['")]

    async def main() -> None:
        async with serve(script) as site:
            for fields, param in (
                ({"guided_regex": "["}, "guided_regex"),
                (wrapped(schema={"type": "nope"}), "response_format.json_schema.schema"),
            ):
                for response in (
                    await site.chat(stream=stream, **fields),
                    await site.complete(stream=stream, **fields),
                ):
                    assert response.status_code == 400
                    error = response.json()["error"]
                    assert (error["type"], error["param"]) == ("invalid_request_error", param)
                    assert "Unclosed" in error["message"]

    asyncio.run(main())
