"""Mutual TLS on the wire: who has a certificate of the fleet's authority is heard, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import trustme
import uvloop

from fleet.errors import FleetError, WorkerLost
from fleet.events import KvDigest, KvSnapshot, LoadReport
from fleet.handoff import ToWorker
from fleet.ids import Incarnation, WorkerId
from fleet.member import MemberState
from fleet.settings import ControlSettings, SettingsError
from fleet.tls import Tls
from fleet.wire import WireServer, WorkerEnd
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


BOTH = ["sessions", "calls"]


async def refused(server: WireServer, own: Tls) -> dict[str, str]:
    """By whom of the two ports, and what was said."""
    wire = NetworkWire(SHORT, own)
    found = {}
    try:
        session = await wire.open(server.sessions)
        await session.close()
    except WorkerLost as error:
        found["sessions"] = error.message
    try:
        await wire.status(server.address, 2)
    except FleetError as error:
        found["calls"] = error.message
    await wire.close()
    return found


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_one_name_for_all_whatever_their_hosts_are(
    ca: trustme.CA, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Of two fleets of one authority neither is heard by the other's workers, nor takes them for its own."""
    mine = replace(identity(ca, "a.example"), name="a.example")
    any_of_them = replace(identity(ca, "*.example", "x"), name="a.example")
    theirs = replace(identity(ca, "b.example"), name="a.example")
    unnamed = identity(ca, "127.0.0.1")

    async def main() -> None:
        service = Service()
        server = await serve(service, settings=SHORT, tls=mine)
        other = await serve(Service(), settings=SHORT, tls=theirs)
        try:
            assert await refused(server, mine) == await refused(server, any_of_them) == {}
            assert (service.sessions, service.calls) == (2, 2)
            said = await refused(server, theirs)
            assert [*said] == BOTH
            assert all("does not bear the fleet's name" in one for one in said.values())
            assert [*await refused(server, unnamed)] == [*await refused(other, mine)] == BOTH
            assert (service.sessions, service.calls) == (2, 2)
        finally:
            await server.close(1)
            await other.close(1)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_certificates_are_renewed_while_processes_run(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Another authority too. What is half written, or none, changes nothing."""
    first, second = trustme.CA(), trustme.CA()
    files = [tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem")]

    def write(*texts: bytes) -> None:
        for file, text in zip(files, texts, strict=True):
            file.write_bytes(text)

    old, new = identity(first, "127.0.0.1"), identity(second, "127.0.0.1")
    write(old.ca, old.cert, old.key)
    held = Tls.read(files[0], files[1], files[2])

    async def main() -> None:
        server = await serve(Service(), settings=SHORT, tls=held)
        try:
            assert await refused(server, old) == await refused(server, held) == {}
            for part in ((new.ca, new.cert, old.key), (b"", b"", b""), (new.ca, b"none", new.key)):
                write(*part)
                assert await refused(server, old) == await refused(server, held) == {}
            files[1].unlink()
            assert await refused(server, held) == {}
            write(new.ca, new.cert, new.key)
            assert await refused(server, held) == await refused(server, new) == {}
            assert [*await refused(server, old)] == BOTH
        finally:
            await server.close(1)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_settings(tmp_path: Path, ca: trustme.CA) -> None:
    held = identity(ca, "x")
    files = [tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem")]
    for file, data in zip(files, (held.ca, held.cert, held.key), strict=True):
        file.write_bytes(data)
    assert ControlSettings().tls() is None
    assert ControlSettings(tls_ca=files[0], tls_cert=files[1], tls_key=files[2]).tls() == held
    assert held.key.decode() not in repr(held)
    with pytest.raises(ValueError, match="tls_name"):
        ControlSettings(tls_name="fleet.example")
    with pytest.raises(ValueError, match="together"):
        ControlSettings(tls_cert=files[1], tls_key=files[2])
    with pytest.raises(SettingsError, match=r"none\.pem"):
        ControlSettings(tls_ca=tmp_path / "none.pem", tls_cert=files[1], tls_key=files[2]).tls()


def test_a_certificate_that_is_none(ca: trustme.CA) -> None:
    async def main() -> None:
        with pytest.raises((OSError, ValueError)):
            await serve(Service(), tls=Tls(b"x", b"y", b"z"))

    asyncio.run(main())
