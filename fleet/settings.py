"""Settings: frozen dataclasses filled from a TOML file, then the environment, then flags; later wins.

A process declares one frozen dataclass whose fields are plain values or nested frozen dataclasses, called
sections. The field `engine.block_size` is `block_size` in the TOML table `[engine]`, the variable
`PDFLEET_ENGINE_BLOCK_SIZE` and the flag `--engine.block-size`; the string literal below a field is its
help. A setting that does not exist, cannot be read or is refused by a `__post_init__` is an error that
names it and where it came from.

A field `classes: Mapping[str, Section]` is a table of sections with names of the operator's choosing, beside
those of its default: `[classes.voice]` in TOML, `PDFLEET_CLASSES_VOICE_X` and `--classes.voice.x`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import os
import re
import ssl
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from fleet.tls import Tls, client_context

T = TypeVar("T")

PREFIX = "PDFLEET_"

_NAME = re.compile(r"[a-z][a-z0-9-]*")
"""Of a section in a table: without underscores, so that flags and variables can be told apart."""
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


class SettingsError(ValueError):
    """One line: which setting, from where, what was wrong and what would be right."""


class HelpAsked(Exception):
    """`--help` was among the flags; the text is the only argument."""


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Where the fleet is found, and how this process is found in it."""

    fleet: str = "default"
    """Name of the fleet; processes of other names on the same etcd and NATS are not seen."""
    etcd: str = "127.0.0.1:2379"
    """Of etcd: HOST:PORT."""
    nats: str = "nats://127.0.0.1:4222"
    """Of NATS: one URL, or several separated by commas."""
    bind: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    advertise: str = ""
    """Host name or address that others reach this process by; empty: that of `bind`."""
    lease_ttl_s: float = 5.0
    """Seconds without a sign of life after which a process is no longer a member; etcd wants at least 1."""
    etcd_user: str = ""
    """For etcd with authentication; empty: without."""
    etcd_password: str = field(default="", repr=False)
    """Of `etcd_user`. Flags are seen by everybody on the machine: prefer the environment."""
    etcd_ca: Path | None = None
    """PEM file of the authorities to trust; given, etcd is spoken to over TLS."""
    nats_ca: Path | None = None
    """PEM file of the authorities to trust; given, NATS is spoken to over TLS only."""
    tls_ca: Path | None = None
    """PEM file of the fleet's own authority. Given with the two below, routers and workers speak to each
    other over mutual TLS only: each shows its certificate, and none without one is heard."""
    tls_cert: Path | None = None
    """PEM file of this process's certificate; it must name the host that `advertise` gives, or `tls_name`.
    Shown to etcd and NATS too, where those are spoken to over TLS."""
    tls_key: Path | None = None
    """PEM file of its private key. The three are read again for each connection: they may be renewed."""
    tls_name: str = ""
    """Name that the certificates of all processes bear, and that callers and workers hold each other to,
    whatever their hosts are; empty: a worker's certificate names the host that it advertises."""

    def __post_init__(self) -> None:
        if not self.fleet or any(c in "./*>" or c.isspace() for c in self.fleet):
            raise ValueError(
                f"fleet is {self.fleet!r}; a name without dots, slashes, spaces, * or > is needed"
            )
        host, _, port = self.etcd.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"etcd is {self.etcd!r}; HOST:PORT without a scheme is needed")
        if not self.nats:
            raise ValueError("nats is empty; a URL such as nats://127.0.0.1:4222 is needed")
        if self.lease_ttl_s < 1:
            raise ValueError(f"lease_ttl_s is {self.lease_ttl_s}; etcd grants leases of 1 s or more")
        if self.bind in ("0.0.0.0", "::") and not self.advertise:
            raise ValueError(f"bind is {self.bind}: advertise must name how others reach this host")
        if len({item is None for item in (self.tls_ca, self.tls_cert, self.tls_key)}) > 1:
            raise ValueError("tls_ca, tls_cert and tls_key are given together or not at all")
        if self.tls_name and self.tls_ca is None:
            raise ValueError(
                f"tls_name is {self.tls_name!r} without tls_ca: there is no certificate to bear it"
            )

    @property
    def advertised(self) -> str:
        return self.advertise or self.bind

    def tls(self) -> Tls | None:
        """For the wire. None: without. SettingsError: a file cannot be read."""
        if self.tls_ca is None or self.tls_cert is None or self.tls_key is None:
            return None
        try:
            return Tls.read(self.tls_ca, self.tls_cert, self.tls_key, self.tls_name)
        except OSError as error:
            raise SettingsError(f"control.tls: {error.filename}: {error.strerror}") from None

    def nats_tls(self) -> Callable[[], ssl.SSLContext] | None:
        """For each connection; None: NATS is spoken to in plain. SettingsError: a file cannot be read."""
        if self.nats_ca is None:
            return None
        made = partial(client_context, self.nats_ca, self.tls_cert, self.tls_key)
        try:
            made()
            return made
        except OSError as error:
            raise SettingsError(f"control.nats_ca: {error}") from None


