"""KV transfer over UCX with the fleet's mutual TLS: who cannot prove itself gets nothing and harms nobody."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import replace

import numpy as np
import pytest
import trustme
import uvloop

from fleet.errors import TransferFailed
from fleet.ids import Incarnation, WorkerId
from fleet.tls import Tls
from kv_transfer import caller, streams
from kv_transfer.transport import Peer

pytestmark = pytest.mark.live


def identity(ca, *names):
    cert = ca.issue_cert(*names)
    chain = b"".join(part.bytes() for part in cert.cert_chain_pems)
    return Tls(ca.cert_pem.bytes(), chain, cert.private_key_pem.bytes())


@pytest.fixture(scope="module")
def ca():
    return trustme.CA()


@pytest.fixture(scope="module")
def fleet(ca):
    return identity(ca, "127.0.0.1")


@pytest.fixture(scope="module")
def posing(ca):
    """Believes the fleet's authority, and has a certificate of another: only the other end can refuse it."""
    strange = identity(trustme.CA(), "127.0.0.1")
    return Tls(ca.cert_pem.bytes(), strange.cert, strange.key)


def run(test, loop=uvloop.new_event_loop):
    """On the loop that workers run on."""
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(test, 120))


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_blocks_arrive_between_two_of_the_fleet(bench, fleet, loop):
    async def test():
        async with bench("ucx") as world:
            source = await world.side("p", tls=fleet)
            reader = await world.side("d", tls=fleet)
            ticket = source.transfer.grant(range(8), 128)
            async with reader.transfer.keep(ticket):
                await reader.transfer.pull(ticket, [(n, n + 1) for n in range(8)], 20)
            assert np.array_equal(reader.region.array[1:9], source.region.array[:8])
            await world.idle()
            assert source.ended(ticket.lease) == ["released"]

    run(test(), loop)


KINDS = ("plain reader", "plain source", "reader of another authority", "source of another authority",
         "source of another name")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_others_are_refused_and_the_source_serves_on(bench, ca, fleet, posing, kind):
    reader_tls, source_tls = {
        "plain reader": (None, fleet),
        "plain source": (fleet, None),
        "reader of another authority": (posing, fleet),
        "source of another authority": (fleet, posing),
        "source of another name": (fleet, identity(ca, "worker.example")),
    }[kind]

    async def test():
        async with bench("ucx") as world:
            source = await world.side("p", tls=source_tls, connect_s=2.0)
            stranger = await world.side("x", tls=reader_tls, connect_s=2.0)
            before = stranger.region.array.copy()
            ticket = source.transfer.grant(range(8), 128)
            for _ in range(2):
                with pytest.raises(TransferFailed):
                    await stranger.transfer.pull(ticket, [(0, 0)], 5)
            assert (stranger.region.array == before).all()
            assert source.transfer.counters()["served_reads"] == 0
            if source_tls is fleet:
                friend = await world.side("d", tls=fleet)
                await friend.transfer.pull(ticket, [(0, 0)], 20)
                assert (friend.region.array[0] == source.region.array[0]).all()
            source.transfer.release(ticket.lease)

    run(test())


def test_a_forged_ucx_address_is_not_even_read(bench, fleet, posing):
    """UCX aborts the process that is given it: the right version, the right incarnation, and then noise."""
    from kv_transfer import ucx

    async def test():
        async with bench("ucx") as world:
            source = await world.side("p", incarnation="known", tls=fleet)
            ticket = source.transfer.grant([3], 16)
            host, _, port = source.transfer.address.removeprefix("ucx:").rpartition(":")
            peer = Peer(WorkerId("x"), WorkerId("p"), Incarnation("known"), "same", 4096)
            for tls in (None, posing):
                sock = socket.create_connection((host, int(port)))
                sock.setblocking(False)
                reader, writer = await streams.opened(sock, tls, host)
                with pytest.raises(TransferFailed):
                    await caller.greet(reader, writer, peer, ucx._version() + b"\x00\xff" * 40, 5.0)
                writer.transport.abort()
            friend = await world.side("d", tls=fleet)
            await friend.transfer.pull(ticket, [(0, 0)], 20)
            source.transfer.release(ticket.lease)

    run(test())


def test_one_name_for_all_whatever_their_hosts_are(bench, ca):
    """Neither a source nor a reader without it is believed, though one authority made all certificates."""

    async def test():
        async with bench("ucx") as world:
            named = replace(identity(ca, "fleet.example"), name="fleet.example")
            source = await world.side("p", tls=named)
            other = await world.side("q", tls=identity(ca, "127.0.0.1"))
            reader = await world.side("d", tls=named)
            stranger = await world.side("x", tls=replace(identity(ca, "127.0.0.1"), name=""))
            mine, theirs = source.transfer.grant([3], 16), other.transfer.grant([3], 16)
            await reader.transfer.pull(mine, [(0, 0)], 20)
            with pytest.raises(TransferFailed):
                await reader.transfer.pull(theirs, [(0, 0)], 20)
            with pytest.raises(TransferFailed):
                await stranger.transfer.pull(mine, [(0, 0)], 20)
            source.transfer.release(mine.lease)
            other.transfer.release(theirs.lease)

    run(test())


def test_one_that_never_ends_its_handshake_is_let_go(bench, fleet):
    async def test():
        async with bench("ucx") as world:
            source = await world.side("p", tls=fleet, connect_s=0.2)
            host, _, port = source.transfer.address.removeprefix("ucx:").rpartition(":")
            silent = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
            for reader, writer in silent:
                assert await reader.read() == b""
                writer.close()
            friend = await world.side("d", tls=fleet)
            ticket = source.transfer.grant([3], 16)
            await friend.transfer.pull(ticket, [(0, 0)], 20)
            source.transfer.release(ticket.lease)

    run(test())


def test_a_pair_that_is_none_is_an_error_at_the_start(bench, ca):
    async def test():
        async with bench("ucx") as world:
            with pytest.raises(ssl.SSLError):
                await world.side("p", tls=Tls(ca.cert_pem.bytes(), b"no PEM", b"no PEM"))

    run(test())
