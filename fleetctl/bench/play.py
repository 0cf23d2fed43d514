"""Plays a workload against a server in open loop, in a process of its own, and records every request."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import multiprocessing
import resource
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from io import TextIOWrapper
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from fleet.errors import BadRequest, FleetError, Internal, Unavailable
from fleet.goodput import End, Histogram, Outcome, Percentiles, Tally, attains
from fleet.workload import Conversation, Piece, Turn
from fleetctl.bench.client import Client, Heard
from fleetctl.bench.plan import Plan
from fleetctl.bench.prompts import Texts, Vocabulary, words_for
from fleetctl.bench.words import Record, Server

_PLAIN = Vocabulary()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How far a run is."""

    elapsed_s: float
    sent: int
    running: int
    finished: int
    attained: int
    missed: int
    uncounted: int
    output_tokens: int
    errors: dict[str, int]
    ttft: Percentiles | None
    tpot: Percentiles | None
    lag: Percentiles | None
    ending: bool
    """Nothing more will be sent."""


@dataclass(frozen=True, slots=True)
class Run:
    """All that a run recorded."""

    records: list[Record]
    sending_s: float
    """From the start until nothing more was to be sent."""
    total_s: float
    """Until the last answer."""
    cpu_s: float
    """Of the generator's process, in that time."""
    connections: int
    unasked: int
    """Later turns of conversations that had failed before or were interrupted."""
    interrupted: str
    """Why it ended before its time; empty: it did not."""
    began_at: float
    """Unix time."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a server said to the first requests, which no figure counts."""

    model: str
    ignore_eos: bool
    tokens_per_word: float
    """As the server counts the words that prompts are made of; 1 where it does not tell."""
    requests: int
    """Sent for it."""


