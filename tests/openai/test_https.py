"""The ingress over TLS: https only, and by settings alone."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from router.openai.settings import HttpSettings


def test_https(serve: Any, says: Any, tmp_path: Path, events: Any) -> None:
    ca = trustme.CA()
    cert = ca.issue_cert("127.0.0.1")
    cert.private_key_pem.write_to_path(tmp_path / "key.pem")
    (tmp_path / "cert.pem").write_bytes(b"".join(part.bytes() for part in cert.cert_chain_pems))
    trusting = ssl.create_default_context()
    ca.configure_trust(trusting)
    body = {"model": "tiny/model-1", "prompt": "hi", "stream": True}

    async def main() -> None:
        files = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
        async with serve(says("Hello there"), **files) as site:
            url = f"https://127.0.0.1:{site.port}"
            async with httpx.AsyncClient(base_url=url, verify=trusting, timeout=30) as client:
                assert (await client.get("/health")).status_code == 200
                seen = events((await client.post("/v1/completions", json=body)).text)
                assert "".join(event["choices"][0]["text"] for event in seen[:-1]) == "Hello there"
            async with httpx.AsyncClient(base_url=url, timeout=30) as stranger:
                with pytest.raises(httpx.ConnectError):
                    await stranger.get("/health")
            with pytest.raises(httpx.HTTPError):
                await site.client.get("/health")  # plain

    asyncio.run(main())


def test_a_certificate_that_is_renewed_is_shown_without_a_restart(
    serve: Any, says: Any, tmp_path: Path
) -> None:
    """What is half written, or gone, changes nothing."""
    files = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    trust = []

    def issue(cert: bool = True, key: bool = True) -> None:
        ca = trustme.CA()
        made = ca.issue_cert("127.0.0.1")
        trust.append(ssl.create_default_context())
        ca.configure_trust(trust[-1])
        if cert:
            files["tls_cert"].write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
        if key:
            made.private_key_pem.write_to_path(files["tls_key"])

    async def main() -> None:
        issue()
        async with serve(says(""), **files) as site:

            async def shown() -> list[bool]:
                """By whose authority."""
                found = []
                for one in trust:
                    async with httpx.AsyncClient(verify=one, timeout=30) as client:
                        try:
                            await client.get(f"https://127.0.0.1:{site.port}/health")
                            found.append(True)
                        except httpx.ConnectError:
                            found.append(False)
                return found

            assert await shown() == [True]
            issue(key=False)
            assert await shown() == [True, False]
            files["tls_key"].unlink()
            assert await shown() == [True, False]
            issue()
            await shown()  # The first to come may still see the old one.
            assert await shown() == [False, False, True]

    asyncio.run(main())


def test_half_of_a_pair() -> None:
    with pytest.raises(ValueError, match="together"):
        HttpSettings(tls_cert=Path("x"))


def test_files_that_are_none(serve: Any, says: Any, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("no PEM")

    async def main() -> None:
        with pytest.raises(ssl.SSLError):
            async with serve(says(""), tls_cert=tmp_path / "x", tls_key=tmp_path / "x"):
                pass

    asyncio.run(main())
