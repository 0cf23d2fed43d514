"""What of a constraint is compiled, and what is refused before: size and depth. Pure.

xgrammar cannot be interrupted while it compiles; bounded input is what bounds its time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

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
    return constraint


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
