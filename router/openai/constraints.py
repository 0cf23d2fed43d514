"""From the fields of a body that say what an answer must form to a `Constraint`, within the limits. Pure.

Whether a schema, regular expression or grammar can be enforced is for the workers to say, whose back end
compiles it: two opinions would differ some day. Here a body is told what is malformed, and what is too large.
"""

from __future__ import annotations

import json
import re
from typing import Any

from fleet.errors import BadRequest
from fleet.request import Constraint, ConstraintKind
from router.openai.messages import Body
from router.openai.settings import HttpSettings

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_WAYS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Keys of structured_outputs that say what to form; the first four also follow `guided_`."""
_OPTIONS = (
    "disable_any_whitespace",
    "disable_additional_properties",
    "disable_fallback",
    "whitespace_pattern",
)


def constraint_of(body: Body, settings: HttpSettings) -> tuple[Constraint | None, str]:
    """What the answer must form, and the field that says so. BadRequest names what is wrong."""
    found: list[tuple[str, str, Any]] = []
    if (form := body.response_format) is not None:
        found += _response_format(form)
    if (asked := body.structured_outputs) is not None:
        found += _structured_outputs(asked)
    for way in _WAYS[:4]:
        if (value := getattr(body, f"guided_{way}")) is not None:
            found.append((way, f"guided_{way}", value))
    if not found:
        return None, ""
    if len(found) > 1:
        names = " and ".join(where for _, where, _ in found)
        raise BadRequest(f"{names}: an answer can be held to one of them only", param=found[1][1])
    way, where, value = found[0]
    return _constraint(way, where, value, settings), where


def _response_format(form: dict[str, Any]) -> list[tuple[str, str, Any]]:
    where = "response_format"
    match form.get("type"):
        case "text":
            return []
        case "json_object":
            return [("json_object", where, True)]
        case "structural_tag":
            return [("structural_tag", where, form)]
        case "json_schema":
            pass
        case _:
            raise BadRequest(
                "response_format.type must be text, json_object, json_schema or structural_tag",
                param="response_format.type",
            )
    where = "response_format.json_schema"
    wrapped = form.get("json_schema")
    if not isinstance(wrapped, dict):
        state = "missing" if "json_schema" not in form else "no object"
        raise BadRequest(f"{where} is {state}; an object with name and schema is needed", param=where)
    name = wrapped.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequest(
            f"{where}.name must be 1 to 64 of the characters a-z, A-Z, 0-9, _ and -", param=f"{where}.name"
        )
    if wrapped.get("strict") not in (None, True, False):
        raise BadRequest(f"{where}.strict must be true or false", param=f"{where}.strict")
    if not isinstance(wrapped.get("description", ""), str | None):
        raise BadRequest(f"{where}.description must be a string", param=f"{where}.description")
    if not isinstance(wrapped.get("schema"), dict):
        state = "missing" if "schema" not in wrapped else "no object"
        raise BadRequest(f"{where}.schema is {state}; a JSON schema is needed", param=f"{where}.schema")
    return [("json", f"{where}.schema", wrapped["schema"])]


def _structured_outputs(asked: dict[str, Any]) -> list[tuple[str, str, Any]]:
    where = "structured_outputs"
    for key, value in asked.items():
        if key not in _WAYS and not (key in _OPTIONS and value in (None, False)):
            state = "not supported; leave it out" if key in _OPTIONS else f"not one of {', '.join(_WAYS)}"
            raise BadRequest(f"{where}.{key[:50]} is {state}", param=where)
    found = [(way, f"{where}.{way}", asked[way]) for way in _WAYS if asked.get(way) is not None]
    found = [entry for entry in found if entry[0] != "json_object" or entry[2] is not False]
    if not found:
        raise BadRequest(f"{where} needs one of {', '.join(_WAYS)}", param=where)
    return found


def _constraint(way: str, where: str, value: Any, settings: HttpSettings) -> Constraint:
    match way:
        case "json_object":
            if value is not True:
                raise BadRequest(f"{where} must be true or false", param=where)
            return Constraint(ConstraintKind.JSON_OBJECT)
        case "json":
            if isinstance(value, str):
                value = _parsed(value, where)
            if not isinstance(value, dict | bool):
                raise BadRequest(f"{where} must be a JSON schema: an object", param=where)
            return Constraint(ConstraintKind.JSON_SCHEMA, _text_of(value, where, settings))
        case "structural_tag":
            if isinstance(value, str):
                value = _parsed(value, where)
            if not isinstance(value, dict):
                raise BadRequest(f"{where} must be a structural tag: an object", param=where)
            return Constraint(ConstraintKind.STRUCTURAL_TAG, _text_of(value, where, settings))
        case "choice":
            return Constraint(ConstraintKind.GRAMMAR, _choice(value, where, settings))
        case "regex":
            text = _text(value, where)
            _at_most(len(text), settings.max_regex_characters, where, "max_regex_characters")
            return Constraint(ConstraintKind.REGEX, text)
        case _:
            text = _text(value, where)
            _at_most(len(text), settings.max_grammar_characters, where, "max_grammar_characters")
            return Constraint(ConstraintKind.GRAMMAR, text)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{where} must be a string that is not empty", param=where)
    _is_unicode(value, where)
    return value


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{where} is a string, but not one of JSON", param=where) from error


def _text_of(value: Any, where: str, settings: HttpSettings) -> str:
    """As JSON, in the order of the body: properties are generated in that order."""
    shallow(value, where, settings.max_schema_depth)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise BadRequest(f"{where} has a number that JSON does not know", param=where) from error
    _at_most(len(text), settings.max_schema_characters, where, "max_schema_characters")
    _is_unicode(text, where)
    return text


def shallow(value: Any, where: str, limit: int) -> None:
    """BadRequest: nested more than `limit` deep."""
    layer, depth = [value], 0
    while layer := [item for item in layer if isinstance(item, dict | list)]:
        depth += 1
        if depth > limit:
            raise BadRequest(
                f"{where} is nested more than {limit} deep (setting http.max_schema_depth)", param=where
            )
        layer = [inner for outer in layer for inner in (outer.values() if isinstance(outer, dict) else outer)]


def _choice(value: Any, where: str, settings: HttpSettings) -> str:
    """A grammar of just these answers."""
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise BadRequest(f"{where} must be a list of strings, none of them empty", param=where)
    _at_most(len(value), settings.max_choices, where, "max_choices")
    for item in value:
        _is_unicode(item, where)
    text = "root ::= " + " | ".join(f'"{_literal(item)}"' for item in dict.fromkeys(value))
    _at_most(len(text), settings.max_grammar_characters, where, "max_grammar_characters")
    return text


def _literal(text: str) -> str:
    """Inside the quotes of EBNF."""
    return "".join(
        f"\\{char}" if char in '"\\' else f"\\x{ord(char):02x}" if ord(char) < 32 or char == "\x7f" else char
        for char in text
    )


def _is_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{where} is not valid Unicode", param=where) from error


def _at_most(size: int, limit: int, where: str, setting: str) -> None:
    if size > limit:
        unit = "choices" if setting == "max_choices" else "characters"
        raise BadRequest(
            f"{where} has {size} {unit}; the limit is {limit} (setting http.{setting})", param=where
        )
