"""From a JSON schema to one that xgrammar enforces exactly, or the reason why there is none. Pure.

xgrammar ignores, with a line in a log, what it does not know: `not`, keywords beside `$ref` or `anyOf`,
overlaps in `oneOf`, lengths beside a pattern, JSON's escapes in what a pattern writes. Here what it does
right is kept, what can be said otherwise is said so, and all else is refused: nobody gets an answer
that their schema forbids. What is allowed may be less than what the schema allows, never more: properties
come in the order of the schema, and none that it does not name unless it says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from engine.regex import any_string, json_pattern
from fleet.errors import BadConstraint

Schema = dict[str, Any]

_NUMERIC = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
_OF_TYPE: dict[str, frozenset[str]] = {
    "object": frozenset(
        [
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
            "unevaluatedProperties",
        ]
    ),
    "array": frozenset(
        ["items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"]
    ),
    "string": frozenset(["minLength", "maxLength", "pattern", "format"]),
    "number": _NUMERIC,
    "integer": _NUMERIC,
    "boolean": frozenset(),
    "null": frozenset(),
}
_ASSERTIONS = frozenset(["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"]).union(
    *_OF_TYPE.values()
)
_NOT_ENFORCED = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "$dynamicRef",
        "$recursiveRef",
    ]
)
_FORMATS = frozenset(
    [
        "date",
        "time",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
        "json-pointer",
        "relative-json-pointer",
    ]
)
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_FORMATS_AS_PATTERNS = {"ipv4": rf"^(?:{_BYTE}\.){{3}}{_BYTE}$"}
"""xgrammar's own allows leading zeros."""
_FORMATS_NOT_ENFORCED = frozenset(["regex", "iri", "iri-reference", "idn-email", "idn-hostname"])
"""All others are no formats of JSON Schema: annotations."""

_MOST_NODES = 5_000
_MOST_OPTIONAL = 256
"""Properties of an object that may be left out: compile time grows with their square."""
_MOST_COUNTED = 64
"""The same where their number is bounded too: with its cube."""


def enforceable(schema: Any) -> Schema:
    """BadConstraint says where in the schema there is what cannot be enforced."""
    walk = _Walk(schema)
    try:
        root = walk.node(schema, "")
        if walk.definitions:
            root = {**root, "$defs": walk.definitions}
    except RecursionError as error:
        raise BadConstraint("the schema is nested too deeply") from error
    return root


