"""The ingress as raw ASGI: reads bodies within limits, starts runs, writes answers, notices who leaves.

Routes that take bodies are served here; everything else goes to the FastAPI app.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from fleet.api_keys import ApiKey
from fleet.errors import FleetError, Overloaded, TooLarge
from fleet.handoff import CancelReason
from fleet.ids import new_request_id
from fleet.objectives import CLASSES, STANDARD, Objectives
from fleet.stages import Stage, Timeline
from fleet.tracing import TRACEPARENT, Trace, Tracer
from router.live import Live
from router.openai import chat, completions, responses, tokens
from router.openai.app import admin_app
from router.openai.callers import ANYBODY, CALLER, Caller, Callers
from router.openai.dashboard.routes import PAGE
from router.openai.errors import (
    Headers,
    HeadersTooLarge,
    MethodNotAllowed,
    ModelNotFound,
    SlowBody,
    WrongMediaType,
    defect,
    error_body,
    error_event,
    error_headers,
)
from router.openai.explain import Explained
from router.openai.finished import Finished
from router.openai.job import Endpoint, include_usage
from router.openai.messages import ChatBody, CompletionBody, decode
from router.openai.metrics import OTHER, Metrics
from router.openai.protocol import ABORT, LEFT
from router.openai.responses import ResponsesBody
from router.openai.settings import HttpSettings
from router.openai.stream import Choice, Job, follow_all
from router.openai.traces import end_trace
from router.peers import Limits
from router.record import Records
from router.run import Spine
from router.text.answer import LoggedToken
from router.text.tokenizer import ModelText

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Prepare = Callable[[bytes, Caller], Awaitable[Job | bytes]]
"""From a body and whose it is to what it asks for, or at once to the response's JSON."""

_CLEAN_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_JSON: Headers = [(b"content-type", b"application/json")]
_EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_OPEN = frozenset(("/health", "/ready", PAGE))
_FIGURES = frozenset(("/metrics", "/fleet/targets"))
_PING = b": ping\n\n"
_LINGER_S = 2.0
"""How long a client that is refused in the middle of its body is listened to, so that it can read why."""


class _ClientGone(Exception):
    """Nobody is left to be told anything."""


