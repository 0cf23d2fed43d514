"""Steps of a rollout by property: both roles in proportion, within surge, never fewer than promised."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.controller.rollout import Side, next_step, part, shrink

ROLES = ("prefill", "decode")


class Pool:
    """Workers of one role: new ones get ready when it pleases them, old ones leave likewise."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.old, self.leaving = wanted, 0
        self.new, self.new_ready = 0, 0

    def side(self) -> Side:
        return Side(self.wanted, self.new, self.new, self.new_ready, self.old, self.old + self.leaving)

    def told(self, new: int, old: int) -> None:
        self.leaving += max(0, self.old - old)
        self.old = old
        self.new = new
        self.new_ready = min(self.new_ready, new)

    def moves(self, dice: random.Random) -> None:
        if self.new_ready < self.new and dice.random() < 0.6:
            self.new_ready += 1
        if self.leaving and dice.random() < 0.6:
            self.leaving -= 1


@given(
    st.integers(0, 12), st.integers(1, 24), st.integers(0, 100), st.integers(0, 100), st.integers(0, 10_000)
)
def test_a_rollout_ends_and_keeps_what_it_promises(
    prefill: int, decode: int, surge: int, missing: int, seed: int
) -> None:
    if surge == missing == 0:
        surge = 25
    dice = random.Random(seed)
    pools = {"prefill": Pool(prefill), "decode": Pool(decode)}
    for _ in range(2000):
        step = next_step({role: pool.side() for role, pool in pools.items()}, surge, missing)
        again = next_step({role: pool.side() for role, pool in pools.items()}, surge, missing)
        assert again == step
        if step.complete:
            break
        for role, pool in pools.items():
            pool.told(step.new[role], step.old[role])
            most, least = part(surge, pool.wanted), part(missing, pool.wanted)
            assert pool.old + pool.leaving + pool.new <= pool.wanted + most, (role, step)
            assert pool.old + pool.new_ready >= pool.wanted - least, (role, step)
        # In proportion: how much of each role is of the new revision differs by one step of one worker.
        shares = [(pool.new, pool.wanted) for pool in pools.values() if pool.wanted]
        if len(shares) == 2 and step.steps:
            (one, of_one), (other, of_other) = shares
            assert abs(one / of_one - other / of_other) <= 1 / step.steps + 1 / min(of_one, of_other), step
        for pool in pools.values():
            pool.moves(dice)
    else:
        raise AssertionError("it does not end")
    assert all(pool.new == pool.new_ready == pool.wanted and not pool.old for pool in pools.values())


def test_four_and_twelve_go_over_as_one_and_three() -> None:
    sides = {"prefill": Side(4, old=4, old_there=4), "decode": Side(12, old=12, old_there=12)}
    step = next_step(sides, 25, 0)
    assert (step.new, step.old, step.steps) == ({"prefill": 1, "decode": 3}, {"prefill": 4, "decode": 12}, 4)
    ready = {
        "prefill": Side(4, 1, 1, 1, 4, 4),
        "decode": Side(12, 3, 3, 2, 12, 12),
    }
    assert next_step(ready, 25, 0).old == {"prefill": 4, "decode": 12}, "decode is not ready: nobody leaves"
    both = {"prefill": Side(4, 1, 1, 1, 4, 4), "decode": Side(12, 3, 3, 3, 12, 12)}
    assert next_step(both, 25, 0).old == {"prefill": 3, "decode": 9}


def test_without_surge_the_old_make_room_first() -> None:
    sides = {"prefill": Side(2, old=2, old_there=2), "decode": Side(4, old=4, old_there=4)}
    step = next_step(sides, 0, 25)
    assert step.new == {"prefill": 0, "decode": 0}
    assert step.old == {"prefill": 1, "decode": 3}
    assert "room" in step.why


def test_paused_nobody_starts_or_leaves() -> None:
    sides = {"prefill": Side(4, 1, 1, 1, 3, 3), "decode": Side(12, 3, 3, 3, 9, 9)}
    step = next_step(sides, 25, 0, paused=True)
    assert (step.new, step.old) == ({"prefill": 1, "decode": 3}, {"prefill": 3, "decode": 9})
    assert "paused" in step.why


def test_old_ones_that_do_not_serve_hold_no_place() -> None:
    sides = {"prefill": Side(1, old=1, old_there=1), "decode": Side(4, old=4, old_there=4, old_stuck=4)}
    assert next_step(sides, 0, 25).old["decode"] == 0


READY = {"prefill": Side(1, 1, 1, 1), "decode": Side(2, 2, 2, 2)}


@pytest.mark.parametrize(
    "change",
    [
        {"decode": Side(2, 2, 2, 1)},
        {"decode": Side(2, 1, 1, 1)},
        {"decode": Side(2, 2, 3, 2)},
        {"decode": Side(2, 2, 2, 2, 0, 1)},
        {"decode": Side(2, 2, 2, 2, 1, 1)},
        {"prefill": Side(1, 1, 1, 0)},
        {"prefill": Side(2, 1, 1, 1)},
    ],
)
def test_complete_is_said_only_when_all_are_new_and_ready(change: dict[str, Side]) -> None:
    """F105: many old pods that are ready are no success."""
    assert next_step(READY, 25, 0).complete
    assert not next_step({**READY, **change}, 25, 0).complete


def test_unproven_revisions_go_first_and_the_proven_one_makes_up() -> None:
    assert shrink({"a": 2, "b": 2}, 3, proven="a") == {"a": 2, "b": 1}
    assert shrink({"a": 2, "b": 2}, 1, proven="a") == {"a": 1, "b": 0}
    assert shrink({"a": 2, "b": 1}, 4, proven="a") == {"a": 3, "b": 1}
    assert shrink({"b": 1, "c": 2}, 4, proven="a") == {"b": 1, "c": 3}
    assert shrink({}, 3, proven="a") == {}