class _Walk:
    def __init__(self, root: Any) -> None:
        self.root = root
        self.definitions: dict[str, Schema] = {}
        """Of all that is referred to."""
        self._names: dict[str, str] = {}
        self._nodes = 0

    def node(self, schema: Any, where: str) -> Schema:
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            raise BadConstraint(f"the schema has more than {_MOST_NODES} parts; make it smaller")
        if schema is True:
            return {}
        if schema is False:
            raise _refused(where, "false allows nothing")
        if not isinstance(schema, dict):
            raise _refused(where, f"a schema must be an object, not {_shown(schema)}")
        for name in _NOT_ENFORCED & schema.keys():
            raise _refused(where, f"{name} is not supported; leave it out or say it otherwise")
        said = {name: value for name, value in schema.items() if name in _ASSERTIONS}
        if "$ref" in said:
            _alone(said, where, "$ref")
            return {"$ref": self._ref(said["$ref"], where)}
        if "allOf" in said:
            _alone(said, where, "allOf")
            if not isinstance(said["allOf"], list) or len(said["allOf"]) != 1:
                raise _refused(where, "allOf must have one part: several at once are not supported")
            return self.node(said["allOf"][0], f"{where}/allOf/0")
        for name in ("anyOf", "oneOf"):
            if name in said:
                _alone(said, where, name, "type")
                return {"anyOf": list(self._branches(said, name, where))}
        if "enum" in said or "const" in said:
            _alone(said, where, "enum", "const", "type")
            return {"enum": _values(said, where)}
        types = _types(said, where)
        if types is None:
            return {}
        made = [self._typed(kind, said, where) for kind in types]
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _ref(self, pointer: Any, where: str) -> str:
        target = self._target(pointer, where)
        if pointer not in self._names:
            name = self._names[pointer] = f"d{len(self._names)}"
            self.definitions[name] = {}  # holds its place: it may refer to itself
            self.definitions[name] = self.node(target, str(pointer)[1:])
        return f"#/$defs/{self._names[pointer]}"

    def _target(self, pointer: Any, where: str) -> Any:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise _refused(where, f"$ref {_shown(pointer)} does not point into this schema: #/… does")
        found = self.root
        for part in filter(None, pointer[1:].split("/")):
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise _refused(where, f"$ref {_shown(pointer)} points to nothing")
        return found

    def _branches(self, said: Schema, name: str, where: str) -> Iterator[Schema]:
        branches = said[name]
        if not isinstance(branches, list) or not branches:
            raise _refused(where, f"{name} must be a list of schemas")
        outer = _type_names(said, where) if "type" in said else None
        if name == "oneOf":
            self._check_disjoint(branches, where)
        for place, branch in enumerate(branches):
            here = f"{where}/{name}/{place}"
            if branch is False:
                continue
            if outer is not None:
                seen = self._seen(branch)
                inner = _type_names(seen, here) if "type" in seen else None
                if inner is None and "$ref" not in branch and isinstance(branch, dict):
                    branch = {**branch, "type": said["type"]}
                elif inner is None or not set(inner) <= set(outer):
                    raise _refused(here, f"its type and the type beside {name} do not go together")
            yield self.node(branch, here)

    def _seen(self, schema: Any) -> Schema:
        """A branch itself, or what it refers to."""
        for _ in range(8):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._target(schema["$ref"], "")
        return schema if isinstance(schema, dict) else {}

    def _check_disjoint(self, branches: list[Any], where: str) -> None:
        seen = [self._seen(branch) for branch in branches]
        for place, one in enumerate(seen):
            for other in seen[place + 1 :]:
                if not self._apart(one, other):
                    raise _refused(
                        where,
                        "oneOf needs parts that exclude each other by their type, by enum or const, or by a "
                        "required property with such; use anyOf",
                    )

    def _apart(self, one: Schema, other: Schema) -> bool:
        values, more = _fixed(one), _fixed(other)
        if values is not None and more is not None:
            return not values & more
        kinds, others = _kinds(one), _kinds(other)
        if kinds is not None and others is not None and not kinds & others:
            return True
        common = set(one.get("required") or ()) & set(other.get("required") or ())
        if kinds != {"object"} or others != {"object"}:
            return False
        for name in common:
            first = self._seen((one.get("properties") or {}).get(name))
            second = self._seen((other.get("properties") or {}).get(name))
            values, more = _fixed(first), _fixed(second)
            if values is not None and more is not None and not values & more:
                return True
        return False

    # One type each.

    def _typed(self, kind: str, said: Schema, where: str) -> Schema:
        own = {name: value for name, value in said.items() if name in _OF_TYPE[kind]}
        match kind:
            case "object":
                return self._object(own, where)
            case "array":
                return self._array(own, where)
            case "string":
                return _string(own, where)
            case "number" | "integer":
                return _number(kind, own, where)
        return {"type": kind}

    def _object(self, own: Schema, where: str) -> Schema:
        given = own.get("properties", {})
        required = own.get("required", [])
        if not isinstance(given, dict) or not isinstance(required, list):
            raise _refused(where, "properties must be an object, and required a list")
        if own.get("unevaluatedProperties", False) is not False:
            raise _refused(where, "unevaluatedProperties is supported only as false")
        more = own.get("additionalProperties")
        patterns = own.get("patternProperties") or {}
        if "propertyNames" in own:
            if given or patterns or more is False:
                raise _refused(where, "propertyNames is supported only without properties beside it")
            names = self.node(
                {"type": "string", **_object_of(own["propertyNames"], where)}, f"{where}/propertyNames"
            )
            if names.keys() == {"type", "pattern"}:
                return self._named_by(names["pattern"], more, own, where)
            if names.keys() & {"minLength", "maxLength"}:
                pattern = any_string(names.get("minLength", 0), names.get("maxLength"))
                return self._named_by(f"^{pattern}$", more, own, where)
            if names != {"type": "string"}:
                raise _refused(where, "propertyNames is supported with pattern, minLength and maxLength only")
        if patterns:
            if given or required or more not in (None, False) or len(patterns) != 1:
                raise _refused(
                    where, "patternProperties is supported with one pattern, and nothing beside it"
                )
            ((pattern, value),) = patterns.items()
            return self._named_by(f"^{json_pattern(pattern).text}$", value, own, where)
        properties: dict[str, Schema] = {}
        for name, value in given.items():
            if value is False and name not in required:
                continue
            properties[name] = self.node(value, f"{where}/properties/{name}")
        for name in required:
            if not isinstance(name, str):
                raise _refused(where, "required must be a list of names")
            if name not in properties:
                if more is False:
                    raise _refused(where, f"{name[:50]!r} is required, but not one of the properties")
                properties[name] = self.node(True if more is None else more, f"{where}/required")
        optional = len(properties) - len(set(required))
        if optional > _MOST_OPTIONAL:
            raise _refused(
                where, f"{optional} properties may be left out; at most {_MOST_OPTIONAL} are supported"
            )
        closed = more is False or (more is None and bool(properties))
        made: Schema = {"type": "object", "properties": properties}
        made["additionalProperties"] = (
            False if closed else self.node(True if more is None else more, f"{where}/additionalProperties")
        )
        if required:
            made["required"] = required
        low, high = _bounds(own, "minProperties", "maxProperties", where)
        if low > len(set(required)):
            if not closed:
                raise _refused(
                    where, "minProperties needs additionalProperties to be false: names may repeat"
                )
            made["minProperties"] = low
        if high is not None and (not closed or high < len(properties)):
            made["maxProperties"] = high
        if optional > _MOST_COUNTED and not made.keys().isdisjoint(("minProperties", "maxProperties")):
            raise _refused(
                where,
                f"minProperties and maxProperties are supported with {_MOST_COUNTED} optional properties",
            )
        return made

    def _named_by(self, pattern: str, value: Any, own: Schema, where: str) -> Schema:
        """An object all of whose names match."""
        low, high = _bounds(own, "minProperties", "maxProperties", where)
        if low > 1:
            raise _refused(where, "minProperties above 1 needs properties: other names may repeat")
        made: Schema = {
            "type": "object",
            "patternProperties": {
                pattern: self.node(True if value is None else value, f"{where}/patternProperties")
            },
            "additionalProperties": False,
        }
        if low:
            made["minProperties"] = low
        if high is not None:
            made["maxProperties"] = high
        return made

    def _array(self, own: Schema, where: str) -> Schema:
        if own.get("uniqueItems", False) is not False:
            raise _refused(where, "uniqueItems is not supported; leave it out")
        if own.get("unevaluatedItems", False) is not False:
            raise _refused(where, "unevaluatedItems is supported only as false")
        first, rest = own.get("prefixItems", []), own.get("items")
        if isinstance(rest, list):  # before 2020-12
            first, rest = rest, own.get("additionalItems")
        if not isinstance(first, list):
            raise _refused(where, "prefixItems must be a list of schemas")
        low, high = _bounds(own, "minItems", "maxItems", where)
        if rest is None:
            rest = not first or low > len(first)
        made: Schema = {"type": "array"}
        if first:
            made["prefixItems"] = [
                self.node(item, f"{where}/prefixItems/{at}") for at, item in enumerate(first)
            ]
        made["items"] = False if rest is False else self.node(rest, f"{where}/items")
        if low:
            made["minItems"] = low
        if high is not None:
            made["maxItems"] = high
        return made


