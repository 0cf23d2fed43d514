"""Fixtures of the live tests: real servers, each test its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from server_fixtures import etcd, nats

__all__ = ["demo_fleet", "etcd", "nats"]


@pytest.fixture(scope="session")
def demo_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What `fleetctl up` says of a fleet with the demo model: `url` and `model` among it. For tests that
    leave it as they found it.

    In float32: in bfloat16, which some processors have, a greedy answer may change with its batch."""
    state = str(tmp_path_factory.mktemp("demo"))

    def fleetctl(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fleetctl", *arguments, "--state-dir", state]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    up = fleetctl(
        *("up", "--detach", "--port", "0", "--prefill", "1", "--decode", "1", "--json"),
        *("--set", f"engine.kv-memory-bytes={96 << 20}", "--set", "engine.dtype=float32"),
    )
    try:
        assert up.returncode == 0, up.stdout + up.stderr + fleetctl("logs", "--lines", "40").stdout
        yield json.loads(up.stdout)
    finally:
        fleetctl("down")
