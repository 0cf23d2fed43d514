"""The official clients against a real fleet with the demo model: nothing they can notice."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

pytestmark = [pytest.mark.live, pytest.mark.model]

MESSAGES: Any = [{"role": "user", "content": "Name a colour."}]
LONG: Any = [{"role": "user", "content": "Repeat after me: " + "one two three four. " * 12}]
"""More than a decode worker computes for itself: prefilled elsewhere."""
GREEDY: Any = {"temperature": 0, "max_tokens": 8}


@pytest.fixture
def api(demo_fleet: dict[str, Any]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo_fleet["url"], api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def model(demo_fleet: dict[str, Any]) -> str:
    return str(demo_fleet["model"])


def exactly(kind: type[BaseModel], data: Any) -> Any:
    """`data` as the client's type, of exactly its types, and nothing in it that the type does not know."""
    found = kind.model_validate_json(json.dumps(data), strict=True)

    def look(value: Any, where: str) -> None:
        if isinstance(value, BaseModel):
            assert not value.model_extra, (where, value.model_extra)
            for name in type(value).model_fields:
                look(getattr(value, name), f"{where}.{name}")
        elif isinstance(value, list):
            for at, item in enumerate(value):
                look(item, f"{where}[{at}]")

    look(found, kind.__name__)
    return found


@pytest.mark.parametrize("messages", [MESSAGES, LONG], ids=["short", "long"])
def test_chat_whole_and_streamed(api: openai.OpenAI, model: str, messages: Any) -> None:
    whole = api.chat.completions.create(model=model, messages=messages, **GREEDY)
    assert whole.usage is not None
    assert 1 <= whole.usage.completion_tokens <= 8
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    text, usages, finishes = "", [], []
    for chunk in api.chat.completions.create(
        model=model, messages=messages, stream=True, stream_options={"include_usage": True}, **GREEDY
    ):
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finishes += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert finishes == [whole.choices[0].finish_reason]
    assert [usage.total_tokens for usage in usages] == [whole.usage.total_tokens]
    with api.chat.completions.stream(model=model, messages=messages, **GREEDY) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == text


def test_completions_whole_and_streamed(api: openai.OpenAI, model: str) -> None:
    prompts = ["The sky is", "Two and two are"]
    whole = api.completions.create(model=model, prompt=prompts, n=2, **GREEDY)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    # Greedy: both answers to a prompt are the same.
    assert whole.choices[0].text == whole.choices[1].text != whole.choices[2].text
    texts = ["", "", "", ""]
    for chunk in api.completions.create(model=model, prompt=prompts, n=2, stream=True, **GREEDY):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_logprobs_in_both_layouts(api: openai.OpenAI, model: str) -> None:
    chat = api.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY
    )
    logged = chat.choices[0].logprobs
    assert logged is not None
    assert logged.content is not None
    joined = bytes(byte for entry in logged.content for byte in entry.bytes or []).decode()
    assert joined == chat.choices[0].message.content
    for entry in logged.content:
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
    # The prompt's own, with the answer's, are those of a longer prompt.
    once = api.completions.create(
        model=model, prompt="The sky is blue and", echo=True, logprobs=2, temperature=0, max_tokens=4
    )
    log = once.choices[0].logprobs
    assert log is not None
    again = api.completions.create(
        model=model, prompt=once.choices[0].text, echo=True, logprobs=2, max_tokens=0
    )
    more = again.choices[0].logprobs
    assert more is not None
    assert again.choices[0].text == once.choices[0].text
    assert again.choices[0].finish_reason == "length"
    assert more.tokens == log.tokens
    assert more.text_offset == log.text_offset
    assert log.token_logprobs is not None
    assert more.token_logprobs is not None
    assert log.token_logprobs[0] is more.token_logprobs[0] is None
    for one, other in zip(log.token_logprobs[1:], more.token_logprobs[1:], strict=True):
        assert math.isclose(one, other, abs_tol=0.02)