def _string(own: Schema, where: str) -> Schema:
    low, high = _bounds(own, "minLength", "maxLength", where)
    form = own.get("format")
    if isinstance(form, str) and form in _FORMATS_NOT_ENFORCED:
        raise _refused(where, f"format {form} is not supported; leave it out")
    if isinstance(form, str) and form in _FORMATS_AS_PATTERNS:
        _alone(own, where, "format")
        return {"type": "string", "pattern": _FORMATS_AS_PATTERNS[form]}
    if isinstance(form, str) and form in _FORMATS:
        _alone(own, where, "format")
        return {"type": "string", "format": form}
    if "pattern" in own:
        if not isinstance(own["pattern"], str):
            raise _refused(where, "pattern must be a string")
        pattern = json_pattern(own["pattern"])
        longest = math.inf if pattern.longest is None else pattern.longest
        if pattern.shortest < low or (high is not None and longest > high):
            raise _refused(
                where,
                "minLength and maxLength beside a pattern are not supported; write them into the pattern",
            )
        return {"type": "string", "pattern": f"^{pattern.text}$"}
    made: Schema = {"type": "string"}
    if low:
        made["minLength"] = low
    if high is not None:
        made["maxLength"] = high
    return made


def _number(kind: str, own: Schema, where: str) -> Schema:
    made: Schema = {"type": kind}
    for name, value in own.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _refused(where, f"{name} must be a number, not {_shown(value)}")
        if name != "multipleOf":
            made[name] = value
        elif kind != "integer" or len(own) > 1 or value != int(value) or value < 1:
            raise _refused(where, "multipleOf is supported with whole numbers, of integers without bounds")
        else:
            made[name] = int(value)
    low, high = _limits(own, 1 if kind == "integer" else 10**6)
    if low is not None and high is not None and low > high:
        # The back end would let an empty text pass for such a number.
        what = "whole number" if kind == "integer" else "number of six decimals, the most that are written,"
        raise _refused(where, f"no {what} is between its minimum and maximum")
    if kind == "integer":
        for names, bound in ((("minimum", "exclusiveMinimum"), low), (("maximum", "exclusiveMaximum"), high)):
            for name in names:
                made.pop(name, None)
            if bound is not None:
                made[names[0]] = bound
    return made


