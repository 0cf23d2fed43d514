"""Answers under a schema are valid by an independent validator; what cannot be enforced is refused."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.bounds import GrammarSettings
from engine.grammar import Grammars, Vocabulary
from engine.latency_runner import LatencyRunner
from engine.loop import Constrain, Engine
from engine.replica import load_replica
from engine.settings import EngineSettings
from engine.words import NewSequence, StepReport
from fleet.block_hash import HashKeys
from fleet.errors import BadConstraint, FleetError
from fleet.model_files import resolve
from fleet.request import Constraint, ConstraintKind, FinishReason, Sampling

END = 256
BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), (END,), 257)


def text(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


def number(**keywords: Any) -> dict[str, Any]:
    return {"type": "number", **keywords}


def integer(**keywords: Any) -> dict[str, Any]:
    return {"type": "integer", **keywords}


def array(items: Any, **keywords: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": 4, **keywords}


def thing(properties: dict[str, Any], **keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), **keywords}


A, B, N = text(maxLength=4), integer(minimum=0, maximum=99), {"type": "null"}
ATOMS = [
    A,
    B,
    N,
    {"type": "boolean"},
    number(minimum=-2, maximum=2),
    {"enum": ["x", 7, None, [1], {"k": 2.5}]},
]
CLOSED = {"additionalProperties": False}
LISTED = {"$ref": "#/$defs/list"}

SCHEMAS: list[Any] = [
    integer(minimum=3, exclusiveMinimum=1.2, maximum=4.5),
    integer(maximum=-3, exclusiveMaximum=5.5, minimum=-4),
    number(exclusiveMinimum=0, exclusiveMaximum=0.000002),
    number(minimum=5, maximum=5),
    number(exclusiveMinimum=-1e-7, exclusiveMaximum=1e-7),
    # type, alone and several
    *ATOMS,
    *({"type": name} for name in ("string", "integer", "number", "boolean", "null")),
    {"type": ["string", "null"], "maxLength": 3},
    {"type": ["integer", "string"], "minimum": 5, "maximum": 6, "pattern": "^a{2}$"},
    {"type": ["array", "null"], "items": B, "maxItems": 2},
    # enum and const
    *({"const": value} for value in ('a"\\\n\u00e9\x7f', 0, -1.5, True, None)),
    *({"const": value} for value in ([], {}, {"a": [1, {"b": None}]})),
    {"enum": ["red", "green"]},
    {"enum": [1, "1", True, None, 1.5]},
    {"type": "string", "enum": ["a", 1, None]},
    {"type": "integer", "enum": [1.5, 2, 3.0]},
    {"const": 3, "enum": [1, 2, 3]},
    # strings
    *(text(minLength=low, maxLength=high) for low, high in ((0, 0), (1, 1), (3, 5), (0, 40), (20, 30))),
    text(minLength=2),
    *(
        text(pattern=pattern)
        for pattern in (
            *("^[a-z]{3}$", "b+", "^(a|bc){2,3}$", r"^\d{3}-\d{4}$", r"^[^\s\"]{1,8}$", r"^\S+$", "^a+?$"),
            *("^.{2}$", "^(?:ab)?c*$", r"^[\w.]{1,9}@[a-z]{2,5}\.(com|org)$", "^a|b$", "é", r"^[А-я]{2}$"),
            *(r"^\"\\\n\t$", r"^\W$", r"^[\x00-\x1f]$", ""),
        )
    ),
    text(pattern="^a{2,4}$", minLength=2, maxLength=6),
    *(
        text(format=form)
        for form in ("date-time", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "duration", "password")
    ),
    # numbers
    *(integer(minimum=low, maximum=high) for low, high in ((0, 0), (-15, 127), (100, 99_999), (-7, -5))),
    integer(exclusiveMinimum=-3, exclusiveMaximum=3),
    integer(minimum=1.5, maximum=3.5),
    integer(minimum=1000),
    integer(maximum=-1000),
    integer(multipleOf=7),
    *(number(minimum=low, maximum=high) for low, high in ((0, 1), (-1.5, 2.25), (1e-3, 1e3))),
    number(exclusiveMinimum=0, exclusiveMaximum=1),
    number(minimum=0.5),
    {"minimum": 3, "maximum": 9},
    # arrays
    *(array(atom) for atom in ATOMS),
    array(B, minItems=2),
    array(B, minItems=3, maxItems=3),
    array(array(A, maxItems=2), minItems=1),
    array(True, maxItems=1),
    {"type": "array", "maxItems": 0},
    {"type": "array", "minItems": 1, "maxItems": 2},
    {"type": "array", "prefixItems": [A, B]},
    {"type": "array", "prefixItems": [A, B], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [A], "items": N, "minItems": 3, "maxItems": 4},
    {"type": "array", "prefixItems": [A], "minItems": 2, "maxItems": 2},
    {"items": B, "maxItems": 2},
    # objects
    thing({"a": A, "b": B}),
    thing({"a": A, "b": B}, required=["b"]),
    thing({"a": A, "b": B}, required=[]),
    thing({"a": A}, additionalProperties=False),
    thing({"a": A}, additionalProperties=B, maxProperties=3),
    thing({"a": B}, required=["a", "more"]),
    thing({"a": B}, required=["more"], additionalProperties=N),
    thing({'quote"d': A, "back\\slash": B, "new\nline": N, "\u00e9": A}),
    thing({"a": thing({"b": thing({"c": B})})}),
    thing(dict.fromkeys("abcdefghijkl", A), required=["a", "l"]),
    thing(dict.fromkeys("abcd", B), required=[], minProperties=2, maxProperties=3, **CLOSED),
    thing({"a": A, "never": False}, required=["a"]),
    {"type": "object", "maxProperties": 0},
    {"type": "object", "patternProperties": {"^a[a-z]{1,3}$": B}, "maxProperties": 3, **CLOSED},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]{2}$"}, "additionalProperties": B},
    {"type": "object", "required": ["q"], "properties": {"q": A}, "unevaluatedProperties": False},
    {"properties": {"a": B}, "required": ["a"]},
    # choices
    {"anyOf": [A, B]},
    {"anyOf": [thing({"a": A}), thing({"b": B}), N]},
    {"anyOf": [{"anyOf": [A, N]}, {"type": "boolean"}]},
    {"type": "string", "anyOf": [{"maxLength": 1}, {"pattern": "^zz$"}]},
    {"oneOf": [A, B]},
    {"oneOf": [thing({"kind": {"const": "a"}, "x": A}), thing({"kind": {"enum": ["b", "c"]}, "y": B})]},
    {"allOf": [thing({"a": A})]},
    {"anyOf": [False, B]},
    # references
    {"$defs": {"a": B}, "$ref": "#/$defs/a"},
    {"definitions": {"a": A}, **thing({"x": {"$ref": "#/definitions/a"}, "y": {"$ref": "#/definitions/a"}})},
    {"$defs": {"a/b~c d": B}, **thing({"x": {"$ref": "#/$defs/a~1b~0c%20d"}})},
    thing({"a": A, "b": {"$ref": "#/properties/a"}}),
    {"$defs": {"list": {"anyOf": [N, thing({"head": B, "tail": LISTED})]}}, "$ref": "#/$defs/list"},
    thing({"value": B, "children": array({"$ref": "#"}, maxItems=1)}),
    {"$defs": {"p": {"allOf": [{"$ref": "#/$defs/q"}]}, "q": A}, **thing({"x": {"$ref": "#/$defs/p"}})},
    # annotations, and what is no keyword
    {"title": "T", "description": "D", "default": 5, "$comment": "c", "unknown": {"not": {}}, **B},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/x", **A},
    thing({"not": A, "enum": B, "type": A, "$ref": N, "pattern": B}),
    # as pydantic writes a model
    {
        "$defs": {
            "Kind": {"enum": ["cat", "dog"], "title": "Kind", "type": "string"},
            "Pet": thing({"name": text(title="Name", maxLength=8), "kind": {"$ref": "#/$defs/Kind"}}),
        },
        **thing(
            {
                "pets": {"items": {"$ref": "#/$defs/Pet"}, "title": "Pets", "type": "array", "maxItems": 2},
                "note": {"anyOf": [text(maxLength=5), N], "default": None, "title": "Note"},
            },
            required=["pets"],
            title="Owner",
        ),
    },
]


def valid(schema: Any, answer: str) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(answer))


async def generate(
    engine: Engine,
    ends: Ends,
    prompts: Sequence[Sequence[int]],
    constraints: Sequence[Constraint],
    sampling: Sampling,
) -> tuple[list[list[int]], list[FinishReason]]:
    """All at once, to their ends."""
    matchers = await asyncio.gather(*(engine.matcher(constraint, ()) for constraint in constraints))
    for number_, (prompt, matcher) in enumerate(zip(prompts, matchers, strict=True)):
        keys = HashKeys(engine.fingerprint.digest(), engine.layout.block_size, "", "")
        engine.add(NewSequence(str(number_), tuple(prompt), sampling, keys, matcher=matcher))
    return await ends.all(len(prompts))


class Ends:
    """What an engine said, by sequence."""

    def __init__(self) -> None:
        self.drawn: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.changed = asyncio.Event()

    def __call__(self, report: StepReport) -> None:
        for drawn in report.drawn:
            self.drawn.setdefault(drawn.id, []).append(drawn.token)
        for end in report.finished:
            self.finished[end.id] = end.finish
            self.changed.set()

    async def all(self, count: int) -> tuple[list[list[int]], list[FinishReason]]:
        while len(self.finished) < count:
            self.changed.clear()
            await self.changed.wait()
        names = [str(n) for n in range(count)]
        return [self.drawn[name] for name in names], [self.finished[name] for name in names]


def toy_engine(constrain: Constrain | None) -> tuple[Engine, Ends]:
    ends = Ends()
    settings = EngineSettings(block_size=16, max_batch=16, max_step_tokens=512)
    return Engine(LatencyRunner.with_own_memory(8192, 16), settings, ends, constrain), ends


def test_every_answer_is_valid() -> None:
    """A model that draws anything at all."""
    assert len(SCHEMAS) >= 100

    async def main() -> None:
        engine, ends = toy_engine(Grammars(BYTES, GrammarSettings()).matcher)
        running = asyncio.create_task(engine.run())
        constraints = [Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)) for schema in SCHEMAS]
        prompts = [[place % 95 + 32, 65] for place in range(len(SCHEMAS))]
        tokens, finishes = await generate(
            engine, ends, prompts, constraints, Sampling(max_tokens=3000, seed=3)
        )
        running.cancel()
        engine.validate(idle=True)
        unfinished = []
        for schema, drawn, end in zip(SCHEMAS, tokens, finishes, strict=True):
            if end is FinishReason.LENGTH:
                unfinished.append(schema)
                continue
            assert drawn[-1] == END
            try:
                valid(schema, bytes(drawn[:-1]).decode())
            except ValueError as error:
                raise AssertionError(f"{schema}: {bytes(drawn)!r}") from error
        assert len(unfinished) < 3, unfinished

    asyncio.run(main())


REFUSED: list[tuple[Any, str]] = [
    (5, "object"),
    ([], "object"),
    ({"type": "nope"}, "nope"),
    ({"type": []}, "empty"),
    ({"type": 5}, "type"),
    ({"not": A}, "not is"),
    ({"if": A, "then": B}, "is not supported"),
    (thing({"a": {"dependentRequired": {}}}), "/properties/a"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": A}, "contains"),
    ({"type": "array", "minItems": 5, "maxItems": 3}, "minItems"),
    ({"type": "array", "minItems": -1}, "minItems"),
    ({"type": "array", "minItems": "1"}, "minItems"),
    (number(multipleOf=0.01), "multipleOf"),
    (integer(multipleOf=5, minimum=3), "multipleOf"),
    (integer(minimum="3"), "minimum"),
    (integer(minimum=1, exclusiveMinimum=True), "exclusiveMinimum"),
    (integer(minimum=5, maximum=3), "whole number"),
    (text(pattern="["), "cannot be read"),
    (text(pattern=5), "pattern"),
    (text(pattern="^(?!a)b"), "look-around"),
    (text(pattern=r"^(a)\1$"), "back reference"),
    (text(pattern=r"\bword"), "anchor"),
    (text(pattern="a^b"), "anchor"),
    (text(pattern="(?i)a"), "flags"),
    (text(pattern="a*", minLength=3), "beside a pattern"),
    (text(pattern="(ab?){1,5000}"), "repeats"),
    (text(pattern="a" * 1025), "max_regex_characters"),
    (text(format="idn-email"), "format"),
    (text(format="email", maxLength=20), "beside format"),
    (text(minLength=5, maxLength=3), "minLength"),
    ({"enum": []}, "no value"),
    ({"enum": 5}, "list"),
    ({"type": "integer", "const": "a"}, "no value"),
    ({"enum": ["a", "bbb"], "minLength": 2}, "beside enum"),
    (False, "false"),
    (thing({}, required=["a"], additionalProperties=False), "required"),
    (thing({"a": False}), "false"),
    ({"type": "object", "required": "a"}, "required"),
    ({"type": "object", "properties": []}, "properties"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    (thing({"a": A}, patternProperties={"^b": B}), "patternProperties"),
    ({"$ref": "http://example.com/x"}, "does not point"),
    ({"$ref": "#/$defs/nothing"}, "points to nothing"),
    ({"$ref": "#"}, "."),
    ({"$ref": 5}, "does not point"),
    ({"$defs": {"a": A}, "$ref": "#/$defs/a", "minLength": 2}, "beside \\$ref"),
    ({"anyOf": [A], "minLength": 3}, "beside anyOf"),
    ({"anyOf": []}, "list"),
    ({"oneOf": [integer(minimum=0), integer(maximum=9)]}, "exclude each other"),
    ({"allOf": [thing({"a": A}), thing({"b": B})]}, "allOf"),
    ({"minLength": 3, "minimum": 3}, "say which"),
    ({"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": 0.1000001}, "six decimals"),
    (thing({"a": {"type": "number", "minimum": 1e-9, "maximum": 2e-9}}), "six decimals"),
    ({"type": "number", "minimum": 5, "exclusiveMaximum": 5}, "six decimals"),
    ({"type": "integer", "minimum": 1.2, "maximum": 1.9}, "whole number"),
    ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "whole number"),
    (thing({f"p{n}": A for n in range(300)}, required=[]), "left out"),
    ({"anyOf": [{}] * 6000}, "parts"),
]


@pytest.mark.parametrize(("schema", "why"), REFUSED)
def test_what_cannot_be_enforced_is_refused_and_says_where(schema: Any, why: str) -> None:
    grammars = Grammars(BYTES, GrammarSettings())
    with pytest.raises(BadConstraint, match=why) as refused:
        asyncio.run(grammars.matcher(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))))
    assert "/cpp/" not in refused.value.message


def test_bad_ones_among_good_ones_harm_nobody() -> None:
    """Whatever the order: each bad one is refused, each good one answered, by one and the same engine."""
    bad = [Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)) for schema, _ in REFUSED[:32]]
    texts = {
        ConstraintKind.REGEX: ("[", "(", "*", "(?=a)", "x{3,1}", "(a|", r"\1"),
        ConstraintKind.GRAMMAR: (
            *("", "root ::=", 'a ::= "x"', "root ::= nothing"),
            *('root ::= "x', "root = [a-", "root ::= (("),
        ),
        ConstraintKind.STRUCTURAL_TAG: (
            *("{", "{}", '{"type":"structural_tag","format":{"type":"nope"}}'),
            '{"type":"structural_tag","format":{"type":"json_schema","json_schema":{"type":"nope"}}}',
            '{"type":"structural_tag","format":{"type":"regex","pattern":"["}}',
        ),
    }
    bad += [Constraint(kind, text_) for kind, some in texts.items() for text_ in some]
    bad.append(Constraint(ConstraintKind.JSON_SCHEMA, "{"))
    assert len(bad) >= 50
    good = [Constraint(ConstraintKind.REGEX, f"[ab]{{{n % 7 + 1}}}") for n in range(len(bad))]

    async def main() -> None:
        engine, ends = toy_engine(Grammars(BYTES, GrammarSettings()).matcher)
        running = asyncio.create_task(engine.run())

        async def refused(constraint: Constraint) -> None:
            with pytest.raises(BadConstraint):
                await engine.matcher(constraint, ())

        ways: list[Any] = [refused(constraint) for constraint in bad]
        for place in range(0, len(ways) * 2, 2):
            ways.insert(place, asyncio.sleep(0))
        prompts = [[40 + n % 50] for n in range(len(good))]
        answers, *_ = await asyncio.gather(
            generate(engine, ends, prompts, good, Sampling(max_tokens=20, seed=1)),
            *ways,
            *map(refused, reversed(bad)),
        )
        running.cancel()
        engine.validate(idle=True)
        for constraint, tokens, end in zip(good, *answers, strict=True):
            assert end is FinishReason.STOP
            assert re.fullmatch(constraint.text, bytes(tokens[:-1]).decode())

    asyncio.run(main())


def test_without_a_vocabulary_constraints_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(FleetError, match="cannot be constrained"):
            await toy_engine(None)[0].matcher(Constraint(ConstraintKind.JSON_OBJECT), ())

    asyncio.run(main())


@pytest.mark.model
def test_a_real_model_in_a_batch_of_sixteen() -> None:
    """Different constraints and temperatures side by side."""
    picked: list[Any] = [
        schema for schema in SCHEMAS if isinstance(schema, dict) and len(json.dumps(schema)) > 60
    ]
    schemas = [*picked[:: max(1, len(picked) // 14)][:14], SCHEMAS[-1], SCHEMAS[8]][:16]
    regexes = [r"\d{4}-\d{2}-\d{2}", "(yes|no), because [a-z ]{5,20}"]
    constraints = [Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)) for schema in schemas[:14]]
    constraints += [Constraint(ConstraintKind.REGEX, regex) for regex in regexes]
    assert len(constraints) == 16

    async def main() -> None:
        ends = Ends()
        settings = EngineSettings(kv_memory_bytes=256 << 20, max_batch=16, max_step_tokens=512)
        engine, _ = await load_replica(
            "smollm2", settings, lambda blocks, size: np.zeros((blocks, size), np.uint8), ends
        )
        tokenizer = Tokenizer.from_file(str(resolve("smollm2").folder / "tokenizer.json"))
        running = asyncio.create_task(engine.run())
        asked = "<|im_start|>user\nGive me an example.<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer.encode(asked).ids
        sampling = Sampling(max_tokens=150, temperature=1.2, top_p=0.95, seed=11)
        answers, finishes = await generate(engine, ends, [prompt] * 16, constraints, sampling)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.close()
        whole = 0
        for constraint, tokens, finish in zip(constraints, answers, finishes, strict=True):
            if finish is not FinishReason.STOP:
                continue
            whole += 1
            answer = tokenizer.decode(tokens, skip_special_tokens=True)
            if constraint.kind is ConstraintKind.REGEX:
                assert re.fullmatch(constraint.text, answer), answer
            else:
                valid(json.loads(constraint.text), answer)
        assert whole >= 12

    asyncio.run(main())
