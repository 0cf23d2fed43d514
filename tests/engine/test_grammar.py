"""What a constraint lets through, token by token, for a vocabulary of bytes."""

from __future__ import annotations

import asyncio
import json
import random
import re

import numpy as np
import pytest

from engine.bounds import GrammarSettings
from engine.grammar import Grammars, Matcher, Vocabulary
from fleet.errors import BadRequest, Internal
from fleet.request import Constraint, ConstraintKind

END = 256
BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), b"", b"ab", b'{"'), (END,), 259)
"""One token a byte, an end token, two longer ones; not a multiple of 32."""


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(BYTES, GrammarSettings())


def allowed(matcher: Matcher) -> set[int]:
    mask = np.full((2, -(-matcher.vocabulary // 32)), -1, dtype=np.int32)
    matcher.fill(mask, 1)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8)[1], bitorder="little")).tolist())


def write(matcher: Matcher, chance: random.Random, most: int = 3000) -> bytes | None:
    """Random tokens to the end; None when it takes too many. What closes is likelier than what opens."""
    text = b""
    for _ in range(most):
        choice = sorted(allowed(matcher))
        ends = [token for token in choice if token in (*b'"]}', END)]
        plain = [token for token in choice if token < 128 or token == END]
        token = chance.choice(ends if ends and chance.random() < 0.3 else plain or choice)
        assert matcher.accept(token)
        if matcher.finished:
            return text
        text += BYTES.pieces[token]
    return None


def test_only_what_the_constraint_allows_comes_next(grammars: Grammars) -> None:
    matcher = asyncio.run(grammars.matcher(Constraint(ConstraintKind.REGEX, "(ab|ac)d?")))
    assert allowed(matcher) == {ord("a"), BYTES.pieces.index(b"ab")}
    assert not matcher.accept(ord("x"))
    assert allowed(matcher) == {ord("a"), BYTES.pieces.index(b"ab")}
    assert matcher.accept(ord("a"))
    assert allowed(matcher) == {ord("b"), ord("c")}
    assert matcher.accept(ord("c"))
    assert allowed(matcher) == {ord("d"), END}
    assert not matcher.finished
    assert matcher.accept(END)
    assert matcher.finished


def test_replay_is_the_same_state(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    whole = asyncio.run(grammars.matcher(constraint))
    chance, tokens = random.Random(5), []
    for _ in range(40):
        tokens.append(chance.choice(sorted(allowed(whole) - {END}) or [END]))
        assert whole.accept(tokens[-1])
        if whole.finished:
            break
        again = asyncio.run(grammars.matcher(constraint, tokens))
        assert allowed(again) == allowed(whole)


def test_tokens_that_do_not_fit_are_no_beginning(grammars: Grammars) -> None:
    with pytest.raises(Internal, match="token 1"):
        asyncio.run(grammars.matcher(Constraint(ConstraintKind.REGEX, "abc"), [97, 97]))


def test_any_json_object(grammars: Grammars) -> None:
    seen = set()
    for seed in range(30):
        matcher = asyncio.run(grammars.matcher(Constraint(ConstraintKind.JSON_OBJECT)))
        text = write(matcher, random.Random(seed))
        if text is not None:
            value = json.loads(text)
            assert isinstance(value, dict)
            seen |= {type(item) for item in value.values()}
    assert len(seen) >= 3, "free values of several types"


def test_whitespace_ends(grammars: Grammars) -> None:
    """A model that loves spaces must come to a point: no endless run, no answer of blanks."""
    for constraint in (
        Constraint(ConstraintKind.JSON_OBJECT),
        Constraint(ConstraintKind.JSON_SCHEMA, '{"type":"array","items":{"type":"integer"},"minItems":2}'),
    ):
        matcher = asyncio.run(grammars.matcher(constraint))
        run = longest = 0
        for _ in range(200):
            choice = allowed(matcher)
            blanks = choice & set(b"\n\t\r")  # a space may as well be a string's
            closing = [token for token in (*b'"]}', *sorted(choice)) if token in choice]
            token = min(blanks) if blanks else closing[0]
            assert matcher.accept(token)
            run = run + 1 if blanks else 0
            longest = max(longest, run)
            if matcher.finished:
                break
        assert matcher.finished
        assert longest <= 2


def test_grammars_and_regular_expressions(grammars: Grammars) -> None:
    for pattern in (r"[a-f]{3}-\d{1,4}", r"(yes|no|maybe)", r"\w+@\w+\.(com|org)", "x{2,}y?"):
        matcher = asyncio.run(grammars.matcher(Constraint(ConstraintKind.REGEX, pattern)))
        for seed in range(5):
            text = write(
                asyncio.run(grammars.matcher(Constraint(ConstraintKind.REGEX, pattern))), random.Random(seed)
            )
            assert text is None or re.fullmatch(pattern, text.decode(), re.ASCII), text
        assert not matcher.finished
    ebnf = 'root ::= item ("," item)*\nitem ::= "cat" | "dog" [0-9]'
    for seed in range(10):
        text = write(
            asyncio.run(grammars.matcher(Constraint(ConstraintKind.GRAMMAR, ebnf))), random.Random(seed)
        )
        assert text is not None
        assert re.fullmatch(r"(cat|dog\d)(,(cat|dog\d))*", text.decode())


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (Constraint(ConstraintKind.REGEX, "["), "regular expression|Unclosed"),
        (Constraint(ConstraintKind.GRAMMAR, "root ::="), "EBNF"),
        (Constraint(ConstraintKind.GRAMMAR, 'a ::= "x"'), "root"),
        (Constraint(ConstraintKind.JSON_SCHEMA, '{"type":"nope"}'), "nope"),
        (Constraint(ConstraintKind.STRUCTURAL_TAG, "{}"), "format"),
        (Constraint(ConstraintKind.REGEX, "a" * 1025), "engine.grammar.max_regex_characters"),
        (Constraint(ConstraintKind.GRAMMAR, "#" * 16385), "engine.grammar.max_grammar_characters"),
        (Constraint(ConstraintKind.JSON_SCHEMA, '"' + "a" * 65536), "engine.grammar.max_schema_characters"),
    ],
)
def test_what_cannot_be_compiled_says_why(grammars: Grammars, constraint: Constraint, said: str) -> None:
    with pytest.raises(BadRequest, match=said) as refused:
        asyncio.run(grammars.matcher(constraint))
    assert "/cpp/" not in refused.value.message