@dataclass(frozen=True, slots=True)
class _Setting:
    """One plain field, wherever it is nested."""

    path: tuple[str, ...]
    type: Any
    default: Any
    """MISSING: must be given."""
    owner: type[Any]
    """The dataclass that declares it."""
    secret: bool

    @property
    def flag(self) -> str:
        return "--" + ".".join(self.path).replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + "_".join(self.path).upper().replace("-", "_")


@dataclass(frozen=True, slots=True)
class _Table:
    """A field that holds named sections."""

    path: tuple[str, ...]
    section: type[Any]
    default: Mapping[str, Any]

    def settings(self, name: str) -> Iterator[_Setting]:
        return _settings(self.section, (*self.path, name), self.default.get(name, MISSING))

    @property
    def prefix(self) -> str:
        return PREFIX + "_".join(self.path).upper() + "_"


def load(cls: type[T], argv: Sequence[str], environ: Mapping[str, str], prog: str = "") -> T:
    """The settings. Raises `SettingsError`, or `HelpAsked` if `--help` or `-h` is in `argv`."""
    tables = tuple(_tables(cls))
    settings = {setting.path: setting for setting in _settings(cls)}
    for table in tables:
        settings |= {setting.path: setting for name in table.default for setting in table.settings(name)}
    if "--help" in argv or "-h" in argv:
        raise HelpAsked(help_text(cls, prog))
    config, flags = _read_flags(settings, tables, argv)
    values: dict[tuple[str, ...], Any] = {}
    if config is not None:
        _read_toml(settings, tables, config, values)
    _read_environment(settings, tables, environ, values)
    return _build(cls, (), {**values, **flags})


