"""Cards: there and back, newer ones, and broken ones that are named."""

from __future__ import annotations

import json

import pytest

from fleet.card_codec import decode_card, encode_card
from fleet.ids import new_incarnation, new_worker_id
from fleet.kv_layout import Fingerprint, KvLayout
from fleet.member import MemberState, Role, WorkerCard, worker_key

CARD = WorkerCard(
    id=new_worker_id("decode"),
    incarnation=new_incarnation(),
    role=Role.DECODE,
    state=MemberState.READY,
    address="127.0.0.1:7000",
    sessions="127.0.0.1:7002",
    transfer="ucx://127.0.0.1:7001",
    model="m",
    fingerprint=Fingerprint.of(KvLayout(2, 1, 64, 16, "bfloat16"), model="x", tokenizer="y"),
    blocks=100,
    max_tokens=8192,
    version="0.1.0",
    pid=1,
    host="h",
)


def test_there_and_back() -> None:
    assert decode_card(encode_card(CARD)) == CARD


def test_a_newer_workers_card_is_read() -> None:
    newer = {**json.loads(encode_card(CARD)), "colour": "red"}
    assert decode_card(json.dumps(newer).encode()) == CARD


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"role": "cook"}, "role"),
        ({"blocks": "many"}, "blocks"),
        ({"fingerprint": {}}, "fingerprint"),
        ({"address": None}, "address"),
        ({"sessions": None}, "sessions"),
    ],
)
def test_a_broken_card_is_named_with_its_field(change: dict[str, object], says: str) -> None:
    broken = json.dumps({**json.loads(encode_card(CARD)), **change}).encode()
    with pytest.raises(ValueError, match=f"{worker_key('f', 'w')}.*{says}"):
        decode_card(broken, worker_key("f", "w"))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff\xfe", b'"' + b"\xff" * 10 + b'"', encode_card(CARD)[:-5]]
)
def test_what_is_no_card_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="at here"):
        decode_card(data, "here")
