"""etcd and NATS over mutual TLS, by settings; a server that offers none is not spoken to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from servers import Etcd, Nats, eventually

from fleet.bus.nats_bus import NatsBus
from fleet.errors import Unavailable
from fleet.registry.etcd_registry import EtcdRegistry
from fleet.settings import ControlSettings

pytestmark = pytest.mark.live


@dataclass(frozen=True)
class Files:
    ca: Path
    cert: Path
    key: Path

    def control(self, **more: str) -> ControlSettings:
        return ControlSettings(
            etcd_ca=self.ca, nats_ca=self.ca, tls_ca=self.ca, tls_cert=self.cert, tls_key=self.key, **more
        )


@pytest.fixture
def files(tmp_path: Path) -> Files:
    ca = trustme.CA()
    # One certificate plays server and client here: both sides check it.
    cert = ca.issue_cert("127.0.0.1")
    held = Files(tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem")
    ca.cert_pem.write_to_path(held.ca)
    held.cert.write_bytes(b"".join(part.bytes() for part in cert.cert_chain_pems))
    cert.private_key_pem.write_to_path(held.key)
    return held


def test_etcd_wants_a_certificate(tmp_path: Path, files: Files) -> None:
    options = ("--client-cert-auth", "--trusted-ca-file", str(files.ca))
    etcd = Etcd(tmp_path / "etcd", options, tls=(files.cert, files.key))

    async def main() -> None:
        registry = EtcdRegistry.of(files.control(etcd=etcd.address))
        lease = await registry.lease(5)
        await lease.put("/a", b"1")
        assert await registry.get("/a") == b"1"
        await lease.close()
        await registry.close()
        without = EtcdRegistry(etcd.address, ca=files.ca)
        with pytest.raises(Unavailable):
            await without.get("/a")
        await without.close()

    try:
        etcd.start()
        asyncio.run(main())
    finally:
        etcd.kill()


def test_nats_wants_a_certificate(tmp_path: Path, files: Files) -> None:
    options = ("--tlsverify", "--tlscert", str(files.cert), "--tlskey", str(files.key), "--tlscacert",
               str(files.ca))  # fmt: skip
    nats = Nats(tmp_path / "nats", options)

    async def main() -> None:
        control = files.control(nats=nats.url)
        bus, plain = NatsBus(control.nats, control.nats_tls()), NatsBus(control.nats)
        box = await bus.subscribe("a")
        await eventually(lambda: bus.connected)
        await bus.publish("a", b"1")
        async with asyncio.timeout(20):
            assert (await anext(aiter(box))).data == b"1"
        assert plain.connections == 0
        await bus.close()
        await plain.close()

    try:
        nats.start()
        asyncio.run(main())
    finally:
        nats.kill()


def test_nats_without_tls_is_not_spoken_to(
    tmp_path: Path, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    nats = Nats(tmp_path / "nats")

    async def main() -> None:
        control = files.control(nats=nats.url)
        bus = NatsBus(control.nats, control.nats_tls())
        await eventually(lambda: "offers no TLS" in caplog.text)
        assert bus.connections == 0
        await bus.close()

    try:
        nats.start()
        asyncio.run(main())
    finally:
        nats.kill()
