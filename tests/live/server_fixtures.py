"""Fixtures of real servers, each test its own; for the tests of any folder that wants them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Etcd, Nats

__all__ = ["etcd", "nats"]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    server = Etcd(tmp_path / "etcd")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[Nats]:
    server = Nats(tmp_path / "nats")
    try:
        server.start()
        yield server
    finally:
        server.kill()
