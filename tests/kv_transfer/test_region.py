"""Pool memory: shared by descriptor, not writable by a peer, not what it claims is refused."""

from __future__ import annotations

import os

import pytest

from kv_transfer.region import Region, checksum
from kv_transfer.settings import TransferSettings


def test_a_peer_sees_the_bytes_and_cannot_write_them() -> None:
    own = Region.allocate(4, 1000)
    peer = Region.attach(own.read_only(), 4, 1000)
    own.array[2] = 7
    assert peer.array[2].tolist() == [7] * 1000
    with pytest.raises(ValueError, match="read-only"):
        peer.array[2] = 1
    assert checksum(own.array[2]) == checksum(peer.array[2]) != checksum(own.array[1])
    own.close()
    peer.close()


def test_memory_of_another_size_or_unsealed_is_refused() -> None:
    own = Region.allocate(4, 1000)
    with pytest.raises(ValueError, match="4000 bytes"):
        Region.attach(own.read_only(), 5, 1000)
    own.close()
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4000)
    with pytest.raises(ValueError, match="not sealed"):
        Region.attach(unsealed, 4, 1000)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(unsealed)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="0 × 10"):
        Region.allocate(0, 10)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("transport", "rdma"),
        ("transport", ""),
        ("lease_s", 0),
        ("chunk_bytes", 1),
        ("chunk_bytes", 1 << 30),
        ("in_flight_bytes", 4096),
        ("fence_s", -1),
    ],
)
def test_impossible_settings_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        TransferSettings(**{field: value})  # type: ignore[arg-type]


def test_a_list_of_transports_keeps_its_order() -> None:
    assert TransferSettings(transport="ucx, shm").names() == ("ucx", "shm")
