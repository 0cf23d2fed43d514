"""Block names: the same everywhere, and never the same for two different things."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from fleet.block_hash import HashKeys, block_hashes, short

KEYS = HashKeys(model="m", block_size=4)


def test_golden_vector() -> None:
    # A change here breaks every fleet that mixes versions: raise HASH_SPEC with it.
    names = block_hashes(range(9), HashKeys(model="model", block_size=4, adapter="a", salt="s"))
    assert [name.hex() for name in names] == GOLDEN
    assert short(names[0]) == int.from_bytes(bytes.fromhex(GOLDEN[0])[:8], "little")


GOLDEN = [
    "9e8ce59c12fbe4b96d46af1bbe7ff67cfd461a52385bd94652b7614d7633b8e9",
    "64115fc17a00dcb6bbf7c8574bd3711a226c3e67433118d5a1e9cf3459b73ea6",
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


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 9))
def test_continuing_a_chain_equals_hashing_whole(tokens: list[int], skip: int) -> None:
    whole = block_hashes(tokens, KEYS)
    skip = min(skip, len(whole))
    parent = whole[skip - 1] if skip else b""
    assert whole[:skip] + block_hashes(tokens, KEYS, parent=parent, skip=skip) == whole


TEXT = st.text(alphabet="Sx|\x00", max_size=3)


@given(st.tuples(TEXT, TEXT, TEXT), st.tuples(TEXT, TEXT, TEXT))
def test_extra_keys_never_run_into_each_other(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    names = [
        block_hashes(range(4), HashKeys(model=m, block_size=4, adapter=a, salt=s)) for m, a, s in (one, other)
    ]
    assert (names[0] == names[1]) == (one == other)
