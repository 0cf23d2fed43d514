"""The load generator's client against servers that do anything: bytes cut anywhere, resets, silence."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import BadRequest, Unavailable
from fleet.goodput import End
from fleet.workload import Amount, Arrivals, Kind, Shape
from fleetctl.bench.client import Client, Heard, Usage
from fleetctl.bench.http import Answer, BadAnswer, Events
from fleetctl.bench.plan import Plan, Source
from fleetctl.bench.play import Player, Run, in_process, probe
from fleetctl.bench.prompts import Texts, Vocabulary
from fleetctl.bench.words import Server

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Request-Id: r1\r\n"


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


def event(said: object) -> bytes:
    return b"data: " + (said if isinstance(said, bytes) else json.dumps(said).encode()) + b"\n\n"


def token(text: str = "a", finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    told: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        told["prompt_tokens_details"] = {"cached_tokens": cached}
    return event({"choices": [], "usage": told})


DONE = event(b"[DONE]")
STREAM = [token("x"), token("y"), token("z", "length"), usage(7, 3, 4), DONE]
GOOD = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(map(chunk, STREAM)) + b"0\r\n\r\n"


def read(parts: list[bytes]) -> tuple[Answer, bytes]:
    answer = Answer()
    return answer, b"".join(answer.feed(part) for part in parts)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_an_answer_is_the_same_wherever_its_bytes_are_cut(places: list[int]) -> None:
    answer, body = read(cut(GOOD, places))
    assert (answer.status, answer.done, answer.keep) == (200, True, True)
    assert body == b"".join(STREAM)
    events = Events()
    assert [one for part in cut(body, places) for one in events.feed(part)] == [one[6:-2] for one in STREAM]


def test_every_single_byte_apart() -> None:
    answer, body = read([GOOD[at : at + 1] for at in range(len(GOOD))])
    assert answer.done
    assert body == b"".join(STREAM)


@pytest.mark.parametrize(
    ("raw", "body", "keep"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close\r\n\r\na", b"a", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na", b"a", False),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na", b"a", True),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nTrailer: 1\r\n\r\n", b"abc", True),
        (HEAD + b"transfer-encoding: Chunked\r\n\r\nA\r\n0123456789\r\n0\r\n\r\n", b"0123456789", True),
    ],
)
def test_framings(raw: bytes, body: bytes, keep: bool) -> None:
    for parts in ([raw], [raw[at : at + 1] for at in range(len(raw))]):
        answer, got = read(parts)
        assert (answer.done, got, answer.keep) == (True, body, keep)


def test_a_body_without_framing_ends_with_its_connection() -> None:
    answer, body = read([HEAD + b"\r\n", b"ab", b"c"])
    assert (answer.done, body) == (False, b"abc")
    assert answer.closed()
    assert not answer.keep


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab",
        b"HTTP/1.1 204 No\r\n\r\nx",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nmore",
        b"x" * 70_000,
    ],
)
def test_what_is_no_http_is_an_error(raw: bytes) -> None:
    with pytest.raises(BadAnswer):
        read([raw])


Script = Callable[[int, bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server that reads whole requests and does with the n-th what the script says. Yields its URL."""
    count = 0
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or b"0")
                body = await reader.readexactly(length)
                count += 1
                await script(count, head + body, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        scheme = "https" if tls else "http"
        yield f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def always(raw: bytes, then: str = "") -> Script:
    """Answers each request with those bytes; `then` it closes or resets, or nothing more comes."""

    async def script(
        number: int, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(raw)
        await writer.drain()
        if then == "reset":
            writer.transport.abort()
        elif then == "close":
            writer.close()
        elif then == "silence":
            await asyncio.get_running_loop().create_future()

    return script


async def ask(script: Script, timeout_s: float = 30.0, times: int = 1, **server: Any) -> list[Heard]:
    async with serving(script) as url:
        client = Client(Server(url, "m", timeout_s=timeout_s, **server))
        request = client.request({"model": "m", "prompt": "hello"}, "batch")
        heard = [await client.stream(request) for _ in range(times)]
        assert not client._running
        client.close()
        return heard


def test_a_whole_stream() -> None:
    (heard,) = asyncio.run(ask(always(GOOD)))
    assert (heard.end, heard.failure, heard.finish) == (End.FINISHED, None, "length")
    assert heard.text == ["x", "y", "z"]
    assert heard.request_id == "r1"
    assert heard.usage is not None
    assert (heard.usage.prompt_tokens, heard.usage.completion_tokens) == (7, 3)
    assert heard.sent_at < heard.times[0] <= heard.times[2] <= heard.ended_at


def test_tokens_that_came_together_came_at_one_time() -> None:
    """Five tokens in two events: three gaps of nothing, and TPOT by all of them."""
    body = token("ab") + token("cde", "stop") + usage(7, 5) + DONE
    (heard,) = asyncio.run(ask(always(HEAD + b"\r\n" + body, "close")))
    times = heard.token_times()
    assert (len(heard.times), len(times)) == (2, 5)
    assert Heard(0.0, times=[1.0, 3.0], usage=Usage(7, 5)).token_times() == [1, 3, 3, 3, 3]
    assert Heard(0.0, times=[1.0, 3.0], usage=Usage(7, 1)).token_times() == [1, 3]
    assert Heard(0.0, times=[1.0, 3.0]).token_times() == [1, 3]


@pytest.mark.parametrize(
    "delta",
    [{"reasoning_content": "h"}, {"reasoning": "h"}, {"tool_calls": [{"index": 0}]}, {"content": "h"}],
)
def test_all_that_is_written_is_tokens(delta: dict[str, Any]) -> None:
    body = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    body += event({"choices": [{"delta": delta}]}) + token("", "stop") + DONE
    (heard,) = asyncio.run(ask(always(HEAD + b"\r\n" + body, "close")))
    assert (heard.end, len(heard.times)) == (End.FINISHED, 1)


def test_text_completions() -> None:
    body = event({"choices": [{"text": "h", "finish_reason": None}]})
    body += event({"choices": [{"text": "", "finish_reason": "stop"}]}) + DONE
    (heard,) = asyncio.run(ask(always(HEAD + b"\r\n" + body, "close"), chat=False))
    assert (heard.end, heard.text) == (End.FINISHED, ["h"])


def refusal(status: int) -> bytes:
    said = json.dumps({"error": {"message": "full", "type": "rate_limit_error"}}).encode()
    return b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%b" % (status, len(said), said)


def stream_error(**error: Any) -> bytes:
    return HEAD + b"\r\n" + token() + event({"error": {"message": "m", **error}}) + DONE


OPEN = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "then", "end", "kind"),
    [
        (refusal(429), "", End.REJECTED, "http 429"),
        (refusal(503), "", End.FAILED, "http 503"),
        (refusal(504), "", End.TIMED_OUT, "http 504"),
        (refusal(400), "", End.INVALID, "http 400"),
        (b"", "reset", End.FAILED, "reset"),
        (OPEN + chunk(token()), "reset", End.FAILED, "reset"),
        (OPEN + chunk(token()), "close", End.FAILED, "reset"),
        (OPEN + chunk(token()), "silence", End.TIMED_OUT, "timeout"),
        (b"", "silence", End.TIMED_OUT, "timeout"),
        (HEAD + b"\r\n" + token(), "close", End.FAILED, "cut"),
        (HEAD + b"\r\n" + token("a", "abort") + DONE, "close", End.FAILED, "cut"),
        (HEAD + b"\r\n" + event(b"{broken") + DONE, "close", End.FAILED, "bad answer"),
        (HEAD + b"\r\n" + event({"choices": 3}), "close", End.FAILED, "bad answer"),
        (b"220 mail.example.org ESMTP\r\n\r\n", "", End.FAILED, "bad answer"),
        (stream_error(type="rate_limit_error"), "close", End.REJECTED, "stream rate_limit_error"),
        (stream_error(type="timeout_error"), "close", End.TIMED_OUT, "stream timeout_error"),
        (stream_error(type="x", code=400), "close", End.INVALID, "stream x"),
        (stream_error(code="boom"), "close", End.FAILED, "stream boom"),
        (HEAD + b"\r\n" + event({"error": "words"}), "close", End.FAILED, "stream error"),
    ],
)
def test_bad_ends_have_their_kind(raw: bytes, then: str, end: End, kind: str) -> None:
    timeout_s = 0.3 if then == "silence" else 30.0
    heard = asyncio.run(ask(always(raw, then), timeout_s, times=2))
    assert [(one.end, one.failure.kind if one.failure else "") for one in heard] == [(end, kind)] * 2


