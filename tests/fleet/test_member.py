"""Membership states: which step is allowed."""

from __future__ import annotations

import itertools

import pytest

from fleet.member import MemberState, step

ALLOWED = {
    ("starting", "ready"),
    ("starting", "left"),
    ("ready", "draining"),
    ("ready", "left"),
    ("draining", "ready"),
    ("draining", "left"),
}


@pytest.mark.parametrize(("state", "to"), list(itertools.product(MemberState, MemberState)))
def test_steps(state: MemberState, to: MemberState) -> None:
    if (state, to) in ALLOWED:
        assert step(state, to) is to
    else:
        with pytest.raises(ValueError, match=f"{state} to {to}"):
            step(state, to)
