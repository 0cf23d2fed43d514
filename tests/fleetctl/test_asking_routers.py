"""What routers can do to a command that asks them: be away, silent, break off; and who is shown a key."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from click.testing import CliRunner

from fleet.errors import BadRequest, Unavailable
from fleetctl.__main__ import main
from fleetctl.routers import Asker, RouterAddress, Said

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.0 200 OK\r\ncontent-type: x\r\n\r\n"


@asynccontextmanager
async def router(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[RouterAddress]:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    try:
        yield RouterAddress("router-7", f"{'https' if tls else 'http'}://127.0.0.1:{port}")
    finally:
        server.close()


def says(data: bytes, heard: list[bytes] | None = None) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if heard is not None:
            heard.append(head)
        writer.write(data)
        await writer.drain()

    return serve


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


def refusal(serve: Serve, limit_s: float = 20.0) -> str:
    async def main() -> str:
        async with router(serve) as address:
            with pytest.raises(Unavailable, match="router-7") as refused:
                await Asker(None, "").get(address, "/fleet/requests", limit_s)
            return refused.value.message

    return asyncio.run(main())


def test_the_key_is_shown_and_the_answer_is_given_back_whole() -> None:
    async def main() -> None:
        heard: list[bytes] = []
        body = b"x" * 3_000_000
        async with router(says(OK + body, heard)) as address:
            said = await Asker(None, "sk-1").get(address, "/fleet/requests?a=1", 20.0)
        assert (said.status, said.body) == (200, body)
        assert heard[0].startswith(b"GET /fleet/requests?a=1 HTTP/1.0\r\n")
        assert b"\r\nAuthorization: Bearer sk-1\r\n" in heard[0]

    asyncio.run(main())


def test_its_own_words_for_what_was_wrong() -> None:
    address = RouterAddress("r", "http://x")
    assert Said(address, 401, b'{"error": {"message": "no key"}}').error() == "no key"
    assert Said(address, 502, b"<html>").error() == "HTTP status 502"
    assert Said(address, 502, b"[]").error() == "HTTP status 502"


def test_one_that_is_away_silent_or_no_router_is_named() -> None:
    assert "does not answer" in refusal(silent, limit_s=0.2)
    assert "answers no HTTP" in refusal(says(b"SSH-2.0-x\r\n"))
    assert "answers no HTTP" in refusal(says(b""))

    async def away() -> None:
        async with router(silent) as address:
            pass
        with pytest.raises(Unavailable, match=r"router-7 at http.* does not answer"):
            await Asker(None, "").get(address, "/", 5.0)

    asyncio.run(away())


def test_over_https_nothing_is_said_to_one_whose_certificate_is_not_proven(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    ours, theirs = tmp_path / "ca.pem", tmp_path / "other.pem"
    authority.cert_pem.write_to_path(str(ours))
    other.cert_pem.write_to_path(str(theirs))

    async def main() -> None:
        heard: list[bytes] = []
        async with router(says(OK + b"{}", heard), tls) as address:
            for ca in (None, theirs):
                with pytest.raises(Unavailable, match=r"not proven.*--ca"):
                    await Asker(ca, "sk-1").get(address, "/", 20.0)
            assert not heard
            assert (await Asker(ours, "sk-1").get(address, "/", 20.0)).body == b"{}"

    asyncio.run(main())


def test_a_key_with_a_line_break_is_refused_before_it_becomes_a_header() -> None:
    with pytest.raises(BadRequest, match="PDFLEET_API_KEY"):
        Asker(None, "sk-1\r\nHost: elsewhere")


async def news(data: bytes) -> Said | list[bytes]:
    async with router(says(data)) as address, Asker(None, "").events(address, "/", 20.0) as said:
        return said if isinstance(said, Said) else [data async for data in said]


def test_events_are_read_until_the_stream_ends_or_breaks() -> None:
    assert asyncio.run(news(OK + b': ping\n\ndata: {"a": 1}\n\ndata: 2\n\n')) == [b'{"a": 1}', b"2"]
    refused = asyncio.run(news(b"HTTP/1.0 404 Not Found\r\n\r\nnone"))
    assert isinstance(refused, Said)
    assert (refused.status, refused.body) == (404, b"none")
    with pytest.raises(Unavailable, match="broke"):
        asyncio.run(news(OK + b"data: " + b"x" * (2 << 20) + b"\n\n"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "r", "--slow", "1"], "--slow lists requests"),
        (["trace", "r", "--class", "batch"], "leave them or REQUEST out"),
        (["trace", "r", "--count", "3"], "leave them or REQUEST out"),
        (["explain", "r"], "is not up on this machine"),
        (["trace"], "is not up on this machine"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_would(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(main, [*arguments, "--state-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert said in result.output
    as_json = CliRunner().invoke(main, [*arguments, "--state-dir", str(tmp_path), "--json"])
    assert said in json.loads(as_json.output)["error"]["message"]
