"""/v1/chat/completions: what it accepts, what it refuses and how it says so."""

from __future__ import annotations

import asyncio
import csv
import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

HISTORIES = list(
    csv.DictReader(Path(__file__).with_name("histories.csv").read_text("utf-8").splitlines(keepends=True))
)


def turns_of(prompt: str) -> str:
    """The test model's template, undone."""
    assert prompt.endswith("<|im_start|>assistant\n")
    turns = prompt.removesuffix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    parts = [turn.removeprefix("<|im_start|>") for turn in turns.split("<|im_end|>\n")]
    return "|".join(part.replace("\n", ":", 1).replace("\n", "~") for part in parts)


def test_histories(serve: Any, says: Any, text: Any, model: str) -> None:
    async def main() -> None:
        async with serve(says("ok")) as site:
            for row in HISTORIES:
                body = {"model": model, "messages": json.loads(row["messages"])}
                response = await site.client.post("/v1/chat/completions", json=body)
                assert response.status_code == int(row["status"]), (row["name"], response.text)
                if response.status_code == 200:
                    prompt = site.spine.runs[-1].request.prompt
                    assert turns_of(text.decode(prompt, skip_special=False)) == row["prompt"], row["name"]
                else:
                    error = response.json()["error"]
                    assert error["param"] == row["param"], (row["name"], error)
                    assert row["param"] in error["message"]

    asyncio.run(main())


def test_the_answer_as_the_official_client_reads_it(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("Hello there")) as site:
            body = (await site.chat()).json()
            answer = ChatCompletion.model_validate(body)
            assert answer.choices[0].message.content == "Hello there"
            assert answer.choices[0].finish_reason == "stop"
            assert answer.usage is not None
            request = site.spine.runs[0].request
            assert answer.usage.prompt_tokens == len(request.prompt)
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == len(request.prompt) // 2

    asyncio.run(main())


def test_fields_reach_the_fleet(serve: Any, says: Any) -> None:
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -3,
        "presence_penalty": 1,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100, "6": 1.5},
        "stop_token_ids": [9, 1],
        "max_completion_tokens": 12,
        "min_tokens": 2,
        "logprobs": True,
        "top_logprobs": 3,
    }

    async def main() -> None:
        async with serve(says("Hello there")) as site:
            assert (await site.chat(**fields)).status_code == 200
            sampling = site.spine.runs[0].request.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
                0.0,
                0.5,
                7,
                0.1,
            )
            assert sampling.seed == 2**63 - 3
            assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -0.5)
            assert sampling.repetition_penalty == 1.1
            assert sampling.logit_bias == ((5, -100.0), (6, 1.5))
            assert sampling.stop_token_ids == (1, 9)
            assert (sampling.max_tokens, sampling.min_tokens, sampling.logprobs) == (12, 2, 3)
            assert (await site.chat(ignore_eos=True, top_k=-1)).status_code == 200
            sampling = site.spine.runs[1].request.sampling
            assert (sampling.ignore_eos, sampling.stop_token_ids, sampling.top_k) == (True, (), 0)
            assert sampling.max_tokens == 256 - len(site.spine.runs[1].request.prompt)
            nulls = dict.fromkeys([*fields, "stop", "n", "stream", "stream_options", "user", "tools"])
            assert (await site.chat(**nulls)).status_code == 200

    asyncio.run(main())


def test_seeds_are_drawn_and_follow_one_another(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("Hi")) as site:
            body = (await site.chat(n=3, seed=10)).json()
            assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
            assert [run.request.sampling.seed for run in site.spine.runs] == [10, 11, 12]
            prompt = len(site.spine.runs[0].request.prompt)
            assert body["usage"]["prompt_tokens"] == prompt
            await site.chat()
            await site.chat()
            first, second = (run.request.sampling.seed for run in site.spine.runs[-2:])
            assert first != second
            assert len({run.request.id for run in site.spine.runs}) == len(site.spine.runs)

    asyncio.run(main())


def test_several_streamed_answers_each_have_their_own_frames(serve: Any, text: Any, events: Any) -> None:
    answers = ["Hello there", "the quick brown fox", "lazy dog"]

    async def main() -> None:
        async with serve(lambda request: [*text._encode(answers[request.sampling.seed], False), 1]) as site:
            chunks = events((await site.chat(n=3, seed=0, stream=True)).text)
            assert chunks.pop() == "[DONE]"
            for index, answer in enumerate(answers):
                mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
                assert mine[0]["delta"]["role"] == "assistant"
                assert "".join(c["delta"].get("content", "") for c in mine) == answer
                assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
            assert len({chunk["id"] for chunk in chunks}) == 1

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(serve: Any, says: Any, events: Any, stream: bool) -> None:
    async def main() -> None:
        async with serve(says("Hello there, the quick brown fox")) as site:
            options = {"include_usage": True} if stream else None
            response = await site.chat(stop=["the quick", "never"], stream=stream, stream_options=options)
            if stream:
                *chunks, last, done = events(response.text)
                assert done == "[DONE]"
                content = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
                finish, usage = chunks[-1]["choices"][0]["finish_reason"], last["usage"]
            else:
                body = response.json()
                content = body["choices"][0]["message"]["content"]
                finish, usage = body["choices"][0]["finish_reason"], body["usage"]
            assert content == "Hello there, "
            assert finish == "stop"
            run = site.spine.runs[0]
            assert run.reasons[0] == "stop_string"
            drawn = len(site.ingress.models["tiny/model-1"]._encode("Hello there, the quick", False))
            assert usage["completion_tokens"] == drawn
            assert usage["prompt_tokens_details"]["cached_tokens"] == len(run.request.prompt) // 2

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ],
)
def test_logprobs(serve: Any, says: Any, events: Any, stream: bool, asked: Any, shown: int | None) -> None:
    answer = "Hello 😀 there"

    async def main() -> None:
        async with serve(says(answer)) as site:
            response = await site.chat(stream=stream, **asked)
            if stream:
                chunks = events(response.text)[:-1]
                parts = [ChatCompletionChunk.model_validate(chunk).choices[0].logprobs for chunk in chunks]
            else:
                parts = [ChatCompletion.model_validate(response.json()).choices[0].logprobs]
            entries = [entry for part in parts if part for entry in part.content or []]
            if shown is None:
                assert not any(parts)
                return
            assert bytes(byte for entry in entries for byte in entry.bytes or []).decode() == answer
            assert all(len(entry.top_logprobs) == shown for entry in entries)
            assert {entry.logprob for entry in entries} == {-0.5}

    asyncio.run(main())


