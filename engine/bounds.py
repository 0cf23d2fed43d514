"""What of a constraint is compiled, and what is refused before: size and depth. Pure.

xgrammar cannot be interrupted while it compiles; bounded input is what bounds its time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from engine.regex import check_regex
from engine.schema import enforceable
from fleet.errors import BadConstraint
from fleet.request import Constraint, ConstraintKind


@dataclass(frozen=True, slots=True)
class GrammarSettings:
    """Constraints on what is generated: `response_format`, tools, regular expressions and grammars."""

    max_schema_characters: int = 65536
    """Longest JSON schema or structural tag."""
    max_regex_characters: int = 1024
    """Longest regular expression, also of a pattern in a schema: compile time grows faster than they do."""
    max_grammar_characters: int = 16384
    """Longest EBNF grammar."""
    compile_s: float = 10.0
    """Longest a compilation may take, and be waited for before, seconds. Its thread runs on to its end, but
    after everything else."""
    threads: int = 2
    """Compilations at a time."""
    cache_entries: int = 256
    """Compiled constraints kept."""
    cache_bytes: int = 256 << 20
    """Memory of those kept, as xgrammar counts it."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) <= 0:
                raise ValueError(f"{item.name} is {getattr(self, item.name)}; a number above 0 is needed")


def prepare(constraint: Constraint, settings: GrammarSettings) -> Constraint:
    """What is to be compiled. BadConstraint: which limit it is above, or what of it cannot be enforced."""
    kind, text = constraint.kind, constraint.text
    _length(kind, text, settings)
    match kind:
        case ConstraintKind.REGEX:
            check_regex(text)
        case ConstraintKind.JSON_SCHEMA:
            return Constraint(kind, _written(_schema(_read(text), settings)))
        case ConstraintKind.STRUCTURAL_TAG:
            return Constraint(kind, _written(_tag(_read(text), settings)))
    return constraint


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadConstraint(f"the constraint is not JSON: {error}") from error


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _schema(schema: Any, settings: GrammarSettings) -> Any:
    for pattern in _patterns(schema):
        _length(ConstraintKind.REGEX, pattern, settings)
    return enforceable(schema)


def _patterns(value: Any) -> Iterator[str]:
    """All that may be a pattern in a schema; a property of that name costs nothing."""
    layer = [value]
    while layer:
        for item in layer:
            if isinstance(item, dict):
                yield from (v for k, v in item.items() if k == "pattern" and isinstance(v, str))
                yield from (
                    item["patternProperties"] if isinstance(item.get("patternProperties"), dict) else ()
                )
        layer = [inner for item in layer for inner in _inside(item)]


def _inside(item: Any) -> Iterable[Any]:
    return item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()


def _tag(value: Any, settings: GrammarSettings) -> Any:
    """The schemas, expressions and grammars in a structural tag are bounded as those by themselves."""
    if isinstance(value, list):
        return [_tag(item, settings) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get("type"):
        case "json_schema":
            return _tagged_schema(dict(value), settings)
        case "regex" if isinstance(pattern := value.get("pattern"), str):
            _length(ConstraintKind.REGEX, pattern, settings)
            check_regex(pattern)
            return value
        case "grammar" if isinstance(grammar := value.get("grammar"), str):
            _length(ConstraintKind.GRAMMAR, grammar, settings)
            return value
    return {name: _tag(item, settings) for name, item in value.items()}


def _length(kind: ConstraintKind, text: str, settings: GrammarSettings) -> None:
    name = {
        ConstraintKind.REGEX: "max_regex_characters",
        ConstraintKind.GRAMMAR: "max_grammar_characters",
    }.get(kind, "max_schema_characters")
    limit: int = getattr(settings, name)
    if len(text) > limit:
        raise BadConstraint(
            f"the constraint has {len(text)} characters; the limit is {limit} (setting engine.grammar.{name})"
        )


def _tagged_schema(value: dict[str, Any], settings: GrammarSettings) -> Any:
    """`"strict": false` beside a schema says: any object where the schema cannot be enforced."""
    strict = value.pop("strict", True)
    try:
        value["json_schema"] = _schema(value.get("json_schema"), settings)
    except BadConstraint:
        if strict is not False:
            raise
        value["json_schema"] = {"type": "object"}
    return value