def _limits(own: Schema, parts: int) -> tuple[int | None, int | None]:
    """The least and the largest that are allowed, in `parts` of one."""
    exact = {name: Fraction(repr(own[name])) * parts for name in own if name != "multipleOf"}
    low = [math.ceil(exact["minimum"])] if "minimum" in exact else []
    low += [math.floor(exact["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in exact else []
    high = [math.floor(exact["maximum"])] if "maximum" in exact else []
    high += [math.ceil(exact["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in exact else []
    return max(low, default=None), min(high, default=None)


def _types(said: Schema, where: str) -> list[str] | None:
    """None: any. Where no type is given, that which the keywords speak of."""
    if "type" in said:
        return _type_names(said, where)
    spoken = [
        kind for kind, words in _OF_TYPE.items() if kind != "integer" and not words.isdisjoint(said.keys())
    ]
    if len(spoken) > 1:
        raise _refused(where, f"it speaks of {' and '.join(spoken)}; say which by type")
    return spoken or None


def _type_names(said: Schema, where: str) -> list[str]:
    names = said["type"] if isinstance(said["type"], list) else [said["type"]]
    for name in names:
        if not isinstance(name, str) or name not in _OF_TYPE:
            raise _refused(where, f"type {_shown(name)} is not one of {', '.join(_OF_TYPE)}")
    if not names:
        raise _refused(where, "type must not be an empty list")
    return list(dict.fromkeys(names))


def _values(said: Schema, where: str) -> list[Any]:
    values = said.get("enum", [said.get("const")])
    if not isinstance(values, list):
        raise _refused(where, "enum must be a list")
    if "const" in said:
        values = [value for value in values if _same(value) == _same(said["const"])]
    if "type" in said:
        types = set(_type_names(said, where))
        values = [value for value in values if types & _kinds_of(value)]
    if not values:
        raise _refused(where, "no value is left of enum, const and type together")
    return values


def _fixed(schema: Schema) -> set[str] | None:
    """The values of enum or const; None: there is no such list."""
    if "const" in schema:
        return {_same(schema["const"])}
    values = schema.get("enum")
    return {_same(value) for value in values} if isinstance(values, list) else None


def _same(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _kinds(schema: Schema) -> set[str] | None:
    if (values := schema.get("enum", [schema["const"]] if "const" in schema else None)) is not None:
        return set().union(*map(_kinds_of, values)) if isinstance(values, list) else None
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list):
        return None
    kinds = {str(name) for name in names}
    return kinds | {"number"} if "integer" in kinds else kinds | {"integer"} if "number" in kinds else kinds


def _kinds_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case str():
            return {"string"}
        case dict():
            return {"object"}
        case list():
            return {"array"}
    return {"number", "integer"} if value == int(value) else {"number"}


def _bounds(own: Schema, least: str, most: str, where: str) -> tuple[int, int | None]:
    found: list[int | None] = []
    for name in (least, most):
        value = own.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise _refused(where, f"{name} must be a whole number from 0 on, not {_shown(value)}")
        found.append(value)
    low, high = found[0] or 0, found[1]
    if high is not None and low > high:
        raise _refused(where, f"{least} is {low}, above {most}, which is {high}")
    return low, high


def _object_of(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _refused(where, "propertyNames must be an object")
    return value


def _alone(said: Schema, where: str, name: str, *others: str) -> None:
    beside = said.keys() - {name, *others}
    if beside:
        raise _refused(where, f"{', '.join(sorted(beside))} beside {name} is not supported")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) < 60 else text[:60] + "…"


def _refused(where: str, why: str) -> BadConstraint:
    return BadConstraint(f"the schema at {where[:200] or 'its root'}: {why}")
