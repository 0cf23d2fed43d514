"""The speed of pulls: what is measured, and that it is forgotten."""

from __future__ import annotations

from kv_transfer.pull_speed import PullSpeed


def test_unknown_until_measured_and_again_when_it_is_old_news() -> None:
    speed = PullSpeed()
    assert speed.bytes_s(5.0) is None
    speed.add(1000, 2.0, now=5.0)
    assert speed.bytes_s(5.0) == 500.0
    assert speed.bytes_s(14.0) == 500.0
    assert speed.bytes_s(16.0) is None
    speed.add(4000, 1.0, now=16.0)
    assert speed.bytes_s(16.0) == 4000.0, "what was before has been forgotten"


def test_a_tiny_pull_hardly_counts() -> None:
    speed = PullSpeed()
    speed.add(1_000_000, 1.0, now=0.0)
    speed.add(100, 0.005, now=1.0)
    found = speed.bytes_s(1.0)
    assert found is not None
    assert found > 900_000
