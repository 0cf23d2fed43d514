"""A real fleet with API keys, https, mutual TLS and KV over UCX: who gets in, who does not, what it logs."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme

from fleet.errors import FleetError, WorkerLost
from fleet.wire.network import NetworkWire
from fleet.wire.session import WireSettings

pytestmark = pytest.mark.live

IN_ENVIRONMENT = "sk-for-tests-in-the-environment"


@dataclass(frozen=True)
class Guarded:
    url: str
    model: str
    state: Path
    key: str
    salt_secret: str
    trusting: ssl.SSLContext
    environment: dict[str, str]

    def ctl(self, *arguments: str) -> Any:
        return fleetctl(self.environment, *arguments, "--state-dir", str(self.state))

    def logs(self) -> str:
        return "".join(file.read_text(errors="replace") for file in self.state.rglob("*") if file.is_file())


def fleetctl(environment: dict[str, str], *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "fleetctl", *arguments, "--json"],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    ca = trustme.CA()
    cert = ca.issue_cert("127.0.0.1")
    ca.cert_pem.write_to_path(folder / "ca.pem")
    (folder / "cert.pem").write_bytes(b"".join(part.bytes() for part in cert.cert_chain_pems))
    cert.private_key_pem.write_to_path(folder / "key.pem")
    made = fleetctl({**os.environ}, "key", "new", "--tenant", "acme", "--file", str(folder / "keys.jsonl"))
    environment = {
        **os.environ,
        "PDFLEET_CONTROL_TLS_CA": str(folder / "ca.pem"),
        "PDFLEET_CONTROL_TLS_CERT": str(folder / "cert.pem"),
        "PDFLEET_CONTROL_TLS_KEY": str(folder / "key.pem"),
        "PDFLEET_HTTP_TLS_CERT": str(folder / "cert.pem"),
        "PDFLEET_HTTP_TLS_KEY": str(folder / "key.pem"),
        "PDFLEET_HTTP_KEYS_FILE": str(folder / "keys.jsonl"),
        "PDFLEET_HTTP_SALT_SECRET": "salt-secret-of-the-test",
        "PDFLEET_API_KEYS": f"zeta:{IN_ENVIRONMENT}",
    }
    state = folder / "state"
    said = fleetctl(
        environment, "up", "--detach", "--port", "0", "--model", "latency:base=2", "--state-dir", str(state),
        "--set", "transfer.transport=ucx",
    )  # fmt: skip
    secret = environment["PDFLEET_HTTP_SALT_SECRET"]
    trusting = ssl.create_default_context()
    ca.configure_trust(trusting)
    fleet = Guarded(said["url"], said["model"], state, made["key"], secret, trusting, environment)
    try:
        yield fleet
    finally:
        fleet.ctl("down")


def test_only_keys_get_in_and_tenants_share_nothing(guarded: Guarded) -> None:
    async def main() -> None:
        async def cached(key: str) -> int:
            http = openai.DefaultAsyncHttpxClient(verify=guarded.trusting)
            async with openai.AsyncOpenAI(
                base_url=guarded.url, api_key=key, max_retries=0, http_client=http
            ) as api:
                answer = await api.completions.create(
                    model=guarded.model, prompt="A prompt that is long enough. " * 20, max_tokens=3
                )
                assert answer.usage is not None
                assert answer.usage.prompt_tokens_details is not None
                return answer.usage.prompt_tokens_details.cached_tokens or 0

        with pytest.raises(openai.AuthenticationError):
            await cached("sk-of-nobody-at-all")
        assert await cached(guarded.key) == 0
        hit = await cached(guarded.key)
        assert hit > 500
        assert await cached(IN_ENVIRONMENT) == 0
        assert await cached(IN_ENVIRONMENT) == hit
        async with httpx.AsyncClient(timeout=60, verify=guarded.trusting) as client:
            root = guarded.url.removesuffix("/v1")
            assert (await client.get(f"{root}/health")).status_code == 200
            assert (await client.get(f"{root}/metrics")).status_code == 401

    asyncio.run(main())


def test_workers_hear_only_who_has_a_certificate(guarded: Guarded) -> None:
    workers = guarded.ctl("status")["workers"]
    assert {row["role"] for row in workers} == {"prefill", "decode"}

    async def main() -> None:
        plain = NetworkWire(WireSettings(connect_s=3.0))
        for row in workers:
            with pytest.raises(WorkerLost):
                await plain.open(row["sessions"])
            with pytest.raises(FleetError):
                await plain.status(row["address"], 3.0)
        await plain.close()

    asyncio.run(main())


def test_status_of_an_https_ingress_and_kv_over_tls(guarded: Guarded) -> None:
    assert guarded.url.startswith("https://127.0.0.1:")
    with httpx.Client(base_url=guarded.url, timeout=60, verify=guarded.trusting) as client:
        asked = client.post(
            "/completions",
            json={"model": guarded.model, "prompt": "A prompt of some blocks. " * 20, "max_tokens": 3},
            headers={"authorization": f"Bearer {guarded.key}"},
        )
        assert asked.status_code == 200
    status = guarded.ctl("status")
    assert status["router"]["state"] == "ready"
    (decode,) = [row for row in status["workers"] if row["role"] == "decode"]
    assert decode["counters"]["pulled_blocks"] > 0
    assert decode["counters"]["pull_failures"] == 0


def test_nothing_secret_is_written_down(guarded: Guarded) -> None:
    logs = guarded.logs()
    assert "serves" in logs
    for secret in (guarded.key, IN_ENVIRONMENT, guarded.salt_secret):
        assert secret not in logs