REFUSED = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": None}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": 1}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "bogus"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "text"}, "response_format"),
    ({"chat_template": "{% for a in range(10**5) %}{% endfor %}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"n": 0}, "n"),
    ({"n": 1_000_000}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"n": 10**30}, "n"),
    ({"max_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": "x"}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": "x" * 513}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [400_000]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
    ({"model": None}, "model"),
]


def test_what_changes_the_answer_and_cannot_be_done_is_refused(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok")) as site:
            for fields, param in REFUSED:
                response = await site.chat(**fields)
                assert response.status_code == 400, (fields, response.text)
                error = response.json()["error"]
                assert (error["type"], error["param"]) == ("invalid_request_error", param), (fields, error)
                assert param.split("[")[0].split(".")[-1] in error["message"]
            assert not site.spine.runs
            assert (await site.chat()).status_code == 200

    asyncio.run(main())


def test_limits_are_named_when_they_refuse(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok"), max_messages=2) as site:
            turn = {"role": "user", "content": "x"}
            for fields, setting in (
                ({"messages": [turn] * 3}, "http.max_messages"),
                ({"n": 129}, "http.max_sequences"),
                ({"stop": ["a"] * 5}, "http.max_stops"),
                ({"stop": "x" * 513}, "http.max_stop_characters"),
                ({"stop_token_ids": [1] * 129}, "http.max_stop_token_ids"),
                ({"logit_bias": {str(n): 1 for n in range(1025)}}, "http.max_logit_bias"),
                ({"logprobs": True, "top_logprobs": 21}, "http.max_logprobs"),
            ):
                assert setting in (await site.chat(**fields)).json()["error"]["message"]

    asyncio.run(main())


def test_harmless_and_internal_fields_change_nothing(serve: Any, says: Any) -> None:
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "best_of": 1,
        "add_generation_prompt": True,
        "never_heard_of": [{"x": None}],
        "kv_transfer_params": {"tp_size": 10**9, "remote_host": "10.0.0.1", "remote_port": 1},
        "worker_id": "prefill-1",
        "salt": "x",
        "cache_salt": "x",
        "request_id": "same",
        "priority": 99,
    }

    async def main() -> None:
        async with serve(says("ok")) as site:
            assert (await site.chat()).status_code == 200
            assert (await site.chat(**fields)).status_code == 200
            plain, full = (run.request for run in site.spine.runs)
            assert (full.prompt, full.salt, full.priority) == (plain.prompt, "", 0)
            assert full.id != "same"

    asyncio.run(main())


def test_a_prompt_beyond_the_context(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok"), context=64) as site:
            for content in ("ä" * 300, "x" * 100_000):
                response = await site.chat(messages=[{"role": "user", "content": content}])
                assert response.status_code == 400
                error = response.json()["error"]
                assert error["code"] == "context_length_exceeded"
                assert error["param"] == "messages"
            # The fleet's workers hold less than the model could.
            response = await site.chat(max_tokens=64)
            assert response.json()["error"]["code"] == "context_length_exceeded"
            assert "at most" in response.json()["error"]["message"]

    asyncio.run(main())


def test_an_unknown_model(serve: Any, says: Any, model: str) -> None:
    names = ["gpt-9", "../../etc/passwd", "/etc/passwd", "", "x" * 10_000, "a\u0000b", model.upper()]

    async def main() -> None:
        async with serve(says("ok")) as site:
            for name in names:
                response = await site.chat(model=name)
                assert response.status_code == 404
                assert response.json()["error"]["code"] == "model_not_found"
                assert response.json()["error"]["param"] == "model"
                assert len(response.text) < 500

    asyncio.run(main())


def test_request_ids(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok")) as site:

            async def ask(id: bytes) -> str:
                response = await site.client.post(
                    "/v1/chat/completions",
                    json={"model": "tiny/model-1", "messages": [{"role": "user", "content": "x"}]},
                    headers={"x-request-id": id},
                )
                assert response.status_code == 200
                assert response.json()["choices"][0]["message"]["content"] == "ok"
                return str(response.headers["x-request-id"])

            assert set(await asyncio.gather(*(ask(b"mine-1") for _ in range(10)))) == {"mine-1"}
            assert len({run.request.id for run in site.spine.runs}) == 10
            for odd in (b"a" * 129, b"a b", b"a\tb", "é".encode(), b""):
                assert len(await ask(odd)) == 24
            plain = await site.chat()
            assert plain.json()["id"].startswith("chatcmpl-")
            assert (await site.client.get("/health")).headers["x-request-id"]

    asyncio.run(main())
