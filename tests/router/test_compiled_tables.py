"""Compiled tables do what those in Python do, whatever they are given; `test_prefix_index.py` tests both."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from fleet.block_hash import HashKeys, block_hashes, short_names
from fleet.events import BlocksDropped, BlocksStored, Cleared, KvEvent, KvEvents, KvSnapshot, Tier
from fleet.ids import Incarnation, WorkerId
from fleet.kv_log import KvLog
from fleet.native import Unusable
from fleet.wire.codec import Malformed, decode_kv_events, encode_kv_events
from router.native.tables import NativeNames, NativeTable, NativeTables, load_library
from router.prefix_index import Outcome, PrefixIndex
from router.prefix_tables import PlainTable, PlainTables
from router.settings import IndexSettings

try:
    LIBRARY = load_library()
except Unusable as why:
    pytest.skip(str(why), allow_module_level=True)

HIGHEST = (1 << 64) - 1
NAMES = st.lists(st.one_of(st.integers(0, 40), st.sampled_from([0, HIGHEST, 1 << 63])), max_size=30)
TIERS = st.sampled_from(list(Tier))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), NAMES, TIERS),
        st.tuples(st.just("drop"), NAMES, TIERS),
        st.tuples(st.just("drop_oldest"), st.integers(0, 12), TIERS),
        st.tuples(st.just("clear"), st.none(), TIERS),
        st.tuples(st.just("expect"), st.sampled_from([0, 5, 40, 3000]), TIERS),
    ),
    max_size=60,
)


def same(compiled: NativeTable, plain: PlainTable) -> None:
    compiled.validate()
    for tier in Tier:
        assert compiled.at(tier) == list(plain.at(tier)), "the oldest first"
        assert compiled.count(tier) == plain.count(tier)
    assert (compiled.blocks, compiled.xor) == (plain.blocks, plain.xor)
    assert all(compiled.has(name) == plain.has(name) for name in range(42))


@given(STEPS)
def test_a_table_is_what_the_same_steps_make_of_one_in_python(steps: list[tuple[str, object, Tier]]) -> None:
    compiled, plain = NativeTable(LIBRARY), PlainTable()
    for what, given_, tier in steps:
        if what == "clear":
            assert compiled.clear() == plain.clear()
        elif what == "expect":
            compiled.expect(given_)  # type: ignore[arg-type]
        elif what == "drop_oldest":
            assert compiled.drop_oldest(tier, given_) == plain.drop_oldest(tier, given_)  # type: ignore[arg-type]
        else:
            assert getattr(compiled, what)(given_, tier) == getattr(plain, what)(given_, tier)
        same(compiled, plain)


@pytest.mark.parametrize("shift", [0, 1, 20, 44, 63])
def test_many_names_come_and_go(shift: int) -> None:
    """So many that it grows, and that gaps in its order are closed; names alike in most of their bits."""
    chance, compiled, plain = random.Random(shift), NativeTable(LIBRARY), PlainTable()
    for turn in range(60):
        names = [chance.randrange(6000) << shift & HIGHEST for _ in range(500)]
        assert compiled.store(names) == plain.store(names)
        gone = [*names[::3], *(chance.randrange(6000) << shift & HIGHEST for _ in range(200 + 5 * turn))]
        assert compiled.drop(gone) == plain.drop(gone)
        assert compiled.drop_oldest(Tier.DEVICE, 20) == plain.drop_oldest(Tier.DEVICE, 20)
    same(compiled, plain)


def test_what_is_no_name_is_an_error_and_changes_nothing() -> None:
    table = NativeTable(LIBRARY)
    table.store([1, 2])
    for wrong in (-1, 1 << 64, "3", None, 4.0):
        for change in (table.store, table.drop):
            with pytest.raises((OverflowError, TypeError)):
                change([1, 9, wrong])  # type: ignore[list-item]
        with pytest.raises((OverflowError, TypeError)):
            NativeTables(LIBRARY).lookup({WorkerId("w"): table}, Tier.DEVICE)([1, wrong])  # type: ignore[list-item]
    assert table.at(Tier.DEVICE) == [1, 2]
    with pytest.raises(ValueError, match="at most"):
        table.store(range(1 << 25))
    table.validate()


KEYS = HashKeys("model", 16, "adapter", "salt")


@given(
    st.integers(0, 3000),
    st.sampled_from([1, 3, 16, 31, 32, 33, 64, 500, 1500]),
    st.lists(st.integers(0, 3000), max_size=6),
    st.integers(0, 2**32),
)
def test_names_are_those_of_the_blocks_however_they_are_looked_at(
    count: int, size: int, looks: list[int], seed: int
) -> None:
    chance, keys = random.Random(seed), structs.replace(KEYS, block_size=size)
    tokens = tuple(chance.getrandbits(chance.choice((3, 16, 32))) for _ in range(count))
    true, names = short_names(block_hashes(tokens, keys)), NativeNames(LIBRARY, tokens, keys)
    assert len(names) == len(true)
    for look in looks:
        if look < len(true):
            assert names[look] == true[look]
            assert names[-1 - look] == true[-1 - look]
        else:
            with pytest.raises(IndexError):
                names[look]
    assert names[::-2] == true[::-2]
    assert list(names) == true


def test_golden_names() -> None:
    names = NativeNames(LIBRARY, range(9), HashKeys(model="model", block_size=4, adapter="a", salt="s"))
    assert [name.to_bytes(8, "little").hex() for name in names] == ["fba772b0f2efef78", "d6c41304013aa7bb"]


@pytest.mark.parametrize("wrong", [-1, 1 << 32, 1 << 64, "3", None])
def test_what_is_no_token_is_an_error_whenever_it_is_looked_at(wrong: object) -> None:
    names = NativeNames(LIBRARY, (*range(40), wrong, *range(40)), KEYS)  # type: ignore[arg-type]
    assert names[1] == short_names(block_hashes(range(32), KEYS))[1]
    for _ in range(2):
        with pytest.raises((OverflowError, TypeError)):
            names[2]


def test_a_prompt_with_such_a_token_gives_no_names_that_are_wrong() -> None:
    """Part of a block behind those that are named was read before the token was."""
    tokens, keys = (*range(1900), -1, *range(700)), structs.replace(KEYS, block_size=500)
    names = NativeNames(LIBRARY, tokens, keys)
    with pytest.raises(OverflowError):
        names[3]
    with pytest.raises(OverflowError):
        names[2]


W1, W2, LIFE = WorkerId("w1"), WorkerId("w2"), "life"


def two_indexes() -> tuple[PrefixIndex, PrefixIndex]:
    made = (
        PrefixIndex(IndexSettings(max_blocks=30), kind) for kind in (NativeTables(LIBRARY), PlainTables())
    )
    compiled, plain = made
    for index in (compiled, plain):
        for worker in (W1, W2):
            index.add_worker(worker, Incarnation(LIFE))
            index.load_snapshot(KvLog(worker, Incarnation(LIFE)).snapshot())
    return compiled, plain


def take(index: PrefixIndex, data: bytes) -> Outcome | None:
    """As the watcher does. None: they are no message."""
    followed = index.follow(data)
    try:
        message = decode_kv_events(data)
    except Malformed:
        assert not followed, "what cannot be decoded was taken in"
        return None
    return Outcome.APPLIED if followed else index.apply(message)


def drawn(chance: random.Random, worker: WorkerId, number: int) -> bytes:
    """A message, mostly one that is to come now, and mostly whole."""
    events: list[KvEvent] = []
    for _ in range(chance.randrange(4)):
        names = tuple(chance.choices([*range(40), 1 << 63, HIGHEST], k=chance.randrange(25)))
        tier = chance.choice(list(Tier))
        events.append(
            chance.choices([BlocksStored(names, tier), BlocksDropped(names, tier), Cleared()], [7, 3, 1])[0]
        )
    life = LIFE if chance.random() < 0.95 else "lift"
    number += chance.choices([1, 0, 2, 1 << 40], [27, 1, 1, 1])[0]
    data = encode_kv_events(KvEvents(worker, Incarnation(life), number, tuple(events)))
    kind, at = chance.random(), chance.randrange(len(data) + 1)
    if kind < 0.7:
        return data
    if kind < 0.8:
        return data[:at]
    if kind < 0.85:
        return data[:at] + chance.randbytes(chance.randint(1, 12)) + data[at:]
    if kind < 0.95:
        return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
    return data + data[chance.randrange(len(data) + 1) :]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_bytes_of_events_do_what_the_decoded_ones_do(seed: int) -> None:
    """In order and not, whole and damaged, at the cap: the same outcome, and the same is known."""
    chance = random.Random(seed)
    compiled, plain = two_indexes()
    at = {W1: 0, W2: 0}
    for _ in range(30):
        worker = chance.choice([W1, W1, W1, W2, W2, WorkerId("w3")])
        data = drawn(chance, worker, at.get(worker, 0))
        outcome = take(compiled, data)
        assert outcome is take(plain, data)
        if outcome in (Outcome.APPLIED, Outcome.UNPROVEN):
            told = decode_kv_events(data)
            at[told.worker] = told.sequence
            if outcome is Outcome.UNPROVEN:
                for index in (compiled, plain):
                    index.load_snapshot(KvSnapshot(told.worker, told.incarnation, told.sequence, (1, 2, 3)))
        compiled.validate()
        plain.validate()
        assert (compiled.size, compiled.forgotten) == (plain.size, plain.forgotten)
        assert compiled.unproven() == plain.unproven()
        for known in (W1, W2):
            for tier in Tier:
                assert compiled.holds(known, tier) == plain.holds(known, tier)
        begun = [index.match(range(12), 0.0, Tier.DISK).keys() for index in (compiled, plain)]
        assert begun[0] == begun[1], "depths may differ where a cache has a hole, as never happens"


def field(tag: int, data: bytes) -> bytes:
    return bytes([tag, len(data)]) + data


STORED = field(0x0A, field(0x0A, bytes(8)) + field(0x12, b"device"))
HEAD = field(0x0A, b"w1") + field(0x12, b"life")


@pytest.mark.parametrize(
    "rest",
    [
        b"\x18\x01" + field(0x22, STORED + field(0x12, STORED[2:])),
        b"\x18\x01" + field(0x22, STORED + field(0x2A, b"new")),
        b"\x18\x01" + field(0x22, field(0x0A, STORED[2:] + field(0x1A, b"new"))),
        b"\x18\x01" + field(0x22, field(0x0A, STORED[2:] * 2)),
        b"\x18\x01" + field(0x22, STORED) + b"\x18\x01",
        field(0x22, STORED) + b"\x18\x01",
        b"\x18\x01" + field(0x22, b""),
        b"\x18\x01" + field(0x22, field(0x1A, b"")),
        b"\x18\x01" + field(0x22, field(0x0A, field(0x0A, bytes(8)))),
        b"\x18\x01" + field(0x22, field(0x0A, field(0x0A, bytes(8)) + field(0x12, b"disks"))),
        b"\x18\x01" + field(0x22, field(0x0A, field(0x0A, bytes(9)) + field(0x12, b"disk"))),
        b"\x18" + b"\x81" + 8 * b"\x80" + b"\x00",
        b"\x18" + 10 * b"\xff",
        b"\x18\x01\x22" + 9 * b"\xff" + b"\x01",
        b"\x18\x01\x22\xff\xff\xff\xff\x0f",
        b"",
    ],
)
def test_what_is_said_in_another_way_is_left_to_be_decoded(rest: bytes) -> None:
    compiled, plain = two_indexes()
    assert not compiled.follow(HEAD + rest)
    assert take(compiled, HEAD + rest) is take(plain, HEAD + rest)
    assert compiled.holds(W1) == plain.holds(W1)
    assert compiled.unproven() == plain.unproven()


def test_a_usual_message_is_followed_and_another_is_left() -> None:
    compiled, plain = two_indexes()
    events = BlocksStored((1, 2)), BlocksStored((3,), Tier.DISK), BlocksDropped((1,))
    usual = encode_kv_events(KvEvents(W1, Incarnation(LIFE), 1, events))
    assert not plain.follow(usual)
    one = encode_kv_events(KvEvents(W1, Incarnation(LIFE), 1, events[:1]))
    bare = encode_kv_events(KvEvents(W1, Incarnation(LIFE), 1, ()))
    assert [end for end in range(len(one)) if one[:end] != bare and compiled.follow(one[:end])] == []
    assert not compiled.follow(usual + b"\x00")
    assert compiled.holds(W1) == frozenset()
    assert compiled.follow(usual)
    assert not compiled.follow(usual), "a duplicate"
    assert (compiled.holds(W1), compiled.holds(W1, Tier.DISK), compiled.size) == ({2}, {3}, 2)
    compiled.doubt(W1, "a test")
    assert not compiled.follow(encode_kv_events(KvEvents(W1, Incarnation(LIFE), 2, ())))
    compiled.remove_worker(W2)
    assert not compiled.follow(encode_kv_events(KvEvents(W2, Incarnation(LIFE), 1, ())))
    compiled.validate()