def test_the_cache_is_bounded_and_used() -> None:
    async def main() -> None:
        grammars = Grammars(BYTES, GrammarSettings(cache_entries=3))
        first = Constraint(ConstraintKind.REGEX, "first")
        for pattern in ("a", "b", "c", "d"):
            await grammars.matcher(first)
            await grammars.matcher(Constraint(ConstraintKind.REGEX, pattern))
            assert grammars.cached <= 3
        small = Grammars(BYTES, GrammarSettings(cache_bytes=1))
        await small.matcher(first)
        assert (small.cached, small.cached_bytes, small.compiling) == (0, 0, 0)

    asyncio.run(main())


def test_the_same_constraint_is_compiled_once_for_all_who_ask() -> None:
    async def main() -> None:
        grammars = Grammars(BYTES, GrammarSettings())
        constraint = Constraint(ConstraintKind.REGEX, ".{0,30}x.{0,30}")
        tasks = [asyncio.create_task(grammars.matcher(constraint)) for _ in range(8)]
        await asyncio.sleep(0)
        assert grammars.compiling <= 1
        tasks[0].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(done[0], asyncio.CancelledError)
        assert all(isinstance(matcher, Matcher) for matcher in done[1:])
        assert len({id(matcher) for matcher in done[1:]}) == 7

    asyncio.run(main())


def test_one_that_takes_too_long_is_refused_and_left_to_end() -> None:
    async def main() -> None:
        grammars = Grammars(BYTES, GrammarSettings(compile_s=0.001, threads=1))
        slow = Constraint(
            ConstraintKind.GRAMMAR,
            "root ::= " + " | ".join(["a b a"] * 1500) + "\na ::= [a-z]* b\nb ::= [a-z]*",
        )
        with pytest.raises(BadRequest, match=r"engine\.grammar\.compile_s"):
            await grammars.matcher(slow)
        with pytest.raises(BadRequest, match=r"engine\.grammar\.compile_s"):
            await grammars.matcher(slow)
        assert grammars.compiling == 1
        async with asyncio.timeout(120):
            while grammars.compiling:
                await asyncio.sleep(0.02)
        await grammars.matcher(slow)

    asyncio.run(main())


def tagged(schema: dict[str, object], **beside: object) -> Constraint:
    tag = {"type": "tag", "begin": "<call>", "end": "</call>"}
    tag["content"] = {"type": "json_schema", "json_schema": schema, **beside}  # type: ignore[assignment]
    form = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag]}
    text = json.dumps({"type": "structural_tag", "format": form})
    return Constraint(ConstraintKind.STRUCTURAL_TAG, text)


def test_schemas_in_tagged_parts_hold_like_any(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "minLength": 3, "maxLength": 5}},
        "required": ["a"],
    }
    for seed in range(40):
        matcher = asyncio.run(grammars.matcher(tagged(schema)))
        for byte in b"free text,\ttabs and all <call>":
            assert matcher.accept(byte)
        text, chance = b"", random.Random(seed)
        while not text.endswith(b"</call>"):
            choice = sorted(allowed(matcher) - {END})
            token = chance.choice([t for t in choice if t in (*b'"}',) and chance.random() < 0.4] or choice)
            assert matcher.accept(token)
            text += BYTES.pieces[token]
        value = json.loads(text.removesuffix(b"</call>").decode("utf-8", "replace"))
        assert 3 <= len(value["a"]) <= 5


def test_a_schema_that_is_not_strict_falls_back_to_any_object(grammars: Grammars) -> None:
    hopeless = {"type": "object", "not": {"required": ["a"]}}
    with pytest.raises(BadRequest, match="not is not supported"):
        asyncio.run(grammars.matcher(tagged(hopeless)))
    matcher = asyncio.run(grammars.matcher(tagged(hopeless, strict=False)))
    for byte in b'<call>{"any": [1]}</call>':
        assert matcher.accept(byte)
    matcher = asyncio.run(grammars.matcher(tagged(hopeless, strict=False)))
    assert not all(matcher.accept(byte) for byte in b"<call>[]")
