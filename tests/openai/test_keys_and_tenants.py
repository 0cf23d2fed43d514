"""API keys: who gets in, by which spelling of a path, how much each may ask, and what is never shown."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from fleet.api_keys import ApiKey, digest, find, read_file, read_list, salt
from fleet.errors import Overloaded, Unauthorized
from fleet.objectives import CLASSES
from router.openai.callers import Callers, Quota
from router.openai.keys_file import KeysFile

SECRET = "sk-pdfleet-abcdefghijklmnopqrstuvwxyz"
OTHER = "sk-pdfleet-zyxwvutsrqponmlkjihgfedcba"
BODY = {"model": "tiny/model-1", "messages": [{"role": "user", "content": "hi"}]}


def entry(key: str = SECRET, tenant: str = "acme", **rest: Any) -> ApiKey:
    return ApiKey(sha256=digest(key), tenant=tenant, **rest)


def bearer(key: str = SECRET) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def is_refused(response: Any) -> None:
    assert response.status_code == 401, (response.request.url, response.text)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_every_route_but_health_wants_a_key(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok"), keys=[entry()]) as site:
            document = (await site.client.get("/openapi.json", headers=bearer())).json()
            paths = {*document["paths"], "/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect", "/none"}
            assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics"} <= paths
            for path in paths:
                for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
                    response = await site.client.request(method, path.replace("{model}", "x"), json=BODY)
                    if path in ("/health", "/ready"):
                        assert response.status_code != 401
                    elif method == "HEAD":
                        assert response.status_code == 401
                    else:
                        is_refused(response)
            assert (await site.client.get("/health")).status_code == 200
            assert (await site.client.get("/ready")).status_code == 200
            assert (await site.client.get("/v1/models", headers=bearer())).status_code == 200
            asked = await site.client.post("/v1/chat/completions", json=BODY, headers=bearer())
            assert asked.status_code == 200
            assert len(site.spine.runs) == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    "path",
    [
        "//v1/chat/completions", "/v1//chat/completions", "/v1/../v1/chat/completions",
        "/health/../v1/models",
        "/v1/chat/completions/", "/V1/chat/completions", "/v1%2fchat%2fcompletions",
        "/%76%31/chat/completions",
        "/health/", "/Health", "//health", "/health%2f", "/health;/v1/models", "/health%00", "/./health",
        "/health?/v1/models", "/metrics/", "/openapi.json?x", "*", "http://x/v1/models", "/ready/../metrics",
        "/v1/models%20", "/v1/models/../models", "/v1/models#/health",
    ],
)  # fmt: skip
def test_no_spelling_of_a_path_gets_around_the_key(serve: Any, says: Any, path: str) -> None:
    async def main() -> None:
        async with serve(says("ok"), keys=[entry()]) as site:
            for method in ("GET", "POST"):
                body = json.dumps(BODY).encode()
                reader, writer = await site.raw(
                    f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
                    f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                answer = await reader.read()
                writer.close()
                status = int(answer.split()[1])
                if path.startswith("/health?"):
                    assert status == (200 if method == "GET" else 405)  # a query is no path
                else:
                    assert status in (400, 401), answer
            assert not site.spine.runs

    asyncio.run(main())


@pytest.mark.parametrize(
    "header",
    [
        None, "", "Bearer", "Bearer x", f"Basic {SECRET}", SECRET, f"Bearer {SECRET[:-1]}",
        f"Bearer {SECRET}x",
        f"Bearer {SECRET.upper()}", f"Bearer {digest(SECRET)}", "Bearer null", f"Bearer {SECRET},{OTHER}",
        f"Bearer {SECRET} {OTHER}", "Bearer " + "x" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_key(serve: Any, says: Any, header: str | None) -> None:
    async def main() -> None:
        async with serve(says("ok"), keys=[entry()]) as site:
            headers = {} if header is None else {"authorization": header}
            response = await site.client.post("/v1/chat/completions", json=BODY, headers=headers)
            is_refused(response)
            for shown in (SECRET, digest(SECRET), OTHER):
                assert shown not in response.text

    asyncio.run(main())


def test_metrics_may_be_open(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok"), keys=[entry()], open_metrics=True) as site:
            assert (await site.client.get("/metrics")).status_code == 200
            assert (await site.client.get("/fleet/targets")).json() == []
            is_refused(await site.client.get("/v1/models"))

    asyncio.run(main())


def test_tenant_and_class_come_from_the_key_alone(serve: Any, says: Any) -> None:
    keys = [
        entry(SECRET, "acme", slo_class="interactive"),
        entry(OTHER, "zeta", slo_class="batch"),
    ]
    internal = {
        "salt": "x", "cache_salt": "x", "tenant": "zeta", "priority": 99, "worker": "w", "worker_id": "w",
        "kv_transfer_params": {"tp_size": 10**9, "remote_host": "10.0.0.1"}, "bootstrap_host": "h",
        "bootstrap_port": 1, "bootstrap_room": 1, "nvext": {"backend_instance_id": 1}, "request_id": "r",
    }  # fmt: skip

    async def main() -> None:
        async with serve(says("ok"), keys=keys, salt_secret="s") as site:
            for key in (SECRET, OTHER, SECRET):
                headers = bearer(key) | {"x-tenant": "zeta", "x-worker-id": "w"}
                body = BODY | internal
                assert (
                    await site.client.post("/v1/chat/completions", json=body, headers=headers)
                ).status_code == 200
            requests = [run.request for run in site.spine.runs]
            assert [request.priority for request in requests] == [1, -1, 1]
            assert [request.salt for request in requests] == [
                salt("acme", "s"),
                salt("zeta", "s"),
                salt("acme", "s"),
            ]
            assert all(request.salt not in ("", "x", "acme", "zeta") for request in requests)
            assert all(request.id != "r" for request in requests)

    asyncio.run(main())


def test_concurrent_requests_of_a_key(serve: Any, says: Any) -> None:
    go = asyncio.Event()

    async def main() -> None:
        keys = [entry(SECRET, concurrent_requests=1), entry(OTHER)]
        async with serve(lambda request: [go, 1], keys=keys) as site:

            def ask(key: str) -> Any:
                return site.client.post("/v1/chat/completions", json=BODY, headers=bearer(key))

            first = asyncio.create_task(ask(SECRET))
            async with asyncio.timeout(20):
                while not site.spine.runs:
                    await asyncio.sleep(0)
            refused = await ask(SECRET)
            assert refused.status_code == 429
            assert "concurrent_requests" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) >= 1
            go.set()
            assert (await ask(OTHER)).status_code == 200
            assert (await first).status_code == 200
            assert (await ask(SECRET)).status_code == 200

    asyncio.run(main())


def test_requests_and_tokens_a_minute(serve: Any, says: Any) -> None:
    async def main() -> None:
        keys = [entry(SECRET, requests_per_minute=2), entry(OTHER, tokens_per_minute=8)]
        async with serve(says("Hello there"), keys=keys) as site:

            async def ask(key: str) -> Any:
                return await site.client.post("/v1/chat/completions", json=BODY, headers=bearer(key))

            assert [(await ask(SECRET)).status_code for _ in range(2)] == [200, 200]
            refused = await ask(SECRET)
            assert refused.status_code == 429
            assert "requests_per_minute" in refused.json()["error"]["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 30
            assert (await ask(OTHER)).status_code == 200
            spent = await ask(OTHER)
            assert spent.status_code == 429
            assert "tokens_per_minute" in spent.json()["error"]["message"]
            assert int(spent.headers["retry-after"]) >= 30
            assert len(site.spine.runs) == 3

    asyncio.run(main())


def test_quota_refills() -> None:
    quota = Quota(entry(requests_per_minute=60, tokens_per_minute=600))
    for _ in range(60):
        quota.enter(100.0)
        quota.leave()
    with pytest.raises(Overloaded) as refused:
        quota.enter(100.0)
    assert refused.value.retry_after_s == pytest.approx(1.0)
    quota.enter(101.0)
    quota.used(610)
    with pytest.raises(Overloaded, match="tokens_per_minute") as refused:
        quota.enter(101.0)
    assert refused.value.retry_after_s == pytest.approx(1.1)
    quota.enter(102.2)
    quota.enter(10_000.0)
    assert quota.running == 3


def test_cors_is_off_unless_an_origin_is_named(serve: Any, says: Any) -> None:
    page = {"origin": "https://chat.example"}
    preflight = page | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }

    async def main() -> None:
        async with serve(says("ok"), keys=[entry()]) as site:
            is_refused(await site.client.options("/v1/chat/completions", headers=preflight))
            asked = await site.client.post("/v1/chat/completions", json=BODY, headers=page | bearer())
            assert not [name for name in asked.headers if name.startswith("access-control")]
        async with serve(says("ok"), keys=[entry()], cors_origins=("https://chat.example",)) as site:
            allowed = await site.client.options("/v1/chat/completions", headers=preflight)
            assert allowed.status_code == 200
            assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
            assert "authorization" in allowed.headers["access-control-allow-headers"]
            other = preflight | {"origin": "https://evil.example"}
            denied = await site.client.options("/v1/chat/completions", headers=other)
            assert "access-control-allow-origin" not in denied.headers
            asked = await site.client.post("/v1/chat/completions", json=BODY, headers=page | bearer())
            assert asked.headers["access-control-allow-origin"] == "https://chat.example"
            is_refused(await site.client.post("/v1/chat/completions", json=BODY, headers=page))

    asyncio.run(main())


def test_secrets_are_shown_nowhere(serve: Any, says: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []

    async def main() -> None:
        keys = [entry(tenant="acme", requests_per_minute=1000), entry(OTHER, concurrent_requests=1)]
        async with serve(says("ok"), keys=keys, salt_secret="very-secret-salt") as site:
            paths = [*(await site.client.get("/openapi.json", headers=bearer())).json()["paths"], "/docs"]
            for path in [*paths, "/openapi.json", "/redoc", "/server_info", "/get_server_info", "/config"]:
                for method in ("GET", "POST"):
                    for headers in ({}, bearer(), bearer(SECRET + "x")):
                        for body in (BODY, {"model": "tiny/model-1"}, {**BODY, "n": SECRET[:3]}):
                            response = await site.client.request(method, path, json=body, headers=headers)
                            seen.append(f"{response.headers}{response.text}")
            salts = [run.request.salt for run in site.spine.runs]
            assert salts
            for secret in (SECRET, OTHER, digest(SECRET), digest(OTHER), "very-secret-salt", *salts):
                assert not [text for text in seen if secret in text]
                assert secret not in caplog.text
                assert secret not in repr(site.ingress.settings)

    asyncio.run(main())


def test_keys_files() -> None:
    plain = entry().line()
    full = entry(OTHER, "zeta", slo_class="batch", tokens_per_minute=5).line()
    keys = read_file(f"# keys\n\n{plain}\n{full}\n")
    assert keys == (entry(), entry(OTHER, "zeta", slo_class="batch", tokens_per_minute=5))
    assert find(keys, OTHER.encode()) == keys[1]
    assert find(keys, b"\xff") is None
    for text, told in (
        ("", "no key"),
        (f"{plain}\n{plain}", "line 2 has the same key"),
        (SECRET, "line 1"),
        ('{"key": "' + SECRET + '", "tenant": "a"}', "line 1"),
        ('{"sha256": "' + SECRET + '", "tenant": "a"}', "64 hex digits"),
        (plain.replace("acme", "a b"), "tenant"),
        (plain.replace("acme", "a").replace("}", ',"requests_per_minute":-1}'), "negative"),
        (plain.replace("}", ',"class":"Gold"}'), "line 1"),
        (plain.replace("}", ',"weight":0}'), "line 1"),
    ):
        with pytest.raises(ValueError, match=told) as wrong:
            read_file(text)
        assert SECRET not in str(wrong.value)
    assert read_list(f"acme:{SECRET}, zeta:{OTHER}") == (entry(), entry(OTHER, "zeta"))
    for text in (SECRET, f"acme:{SECRET},", "acme:short", f"a b:{SECRET}"):
        with pytest.raises(ValueError, match=r"entry|tenant") as wrong:
            read_list(text)
        assert SECRET not in str(wrong.value)


def test_salts_are_of_tenant_and_secret() -> None:
    salts = {salt(tenant, secret) for tenant in ("a", "b", "") for secret in ("", "s", "t")}
    assert len(salts) == 9
    one, same = Callers([entry(), entry(OTHER)], "s"), Callers([entry(OTHER, "acme")], "s")
    held = {one.caller(f"Bearer {key}".encode()).salt for key in (SECRET, OTHER)}
    assert held == {same.caller(f"bearer {OTHER}".encode()).salt}


def test_a_changed_file_of_keys_holds_without_a_restart(
    serve: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    third = "sk-pdfleet-third-of-the-tests-of-keys"
    file = tmp_path / "keys.jsonl"
    file.write_text(entry(concurrent_requests=1).line())
    go = asyncio.Event()

    async def main() -> None:
        keys = KeysFile(file, CLASSES, read_list(f"zeta:{OTHER}"))
        async with serve(lambda request: [go, 1], keys=keys.read()) as site:

            def ask(key: str) -> Any:
                return site.client.post("/v1/chat/completions", json=BODY, headers=bearer(key))

            async def known(key: str) -> bool:
                return (await site.client.get("/v1/models", headers=bearer(key))).status_code == 200

            async def until(key: str, wanted: bool) -> None:
                async with asyncio.timeout(20):
                    while await known(key) != wanted:
                        await asyncio.sleep(0.001)

            async def told(what: str) -> None:
                async with asyncio.timeout(20):
                    while what not in caplog.text:
                        await asyncio.sleep(0.001)
                assert [await known(SECRET), await known(OTHER)] == [True, True]
                assert SECRET not in caplog.text
                caplog.clear()

            following = asyncio.create_task(keys.follow(site.ingress.change_keys, 0.001))
            running = asyncio.create_task(ask(SECRET))
            async with asyncio.timeout(20):
                while not site.spine.runs:
                    await asyncio.sleep(0)
            # Another key, and another limit for one that has a request running: that one counts.
            file.write_text(f"{entry(concurrent_requests=2).line()}\n{entry(third, 'new').line()}")
            await until(third, True)
            second = asyncio.create_task(ask(SECRET))
            async with asyncio.timeout(20):
                while len(site.spine.runs) < 2:
                    await asyncio.sleep(0)
            assert (await ask(SECRET)).status_code == 429
            # One taken back: what it runs still ends.
            file.write_text(entry(third, "new").line())
            await until(SECRET, False)
            assert await known(OTHER)
            go.set()
            assert [(await one).status_code for one in (running, second)] == [200, 200]
            file.write_text(entry().line())
            await until(SECRET, True)
            assert not await known(third)
            # What is no file of keys changes nothing.
            for broken, what in (
                (SECRET.encode(), "line 1"),
                (b"", "holds no key"),
                (b"\xff\xfe", "decode"),
            ):
                file.write_bytes(broken)
                await told(what)
            file.unlink()
            await told("No such file")
            file.mkdir()
            await told("Is a directory")
            file.rmdir()
            await told("No such file")
            file.write_text(entry(third, "new").line())
            await until(SECRET, False)
            assert [await known(third), await known(OTHER)] == [True, True]
            following.cancel()

    asyncio.run(main())


def test_taking_all_keys_back_lets_nobody_in() -> None:
    callers = Callers([entry()])
    callers.change([])
    assert not callers.anybody
    with pytest.raises(Unauthorized):
        callers.caller(f"Bearer {SECRET}".encode())


def test_other_limits_leave_what_was_counted() -> None:
    quota = Quota(entry(requests_per_minute=60, tokens_per_minute=600))
    quota.enter(0.0)
    quota.used(700)
    quota.now_of(entry(requests_per_minute=1, tokens_per_minute=600))
    with pytest.raises(Overloaded, match="tokens_per_minute"):
        quota.enter(0.0)
    quota.now_of(entry(requests_per_minute=1))
    quota.enter(0.0)
    with pytest.raises(Overloaded, match="requests_per_minute"):
        quota.enter(0.0)
    assert quota.running == 2
