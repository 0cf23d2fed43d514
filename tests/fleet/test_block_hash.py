"""Block names: the same everywhere, and never the same for two different things."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.block_hash import BlockNamer, HashKeys, PromptNames, block_hashes, short, short_names

KEYS = HashKeys(model="m", block_size=4)


def test_golden_vector() -> None:
    # A change here breaks every fleet that mixes versions: raise HASH_SPEC with it.
    names = block_hashes(range(9), HashKeys(model="model", block_size=4, adapter="a", salt="s"))
    assert [name.hex() for name in names] == GOLDEN
    assert short(names[0]) == int.from_bytes(bytes.fromhex(GOLDEN[0])[:8], "little")


GOLDEN = [
    "fba772b0f2efef7830dc0cac5ece50bc38c6658ade9ca81f4c606aa0b9c6f6d2",
    "d6c41304013aa7bb35ce1ee74a41088dbb52e33d3a0d4dc7b7ad8127508ea31c",
]


def test_processes_agree_whatever_their_hash_seed() -> None:
    code = "from fleet.block_hash import *; print(block_hashes(range(8), HashKeys('m', 4))[-1].hex())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert seen == {block_hashes(range(8), KEYS)[-1].hex() + "\n"}


def test_only_full_blocks_have_a_name() -> None:
    assert block_hashes([1, 2, 3], KEYS) == []
    assert len(block_hashes(range(11), KEYS)) == 2


def test_name_depends_on_all_before() -> None:
    one = block_hashes([1, 2, 3, 4, 5, 6, 7, 8], KEYS)
    other = block_hashes([9, 2, 3, 4, 5, 6, 7, 8], KEYS)
    assert one[1] != other[1]


def test_a_name_is_the_keyed_digest_of_its_prefix() -> None:
    tokens, keys = range(1000, 1012), HashKeys("m", 4, salt="s")
    for count, name in enumerate(block_hashes(tokens, keys), start=1):
        prefix = b"".join(token.to_bytes(4, "little") for token in tokens[: 4 * count])
        assert name == hashlib.blake2b(prefix, key=keys.root(), digest_size=32).digest()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 9))
def test_going_on_equals_naming_whole(tokens: list[int], first: int) -> None:
    whole, namer = block_hashes(tokens, KEYS), BlockNamer(KEYS)
    end = len(whole) * 4
    cut = min(first * 4, end)
    assert namer.extend(tokens[:cut]) + namer.extend(tokens[cut:end]) == whole
    with pytest.raises(ValueError, match="3 tokens do not fill blocks of 4"):
        namer.extend([1, 2, 3])


@given(st.integers(0, 1200), st.lists(st.integers(-310, 310), max_size=8), st.booleans())
def test_names_on_demand_are_the_same_in_any_order(tokens: int, looks: list[int], whole: bool) -> None:
    prompt = tuple(range(7, 7 + tokens))
    expected, names = short_names(block_hashes(prompt, KEYS)), PromptNames(prompt, KEYS)
    assert len(names) == len(expected)
    for look in looks:
        if -len(expected) <= look < len(expected):
            assert names[look] == expected[look]
        else:
            with pytest.raises(IndexError):
                names[look]
    assert names.coarse() == expected[names.grain - 1 :: names.grain]
    if whole:
        assert list(names[::-1]) == expected[::-1]
    assert list(names) == expected


TEXT = st.text(alphabet="Sx|\x00", max_size=3)


@given(st.tuples(TEXT, TEXT, TEXT), st.tuples(TEXT, TEXT, TEXT))
def test_extra_keys_never_run_into_each_other(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    names = [
        block_hashes(range(4), HashKeys(model=m, block_size=4, adapter=a, salt=s)) for m, a, s in (one, other)
    ]
    assert (names[0] == names[1]) == (one == other)
