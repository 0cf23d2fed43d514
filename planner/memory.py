"""What a planner has learnt, as JSON and back: a file of decisions can begin in the middle of a life. Pure.

A walk over the objects of `State`, which are plain: numbers, lists, deques, dicts and classes of this room.
What is not a plain JSON value is an array that begins with its kind. Only classes that `State` is made of are
made again, whatever stands in a file.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from planner.decide import State
from planner.words import PlannerSettings


def _classes() -> dict[str, type[Any]]:
    """All of the modules that `planner.decide` is made of."""
    found: dict[str, type[Any]] = {}
    modules = [State.__module__]
    for module in modules:
        for one in vars(sys.modules[module]).values():
            if isinstance(one, type) and one.__module__.startswith("planner."):
                found[one.__name__] = one
                if one.__module__ not in modules:
                    modules.append(one.__module__)
    return found


_CLASSES = _classes()


def remembered(state: State) -> object:
    """For `recalled`. TypeError: it holds something that is not plain, which is a defect."""
    return _out(state)


def recalled(told: object) -> State:
    """ValueError: that is not what `remembered` says."""
    try:
        found = _in(told)
    except (TypeError, IndexError, KeyError, AttributeError) as error:
        raise ValueError(f"what was learnt cannot be read: {error!r}") from None
    if not isinstance(found, State):
        raise ValueError("what was learnt is not of a planner")
    return found


def _out(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return ["float", str(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, deque):
        return ["deque", value.maxlen, [_out(one) for one in value]]
    if isinstance(value, list | tuple):
        return [type(value).__name__, [_out(one) for one in value]]
    if isinstance(value, dict):
        return ["dict", [[_out(key), _out(one)] for key, one in value.items()]]
    kind = type(value)
    if _CLASSES.get(kind.__name__) is not kind:
        raise TypeError(f"{kind.__name__} is not known to be part of what a planner learns")
    return [kind.__name__, {name: _out(getattr(value, name)) for name in _names(value)}]


def _names(value: object) -> list[str]:
    return [one.name for one in fields(value)] if is_dataclass(value) else list(vars(value))


_MADE: dict[str, Callable[..., object]] = {
    "float": float,
    "deque": lambda most, values: deque((_in(one) for one in values), most),
    "list": lambda values: [_in(one) for one in values],
    "tuple": lambda values: tuple(_in(one) for one in values),
    "dict": lambda pairs: {_in(key): _in(one) for key, one in pairs},
}


def _in(told: object) -> object:
    if not isinstance(told, list):
        return told
    kind, *rest = told
    if (make := _MADE.get(kind)) is not None:
        return make(*rest)
    one, (values,) = _CLASSES[kind], rest
    if one is PlannerSettings:
        own: dict[str, Any] = {name: _in(value) for name, value in values.items()}
        return PlannerSettings(**own)
    if values.keys() != _SHAPES.get(kind, values.keys()):
        raise KeyError(f"a {kind} of another version of the planner")
    made: object = object.__new__(one)
    for name, value in values.items():
        setattr(made, name, _in(value))
    return made


def _shapes(told: object) -> dict[str, set[str]]:
    """The names of each kind of object in what `_out` tells."""
    found: dict[str, set[str]] = {}
    match told:
        case [str(kind), dict(values)]:
            found[kind] = set(values)
            parts = list(values.values())
        case list(parts):
            pass
        case _:
            return found
    for part in parts:
        found |= _shapes(part)
    return found


_SHAPES = _shapes(remembered(State(PlannerSettings())))
"""What another version has learnt lacks what this one goes by, and must not be found out in the midst."""