def trace_lines(path: str) -> Iterator[str]:
    """Of a trace, compressed or not. Raises `BadRequest` where it cannot be read."""
    try:
        raw = Path(path).open("rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise BadRequest(f"the trace cannot be read: {error}", param="trace") from None
    with raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        try:
            plain = gzip.GzipFile(fileobj=raw) if packed else raw
            yield from TextIOWrapper(plain, encoding="utf-8")
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise BadRequest(f"the trace {path} cannot be read: {error}", param="trace") from None


def whole_words(tokenizer: str) -> Vocabulary:
    """Vocabulary that are one token each for the tokenizer in that file or folder."""
    from tokenizers import Tokenizer

    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise BadRequest(f"there is no tokenizer at {path}", param="tokenizer")
    try:
        encode = Tokenizer.from_file(str(path)).encode
        return Vocabulary(words_for(lambda text: len(encode(text, add_special_tokens=False).ids)))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise BadRequest(f"tokenizer {path}: {error}", param="tokenizer") from None


async def probe(server: Server) -> Probe:
    """Finds the model, whether the server knows `ignore_eos`, and how it counts words. Raises `Unavailable`
    or `BadRequest` that says why nothing can be measured."""
    client = Client(server)
    try:
        model = server.model or await _first_model(client, server)
        named = replace(server, model=model)
        for requests, ignore_eos in enumerate((True, False), 1):
            heard = await _ask_words(client, named, 8, ignore_eos)
            if heard.end is End.FINISHED:
                more = await _ask_words(client, named, 136, ignore_eos)
                few, many = _prompt_tokens(heard), _prompt_tokens(more)
                # The template's tokens are in both.
                per_word = (many - few) / 128 if 0 < few < many else 1.0
                return Probe(model, ignore_eos, per_word, requests + 1)
            if heard.end is not End.INVALID:
                break
        assert heard.failure is not None, "only a finished request has none"
        why = f"{heard.failure.kind}: {heard.failure.message}"
        if heard.end is End.INVALID:
            raise BadRequest(f"{server.url} refuses a first request of model {model!r}: {why}")
        raise Unavailable(f"{server.url} does not answer a first request: {why}")
    finally:
        client.close()


def _prompt_tokens(heard: Heard) -> int:
    """0: the server did not tell."""
    return (heard.usage.prompt_tokens or 0) if heard.usage is not None else 0


async def _ask_words(client: Client, server: Server, count: int, ignore_eos: bool) -> Heard:
    said = _said(server, Texts(_PLAIN).piece(Piece(f"probe {count}", count)), [])
    return await client.stream(client.request(body_of(server, 2, ignore_eos) | said))


async def _first_model(client: Client, server: Server) -> str:
    import msgspec

    status, body = await client.get("/models")
    with contextlib.suppress(msgspec.MsgspecError, LookupError, TypeError):
        if status == 200:
            return str(msgspec.json.decode(body)["data"][0]["id"])
    what = f"status {status}" if status else "no answer"
    raise Unavailable(
        f"{server.url} does not list its models ({what}: {body[:200].decode(errors='replace')}); is it up, "
        "and is --url right? --model names one"
    )


def body_of(server: Server, output_tokens: int, ignore_eos: bool) -> dict[str, Any]:
    """All of a request but what it says."""
    body: dict[str, Any] = {
        "model": server.model,
        "max_tokens": output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:
        body |= {"ignore_eos": True, "min_tokens": output_tokens}
    return body | dict(server.body)


def _said(server: Server, question: str, history: list[tuple[str, str]]) -> dict[str, Any]:
    """`history`: questions and answers before this one."""
    if not server.chat:
        return {"prompt": "".join(one for pair in history for one in pair) + question}
    messages = [
        {"role": role, "content": text}
        for pair in history
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return {"messages": [*messages, {"role": "user", "content": question}]}


class Player:
    """One run, within a loop."""

    def __init__(self, server: Server, plan: Plan, made: Texts) -> None:
        self._loop = asyncio.get_running_loop()
        self._client = Client(server)
        self._server, self._plan, self._texts = server, plan, made
        self._records: list[Record] = []
        self._tally = Tally()
        self._lags = Histogram()
        self._errors: Counter[str] = Counter()
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        self._why = ""
        self._tokens = self._ended = self._unasked = 0
        self._start = 0.0
        self._ending = False

    def stop(self, why: str) -> None:
        """Sends nothing more. Said twice, it also gives up what runs."""
        if self._why:
            self._client.give_up()
        self._why = self._why or why
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def play(self, workload: Iterable[Conversation]) -> Run:
        cpu, began_at = time.process_time(), time.time()
        self._start = time.monotonic()
        tasks: set[asyncio.Task[None]] = set()
        async for number, conversation, request in self._due(workload):
            task = self._loop.create_task(self._converse(number, conversation, request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        sending_s = self._now()
        self._ending = True
        while tasks:
            await asyncio.wait(tasks)
        run = Run(
            self._records,
            sending_s,
            self._now(),
            time.process_time() - cpu,
            self._client.connections,
            self._unasked,
            self._why,
            began_at,
        )
        self._client.close()
        return run

    def snapshot(self) -> Snapshot:
        tally = self._tally
        return Snapshot(
            self._now(),
            len(self._records),
            len(self._records) - self._ended,
            self._ended,
            tally.attained,
            tally.missed,
            tally.uncounted,
            self._tokens,
            dict(self._errors),
            Percentiles.of(tally.ttft),
            Percentiles.of(tally.tpot),
            Percentiles.of(self._lags),
            self._ending,
        )

    def _now(self) -> float:
        return time.monotonic() - self._start

    async def _due(self, workload: Iterable[Conversation]) -> AsyncIterator[tuple[int, Conversation, bytes]]:
        """Each conversation when it is due, with its first request made before."""
        for number, conversation in enumerate(workload):
            request = self._request(conversation, conversation.turns[0], [])
            if await self._stopped_until(conversation.at_s):
                return
            yield number, conversation, request
        # The stretch ends when the workload says, not with its last arrival.
        end_s = self._plan.source.shape.duration_s
        if end_s < float("inf"):
            await self._stopped_until(end_s)

    async def _stopped_until(self, second: float) -> bool:
        """Waits until then; whether the run was stopped. The loop turns in any case: a generator that is
        late must go on hearing."""
        await asyncio.wait([self._stopped], timeout=max(0.0, second - self._now()))
        return self._stopped.done()

    def _request(self, conversation: Conversation, turn: Turn, history: list[tuple[str, str]]) -> bytes:
        said = _said(self._server, self._texts.pieces(turn.adds), history)
        body = body_of(self._server, turn.output_tokens, self._plan.ignore_eos) | said
        return self._client.request(body, conversation.service_class)

    async def _converse(self, number: int, conversation: Conversation, request: bytes) -> None:
        history: list[tuple[str, str]] = []
        due_s = conversation.at_s
        for place, turn in enumerate(conversation.turns):
            if place:
                due_s = self._now() + turn.think_s
                if due_s <= self._plan.source.shape.duration_s:
                    await self._stopped_until(due_s)
                if self._stopped.done() or due_s > self._plan.source.shape.duration_s:
                    self._unasked += len(conversation.turns) - place
                    return
                request = self._request(conversation, turn, history)
            record = Record(
                number, place, conversation.service_class, due_s,
                conversation.prompt_tokens(place), turn.output_tokens,
            )  # fmt: skip
            self._records.append(record)
            heard = await self._client.stream(request)
            self._note(record, heard)
            if heard.end is not End.FINISHED:
                self._unasked += len(conversation.turns) - place - 1
                return
            answer = "".join(heard.text) if self._plan.answers_in_history else ""
            history.append((self._texts.pieces(turn.adds), answer))

    def _note(self, record: Record, heard: Heard) -> None:
        sent_at, usage = heard.sent_at, heard.usage
        record.sent_s = sent_at - self._start
        times = [at - sent_at for at in heard.token_times()]
        record.outcome = Outcome(heard.end, heard.ended_at - sent_at, times)
        record.failure, record.request_id, record.retried = heard.failure, heard.request_id, heard.retried
        if usage is not None:
            record.prompt_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens
            details = usage.prompt_tokens_details
            record.cached_tokens = details.cached_tokens if details is not None else None
        self._ended += 1
        self._tokens += len(times)
        self._lags.add(max(0.0, record.lag_s))
        if heard.failure is not None:
            self._errors[heard.failure.kind] += 1
        if record.due_s < self._plan.warm_up_s:
            return
        self._tally.add(record.outcome, attains(record.outcome, self._plan.of(record.service_class)))
        limit = self._plan.misses_limit
        if limit is not None and self._tally.missed > limit:
            self.stop(f"more than {limit} requests have missed their objectives")
            self._client.give_up()


def in_process(
    server: Server, plan: Plan, words: Vocabulary = _PLAIN, watch: Callable[[Snapshot], None] | None = None
) -> Run:
    """Plays it in a process of its own, which draws nothing and writes nothing meanwhile.

    `watch` gets a snapshot four times a second. An interrupt ends the run with what there is, a second one
    gives up what still runs.
    """
    context = multiprocessing.get_context("spawn")
    # Two pipes: a loop that watches one makes it non-blocking, and records are sent at once.
    said_here, saying = context.Pipe(duplex=False)
    asked, asking = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(asked, saying, server, plan, words), daemon=True)
    usual = signal.getsignal(signal.SIGINT)
    with contextlib.suppress(ValueError):  # Not in the main thread: then nobody can interrupt.
        signal.signal(signal.SIGINT, lambda *_: asking.send("interrupted"))
    # A terminal's interrupt goes to both processes. That one is born with it blocked, for it may come while
    # it imports; we are told as soon as it is there.
    resource_tracker.ensure_running()  # It would undo the mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    saying.close()
    asked.close()
    try:
        while True:
            try:
                said = said_here.recv()
            except EOFError:
                process.join()
                raise Internal(
                    f"the process of the load generator ended with code {process.exitcode}"
                ) from None
            if isinstance(said, Run):
                return said
            if isinstance(said, Exception):
                raise said
            if watch is not None:
                watch(said)
    finally:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, usual)
        asking.close()
        said_here.close()
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def _child(asked: Connection, saying: Connection, server: Server, plan: Plan, words: Vocabulary) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Each running request is a connection.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        saying.send(uvloop.run(_run(asked, saying, server, plan, words)))
    except FleetError as error:
        saying.send(error)
    except ValueError as error:
        saying.send(BadRequest(str(error)))


async def _run(asked: Connection, saying: Connection, server: Server, plan: Plan, words: Vocabulary) -> Run:
    player = Player(server, plan, Texts(words))
    loop = asyncio.get_running_loop()

    def asked_to_stop() -> None:
        try:
            player.stop(str(asked.recv()))
        except (EOFError, OSError):
            loop.remove_reader(asked.fileno())
            player.stop("nobody waits for it any more")
            player.stop("")

    async def tell() -> None:
        while True:
            await asyncio.sleep(0.25)
            saying.send(player.snapshot())

    loop.add_reader(asked.fileno(), asked_to_stop)
    telling = asyncio.create_task(tell())
    # A collection of all that the imports made would take longer than a token.
    gc.collect()
    gc.freeze()
    try:
        source = plan.source
        return await player.play(source.conversations(trace_lines(source.trace) if source.trace else ()))
    finally:
        loop.remove_reader(asked.fileno())
        telling.cancel()
