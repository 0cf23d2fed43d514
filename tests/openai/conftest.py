"""A fleet in memory that answers by script, and the ingress over it on a real port."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fleet.api_keys import ApiKey
from fleet.errors import FleetError
from fleet.handoff import CancelReason
from fleet.request import FinishReason, Request, TokenLogprobs, Usage
from fleet.stages import Stage, Timeline
from router.openai.asgi import Ingress
from router.openai.server import HttpServer
from router.openai.settings import HttpSettings
from router.run import RunEnd, RunToken, Terms
from router.text.tokenizer import ModelText, TextSettings

MODEL = "tiny/model-1"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Step = int | asyncio.Event | FleetError | Exception | FinishReason
Script = Callable[[Request], Iterable[Step]]
"""What a run does: draw a token, wait for an event, fail, or end. Running out of steps is LENGTH, or STOP
after a stop token."""


class ScriptedRun:
    def __init__(
        self, spine: ScriptedSpine, request: Request, timeline: Timeline, terms: Terms | None
    ) -> None:
        self.request = request
        self.terms = terms
        self.reasons: list[CancelReason] = []
        self.ended = False
        self._spine = spine
        self._timeline = timeline
        self._stop = asyncio.Event()
        self.more = False

    async def __aiter__(self) -> AsyncIterator[RunToken | RunEnd]:
        loop = asyncio.get_running_loop()
        drawn, last = 0, -1
        sampling = self.request.sampling
        try:
            steps = iter(self._spine.script(self.request))
            following = next(steps, None)
            while (step := following) is not None:
                following = next(steps, None)
                self.more = following is None or isinstance(following, int)
                if self._stop.is_set():
                    break
                if isinstance(step, asyncio.Event):
                    waits = [asyncio.create_task(event.wait()) for event in (step, self._stop)]
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    for wait in waits:
                        wait.cancel()
                    await asyncio.gather(*waits, return_exceptions=True)
                elif isinstance(step, FinishReason):
                    yield RunEnd(step, self._usage(drawn))
                    return
                elif isinstance(step, Exception):
                    raise step
                else:
                    self._timeline.mark(Stage.FIRST_TOKEN, loop.time())
                    drawn, last = drawn + 1, step
                    logprobs = None
                    if sampling.logprobs >= 0:
                        top = tuple((n, -1.0 - n) for n in range(sampling.logprobs))
                        logprobs = TokenLogprobs(-0.5, top)
                    yield RunToken(step, logprobs, self._scores() if drawn == 1 else ())
                    if drawn == sampling.max_tokens:
                        break
            if self._stop.is_set():
                finish = FinishReason.CANCELLED
            else:
                finish = FinishReason.STOP if last in sampling.stop_token_ids else FinishReason.LENGTH
            yield RunEnd(finish, self._usage(drawn))
        finally:
            self.ended = True

    def _scores(self) -> tuple[TokenLogprobs, ...]:
        """Of each token of the prompt but the first, another one each."""
        count = self.request.sampling.prompt_logprobs
        if count < 0:
            return ()
        top = tuple((n, -2.0 - n) for n in range(count))
        return tuple(TokenLogprobs(-0.25 * k, top) for k in range(1, len(self.request.prompt)))

    def _usage(self, drawn: int) -> Usage:
        return Usage(len(self.request.prompt), drawn, len(self.request.prompt) // 2)

    async def stop(self, reason: CancelReason, because: FleetError | None = None) -> None:
        self.reasons.append(reason)
        self._stop.set()
        self._spine.stopped.set()


class ScriptedSpine:
    """`router.run.Spine` in memory."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.runs: list[ScriptedRun] = []
        self.not_ready: str | None = None
        self.stopped = asyncio.Event()

    def start(self, request: Request, timeline: Timeline, terms: Terms | None = None) -> ScriptedRun:
        run = ScriptedRun(self, request, timeline, terms)
        self.runs.append(run)
        return run

    def models(self) -> tuple[str, ...]:
        return (MODEL,)

    def ready(self) -> str | None:
        return self.not_ready

    async def idle(self) -> None:
        """Until every run was stopped; each is, last of all, also one that ended by itself."""
        async with asyncio.timeout(20):
            while not all(run.reasons for run in self.runs):
                self.stopped.clear()
                await self.stopped.wait()


@dataclass
class Site:
    """The ingress, listening."""

    ingress: Ingress
    server: HttpServer
    spine: ScriptedSpine
    client: httpx.AsyncClient
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.server.port

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": MODEL, "prompt": "hi", **fields})

    async def raw(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of its own with these bytes sent; closed at the end, if not before."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        writer.write(data)
        return reader, writer

    async def close(self) -> None:
        for writer in self.writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


Serve = Callable[..., AbstractAsyncContextManager[Site]]


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["Hello there, the quick brown fox jumps over the lazy dog. "] * 5, trainer)
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def text(tokenizer_json: str) -> ModelText:
    return make_text(tokenizer_json)


def make_text(tokenizer_json: str) -> ModelText:
    return ModelText(
        tokenizer_json,
        end_tokens=(1,),
        context=256,
        chat_template=TEMPLATE,
        settings=TextSettings(threads=1, inline_characters=512),
    )


@pytest.fixture
def says(text: ModelText) -> Callable[[str], Script]:
    """A script that draws this text's tokens and then the end token."""

    def make(answer: str) -> Script:
        tokens = text._encode(answer, False)
        return lambda request: [*tokens, 1]

    return make


@pytest.fixture
def serve(tokenizer_json: str) -> Serve:
    @asynccontextmanager
    async def start(
        script: Script,
        context: int | None = None,
        keys: Sequence[ApiKey] = (),
        model_text: ModelText | None = None,
        **settings: Any,
    ) -> AsyncIterator[Site]:
        spine = ScriptedSpine(script)
        http = HttpSettings(**{"port": 0, **settings})
        ingress = Ingress(
            spine,
            {MODEL: model_text or make_text(tokenizer_json)},
            http,
            version="1.2.3",
            context=lambda model: context,
            keys=keys,
        )
        server = await HttpServer.start(ingress, http)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as client:
            site = Site(ingress, server, spine, client)
            try:
                yield site
            finally:
                await client.aclose()
                await site.close()
                await server.stop(10)
        await spine.idle()
        assert not ingress.exchanges
        assert ingress.metrics.running == 0

    return start


@pytest.fixture
def events() -> Callable[[str], list[Any]]:
    """The data of server-sent events, as JSON where it is."""

    def parse(body: str) -> list[Any]:
        assert body.endswith("\n\n")
        found = []
        for block in body[:-2].split("\n\n"):
            if block.startswith(":"):
                continue
            assert re.fullmatch(r"data: [^\n]+", block), block
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
        return found

    return parse


@pytest.fixture
def model() -> str:
    return MODEL
