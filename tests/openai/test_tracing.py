"""One tree of spans a request, with its parent's trace; none where none is sampled."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from http_front import listening
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from whole_fleet import MODEL, Box

from fleet.errors import WorkerLost
from fleet.tracing import Tracer, TraceSettings
from router.settings import CostSettings, RouterSettings

SPLIT = RouterSettings(cost=CostSettings(local_prefill_tokens=0, local_advantage=1e9))
BODY = {"model": MODEL, "prompt": "some words " * 9, "max_tokens": 5, "ignore_eos": True}
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-{flags}"


@asynccontextmanager
async def traced(
    tokenizer_json: str, ratio: float
) -> AsyncIterator[tuple[httpx.AsyncClient, InMemorySpanExporter]]:
    spans = InMemorySpanExporter()
    async with Box(1, 1, router=SPLIT) as box, listening(box, tokenizer_json) as (ingress, port):
        ingress.tracer = Tracer(TraceSettings(ratio=ratio), spans)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield client, spans
        async with asyncio.timeout(20):
            while ingress.exchanges:
                await asyncio.sleep(0.001)
        ingress.tracer.close()


async def roots(spans: InMemorySpanExporter, count: int) -> list[ReadableSpan]:
    """When so many requests are over: a client has its answer a moment before."""
    async with asyncio.timeout(20):
        while True:
            found = [one for one in spans.get_finished_spans() if one.name.startswith("POST")]
            if len(found) == count:
                return found
            await asyncio.sleep(0.001)


def test_one_tree_a_request(tokenizer_json: str) -> None:
    async def main() -> None:
        async with traced(tokenizer_json, 1.0) as (client, spans):
            answer = await client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
            (root,) = await roots(spans, 1)
            tree = {span.name: span for span in spans.get_finished_spans()}
            assert tree.keys() == {
                *("POST /v1/completions", "ingress", "admission", "route"),
                *("prefill", "transfer", "decode", "stream"),
            }  # fmt: skip
            assert len({span.context.trace_id for span in tree.values()}) == 1
            assert root.parent is None
            for name, span in tree.items():
                assert span is root or span.parent == root.context, name
                times = (root.start_time, span.start_time, span.end_time, root.end_time)
                assert sorted(at or 0 for at in times) == list(times), name
            assert tree["prefill"].start_time <= tree["decode"].start_time  # type: ignore[operator]
            assert tree["prefill"].attributes is not None
            assert tree["prefill"].attributes["pdfleet.worker"] == "prefill-0"
            assert "queued tokens" in str(tree["route"].attributes["pdfleet.why"])  # type: ignore[index]
            assert tree["decode"].attributes["pdfleet.worker"] == "decode-0"  # type: ignore[index]
            told = root.attributes
            assert told is not None
            assert (told["pdfleet.request"], told["pdfleet.outcome"]) == ("mine", "length")
            assert (told["http.response.status_code"], told["gen_ai.usage.output_tokens"]) == (200, 5)
            _, trace, span, flags = answer.headers["traceparent"].split("-")
            assert (trace, span) == (f"{root.context.trace_id:032x}", f"{root.context.span_id:016x}")
            assert int(flags, 16) & 1

    asyncio.run(main())


def test_workers_that_were_lost_are_parts_of_the_same_tree(tokenizer_json: str) -> None:
    async def main() -> None:
        spans = InMemorySpanExporter()
        async with Box(1, 2, router=SPLIT) as box, listening(box, tokenizer_json) as (ingress, port):
            ingress.tracer = Tracer(TraceSettings(ratio=1.0), spans)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                body = {**BODY, "max_tokens": 300, "stream": True}
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    lines = answer.aiter_lines()
                    for _ in range(20):
                        await anext(lines)
                    (record,) = box.router.flow.records.running
                    first = record.transitions[-1].worker
                    box.wire.cut(box.router.name)
                    assert [line async for line in lines if line][-1] == "data: [DONE]"
            (root,) = await roots(spans, 1)
            ingress.tracer.close()
        tree = {span.name: span for span in spans.get_finished_spans()}
        assert len(tree) == len(spans.get_finished_spans())
        assert {span.context.trace_id for span in tree.values()} == {root.context.trace_id}
        lost, decode, prefill = (tree[name].attributes or {} for name in ("attempt", "decode", "prefill"))
        assert lost["pdfleet.worker"] == first
        assert "lost" in str(lost["pdfleet.lost"])
        assert decode["pdfleet.worker"] == record.transitions[-2].worker
        assert prefill["pdfleet.worker"] == "prefill-0"
        for span in tree.values():
            assert root.start_time <= span.start_time <= span.end_time <= root.end_time  # type: ignore[operator]

    asyncio.run(main())


def test_answers_of_one_request_have_each_its_own_branch(tokenizer_json: str) -> None:
    async def main() -> None:
        async with traced(tokenizer_json, 1.0) as (client, spans):
            await client.post("/v1/completions", json={**BODY, "n": 2, "stream": True})
            (root,) = await roots(spans, 1)
            branches = [span for span in spans.get_finished_spans() if span.name == "answer"]
            assert [span.parent for span in branches] == [root.context] * 2
            for branch in branches:
                under = {span.name for span in spans.get_finished_spans() if span.parent == branch.context}
                assert {"prefill", "decode", "stream"} <= under

    asyncio.run(main())


@pytest.mark.parametrize(("flags", "ratio", "kept"), [("01", 0.0, 1), ("00", 1.0, 0), (None, 0.0, 0)])
def test_a_request_is_traced_as_its_parent_is(
    tokenizer_json: str, flags: str | None, ratio: float, kept: int
) -> None:
    async def main() -> None:
        async with traced(tokenizer_json, ratio) as (client, spans):
            headers = {} if flags is None else {"traceparent": PARENT.format(flags=flags)}
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
            found = await roots(spans, kept)
            said = answer.headers["traceparent"].split("-")
            assert int(said[3], 16) & 1 == kept
            if flags is not None:
                assert said[1] == "4bf92f3577b34da6a3ce929d0e0e4736"
            for root in found:
                assert root.parent is not None
                assert f"{root.parent.span_id:016x}" == "00f067aa0ba902b7"

    asyncio.run(main())


def test_a_broken_parent_is_none(tokenizer_json: str) -> None:
    async def main() -> None:
        async with traced(tokenizer_json, 1.0) as (client, spans):
            for parent in ("x", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", "\u00ff" * 55, "a" * 4000):
                made = httpx.Headers([(b"traceparent", parent.encode("latin-1"))])
                answer = await client.post("/v1/completions", json=BODY, headers=made)
                assert answer.status_code == 200
            assert all(root.parent is None for root in await roots(spans, 4))

    asyncio.run(main())


def test_what_failed_here_says_so(tokenizer_json: str) -> None:
    async def main() -> None:
        async with traced(tokenizer_json, 1.0) as (client, spans):
            assert (await client.post("/v1/completions", json={**BODY, "n": 0})).status_code == 400
            body = {**BODY, "max_tokens": 1500}
            late = await client.post("/v1/completions", json=body, headers={"x-deadline-ms": "30"})
            assert late.status_code == 504
            wrong, failed = await roots(spans, 2)
            assert wrong.status.is_ok or wrong.status.is_unset
            assert failed.status.description == "DeadlineExceeded"

    asyncio.run(main())


def test_a_stream_that_breaks_off_here_says_so(serve: Any) -> None:
    """Its status was told before: 200."""

    async def main() -> None:
        async with serve(lambda request: [5, 6, WorkerLost("gone")]) as site:
            spans = InMemorySpanExporter()
            site.ingress.tracer = Tracer(TraceSettings(ratio=1.0), spans)
            answer = await site.complete(stream=True)
            assert answer.status_code == 200
            assert "service_unavailable" in answer.text
            (failed,) = await roots(spans, 1)
            assert failed.status.description == "WorkerLost"
            site.ingress.tracer.close()

    asyncio.run(main())


def test_the_state_of_a_callers_trace_is_kept() -> None:
    spans = InMemorySpanExporter()
    tracer = Tracer(TraceSettings(ratio=0.0), spans)
    parent = PARENT.format(flags="01").encode()
    for states in ([b"a=1,b=2"], [b"a=1", b"b=2"], [b"no state"]):
        headers = [(b"traceparent", parent), *((b"tracestate", one) for one in states)]
        tracer.begin("POST /v1/x", headers, 0.0).end({})
    tracer.begin("POST /v1/x", [(b"tracestate", b"a=1")], 0.0).end({})  # of no trace: ratio decides
    kept = [span.context.trace_state.to_header() for span in spans.get_finished_spans()]
    assert kept == ["a=1,b=2", "a=1,b=2", ""]


@pytest.mark.parametrize("step_s", [-3600, 3600])
def test_a_wall_clock_that_is_set_tears_no_tree_apart(step_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = InMemorySpanExporter()
    trace = Tracer(TraceSettings(ratio=1.0), spans).begin("POST /v1/x", [], 10.0)
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + step_s * 10**9)
    trace.over(14.0)
    trace.span("prefill", 11.0, 12.5, {})
    trace.end({})
    part, root = spans.get_finished_spans()
    assert (root.end_time or 0) - (root.start_time or 0) == 4 * 10**9
    assert (part.start_time or 0) - (root.start_time or 0) == 10**9


def test_spans_reach_a_collector() -> None:
    """By the real exporter, over HTTP; what is left is sent at the end."""
    came: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        tracer = Tracer(TraceSettings(url, ratio=1.0, service="mine"), instance="router-7")
        trace = tracer.begin("POST /v1/x", [], 8.0)
        trace.over(10.0)
        trace.span("prefill", 9.0, 9.5, {"a": 1})
        trace.end({"b": "two"})
        tracer.close()
        server.shutdown()
    (message,) = (ExportTraceServiceRequest.FromString(data) for data in came)
    (of_process,) = message.resource_spans
    told = {one.key: one.value.string_value for one in of_process.resource.attributes}
    assert (told["service.name"], told["service.instance.id"]) == ("mine", "router-7")
    child, root = of_process.scope_spans[0].spans
    assert (child.name, root.name, child.parent_span_id) == ("prefill", "POST /v1/x", root.span_id)
    assert child.end_time_unix_nano - child.start_time_unix_nano == 500_000_000


def test_a_collector_that_does_not_answer_keeps_nobody_from_leaving(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = threading.enumerate()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer = Tracer(TraceSettings(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces", ratio=1.0))
        tracer.begin("POST /v1/x", [], 1.0).end({})
        began = time.monotonic()
        tracer.close(limit_s=0.1)
        assert time.monotonic() - began < 9, "it waited for the exporter's own limit, 10 s"
    for thread in set(threading.enumerate()) - set(before):
        thread.join()
    assert "retrying" not in caplog.text, "once it is closed nothing of it is left behind"


def test_without_an_endpoint_nothing_of_it_is_loaded() -> None:
    loaded = "import sys, router.__main__; print(any(m.startswith('opentelemetry.sdk') for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize("wrong", [{"endpoint": "localhost:4318"}, {"ratio": 1.5}, {"ratio": -0.1}])
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TraceSettings(**wrong)
