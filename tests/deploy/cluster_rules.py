"""What a CustomResourceDefinition does to an object: prunes, defaults, checks schema and rules. For tests."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import cel
import jsonschema

Object = dict[str, Any]


def pruned(value: Any, schema: Object) -> Any:
    """Without fields that the schema does not know."""
    if isinstance(value, dict) and "properties" in schema:
        if schema.get("x-kubernetes-preserve-unknown-fields"):
            return value
        return {
            name: pruned(each, schema["properties"][name])
            for name, each in value.items()
            if name in schema["properties"]
        }
    if isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        return {name: pruned(each, schema["additionalProperties"]) for name, each in value.items()}
    if isinstance(value, list) and "items" in schema:
        return [pruned(each, schema["items"]) for each in value]
    return value


def unknown(value: Any, schema: Object, path: str = "") -> Iterator[str]:
    """Paths that `pruned` takes out."""
    if isinstance(value, dict) and "properties" in schema:
        if schema.get("x-kubernetes-preserve-unknown-fields"):
            return
        for name, each in value.items():
            if name not in schema["properties"]:
                yield f"{path}.{name}".lstrip(".")
            else:
                yield from unknown(each, schema["properties"][name], f"{path}.{name}")
    elif isinstance(value, list) and "items" in schema:
        for at, each in enumerate(value):
            yield from unknown(each, schema["items"], f"{path}[{at}]")


def without_nulls(value: Any, schema: Object) -> Any:
    """After `defaulted`: a field that is null and must not be is one that is not there."""
    if isinstance(value, dict):
        parts, rest = schema.get("properties", {}), schema.get("additionalProperties")
        found = {}
        for name, each in value.items():
            part = parts.get(name, rest if isinstance(rest, dict) else None)
            if part is None:
                found[name] = each
            elif each is not None or part.get("nullable"):
                found[name] = without_nulls(each, part)
        return found
    if isinstance(value, list) and "items" in schema:
        return [without_nulls(each, schema["items"]) for each in value]
    return value


def defaulted(value: Any, schema: Object) -> Any:
    if isinstance(value, dict) and "properties" in schema:
        value = dict(value)
        for name, part in schema["properties"].items():
            if name not in value and "default" in part:
                value[name] = copy.deepcopy(part["default"])
            if name in value:
                if value[name] is None and "default" in part and not part.get("nullable"):
                    value[name] = copy.deepcopy(part["default"])
                value[name] = defaulted(value[name], part)
        return value
    if isinstance(value, list) and "items" in schema:
        return [defaulted(each, schema["items"]) for each in value]
    return value


def faults(new: Object, old: Object | None, schema: Object) -> list[str]:
    """As the API server words them: `spec.decode.replicas: Invalid value: …: why`."""
    found = []
    for error in sorted(_validator(schema).iter_errors(new), key=lambda e: list(e.absolute_path)):
        path = ".".join(str(part) for part in error.absolute_path)
        found.append(f"{path}: Invalid value: {error.message}")
    return found or list(_rules(new, old, schema, ""))


def wrong_defaults(schema: Object, path: str = "") -> Iterator[str]:
    """Each is held against the rules as it stands there, before parts of it are filled in."""
    if "default" in schema:
        yield from (f"{path}.default: {one}" for one in faults(schema["default"], None, schema))
    for name, part in schema.get("properties", {}).items():
        yield from wrong_defaults(part, f"{path}.properties[{name}]")


_VALIDATORS: dict[int, tuple[Object, Any]] = {}


def _validator(schema: Object) -> Any:
    """Made once for each schema, which is kept, so that its id stays its own."""
    if id(schema) not in _VALIDATORS:
        _VALIDATORS[id(schema)] = (schema, jsonschema.Draft202012Validator(_plain(schema)))
    return _VALIDATORS[id(schema)][1]


@lru_cache
def _program(rule: str) -> Any:
    return cel.compile(rule)


def _plain(schema: Any) -> Any:
    """JSON schema of a structural one: `nullable` is a type there."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _plain(each) for key, each in schema.items() if not key.startswith("x-kubernetes")}
    if schema.get("nullable") is True and isinstance(schema.get("type"), str):
        found["type"] = [schema["type"], "null"]
    found.pop("format", None) if isinstance(schema.get("format"), str) else None
    return found


def _rules(new: Any, old: Any, schema: Object, path: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", []):
        given = {"self": _given(new, schema)}
        if "oldSelf" in rule["rule"]:
            if old is None:
                continue
            given["oldSelf"] = _given(old, schema)
        try:
            said = "" if _program(rule["rule"]).execute(given) else str(rule["message"])
        except (LookupError, ValueError, RuntimeError, TypeError) as error:
            # As where a field that it asks for is not there.
            said = f"{error!r} evaluating rule: {rule['message']}"
        if said:
            yield f"{path}{rule.get('fieldPath', '')}: Invalid value: {said}".lstrip(".")
    if isinstance(new, dict):
        for name, part in schema.get("properties", {}).items():
            if new.get(name) is not None:
                before = old.get(name) if isinstance(old, dict) else None
                yield from _rules(new[name], before, part, f"{path}.{name}")


def _given(value: Any, schema: Object) -> Any:
    """A field that is null is one that is not there, for `has`. A whole number written as a fraction is none
    for a rule that looks at it."""
    if isinstance(value, dict):
        parts, rest = schema.get("properties", {}), schema.get("additionalProperties")
        return {
            name: _given(each, parts.get(name) or (rest if isinstance(rest, dict) else {}))
            for name, each in value.items()
            if each is not None
        }
    if isinstance(value, list):
        return [_given(each, schema.get("items", {})) for each in value]
    return repr(value) if isinstance(value, float) and schema.get("type") == "integer" else value