def test_nobody_listens() -> None:
    async def run() -> Heard:
        async with serving(always(b"")) as url:
            pass
        client = Client(Server(url, "m"))
        heard = await client.stream(client.request({}))
        client.close()
        return heard

    heard = asyncio.run(run())
    assert heard.end is End.FAILED
    assert heard.failure is not None
    assert heard.failure.kind == "connect"


def test_connections_are_kept_and_what_is_sent_is_whole() -> None:
    requests: list[bytes] = []
    peers: set[object] = set()

    async def script(
        number: int, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        requests.append(request)
        peers.add(writer.get_extra_info("peername"))
        writer.write(GOOD)

    heard = asyncio.run(ask(script, times=5, api_key="k1", headers={"X-Team": "blue"}))
    assert [one.end for one in heard] == [End.FINISHED] * 5
    assert len(peers) == 1
    head, _, body = requests[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /v1/chat/completions HTTP/1.1"
    assert {b"Authorization: Bearer k1", b"X-Team: blue", b"x-slo-class: batch"} <= set(lines)
    assert json.loads(body) == {"model": "m", "prompt": "hello"}


def test_a_kept_connection_that_had_closed_is_no_failure() -> None:
    """The server closes as the second request comes: it is sent again on a new connection, and said."""

    async def script(
        number: int, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if number == 2:
            writer.transport.abort()
        else:
            writer.write(GOOD)

    heard = asyncio.run(ask(script, times=3))
    assert [(one.end, one.retried) for one in heard] == [
        (End.FINISHED, False), (End.FINISHED, True), (End.FINISHED, False)
    ]  # fmt: skip


def test_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)

    async def run() -> list[Heard]:
        async with serving(always(GOOD), context) as url:
            client = Client(Server(url.replace("127.0.0.1", "localhost"), "m", timeout_s=30))
            heard = [await client.stream(client.request({})) for _ in range(2)]
            client.close()
            return heard

    unknown = asyncio.run(run())
    assert [one.failure and one.failure.kind for one in unknown] == ["connect", "connect"]
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    assert [one.end for one in asyncio.run(run())] == [End.FINISHED] * 2


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://x", "http://"])
def test_urls_that_cannot_be(url: str) -> None:
    with pytest.raises(BadRequest, match="base URL"):
        Server(url)


def test_a_header_holds_no_line_break() -> None:
    with pytest.raises(BadRequest, match="line break"):
        Server("http://x", headers={"a": "b\r\nc: d"})
    with pytest.raises(BadRequest, match="line break"):
        Server("http://x", api_key="k\nc: d")


# Whole runs.


def answering(tokens: Callable[[dict[str, Any]], int], seen: list[dict[str, Any]]) -> Script:
    """An OpenAI server that says `a` so many times, and keeps what it was asked."""

    async def script(
        number: int, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head, _, raw = request.partition(b"\r\n\r\n")
        if head.startswith(b"GET"):
            data = json.dumps({"data": [{"id": "listed"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
            return
        body = json.loads(raw)
        seen.append(body)
        count = tokens(body)
        if count < 0:
            writer.write(refusal(-count))
            return
        events = [token("a")] * count + [token("", "length"), usage(9, count), DONE]
        writer.write(OPEN + b"".join(map(chunk, events)) + b"0\r\n\r\n")

    return script


def plan(**source: Any) -> Plan:
    kind = Kind(Amount("constant", 12), Amount("constant", 4))
    return Plan(Source(**{"arrivals": Arrivals.steady(200), "kinds": (kind,), "seed": 5, **source}))


async def play(script: Script, what: Plan, act: Callable[[Player], None] | None = None) -> Run:
    async with serving(script) as url:
        player = Player(Server(url, "m", timeout_s=30), what, Texts(Vocabulary()))
        if act is not None:
            act(player)
        return await player.play(what.source.conversations(()))


def test_a_run_asks_what_the_workload_says_and_records_all() -> None:
    seen: list[dict[str, Any]] = []
    what = plan(shape=Shape(conversations=20))
    run = asyncio.run(play(answering(lambda body: body["max_tokens"], seen), what))
    assert len(run.records) == len(seen) == 20
    asked = [len(body["messages"][0]["content"].split()) for body in seen]
    assert asked == [12] * 20
    assert {body["ignore_eos"] for body in seen} == {True}
    assert len({body["messages"][0]["content"] for body in seen}) == 20
    for record in run.records:
        assert record.outcome is not None
        assert (record.outcome.end, len(record.outcome.times)) == (End.FINISHED, 4)
        assert (record.prompt_tokens, record.output_tokens, record.asked_tokens) == (9, 4, 12)
        assert record.sent_s >= record.due_s - 1e-3
    assert (run.unasked, run.interrupted) == (0, "")


def test_later_turns_repeat_the_answers_and_wait_for_them() -> None:
    seen: list[dict[str, Any]] = []
    kind = Kind(
        Amount("constant", 3),
        Amount("constant", 2),
        turns=Amount("constant", 3),
        think=Amount("constant", 0.01),
    )
    what = plan(kinds=(kind,), shape=Shape(conversations=1))
    run = asyncio.run(play(answering(lambda body: body["max_tokens"], seen), what))
    assert [record.turn for record in run.records] == [0, 1, 2]
    assert [record.asked_tokens for record in run.records] == [3, 8, 13]
    roles = [[message["role"] for message in body["messages"]] for body in seen]
    assert roles == [["user", "assistant"] * turn + ["user"] for turn in range(3)]
    assert seen[2]["messages"][1]["content"] == "aa"
    assert seen[2]["messages"][:3] == seen[1]["messages"]
    for before, after in pairwise(run.records):
        assert before.outcome is not None
        assert after.due_s >= before.sent_s + before.outcome.ended_s + 0.01


def test_a_conversation_ends_where_a_turn_fails() -> None:
    seen: list[dict[str, Any]] = []
    kind = Kind(turns=Amount("constant", 3), think=Amount("constant", 0))
    what = plan(kinds=(kind,), shape=Shape(conversations=2))
    run = asyncio.run(play(answering(lambda body: 2 if len(body["messages"]) == 1 else -503, seen), what))
    assert sorted((record.conversation, record.turn) for record in run.records) == [
        (0, 0), (0, 1), (1, 0), (1, 1)
    ]  # fmt: skip
    assert run.unasked == 2


def test_completions_carry_the_conversation_as_text() -> None:
    seen: list[dict[str, Any]] = []
    kind = Kind(turns=Amount("constant", 2), think=Amount("constant", 0))

    async def run() -> None:
        what = plan(kinds=(kind,), shape=Shape(conversations=1))
        async with serving(answering(lambda body: 2, seen)) as url:
            await Player(Server(url, "m", chat=False), what, Texts(Vocabulary())).play(
                what.source.conversations(())
            )

    asyncio.run(run())
    assert seen[1]["prompt"].startswith(seen[0]["prompt"] + "aa ")


def test_a_run_that_is_stopped_sends_no_more_and_says_why() -> None:
    def act(player: Player) -> None:
        asyncio.get_running_loop().call_later(0.1, player.stop, "interrupted")

    seen: list[dict[str, Any]] = []
    what = plan(arrivals=Arrivals.steady(50), shape=Shape(duration_s=3600))
    run = asyncio.run(play(answering(lambda body: 1, seen), what, act))
    assert run.interrupted == "interrupted"
    assert all(record.outcome is not None for record in run.records)


def test_stopped_twice_gives_up_what_runs() -> None:
    def act(player: Player) -> None:
        loop = asyncio.get_running_loop()

        def stop_when_all_run() -> None:
            if player.snapshot().running < 3:
                loop.call_later(0.01, stop_when_all_run)
                return
            player.stop("interrupted")
            player.stop("interrupted")

        loop.call_soon(stop_when_all_run)

    what = plan(shape=Shape(conversations=3, duration_s=3600))
    run = asyncio.run(play(always(OPEN, "silence"), what, act))
    assert [record.outcome and record.outcome.end for record in run.records] == [End.CANCELLED] * 3


def test_a_run_that_cannot_pass_any_more_ends() -> None:
    what = plan(arrivals=Arrivals.steady(50), shape=Shape(duration_s=3600))
    what = Plan(what.source, misses_limit=3)
    run = asyncio.run(play(answering(lambda body: -503, []), what))
    assert "more than 3" in run.interrupted
    assert len(run.records) >= 4


def test_misses_of_the_warm_up_are_forgiven() -> None:
    what = Plan(plan(shape=Shape(conversations=10)).source, warm_up_s=3600, misses_limit=0)
    run = asyncio.run(play(answering(lambda body: -503, []), what))
    assert (run.interrupted, len(run.records)) == ("", 10)


def test_probing_finds_the_model_and_what_the_server_knows() -> None:
    seen: list[dict[str, Any]] = []

    async def probed(tokens: Callable[[dict[str, Any]], int], model: str) -> Any:
        async with serving(answering(tokens, seen)) as url:
            return await probe(Server(url, model))

    found = asyncio.run(probed(lambda body: 2, ""))
    assert (found.model, found.ignore_eos, found.requests) == ("listed", True, 2)
    found = asyncio.run(probed(lambda body: -400 if "ignore_eos" in body else 2, "named"))
    assert (found.model, found.ignore_eos, found.requests) == ("named", False, 3)
    with pytest.raises(BadRequest, match=r"http 400: .*full"):
        asyncio.run(probed(lambda body: -400, "named"))
    with pytest.raises(Unavailable, match="http 503"):
        asyncio.run(probed(lambda body: -503, "named"))


def test_a_process_of_its_own_gives_the_same() -> None:
    seen: list[dict[str, Any]] = []
    what = plan(shape=Shape(conversations=30))

    async def run() -> Run:
        async with serving(answering(lambda body: body["max_tokens"], seen)) as url:
            return await asyncio.to_thread(in_process, Server(url, "m"), what)

    done = asyncio.run(run())
    assert len(done.records) == len(seen) == 30
    assert {record.outcome and record.outcome.end for record in done.records} == {End.FINISHED}
    assert done.cpu_s > 0


def test_a_process_says_what_is_wrong_with_its_trace(tmp_path: Any) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": []}\n')
    with pytest.raises(BadRequest, match="line 1 of the trace: without timestamp"):
        in_process(Server("http://127.0.0.1:9", "m"), Plan(Source(trace=str(path))))