def test_what_a_request_can_ask_of_sampling(api: openai.OpenAI, model: str) -> None:
    """One batch of all of it, beside plain requests whose text must not change."""
    prompt = "The three best fruits are"

    def ask(**fields: Any) -> Completion:
        extra = {
            name: fields.pop(name)
            for name in ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids")
            if name in fields
        }
        return api.completions.create(
            **{"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields},
            extra_body=extra,
        )

    plain = ask(logprobs=1)
    logged = plain.choices[0].logprobs
    assert logged is not None
    said, tokens = plain.choices[0].text, logged.tokens
    assert tokens is not None
    scored = api.completions.create(
        model=model, prompt=prompt + said, max_tokens=1, extra_body={"prompt_logprobs": 0}
    ).model_dump()["choices"][0]["prompt_logprobs"]
    ids = [int(next(iter(entry))) for entry in scored[-len(tokens) :]]
    warm: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 16}
    ways: list[dict[str, Any]] = [
        {},
        warm,
        warm,
        {**warm, "seed": 6},
        {**warm, "top_k": 1, "max_tokens": 8},
        {**warm, "top_p": 0.00001, "max_tokens": 8},
        {**warm, "min_p": 1.0, "max_tokens": 8},
        {"logit_bias": {str(ids[0]): -100}},
        {"logit_bias": {str(ids[1]): 100}},
        {"stop_token_ids": [ids[3]]},
        {"stop": tokens[3]},
        {"stop": tokens[3], "min_tokens": 6},
        {"repetition_penalty": 2.0, "frequency_penalty": 1.0, "presence_penalty": 1.0, "max_tokens": 16},
        {"n": 3, **warm},
        {"max_tokens": 40, "ignore_eos": True},
        {},
    ]

    async def ask_all() -> list[Completion]:
        return await asyncio.gather(*(asyncio.to_thread(lambda way=way: ask(**way)) for way in ways))

    answers = asyncio.run(ask_all())
    texts = [answer.choices[0].text for answer in answers]
    assert texts[0] == texts[15] == said
    assert texts[1] == texts[2] != texts[3]
    assert texts[4] == texts[5] == texts[6] == said
    assert not texts[7].startswith(tokens[0])
    assert texts[8] == tokens[1] * 8
    before = "".join(tokens[: tokens.index(tokens[3])])
    assert texts[9] == texts[10] == before
    assert answers[9].choices[0].finish_reason == answers[10].choices[0].finish_reason == "stop"
    assert answers[11].usage is not None
    assert answers[11].usage.completion_tokens >= 6
    assert texts[12] != texts[14][: len(texts[12])]
    # The first of n has the seed itself, the others those after it.
    assert [choice.text for choice in answers[13].choices][:2] == [texts[1], texts[3]]
    assert len({choice.text for choice in answers[13].choices}) == 3
    assert answers[14].usage is not None
    assert answers[14].usage.completion_tokens == 40


def test_errors_are_typed(api: openai.OpenAI, model: str) -> None:
    create = api.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-9", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        create(model=model, messages=MESSAGES, top_logprobs=2)
    assert bad.value.param == "top_logprobs"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        create(model=model, messages=[{"role": "user", "content": "word " * 20_000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as method:
        api.get("/chat/completions", cast_to=object)
    assert method.value.status_code == 405
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("gpt-9")
    assert create(model=model, messages=MESSAGES, **GREEDY).choices


def test_headers_and_models(api: openai.OpenAI, model: str) -> None:
    raw = api.chat.completions.with_raw_response.create(
        model=model, messages=MESSAGES, extra_headers={"x-request-id": "mine-1"}, **GREEDY
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["content-type"] == "application/json"
    assert isinstance(raw.parse(), ChatCompletion)
    (entry,) = api.models.list().data
    assert entry.id == model
    assert api.models.retrieve(model).id == model


def test_the_asynchronous_client_leaves_a_stream(demo_fleet: dict[str, Any], model: str) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=demo_fleet["url"], api_key="none", max_retries=0) as client:

            async def leave(number: int) -> None:
                stream = await client.completions.create(
                    model=model, prompt=f"Once {number}", max_tokens=512, stream=True
                )
                async for _ in stream:
                    break
                await stream.close()

            await asyncio.gather(*(leave(number) for number in range(4)))
            answer = await client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
            assert answer.choices[0].message.content

    asyncio.run(main())


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_every_byte_is_what_strict_types_expect(
    demo_fleet: dict[str, Any], route: str, usage: bool, logprobs: bool
) -> None:
    chat = route == "chat/completions"
    body: dict[str, Any] = {"model": demo_fleet["model"], **GREEDY, "n": 2}
    body |= {"messages": MESSAGES} if chat else {"prompt": "The sky is"}
    if logprobs:
        body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    url = f"{demo_fleet['url']}/{route}"
    whole = exactly(ChatCompletion if chat else Completion, httpx.post(url, json=body, timeout=120).json())
    assert len(whole.choices) == 2
    body |= {"stream": True} | ({"stream_options": {"include_usage": True}} if usage else {})
    answer = httpx.post(url, json=body, timeout=120)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        exactly(CompletionUsage, last["usage"])
        assert all(chunk["usage"] is None for chunk in chunks)
    finished = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert set(choice) == {"index", "logprobs", "finish_reason", "delta" if chat else "text"}
        if chat or choice["finish_reason"] is not None:  # the package has no type for pieces of completions
            exactly(ChatCompletionChunk if chat else Completion, chunk)
        if choice["finish_reason"] is not None:
            finished.append(choice["index"])
            assert (choice["delta"] if chat else choice["text"]) in ({}, "")
    assert sorted(finished) == [0, 1]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


def test_the_javascript_client(demo_fleet: dict[str, Any], request: pytest.FixtureRequest) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    source = Path(__file__).parent / "js"
    assert request.config.cache is not None
    folder = request.config.cache.mkdir("javascript-client")
    wanted = (source / "package.json").read_bytes()
    installed = folder / "installed.json"
    if not installed.exists() or installed.read_bytes() != wanted:
        shutil.copy(source / "package.json", folder)
        command = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            pytest.skip(f"npm could not install the client: {done.stderr[-300:]}")
        installed.write_bytes(wanted)
    shutil.copy(source / "client.mjs", folder)
    done = subprocess.run(
        [node, "client.mjs", demo_fleet["url"], demo_fleet["model"]],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "ok"), done.stderr
