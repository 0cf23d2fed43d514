"""KV layout and fingerprint: two workers pair only when every field agrees."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from fleet.kv_layout import Fingerprint, KvLayout

LAYOUT = KvLayout(layers=30, kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
PRINT = Fingerprint.of(LAYOUT, model="m", tokenizer="t", rope="theta=1e5")


def test_block_bytes_of_the_demo_model() -> None:
    assert LAYOUT.block_bytes == 360 * 1024
    assert LAYOUT.blocks_for(0) == 0
    assert LAYOUT.blocks_for(16) == 1
    assert LAYOUT.blocks_for(17) == 2


@pytest.mark.parametrize("name", [item.name for item in fields(Fingerprint)])
def test_each_field_refuses_and_names_itself(name: str) -> None:
    value = getattr(PRINT, name)
    other = replace(PRINT, **{name: value + 1 if isinstance(value, int) else value + "x"})
    reason = PRINT.mismatch(other)
    assert reason is not None
    assert reason.startswith(f"{name}: ")
    assert PRINT.digest() != other.digest()


def test_equal_prints_agree() -> None:
    assert PRINT.mismatch(replace(PRINT)) is None
    assert PRINT.digest() == replace(PRINT).digest()
