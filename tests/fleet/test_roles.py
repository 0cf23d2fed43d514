"""The other role as a process finds it: by its entry point, with settings of its own."""

from __future__ import annotations

import pytest

from fleet.member import Role
from fleet.roles import other_roles
from fleet.settings import SettingsError


@pytest.mark.parametrize(("own", "other", "steps"), [("prefill", "decode", 128), ("decode", "prefill", 512)])
def test_each_room_finds_the_other_without_importing_it(own: str, other: str, steps: int) -> None:
    ((role, settings),) = other_roles(Role(own), "")
    assert role.role == other
    assert type(settings) is role.settings
    assert settings.engine.max_step_tokens == steps
    ((_, set_by_flags),) = other_roles(Role(own), "--engine.max-step-tokens=64 --model 'two words'")
    assert (set_by_flags.engine.max_step_tokens, set_by_flags.model) == (64, "two words")


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--no-such-thing=1", "--no-such-thing"),
        ("--engine.max-step-tokens=8", "max_step_tokens"),
        ("--model 'torn", "quotation"),
        ("--config nowhere.toml", "nowhere.toml"),
    ],
)
def test_flags_that_cannot_be_are_an_error_at_the_start(flags: str, names: str) -> None:
    with pytest.raises(SettingsError, match=f"--other-role: .*{names}"):
        other_roles(Role.PREFILL, flags)