def load_or_exit(
    cls: type[T],
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    prog: str = "",
) -> T:
    """As `load`, for a `__main__`: prints help and exits 0, or prints the error in one line and exits 2."""
    try:
        return load(
            cls, sys.argv[1:] if argv is None else argv, os.environ if environ is None else environ, prog
        )
    except HelpAsked as asked:
        print(asked)
        raise SystemExit(0) from None
    except SettingsError as error:
        print(f"{prog or 'error'}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def help_text(cls: type[Any], prog: str = "") -> str:
    """What `--help` prints: every setting with its kind, default, variable and meaning."""
    lines = [f"usage: {prog or 'PROGRAM'} [--config FILE.toml] [--SETTING VALUE ...]", ""]
    lines += textwrap.wrap((inspect.getdoc(cls) or "").partition("\n\n")[0], 100)
    lines += ["", "Later wins: the file's tables, then the environment, then flags."]
    tables = {(*table.path, "NAME"): table for table in _tables(cls)}
    section: tuple[str, ...] | None = None
    for setting in (*_settings(cls), *(s for table in tables.values() for s in table.settings("NAME"))):
        if setting.path[:-1] != section:
            section = setting.path[:-1]
            title = ".".join(section) + ":" if section else "settings:"
            if section in tables:
                title += f"  (there are by default: {', '.join(tables[section].default) or 'none'})"
            lines += ["", title]
        lines.append(f"  {setting.flag} {_kind(setting.type).upper()}")
        meaning = _docs(setting.owner).get(setting.path[-1], "")
        if setting.secret:
            note = ""
        elif setting.default is MISSING:
            note = " (required)"
        else:
            note = f" (default: {_shown(setting.default)})"
        lines += textwrap.wrap(f"{meaning}{note} [{setting.variable}]", 94, initial_indent=" " * 6,
                               subsequent_indent=" " * 6)  # fmt: skip
    return "\n".join(lines)


def _settings(cls: type[Any], path: tuple[str, ...] = (), default: Any = MISSING) -> Iterator[_Setting]:
    """Plain fields of `cls` and of its sections, plain ones first, else in the order they are written."""
    hints = get_type_hints(cls)
    nested = []
    for item in fields(cls):
        if not item.init:
            continue
        preset = _default(item) if default is MISSING else getattr(default, item.name)
        if _is_section(hints[item.name]):
            nested.append((hints[item.name], (*path, item.name), preset))
        elif _named(hints[item.name]) is None:
            yield _Setting((*path, item.name), hints[item.name], preset, cls, not item.repr)
    for section, section_path, preset in nested:
        yield from _settings(section, section_path, preset)


def _tables(cls: type[Any], path: tuple[str, ...] = (), default: Any = MISSING) -> Iterator[_Table]:
    hints = get_type_hints(cls)
    for item in fields(cls):
        preset = _default(item) if default is MISSING else getattr(default, item.name)
        if (section := _named(hints[item.name])) is not None:
            yield _Table((*path, item.name), section, preset)
        elif _is_section(hints[item.name]):
            yield from _tables(hints[item.name], (*path, item.name), preset)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


def _named(kind: Any) -> type[Any] | None:
    """Section of a table of named sections; None of any other type."""
    arguments = get_args(kind)
    return arguments[1] if get_origin(kind) is Mapping and _is_section(arguments[1]) else None


def _default(item: Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


def _docs(cls: type[Any]) -> dict[str, str]:
    """Field → the string literal below it; empty where there is no source to read."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError):
            continue
        assert isinstance(body, ast.ClassDef)
        for line, below in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                docs[line.target.id] = " ".join(below.value.value.split())
    return docs


def _name_section(
    settings: dict[tuple[str, ...], _Setting], table: _Table, name: str, where: str
) -> list[_Setting]:
    """Makes the settings of a section of that name known."""
    if not _NAME.fullmatch(name):
        raise SettingsError(f"{where}: {name!r} is no name; small letters, digits and hyphens are needed")
    made = list(table.settings(name))
    settings.update({setting.path: setting for setting in made})
    return made


def _read_flags(
    settings: dict[tuple[str, ...], _Setting], tables: Sequence[_Table], argv: Sequence[str]
) -> tuple[Path | None, dict[tuple[str, ...], Any]]:
    by_flag = {setting.flag: setting for setting in settings.values()}
    config: Path | None = None
    values: dict[tuple[str, ...], Any] = {}
    rest = list(argv)
    while rest:
        name, given, text = rest.pop(0).partition("=")
        parts = tuple(name.removeprefix("--").split("."))
        for table in tables:
            at = len(table.path)
            if tuple(part.replace("-", "_") for part in parts[:at]) == table.path and len(parts) > at + 1:
                by_flag |= {made.flag: made for made in _name_section(settings, table, parts[at], name)}
        setting = by_flag.get(name)
        if setting is None and name != "--config":
            if not name.startswith("--"):
                raise SettingsError(f"unexpected argument {name!r}; settings are given as --name VALUE")
            raise SettingsError(f"there is no setting {name}{_nearest(name, [*by_flag, '--config'])}")
        if not given:
            if (
                setting is not None
                and setting.type is bool
                and (not rest or rest[0].lower() not in _TRUE | _FALSE)
            ):
                text = "true"
            elif rest:
                text = rest.pop(0)
            else:
                raise SettingsError(f"{name} needs a value")
        if setting is None:
            config = Path(text)
        else:
            values[setting.path] = _parse(setting.type, text, name)
    return config, values


def _read_environment(
    settings: dict[tuple[str, ...], _Setting],
    tables: Sequence[_Table],
    environ: Mapping[str, str],
    values: dict[tuple[str, ...], Any],
) -> None:
    for variable in environ:
        for table in tables:
            if variable.startswith(table.prefix):
                rest = variable.removeprefix(table.prefix)
                ends = [f"_{setting.path[-1].upper()}" for setting in table.settings("name")]
                end = max((end for end in ends if rest.endswith(end)), key=len, default="")
                if end and rest != end:
                    name = rest.removesuffix(end).lower().replace("_", "-")
                    _name_section(settings, table, name, variable)
    by_variable = {setting.variable: setting for setting in settings.values()}
    assert len(by_variable) == len(settings), "two settings would have the same variable"
    sections = tuple({PREFIX + path[0].upper() + "_" for path in settings if len(path) > 1})
    for name, text in environ.items():
        setting = by_variable.get(name)
        if setting is not None:
            values[setting.path] = _parse(setting.type, text, name)
        elif name.startswith(sections):
            # Variables of other sections are other processes' business: one environment serves a whole host.
            raise SettingsError(f"there is no setting {name}{_nearest(name, by_variable)}")


def _read_toml(
    settings: dict[tuple[str, ...], _Setting],
    tables: Sequence[_Table],
    file: Path,
    values: dict[tuple[str, ...], Any],
) -> None:
    try:
        tree = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"--config {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: not TOML: {error}") from None
    by_path = {table.path: table for table in tables}
    sections = {path[:n] for path in settings for n in range(1, len(path))} | set(by_path)

    def walk(table: Mapping[str, Any], path: tuple[str, ...]) -> None:
        for name, value in table.items():
            here = (*path, name)
            where = f"{file}: {'.'.join(here)}"
            if path in by_path:
                sections.add(here)
                values.setdefault(here, None)  # It is there, also where it sets nothing.
                _name_section(settings, by_path[path], name, where)
            if here in settings:
                values[here] = _convert(settings[here].type, value, where)
            elif here not in sections:
                known = [".".join(p) for p in settings]
                raise SettingsError(f"there is no setting {where}{_nearest('.'.join(here), known)}")
            elif isinstance(value, dict):
                walk(value, here)
            else:
                raise SettingsError(f"{where} is a section: [{'.'.join(here)}] is needed, not a value")

    walk(tree, ())


def _build(
    cls: type[T], path: tuple[str, ...], values: Mapping[tuple[str, ...], Any], default: Any = MISSING
) -> T:
    hints = get_type_hints(cls)
    given: dict[str, Any] = {}
    for item in fields(cls):  # type: ignore[arg-type]  # checked by `is_dataclass` where sections are found
        if not item.init:
            continue
        here = (*path, item.name)
        preset = _default(item) if default is MISSING else getattr(default, item.name)
        if _is_section(hints[item.name]):
            given[item.name] = _build(hints[item.name], here, values, preset)
        elif (section := _named(hints[item.name])) is not None:
            named = [path[len(here)] for path in values if path[: len(here)] == here]
            given[item.name] = {
                name: _build(section, (*here, name), values, preset.get(name, MISSING))
                for name in dict.fromkeys((*preset, *named))
            }
        elif here in values:
            given[item.name] = values[here]
        elif preset is MISSING:
            flag = "--" + ".".join(here).replace("_", "-")
            raise SettingsError(f"{flag} must be given (or {PREFIX}{'_'.join(here).upper()})")
        else:
            given[item.name] = preset
    try:
        return cls(**given)
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(f"{'.'.join(path)}: {error}" if path else str(error)) from error


def _parse(kind: Any, text: str, where: str) -> Any:
    """A value from the text of a flag or a variable."""
    inner = _optional(kind)
    if inner is not None:
        return None if text.lower() in ("", "none") else _parse(inner, text, where)
    if kind is bool:
        if text.lower() not in _TRUE | _FALSE:
            _refuse(kind, text, where)
        return text.lower() in _TRUE
    if kind in (int, float):
        try:
            return _convert(kind, kind(text), where)
        except (ValueError, OverflowError):
            _refuse(kind, text, where)
    if get_origin(kind) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return _convert(kind, text, where)


def _convert(kind: Any, value: Any, where: str) -> Any:
    """A value from one that TOML already gave a type."""
    inner = _optional(kind)
    if inner is not None:
        return _convert(inner, value, where)
    if kind is float and type(value) in (int, float) and not math.isnan(value):
        return float(value)
    if kind in (str, int, bool) and type(value) is kind:
        return value
    if kind is Path and isinstance(value, str) and value:
        return Path(value).expanduser()
    if get_origin(kind) is tuple and isinstance(value, list) and all(isinstance(part, str) for part in value):
        return tuple(value)
    if isinstance(kind, type) and issubclass(kind, StrEnum) and value in [member.value for member in kind]:
        return kind(value)
    _refuse(kind, value, where)


def _refuse(kind: Any, value: object, where: str) -> NoReturn:
    wanted = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        Path: "a path",
    }.get(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        wanted = "one of " + ", ".join(member.value for member in kind)
    elif get_origin(kind) is tuple:
        wanted = "a list of texts"
    if wanted is None:
        raise TypeError(f"settings of type {kind} cannot be read; see fleet/settings.py for those that can")
    raise SettingsError(f"{where} is {value!r}; {wanted} is needed")


def _optional(kind: Any) -> Any:
    """X of `X | None`; None of any other type."""
    if get_origin(kind) in (Union, UnionType):
        rest = [part for part in get_args(kind) if part is not NoneType]
        if len(rest) == 1 and len(get_args(kind)) == 2:
            return rest[0]
    return None


def _kind(kind: Any) -> str:
    inner = _optional(kind)
    if inner is not None:
        return _kind(inner)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return "|".join(member.value for member in kind)
    if get_origin(kind) is tuple:
        return "text,..."
    return {str: "text", int: "int", float: "number", bool: "true|false"}.get(kind, "path")


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return str(value) or '""'


def _nearest(name: str, known: Sequence[str] | Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, list(known), 1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else "; see --help"
