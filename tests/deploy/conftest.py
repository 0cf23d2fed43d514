"""Fixtures of the tests of what runs on Kubernetes: real etcd and NATS, each test its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Etcd, Nats


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