class Ingress:
    """An ASGI 3 application. Needs its lifespan events: they start and stop what runs beside requests."""

    def __init__(
        self,
        spine: Spine,
        models: Mapping[str, ModelText],
        settings: HttpSettings,
        *,
        version: str = "",
        context: Callable[[str], int | None] = lambda model: None,
        keys: Sequence[ApiKey] = (),
        objectives: Mapping[str, Objectives] = CLASSES,
        default_class: str = STANDARD,
        records: Records | None = None,
        name: str = "",
    ) -> None:
        """`models` by served name. `context(model)` is the longest sequence that workers hold now, in
        tokens; None: unknown, the model's own context counts. Without `keys` anybody may ask.
        `objectives`: classes of requests by name. `records`: of the spine's runs, to be shown. `name`: of
        this router."""
        self.spine = spine
        self.models = dict(models)
        self.settings = settings
        self.metrics = Metrics(settings.vllm_names)
        self.targets: Callable[[], list[dict[str, object]]] = list
        """Where the workers of the fleet tell their figures; none are known here."""
        self.live: Live | None = None
        """What is shown to people; nothing here."""
        self.tracer: Tracer | None = None
        self.finished: list[Callable[[Finished], None]] = []
        """Who is told of each request that is over."""
        self.records = records
        self.draining = False
        """Set when the process is about to leave: not ready any more."""
        self.exchanges: set[_Exchange] = set()
        self._context = context
        self._callers = Callers(keys, settings.salt_secret, objectives, default_class)
        self._routes: dict[str, Prepare] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completions,
            "/v1/responses": self._responses,
            "/v1/embeddings": self._embeddings,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        self.explained = Explained(records, name)
        self._app = admin_app(self, version)
        self._ticking: asyncio.TimerHandle | None = None

    @property
    def wants_keys(self) -> bool:
        return not self._callers.anybody

    @property
    def open_paths(self) -> frozenset[str]:
        """Those that need no key. Exactly these: all else, however it is spelt, needs one."""
        return _OPEN | _FIGURES if self.settings.open_metrics else _OPEN

    @property
    def limits(self) -> Limits:
        """Of API keys, to be shared with other routers."""
        return self._callers

    def change_keys(self, keys: Sequence[ApiKey]) -> None:
        """These and no others from now on; requests that run already stay."""
        self._callers.change(keys)

    def context(self, model: str) -> int:
        """Longest sequence in tokens."""
        text = self.models[model]
        held = self._context(model)
        return text.context if held is None else min(held, text.context)

    def served(self) -> tuple[str, ...]:
        """Models that have live workers and a tokenizer here."""
        return tuple(name for name in self.spine.models() if name in self.models)

    async def stop_running(self) -> None:
        """Ends all requests with an error that says so."""
        for exchange in list(self.exchanges):
            await exchange.stop(CancelReason.DEADLINE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._lifespan(receive, send)
        if scope["type"] != "http":
            return None
        name = scope["path"]
        prepare = self._routes.get(name)
        caller, unknown = self._who(scope)
        exchange = _Exchange(self, scope, receive, send, name, prepare, caller)
        exchange.refused = unknown or exchange.refused
        if prepare is not None or exchange.refused is not None:
            return await exchange.serve()

        async def send_named(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", exchange.id)]
            await send(message)

        scope[CALLER] = caller
        return await self._app(scope, receive, send_named)

    def _who(self, scope: Scope) -> tuple[Caller, FleetError | None]:
        """Who asks on which terms, and why that is nobody."""
        if scope["path"] in self.open_paths:
            return ANYBODY, None
        given = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        try:
            caller = self._callers.caller(given)
            return self._callers.asked(caller, scope["headers"], self.settings.deadline_s), None
        except FleetError as error:
            return ANYBODY, error

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self._tick()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self._ticking is not None:
            self._ticking.cancel()
        for text in self.models.values():
            text.close()
        await send({"type": "lifespan.shutdown.complete"})

    def _tick(self) -> None:
        """Looks after all streams at once, so that no token has to wind up a timer."""
        loop = asyncio.get_running_loop()
        for exchange in self.exchanges:
            exchange.look(loop.time())
        ping_s = self.settings.ping_s or 4.0
        self._ticking = loop.call_later(min(1.0, ping_s / 4, self.settings.write_timeout_s / 4), self._tick)

    async def _chat(self, data: bytes, caller: Caller) -> Job:
        body = decode(ChatBody, data)
        return await chat.prepare(body, self._text(body.model), self._endpoint(body, caller))

    async def _completions(self, data: bytes, caller: Caller) -> Job:
        body = decode(CompletionBody, data)
        return await completions.prepare(body, self._text(body.model), self._endpoint(body, caller))

    async def _responses(self, data: bytes, caller: Caller) -> Job:
        body = responses.decode_responses(data)
        return await responses.prepare(body, self._text(body.model), self._endpoint(body, caller))

    async def _tokenize(self, data: bytes, caller: Caller) -> bytes:
        body = tokens.decode_tokenize(data)
        model = body.model or next(iter(self.models))
        return await tokens.tokenize(body, self._text(model), self.settings, self.context(model))

    async def _detokenize(self, data: bytes, caller: Caller) -> bytes:
        body = tokens.decode_detokenize(data)
        return await tokens.detokenize(body, self._text(body.model or next(iter(self.models))), self.settings)

    async def _embeddings(self, data: bytes, caller: Caller) -> bytes:
        body = tokens.decode_embeddings(data)
        self._text(body.model)
        raise tokens.no_embeddings(body)

    def _text(self, model: str) -> ModelText:
        text = self.models.get(model)
        if text is None:
            raise ModelNotFound(model, self.served())
        return text

    def _endpoint(self, body: ChatBody | CompletionBody | ResponsesBody, caller: Caller) -> Endpoint:
        usage = isinstance(body, ResponsesBody) or include_usage(body)
        return Endpoint(self.settings, self.context(body.model), int(time.time()), usage, caller)


class _Exchange:
    """One request and its response on one of these routes."""

    __slots__ = (
        "_began",
        "_caller",
        "_gone",
        "_headed",
        "_ingress",
        "_job",
        "_last",
        "_lock",
        "_now",
        "_path",
        "_ping",
        "_prepare",
        "_receive",
        "_route",
        "_scope",
        "_send",
        "_started",
        "_status",
        "_trace",
        "_watching",
        "_writing",
        "id",
        "length",
        "refused",
    )

    def __init__(
        self,
        ingress: Ingress,
        scope: Scope,
        receive: Receive,
        send: Send,
        path: str,
        prepare: Prepare | None,
        caller: Caller,
    ) -> None:
        self._ingress = ingress
        self._scope = scope
        self._receive = receive
        self._send = send
        self._path = path
        self._prepare = prepare
        self._route = OTHER if prepare is None else path
        """As it stands in labels."""
        self._caller = caller
        self._now = asyncio.get_running_loop().time
        self._began = self._now()
        self._lock = asyncio.Lock()
        """Held while a stream's head is sent: nothing may come before it."""
        self._started = False
        """Whether the response has begun: its status cannot change any more."""
        self._status = 0
        self._headed = False
        """Whether the stream's head was sent."""
        self._writing = 0
        """Frames being written; more than none for long: the client does not read."""
        self._last = 0.0
        """When the last frame began to be written."""
        self._gone = False
        self._job: Job | None = None
        self._ping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self.id = new_request_id().encode()
        self.length = 0
        self._trace: Trace | None = None
        if ingress.tracer is not None and prepare is not None:
            self._trace = ingress.tracer.begin(f"POST {path}", scope["headers"], self._began)
        self.refused = self._look_at_headers()

    # -- before the body

    def _look_at_headers(self) -> FleetError | None:
        """Why this request is not to be read any further."""
        settings = self._ingress.settings
        kind = encoding = b""
        size = len(self._scope.get("raw_path") or b"") + len(self._scope.get("query_string") or b"")
        for name, value in self._scope["headers"]:
            size += len(name) + len(value) + 4
            if name == b"content-type":
                kind = value
            elif name == b"content-length":
                self.length = int(value) if value.isdigit() and len(value) < 20 else 0
            elif name == b"content-encoding":
                encoding = value.strip().lower()
            elif name == b"x-request-id" and _CLEAN_ID.fullmatch(value):
                # Only shown, never used: two clients may well send the same.
                self.id = value
        if size > settings.max_header_bytes:
            return HeadersTooLarge(
                f"the headers have {size} bytes; the limit is {settings.max_header_bytes} "
                "(setting http.max_header_bytes)"
            )
        if len(self._scope["headers"]) > settings.max_headers:
            return HeadersTooLarge(
                f"there are {len(self._scope['headers'])} headers; the limit is {settings.max_headers} "
                "(setting http.max_headers)"
            )
        if self._prepare is None:
            return None
        if self._scope["method"] != "POST":
            return MethodNotAllowed(self._scope["method"], self._path, "POST")
        if kind.partition(b";")[0].strip().lower() != b"application/json":
            return WrongMediaType("the body must be sent with Content-Type: application/json")
        if encoding not in (b"", b"identity"):
            return WrongMediaType("Content-Encoding is not supported; send the body as it is")
        if self.length > settings.max_body_bytes:
            return self._too_large(self.length)
        if len(self._ingress.exchanges) >= settings.max_requests:
            return Overloaded(
                f"{settings.max_requests} requests run here already (setting http.max_requests)"
            )
        return None

    def _too_large(self, size: int) -> TooLarge:
        limit = self._ingress.settings.max_body_bytes
        return TooLarge(
            f"the body has {size} bytes or more; the limit is {limit} (setting http.max_body_bytes)"
        )

    # -- from the first byte to the last

    async def serve(self) -> None:
        ingress, metrics, quota = self._ingress, self._ingress.metrics, self._caller.quota
        ingress.exchanges.add(self)
        metrics.began(self._route)
        left: set[Callable[[], None]] | None = self._scope.get(LEFT)
        outcome, entered = "cancelled", False
        try:
            if self.refused is not None:
                raise self.refused
            assert self._prepare is not None
            if quota is not None:
                quota.enter(self._now())
                entered = True
            data = await self._read()
            if left is not None:
                left.add(self._left)
            else:
                self._watching = asyncio.create_task(self._watch())
            accepted = self._now()
            job = await self._prepare(data, self._caller)
            if self._gone:
                return
            if isinstance(job, bytes):
                await self._respond(200, job, _JSON)
                outcome = "stop"
                return
            self._start(job, accepted, self._now())
            await (self._stream(job) if job.stream else self._whole(job))
            outcome = job.choices[0].finish
        except _ClientGone:
            pass
        except FleetError as error:
            if not self._gone:
                outcome = type(error).__name__
                await self._fail(error)
        except Exception:
            # The root of a request: a defect in one must neither be silent nor end others.
            log.exception("request %s failed", self.id.decode(), extra=self._logged())
            outcome = "defect"
            await self._fail(defect())
        finally:
            if left is not None:
                left.discard(self._left)
            elif self._watching is not None:
                self._watching.cancel()
            if self._ping is not None:
                self._ping.cancel()
            ingress.exchanges.discard(self)
            metrics.ended(self._route, outcome, self._now() - self._began)
            if quota is not None and entered:
                quota.leave()
            await self.stop(CancelReason.CLIENT)
            if self._job is not None and quota is not None:
                quota.used(self._job.consumed())
            if ingress.finished or self._trace is not None:
                self._tell(outcome)

    def _tell(self, outcome: str) -> None:
        """Writes down what became of it."""
        finished = Finished(
            id=self.id.decode(),
            route=self._route,
            status=self._status,
            outcome=outcome,
            began=self._began,
            ended=self._now(),
            terms=self._caller.terms,
            job=self._job,
            records=self._ingress.records,
        )
        for tell in self._ingress.finished:
            tell(finished)
        if self._trace is not None and self._trace.sampled:
            end_trace(self._trace, finished)

    async def _read(self) -> bytes:
        """The body. Counted as it comes: what its length header says is only believed when it is too much."""
        settings = self._ingress.settings
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(settings.body_timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        self._gone = True
                        raise _ClientGone
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if size > settings.max_body_bytes:
                        raise self._too_large(size)
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        except TimeoutError:
            raise SlowBody(
                f"the body took more than {settings.body_timeout_s:g} s (setting http.body_timeout_s)"
            ) from None

    def _left(self) -> None:
        """The client is gone: everything ends. Called by the server, which spares a task for each request."""
        self._gone = True
        self._watching = asyncio.create_task(self.stop(CancelReason.CLIENT))

    async def _watch(self) -> None:
        """The same of a server that says so only to who waits for it. Also fires when the response is done;
        harmless."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        await self.stop(CancelReason.CLIENT)

    def _start(self, job: Job, accepted: float, now: float) -> None:
        self._job = job
        if requests := tuple(choice.request.id for choice in job.choices if choice.run is None):
            self._ingress.explained.began(self.id.decode(), requests)
        for choice in job.choices:
            if choice.run is None:
                choice.timeline = Timeline(accepted)
                choice.timeline.mark(Stage.ACCEPTED, accepted)
                choice.timeline.mark(Stage.TOKENIZED, now)
                choice.run = self._ingress.spine.start(choice.request, choice.timeline, self._caller.terms)

    async def stop(self, reason: CancelReason) -> None:
        if self._job is not None:
            for choice in self._job.choices:
                if choice.run is not None:
                    await choice.run.stop(reason)

    # -- the response

    async def _whole(self, job: Job) -> None:
        def show(choice: Choice, text: str, logged: list[LoggedToken]) -> None:
            choice.text.append(text)
            choice.logged += logged

        async def flush() -> None:
            pass

        await follow_all(job.choices, show, flush, self._now)
        for choice in job.choices:
            choice.logged += choice.answer.logged
        await self._respond(200, job.layout.whole(job.choices, job.usage()), _JSON)

    async def _stream(self, job: Job) -> None:
        """Frames that are there at once are written at once."""
        layout, frames = job.layout, list[bytes]()
        opened: set[int] = set()
        """Places of the answers whose opening was said."""

        def show(choice: Choice, text: str, logged: list[LoggedToken]) -> None:
            frame = b"" if choice.index in opened else layout.opening(choice)
            if text:
                frame += layout.delta(choice, text, logged)
            self._last = self._now()
            opened.add(choice.index)
            if choice.finish:
                frame += layout.closing(choice, choice.answer.logged)
            if frame or not self._started:
                frames.append(frame)

        async def flush() -> None:
            if frames:
                frame = b"".join(frames)
                frames.clear()
                await self._write(frame)

        try:
            await follow_all(job.choices, show, flush, self._now)
        except Exception:
            await flush()  # What was said before stands before the error.
            raise
        if job.include_usage:
            frames.append(layout.usage(job.usage()))
        frames.append(job.done)
        await self._write(b"".join(frames), last=True)

    async def _write(self, frame: bytes, last: bool = False) -> None:
        self._writing += 1
        try:
            if not self._headed:
                await self._begin_stream()
            await self._send({"type": "http.response.body", "body": frame, "more_body": not last})
        finally:
            self._writing -= 1

    def _logged(self) -> dict[str, object]:
        """By what its lines are found: its own id, and those that workers know its answers by."""
        answers = [choice.request.id for choice in self._job.choices] if self._job is not None else []
        return {"http_request": self.id.decode(), "request": ",".join(answers)}

    def _named(self) -> Headers:
        """What the request is called, here and in its trace."""
        if self._trace is None:
            return [(b"x-request-id", self.id)]
        return [(b"x-request-id", self.id), (TRACEPARENT, self._trace.traceparent)]

    async def _begin_stream(self) -> None:
        self._started = True
        async with self._lock:
            if not self._headed:
                headers = [*_EVENTS, *self._named()]
                self._status = 200
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                self._headed = True

    def look(self, now: float) -> None:
        """Called every now and then: a comment on a silent stream, an end to one that nobody reads."""
        settings = self._ingress.settings
        if self._job is None or not self._job.stream:
            return
        if self._writing:
            if now - self._last > settings.write_timeout_s and (abort := self._scope.get(ABORT)):
                log.warning("request %s: its client reads no more", self.id.decode(), extra=self._logged())
                abort()
        elif settings.ping_s and now - max(self._last, self._began) >= settings.ping_s:
            self._last = now
            self._ping = asyncio.create_task(self._write(_PING))

    async def _fail(self, error: FleetError) -> None:
        if not self._started:
            if self._ping is not None:
                self._ping.cancel()
            await self._respond(error.http_status, error_body(error), [*_JSON, *error_headers(error)],
                                linger=isinstance(error, TooLarge | SlowBody))  # fmt: skip
            return
        failed = self._job.failed if self._job is not None else error_event
        await self._send({"type": "http.response.body", "body": failed(error)})

    async def _respond(self, status: int, body: bytes, headers: Headers, linger: bool = False) -> None:
        self._started = True
        headers = [*headers, (b"content-length", str(len(body)).encode()), *self._named()]
        self._status = status
        if linger:
            headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": linger})
        if linger:
            await self._linger()
            await self._send({"type": "http.response.body", "body": b""})

    async def _linger(self) -> None:
        """A connection that is closed while the client still sends is reset, and the answer lost with it."""
        try:
            async with asyncio.timeout(_LINGER_S):
                while (message := await self._receive())["type"] != "http.disconnect":
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            pass
