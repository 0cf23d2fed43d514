"""The settings loader: three layers, every type, and errors that name the setting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.settings import ControlSettings, HelpAsked, SettingsError, help_text, load, load_or_exit


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Inner:
    """What is inside."""

    block_size: int = 16
    """Tokens in a block."""
    speed: float = 1.5
    """In metres
    a second."""
    on: bool = False
    names: tuple[str, ...] = ("a",)
    colour: Colour = Colour.RED
    limit: int | None = None
    folder: Path = Path("here")

    def __post_init__(self) -> None:
        if self.block_size <= 0:
            raise ValueError(f"block_size is {self.block_size}; 1 or more is needed")


@dataclass(frozen=True, slots=True)
class Outer:
    """The whole."""

    model: str
    """Name or path."""
    inner: Inner = field(default_factory=Inner)
    control: ControlSettings = field(default_factory=lambda: ControlSettings(fleet="mine"))


def test_later_layers_win(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('model = "toml"\n[inner]\nblock_size = 1\nspeed = 2\nnames = ["x", "y"]\n')
    argv = ["--config", str(file), "--inner.block-size=3"]
    loaded = load(Outer, argv, {"PDFLEET_INNER_BLOCK_SIZE": "2", "PDFLEET_MODEL": "environment"})
    assert loaded.model == "environment"
    assert loaded.inner == Inner(block_size=3, speed=2.0, names=("x", "y"))


def test_a_sections_own_default_is_kept() -> None:
    assert load(Outer, ["--model", "m"], {}).control.fleet == "mine"
    changed = load(Outer, ["--model", "m", "--control.bind", "127.0.0.2"], {}).control
    assert (changed.fleet, changed.advertised) == ("mine", "127.0.0.2")


@given(
    st.builds(
        Inner,
        block_size=st.integers(1, 10**9),
        speed=st.floats(allow_nan=False),
        on=st.booleans(),
        names=st.lists(st.from_regex(r"[a-z]+", fullmatch=True)).map(tuple),
        colour=st.sampled_from(Colour),
        limit=st.none() | st.integers(),
        folder=st.from_regex(r"[a-z]{1,8}", fullmatch=True).map(Path),
    ),
    st.booleans(),
)
def test_every_type_comes_back_from_text(inner: Inner, by_flag: bool) -> None:
    texts = {
        "block_size": str(inner.block_size),
        "speed": repr(inner.speed),
        "on": str(inner.on),
        "names": ",".join(inner.names),
        "colour": inner.colour.value,
        "limit": "none" if inner.limit is None else str(inner.limit),
        "folder": str(inner.folder),
    }
    flags = [f"--inner.{name.replace('_', '-')}={text}" for name, text in texts.items()]
    variables = {f"PDFLEET_INNER_{name.upper()}": text for name, text in texts.items()}
    loaded = load(Outer, ["--model=m", *(flags if by_flag else [])], {} if by_flag else variables)
    assert loaded.inner == inner


@pytest.mark.parametrize(
    ("argv", "environ", "says"),
    [
        (["--model", "m", "--inner.blok-size", "3"], {}, r"no setting --inner.blok-size.*--inner.block-size"),
        (["--model", "m", "--inner.block-size", "x"], {}, r"--inner.block-size is 'x'; a whole number"),
        (["--model", "m", "--inner.block-size", "1.5"], {}, r"a whole number"),
        (["--model", "m", "--inner.speed", "nan"], {}, r"--inner.speed is 'nan'; a number"),
        (["--model", "m", "--inner.block-size", "0"], {}, r"inner: block_size is 0; 1 or more"),
        (["--model", "m", "--inner.block-size"], {}, r"--inner.block-size needs a value"),
        (["--model", "m"], {"PDFLEET_INNER_ON": "maybe"}, r"PDFLEET_INNER_ON is 'maybe'; true or false"),
        (["--model", "m"], {"PDFLEET_INNER_COLOUR": "green"}, r"one of red, blue"),
        (["--model", "m"], {"PDFLEET_INNER_SPED": "1"}, r"no setting PDFLEET_INNER_SPED.*INNER_SPEED"),
        (["--model", "m", "stray"], {}, r"unexpected argument 'stray'"),
        ([], {}, r"--model must be given \(or PDFLEET_MODEL\)"),
        (["--model", "m", "--control.fleet", "a.b"], {}, r"control: fleet is 'a\.b'"),
        (["--model", "m", "--control.etcd", "http://h:1/"], {}, r"control: etcd is .*HOST:PORT"),
        (["--model", "m", "--control.bind", "0.0.0.0"], {}, r"advertise"),
        (["--model", "m", "--control.lease-ttl-s", "0.5"], {}, r"1 s or more"),
        (["--model", "m", "--config", "/nowhere/x.toml"], {}, r"/nowhere/x\.toml: No such file"),
    ],
)
def test_what_is_wrong_is_named(argv: list[str], environ: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError, match=says) as caught:
        load(Outer, argv, environ)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[inner]\nblock_sise = 3", r"no setting .*inner\.block_sise.*inner\.block_size"),
        ("[inner]\nblock_size = true", r"inner\.block_size is True; a whole number"),
        ("[inner]\nnames = [1]", r"a list of texts"),
        ("inner = 3", r"inner is a section"),
        ("[iner]\nx = 1", r"no setting .*iner"),
        ("not toml", r"not TOML"),
        ('model = ["a"]', r"text is needed"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=says) as caught:
        load(Outer, ["--model", "m", "--config", str(file)], {})
    assert str(file) in str(caught.value)


def test_other_processes_variables_are_left_alone() -> None:
    assert load(Outer, ["--model", "m"], {"PDFLEET_ROUTER_QUEUE": "x", "PATH": "y"}).model == "m"


def test_a_bare_flag_is_true() -> None:
    assert load(Outer, ["--inner.on", "--model", "m"], {}).inner.on
    assert not load(Outer, ["--inner.on", "false", "--model", "m"], {}).inner.on


def test_help_shows_every_setting_with_its_meaning() -> None:
    text = help_text(Outer, "python -m outer")
    assert "usage: python -m outer" in text
    assert "In metres a second. (default: 1.5) [PDFLEET_INNER_SPEED]" in text
    assert "Name or path. (required) [PDFLEET_MODEL]" in text
    assert "--inner.colour RED|BLUE" in text
    assert "(default: mine)" in text
    assert re.search(r"etcd-password TEXT\n.*\n?.*PDFLEET_CONTROL_ETCD_PASSWORD", text)
    with pytest.raises(HelpAsked, match="usage"):
        load(Outer, ["--inner.nonsense", "--help"], {})


def test_a_process_exits_with_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load_or_exit(Outer, ["--model", "m", "--inner.block-size=-1"], {}, "outer")
    assert left.value.code == 2
    assert capsys.readouterr().err == "outer: inner: block_size is -1; 1 or more is needed\n"
    with pytest.raises(SystemExit) as left:
        load_or_exit(Outer, ["-h"], {}, "outer")
    assert left.value.code == 0
    assert "usage: outer" in capsys.readouterr().out


def test_a_password_is_not_printed() -> None:
    assert "hunter2" not in repr(ControlSettings(etcd_password="hunter2"))


@dataclass(frozen=True, slots=True)
class Tabled:
    """With a table of sections."""

    places: Mapping[str, Inner] = field(
        default_factory=lambda: {"home": Inner(block_size=4), "away": Inner()}
    )
    inner: Inner = field(default_factory=Inner)


def test_a_table_has_the_sections_of_its_default_and_those_that_are_named(tmp_path: Path) -> None:
    assert load(Tabled, [], {}) == Tabled()
    file = tmp_path / "a.toml"
    file.write_text("[places.home]\nspeed = 9\n[places.far-off]\nblock_size = 7\n[places.plain]\n")
    loaded = load(
        Tabled,
        ["--config", str(file), "--places.far-off.limit=3", "--places.new.on", "--inner.block-size=1"],
        {"PDFLEET_PLACES_FAR_OFF_BLOCK_SIZE": "8", "PDFLEET_PLACES_AWAY_COLOUR": "blue",
         "PDFLEET_PLACES_SOME_WHERE_SPEED": "2"},
    )  # fmt: skip
    assert loaded.inner == Inner(block_size=1)
    assert loaded.places == {
        "home": Inner(block_size=4, speed=9.0),
        "away": Inner(colour=Colour.BLUE),
        "far-off": Inner(block_size=8, limit=3),
        "plain": Inner(),
        "some-where": Inner(speed=2.0),
        "new": Inner(on=True),
    }


@pytest.mark.parametrize(
    ("argv", "environ", "says"),
    [
        (["--nope", "1"], {}, r"no setting --nope; see --help"),
        (["--places.home.sped", "1"], {}, r"no setting --places.home.sped; did you mean --places.home.speed"),
        (["--places.new.sped", "1"], {}, r"no setting --places.new.sped"),
        (["--places.home", "1"], {}, r"no setting --places.home"),
        (["--places.A_b.speed", "1"], {}, r"'A_b' is no name"),
        (["--places.new.block-size", "0"], {}, r"places.new: block_size is 0"),
        ([], {"PDFLEET_PLACES_HOME_SPED": "1"}, r"no setting PDFLEET_PLACES_HOME_SPED"),
        ([], {"PDFLEET_PLACES_SPEED": "1"}, r"no setting PDFLEET_PLACES_SPEED"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(argv: list[str], environ: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        load(Tabled, argv, environ)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[places.home]\nsped = 1", r"no setting .*places\.home\.sped"),
        ("[places]\nhome = 1", r"places\.home is a section"),
        ("places = 1", r"places is a section"),
        ('[places."a b"]\nspeed = 1', r"'a b' is no name"),
    ],
)
def test_what_is_wrong_in_a_files_table_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=says):
        load(Tabled, ["--config", str(file)], {})


def test_help_shows_a_table_once() -> None:
    text = help_text(Tabled)
    assert "places.NAME:  (there are by default: home, away)" in text
    assert "--places.NAME.block-size INT" in text
    assert "[PDFLEET_PLACES_NAME_BLOCK_SIZE]" in text
    assert text.count("Tokens in a block.") == 2
