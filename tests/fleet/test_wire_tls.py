"""Mutual TLS on the wire: who has a certificate of the fleet's authority is heard, and nobody else."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from fleet.errors import FleetError, WorkerLost
from fleet.events import KvDigest, KvSnapshot, LoadReport
from fleet.handoff import ToWorker
from fleet.ids import Incarnation, WorkerId
from fleet.member import MemberState
from fleet.settings import ControlSettings, SettingsError
from fleet.tls import Tls
from fleet.wire import WorkerEnd
from fleet.wire.network import NetworkWire, serve
from fleet.wire.session import WireSettings

SHORT = WireSettings(connect_s=2.0)
REPORT = LoadReport(WorkerId("w"), Incarnation("i"), "ready", 1, 2, 3, 4, 5, KvDigest(6, 7, 8))


@dataclass
class Service:
    """Counts who got through."""

    sessions: int = 0
    calls: int = 0

    def opened(self, end: WorkerEnd) -> None:
        self.sessions += 1

    def received(self, end: WorkerEnd, message: ToWorker) -> None: ...

    def closed(self, end: WorkerEnd) -> None: ...

    def snapshot(self, part: int = 0) -> KvSnapshot:
        self.calls += 1
        return KvSnapshot(WorkerId("w"), Incarnation("i"), 0, ())

    def status(self) -> LoadReport:
        self.calls += 1
        return REPORT

    async def drain(self, limit_s: float) -> MemberState:
        self.calls += 1
        return MemberState.DRAINING


def identity(ca: trustme.CA, *names: str) -> Tls:
    cert = ca.issue_cert(*names)
    chain = b"".join(part.bytes() for part in cert.cert_chain_pems)
    return Tls(ca.cert_pem.bytes(), chain, cert.private_key_pem.bytes())


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def test_both_with_certificates_of_one_authority(ca: trustme.CA) -> None:
    async def main() -> None:
        service = Service()
        server = await serve(service, settings=SHORT, tls=identity(ca, "127.0.0.1"))
        wire = NetworkWire(SHORT, identity(ca, "router.example"))
        session = await wire.open(server.sessions)
        assert await wire.status(server.address, 10) == REPORT
        assert (service.sessions, service.calls) == (1, 1)
        await session.close()
        await wire.close()
        await server.close(1)

    asyncio.run(main())


KINDS = ("plain client", "plain worker", "client of another authority", "worker of another authority",
         "worker of another name")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_others_are_refused(ca: trustme.CA, kind: str) -> None:
    other = trustme.CA()
    good_client, good_worker = identity(ca, "router.example"), identity(ca, "127.0.0.1")
    strange = identity(other, "127.0.0.1")
    # Believes the fleet's authority, but has a certificate of another: only the worker can refuse it.
    posing = Tls(ca.cert_pem.bytes(), strange.cert, strange.key)
    client, worker = {
        "plain client": (None, good_worker),
        "plain worker": (good_client, None),
        "client of another authority": (posing, good_worker),
        "worker of another authority": (good_client, posing),
        "worker of another name": (good_client, identity(ca, "worker.example")),
    }[kind]

    async def main() -> None:
        service = Service()
        server = await serve(service, settings=SHORT, tls=worker)
        wire = NetworkWire(SHORT, client)
        with pytest.raises(WorkerLost):
            await wire.open(server.sessions)
        with pytest.raises(FleetError):
            await wire.status(server.address, 2)
        assert (service.sessions, service.calls) == (0, 0)
        await wire.close()
        await server.close(1)

    asyncio.run(main())


def test_settings(tmp_path: Path, ca: trustme.CA) -> None:
    held = identity(ca, "x")
    files = [tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem")]
    for file, data in zip(files, (held.ca, held.cert, held.key), strict=True):
        file.write_bytes(data)
    assert ControlSettings().tls() is None
    assert ControlSettings(tls_ca=files[0], tls_cert=files[1], tls_key=files[2]).tls() == held
    assert held.key.decode() not in repr(held)
    with pytest.raises(ValueError, match="together"):
        ControlSettings(tls_cert=files[1], tls_key=files[2])
    with pytest.raises(SettingsError, match=r"none\.pem"):
        ControlSettings(tls_ca=tmp_path / "none.pem", tls_cert=files[1], tls_key=files[2]).tls()


def test_a_certificate_that_is_none(ca: trustme.CA) -> None:
    async def main() -> None:
        with pytest.raises((OSError, ValueError)):
            await serve(Service(), tls=Tls(b"x", b"y", b"z"))

    asyncio.run(main())
